"""Checkpoints that a run resumes from bit for bit, on the same number of processes or on another one.

What is in one: plain tensors (fp32 masters, optimizer state, each rank's random generators) in torch DCP's format,
`trainer_state.json` (step, tokens, loader) and `config.yaml`. Nothing in it depends on quantization, so a run may go on
in another precision or another layout. Folders and their names are `checkpoint_folder.py`'s. Every phase of a save ends
with all ranks agreeing that it worked on all of them: a full disk at rank 0 leaves nobody waiting.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter

from fsdp2.errors import ConfigurationError

from . import checkpoint_folder
from .checkpoint_folder import (
    CONFIG_FILE,
    STATE_FILE,
    TrainerState,
    complete_checkpoints,
    find_checkpoint,
    problem,
    read_state,
    step_folder,
)
from .dcp_files import SafeReader
from .optimizer import allocate_state, optimizer_tensors

__all__ = [
    "CONFIG_FILE", "STATE_FILE", "CheckpointError", "TrainerState", "changed_settings", "check_space",
    "complete_checkpoints", "find_checkpoint", "load", "run_tensors", "save", "state_bytes", "step_folder", "write",
]  # fmt: skip
SPARE_BYTES = 16 * 2**20  # for DCP's index, the configuration, and what else the run writes meanwhile


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. Raised on all ranks alike; earlier checkpoints are as they were."""


def run_tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Return what this rank contributes to a checkpoint, by name, sharing storage with the run; without an optimizer,
    the model alone."""
    tensors = _tensors(model, optimizer)
    if optimizer is not None:
        tensors.update(_own_random_state(dist.get_rank()))
    return tensors


def save(
    root: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainerState,
    config_yaml: str,
    *,
    keep: int | None = None,
    only_model: bool = False,
) -> Path:
    """Write checkpoint `state.step` and return its folder. Collective: every rank calls it.

    Args:
        root: folder of the run's checkpoints, on a file system that all ranks share.
        keep: how many checkpoints stay, this one included; the oldest go. None keeps all.
        only_model: leave out optimizer, random generators and loader.

    Raises:
        CheckpointError: on all ranks, when it failed on one.
    """
    tensors = run_tensors(model, None if only_model else optimizer)
    return write(root, tensors, replace(state, only_model=only_model), config_yaml, keep=keep)


def write(
    root: Path,
    tensors: dict[str, torch.Tensor],
    state: TrainerState,
    config_yaml: str,
    *,
    keep: int | None = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write `tensors` as checkpoint `state.step`, see `save`. Collective over `group`, which has all ranks."""
    final = step_folder(root, state.step)
    temporary = final.with_name("writing_" + final.name)
    is_first = dist.get_rank() == 0
    try:
        with _on_all_ranks(f"checkpoint {final} could not be written", group):
            if is_first:
                checkpoint_folder.remove_leftovers(root)
                temporary.mkdir(parents=True)
                _check_free(root, tensors)
        with _on_all_ranks(f"checkpoint {final} could not be written", group):
            dcp.save(tensors, storage_writer=FileSystemWriter(temporary), process_group=group)
        with _on_all_ranks(f"checkpoint {final} could not be completed", group):
            if is_first:
                state = replace(state, world_size=dist.get_world_size())
                checkpoint_folder.commit(temporary, final, state, config_yaml)
                if keep is not None and keep > 0:
                    whole = [path for path in complete_checkpoints(root) if problem(path, resume=False) is None]
                    for old in whole[:-keep]:  # what is broken never pushes out what is whole
                        checkpoint_folder.remove(old)
    except CheckpointError:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


