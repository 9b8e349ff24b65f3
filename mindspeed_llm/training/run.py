"""One training run from resolved arguments to an exit status: prepare, announce, start torch.distributed, train."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

from fsdp2.errors import ConfigurationError
from fsdp2.peers import PeerLostError, naming_lost_peers

from . import plan_report
from .checkpoint import CheckpointError
from .distributed import Launch, device_type, make_deterministic, start, stop
from .job import Job, prepare
from .nonfinite import NonFiniteError
from .output_lock import OutputLock
from .trainer import Trainer

if TYPE_CHECKING:
    from mindspeed_llm.arguments import Arguments


def run(arguments: Arguments, launch: Launch) -> int:
    """Train and return the exit status (see train_fsdp2.py).

    Raises:
        ConfigurationError: something that every rank finds wrong before training.
    """
    make_deterministic(arguments.training.seed, bool(arguments.training.deterministic))
    device = device_type()
    job = prepare(arguments, launch, device)
    if arguments.training.dry_run:
        if launch.rank == 0:
            _announce(job)
            print(plan_report.of_arguments(arguments, job.model, job.plan), flush=True)
        return 0
    with OutputLock(job.output_dir) if launch.rank == 0 else nullcontext():
        if launch.rank == 0:
            _announce(job)
        return _train(job, launch, device)


def _train(job: Job, launch: Launch, device: str) -> int:
    trainer_device = start(launch, device)
    try:
        trainer = Trainer(job, trainer_device)
        try:
            with naming_lost_peers():
                status = trainer.train()
        except PeerLostError as error:  # each rank says it: rank 0 may be the lost one
            print(f"error: {error}", file=sys.stderr, flush=True)
            return 1
        except ConfigurationError as error:  # in the data that this rank read: others may not know of it
            print(f"error on rank {launch.rank}: {error}", file=sys.stderr, flush=True)
            return 2
    except (NonFiniteError, CheckpointError) as error:  # on all ranks
        if launch.rank == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        status = 1
    stop()
    return status


def _announce(job: Job) -> None:
    """Print warnings and the plan; write `config.yaml` and `quantization_plan.json` into the output folder."""
    for warning in job.arguments.warnings:
        print(f"warning: {warning}")
    print(job.plan_text, flush=True)
    try:
        job.output_dir.mkdir(parents=True, exist_ok=True)
        (job.output_dir / "config.yaml").write_text(job.arguments.to_yaml(), encoding="utf-8")
        rows = json.dumps(job.quantization_rows, indent=1) + "\n"
        (job.output_dir / "quantization_plan.json").write_text(rows, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"--training.output_dir {job.output_dir}: cannot be written ({error.strerror})"
        ) from error
