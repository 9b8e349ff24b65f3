"""The one exception a user's mistake turns into, and the hint that goes with it.

Every check of a flag, a file or a model that a user can get wrong raises `ConfigurationError`. Entry points print its
message once, on rank 0, and exit with status 2; anything else that escapes is a defect of ours and keeps its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigurationError(ValueError):
    """A flag, file or size the user gave cannot work. The message names it, its value, what is allowed, and the nearest
    right thing."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the closest of `known` to `word`, or `""` when nothing is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{close[0]}'?" if close else ""
