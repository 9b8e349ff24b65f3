"""Read a run's quantization health and say what to change: which modules to leave unquantized, or which rule or recipe.

    python tools/advise_precision.py OUTPUT_DIR [--last 5] [--json FILE]

A run writes health where `--training.quant_stats_steps N` asked for it. Four things can be wrong with a tensor, each
with its own cure and its numbers as evidence (means over the last steps that were measured):

    saturated   the floor rule cuts blocks off   -> --model.quant_scale_rule rceil, which measured better
    outliers    elements share a scale made for another  -> leave the module unquantized
    flushed     small elements become zero       -> a gradient: a recipe with E5M2 gradients; else leave it unquantized
    noisy       SQNR below its format's          -> leave the module unquantized

Exit status: 0 nothing to change, 1 there is advice, 2 nothing to read.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fsdp2.errors import ConfigurationError
from fsdp2.quantization.health import TensorHealth
from mindspeed_llm.training.health_log import HEALTH_FILE, read_health

SATURATED_BLOCKS = 0.1  # with evenly spread logarithms log2(512 / 448) = 19 % of floor's blocks saturate
RCEIL_GAIN_DB = 0.2
OUTLIER_BLOCKS = 0.005
FLUSHED = 0.01
# Below these a format's own mantissa no longer explains the noise (a Gaussian gives 31, 25, 25, 31 and 19).
LOWEST_SQNR_DB = {"E4M3": 24.0, "E5M2": 19.0, "E3M2": 19.0, "E2M3": 22.0, "E2M1": 13.0}
IGNORED_BY_DEFAULT = ("*lm_head", "*gate")
MOST = 0.5  # when more than this part of the modules agrees, the advice is one flag and not a list of names


@dataclass(frozen=True)
class Finding:
    """One tensor with something wrong, and the numbers that say so."""

    problem: str  # "saturated", "outliers", "flushed" or "noisy"
    module: str
    tensor: str
    evidence: str


@dataclass(frozen=True)
class Advice:
    """`flag` and `value` to set, what it cures, and the findings behind it."""

    flag: str
    value: str
    reason: str
    findings: tuple[Finding, ...]


def averaged(rows: list[TensorHealth], last: int) -> list[TensorHealth]:
    """One row a tensor: the mean of each figure over the `last` measured steps, the largest amax."""
    steps = sorted({row.step for row in rows})[-last:]
    groups: dict[tuple[str, str], list[TensorHealth]] = defaultdict(list)
    for row in rows:
        if row.step in steps and row.elements and not math.isnan(row.sqnr_db):
            groups[row.module, row.tensor].append(row)

    def mean(members: list[TensorHealth], figure: str) -> float:
        return sum(getattr(member, figure) for member in members) / len(members)

    figures = [name for name in TensorHealth.__dataclass_fields__ if name.endswith(("_fraction", "_db", "_rceil"))]
    return [
        TensorHealth(
            **{
                **asdict(members[-1]),
                **{figure: mean(members, figure) for figure in figures},
                "amax": max(member.amax for member in members),
            }
        )
        for members in groups.values()
    ]


def findings(rows: list[TensorHealth]) -> list[Finding]:
    """What is wrong with the tensors of `averaged` rows."""
    found = []
    for row in rows:
        gain = row.sqnr_db_rceil - row.sqnr_db
        if row.scale_rule != "rceil" and row.saturated_block_fraction >= SATURATED_BLOCKS and gain >= RCEIL_GAIN_DB:
            evidence = (
                f"{row.saturated_block_fraction:.1%} of blocks saturate under {row.scale_rule}; "
                f"SQNR {row.sqnr_db:.1f} dB, with rceil {row.sqnr_db_rceil:.1f} dB"
            )
            found.append(Finding("saturated", row.module, row.tensor, evidence))
        if row.outlier_block_fraction >= OUTLIER_BLOCKS:
            evidence = (
                f"{row.outlier_block_fraction:.2%} of blocks hold an element 64 times their others' size "
                f"(largest {row.amax:.3g}); {row.flushed_fraction:.3%} of elements flushed to zero"
            )
            found.append(Finding("outliers", row.module, row.tensor, evidence))
        elif row.flushed_fraction >= FLUSHED:
            evidence = f"{row.flushed_fraction:.2%} of elements flushed to zero in {row.element_format}"
            found.append(Finding("flushed", row.module, row.tensor, evidence))
        elif max(row.sqnr_db, row.sqnr_db_rceil) < LOWEST_SQNR_DB[row.element_format]:
            evidence = f"SQNR {row.sqnr_db:.1f} dB in {row.element_format}"
            found.append(Finding("noisy", row.module, row.tensor, evidence))
    return found


def advise(rows: list[TensorHealth], ignored_now: tuple[str, ...] = IGNORED_BY_DEFAULT) -> list[Advice]:
    """Advice from `averaged` rows, the widest first; `ignored_now` are patterns that the run ignores already."""
    found = findings(rows)
    modules = list(dict.fromkeys(row.module for row in rows))
    advice = []
    if saturated := tuple(f for f in found if f.problem == "saturated"):
        count = len({f.module for f in saturated})
        reason = f"the scale rule cuts off the largest elements in {count} of {len(modules)} modules"
        advice.append(Advice("--model.quant_scale_rule", "rceil", reason, saturated))
    flushed = tuple(f for f in found if f.problem == "flushed" and f.tensor == "gradient")
    if flushed:
        reason = "gradients of these modules reach below E4M3's range; E5M2 gradients reach 2^16 further down"
        formats = {row.element_format for row in rows if row.tensor == "gradient"}
        if formats == {"E4M3"} and len({f.module for f in flushed}) > MOST * len(modules):
            advice.append(Advice("--model.quant_recipe_name", "mxfp8-hybrid", reason, flushed))
            flushed = ()
    left = [f for f in found if f.problem in ("outliers", "noisy") or f in flushed or _flushed_forward(f)]
    if left:
        names = [module for module in modules if any(f.module == module for f in left)]
        reason = "rounding loses what these modules need; the others stay quantized"
        value = " ".join([*(name for name in ignored_now if name not in names), *names])
        advice.append(Advice("--model.quant_ignored_modules", value, reason, tuple(left)))
    return advice


def _flushed_forward(finding: Finding) -> bool:
    return finding.problem == "flushed" and finding.tensor != "gradient"


def ignored_modules(run: Path) -> tuple[str, ...]:
    """The run's own `quant_ignored_modules`, which the advice must keep."""
    config = run / "config.yaml"
    if not config.exists():
        return IGNORED_BY_DEFAULT
    settings = yaml.safe_load(config.read_text(encoding="utf-8")) or {}
    return tuple(settings.get("model", {}).get("quant_ignored_modules", IGNORED_BY_DEFAULT))


