"""Mix several datasets by weight: which dataset does sample i come from, and which of its samples is it.

Samples are dealt in blocks. By the end of each block every dataset has had its share of all samples so far to within
one, and within a block the order is random. A block is computed when it is first asked for, so a blend of any length
costs nothing up front, and sample i doesn't depend on how many samples a run asks for.
"""

from __future__ import annotations

import math
import os
import shlex
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fsdp2.errors import ConfigurationError

from .indexed_dataset import strip_suffix

_BLOCK = 1024  # samples, unless a small weight asks for more
_SMALLEST_SHARE = 1e-6


class Recent:
    """Values of `compute(number)` for the last `size` numbers asked for; sent to another process it starts empty."""

    def __init__(self, compute: Callable[[int], object], size: int) -> None:
        self.compute, self.size = compute, size
        self._values: OrderedDict[int, object] = OrderedDict()

    def __getstate__(self) -> tuple:
        return self.compute, self.size

    def __setstate__(self, state: tuple) -> None:
        self.__init__(*state)

    def __getitem__(self, number: int):
        if number in self._values:
            self._values.move_to_end(number)
        else:
            self._values[number] = self.compute(number)
            while len(self._values) > self.size:
                self._values.popitem(last=False)
        return self._values[number]


class Blend:
    """`blend[i]` -> (number of the dataset, index of the sample in it).

    Args:
        weights: one a dataset, positive; only their proportions count.
        block: samples dealt at a time; None: enough for every dataset to be dealt one in each.
    """

    def __init__(self, weights: Sequence[float], seed: int, block: int | None = None) -> None:
        total = math.fsum(weights)
        self.shares = [weight / total for weight in weights]
        self.seed = seed
        self._edges = np.cumsum(self.shares)
        self._edges[-1] = 1.0
        # Rounding moves a dataset's count by up to 2 in a block: below 2 expected samples it could be dealt less than
        # none.
        self.block = block or max(_BLOCK, math.ceil(2 / min(self.shares)))
        self._blocks = Recent(self._deal, 4)

    def counts(self, samples: int) -> np.ndarray:
        """int64 [datasets]: how many of the first `samples` (whole blocks) come from each; they sum to `samples`."""
        return np.diff(np.rint(self._edges * samples).astype(np.int64), prepend=0)

    def __getitem__(self, index: int) -> tuple[int, int]:
        which, inner = self._blocks[index // self.block]
        return int(which[index % self.block]), int(inner[index % self.block])

    def _deal(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        before = self.counts(number * self.block)
        dealt = self.counts((number + 1) * self.block) - before
        generator = np.random.default_rng([self.seed, number])
        which = generator.permutation(np.repeat(np.arange(len(dealt), dtype=np.int32), dealt))
        order = np.argsort(which, kind="stable")
        inner = np.empty(self.block, dtype=np.int64)
        # In `order` each dataset's positions follow one another, so they count up from what it had before.
        inner[order] = np.arange(self.block) + np.repeat(before - (np.cumsum(dealt) - dealt), dealt)
        return which, inner


def parse_blend(dataset: str | Sequence[str] | Mapping[str, Any]) -> tuple[list[str], list[float] | None]:
    """Prefixes and weights of a blend; weights None: by the size of the datasets.

    `dataset`: "PREFIX", "PREFIX PREFIX", "0.3 PREFIX 0.7 PREFIX", the same as a list, {PREFIX: weight}, or
    {"file_name": any of the first three}.
    """
    if isinstance(dataset, Mapping) and set(dataset) == {"file_name"}:
        dataset = dataset["file_name"]
    if isinstance(dataset, Mapping):
        words = [str(word) for prefix, weight in dataset.items() for word in (weight, prefix)]
    elif isinstance(dataset, str):
        words = [dataset] if os.path.exists(f"{strip_suffix(dataset)}.idx") else _split_words(dataset)
    else:
        words = [str(word) for word in dataset]
    if not words:
        raise ConfigurationError("--data.dataset: it is empty; give the prefix of a .bin/.idx pair, or a blend of them")
    numbers = [_number(word) for word in words]
    if all(number is None for number in numbers):
        return [strip_suffix(word) for word in words], None if len(words) > 1 else [1.0]
    weights, prefixes = numbers[0::2], words[1::2]
    if len(weights) != len(prefixes) or None in weights or any(number is not None for number in numbers[1::2]):
        raise ConfigurationError(
            f"--data.dataset {' '.join(words)}: a blend is either prefixes alone or a weight before each prefix,"
            " for example 0.3 data/code 0.7 data/text"
        )
    for weight, prefix in zip(weights, prefixes):
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigurationError(f"--data.dataset: weight {weight:g} of {prefix} must be a positive number")
    for weight, prefix in zip(weights, prefixes):
        if weight / math.fsum(weights) < _SMALLEST_SHARE:
            raise ConfigurationError(
                f"--data.dataset: weight {weight:g} of {prefix} is a share below {_SMALLEST_SHARE:g}; leave it out"
            )
    return [strip_suffix(prefix) for prefix in prefixes], weights


def _split_words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigurationError(f"--data.dataset {text}: {error}") from None


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
