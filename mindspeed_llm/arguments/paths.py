"""What to say about a path that is not there: how far it exists, and the nearest name beside it."""

from __future__ import annotations

from pathlib import Path

from fsdp2.errors import nearest


def missing(path: str, suffix: str = "") -> str:
    """Return "no such file or folder: a/b; did you mean 'a/c'?" for a path that does not exist.

    suffix: the ending that neighbours must have to be proposed; it is cut off in the proposal (".idx" for a dataset's prefix).
    """
    wanted = Path(path)
    parent = wanted.parent
    if not parent.is_dir():
        existing = next(folder for folder in (*parent.parents, Path("/")) if folder.is_dir())
        broken = parent.relative_to(existing).parts[0] if existing in parent.parents else parent.name
        found = _nearest_in(existing, broken, "")
        return f"no such file or folder: {path}; {existing.resolve()} has no {broken}{found}"
    return f"no such file or folder: {path}{suffix}{_nearest_in(parent, wanted.name, suffix)}"


def _nearest_in(folder: Path, name: str, suffix: str) -> str:
    names = [entry.name.removesuffix(suffix) for entry in folder.iterdir() if entry.name.endswith(suffix)]
    return nearest(name, names)
