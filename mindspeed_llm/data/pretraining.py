"""Pre-training samples: documents shuffled anew each epoch, packed end to end, cut into sequences, shuffled again.

A dataset is an endless stream: epoch after epoch, each a permutation of the documents laid end to end. Sample i of the
stream is its tokens [i S, i S + S + 1): S inputs, and the same shifted by one as labels. Neighbours in the stream come
from the same document, so the samples of an epoch are drawn in a permutation of their own.

Nothing is materialized beyond one epoch's permutations: where sample i lies follows from i, the seed and the number of
tokens an epoch has. So sample i doesn't depend on how many samples a run asks for, and a longer run begins with exactly
the samples of a shorter one. All offsets are int64 or Python integers.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fsdp2.errors import ConfigurationError

from .blend import Blend, Recent, parse_blend
from .checks import token_checks
from .indexed_dataset import IndexedDataset
from .split import NAMES, parse_split, split_bounds

_DOCUMENTS, _SAMPLES = 0, 1  # what a permutation is of: each has random numbers of its own


class SampleDataset(ABC):
    """A map-style dataset of token sequences, `len(dataset)` of them."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sample(self, index: int) -> np.ndarray:
        """Tokens [S + 1] of sample `index`, in the dtype of the files."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """{"input_ids": int64 [S], "labels": int64 [S]}: the labels are the inputs shifted by one."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        tokens = self.sample(index).astype(np.int64)
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}


@dataclass(frozen=True)
class Epoch:
    """One pass over the documents. `starts` int64 [documents + 1]: where each begins in the epoch's stream of tokens;
    `sources` int64 [documents]: where each begins in the file; `samples` int64: the order of the epoch's samples, None
    for the natural one."""

    starts: np.ndarray
    sources: np.ndarray
    samples: np.ndarray | None


class PackedDataset(SampleDataset):
    """Samples of `sequence_length` + 1 tokens from the documents [first, end) of one indexed dataset.

    Args:
        stream: numbers the datasets of a blend, so that each has a random order of its own.
        endless: epochs follow one another without end, and the sample at an epoch's end runs on into the next one.
            Otherwise there is one epoch, and the last few tokens that fill no sequence are left out.
        shuffle: False reads documents and samples in the order of the file.
        vocab_size: ids every token is checked against when it is read; None: no check.

    Attributes: `tokens_per_epoch`, `samples_per_epoch` (complete ones), `length`.
    """

    def __init__(
        self,
        data: IndexedDataset,
        bounds: tuple[int, int],
        *,
        sequence_length: int,
        seed: int,
        stream: int = 0,
        endless: bool = False,
        shuffle: bool = True,
        name: str = "training",
        vocab_size: int | None = None,
    ) -> None:
        self.data, self.bounds, self.sequence_length = data, bounds, sequence_length
        self.seed, self.stream, self.endless, self.shuffle, self.vocab_size = seed, stream, endless, shuffle, vocab_size
        first, end = bounds
        offsets = data.document_offsets(first, end)
        self.tokens_per_epoch = int(offsets[-1] - offsets[0])
        if self.tokens_per_epoch < sequence_length + 1:
            raise ConfigurationError(
                f"--data.dataset {data.prefix}: its {end - first:,} {name} documents hold {self.tokens_per_epoch:,}"
                f" tokens, but one sequence takes {sequence_length + 1:,} (--data.cutoff_len {sequence_length}, and one"
                " more to predict); use shorter sequences, more text or another --data.split"
            )
        self.samples_per_epoch = (self.tokens_per_epoch - 1) // sequence_length
        self.length = self.samples_per_epoch
        self._epochs = Recent(self._build_epoch, 2)

    def of_length(self, samples: int) -> PackedDataset:
        """This dataset, ending after `samples` samples (at most one epoch of them unless it is endless)."""
        if not self.endless and samples > self.samples_per_epoch:
            raise ValueError(f"{samples} samples of an epoch of {self.samples_per_epoch}")
        self.length = samples
        return self

    def __len__(self) -> int:
        return self.length

    def sample(self, index: int) -> np.ndarray:
        index = operator.index(index)  # a numpy int32 would overflow below
        if index < 0:
            raise IndexError(f"sample {index}")
        number = index * self.sequence_length // self.tokens_per_epoch
        order = self._epochs[number].samples
        if order is not None:
            first = self._first_sample(number)
            index = first + int(order[index - first])
        tokens = self._read(number, index * self.sequence_length - number * self.tokens_per_epoch)
        if self.vocab_size is not None:
            token_checks(tokens, self.vocab_size, self.data.prefix)
        return tokens

    def _first_sample(self, epoch: int) -> int:
        """First sample that begins in `epoch`."""
        return -(-epoch * self.tokens_per_epoch // self.sequence_length)

    def _read(self, number: int, offset: int) -> np.ndarray:
        """`sequence_length` + 1 tokens from `offset` of an epoch's stream on, into the next epoch where it ends."""
        wanted = self.sequence_length + 1
        here = min(wanted, self.tokens_per_epoch - offset)
        tokens = self._gather(self._epochs[number], offset, here)
        return tokens if here == wanted else np.append(tokens, self._gather(self._epochs[number + 1], 0, wanted - here))

    def _gather(self, epoch: Epoch, offset: int, count: int) -> np.ndarray:
        first = int(np.searchsorted(epoch.starts, offset, side="right")) - 1
        last = int(np.searchsorted(epoch.starts, offset + count, side="left"))  # documents [first, last)
        edges = epoch.starts[first : last + 1].clip(offset, offset + count)
        # A token of the stream lies as far from its document's first token here as it does in the file.
        shift = np.repeat(epoch.sources[first:last] - epoch.starts[first:last], np.diff(edges))
        return self.data.tokens[np.arange(offset, offset + count) + shift]

    def _build_epoch(self, number: int) -> Epoch:
        first, end = self.bounds
        offsets = self.data.document_offsets(first, end)
        lengths, sources = np.diff(offsets), offsets[:-1]
        samples = None
        if self.shuffle:
            order = self._random(number, _DOCUMENTS).permutation(len(lengths))
            lengths, sources = lengths[order], sources[order]
            count = self.samples_per_epoch
            if self.endless:
                count = self._first_sample(number + 1) - self._first_sample(number)
            samples = self._random(number, _SAMPLES).permutation(count)
        starts = np.zeros(len(lengths) + 1, dtype=np.int64)
        np.cumsum(lengths, out=starts[1:])
        return Epoch(starts, sources, samples)

    def _random(self, epoch: int, what: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, self.stream, what, epoch])


