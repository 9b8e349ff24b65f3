"""What a run reports while it trains: the console line that tools parse, `metrics.jsonl`, TensorBoard, a progress bar.

Only rank 0 writes. Every value belongs to one optimizer step. A resumed run continues the same files: what an
interrupted run wrote past the checkpoint is taken out first, so a curve never doubles back.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

import torch

from fsdp2.quantization.health import TensorHealth

from .health_log import HealthLog

METRICS_FILE = "metrics.jsonl"


@dataclass
class StepMetrics:
    """One optimizer step; bytes are what this rank sent into collectives, `tokens` counts from the run's start."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    samples: int
    tokens_per_second: float
    step_time_s: float
    router_aux_loss: float | None
    memory_peak_bytes: int
    memory_reserved_bytes: int
    communication: dict[str, int] = field(default_factory=dict)  # the counters of fsdp2.communication, by their names
    model_tflops: float | None = None  # per device, by the convention of model_flops_per_token
    mfu: float | None = None  # model_tflops over the device's peak
    router: dict[str, float | list[float]] = field(default_factory=dict)  # how evenly experts were loaded
    evaluation: dict[str, float] = field(default_factory=dict)  # loss, bits_per_byte, ... where this step was evaluated

    def as_row(self) -> dict:
        """Return the flat object of `metrics.jsonl`; values that do not exist in this run are left out."""
        row = asdict(self)
        row.update(row.pop("communication"))
        row.update(row.pop("router"))
        row.update({f"eval_{key}": value for key, value in row.pop("evaluation").items()})
        return {key: value for key, value in row.items() if value is not None}


def gather_ratio(communication: dict[str, int]) -> float | None:
    """Return the bytes that parameter gathers sent over what bf16 had sent, or None when nothing was gathered."""
    sent = communication.get("all_gather_bytes_forward", 0) + communication.get("all_gather_bytes_backward", 0)
    as_bf16 = communication.get("all_gather_bytes_if_bf16", 0)
    return sent / as_bf16 if as_bf16 else None


def console_line(metrics: StepMetrics, *, total_steps: int, global_batch_size: int, now: datetime | None = None) -> str:
    """Return the line of the reference stack, field by field, with our own fields after it."""
    gigabyte = 1024.0**3
    fields = [
        f"iteration {metrics.step:8d}/{total_steps:8d}",
        f"consumed samples: {metrics.samples:10d}",
        f"consumed tokens: {metrics.tokens:10d}",
        f"elapsed time per iteration (ms): {metrics.step_time_s * 1000.0:.2f}",
        f"learning rate: {metrics.lr:.6E}",
        f"global batch size: {global_batch_size:5d}",
        f"lm loss: {metrics.loss:.6E}",
        f"grad norm: {metrics.grad_norm:.3f}",
        f"max_memory_allocated(GB): {metrics.memory_peak_bytes / gigabyte:.2f}",
        f"max_memory_reserved(GB): {metrics.memory_reserved_bytes / gigabyte:.2f}",
        f"tokens per second: {metrics.tokens_per_second:.0f}",
    ]
    if metrics.router_aux_loss is not None:
        fields.append(f"router aux loss: {metrics.router_aux_loss:.4f}")
    if metrics.communication:
        gathered = sum(metrics.communication[f"all_gather_bytes_{phase}"] for phase in ("forward", "backward"))
        fields.append(f"all-gather sent(MB): {gathered / 1e6:.2f}")
        ratio = gather_ratio(metrics.communication)
        if ratio is not None:
            fields.append(f"vs bf16: {ratio:.3f}")
    if metrics.model_tflops is not None:
        fields.append(f"TFLOP/s per device: {metrics.model_tflops:.3f}")
    if metrics.mfu is not None:
        fields.append(f"MFU: {metrics.mfu:.1%}")
    fields += [f"eval {key.replace('_', ' ')}: {value:.4f}" for key, value in metrics.evaluation.items()]
    stamp = (now or datetime.now()).strftime("%Y-%m-%d %H:%M:%S")
    return f"INFO [{stamp}] >>  " + " | ".join(fields) + " |"


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """Return the peaks of allocated and of reserved bytes of a device; on a CPU, of the process's resident memory."""
    if device.type != "cpu":
        module = torch.get_device_module(device)
        return module.max_memory_allocated(device), module.max_memory_reserved(device)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return peak, peak


class MetricsWriter:
    """Writes every logged step to the console, `OUTPUT_DIR/metrics.jsonl` and TensorBoard; silent on all ranks but 0.

    Args:
        output_dir: where `metrics.jsonl` goes.
        tensorboard_dir: folder of the event files.
        rank: this process's rank.
        first_step: the step this process starts with; earlier steps' lines are kept, later ones of an interrupted run
            are removed.
    """

    def __init__(
        self,
        output_dir: Path,
        tensorboard_dir: Path,
        *,
        rank: int,
        first_step: int,
        total_steps: int,
        global_batch_size: int,
    ) -> None:
        self.total_steps, self.global_batch_size = total_steps, global_batch_size
        self._file = self._tensorboard = self._bar = self._health = None
        if rank != 0:
            return
        from torch.utils.tensorboard import SummaryWriter

        path = Path(output_dir) / METRICS_FILE
        kept = [row for row in read_metrics(path) if row["step"] < first_step] if first_step > 1 else []
        _replace_text(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(str(tensorboard_dir), purge_step=first_step)
        self._health = HealthLog(output_dir, self._tensorboard, first_step)
        if sys.stdout.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=total_steps, initial=first_step - 1, unit="step", dynamic_ncols=True, file=sys.stdout
            )

    def log(self, metrics: StepMetrics) -> None:
        """Write one step everywhere."""
        if self._file is None:
            return
        self.print(console_line(metrics, total_steps=self.total_steps, global_batch_size=self.global_batch_size))
        row = metrics.as_row()
        self._file.write(json.dumps(row) + "\n")  # json writes NaN as NaN
        self._file.flush()
        for expert, tokens in enumerate(row.pop("tokens_per_expert", ())):
            self._tensorboard.add_scalar(f"router/tokens_of_expert_{expert:03d}", tokens, metrics.step)
        for key, value in row.items():
            if key != "step":
                group = "eval" if key.startswith("eval_") else "train"
                self._tensorboard.add_scalar(f"{group}/{key.removeprefix('eval_')}", value, metrics.step)

    def log_health(self, rows: list[TensorHealth]) -> None:
        """Write the quantization health of one step."""
        if self._health is not None:
            self._health.write(rows)

    def advance(self) -> None:
        """Move the progress bar by one step."""
        if self._bar is not None:
            self._bar.update(1)

    def print(self, text: str) -> None:
        """Print above the progress bar, rank 0 only."""
        if self._file is None:
            return
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)

    def close(self) -> None:
        for stream in (self._bar, self._file, self._tensorboard):
            if stream is not None:
                stream.close()


def read_metrics(path: Path) -> list[dict]:
    """Return the rows of a `metrics.jsonl` up to one that an interruption cut short; a missing file has no rows."""
    rows = []
    if Path(path).exists():
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows


def _replace_text(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader, or a crash, sees the old file or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
