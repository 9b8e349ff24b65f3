"""A run through the real entry point: health, profile and MFU come out of it, and its plan named its bytes before."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mindspeed_llm.training.health_log import read_health
from tests.system.tiny import QUANTIZED, make_material, rows, run_jobs, run_python
from tools.advise_precision import main as advise
from tools.profile_report import find_traces, phases, read_trace

STEPS = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, str]:
    """The output folder of a run of four steps on two processes, and what its dry run said."""
    folder = tmp_path_factory.mktemp("observed")
    material = make_material(folder / "material")
    extra = (
        *QUANTIZED,
        *("--training.quant_stats_steps", 2, "--training.save_hf_weights", False, "--data.split", "100,0,0"),
        *("--training.profile", "--training.profile_step_start", 1, "--training.profile_ranks", 1),
        *("--training.profile_save_path", folder / "profile", "--training.peak_tflops", 0.5),
    )
    argv = material.arguments(folder / "run", processes=2, steps=STEPS, extra=extra)
    planned = run_python("train_fsdp2.py", *argv, "--training.dry_run", "--parallel.world_size", 2).stdout
    run_jobs(folder, 2, [argv])
    return folder, planned


def test_the_plan_named_the_bytes_of_the_run(run):
    folder, planned = run
    for row in rows(folder / "run"):
        for label, key in (
            ("all-gather in forward, sent", "all_gather_bytes_forward"),
            ("all-gather in backward, sent", "all_gather_bytes_backward"),
            ("reduce-scatter, sent", "reduce_scatter_bytes"),
        ):
            (quantized,) = re.findall(rf"{label} +([\d,]+) B", planned)
            assert int(quantized.replace(",", "")) == row[key]
    alive = rows(folder / "run")[0]["unsharded_bytes_peak"]
    assert re.search(rf"gathered parameters, peak +{alive / 2**20:,.3f} MiB", planned)


def test_health_of_the_steps_that_were_asked_for(run):
    folder, _ = run
    found = read_health(folder / "run")
    assert {row.step for row in found} == {2, 4}
    modules = {row.module for row in found}
    assert len(modules) == 2 * (4 + 2) and "model.layers.1.mlp.experts.down_proj" in modules
    assert len(found) == 2 * 3 * len(modules)
    assert all(25 < row.sqnr_db < 40 for row in found)
    events = EventAccumulator(str(folder / "run" / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("quant_weight_sqnr_db_worst/self_attn.q_proj")] == [2, 4]
    assert advise([str(folder / "run")]) in (0, 1)


def test_the_chosen_step_of_the_chosen_rank_is_profiled(run):
    folder, _ = run
    (path,) = find_traces(folder / "profile")
    trace = read_trace(path, folder)
    assert trace.name == "rank1"
    counts = {row[0]: int(row[1]) for row in phases(trace)}
    assert (counts["forward"], counts["backward"], counts["optimizer"]) == (2, 2, 1)  # two micro-batches, one step


def test_mfu_is_the_share_of_the_peak(run):
    for row in rows(run[0] / "run"):
        assert row["mfu"] == pytest.approx(row["model_tflops"] / 0.5)
