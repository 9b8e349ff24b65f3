"""Only the chosen steps of the chosen ranks are recorded, and the page shows what their traces hold."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from fsdp2.errors import ConfigurationError
from mindspeed_llm.arguments.training import TrainingArguments
from mindspeed_llm.training.profiler import StepProfiler
from tests.observability.test_compare import WellFormed
from tools.profile_report import find_traces, main, operators, phases, read_trace

CPU = torch.device("cpu")


def settings(folder: Path, **flags) -> TrainingArguments:
    return TrainingArguments(output_dir=str(folder), profile=True, profile_save_path=str(folder / "p"), **flags)


def train(profiler: StepProfiler, steps: int) -> list[int]:
    """`steps` steps of one product each; returns the steps after which traces were written."""
    written = []
    for step in range(steps):
        profiler.before_step(step)
        with profiler.phase("forward"):
            torch.mm(torch.ones(64, 64), torch.ones(64, 64))
        if profiler.after_step(step + 1):
            written.append(step + 1)
    return written


def recorded_products(folder: Path) -> int:
    (path,) = find_traces(folder / "p")
    return sum(span.name == "aten::mm" for span in read_trace(path, folder).spans)


@pytest.mark.parametrize("start, end, steps", [(0, -1, 1), (2, 5, 3), (3, -1, 1)])
def test_chosen_steps_are_recorded(tmp_path, start, end, steps):
    profiler = StepProfiler(settings(tmp_path, profile_step_start=start, profile_step_end=end), 0, CPU)
    assert train(profiler, 8) == [start + steps]
    assert recorded_products(tmp_path) == steps


def test_a_run_that_ends_early_leaves_its_trace(tmp_path):
    profiler = StepProfiler(settings(tmp_path, profile_step_start=1, profile_step_end=9), 0, CPU)
    assert train(profiler, 3) == []
    assert profiler.close() is not None
    assert recorded_products(tmp_path) == 2


def test_other_ranks_record_nothing(tmp_path):
    profiler = StepProfiler(settings(tmp_path, profile_ranks=[1, 2]), 0, CPU)
    assert train(profiler, 3) == []
    assert not (tmp_path / "p").exists()


@pytest.mark.parametrize(
    "flags, word",
    [
        ({"profile_level": "level9"}, "level0"),
        ({"profile_export_type": "txt"}, "text"),
        ({"profile_step_start": 5, "profile_step_end": 5}, "profile_step_end"),
    ],
)
def test_wrong_flags_are_refused(tmp_path, flags, word):
    with pytest.raises(ConfigurationError, match=word):
        StepProfiler(settings(tmp_path, **flags), 0, CPU)


def test_the_page_shows_the_three_views(tmp_path, capsys):
    for rank in (0, 1):
        flags = {"profile_with_memory": True, "profile_record_shapes": True}
        train(StepProfiler(settings(tmp_path, **flags), rank, CPU), 1)
    assert main([str(tmp_path / "p")]) == 0
    text = (tmp_path / "p" / "report.html").read_text()
    page = WellFormed(text)
    assert page.loads == []
    assert page.headings == ["Traces"] + [f"{v}, rank{r}" for r in (0, 1) for v in ("Timeline", "Operators", "Memory")]
    trace = read_trace(find_traces(tmp_path)[0], tmp_path)
    assert [row[:2] for row in phases(trace)] == [["forward", "1"]]
    assert max(a.size for a in trace.allocations) == 64 * 64 * 4
    assert any(a.operator == "aten::empty" for a in trace.allocations)
    assert "aten::mm" in [row[0] for row in operators(trace)]


def test_own_time_leaves_out_what_was_called(tmp_path):
    def event(name: str, begin: float, duration: float, thread: int = 1) -> dict:
        return {"ph": "X", "name": name, "cat": "cpu_op", "pid": 1, "tid": thread, "ts": begin, "dur": duration}

    events = [event("outer", 100, 50), event("inner", 110, 20), event("leaf", 115, 5), event("other", 100, 80, 2)]
    with gzip.open(tmp_path / "rank3.1.pt.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    trace = read_trace(find_traces(tmp_path)[0], tmp_path)
    assert (trace.name, trace.duration) == ("rank3", 80)
    assert {s.name: (s.begin, s.own, s.depth) for s in trace.spans} == {
        "outer": (0, 30, 0), "inner": (10, 15, 1), "leaf": (15, 5, 2), "other": (0, 80, 0),
    }  # fmt: skip


def test_a_folder_without_traces_ends_with_one_message(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    (tmp_path / "broken.pt.trace.json").write_text("{")
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("error: ") == 2
