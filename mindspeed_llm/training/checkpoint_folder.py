"""Folders of checkpoints: which is whole, which one a run goes on from, and what is wrong with the others.

A checkpoint is `step_00000200/`: torch DCP's files, `config.yaml` and, written last, `trainer_state.json`, which lists
every file with its size. It gets its name by a rename when it is complete and loses it by a rename before it is
deleted, so a job killed at any moment leaves `writing_*` and `removed_*` folders, which nobody reads, but no broken
`step_*`. Copies, full disks and other programs can still break one; `problem` says how.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from fsdp2.errors import ConfigurationError, nearest

STATE_FILE = "trainer_state.json"
CONFIG_FILE = "config.yaml"
METADATA_FILE = ".metadata"
FORMAT_VERSION = 2  # 2 added `files` and `only_model`; 1 is read too, without a check of sizes
_STEP_FOLDER = re.compile(r"step_(\d{8,})")
_TO_WEIGHTS = "tools/convert_checkpoint.py makes of it a folder that --model.model_name_or_path starts from"


@dataclass
class TrainerState:
    """What a run needs beside tensors to go on: all of it is the same on every rank."""

    step: int = 0
    tokens: int = 0
    samples: int = 0
    loader: dict = field(default_factory=dict)
    world_size: int = 1
    saved_at: float = 0.0  # seconds since 1970
    only_model: bool = False  # no optimizer, random generators or loader: nothing to resume from
    format_version: int = 1
    files: dict[str, int] = field(default_factory=dict)  # bytes of every other file


def step_folder(root: Path, step: int) -> Path:
    return Path(root) / f"step_{step:08d}"


def read_state(folder: Path) -> TrainerState:
    """Return a checkpoint's state.

    Raises:
        ConfigurationError: there is none, or it is none of ours.
    """
    path = Path(folder) / STATE_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        version = values.get("format_version", 1)
        if version > FORMAT_VERSION:
            raise ConfigurationError(
                f"{folder}: is of a newer release (format {version}; this one reads up to {FORMAT_VERSION})"
            )
        known = {entry.name for entry in fields(TrainerState)}
        if unknown := sorted(values.keys() - known):
            raise ConfigurationError(f"{path}: is not a state of this trainer: it has {unknown[0]!r}")
        if not isinstance(values.get("step"), int):
            raise ConfigurationError(f"{path}: is not a state of this trainer: it has no step")
        return TrainerState(**values)
    except FileNotFoundError:
        raise ConfigurationError(f"{folder}: has no {STATE_FILE}, so it was not saved completely") from None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{path}: cannot be read: {error}") from None


def problem(folder: Path, *, resume: bool = True) -> str | None:
    """Return why `folder` is not a whole checkpoint (with `resume`: one that training goes on from), None if it is."""
    folder = Path(folder)
    if not folder.is_dir():
        return f"{folder}: does not exist"
    if folder.name.startswith("writing_"):
        return f"{folder}: is half-written, its job ended while saving"
    if folder.name.startswith("removed_"):
        return f"{folder}: is half-deleted"
    if not (folder / STATE_FILE).exists() and (folder / METADATA_FILE).exists():
        return f"{folder}: is half-written, or torch wrote it without this trainer: it has no {STATE_FILE}"
    try:
        state = read_state(folder)
    except ConfigurationError as error:
        return str(error)
    for name, size in state.files.items():
        path = folder / name
        if not path.is_file():
            return f"{folder}: lacks the file {name}"
        if path.stat().st_size != size:
            return f"{folder}: {name} has {path.stat().st_size:,} bytes of {size:,}, it is truncated or another file"
    if not state.files and not (folder / METADATA_FILE).is_file():
        return f"{folder}: lacks the file {METADATA_FILE}"
    if resume and state.only_model:
        return f"{folder}: holds weights only (save_only_model), nothing can be resumed from it; {_TO_WEIGHTS}"
    return None


def complete_checkpoints(root: Path) -> list[Path]:
    """Return the checkpoints under `root`, in the order they were saved: `step_*` folders with a readable state.

    That is the order of steps, but for what an earlier run left in the same folder: `latest` must not mean its last.
    """
    found = []
    if Path(root).is_dir():
        for path in Path(root).iterdir():
            if _STEP_FOLDER.fullmatch(path.name):
                try:
                    found.append((read_state(path).saved_at, int(path.name.removeprefix("step_")), path))
                except ConfigurationError:
                    continue
    return [path for *_, path in sorted(found)]


def newest_whole(root: Path, *, saved_after: float = 0.0) -> Path | None:
    """Return the newest checkpoint under `root` that training can go on from, saved at or after `saved_after`."""
    for path in reversed(complete_checkpoints(root)):
        if problem(path) is None and read_state(path).saved_at >= saved_after:
            return path
    return None


def skipped(root: Path, chosen: Path | None) -> list[str]:
    """Return what is wrong with the step folders under `root` that are newer than `chosen`, for the console."""
    if not Path(root).is_dir():
        return []
    listed = complete_checkpoints(root)
    newer = listed[listed.index(chosen) + 1 :] if chosen in listed else listed if chosen is None else []
    unreadable = [p for p in Path(root).iterdir() if _STEP_FOLDER.fullmatch(p.name) and p not in listed]
    return [text for path in [*newer, *sorted(unreadable)] if (text := problem(path)) is not None]


def find_checkpoint(wish: str | None, root: Path) -> Path | None:
    """Return the checkpoint that `--training.resume_from_checkpoint` means, None to start from the beginning.

    Args:
        wish: None; `latest` (the last one saved, which must be whole); `auto` (the newest whole one, or the beginning
            where nothing was saved); or a path: a checkpoint, or a folder of checkpoints.
        root: this run's folder of checkpoints.

    Raises:
        ConfigurationError: what was asked for cannot be resumed from; names the checkpoint that could.
    """
    if wish is None:
        return None
    flag = f"--training.resume_from_checkpoint {wish}"
    if wish == "auto":
        found = newest_whole(root)
        if found is None and (broken := skipped(root, None)):
            raise ConfigurationError(
                f"{flag}: no checkpoint in {root} can be resumed from ({'; '.join(broken)}); leave the flag out, or "
                "move them away, to start from the beginning"
            )
        return found
    if wish == "latest":
        found = complete_checkpoints(root)
        if not found:
            raise ConfigurationError(
                f"{flag}: {root} holds no complete checkpoint{_broken(root)}; 'auto' starts from the beginning then"
            )
        return _whole(found[-1], flag, root)
    path = Path(wish)
    if (path / STATE_FILE).exists():
        return _whole(path, flag, path.parent)
    for folder in (path, path / "checkpoints"):
        if found := complete_checkpoints(folder):
            return _whole(found[-1], flag, folder)
    what = problem(path)
    raise ConfigurationError(
        f"{flag}: not a complete checkpoint ({what}); allowed are latest, auto, a step_* folder or a folder of them"
        f"{_would_work(path.parent) or _would_work(root) or nearest(wish, ('latest', 'auto'))}"
    )


def _whole(path: Path, flag: str, root: Path) -> Path:
    if what := problem(path):
        raise ConfigurationError(f"{flag}: {what}{_would_work(root)}")
    return path


def _would_work(root: Path) -> str:
    found = newest_whole(root)
    return f"; the newest that would work is {found}" if found else ""


def _broken(root: Path) -> str:
    found = skipped(root, None)
    return f" ({'; '.join(found)})" if found else ""


def commit(temporary: Path, final: Path, state: TrainerState, config_yaml: str) -> None:
    """Complete `temporary`, which holds DCP's files, and give it its name."""
    write_durably(temporary / CONFIG_FILE, config_yaml)
    state.files = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
    state.format_version, state.saved_at = FORMAT_VERSION, time.time()
    write_durably(temporary / STATE_FILE, json.dumps(asdict(state), indent=2) + "\n")
    if final.exists():  # the same step, saved by an earlier run into this folder
        remove(final)
    temporary.rename(final)
    descriptor = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(folder: Path) -> None:
    """Delete a checkpoint so that being killed meanwhile leaves no folder that looks whole."""
    doomed = folder.with_name("removed_" + folder.name)
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)


def remove_leftovers(root: Path) -> None:
    """Delete what jobs left that were killed while they wrote or deleted a checkpoint."""
    for pattern in ("writing_step_*", "removed_step_*"):
        for folder in Path(root).glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)


def write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