class BlendedDataset(SampleDataset):
    """Samples of several datasets in the proportions of `blend`; each dataset is read in its own order."""

    def __init__(self, datasets: Sequence[PackedDataset], blend: Blend, samples: int) -> None:
        self.datasets, self.blend, self.length = list(datasets), blend, samples

    def __len__(self) -> int:
        return self.length

    def sample(self, index: int) -> np.ndarray:
        which, inner = self.blend[operator.index(index)]
        return self.datasets[which].sample(inner)


def build_pretraining_datasets(
    dataset: str | Sequence[str] | Mapping[str, float],
    *,
    split: str,
    sequence_length: int,
    seed: int,
    train_samples: int | None,
    shuffle: bool = True,
    vocab_size: int | None = None,
) -> tuple[SampleDataset | None, SampleDataset | None, SampleDataset | None]:
    """(training, validation, test) of a prefix or a blend; None where the split's share is 0.

    The training set has `train_samples` samples, over as many epochs as it takes (None: one epoch). Validation and test
    are whole documents that training never sees, each token at most once, in an order that no flag changes. A held-out
    blend keeps the weights and ends where its first dataset does.

    Args:
        dataset: see `blend.parse_blend`.
        split: see `split.parse_split`.
        vocab_size: of the model; tokens beyond it raise a ConfigurationError when they are read.

    Raises:
        ConfigurationError: missing, foreign or truncated files, a share without a document, a corpus shorter than one
            sequence; each with the numbers.
    """
    if seed < 0:
        raise ConfigurationError(f"--training.seed {seed}: want 0 or more")
    prefixes, weights = parse_blend(dataset)
    shares = parse_split(split)
    files = [IndexedDataset(prefix) for prefix in prefixes]
    bounds = [split_bounds(split, data.document_count, data.prefix) for data in files]
    parts: list[SampleDataset | None] = []
    for part, (name, share) in enumerate(zip(NAMES, shares)):
        training = part == 0
        packed = [
            PackedDataset(
                data,
                bounds[k][part],
                sequence_length=sequence_length,
                seed=seed if training else 0,
                stream=k,
                endless=training and train_samples is not None,
                shuffle=shuffle or not training,
                name=name,
                vocab_size=vocab_size,
            )
            for k, data in enumerate(files)
            if share > 0
        ]
        parts.append(_joined(packed, weights, seed if training else 0, train_samples if training else None))
    return tuple(parts)


def _joined(
    packed: list[PackedDataset], weights: list[float] | None, seed: int, samples: int | None
) -> SampleDataset | None:
    """One dataset of `samples` samples, or of one epoch when None."""
    if not packed:
        return None
    if len(packed) == 1:
        return packed[0].of_length(packed[0].samples_per_epoch if samples is None else samples)
    weights = weights or [dataset.samples_per_epoch for dataset in packed]
    if samples is not None:
        return BlendedDataset(packed, Blend(weights, seed), samples)
    sizes = [dataset.samples_per_epoch for dataset in packed]
    total = max(1, int(min(size / weight for size, weight in zip(sizes, weights)) * math.fsum(weights)))
    blend = Blend(weights, seed, block=total)  # dealt in one block, the counts hold at its end: nothing repeats
    while total > 1 and (blend.counts(total) > sizes).any():  # rounding up
        total -= 1
        blend = Blend(weights, seed, block=total)
    return BlendedDataset(packed, blend, total)
