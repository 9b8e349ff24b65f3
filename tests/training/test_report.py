"""The summary of a run, from its rows."""

from __future__ import annotations

import json

import pytest

from mindspeed_llm.training.report import RunReport, markdown, write


def row(step: int, **changes) -> dict:
    values = {
        "step": step,
        "loss": 10.0 / step,
        "tokens": 100 * step,
        "step_time_s": 0.5,
        "all_gather_bytes_forward": 60,
        "all_gather_bytes_backward": 60,
        "all_gather_bytes_forward_quantized": 33,
        "all_gather_bytes_backward_quantized": 33,
        "all_gather_bytes_if_bf16": 2 * (27 + 64),
    }
    return {**values, **changes}


def test_figures():
    rows = [row(step) for step in range(1, 101)]
    report = RunReport.from_rows(rows, evaluation={"loss": 1.5, "bits_per_byte": 0.9}, wall_s=61.0)
    assert (report.steps, report.tokens, report.loss_first, report.loss_last) == (100, 10_000, 10.0, 0.1)
    assert report.tokens_per_second == pytest.approx(200.0)
    assert report.loss_mean_last_50 == pytest.approx(sum(10.0 / step for step in range(51, 101)) / 50)
    assert report.gather_bytes_vs_bf16 == pytest.approx(120 / 182)
    assert report.gather_bytes_vs_bf16_quantized == 33 / 64
    assert (report.eval_loss, report.eval_bits_per_byte, report.wall_s) == (1.5, 0.9, 61.0)


def test_one_process_gathers_nothing_and_nothing_was_held_out():
    gathers = {key: 0 for key in row(1) if key.startswith("all_gather")}
    report = RunReport.from_rows([row(1, **gathers)], evaluation={}, wall_s=1.0)
    assert report.gather_bytes_vs_bf16 is None and report.gather_bytes_vs_bf16_quantized is None
    text = markdown(report, title="t", places={"nowhere": None}, next_command="next")
    assert text.count("not measured") == 4 and "nowhere" not in text


def test_without_quantization_the_ratio_is_one():
    plain = {f"all_gather_bytes_{phase}_quantized": 0 for phase in ("forward", "backward")}
    report = RunReport.from_rows([row(1, **plain, all_gather_bytes_if_bf16=120)], evaluation={}, wall_s=1.0)
    assert report.gather_bytes_vs_bf16 == 1.0 and report.gather_bytes_vs_bf16_quantized is None


def test_files(tmp_path):
    report = RunReport.from_rows([row(1)], evaluation={}, wall_s=1.0)
    write(tmp_path, report, "# text\n")
    found = json.loads((tmp_path / "report.json").read_text())
    fixed = "steps loss_first loss_last eval_loss eval_bits_per_byte tokens_per_second gather_bytes_vs_bf16 wall_s"
    assert set(fixed.split()) <= found.keys() and found["eval_loss"] is None
    assert (tmp_path / "report.md").read_text() == "# text\n"
