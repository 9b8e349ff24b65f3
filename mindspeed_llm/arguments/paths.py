"""What to say about a path that is not there: how far it exists, and the nearest name beside it."""

from __future__ import annotations

from pathlib import Path

from fsdp2.errors import nearest


def missing(path: str, suffix: str = "") -> str:
    """Return "no such file or folder: a/b; did you mean 'c'?" for a path that does not exist.

    suffix: the ending of the file that is missing (".idx" for a dataset's prefix). Only neighbours with that ending are
    proposed, without it.
    """
    wanted = Path(path)
    parent = wanted.parent
    if parent.is_dir():
        return f"no such file or folder: {path}{suffix}{_nearest_in(parent, wanted.name, suffix)}"
    existing = next(folder for folder in parent.parents if folder.is_dir())
    name = parent.relative_to(existing).parts[0]
    return f"no such file or folder: {path}{suffix}; {existing.resolve()} has no '{name}'{_nearest_in(existing, name)}"


def _nearest_in(folder: Path, name: str, suffix: str = "") -> str:
    return nearest(name, [entry.name.removesuffix(suffix) for entry in folder.iterdir() if entry.name.endswith(suffix)])
