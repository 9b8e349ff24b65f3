"""A self-contained HTML page: tables and line charts as inline SVG, readable from a phone to a wide screen.

Reports are mailed and opened years later, so a page loads nothing: no script, no font, no library. A chart scales with
the page (viewBox), tables scroll inside their own box, and colours follow the reader's light or dark setting.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

COLOURS = ("#2a78d6", "#d6662a", "#2a9d5c", "#a03bc4", "#b8860b", "#4b5563")
Curve = Sequence[tuple[float, float]]

_STYLE = """
:root { color-scheme: light dark; --line: #8886; --ink: #1d2430; --paper: #fff; --soft: #8881; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ef; --paper: #14171c; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 78rem; background: var(--paper); color: var(--ink);
       font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin-top: 2rem; }
.box { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { background: var(--soft); }
figure { margin: 1rem 0; } svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg.chart { min-width: 44rem; }
figcaption { font-size: .9rem; } .key { display: inline-block; margin-right: 1.2rem; overflow-wrap: anywhere; }
.key::before { content: ""; display: inline-block; width: 1rem; height: .3rem; margin-right: .4rem;
               background: var(--c); vertical-align: middle; }
"""


def page(title: str, sections: Sequence[tuple[str, str]]) -> str:
    """The whole document: `sections` are (heading, HTML)."""
    body = "\n".join(f"<h2>{html.escape(heading)}</h2>\n{content}" for heading, content in sections)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table; the first column is text, the others are numbers."""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="box"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about `count` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= raw)
    first = math.ceil(low / step - 1e-9)
    return [index * step for index in range(first, math.floor(high / step + 1e-9) + 1)]


def bounds(curves: Sequence[Curve]) -> tuple[float, float, float, float]:
    """(lowest x, highest x, lowest y, highest y) of all finite points, with room where they coincide."""
    points = [(x, y) for curve in curves for x, y in curve if math.isfinite(y)]
    if not points:
        return 0.0, 1.0, 0.0, 1.0
    xs, ys = [x for x, _ in points], [y for _, y in points]
    left, right, low, high = min(xs), max(xs), min(ys), max(ys)
    room = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return left, right if right > left else left + 1, low - room, high + room


def line_chart(curves: dict[str, Curve], x_label: str, y_label: str, *, width: int = 960, height: int = 300) -> str:
    """A chart of named curves, points that are not finite left out."""
    left, right, low, high = bounds(list(curves.values()))
    inner_left, inner_right, top, bottom = 70, width - 14, 12, height - 38

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            inner_left + (x - left) / (right - left) * (inner_right - inner_left),
            bottom - (y - low) / (high - low) * (bottom - top),
        )

    parts = []
    for tick in ticks(low, high):
        _, y = at(left, tick)
        parts.append(f'<line x1="{inner_left}" x2="{inner_right}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>')
        parts.append(f'<text x="{inner_left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:.6g}</text>')
    for tick in ticks(left, right, 8):
        x, _ = at(tick, low)
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:.6g}</text>')
    for index, curve in enumerate(curves.values()):
        points = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in thinned(curve) if math.isfinite(y))
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    parts.append(f'<text x="{(inner_left + inner_right) / 2}" y="{height - 4}" text-anchor="middle">{x_label}</text>')
    keys = "".join(
        f'<span class="key" style="--c:{COLOURS[index % len(COLOURS)]}">{html.escape(name)}</span>'
        for index, name in enumerate(curves)
    )
    label = html.escape(y_label)
    return (
        f'<figure><figcaption><strong>{label}</strong> {keys}</figcaption><div class="box"><svg class="chart" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg></div></figure>'
    )


def thinned(curve: Curve, limit: int = 2000) -> Curve:
    """At most about `limit` points of a curve, first and last included."""
    if len(curve) <= limit:
        return curve
    stride = -(-len(curve) // limit)
    return [*curve[:-1:stride], curve[-1]]
