"""Whole runs: saved in the background, killed and restarted, on a full disk, on a folder in use."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from mindspeed_llm.training.checkpoint import complete_checkpoints
from mindspeed_llm.training.output_lock import OutputLock
from tests.processes import free_port
from tests.system.tiny import ROOT, environment, losses, rows, run_jobs

EVERY_2 = ("--training.save_steps", 2, "--training.save_hf_weights", False, "--data.split", "100,0,0")


def torchrun(processes: int, argv: list[str], restarts: int = 0) -> list[str]:
    words = ["--nproc_per_node", str(processes), "--max_restarts", str(restarts), "--monitor_interval", "0.2"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *words, "--master_port", str(free_port())]
    return [*launcher, "train_fsdp2.py", *argv]


def workers_of(launcher: int) -> list[int]:
    """Process ids of torchrun's workers, the last rank last."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in children if b"train_fsdp2.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_killed_rank_restarts_from_the_newest_checkpoint_and_async_saves_are_the_same(material, tmp_path):
    """An undisturbed run saved in the background, and one killed by SIGKILL under --max_restarts: bit for bit alike."""
    whole = material.arguments(tmp_path / "whole", processes=2, steps=12, extra=(*EVERY_2, "--training.save_async"))
    run_jobs(tmp_path, 2, [whole])
    assert [path.name for path in complete_checkpoints(tmp_path / "whole" / "checkpoints")] == [
        f"step_{step:08d}" for step in (8, 10, 12)
    ]
    killed = tmp_path / "killed"
    command = torchrun(2, material.arguments(killed, processes=2, steps=12, extra=EVERY_2), restarts=1)
    job = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while not complete_checkpoints(killed / "checkpoints"):
            assert job.poll() is None
            time.sleep(0.02)
        os.kill(workers_of(job.pid)[-1], signal.SIGKILL)
        console, _ = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode == 0
    assert b"restart 1 after a failure" in console and b"resumed from" in console
    assert losses(killed) == losses(tmp_path / "whole") and len(losses(killed)) == 12


def test_a_full_disk_ends_the_run_and_leaves_earlier_checkpoints(material, tmp_path):
    """RLIMIT_FSIZE stands for the full disk: the kernel refuses to write on in the middle of a save."""
    run = tmp_path / "run"
    argv = material.arguments(run, steps=4, extra=EVERY_2)
    code = "import resource, signal, sys, train_fsdp2; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    code += "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)); sys.exit(train_fsdp2.main(sys.argv[1:]))"
    done = subprocess.run([sys.executable, "-c", code, *argv], cwd=ROOT, env=environment(), capture_output=True)
    assert done.returncode == 1, done.stderr
    assert b"step_00000002 could not be written: a file" in done.stderr and b"disk full" in done.stderr
    assert b"Traceback" not in done.stderr
    assert list((run / "checkpoints").iterdir()) == [] and len(rows(run)) == 2
    background = [sys.executable, "-c", code, *argv, "--training.save_async"]
    done = subprocess.run(background, cwd=ROOT, env=environment(), capture_output=True)
    assert done.returncode == 1, done.stderr
    assert b"step_00000002 could not be written: a file" in done.stdout and b"training goes on" in done.stdout
    assert len(rows(run)) == 4


def test_a_second_job_is_refused(material, tmp_path):
    command = [sys.executable, "train_fsdp2.py", *material.arguments(tmp_path, steps=1)]
    with OutputLock(tmp_path):
        done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2 and "another job is writing there" in done.stderr
    assert not (tmp_path / "config.yaml").exists() and json.loads((tmp_path / "job.lock").read_text())["pid"]
