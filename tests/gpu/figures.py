"""One table from what `check.sh` measured, with the device's name: figures.json to keep, figures.md to read.

    python tests/gpu/figures.py FOLDER

Step times are medians over the second half of a run, when caches are warm and kernels are compiled.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from mindspeed_llm.training.distributed import device_name
from mindspeed_llm.training.metrics import read_metrics


def run_figures(folder: Path) -> dict[str, float]:
    rows = read_metrics(folder / "metrics.jsonl")
    times = [row["step_time_s"] for row in rows[len(rows) // 2 :]]
    return {
        "step_ms": statistics.median(times) * 1e3,
        "first_loss": rows[0]["loss"],
        "last_loss": rows[-1]["loss"],
        "memory_peak_MiB": max(row["memory_peak_bytes"] for row in rows) / 2**20,
    }


def main(folder: Path) -> int:
    device = os.environ.get("DEVICE", "cuda")
    quantize = json.loads((folder / "quantize.json").read_text())
    mxfp8, bf16 = (run_figures(folder / name) for name in ("mxfp8", "bf16"))
    figures = {
        "device": device_name(device, 0) or "CPU",
        "torch": torch.__version__,
        "quantize_GB_per_s": quantize["gigabytes_of_bf16_per_second"],
        "quantize_vs_copy": quantize["quantize_vs_copy"],
        "quantize_vs_torchao": quantize["quantize_vs_torchao"],
        "main_job": {"mxfp8": mxfp8, "bf16": bf16},
        "step_time_mxfp8_vs_bf16": mxfp8["step_ms"] / bf16["step_ms"],
    }
    (folder / "figures.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    lines = [f"{figures['device']}, torch {figures['torch']}", "", "| | MXFP8 | bf16 |", "|---|---|---|"]
    lines += [f"| {name} | {mxfp8[name]:.4g} | {bf16[name]:.4g} |" for name in mxfp8]
    lines += ["", "| bf16 GB/s | |", "|---|---|"]
    lines += [f"| {name} | {rate:.1f} |" for name, rate in figures["quantize_GB_per_s"].items()]
    (folder / "figures.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    if not mxfp8["last_loss"] < mxfp8["first_loss"]:
        print("the MXFP8 run did not learn", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
