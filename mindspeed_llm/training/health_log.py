"""Where quantization health goes: `quantization_health.jsonl` has everything, TensorBoard what a person can look at.

A 48-layer model has a thousand tensors a step. TensorBoard gets a group of cards for each figure of inputs, weights
and gradients, and in it one card a kind of module (all layers' q_proj together), the worst layer of each; one histogram
of scale exponents a kind; and one table with the ten worst tensors by name. The number of cards does not depend on the
number of layers.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

from fsdp2.quantization.health import TensorHealth

HEALTH_FILE = "quantization_health.jsonl"
WORST = 10
# figure -> whether its worst layer is the largest (else the smallest)
FIGURES = {
    "sqnr_db": False,
    "saturated_block_fraction": True,
    "flushed_fraction": True,
    "outlier_block_fraction": True,
}


class HealthLog:
    """Appends the health of one step at a time; rank 0 makes one.

    Args:
        output_dir: folder of `quantization_health.jsonl`.
        tensorboard: a `SummaryWriter`, or None.
        first_step: rows of this step and later ones, which an interrupted run left, are removed.
    """

    def __init__(self, output_dir: Path, tensorboard, first_step: int = 1):
        self._path, self._tensorboard = Path(output_dir) / HEALTH_FILE, tensorboard
        kept = [row for row in read_health(output_dir) if row.step < first_step] if first_step > 1 else []
        if kept:
            self._path.write_text("".join(json.dumps(row.as_row()) + "\n" for row in kept), encoding="utf-8")
        else:
            self._path.unlink(missing_ok=True)

    def write(self, rows: list[TensorHealth]) -> None:
        """Append one step's rows."""
        if not rows:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row.as_row()) + "\n" for row in rows)
        if self._tensorboard is not None:
            self._draw(rows)

    def _draw(self, rows: list[TensorHealth]) -> None:
        step = rows[0].step
        groups: dict[tuple[str, str], list[TensorHealth]] = defaultdict(list)
        for row in rows:
            groups[row.tensor, row.kind].append(row)
        for (tensor, kind), members in groups.items():
            for figure, largest_is_worst in FIGURES.items():
                values = [v for v in (getattr(member, figure) for member in members) if math.isfinite(v)]
                if values:
                    worst = max(values) if largest_is_worst else min(values)
                    self._tensorboard.add_scalar(f"quant_{tensor}_{figure}_worst/{kind}", worst, step)
                    if figure == "sqnr_db":
                        mean = sum(values) / len(values)
                        self._tensorboard.add_scalar(f"quant_{tensor}_{figure}_mean/{kind}", mean, step)
            exponents = sum((Counter(member.exponents) for member in members), Counter())
            if exponents:
                self._add_histogram(f"quant_scale_exponents_{tensor}/{kind}", exponents, step)
        self._tensorboard.add_text("quant_worst_ten", worst_table(rows), step)

    def _add_histogram(self, tag: str, exponents: Counter, step: int) -> None:
        low, high = min(exponents), max(exponents)
        counts = [exponents.get(exponent, 0) for exponent in range(low, high + 1)]
        self._tensorboard.add_histogram_raw(
            tag,
            min=low,
            max=high,
            num=sum(counts),
            sum=sum(exponent * count for exponent, count in exponents.items()),
            sum_squares=sum(exponent**2 * count for exponent, count in exponents.items()),
            bucket_limits=[exponent + 0.5 for exponent in range(low, high + 1)],
            bucket_counts=counts,
            global_step=step,
        )


def worst_first(rows: Iterable[TensorHealth]) -> list[TensorHealth]:
    """Rows by signal-to-noise ratio, less a decibel for every half percent of blocks with an outlier and every percent
    of elements flushed: the power of an outlier hides from the ratio what it does to its block. Rows without a signal
    are left out.
    """
    measured = [row for row in rows if not math.isnan(row.sqnr_db)]
    return sorted(measured, key=lambda row: row.sqnr_db - 200 * row.outlier_block_fraction - 100 * row.flushed_fraction)


def worst_table(rows: Iterable[TensorHealth], count: int = WORST) -> str:
    """The `count` worst tensors as a Markdown table."""
    lines = [
        "| tensor | SQNR, dB | blocks saturated | flushed to zero | blocks with an outlier | largest |",
        "|---|---|---|---|---|---|",
    ]
    for row in worst_first(rows)[:count]:
        lines.append(
            f"| {row.module} {row.tensor} | {row.sqnr_db:.1f} | {row.saturated_block_fraction:.2%} | "
            f"{row.flushed_fraction:.3%} | {row.outlier_block_fraction:.2%} | {row.amax:.3g} |"
        )
    return "\n".join(lines)


def read_health(output_dir: Path) -> list[TensorHealth]:
    """The rows of a run's health file up to one that an interruption cut short; none without the file."""
    path, rows = Path(output_dir) / HEALTH_FILE, []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(TensorHealth.from_row(json.loads(line)))
            except (json.JSONDecodeError, KeyError, TypeError):
                break
    return rows
