"""From what a user wrote to the value of a flag: the one conversion that the command line and YAML share.

Scalars arrive as text from both (YAML is read without its own guesses, which turn 1e-5 into text and `no` into
False), so `1e-5`, `False` or `model.layers.{*}` mean the same wherever they stand. Only a wrong type, choice or limit
is found here; checks between flags are in validation.py.
"""

from __future__ import annotations

import json
import math
from typing import Any

from fsdp2.errors import nearest
from mindspeed_llm.arguments.flag import Flag

_NULL_WORDS = ("none", "null")
_BOOLEANS = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def is_null_word(text: str) -> bool:
    """Whether a bare word means "unset": None, null (any case)."""
    return text.lower() in _NULL_WORDS


def convert(row: Flag, raw: Any) -> Any:
    """Return the value of a flag.

    raw: text, a list of texts (words of the command line or a YAML sequence), a dict (a YAML mapping) or None (unset).
    Raises ValueError that says what is allowed. None for a flag that cannot be None gives its default.
    """
    value = _typed(row, raw)
    if value is not None:
        for element in value if isinstance(value, list) else [value]:
            _check_choice(row, element)
            _check_limits(row, element)
    return value


def _typed(row: Flag, raw: Any) -> Any:
    if raw is None:
        return _unset(row)
    if row.kind.startswith("list"):
        return _list(row, raw)
    if row.kind == "str or dict":
        return _text_or_mapping(row, raw)
    if isinstance(raw, list) and len(raw) == 1:
        raw = raw[0]
    if not isinstance(raw, str):
        raise ValueError(
            f"takes one value, not {'a list' if isinstance(raw, list) else 'a group of keys'}; allowed is {row.allowed}"
        )
    return _scalar(row, row.kind, raw)


def _unset(row: Flag) -> Any:
    if row.optional or row.required:
        return None
    if row.kind.startswith("list"):
        raise ValueError("cannot be unset; write [] for none, or leave the flag out for its default")
    return row.default


def _scalar(row: Flag, kind: str, text: str) -> Any:
    try:
        if kind == "bool":
            return _BOOLEANS[text.lower()]
        if kind == "int":
            return int(text)
        if kind == "float":
            number = float(text)
            if not math.isfinite(number):
                raise ValueError(text)
            return number
    except (KeyError, ValueError):
        raise ValueError(f"allowed is {row.allowed}") from None
    return text


def _list(row: Flag, raw: Any) -> list:
    words = raw if isinstance(raw, list) else [raw]
    if isinstance(raw, str) or len(words) == 1:
        words = _split(row, words[0])
    if not all(isinstance(word, str) for word in words):
        raise ValueError(f"allowed is {row.allowed}")
    element_kind = row.kind.removeprefix("list of ")
    return [_scalar(row, element_kind, word) for word in words]


def _split(row: Flag, text: Any) -> list:
    """A single text may hold several words, or a list in JSON (on the command line [] is the empty list)."""
    if not isinstance(text, str):
        raise ValueError(f"allowed is {row.allowed}")
    if not text.startswith("["):
        return text.split()
    try:
        return [str(element) for element in json.loads(text)]
    except json.JSONDecodeError as error:
        raise ValueError(f"is not a list in JSON ({error}); allowed is {row.allowed}") from None


def _text_or_mapping(row: Flag, raw: Any) -> Any:
    if isinstance(raw, dict):
        return raw
    text = " ".join(raw) if isinstance(raw, list) else raw
    if not text.startswith("{"):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not an object in JSON ({error}); allowed is {row.allowed}") from None


def _check_choice(row: Flag, value: Any) -> None:
    if row.choices and value not in row.choices:
        raise ValueError(f"allowed is {row.allowed}{nearest(str(value), row.choices)}")


def _check_limits(row: Flag, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    outside = (
        (row.minimum is not None and value < row.minimum)
        or (row.above is not None and value <= row.above)
        or (row.below is not None and value >= row.below)
    )
    if outside:
        raise ValueError(f"allowed is {row.allowed}")


def written(value: Any) -> str:
    """Return a value (or what the user wrote for it) as it is typed on the command line."""
    if isinstance(value, list):
        return " ".join(str(element) for element in value) or "[]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)
