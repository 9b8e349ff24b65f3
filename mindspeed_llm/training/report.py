"""The run's summary: `report.json` for programs, `report.md` for people, the same text printed at the run's end."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

TAIL_STEPS = 50


@dataclass(frozen=True)
class RunReport:
    """The figures of a run; `None` where the run has no such figure (no held-out split, nothing gathered)."""

    steps: int
    loss_first: float
    loss_last: float
    loss_mean_last_50: float
    eval_loss: float | None
    eval_bits_per_byte: float | None
    tokens: int
    tokens_per_second: float  # of the whole job, over all steps of this process's life
    gather_bytes_vs_bf16: float | None  # all parameter gathers of the run
    gather_bytes_vs_bf16_quantized: float | None  # the quantized weights alone
    wall_s: float

    @classmethod
    def from_rows(cls, rows: list[dict], *, evaluation: dict[str, float], wall_s: float) -> RunReport:
        """Build the report from the rows of `metrics.jsonl` and the last evaluation.

        Raises:
            ValueError: there is no row.
        """
        if not rows:
            raise ValueError("no step was logged, there is nothing to report")
        seconds = sum(row["step_time_s"] for row in rows)
        tokens_per_step = rows[0]["tokens"] / rows[0]["step"]
        tail = rows[-TAIL_STEPS:]
        sent, quantized = _gathered(rows), _gathered(rows, "_quantized")
        as_bf16 = sum(row.get("all_gather_bytes_if_bf16", 0) for row in rows)
        return cls(
            steps=rows[-1]["step"],
            loss_first=rows[0]["loss"],
            loss_last=rows[-1]["loss"],
            loss_mean_last_50=sum(row["loss"] for row in tail) / len(tail),
            eval_loss=evaluation.get("loss"),
            eval_bits_per_byte=evaluation.get("bits_per_byte"),
            tokens=rows[-1]["tokens"],
            tokens_per_second=tokens_per_step * len(rows) / seconds if seconds else 0.0,
            gather_bytes_vs_bf16=_ratio(sent, as_bf16),
            # Unquantized weights count alike in both totals, so taking them out of both leaves the quantized ones.
            gather_bytes_vs_bf16_quantized=_ratio(quantized, as_bf16 - (sent - quantized)),
            wall_s=wall_s,
        )


def _gathered(rows: list[dict], suffix: str = "") -> int:
    return sum(row.get(f"all_gather_bytes_{phase}{suffix}", 0) for row in rows for phase in ("forward", "backward"))


def _ratio(sent: int, as_bf16: int) -> float | None:
    return sent / as_bf16 if as_bf16 else None


def markdown(report: RunReport, *, title: str, places: dict[str, Path | None], next_command: str) -> str:
    """Return the summary as Markdown: figures, where everything lies, and the next command to try.

    Args:
        places: what -> path, shown in this order; a None path (not written in this run) is left out.
    """

    def shown(value, pattern: str, unit: str = "") -> str:
        return "not measured" if value is None else format(value, pattern) + unit

    figures = [
        ("steps", f"{report.steps:,} ({report.tokens:,} tokens)"),
        ("loss, first to last", f"{report.loss_first:.4f} to {report.loss_last:.4f}"),
        (f"mean loss of the last {min(TAIL_STEPS, report.steps)} steps", f"{report.loss_mean_last_50:.4f}"),
        ("held-out loss", shown(report.eval_loss, ".4f", " nats a token")),
        ("held-out bits per byte", shown(report.eval_bits_per_byte, ".4f")),
        ("tokens per second", f"{report.tokens_per_second:,.0f}"),
        ("bytes gathered against bf16, all parameters", shown(report.gather_bytes_vs_bf16, ".4f")),
        ("bytes gathered against bf16, quantized weights", shown(report.gather_bytes_vs_bf16_quantized, ".4f")),
        ("wall time", f"{report.wall_s:.0f} s"),
    ]
    lines = [f"# {title}", "", "| figure | value |", "|---|---|"]
    lines += [f"| {name} | {value} |" for name, value in figures]
    lines += ["", *(f"- {what}: `{path}`" for what, path in places.items() if path is not None)]
    lines += ["", "Next, try:", "", f"    {next_command}", ""]
    return "\n".join(lines)


def write(output_dir: Path, report: RunReport, text: str) -> None:
    """Write `report.json` and `report.md` into `output_dir`."""
    (Path(output_dir) / "report.json").write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    (Path(output_dir) / "report.md").write_text(text, encoding="utf-8")


def next_command(hf_folder: Path | None, tensorboard_dir: Path) -> str:
    """Return the command a reader would try next: talk to the model, or look at the curves where no weights were
    saved.
    """
    if hf_folder is None:
        return f"tensorboard --logdir {tensorboard_dir}"
    # The interpreter of this run, when it is a .venv here that the reader's shell knows nothing of.
    own = Path(sys.executable)
    python = own.relative_to(Path.cwd()) if own.is_relative_to(Path.cwd()) else "python"
    return f"echo 'def main(' | {python} inference_fsdp2.py --model.model_name_or_path {hf_folder}"
