"""How a run ends when it does not simply finish: a signal, a number that is not finite, a mistake of the user."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import train_fsdp2
from mindspeed_llm.data import IndexedDatasetWriter
from tests.processes import free_port
from tests.system.tiny import MODEL, QUANTIZED, ROOT, environment, rows


def torchrun(processes: int, argv: list[str]) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    return [*launcher, "--master_port", str(free_port()), "train_fsdp2.py", *argv]


def test_sigterm_to_torchrun_saves_once_and_ends(material, tmp_path):
    run = tmp_path / "run"
    argv = material.arguments(run, processes=2, steps=5000, extra=("--training.lr_scheduler_type", "constant"))
    job = subprocess.Popen(torchrun(2, argv), cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 120
        while not (run / "metrics.jsonl").exists() or len(rows(run)) < 3:
            assert job.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        job.send_signal(signal.SIGTERM)
        console, _ = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode != 0  # 0 is for a finished run
    (saved,) = (run / "checkpoints").iterdir()
    last = rows(run)[-1]["step"]
    assert saved.name == f"step_{last:08d}"
    assert json.loads((saved / "trainer_state.json").read_text())["step"] == last
    assert f"SIGTERM: stopped after step {last}" in console and "Traceback" not in console


def test_sigint_status_and_resume_latest(material, tmp_path):
    """One process without torchrun: Ctrl-C ends with 130, and `latest` goes on where it stopped."""
    argv = material.arguments(tmp_path, steps=5000, extra=("--training.resume_from_checkpoint", "auto"))
    command = [sys.executable, "train_fsdp2.py", *argv]
    job = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    try:
        while not (tmp_path / "metrics.jsonl").exists() or len(rows(tmp_path)) < 2:
            assert job.poll() is None
            time.sleep(0.1)
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 130
    stopped = rows(tmp_path)[-1]["step"]
    extra = ("--training.resume_from_checkpoint", "latest", "--training.save_hf_weights", "False")
    argv = material.arguments(tmp_path, steps=stopped + 2, extra=extra)
    done = subprocess.run([sys.executable, "train_fsdp2.py", *argv], cwd=ROOT, env=environment(), capture_output=True)
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(tmp_path)] == list(range(1, stopped + 3))
    assert b"changed since that checkpoint: training.max_steps: 5000" in done.stdout


def test_nonfinite_stops_before_the_step_and_names_the_module(material, runs_on_2, tmp_path):
    start, broken = runs_on_2 / "bf16" / "hf", tmp_path / "broken"
    weights = load_file(start / "model.safetensors")
    weights["model.layers.1.mlp.experts.2.down_proj.weight"][5, 7] = float("nan")
    broken.mkdir()
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    (broken / "config.json").write_text((start / "config.json").read_text())
    extra = ("--model.model_name_or_path", broken, "--model.train_from_scratch", "False", *QUANTIZED)
    command = torchrun(2, material.arguments(tmp_path / "run", processes=2, extra=extra))
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 1
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert "step 1: loss nan" in message and "Stopped before the optimizer step" in message
    assert "the output of model.layers.1.mlp.experts.down_proj" in message
    assert "weights that are not finite: model.layers.1.mlp.experts.down_proj.weight" in message
    assert rows(tmp_path / "run") == [] and not (tmp_path / "run" / "checkpoints").exists()


@pytest.fixture
def refused(material, tmp_path, capsys):
    """Run train_fsdp2 in this process with a mistake, check that it ends with status 2 and return its message."""

    def run(*extra: object, processes: int = 1) -> str:
        argv = material.arguments(tmp_path / "run", processes=processes, extra=extra)
        assert train_fsdp2.main(argv) == 2
        assert not torch.distributed.is_initialized()
        printed = capsys.readouterr()
        assert printed.err.startswith("error: ") and "Traceback" not in printed.err
        return printed.err

    return run


def test_misspelled_flag(refused):
    assert "unknown flag --training.max_step; did you mean '--training.max_steps'?" in refused("--training.max_step", 1)


def test_missing_model(refused, tmp_path):
    assert f"{tmp_path / 'nowhere'}" in refused("--model.model_name_or_path", tmp_path / "nowhere")


def test_missing_data(refused, tmp_path):
    assert f"{tmp_path / 'nothing'}.idx" in refused("--data.dataset", tmp_path / "nothing")


def test_truncated_index(refused, material, tmp_path):
    prefix = tmp_path / "cut"
    prefix.with_suffix(".bin").write_bytes(Path(f"{material.dataset}.bin").read_bytes())
    prefix.with_suffix(".idx").write_bytes(Path(f"{material.dataset}.idx").read_bytes()[:-20])
    message = refused("--data.dataset", prefix)
    assert f"{prefix}.idx" in message and "byte" in message


def test_corpus_shorter_than_one_sequence(refused, tmp_path):
    with IndexedDatasetWriter(tmp_path / "short", "uint16") as writer:
        writer.add_document([1, 2, 3, 4])
    message = refused("--data.dataset", tmp_path / "short", "--data.split", "100,0,0")
    assert "4 tokens" in message and "--data.cutoff_len 64" in message


def test_tokenizer_exceeds_the_model(refused, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**MODEL, "vocab_size": 256}))
    message = refused("--model.model_name_or_path", tmp_path / "config.json")
    assert "512" in message and "256" in message


def test_fsdp_size_that_does_not_fit(refused):
    message = refused("--parallel.fsdp_size", 3)
    assert "--parallel.fsdp_size 3" in message and "--parallel.fsdp_size 1" in message


def test_quantization_pattern_that_matches_nothing(refused):
    message = refused(*QUANTIZED, "--model.quant_apply_modules", "model.layer.{*}")
    assert "model.layer.{*}" in message and "model.layers" in message


def test_resume_without_a_checkpoint(refused):
    assert "holds no complete checkpoint" in refused("--training.resume_from_checkpoint", "latest")


def test_a_mistake_under_torchrun_is_said_once(material, tmp_path):
    argv = material.arguments(tmp_path, processes=2, extra=("--parallel.fsdp_sise", "2"))
    done = subprocess.run(torchrun(2, argv), cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.count("error: unknown flag --parallel.fsdp_sise") == 1


def test_wrong_flags_are_answered_without_torch():
    code = "import sys, train_fsdp2; status = train_fsdp2.main(['--training.lr', 'x']); "
    code += "sys.exit(status + ('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=dict(os.environ), capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ")


def test_dry_run_prints_the_plan_and_stops(material, tmp_path, capsys):
    argv = material.arguments(tmp_path, extra=(*QUANTIZED, "--training.dry_run"))
    assert train_fsdp2.main(argv) == 0
    assert "quantization: mxfp8 in 12 of 15 linear and expert weights" in capsys.readouterr().out
    assert (tmp_path / "quantization_plan.json").exists() and not (tmp_path / "metrics.jsonl").exists()
