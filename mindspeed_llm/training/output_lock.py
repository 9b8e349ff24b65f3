"""One job per output folder: two would overwrite each other's checkpoints and metrics.

The lock is the operating system's, on `OUTPUT_DIR/job.lock`, held by rank 0's process: it ends with that process
however it dies, and no stale file has to be deleted by hand. It is a POSIX record lock, which forked workers do not
inherit and shared file systems carry to other hosts. The file says who holds it and when the job first started, which
torchrun's restarts of the same job read.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import sys
import time
from pathlib import Path

from fsdp2.errors import ConfigurationError

LOCK_FILE = "job.lock"
PATIENCE_S = 10.0  # torchrun starts a job anew while the kernel still takes the killed one apart


def restart_count() -> int:
    """How often torchrun has restarted this job after a failure (`--max_restarts`)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def first_start(output_dir: Path) -> float:
    """When the job that torchrun restarts now first started, seconds since 1970; infinity when that is unknown."""
    try:
        return float(json.loads((Path(output_dir) / LOCK_FILE).read_text(encoding="utf-8"))["started_at"])
    except (OSError, ValueError, KeyError, TypeError):
        return float("inf")


class OutputLock:
    """Context manager that holds the folder.

    Raises:
        ConfigurationError: another job holds it, or it cannot be written.
    """

    def __init__(self, output_dir: Path) -> None:
        self.path = Path(output_dir) / LOCK_FILE
        self._file = None

    def __enter__(self) -> OutputLock:
        started_at = first_start(self.path.parent) if restart_count() else time.time()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("a+", encoding="utf-8")
            self._acquire()
            self._file.truncate(0)
            owner = {"host": socket.gethostname(), "pid": os.getpid(), "started_at": min(started_at, time.time())}
            self._file.write(json.dumps(owner) + "\n")
            self._file.flush()
        except OSError as error:
            raise ConfigurationError(
                f"--training.output_dir {self.path.parent}: cannot be written ({error.strerror})"
            ) from error
        return self

    def _acquire(self) -> None:
        deadline = time.monotonic() + (PATIENCE_S if restart_count() else 0)
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except (BlockingIOError, PermissionError):
                if time.monotonic() >= deadline:
                    raise ConfigurationError(
                        f"--training.output_dir {self.path.parent}: another job is writing there{self._holder()}; end "
                        "it or choose another folder"
                    ) from None
                time.sleep(0.1)
            except OSError as error:
                print(f"warning: {self.path}: this file system has no locks ({error.strerror})", file=sys.stderr)
                return

    def _holder(self) -> str:
        try:
            self._file.seek(0)
            owner = json.loads(self._file.read())
            return f" (process {owner['pid']} on {owner['host']})"
        except (OSError, ValueError, KeyError):
            return ""

    def __exit__(self, *exception) -> None:
        if self._file is not None:
            self._file.close()  # which releases the lock
