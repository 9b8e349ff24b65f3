"""Turn the traces that `--training.profile` wrote into one self-contained HTML page: timeline, operators, memory.

    python tools/profile_report.py PROFILE_DIR [-o report.html]

Reads Chrome traces: `*.pt.trace.json[.gz]` of torch.profiler, `trace_view.json` of torch_npu.profiler, one or several a
rank, in any depth of folders. Times are microseconds in traces and milliseconds on the page. An operator's own time is
its duration less that of the operators it called.
"""

from __future__ import annotations

import argparse
import gzip
import html
import json
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fsdp2.errors import ConfigurationError
from mindspeed_llm.training.report_page import COLOURS, line_chart, page, paragraph, table

BARS_A_LANE = 800
LANES = 8
OPERATORS = 40
ALLOCATIONS = 20
DEPTH = 3
_PHASE = "step: "
# label, colour, words in a span's name; the first that fits
_KINDS = (
    (
        "collectives",
        COLOURS[1],
        ("gloo", "nccl", "hccl", "all_gather", "reduce_scatter", "all_to_all", "allreduce", "c10d", "alltoall"),
    ),
    ("parts of a step", COLOURS[3], (_PHASE, "optimizer", "fsdp")),
    ("copies", COLOURS[4], ("copy", "memcpy", "cat")),
    ("matrix products and attention", COLOURS[0], ("mm", "gemm", "matmul", "attention", "linear")),
    ("everything else", COLOURS[2], ()),
)


@dataclass(frozen=True)
class Span:
    """One thing that took time: microseconds from the trace's begin."""

    name: str
    category: str
    lane: str
    begin: float
    duration: float
    own: float
    depth: int


@dataclass(frozen=True)
class Allocation:
    """One allocation (negative bytes: a release), with the operator it happened in and what is allocated after it."""

    time: float
    size: int
    total: int
    device: str
    operator: str


@dataclass
class Trace:
    """What one rank recorded."""

    name: str
    spans: list[Span] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)

    @property
    def duration(self) -> float:
        """Microseconds from the first begin to the last end."""
        return max((span.begin + span.duration for span in self.spans), default=0.0)


def find_traces(folder: Path) -> list[Path]:
    """The trace files under `folder`, in the order of their names.

    Raises:
        ConfigurationError: there are none.
    """
    patterns = ("*.pt.trace.json", "*.pt.trace.json.gz", "trace_view.json")
    found = sorted(path for pattern in patterns for path in folder.rglob(pattern))
    if not found:
        raise ConfigurationError(f"{folder}: no {', '.join(patterns)}; run with --training.profile to write some")
    return found


def read_trace(path: Path, root: Path) -> Trace:
    """Read one trace.

    Raises:
        ConfigurationError: the file is not a Chrome trace.
    """
    try:
        data = path.read_bytes()
        tree = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        events = tree["traceEvents"] if isinstance(tree, dict) else tree
        timed = [e for e in events if e.get("ph") == "X" and e.get("cat") != "Trace" and float(e["dur"]) >= 0]
    except (ValueError, KeyError, OSError, AttributeError) as error:
        raise ConfigurationError(f"{path}: not a Chrome trace: {error}") from None
    names = {
        (e.get("pid"), e.get("tid")): e["args"]["name"]
        for e in events
        if e.get("ph") == "M" and e.get("name") == "thread_name"
    }
    rank = re.search(r"rank\d+", str(path.relative_to(root)))
    trace = Trace(rank.group() if rank else path.name)
    origin = min((float(e["ts"]) for e in timed), default=0.0)
    lanes = defaultdict(list)
    for event in timed:
        lanes[event.get("pid"), event.get("tid")].append(event)
    for key, members in lanes.items():
        trace.spans += _nested(members, str(names.get(key, f"thread {key[1]}")), origin)
    trace.allocations = _allocations(events, lanes, origin)
    return trace


