"""Profile the chosen steps on the chosen ranks: torch.profiler on CPU and CUDA, torch_npu.profiler on NPU.

`--training.profile` with `profile_step_start` S and `profile_step_end` E records the steps S + 1 to E (S steps run
before the recording; -1 records one). Every profiled rank writes its own trace into `profile_save_path`: Chrome trace
JSON that Perfetto and TensorBoard's profiler open, on NPU in the folder that MindStudio Insight opens. Then
`tools/profile_report.py profile_save_path` makes one page of it. Other steps and ranks pay nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fsdp2.errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from mindspeed_llm.arguments.training import TrainingArguments

NPU_LEVELS = {"level_none": "Level_none", "level0": "Level0", "level1": "Level1", "level2": "Level2"}
NPU_EXPORTS = {"text": "Text", "db": "Db"}


class StepProfiler:
    """Starts and stops the profiler around the steps that flags choose.

    Args:
        training: the `profile*` flags.
        rank: this process's; profiled when `profile_ranks` holds it or -1.
        device: its type decides the profiler.

    Raises:
        ConfigurationError: a level or an export type that the profiler of an NPU has not.
    """

    def __init__(self, training: TrainingArguments, rank: int, device: torch.device) -> None:
        self._training, self._rank, self._device = training, rank, device
        self._active = training.profile and (-1 in training.profile_ranks or rank in training.profile_ranks)
        self._first = training.profile_step_start
        end = training.profile_step_end
        self._end = end if end >= 0 else self._first + 1
        self._profiler: Any = None
        if training.profile:
            check_level(training.profile_level, training.profile_export_type)
            if self._end <= self._first:
                raise ConfigurationError(
                    f"--training.profile_step_end {end}: must be above --training.profile_step_start {self._first}, "
                    "or -1 for one step"
                )

    @property
    def folder(self) -> Path:
        return Path(self._training.profile_save_path)

    def before_step(self, steps_done: int) -> None:
        """Start before the first profiled step; `steps_done` optimizer steps are complete."""
        if self._active and self._profiler is None and self._first <= steps_done < self._end:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._profiler = self._npu_profiler() if self._device.type == "npu" else self._torch_profiler()
            self._profiler.start()

    def after_step(self, steps_done: int) -> Path | None:
        """Mark the end of a step; after the last profiled one, write the trace and return its folder."""
        if self._profiler is None:
            return None
        if steps_done < self._end:
            self._profiler.step()
            return None
        return self.close()

    def close(self) -> Path | None:
        """Write what was recorded so far, if anything was."""
        if self._profiler is None:
            return None
        self._profiler.stop()
        self._profiler = None
        return self.folder

    def phase(self, name: str) -> AbstractContextManager:
        """Name a part of a step in the trace; nothing while nothing is recorded."""
        return nullcontext() if self._profiler is None else torch.profiler.record_function(f"step: {name}")

    def _torch_profiler(self) -> torch.profiler.profile:
        training, activities = self._training, []
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        if self._device.type == "cpu" or training.profile_with_cpu:
            activities.append(torch.profiler.ProfilerActivity.CPU)
        return torch.profiler.profile(
            activities=activities,
            on_trace_ready=torch.profiler.tensorboard_trace_handler(str(self.folder), f"rank{self._rank}"),
            record_shapes=training.profile_record_shapes,
            profile_memory=training.profile_with_memory,
            with_stack=training.profile_with_stack,
        )

    def _npu_profiler(self) -> Any:
        from torch_npu import profiler as npu

        training = self._training
        activities = [npu.ProfilerActivity.NPU]
        if training.profile_with_cpu:
            activities.append(npu.ProfilerActivity.CPU)
        settings = npu._ExperimentalConfig(
            profiler_level=getattr(npu.ProfilerLevel, NPU_LEVELS[training.profile_level]),
            export_type=[getattr(npu.ExportType, NPU_EXPORTS[training.profile_export_type])],
            data_simplification=training.profile_data_simplification,
        )
        return npu.profile(
            activities=activities,
            on_trace_ready=npu.tensorboard_trace_handler(str(self.folder), f"rank{self._rank}"),
            record_shapes=training.profile_record_shapes,
            profile_memory=training.profile_with_memory,
            with_stack=training.profile_with_stack,
            experimental_config=settings,
        )


def check_level(level: str, export_type: str) -> None:
    """Refuse a level or an export type that torch_npu's profiler has not."""
    for flag, value, known in (
        ("profile_level", level, NPU_LEVELS),
        ("profile_export_type", export_type, NPU_EXPORTS),
    ):
        if value not in known:
            raise ConfigurationError(
                f"--training.{flag} {value}: allowed are {', '.join(known)}{nearest(value, known)}"
            )
