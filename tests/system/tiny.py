"""A model, a corpus and jobs so small that a whole training run takes seconds, through the doors of a real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
SEQUENCES_PER_STEP = 8
MICRO_BATCHES = 2  # each process takes two, however many processes there are
SEQUENCE_LENGTH = 64
VOCABULARY = 512
MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
QUANTIZED = (
    "--model.quant_recipe_name", "mxfp8", "--model.quant_converters", "quantize.linear.mx", "quantize.moe.mx",
)  # fmt: skip


@dataclass(frozen=True)
class Material:
    """Paths of the tiny model's config.json, its tokenizer and its tokens."""

    model: Path
    tokenizer: Path
    dataset: Path

    def arguments(self, output_dir: Path, *, processes: int = 1, steps: int = 20, extra: tuple = ()) -> list[str]:
        """Words for train_fsdp2.py: the same global batch on any number of `processes` that divides it."""
        words = {
            "--model.model_name_or_path": self.model,
            "--model.tokenizer_name_or_path": self.tokenizer,
            "--model.train_from_scratch": True,
            "--data.dataset": self.dataset,
            "--data.split": "90,10,0",
            "--data.cutoff_len": SEQUENCE_LENGTH,
            "--parallel.fsdp_size": processes,
            "--training.stage": "pt",
            "--training.output_dir": output_dir,
            "--training.max_steps": steps,
            "--training.per_device_train_batch_size": SEQUENCES_PER_STEP // MICRO_BATCHES // processes,
            "--training.gradient_accumulation_steps": MICRO_BATCHES,
            "--training.lr": 1e-3,
            "--training.router_aux_loss_coef": 0.001,
            "--training.eval_iters": 2,
        }
        return [str(word) for pair in words.items() for word in pair] + [str(word) for word in extra]


def make_material(folder: Path) -> Material:
    """Write the tiny model's configuration, and a tokenizer and tokens from a few files of the standard library."""
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    corpus = folder / "corpus.jsonl"
    library = Path(os.__file__).parent
    files = sorted(library.glob("[a-d]*.py"))
    corpus.write_text("".join(json.dumps({"text": path.read_text(encoding="utf-8")}) + "\n" for path in files))
    tokenizer = folder / "tokenizer"
    words = ["--input", corpus, "--output-folder", tokenizer, "--vocab-size", VOCABULARY]
    run_python("tools/train_tokenizer.py", *words)
    words = ["--input", corpus, "--output-prefix", folder / "tokens", "--tokenizer-name-or-path", tokenizer]
    run_python("tools/preprocess_data.py", *words, "--append-eod")
    return Material(model, tokenizer, folder / "tokens_text_document")


def environment(**extra: object) -> dict[str, str]:
    """This process's environment without a torchrun around it, one thread a process, gloo on loopback."""
    outer = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {key: value for key, value in os.environ.items() if key not in outer}
    return kept | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | {k: str(v) for k, v in extra.items()}


def run_python(*words: object, **kwargs) -> subprocess.CompletedProcess:
    """Run `python words...` in the repository's root and return what it said; a failure raises, with its output."""
    command = [sys.executable, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300, **kwargs)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def run_jobs(folder: Path, processes: int, jobs: list[list[str]]) -> str:
    """Run the jobs in turn on `processes` processes; returns what rank 0 printed. A failure raises, with all output."""
    listing = folder / f"jobs_on_{processes}.json"
    listing.write_text(json.dumps([{"port": free_port(), "argv": argv} for argv in jobs]))
    command = [sys.executable, "tests/system/several_jobs.py", str(listing)]
    ranks = []
    for rank in range(processes):
        env = environment(
            RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=processes, LOCAL_WORLD_SIZE=processes, MASTER_ADDR="127.0.0.1"
        )
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        ranks.append(subprocess.Popen(command, cwd=ROOT, env=env, **pipes))
    try:
        outputs = [process.communicate(timeout=400)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * processes, "\n".join(outputs)
    return outputs[0]


def losses(output_dir: Path) -> list[float]:
    return [row["loss"] for row in rows(output_dir)]


def rows(output_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]
