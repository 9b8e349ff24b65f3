"""Checkpoints that a run resumes from bit for bit, on the same number of processes or on another one.

`OUTPUT_DIR/checkpoints/step_00000200/` is a torch DCP folder of plain tensors (fp32 masters, optimizer state, each
rank's random generators), beside `trainer_state.json` (step, tokens, loader) and `config.yaml`. It is written under
another name and renamed when complete: a folder called `step_*` is always whole. Nothing in it depends on quantization,
so a run may go on in another precision or another layout.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import yaml
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from fsdp2.errors import ConfigurationError, nearest

from .optimizer import allocate_state, optimizer_tensors

STATE_FILE = "trainer_state.json"
CONFIG_FILE = "config.yaml"
_STEP_FOLDER = re.compile(r"step_(\d{8,})")


@dataclass
class TrainerState:
    """What a run needs beside tensors to go on: all of it is the same on every rank."""

    step: int = 0
    tokens: int = 0
    samples: int = 0
    loader: dict = field(default_factory=dict)
    world_size: int = 1
    saved_at: float = 0.0  # seconds since 1970


def step_folder(root: Path, step: int) -> Path:
    return Path(root) / f"step_{step:08d}"


def complete_checkpoints(root: Path) -> list[Path]:
    """Return the complete checkpoints under `root`, in the order they were saved.

    That is the order of steps, but for what an earlier run left in the same folder: `latest` must not mean its last.
    """
    if not Path(root).is_dir():
        return []
    found = [
        path for path in Path(root).iterdir() if _STEP_FOLDER.fullmatch(path.name) and (path / STATE_FILE).exists()
    ]
    return sorted(found, key=lambda path: (_read_state(path).saved_at, int(path.name.removeprefix("step_"))))


def _read_state(folder: Path) -> TrainerState:
    return TrainerState(**json.loads((folder / STATE_FILE).read_text(encoding="utf-8")))


def find_checkpoint(wish: str | None, root: Path) -> Path | None:
    """Return the checkpoint that `--training.resume_from_checkpoint` means, None to start from the beginning.

    Args:
        wish: None; `latest` (an error when there is none); `auto` (the latest, or none); or a path: a checkpoint, or a
            folder of checkpoints.
        root: this run's folder of checkpoints.

    Raises:
        ConfigurationError: nothing there to resume from.
    """
    if wish is None:
        return None
    if wish in ("latest", "auto"):
        found = complete_checkpoints(root)
        if not found and wish == "latest":
            raise ConfigurationError(
                f"--training.resume_from_checkpoint latest: {root} holds no complete checkpoint; "
                "'auto' starts from the beginning then"
            )
        return found[-1] if found else None
    path = Path(wish)
    if (path / STATE_FILE).exists():
        return path
    for folder in (path, path / "checkpoints"):
        if found := complete_checkpoints(folder):
            return found[-1]
    raise ConfigurationError(
        f"--training.resume_from_checkpoint {wish}: not a complete checkpoint (no {STATE_FILE}); "
        f"allowed are latest, auto, a step_* folder or a folder of them{nearest(wish, ('latest', 'auto'))}"
    )


def save(
    root: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: TrainerState,
    config_yaml: str,
    *,
    keep: int | None = None,
) -> Path:
    """Write checkpoint `state.step` and return its folder. Collective: every rank calls it.

    Args:
        root: folder of the run's checkpoints, on a file system that all ranks share.
        keep: how many checkpoints stay, this one included; the oldest go. None keeps all.
    """
    final = step_folder(root, state.step)
    temporary = final.with_name("writing_" + final.name)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)  # left by a run that was killed while writing
        temporary.mkdir(parents=True)
    dist.barrier()
    tensors = _tensors(model, optimizer)
    tensors.update(_own_random_state(rank))
    dcp.save(tensors, storage_writer=FileSystemWriter(temporary))
    if rank == 0:
        state = asdict(replace(state, world_size=world_size, saved_at=time.time()))
        (temporary / STATE_FILE).write_text(json.dumps(state, indent=2) + "\n", encoding="utf-8")
        (temporary / CONFIG_FILE).write_text(config_yaml, encoding="utf-8")
        if final.exists():  # the same step, saved by an earlier run into this folder
            shutil.rmtree(final)
        temporary.rename(final)
        if keep is not None and keep > 0:
            for old in complete_checkpoints(root)[:-keep]:
                shutil.rmtree(old)
    dist.barrier()
    return final


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> TrainerState:
    """Load a checkpoint into `model`, `optimizer` and this process's random generators. Collective.

    On another number of processes tensors are resharded and the random generators keep their present state.

    Raises:
        ConfigurationError: its tensors are not those of this model and optimizer.
    """
    state = _read_state(folder)
    allocate_state(optimizer)
    tensors = _tensors(model, optimizer)
    reader = FileSystemReader(folder)
    _check_same_tensors(folder, tensors, reader.read_metadata().state_dict_metadata)
    random_state = _own_random_state(dist.get_rank()) if state.world_size == dist.get_world_size() else {}
    dcp.load({**tensors, **random_state}, storage_reader=reader)
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


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint by name, sharing storage with the run. A tied weight appears once."""
    persistent = model.state_dict().keys()
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    tensors.update({f"model.{name}": buffer for name, buffer in model.named_buffers() if name in persistent})
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
