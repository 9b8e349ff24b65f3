"""Write the tables and the picture of docs/quantization.md from the code they describe.

    python tools/quantization_page.py            rewrites the tables between their markers, and the picture
    python tools/quantization_page.py --check    exits with status 1 when they are not what would be written

The text around the tables is written by hand. Errors are measured on seeded normal numbers, so every machine gets the
same digits; a test runs --check.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fsdp2.quantization import QuantRecipe, quantize
from fsdp2.quantization.formats import ELEMENT_FORMATS, SCALE_RULES
from fsdp2.quantization.recipe import NAMED_RECIPES, TensorRecipe

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "quantization.md"
PICTURE = ROOT / "docs" / "images" / "scale_rules.svg"
COLORS = {"floor": "#c0392b", "ceil": "#2c6fbb", "rceil": "#1e8449", "even": "#8e6fc1"}


def formats_table() -> str:
    rows = [
        f"| {f.name} | {f.bits} | {f.largest:g} | 2^{f.smallest_normal_exponent} "
        f"| 2^{f.smallest_normal_exponent - f.mantissa_bits} | {'NaN' if f.nan_code else 'none'} "
        f"| {1 / f.codes_per_byte:g} |"
        for f in ELEMENT_FORMATS.values()
    ]
    head = "| format | bits | largest | smallest normal | smallest | not a number | bytes stored |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *rows])


def recipes_table() -> str:
    head = "| recipe | inputs | weight | gradients | weight on the wire, bytes an element | of bf16's |"
    rows = []
    for name in NAMED_RECIPES:
        recipe = QuantRecipe.from_name(name)
        size = recipe.weight.bytes_per_element
        cells = [_describe(t) for t in (recipe.inputs, recipe.weight, recipe.grads)]
        rows.append(f"| `{name}` | {' | '.join(cells)} | {size:.5g} | {size / 2:.1%} |")
    return "\n".join([head, "|---|---|---|---|---|---|", *rows])


def _describe(tensor: TensorRecipe) -> str:
    rows, columns = ("all" if n == -1 else n for n in tensor.block_shape)
    return f"{tensor.element_format}, {rows} x {columns}"


def long_names_table() -> str:
    rows = [f"| `{short}` | `{long}` |" for short, long in NAMED_RECIPES.items()]
    return "\n".join(["| short | long |", "|---|---|", *rows])


def signal_to_noise_table() -> str:
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    rows = []
    for name in ELEMENT_FORMATS:
        for block in ((1, 32), (32, 32)):
            cells = []
            for rule in SCALE_RULES:
                q = quantize(x, element_format=name, block_shape=block, scale_rule=rule)
                error = (q.dequantize(torch.float32).double() - x.double()).square().sum()
                cells.append(f"{10 * torch.log10(x.double().square().sum() / error):.1f}")
            rows.append(f"| {name} | {block[0]}x{block[1]} | {' | '.join(cells)} |")
    return "\n".join([f"| format | block | {' | '.join(SCALE_RULES)} |", "|---|---|---|---|---|---|", *rows])


def error_curve(name: str, rule: str, points: int = 49) -> list[tuple[float, float]]:
    """Relative error (percent of the block's norm) of normal blocks whose largest magnitude is m = 1 .. 2."""
    x = torch.randn(2048, 32, generator=torch.Generator().manual_seed(0))
    x = x / x.abs().amax(1, keepdim=True)
    curve = []
    for m in torch.linspace(1, 2, points)[:-1].tolist():
        scaled = (x * m).to(torch.bfloat16)
        y = quantize(scaled, element_format=name, scale_rule=rule).dequantize(torch.float32)
        curve.append((m, (100 * (y - scaled.float()).norm() / scaled.float().norm()).item()))
    return curve


def picture() -> str:
    """Two panels, E4M3 and E2M1: error against where the block's largest number lies between two powers of two."""
    width, height, left, top = 340, 220, 52, 40
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="860" height="330" font-family="sans-serif" font-size="12">',
        '<rect width="860" height="330" fill="white"/>',
    ]
    for panel, (name, highest, step) in enumerate((("E4M3", 6, 1), ("E2M1", 20, 4))):
        x0, y0 = left + panel * (width + 80), top
        parts.append(f'<text x="{x0 + width / 2}" y="{y0 - 12}" text-anchor="middle" font-size="14">{name}</text>')
        for level in range(0, highest + 1, step):
            y = y0 + height * (1 - level / highest)
            parts.append(f'<line x1="{x0}" y1="{y:.1f}" x2="{x0 + width}" y2="{y:.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{x0 - 6}" y="{y + 4:.1f}" text-anchor="end">{level}%</text>')
        for tick in (1, 1.25, 1.5, 1.75, 2):
            x = x0 + width * (tick - 1)
            parts.append(f'<text x="{x:.1f}" y="{y0 + height + 18}" text-anchor="middle">{tick:g}</text>')
        for rule, color in COLORS.items():
            points = " ".join(
                f"{x0 + width * (m - 1):.1f},{y0 + height * (1 - min(error / highest, 1)):.1f}"
                for m, error in error_curve(name, rule)
            )
            dash = ' stroke-dasharray="6 4"' if rule in ("ceil", "even") else ""
            parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
    caption = "largest magnitude of the block, between its power of two and the next"
    parts.append(f'<text x="430" y="{top + height + 40}" text-anchor="middle">{caption}</text>')
    for i, (rule, color) in enumerate(COLORS.items()):
        x = 300 + i * 75
        parts.append(f'<line x1="{x}" y1="314" x2="{x + 18}" y2="314" stroke="{color}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 22}" y="318">{rule}</text>')
    return "\n".join([*parts, "</svg>", ""])


def with_tables(text: str) -> str:
    """Return the page with every table between its markers replaced by a new one."""
    tables = {
        "formats": formats_table,
        "recipes": recipes_table,
        "long names": long_names_table,
        "signal to noise": signal_to_noise_table,
    }
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- table: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"{PAGE} has no markers for the table '{name}'")
        text = pattern.sub(lambda match, table=table: f"{match[1]}{table()}\n{match[2]}", text)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 when something would change")
    arguments = parser.parse_args()
    wanted = {PAGE: with_tables(PAGE.read_text()), PICTURE: picture()}
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text() != text]
    if arguments.check:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not up to date: run python tools/quantization_page.py")
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(wanted[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
