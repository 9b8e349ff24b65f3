"""SIGTERM and SIGINT end a run between two steps, after a checkpoint, instead of in the middle of one.

A scheduler that preempts a job sends SIGTERM and waits; torchrun passes it on to every process. The first signal only
sets a flag, which the loop shares among the processes after each step, so that all of them save the same step. A Ctrl-C
repeated later ends the process at once.
"""

from __future__ import annotations

import signal
import time
from types import FrameType

REPEAT_SECONDS = 3.0  # torchrun passes on the SIGINT that the terminal already sent to every process: not a second wish


class StopRequest:
    """Context manager that catches SIGTERM and SIGINT; `signum` is the first one received, 0 before that."""

    def __init__(self) -> None:
        self.signum = 0
        self._received_at = 0.0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._previous[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(self, *exception) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self.signum == 0:
            self.signum, self._received_at = signum, time.monotonic()
        elif signum == signal.SIGINT and time.monotonic() - self._received_at > REPEAT_SECONDS:
            raise KeyboardInterrupt

    @property
    def exit_status(self) -> int:
        """The shell's status of a process ended by this signal: 128 + its number."""
        return 128 + self.signum
