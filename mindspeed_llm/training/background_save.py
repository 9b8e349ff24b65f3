"""Checkpoints written while training goes on (`--training.save_async`).

Between two steps a save only copies its tensors to memory of its own on the CPU; a thread then writes the copies. The
thread talks to the other ranks over a gloo group that nothing else uses, so that its collectives never meet those of
training. At most one save is under way: the next one waits for it. All ranks learn of a failure alike, since every
phase of a save is agreed on by all of them; training goes on and the run's exit status says so in the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from .checkpoint import CheckpointError, TrainerState, write


class BackgroundSaves:
    """Writes checkpoints under `root` in a thread. Construction and `start` are collective.

    Attributes:
        failed: whether a save has failed since the run began.
    """

    def __init__(self, root: Path, *, keep: int | None = None) -> None:
        self.root, self.keep = root, keep
        self.failed = False
        self._group = dist.new_group(backend="gloo")
        pinned = torch.accelerator.current_accelerator(check_available=True) is not None
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=pinned,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=pinned,
            )
        )
        self._thread: threading.Thread | None = None
        self._failure: str | None = None

    def start(self, tensors: dict[str, torch.Tensor], state: TrainerState, config_yaml: str) -> None:
        """Copy `tensors` and begin to write them; the caller may change them as soon as this returns."""
        self.wait()
        copies = self._stager.stage(tensors)
        self._thread = threading.Thread(
            target=self._run, args=(copies, state, config_yaml), name="checkpoint", daemon=True
        )
        self._thread.start()

    def _run(self, tensors: dict[str, torch.Tensor], state: TrainerState, config_yaml: str) -> None:
        try:
            write(self.root, tensors, state, config_yaml, keep=self.keep, group=self._group)
        except CheckpointError as error:
            self._failure, self.failed = str(error), True
        except Exception as error:  # another rank is gone: the main thread finds that out by itself
            self._failure, self.failed = f"{type(error).__name__}: {error}", True

    @property
    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def report(self, say: Callable[[str], None]) -> None:
        """Tell `say` of a save that has failed since the last call."""
        failure, self._failure = self._failure, None
        if failure is not None:
            say(f"error: {failure}; training goes on")

    def wait(self) -> None:
        """Return when nothing is being written any more."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Wait, and free the copies' memory."""
        self.wait()
        self._stager.close()
