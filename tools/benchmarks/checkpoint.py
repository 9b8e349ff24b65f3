"""How fast checkpoints are saved and loaded next to plain torch.save / torch.load, and what an async save costs a step.

One process, a state of about --megabytes MB: a model's masters and two AdamW moments. In every round torch.save (with
fsync, as a checkpoint has) and a checkpoint take turns on the same disk, and medians are compared. For the stall,
training steps of GEMMs run alone, then with a save in the background at the first of them; what all steps of the save
lose together is compared with a blocking save.

    python tools/benchmarks/checkpoint.py --json FILE [--megabytes 500] [--folder FOLDER]

writes save_vs_torch and load_vs_torch (ratios of rates, larger is better), async_stall (the time that start() holds up
the step, as a share of a blocking save; smaller is better), async_slowdown (all that the steps lose until the save is
on disk, as the same share; it counts the cores that writing takes away), and the seconds behind them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fsdp2 import ParallelPlan, parallelize
from mindspeed_llm.models import build_model, initialize_weights
from mindspeed_llm.training import checkpoint
from mindspeed_llm.training.background_save import BackgroundSaves
from mindspeed_llm.training.checkpoint import TrainerState
from mindspeed_llm.training.distributed import Launch, start, stop
from mindspeed_llm.training.optimizer import allocate_state, build_optimizer


def build(megabytes: int):
    """A sharded model and its AdamW, fp32, together about `megabytes` MB (12 bytes a parameter)."""
    hidden, layers = 512, 4
    layer = 4 * hidden * hidden + 3 * hidden * 4 * hidden
    vocabulary = max(1024, (megabytes * 1_000_000 // 12 - layers * layer) // (2 * hidden))
    model = parallelize(
        build_model(
            {
                "model_type": "qwen3", "vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers,
                "intermediate_size": 4 * hidden, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64,
            }
        ),
        ParallelPlan(world_size=1, device_type="cpu", fsdp_size=1),
    )  # fmt: skip
    initialize_weights(model, 0)
    optimizer = build_optimizer(model, kind="adamw", lr=0.0, weight_decay=0.0, betas=(0.9, 0.95), epsilon=1e-8)
    allocate_state(optimizer)
    return model, optimizer


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def torch_save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def measure_stall(folder: Path, model, optimizer, blocking_s: float) -> dict[str, float]:
    """What a save in the background takes from the steps around it."""
    operand = torch.randn(768, 768)
    saves = BackgroundSaves(folder / "async", keep=1)
    tensors = checkpoint.run_tensors(model, optimizer)

    def step() -> None:
        for _ in range(8):
            operand @ operand

    def begin(number: int) -> None:
        saves.start(tensors, TrainerState(step=number), "")

    begin(1)  # makes the buffers that later saves use again
    saves.wait()
    alone = statistics.median(seconds(step) for _ in range(30))
    starts, losses = [], []
    for number in (2, 3, 4):
        starts.append(seconds(lambda number=number: begin(number)))
        lost = starts[-1]
        while saves.is_writing:
            lost += max(0.0, seconds(step) - alone)
        losses.append(lost)
    saves.close()
    start_s, lost_s = statistics.median(starts), statistics.median(losses)
    return {
        "async_stall": start_s / blocking_s,
        "async_slowdown": lost_s / blocking_s,
        "async_start_s": start_s,
        "async_steps_lost_s": lost_s,
    }


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", required=True, metavar="FILE")
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="where to write; default: the system's temporary folder")
    options = parser.parse_args(argv)
    device = start(Launch.from_environment(), "cpu")
    model, optimizer = build(options.megabytes)
    tensors = checkpoint.run_tensors(model, optimizer)
    plain = {name: t.to_local() if hasattr(t, "to_local") else t for name, t in tensors.items()}
    plain = {name: torch.empty_like(t).copy_(t) for name, t in plain.items()}
    times: dict[str, list[float]] = {"save": [], "torch_save": [], "load": [], "torch_load": []}
    folder = Path(tempfile.mkdtemp(prefix="checkpoint_benchmark_", dir=options.folder))
    try:
        for number in range(1, options.rounds + 1):
            state = TrainerState(step=number)
            times["torch_save"].append(seconds(lambda: torch_save(plain, folder / "plain.pt")))
            times["save"].append(
                seconds(lambda state=state: checkpoint.save(folder, model, optimizer, state, ""))
            )
            saved = checkpoint.find_checkpoint("latest", folder)
            times["torch_load"].append(seconds(lambda: torch.load(folder / "plain.pt", weights_only=True)))
            times["load"].append(seconds(lambda saved=saved: checkpoint.load(saved, model, optimizer, device)))
            shutil.rmtree(saved)  # by itself: torch.save's file is written over
        medians = {f"{name}_s": statistics.median(values) for name, values in times.items()}
        result = {
            "save_vs_torch": medians["torch_save_s"] / medians["save_s"],
            "load_vs_torch": medians["torch_load_s"] / medians["load_s"],
            **measure_stall(folder, model, optimizer, medians["save_s"]),
            "megabytes": checkpoint.state_bytes(tensors) / 1e6,
            **medians,
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        stop()
    Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    for name, value in result.items():
        print(f"{name:>20} {value:10.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
