"""Kill ranks of a training job with SIGKILL, again and again, and compare what comes out with an undisturbed run.

A tiny model trains on two gloo processes under `torchrun --max_restarts`, saving after every second step. Half of the
kills come while a checkpoint is being written (a `writing_*` folder is there), half at a random moment of a step; which
rank dies is random too. The job must restart by itself from a whole checkpoint each time and end with the losses of
every step and the final weights bit for bit as in the undisturbed run.

    python tools/benchmarks/faults.py --json FILE [--kills 20] [--seed 0]

writes kills, kills_in_save, resumed (restarts that went on from a checkpoint), identical (whether all losses and all
final tensors are equal), and steps. Exit status 1 unless every kill was survived and the runs are identical.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from safetensors.torch import load_file

from mindspeed_llm.training.checkpoint import complete_checkpoints
from tests.processes import free_port
from tests.system.tiny import ROOT, Material, environment, losses, make_material, rows

PATIENCE_S = 180.0  # for a restarted job to reach its next kill


def command(material: Material, run: Path, steps: int, restarts: int) -> list[str]:
    words = ["--nproc_per_node", "2", "--max_restarts", str(restarts), "--monitor_interval", "0.1"]
    launcher = [sys.executable, "-m", "torch.distributed.run", *words, "--master_port", str(free_port())]
    extra = ("--training.save_steps", 2, "--data.split", "100,0,0")
    return [*launcher, "train_fsdp2.py", *material.arguments(run, processes=2, steps=steps, extra=extra)]


def workers_of(launcher: int) -> list[int]:
    """Process ids of torchrun's ranks."""
    found = []
    for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        try:
            if b"train_fsdp2.py" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(int(pid))
        except OSError:  # it has just ended
            continue
    return found


def newest_step(run: Path) -> int:
    found = complete_checkpoints(run / "checkpoints")
    return int(found[-1].name.removeprefix("step_")) if found else 0


def wait_until(condition, job: subprocess.Popen) -> bool:
    """Whether `condition` came true before the job ended; raises when neither happens in time."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if job.poll() is not None:
            return False
        if time.monotonic() > deadline:
            raise TimeoutError(f"the job made no progress in {PATIENCE_S:.0f} s")
        time.sleep(0.0005)
    return True


def disturb(job: subprocess.Popen, run: Path, kills: int, chance: random.Random) -> tuple[int, int]:
    """Kill a rank `kills` times; returns how many kills there were, and how many of them inside a save."""
    done = in_save = 0
    for number in range(kills):
        before = newest_step(run)
        if not wait_until(lambda before=before: newest_step(run) > before, job):  # so that every restart gets on
            break
        if number % 2 == 0:
            if not wait_until(lambda: any((run / "checkpoints").glob("writing_*")), job):
                break
            time.sleep(chance.uniform(0, 0.02))
        else:
            time.sleep(chance.uniform(0, 1.0))
        victims = workers_of(job.pid)
        if job.poll() is not None or not victims:
            break
        in_save += any((run / "checkpoints").glob("writing_*"))
        os.kill(chance.choice(victims), signal.SIGKILL)
        done += 1
    return done, in_save


def same_weights(a: Path, b: Path) -> bool:
    one, two = (load_file(run / "hf" / "model.safetensors") for run in (a, b))
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", required=True, metavar="FILE")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    steps = 10 * options.kills + 10  # a kill costs some steps until the next one: enough for all
    with tempfile.TemporaryDirectory(prefix="faults_") as name:
        folder = Path(name)
        material = make_material(folder / "material")
        whole, killed = folder / "whole", folder / "killed"
        quiet = {"cwd": ROOT, "env": environment(), "stderr": subprocess.DEVNULL}
        subprocess.run(command(material, whole, steps, 0), check=True, stdout=subprocess.DEVNULL, **quiet)
        console = folder / "console.txt"
        with console.open("w") as output:
            job = subprocess.Popen(command(material, killed, steps, options.kills), stdout=output, **quiet)
            try:
                kills, in_save = disturb(job, killed, options.kills, random.Random(options.seed))
                status = job.wait(timeout=1800)
            finally:
                job.kill()
        resumed = console.read_text().count("resumed from ")
        identical = (
            status == 0
            and [row["step"] for row in rows(killed)] == list(range(1, steps + 1))
            and losses(killed) == losses(whole)
            and same_weights(whole, killed)
        )
    result = {
        "kills": kills,
        "kills_in_save": in_save,
        "resumed": resumed,
        "identical": identical,
        "steps": steps,
        "seed": options.seed,
    }
    Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0 if identical and resumed == kills == options.kills else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
