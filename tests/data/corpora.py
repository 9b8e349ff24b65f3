"""Small indexed datasets in which every token says where it is from, so that a test can see what became of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mindspeed_llm.data.indexed_dataset import IndexedDatasetWriter


def write_numbered(prefix: Path, lengths: Sequence[int], first: int = 0) -> np.ndarray:
    """Write documents of `lengths` tokens; the tokens count up from `first` over the whole file. Returns them all."""
    tokens = np.arange(first, first + sum(lengths), dtype=np.int64)
    with IndexedDatasetWriter(prefix, np.int32) as writer:
        writer.add_documents(tokens, np.asarray(lengths))
    return tokens


def document_lengths(count: int, mean: int, seed: int = 0) -> np.ndarray:
    """int64 [count] lengths from 0 to about 5 times `mean`."""
    return np.random.default_rng(seed).exponential(mean, count).astype(np.int64)
