"""One flag: its type, default, help text, limits, and whether it works, has no effect here, or is not built yet.

The groups (model.py, data.py, ...) declare their fields with `flag(...)`; everything else that speaks of flags
(parser, `--help`, warnings, refusals, docs/arguments.md) reads the rows that `flags_of` makes of them. So when later
work builds a flag, its declaration is the one place that changes.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WORKS = "works"
NO_EFFECT = "no effect"
NOT_BUILT = "not built yet"
REQUIRED = dataclasses.MISSING

_KIND_WORDS = {
    "bool": "True or False",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "list of str": "one or more words",
    "list of int": "one or more whole numbers",
    "str or dict": "text or a JSON object",
}


@dataclass(frozen=True)
class Flag:
    """A row of the table of flags.

    Attributes:
        kind: bool, int, float, str, "list of str", "list of int" or "str or dict".
        optional: None (`None`, `null`) is a value of its own.
        default: `REQUIRED` when there is none.
        status: WORKS; NO_EFFECT: a value other than the default is accepted with a warning; NOT_BUILT: a value other
            than the default is refused.
        note: why there is no effect, or what is built instead.
        choices: the values allowed, of each element in a list; () for any.
        unbuilt: values that are refused, each with what is built, although the flag works; even when it is the default.
        minimum, above, below: limits of numbers (>=, >, <).
    """

    group: str
    name: str
    kind: str
    optional: bool
    default: Any
    help: str
    status: str
    note: str
    choices: tuple[str, ...]
    unbuilt: Mapping[Any, str]
    minimum: float | None
    above: float | None
    below: float | None

    @property
    def dotted(self) -> str:
        return f"{self.group}.{self.name}"

    def unbuilt_by_reason(self) -> dict[tuple[str, ...], str]:
        """The values of `unbuilt`, those with the same reason together."""
        reasons = dict.fromkeys(self.unbuilt.values())
        return {tuple(value for value, why in self.unbuilt.items() if why == reason): reason for reason in reasons}

    @property
    def required(self) -> bool:
        return self.default is REQUIRED

    @property
    def allowed(self) -> str:
        """What a user may write, in words: "a whole number, at least 1"."""
        if self.choices:
            words = ("one or more of " if self.kind.startswith("list") else "one of ") + ", ".join(self.choices)
        else:
            words = _KIND_WORDS[self.kind]
        limits = [
            f"{sign} {_number(limit)}"
            for sign, limit in (("at least", self.minimum), ("more than", self.above), ("less than", self.below))
            if limit is not None
        ]
        if limits:
            words += ", " + " and ".join(limits)
        return words + (", or None" if self.optional else "")


def flag(
    help: str,
    default: Any = REQUIRED,
    *,
    status: str = WORKS,
    note: str = "",
    choices: tuple[str, ...] = (),
    unbuilt: Mapping[Any, str] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> Any:
    """Declare a dataclass field that is a flag (see `Flag` for the words); a list is copied for every instance."""
    if status != WORKS and not note:
        raise ValueError(f"a flag that is {status!r} says why: {help}")
    metadata = {
        "help": help,
        "status": status,
        "note": note,
        "choices": choices,
        "unbuilt": unbuilt or {},
        "minimum": minimum,
        "above": above,
        "below": below,
    }
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def flags_of(group: str, group_class: type) -> list[Flag]:
    """Return the rows of one group's dataclass, in the order of their declaration."""
    hints = typing.get_type_hints(group_class)
    rows = []
    for field in dataclasses.fields(group_class):
        kind, optional = _kind(hints[field.name])
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        rows.append(Flag(group, field.name, kind, optional, default, **field.metadata))
    return rows


def _kind(hint: Any) -> tuple[str, bool]:
    """Split an annotation into the kind of its value and whether None is allowed."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    optional = types.NoneType in members
    kinds = {_single_kind(member) for member in members if member is not types.NoneType}
    if kinds == {"str", "dict"}:
        return "str or dict", optional
    (kind,) = kinds
    return kind, optional


def _single_kind(hint: Any) -> str:
    if typing.get_origin(hint) is list:
        (element,) = typing.get_args(hint)
        return f"list of {element.__name__}"
    return "dict" if typing.get_origin(hint) is dict else hint.__name__


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else str(value)
