"""Runs that several tests look at, each made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.tiny import QUANTIZED, SEQUENCES_PER_STEP, Material, make_material, run_jobs


def one_by_one(processes: int) -> tuple:
    """Micro-batches of one sequence on every number of processes, so that all multiply the same matrices; 8 steps."""
    words = {
        "--training.per_device_train_batch_size": 1,
        "--training.gradient_accumulation_steps": SEQUENCES_PER_STEP // processes,
        "--training.router_aux_loss_coef": 0,  # its shares are those of all processes' present micro-batches
        "--training.max_steps": 8,
        "--training.save_hf_weights": False,
    }
    return (*QUANTIZED, *(word for pair in words.items() for word in pair))


@pytest.fixture(scope="session")
def material(tmp_path_factory) -> Material:
    return make_material(tmp_path_factory.mktemp("material") / "tiny")


@pytest.fixture(scope="session")
def runs_on_2(material, tmp_path_factory) -> Path:
    """Folder of runs of 20 steps on 2 processes: mx (saved at 10), bf16, after, recompute, all; and resumed, which goes
    on from mx's checkpoint."""
    folder = tmp_path_factory.mktemp("on_2")
    late = "--model.enable_fsdp_low_precision_all_gather"
    variants = {
        "mx": (*QUANTIZED, "--training.save_steps", "10"),
        "bf16": (),
        "after": (*QUANTIZED, late, "False"),
        "recompute": (*QUANTIZED, "--parallel.recompute"),
        "one_by_one": one_by_one(2),
        "all": (*QUANTIZED, "--model.fsdp_low_precision_all_gather_mode", "all"),
        "resumed": (
            *QUANTIZED,
            *("--training.save_steps", "10"),
            *("--training.resume_from_checkpoint", folder / "mx" / "checkpoints" / "step_00000010"),
        ),
    }
    jobs = [material.arguments(folder / name, processes=2, extra=extra) for name, extra in variants.items()]
    (folder / "console.txt").write_text(run_jobs(folder, 2, jobs))
    return folder


@pytest.fixture(scope="session")
def runs_on_1(material, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("on_1")
    jobs = [
        material.arguments(folder / "mx", processes=1, extra=QUANTIZED),
        material.arguments(folder / "one_by_one", processes=1, extra=one_by_one(1)),
    ]
    run_jobs(folder, 1, jobs)
    return folder


@pytest.fixture(scope="session")
def runs_on_4(material, runs_on_2, tmp_path_factory) -> Path:
    """mx: from the start; resumed: from the checkpoint of 2 processes at step 10, sharded over 2 and replicated."""
    folder = tmp_path_factory.mktemp("on_4")
    checkpoint = runs_on_2 / "mx" / "checkpoints" / "step_00000010"
    jobs = [
        material.arguments(folder / "mx", processes=4, extra=QUANTIZED),
        material.arguments(folder / "one_by_one", processes=4, extra=one_by_one(4)),
        material.arguments(
            folder / "resumed",
            processes=4,
            extra=(
                *QUANTIZED,
                *("--training.resume_from_checkpoint", checkpoint),
                *("--parallel.fsdp_size", 2, "--parallel.dp_replicate_size", 2),
            ),
        ),
    ]
    run_jobs(folder, 4, jobs)
    return folder
