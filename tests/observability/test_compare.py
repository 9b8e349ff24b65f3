"""Two runs side by side: gaps and figures are those of their metrics, and the page loads nothing from elsewhere."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml
from PIL import Image

from mindspeed_llm.training.metrics import MetricsWriter, StepMetrics
from mindspeed_llm.training.report_page import ticks
from tools.compare_runs import differences, figures, load, main, relative_gap

ROOT = Path(__file__).resolve().parents[2]
VOID = ("meta",)


class WellFormed(HTMLParser):
    """Fails on a tag that is closed out of order; notes what a page would load."""

    def __init__(self, text: str):
        super().__init__()
        self.open_tags: list[str] = []
        self.loads: list[str] = []
        self.headings: list[str] = []
        self.feed(text)
        assert self.open_tags == []

    def handle_starttag(self, tag, attrs):
        self.loads += [f"{tag} {key}={value}" for key, value in attrs if key in ("src", "href")]
        if tag == "script":
            self.loads.append(tag)
        if tag not in VOID:
            self.open_tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag

    def handle_data(self, data):
        if self.open_tags and self.open_tags[-1] == "h2":
            self.headings.append(data)


def make_run(folder: Path, *, factor: float, recipe: str | None, seconds: float) -> Path:
    folder.mkdir(parents=True)
    writer = MetricsWriter(folder, folder / "tb", rank=0, first_step=1, total_steps=60, global_batch_size=8)
    for step in range(1, 61):
        evaluation = {"loss": 2.5 * factor, "bits_per_byte": 1.75 * factor} if step == 60 else {}
        writer.log(
            StepMetrics(
                step=step,
                loss=factor * (9 - step / 10),
                grad_norm=1.0,
                lr=1e-3,
                tokens=2048 * step,
                samples=8 * step,
                tokens_per_second=2048 / seconds,
                step_time_s=seconds,
                router_aux_loss=None,
                memory_peak_bytes=10**9,
                memory_reserved_bytes=10**9,
                communication={
                    "all_gather_bytes_forward": 2_000_000 if recipe is None else 1_031_250,
                    "all_gather_bytes_backward": 2_000_000 if recipe is None else 1_031_250,
                    "all_gather_bytes_if_bf16": 4_000_000,
                    "reduce_scatter_bytes": 3_000_000,
                    "unsharded_bytes_peak": 500_000,
                },
                evaluation=evaluation,
            )
        )
    writer.close()
    tree = {"model": {"quant_recipe_name": recipe}, "training": {"lr": 1e-3, "output_dir": str(folder)}}
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return (
        make_run(folder / "bf16", factor=1.0, recipe=None, seconds=0.5),
        make_run(folder / "mx<fp8>", factor=1.01, recipe="mxfp8", seconds=0.25),
    )


def test_figures_are_those_of_the_metrics(runs):
    base, other = map(load, runs)
    assert relative_gap(other, base) == [(step, pytest.approx(0.01)) for step in range(1, 61)]
    row = figures(other, base)
    assert (row["gap"], row["tokens/s"], row["step, ms"]) == ("+1.000%", "8,192", "250.0")
    assert (row["gathered, MB a step"], row["reduced, MB a step"]) == ("2.062", "3.000")
    assert row["bits per byte"] == "1.7675"
    assert differences([base, other]) == [["model.quant_recipe_name", "None", "mxfp8"]]


def test_report_is_whole_and_loads_nothing(runs, tmp_path):
    output = tmp_path / "out" / "report.html"
    command = [sys.executable, "tools/compare_runs.py", *map(str, runs), "-o", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = WellFormed(output.read_text())
    assert page.loads == []
    assert page.headings[:2] == ["Figures", "Loss against the first run"]
    assert "mx&lt;fp8&gt;" in output.read_text()
    assert output.with_suffix(".md").read_text().count("\n| ") == 3 + 3  # lines of both tables but the very first
    with Image.open(output.with_suffix(".png")) as image:
        assert image.size == (1200, 600)
        assert len(set(image.getdata())) > 3  # two curves on white


def test_mistakes_end_with_one_message(runs, tmp_path, capsys):
    for words in ([str(runs[0])], [str(runs[0]), str(tmp_path)]):
        assert main(words) == 2
        assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    "low, high, expected", [(0, 10, [0, 2, 4, 6, 8, 10]), (1.74, 1.81, [1.74, 1.76, 1.78, 1.8]), (3, 3, [3])]
)
def test_ticks_are_round(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected)