def _nested(events: list[dict], lane: str, origin: float) -> list[Span]:
    """Spans of one thread: an event lies inside another when its time does."""
    events = sorted(events, key=lambda e: (float(e["ts"]), -float(e["dur"])))
    own = [float(e["dur"]) for e in events]
    depths, stack = [], []
    for index, event in enumerate(events):
        begin = float(event["ts"])
        while stack and float(events[stack[-1]]["ts"]) + float(events[stack[-1]]["dur"]) <= begin:
            stack.pop()
        if stack:
            own[stack[-1]] -= float(event["dur"])
        depths.append(len(stack))
        stack.append(index)
    return [
        Span(
            event["name"],
            event.get("cat", ""),
            lane,
            float(event["ts"]) - origin,
            float(event["dur"]),
            max(0.0, self_time),
            depth,
        )
        for event, self_time, depth in zip(events, own, depths)
    ]


def _allocations(events: list[dict], lanes: dict, origin: float) -> list[Allocation]:
    """`[memory]` events in time order; the operator is the innermost one around it on its thread."""
    found = []
    by_thread = defaultdict(list)
    for event in events:
        if event.get("name") == "[memory]":
            by_thread[event.get("pid"), event.get("tid")].append(event)
    for key, instants in by_thread.items():
        around = sorted(lanes.get(key, ()), key=lambda e: (float(e["ts"]), -float(e["dur"])))
        position, stack = 0, []
        for event in sorted(instants, key=lambda e: float(e["ts"])):
            time, args = float(event["ts"]), event["args"]
            while position < len(around) and float(around[position]["ts"]) <= time:
                stack.append(around[position])
                position += 1
            while stack and float(stack[-1]["ts"]) + float(stack[-1]["dur"]) < time:
                stack.pop()
            device = "cpu" if args.get("Device Type", 0) == 0 else f"device {args.get('Device Id', 0)}"
            operator = stack[-1]["name"] if stack else "-"
            found.append(
                Allocation(time - origin, int(args["Bytes"]), int(args.get("Total Allocated", 0)), device, operator)
            )
    return sorted(found, key=lambda a: a.time)


def timeline(trace: Trace) -> str:
    """Lanes of bars, as SVG: the busiest threads, the longest bars of each."""
    totals: dict[str, float] = defaultdict(float)
    for span in trace.spans:
        if span.depth == 0:
            totals[span.lane] += span.duration
    chosen = sorted(totals, key=totals.get, reverse=True)[:LANES]
    width, left, row = 1200, 170, 16
    scale = (width - left - 10) / (trace.duration or 1.0)
    parts, top = [], 4
    for lane in chosen:
        shown = [span for span in trace.spans if span.lane == lane and span.depth < DEPTH]
        shown = sorted(shown, key=lambda span: span.duration, reverse=True)[:BARS_A_LANE]
        parts.append(f'<text x="4" y="{top + 12}">{html.escape(lane[:26])}</text>')
        for span in shown:
            x, wide = left + span.begin * scale, max(0.4, span.duration * scale)
            y = top + span.depth * row
            title = html.escape(f"{span.name}: {span.duration / 1e3:.3f} ms at {span.begin / 1e3:.3f} ms")
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{wide:.2f}" height="{row - 2}" fill="{_colour(span)}">'
                f"<title>{title}</title></rect>"
            )
        top += (max((span.depth for span in shown), default=0) + 1) * row + 8
    for tenth in range(0, 11, 2):
        x = left + tenth / 10 * trace.duration * scale
        parts.append(
            f'<text x="{x:.0f}" y="{top + 14}" text-anchor="{"end" if tenth == 10 else "middle"}">'
            f"{tenth / 10 * trace.duration / 1e3:,.0f} ms</text>"
        )
    return (
        f'<figure><figcaption>{_legend()}</figcaption><div class="box"><svg class="chart" '
        f'viewBox="0 0 {width} {top + 20}" role="img" aria-label="timeline of {html.escape(trace.name)}">'
        f"{''.join(parts)}</svg></div></figure>"
    )