def text(advice: list[Advice], rows: list[TensorHealth]) -> str:
    """The advice for people."""
    steps = sorted({row.step for row in rows})
    modules = {row.module for row in rows}
    lines = [f"{len(modules)} quantized modules, {len(rows)} tensors, up to step {steps[-1]}"]
    if not advice:
        worst = min(rows, key=lambda row: row.sqnr_db)
        lines.append(
            f"nothing to change: the noisiest is {worst.module} {worst.tensor} with {worst.sqnr_db:.1f} dB "
            f"({worst.element_format}, {worst.scale_rule})"
        )
    for item in advice:
        lines += ["", f"{item.flag} {item.value}", f"    {item.reason}"]
        lines += [f"    {f.module} {f.tensor}: {f.problem}: {f.evidence}" for f in item.findings[:20]]
        if len(item.findings) > 20:
            lines.append(f"    and {len(item.findings) - 20} more tensors")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="OUTPUT_DIR of a run")
    parser.add_argument("--last", type=int, default=5, help="measured steps to average over (default 5)")
    parser.add_argument("--json", type=Path, help="write the advice to this file too")
    options = parser.parse_args(argv)
    try:
        rows = averaged(read_health(options.run), max(1, options.last))
        if not rows:
            raise ConfigurationError(
                f"{options.run / HEALTH_FILE}: no such file, or no rows; run with --training.quant_stats_steps 50"
            )
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    advice = advise(rows, ignored_modules(options.run))
    print(text(advice, rows))
    if options.json:
        options.json.write_text(json.dumps([asdict(item) for item in advice], indent=1) + "\n", encoding="utf-8")
    return 1 if advice else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
