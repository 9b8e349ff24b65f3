"""Module-name patterns: how a user says which modules are sharded, quantized, recomputed or left alone.

A pattern is a full dotted name as `named_modules()` gives it, with wildcards: `*` any characters (dots too), `?` one
character, `{*}` one dotted component, `{0-3}` one component that is a number in that range. `model.layers.{*}`
therefore names every layer and nothing inside one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING

from fsdp2.errors import ConfigurationError

if TYPE_CHECKING:
    from torch import nn

_TOKEN = re.compile(r"\{\*\}|\{(\d+)-(\d+)\}|\*|\?|\{[^}]*\}?|[^*?{]+")


@lru_cache(maxsize=1024)
def _compile(pattern: str) -> tuple[re.Pattern[str], tuple[range, ...]]:
    """The regular expression of `pattern`, and the number ranges that its capture groups must lie in."""
    expression, ranges = [], []
    for token in _TOKEN.finditer(pattern):
        word = token.group(0)
        if word == "{*}":
            expression.append(r"[^.]+")
        elif token.group(1) is not None:
            expression.append(r"(\d+)")
            ranges.append(range(int(token.group(1)), int(token.group(2)) + 1))
        elif word == "*":
            expression.append(r".*")
        elif word == "?":
            expression.append(r".")
        elif word.startswith("{"):
            raise ConfigurationError(
                f"module pattern '{pattern}': '{word}' is no wildcard; allowed are '*', '?', '{{*}}' and '{{0-3}}'"
            )
        else:
            expression.append(re.escape(word))
    return re.compile("".join(expression)), tuple(ranges)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether the full module name `name` is named by one of `patterns`."""
    for pattern in patterns:
        expression, ranges = _compile(pattern)
        found = expression.fullmatch(name)
        if found and all(int(number) in allowed for number, allowed in zip(found.groups(), ranges)):
            return True
    return False


def covers(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of `patterns` names `name` or a module that contains it: `model.layers.{*}` covers
    `model.layers.0.mlp.up_proj`."""
    patterns = tuple(patterns)
    parts = name.split(".")
    return any(matches(".".join(parts[:depth]), patterns) for depth in range(1, len(parts) + 1))


def match_modules(model: nn.Module, patterns: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """The modules of `model` that `patterns` name, with their full names, in the order of `named_modules()`."""
    patterns = tuple(patterns)
    return [(name, module) for name, module in model.named_modules() if name and matches(name, patterns)]
