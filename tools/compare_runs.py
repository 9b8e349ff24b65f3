"""Put runs side by side: losses and their relative gap, speed, bytes, memory, and what their configurations differ in.

    python tools/compare_runs.py RUN_A RUN_B [RUN_C ...] -o report.html

Writes a self-contained `report.html`, and beside it `report.md` (the table) and `report.png` (the loss curves). The
first run is what the others are compared with.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fsdp2.errors import ConfigurationError
from mindspeed_llm.training.metrics import METRICS_FILE, read_metrics
from mindspeed_llm.training.report_page import COLOURS, bounds, line_chart, page, paragraph, table, thinned, ticks

TAIL_STEPS = 50
NOT_COMPARED = ("training.output_dir", "training.resume_from_checkpoint", "training.tensorboard_dir")


@dataclass(frozen=True)
class Run:
    """A run's rows of `metrics.jsonl` and its flat configuration."""

    name: str
    rows: list[dict]
    settings: dict[str, object]

    def curve(self, key: str) -> list[tuple[float, float]]:
        return [(row["step"], row[key]) for row in self.rows if row.get(key) is not None]

    def last(self, key: str) -> float | None:
        return next((row[key] for row in reversed(self.rows) if row.get(key) is not None), None)

    def median(self, key: str) -> float | None:
        values = [row[key] for row in self.rows[1:] or self.rows if row.get(key) is not None]
        return statistics.median(values) if values else None

    def peak(self, key: str) -> float | None:
        return max((row[key] for row in self.rows if row.get(key) is not None), default=None)

    def tail_loss(self) -> float:
        losses = [row["loss"] for row in self.rows[-TAIL_STEPS:]]
        return sum(losses) / len(losses)

    def gathered(self) -> float | None:
        """Bytes this rank sent into the parameter gathers of a step."""
        parts = [self.median(f"all_gather_bytes_{phase}") for phase in ("forward", "backward")]
        return None if None in parts else sum(parts)


def load(folder: Path) -> Run:
    """Read a run.

    Raises:
        ConfigurationError: there is no run, or it logged nothing.
    """
    rows = read_metrics(folder / METRICS_FILE)
    if not rows:
        raise ConfigurationError(f"{folder}: no {METRICS_FILE} with a step in it; give the OUTPUT_DIR of a run")
    config = folder / "config.yaml"
    tree = yaml.safe_load(config.read_text(encoding="utf-8")) or {} if config.exists() else {}
    settings = {f"{group}.{key}": value for group, values in tree.items() for key, value in (values or {}).items()}
    return Run(str(folder), rows, settings)


def relative_gap(run: Run, base: Run, window: int = 1) -> list[tuple[float, float]]:
    """(step, loss / base's loss - 1) of the steps both logged, losses averaged over `window` steps."""
    ours, theirs = (dict(_smooth(r.curve("loss"), window)) for r in (run, base))
    return [(step, ours[step] / theirs[step] - 1) for step in sorted(ours.keys() & theirs.keys()) if theirs[step]]