@contextmanager
def _on_all_ranks(what: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Run the block; raise CheckpointError on every rank where it failed on any. Collective."""
    failure = None
    try:
        yield
    except (Exception, CheckpointException) as error:
        failure = error
    text = None if failure is None else _reason(failure)
    texts: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, text, group=group)
    found = dict.fromkeys(text for text in texts if text is not None)
    if found:
        raise CheckpointError(f"{what}: {'; '.join(found)}") from failure


def _reason(error: BaseException) -> str:
    """One line. DCP wraps what happened on each rank, with its traceback."""
    if isinstance(error, CheckpointException):
        return "; ".join(dict.fromkeys(_reason(cause) for cause, _ in error.failures.values()))
    while error.__cause__ is not None or error.__context__ is not None:  # torch's writer hides an OSError
        error = error.__cause__ or error.__context__
    if isinstance(error, OSError):
        return f"{error.strerror}{f' ({error.filename})' if error.filename else ''}"
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "inline_container" in text:  # all that is left of an OSError that went through torch's C++ writer
        return f"a file could not be written to its end; is the disk full, or a quota reached? ({text})"
    return text


def state_bytes(tensors: dict[str, torch.Tensor]) -> int:
    """Return the bytes of a checkpoint of `tensors`, of all ranks together; a DTensor counts as a whole."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _check_free(root: Path, tensors: dict[str, torch.Tensor]) -> None:
    own = sum(t.numel() * t.element_size() for name, t in tensors.items() if name.startswith("rng."))
    needed = state_bytes(tensors) + own * (dist.get_world_size() - 1) + SPARE_BYTES
    free = shutil.disk_usage(root).free
    if free < needed:
        raise OSError(
            28,
            f"a checkpoint needs {needed / 2**20:,.0f} MiB and {free / 2**20:,.0f} MiB are free; make room there "
            "or lower --training.save_total_limit",
            str(root),
        )


def check_space(root: Path, model: nn.Module, *, copies: int) -> None:
    """Check before training that a checkpoint fits where it will be written. Collective.

    Args:
        copies: tensors of a parameter's size that a checkpoint has for each: 3 with AdamW, 1 of the model alone.

    Raises:
        CheckpointError: on all ranks.
    """
    with _on_all_ranks("no checkpoint could be written", None):
        if dist.get_rank() == 0:
            Path(root).mkdir(parents=True, exist_ok=True)
            tensors = _tensors(model, None)
            _check_free(root, {f"{name}.{copy}": t for name, t in tensors.items() for copy in range(copies)})


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> TrainerState:
    """Load a checkpoint into `model`, `optimizer` and this process's random generators. Collective.

    On another number of processes tensors are resharded and the random generators keep their present state.

    Raises:
        ConfigurationError: it is not whole, or its tensors are not those of this model and optimizer.
    """
    if what := problem(folder):
        raise ConfigurationError(what)
    state = read_state(folder)
    if not all(optimizer.state[parameter] for group in optimizer.param_groups for parameter in group["params"]):
        allocate_state(optimizer)
    tensors = _tensors(model, optimizer)
    reader = SafeReader(folder)
    _check_same_tensors(folder, tensors, reader.read_metadata().state_dict_metadata)
    random_state = _own_random_state(dist.get_rank()) if state.world_size == dist.get_world_size() else {}
    try:
        dcp.load({**tensors, **random_state}, storage_reader=reader)
    except CheckpointException as error:
        raise ConfigurationError(f"{folder}: cannot be read: {_reason(error)}") from error
    _set_random_state(random_state, device)
    return state


def changed_settings(folder: Path, config_yaml: str) -> list[str]:
    """Return what differs between a checkpoint's configuration and this run's, as `group.name: old -> new`."""
    saved = folder / CONFIG_FILE
    if not saved.exists():
        return []
    old, new = (_flat(yaml.safe_load(text) or {}) for text in (saved.read_text(encoding="utf-8"), config_yaml))
    uninteresting = ("training.output_dir", "training.resume_from_checkpoint")
    return [
        f"{key}: {old.get(key)} -> {new.get(key)}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and key not in uninteresting
    ]


def _flat(tree: dict) -> dict:
    return {f"{group}.{key}": value for group, values in tree.items() for key, value in (values or {}).items()}


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint by name, sharing storage with the run. A tied weight appears once."""
    persistent = model.state_dict().keys()
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    tensors.update({f"model.{name}": buffer for name, buffer in model.named_buffers() if name in persistent})
    if optimizer is not None:
        tensors.update({f"optimizer.{name}": value for name, value in optimizer_tensors(optimizer).items()})
    return tensors


def _check_same_tensors(folder: Path, tensors: dict[str, torch.Tensor], saved: dict) -> None:
    names = {name for name in saved if not name.startswith("rng.")}
    missing, unexpected = sorted(tensors.keys() - names), sorted(names - tensors.keys())
    if missing or unexpected:
        examples = [f"lacks {name}" for name in missing[:2]] + [
            f"has {name}, which the model lacks" for name in unexpected[:2]
        ]
        raise ConfigurationError(f"{folder} is not a checkpoint of this model: it {'; it '.join(examples)}")
    for name, tensor in tensors.items():
        if tuple(saved[name].size) != tuple(tensor.shape):
            raise ConfigurationError(
                f"{folder} is not a checkpoint of this model: {name} is {list(saved[name].size)} there "
                f"and {list(tensor.shape)} here"
            )


def _own_random_state(rank: int) -> dict[str, torch.Tensor]:
    """Return this process's generators as tensors: torch's for CPU and device, Python's, NumPy's."""
    version, words, gauss = random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_gauss": torch.tensor(float("nan") if gauss is None else gauss, dtype=torch.float64),
        "numpy": torch.tensor([*numpy_state["state"]["key"].tolist(), numpy_state["state"]["pos"]], dtype=torch.int64),
        "numpy_gauss": torch.tensor([numpy_state["has_gauss"], numpy_state["gauss"]], dtype=torch.float64),
    }
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        states["device"] = torch.get_device_module(accelerator).get_rng_state()
    return {f"rng.rank_{rank}.{name}": value for name, value in states.items()}


def _set_random_state(tensors: dict[str, torch.Tensor], device: torch.device) -> None:
    states = {name.rsplit(".", 1)[1]: value for name, value in tensors.items()}
    if not states:
        return
    torch.set_rng_state(states["torch"])
    version, *words = states["python"].tolist()
    gauss = states["python_gauss"].item()
    random.setstate((version, tuple(words), None if gauss != gauss else gauss))
    *key, pos = states["numpy"].tolist()
    has_gauss, numpy_gauss = states["numpy_gauss"].tolist()
    np.random.set_state(
        {
            "bit_generator": "MT19937",
            "state": {"key": np.array(key, dtype=np.uint32), "pos": pos},
            "has_gauss": int(has_gauss),
            "gauss": numpy_gauss,
        }
    )
    if "device" in states:
        torch.get_device_module(device).set_rng_state(states["device"])
