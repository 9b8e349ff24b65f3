"""Checkpoints of a sharded model: exact, resharded, whole or absent, and refused where they do not fit."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from fsdp2 import ParallelPlan, parallelize
from fsdp2.errors import ConfigurationError
from mindspeed_llm.models import build_model, initialize_weights
from mindspeed_llm.training import checkpoint
from mindspeed_llm.training.checkpoint import TrainerState
from mindspeed_llm.training.optimizer import build_optimizer, optimizer_tensors
from tests.processes import run_processes

CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}  # fmt: skip
STATE = TrainerState(step=3, tokens=3000, samples=30, loader={"consumed_samples": 30})
CPU = torch.device("cpu")


def sharded(seed: int, config=CONFIG):
    size = dist.get_world_size()
    model = parallelize(build_model(config), ParallelPlan(world_size=size, device_type="cpu", fsdp_size=size))
    initialize_weights(model, seed)
    optimizer = build_optimizer(model, kind="adamw", lr=0.01, weight_decay=0.1, betas=(0.9, 0.95), epsilon=1e-8)
    return model, optimizer


def one_step(model, optimizer) -> None:
    model(torch.arange(16).view(2, 8)).logits.float().square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def full(tensors: dict) -> dict:
    return {name: t.full_tensor().clone() if hasattr(t, "full_tensor") else t.clone() for name, t in tensors.items()}


def everything(model, optimizer) -> dict:
    return full({name: p.detach() for name, p in model.named_parameters()} | optimizer_tensors(optimizer))


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def save_run(root: Path) -> tuple[dict, tuple]:
    torch.manual_seed(dist.get_rank())
    model, optimizer = sharded(1)
    one_step(model, optimizer)
    checkpoint.save(root, model, optimizer, STATE, "training:\n  lr: 0.1\n")
    return everything(model, optimizer), draws()


def load_run(root: Path) -> tuple[dict, tuple, TrainerState]:
    model, optimizer = sharded(2)
    state = checkpoint.load(checkpoint.find_checkpoint("latest", root), model, optimizer, CPU)
    return everything(model, optimizer), draws(), state


def save_and_load(root: Path) -> list:
    return [*save_run(root), *load_run(root)]


def test_round_trip_on_2_processes_and_reshard_to_1(tmp_path):
    ranks = run_processes(save_and_load, 2, tmp_path)
    for saved, saved_draws, loaded, loaded_draws, state in ranks:
        assert saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)
        assert saved_draws == loaded_draws
        known = {"saved_at": state.saved_at, "files": state.files, "format_version": 2}
        assert state == replace(STATE, world_size=2, **known)
    assert ranks[0][1] != ranks[1][1]  # each rank has random generators of its own
    ((on_1, _, _),) = run_processes(load_run, 1, tmp_path)
    assert all(torch.equal(ranks[0][0][name], on_1[name]) for name in on_1)


def test_limits_leftovers_and_a_repeated_step(tmp_path, one_process):
    model, optimizer = sharded(1)
    one_step(model, optimizer)
    (tmp_path / "writing_step_00000002").mkdir()  # left by a run that was killed
    for step in (1, 2, 3, 3):
        checkpoint.save(tmp_path, model, optimizer, TrainerState(step=step), "", keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]


def test_another_model_is_refused_by_tensor(tmp_path, one_process):
    save_run(tmp_path)
    model, optimizer = sharded(1, {**CONFIG, "hidden_size": 64})
    with pytest.raises(ConfigurationError) as error:
        checkpoint.load(tmp_path / "step_00000003", model, optimizer, CPU)
    message = str(error.value)
    assert "is not a checkpoint of this model" in message and "[64, 32] there and [64, 64] here" in message


def test_only_plain_tensors_are_stored(tmp_path, one_process):
    """What is in the files can be read by any torch, without our code and without unpickling objects."""
    save_run(tmp_path)
    metadata = torch.distributed.checkpoint.FileSystemReader(tmp_path / "step_00000003").read_metadata()
    kinds = {type(entry).__name__ for entry in metadata.state_dict_metadata.values()}
    assert kinds == {"TensorStorageMetadata"}
    embedding = metadata.state_dict_metadata["model.model.embed_tokens.weight"]
    assert embedding.properties.dtype == torch.float32


def folder_of(root: Path, *steps: int) -> Path:
    for step in steps:
        checkpoint.step_folder(root, step).mkdir(parents=True)
        state = json.dumps({"step": step, "saved_at": 1e9})
        (checkpoint.step_folder(root, step) / checkpoint.STATE_FILE).write_text(state)
        (checkpoint.step_folder(root, step) / ".metadata").write_bytes(b"")
    return root


def test_find(tmp_path):
    root = folder_of(tmp_path / "checkpoints", 100, 20, 100_000_000)
    (root / "step_00000300").mkdir()  # not complete
    newest = root / "step_100000000"
    assert checkpoint.find_checkpoint(None, root) is None
    for wish in ("latest", "auto", str(root), str(tmp_path), str(newest)):
        assert checkpoint.find_checkpoint(wish, root) == newest
    assert checkpoint.find_checkpoint("auto", tmp_path / "none") is None
    for wish in ("latest", "latests", str(root / "step_00000300")):
        with pytest.raises(ConfigurationError, match=r"--training\.resume_from_checkpoint"):
            checkpoint.find_checkpoint(wish, tmp_path / "none")


def test_latest_is_the_last_one_saved_not_an_earlier_runs_last_step(tmp_path, one_process):
    folder_of(tmp_path, 100, 200, 300)
    model, optimizer = sharded(1)
    one_step(model, optimizer)
    new = checkpoint.save(tmp_path, model, optimizer, TrainerState(step=150), "", keep=3)
    assert checkpoint.find_checkpoint("latest", tmp_path) == new
    assert {path.name for path in checkpoint.complete_checkpoints(tmp_path)} == {
        "step_00000150", "step_00000200", "step_00000300"
    }  # fmt: skip


def test_changed_settings(tmp_path):
    (tmp_path / "config.yaml").write_text("training:\n  lr: 0.1\n  output_dir: a\nmodel:\n  x: 1\n")
    now = "training:\n  lr: 0.2\n  output_dir: b\nmodel:\n  x: 1\n  y: null\n"
    assert checkpoint.changed_settings(tmp_path, now) == ["training.lr: 0.1 -> 0.2"]
    assert json.loads(json.dumps(STATE.__dict__)) == STATE.__dict__
