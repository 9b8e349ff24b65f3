"""The console line that other tools parse, and files that a resumed run continues."""

from __future__ import annotations

import json
import math
import os
import sys
import termios
import time
from datetime import datetime

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mindspeed_llm.training.metrics import MetricsWriter, StepMetrics, console_line, read_metrics

REFERENCE_LINE = (
    "INFO [2026-03-01 08:09:10] >>  iteration        1/    2000 | consumed samples:          8 | "
    "consumed tokens:      32768 | elapsed time per iteration (ms): 10520.60 | learning rate: 9.999994E-06 | "
    "global batch size:     8 | lm loss: 1.304194E+00 | grad norm: 8.515 | max_memory_allocated(GB): 19.07 | "
    "max_memory_reserved(GB): 20.87 |"
)


def step_metrics(step: int, **changes) -> StepMetrics:
    values = {
        "step": step,
        "loss": 1.304194,
        "grad_norm": 8.515,
        "lr": 9.999994e-06,
        "tokens": 32768 * step,
        "samples": 8 * step,
        "tokens_per_second": 3114.7,
        "step_time_s": 10.5206,
        "router_aux_loss": None,
        "memory_peak_bytes": int(19.07 * 2**30),
        "memory_reserved_bytes": int(20.87 * 2**30),
        "communication": {
            "all_gather_bytes_forward": 100,
            "all_gather_bytes_backward": 50,
            "all_gather_bytes_if_bf16": 300,
        },
    }
    return StepMetrics(**{**values, **changes})


def writer(folder, first_step: int) -> MetricsWriter:
    return MetricsWriter(
        folder, folder / "tensorboard", rank=0, first_step=first_step, total_steps=2000, global_batch_size=8
    )


def test_console_line_is_the_reference_stacks_with_ours_behind():
    line = console_line(
        step_metrics(1, router_aux_loss=4.25, evaluation={"loss": 2.0, "bits_per_byte": 0.75}),
        total_steps=2000,
        global_batch_size=8,
        now=datetime(2026, 3, 1, 8, 9, 10),
    )
    assert line.startswith(REFERENCE_LINE)
    assert line.removeprefix(REFERENCE_LINE) == (
        " tokens per second: 3115 | router aux loss: 4.2500 | all-gather sent(MB): 0.00 | vs bf16: 0.500 | "
        "eval loss: 2.0000 | eval bits per byte: 0.7500 |"
    )


def test_rows_hold_the_fixed_keys_and_nan_stays_nan(tmp_path, capsys):
    out = writer(tmp_path, 1)
    out.log(step_metrics(1, grad_norm=math.nan))
    out.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert '"grad_norm": NaN' in line and "router_aux_loss" not in line
    assert math.isnan(json.loads(line)["grad_norm"]) and json.loads(line)["all_gather_bytes_forward"] == 100
    assert "grad norm: nan" in capsys.readouterr().out


def test_a_resumed_run_drops_what_was_written_past_its_checkpoint(tmp_path):
    first = writer(tmp_path, 1)
    for step in range(1, 6):
        first.log(step_metrics(step, loss=float(step)))
    first.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # killed while writing
    time.sleep(1.1)  # TensorBoard reads event files in the order of their names, which hold whole seconds
    second = writer(tmp_path, 4)
    second.log(step_metrics(4, loss=40.0, evaluation={"loss": 7.0}))
    second.close()
    found = read_metrics(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in found] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")][-2:] == [(3, 3.0), (4, 40.0)]
    assert events.Scalars("eval/loss")[0].value == 7.0


def test_a_new_run_starts_a_new_file(tmp_path):
    for _ in range(2):
        out = writer(tmp_path, 1)
        out.log(step_metrics(1))
        out.close()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_a_terminal_gets_a_bar_below_the_lines(tmp_path, monkeypatch):
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (24, 100))
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        out = writer(tmp_path, 11)
        out.advance()
        out.log(step_metrics(11))
        out.close()
    shown = os.read(master, 100_000).decode()
    os.close(master)
    assert "11/2000" in shown and "iteration       11/    2000" in shown


def test_other_ranks_write_nothing(tmp_path, capsys):
    out = MetricsWriter(
        tmp_path, tmp_path / "tensorboard", rank=1, first_step=1, total_steps=1, global_batch_size=1
    )
    out.log(step_metrics(1))
    out.print("text")
    out.advance()
    out.close()
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""