def _legend() -> str:
    return "".join(
        f'<span class="key" style="--c:{colour}">{html.escape(label)}</span>' for label, colour, _ in _KINDS
    )


def _colour(span: Span) -> str:
    name = span.name.lower()
    return next(colour for _, colour, words in _KINDS if not words or any(word in name for word in words))


def phases(trace: Trace) -> list[list[str]]:
    """[phase, times, total ms, share of the trace] of a step's named parts."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for span in trace.spans:
        if span.name.startswith(_PHASE) or span.name.startswith(("gloo:", "nccl:", "hccl:")):
            sums[span.name.removeprefix(_PHASE)][0] += 1
            sums[span.name.removeprefix(_PHASE)][1] += span.duration
    return [
        [name, f"{count:,}", f"{total / 1e3:,.2f}", f"{total / (trace.duration or 1.0):.1%}"]
        for name, (count, total) in sorted(sums.items(), key=lambda item: -item[1][1])
    ]


def operators(trace: Trace) -> list[list[str]]:
    """[operator, calls, total ms, own ms, own share, mean us] by own time."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for span in trace.spans:
        row = sums[span.name]
        row[0] += 1
        row[1] += span.duration
        row[2] += span.own
    all_own = sum(row[2] for row in sums.values()) or 1.0
    ranked = sorted(sums.items(), key=lambda item: -item[1][2])[:OPERATORS]
    return [
        [name, f"{n:,}", f"{total / 1e3:,.2f}", f"{own / 1e3:,.2f}", f"{own / all_own:.1%}", f"{total / n:,.1f}"]
        for name, (n, total, own) in ranked
    ]


def memory(trace: Trace) -> str:
    """The curve of allocated bytes and the operators that allocated most."""
    if not trace.allocations:
        return paragraph("no allocations recorded; profile with --training.profile_with_memory")
    curves = defaultdict(list)
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0])
    for allocation in trace.allocations:
        curves[allocation.device].append((allocation.time / 1e3, allocation.total / 2**20))
        if allocation.size > 0:
            row = sums[allocation.operator]
            row[0] += 1
            row[1] += allocation.size
            row[2] = max(row[2], allocation.size)
    peaks = ", ".join(f"{device}: {max(y for _, y in curve):,.1f} MiB" for device, curve in curves.items())
    ranked = sorted(sums.items(), key=lambda item: -item[1][1])[:ALLOCATIONS]
    rows = [[n, f"{calls:,}", f"{size / 2**20:,.1f}", f"{most / 2**20:,.2f}"] for n, (calls, size, most) in ranked]
    return (
        paragraph(f"Peak over what was allocated when the profile began: {peaks}")
        + line_chart(dict(curves), "ms", "allocated, MiB")
        + table(["allocated by", "allocations", "sum, MiB", "largest, MiB"], rows)
    )


def report(traces: list[Trace]) -> str:
    """The page of all ranks' traces."""
    overview = [[t.name, f"{t.duration / 1e3:,.1f}", f"{len(t.spans):,}", f"{len(t.allocations):,}"] for t in traces]
    sections = [("Traces", table(["rank", "ms", "spans", "allocations"], overview))]
    for trace in traces:
        parts = table(["part of a step", "times", "total, ms", "of the trace"], phases(trace))
        sections.append((f"Timeline, {trace.name}", timeline(trace) + parts))
        header = ["operator", "calls", "total, ms", "own, ms", "own", "mean, us"]
        sections.append((f"Operators, {trace.name}", table(header, operators(trace))))
        sections.append((f"Memory, {trace.name}", memory(trace)))
    return page("Profile", sections)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the folder that --training.profile_save_path named")
    parser.add_argument("-o", "--output", type=Path, help="default FOLDER/report.html")
    options = parser.parse_args(argv)
    try:
        traces = [read_trace(path, options.folder) for path in find_traces(options.folder)]
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    output = options.output or options.folder / "report.html"
    output.write_text(report(traces), encoding="utf-8")
    print(f"wrote {output}: {', '.join(trace.name for trace in traces)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