def _smooth(curve: list[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    smoothed = []
    for index, (step, _) in enumerate(curve):
        values = [value for _, value in curve[max(0, index + 1 - window) : index + 1]]
        smoothed.append((step, sum(values) / len(values)))
    return smoothed


def figures(run: Run, base: Run) -> dict[str, str]:
    """The row of one run, as text by column."""

    def shown(value: float | None, pattern: str, scale: float = 1.0) -> str:
        return "-" if value is None else format(value * scale, pattern)

    gap = run.tail_loss() / base.tail_loss() - 1
    return {
        "run": run.name,
        "steps": str(run.rows[-1]["step"]),
        "last loss": shown(run.last("loss"), ".4f"),
        f"mean of last {TAIL_STEPS}": f"{run.tail_loss():.4f}",
        "gap": "-" if run is base else f"{gap:+.3%}",
        "held-out loss": shown(run.last("eval_loss"), ".4f"),
        "bits per byte": shown(run.last("eval_bits_per_byte"), ".4f"),
        "tokens/s": shown(run.median("tokens_per_second"), ",.0f"),
        "step, ms": shown(run.median("step_time_s"), ",.1f", 1e3),
        "gathered, MB a step": shown(run.gathered(), ",.3f", 1e-6),
        "reduced, MB a step": shown(run.median("reduce_scatter_bytes"), ",.3f", 1e-6),
        "gathered alive, MB": shown(run.peak("unsharded_bytes_peak"), ",.3f", 1e-6),
        "peak memory, GB": shown(run.peak("memory_peak_bytes"), ",.3f", 1e-9),
    }


def differences(runs: list[Run]) -> list[list[str]]:
    """[setting, value in each run] where the runs are not alike."""
    keys = sorted(set().union(*(run.settings for run in runs)) - set(NOT_COMPARED))
    rows = [[key, *(str(run.settings.get(key, "-")) for run in runs)] for key in keys]
    return [row for row in rows if len(set(row[1:])) > 1]


def markdown(runs: list[Run]) -> str:
    """The table of figures and the one of differences, as Markdown."""
    rows = [figures(run, runs[0]) for run in runs]
    lines = _markdown_table(list(rows[0]), [list(row.values()) for row in rows])
    lines += ["", *_markdown_table(["setting", *(run.name for run in runs)], differences(runs))]
    return "\n".join(lines) + "\n"


def _markdown_table(header: list[str], rows: list[list[str]]) -> list[str]:
    cells = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]


def html_page(runs: list[Run]) -> str:
    """The report."""
    base = runs[0]
    rows = [figures(run, base) for run in runs]
    window = max(1, len(base.rows) // 20)
    charts = [
        ("loss", "loss, nats a token"),
        ("grad_norm", "gradient norm"),
        ("tokens_per_second", "tokens per second"),
        ("step_time_s", "seconds a step"),
    ]
    gaps = {run.name: [(s, 100 * g) for s, g in relative_gap(run, base, window)] for run in runs[1:]}
    header, *columns = ([key, *(row[key] for row in rows)] for key in rows[0])  # runs side by side, figures downwards
    sections = [("Figures", table(header, columns))]
    sections.append(
        (
            "Loss against the first run",
            line_chart(gaps, "step", f"relative gap, %, losses averaged over {window} steps"),
        )
    )
    curves = "".join(line_chart({r.name: r.curve(key) for r in runs}, "step", label) for key, label in charts)
    sections.append(("Curves", curves))
    different = differences(runs)
    content = table(["setting", *(run.name for run in runs)], different) if different else paragraph("none")
    return page("Runs side by side", [*sections, ("Configuration differences", content)])


def write_png(path: Path, runs: list[Run], width: int = 1200, height: int = 600) -> None:
    """Loss curves as a picture, drawn with Pillow, which TensorBoard brings along."""
    from PIL import Image, ImageDraw

    curves = {run.name: run.curve("loss") for run in runs}
    left, right, low, high = bounds(list(curves.values()))
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    box = (90, 30, width - 20, height - 50)

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            box[0] + (x - left) / (right - left) * (box[2] - box[0]),
            box[3] - (y - low) / (high - low) * (box[3] - box[1]),
        )

    for tick in ticks(low, high):
        draw.line([at(left, tick), at(right, tick)], fill="#dddddd")
        draw.text((8, at(left, tick)[1] - 8), f"{tick:.4g}", fill="black", font_size=16)
    for tick in ticks(left, right, 8):
        draw.text((at(tick, low)[0] - 8, box[3] + 6), f"{tick:.6g}", fill="black", font_size=16)
    draw.text((width / 2, height - 24), "step", fill="black", font_size=16)
    for index, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[index % len(COLOURS)]
        draw.line([at(x, y) for x, y in thinned(curve) if y == y], fill=colour, width=2)
        draw.text((width - 20, box[1] + 22 * index), f"loss of {name}", fill=colour, anchor="rt", font_size=18)
    image.save(path)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="OUTPUT_DIR of a run; the first is the base")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="default report.html")
    options = parser.parse_args(argv)
    try:
        if len(options.runs) < 2:
            raise ConfigurationError(f"{options.runs[0]} is one run; give two or more to compare")
        runs = [load(folder) for folder in options.runs]
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(html_page(runs), encoding="utf-8")
    text = markdown(runs)
    options.output.with_suffix(".md").write_text(text, encoding="utf-8")
    write_png(options.output.with_suffix(".png"), runs)
    print(text)
    print(f"wrote {options.output}, .md and .png beside it")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
