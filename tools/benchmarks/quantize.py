"""How fast MXFP8 quantization runs next to a plain copy of the tensor, and next to torchao's on the CPU.

Quantizing reads 2 bytes an element and writes 1.03; a copy reads and writes 2. A copy's rate is therefore what memory
allows, and the ratio to it says how far a kernel is from memory-bound. Both sides run in one process, interleaved, and
medians are compared, so that a busy or slow machine changes both.

    python tools/benchmarks/quantize.py --json FILE

writes quantize_vs_copy, quantize_vs_torchao, dequantize_vs_copy (ratios of rates along the last axis, larger is
better), dual_vs_single (the time of both axes in one pass over the mean time of one axis: 2 would mean that nothing is
gained), and the seconds behind them. Only E4M3 with blocks of 1x32 is measured: all formats run through the same loops.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fsdp2.quantization import quantize, quantize_dual_axis
from fsdp2.quantization.kernels import backend_for_device


def keep_freed_memory() -> None:
    """Let malloc keep what is freed, as it does for the recurring sizes of a training step, instead of returning it.

    Otherwise every call that allocates its result pays for fresh pages of the operating system, which takes longer
    than the call. Does nothing where the C library has no `mallopt`.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        m_trim_threshold, m_mmap_threshold, one_gibibyte = -1, -3, 1 << 30
        mallopt(m_mmap_threshold, one_gibibyte)
        mallopt(m_trim_threshold, one_gibibyte)


def median_seconds(calls: dict[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    """Run every call once a round, `rounds` times after two rounds of warm-up; return each one's median seconds.

    Every round has an order of its own: what runs after a call that filled the caches with its own data is slower.
    """
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    shuffled, order = random.Random(0), list(calls)
    for number in range(rounds + 2):
        shuffled.shuffle(order)
        for name in order:
            call = calls[name]
            _wait(device)
            start = time.perf_counter()
            call()
            _wait(device)
            if number >= 2:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


def torchao_call(x: torch.Tensor) -> Callable[[], object] | None:
    """The same quantization by torchao, or None when it is not installed."""
    try:
        from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_mx
    except ImportError:
        return None
    return lambda: to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.FLOOR)


def measure(rows: int, columns: int, rounds: int, device: torch.device) -> dict[str, object]:
    """Time copy, quantize, dual-axis quantize, dequantize and torchao on a normal bf16 matrix; return the report."""
    x = torch.randn(rows, columns, device=device).to(torch.bfloat16)
    destination, q = torch.empty_like(x), quantize(x)
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: destination.copy_(x),
        "quantize": lambda: quantize(x),
        "quantize_other_axis": lambda: quantize(x, axis=-2),
        "quantize_dual_axis": lambda: quantize_dual_axis(x),
        "dequantize": lambda: q.dequantize(torch.bfloat16),
    }
    other = torchao_call(x)
    if other is not None:
        calls["torchao"] = other
    seconds = median_seconds(calls, rounds, device)
    copy, single = seconds["copy"], seconds["quantize"]
    return {
        "quantize_vs_copy": copy / single,
        "quantize_vs_torchao": seconds["torchao"] / single if other is not None else None,
        "dual_vs_single": seconds["quantize_dual_axis"] / statistics.mean((single, seconds["quantize_other_axis"])),
        "dequantize_vs_copy": copy / seconds["dequantize"],
        "seconds": seconds,
        "gigabytes_of_bf16_per_second": {name: x.nbytes / value / 1e9 for name, value in seconds.items()},
        "shape": [rows, columns],
        "device": str(device),
        "backend": backend_for_device(device.type),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the report to this file")
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--columns", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=21, help="timed rounds; the median counts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="CPU threads (default: all)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    keep_freed_memory()
    report = measure(arguments.rows, arguments.columns, arguments.rounds, torch.device(arguments.device))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    for name, rate in report["gigabytes_of_bf16_per_second"].items():
        print(f"{name:20s} {rate:8.2f} GB/s of bf16")
    for name in ("quantize_vs_copy", "quantize_vs_torchao", "dual_vs_single", "dequantize_vs_copy"):
        print(f"{name:20s} {report[name]:8.2f}" if report[name] is not None else f"{name:20s} torchao is not installed")


if __name__ == "__main__":
    main()
