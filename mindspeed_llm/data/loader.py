"""Batches for one data-parallel rank, with a state of one number: how many samples the whole job has consumed.

Which samples a step trains on follows from that number and the global batch size alone, not from how the batch is cut
into ranks and micro-batches. So a run resumes on another number of ranks with exactly the samples that come next, and
runs of the same global batch size see the same batches in every layout.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader

from fsdp2.errors import ConfigurationError

from .pretraining import SampleDataset

IGNORED_LABEL = -100  # what torch's cross_entropy leaves out
Batch = dict[str, torch.Tensor]


class PretrainingLoader:
    """Iterator over training steps; each step is a list of micro-batches, one per gradient accumulation step.

    A micro-batch is {"input_ids": int64 [micro_batch_size, S], "labels": int64 [micro_batch_size, S]}. Micro-batch a of
    a step holds the samples `consumed + (a * dp_size + dp_rank) * micro_batch_size + b`. Iteration ends where the
    dataset has no complete global batch left.

    Args:
        num_workers: processes that read ahead; 0 reads when asked. What they read ahead isn't consumed.
        pin_memory, prefetch_factor: as in torch's DataLoader, for num_workers > 0.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        *,
        micro_batch_size: int,
        gradient_accumulation_steps: int,
        dp_rank: int,
        dp_size: int,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch_factor: int | None = None,
    ) -> None:
        if not 0 <= dp_rank < dp_size:
            raise ValueError(f"dp_rank {dp_rank} of {dp_size}")
        self.dataset, self.micro_batch_size, self.accumulation = dataset, micro_batch_size, gradient_accumulation_steps
        self.dp_rank, self.dp_size, self.num_workers = dp_rank, dp_size, num_workers
        self.pin_memory, self.prefetch_factor = pin_memory, prefetch_factor
        self.global_batch_size = micro_batch_size * gradient_accumulation_steps * dp_size
        if len(dataset) < self.global_batch_size:
            raise ConfigurationError(
                f"--training.per_device_train_batch_size {micro_batch_size}: a step takes {self.global_batch_size}"
                " sequences ("
                f"{micro_batch_size} x {gradient_accumulation_steps} accumulation steps x {dp_size} ranks),"
                f" the dataset has {len(dataset)}"
            )
        self.consumed_samples = 0
        self._ahead: Iterator[Batch] | None = None

    def __len__(self) -> int:
        """Steps in the whole dataset, those already taken included."""
        return len(self.dataset) // self.global_batch_size

    def __iter__(self) -> PretrainingLoader:
        return self

    def __next__(self) -> list[Batch]:
        if self.consumed_samples + self.global_batch_size > len(self.dataset):
            raise StopIteration
        if self.num_workers == 0:
            indices = itertools.islice(self._order(), self.accumulation)
            step = [collate([self.dataset[i] for i in micro_batch]) for micro_batch in indices]
        else:
            if self._ahead is None:
                self._ahead = self._read_ahead()
            step = [next(self._ahead) for _ in range(self.accumulation)]
        self.consumed_samples += self.global_batch_size
        return step

    def state_dict(self) -> dict[str, int]:
        """{"consumed_samples": samples of the whole job, all ranks together}: the same on every rank."""
        return {"consumed_samples": self.consumed_samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after the samples that `state` counts, also in another layout."""
        consumed = int(state["consumed_samples"])
        if not 0 <= consumed <= len(self.dataset):
            raise ConfigurationError(
                f"--training.resume_from_checkpoint: the checkpoint has consumed {consumed:,} samples, but this run's"
                " dataset has"
                f" {len(self.dataset):,}; resume with the same data and at least as many steps"
            )
        self.consumed_samples = consumed
        self._ahead = None

    def _order(self) -> MicroBatches:
        """Sample indices of this rank's micro-batches from here on."""
        return MicroBatches(
            range(self.consumed_samples, len(self.dataset) - self.global_batch_size + 1, self.global_batch_size),
            [(a * self.dp_size + self.dp_rank) * self.micro_batch_size for a in range(self.accumulation)],
            self.micro_batch_size,
        )

    def _read_ahead(self) -> Iterator[Batch]:
        return iter(
            DataLoader(
                self.dataset,
                batch_sampler=self._order(),
                collate_fn=collate,
                num_workers=self.num_workers,
                pin_memory=self.pin_memory,
                prefetch_factor=self.prefetch_factor,
            )
        )


@dataclass(frozen=True)
class MicroBatches:
    """Sample indices, one list a micro-batch, `size` each.

    Plain values only: were the loader reachable from here, it and the iterator that reads ahead would hold each other,
    and worker processes would outlive a loader that is dropped.
    """

    steps: range
    offsets: list[int]
    size: int

    def __iter__(self) -> Iterator[list[int]]:
        for step in self.steps:
            for offset in self.offsets:
                yield list(range(step + offset, step + offset + self.size))


class EvaluationLoader:
    """Every sample of a held-out dataset exactly once, over all ranks; iterate as often as wanted.

    All ranks get the same number of batches of the same shape (their collectives must meet), so the last ones may be
    filled up with rows whose labels are all IGNORED_LABEL. `batches`: 0 for the whole dataset, else at most so many a
    rank. The set of samples depends on `batches * micro_batch_size * dp_size` alone.
    """

    def __init__(
        self, dataset: SampleDataset, *, micro_batch_size: int, dp_rank: int, dp_size: int, batches: int = 0
    ) -> None:
        self.dataset, self.micro_batch_size, self.dp_rank, self.dp_size = dataset, micro_batch_size, dp_rank, dp_size
        whole = -(-len(dataset) // (micro_batch_size * dp_size))
        self.batches = min(batches, whole) if batches > 0 else whole

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.batches):
            start = (number * self.dp_size + self.dp_rank) * self.micro_batch_size
            end = min(start + self.micro_batch_size, len(self.dataset))
            samples = [self.dataset[i] for i in range(start, end)]
            filled_up = self.micro_batch_size - len(samples)
            if filled_up:
                samples += [self.dataset[len(self.dataset) - 1]] * filled_up
            batch = collate(samples)
            batch["labels"][self.micro_batch_size - filled_up :] = IGNORED_LABEL
            yield batch


def collate(samples: list[dict]) -> Batch:
    """Stack samples of int64 [S] arrays into {"input_ids": int64 [B, S], "labels": int64 [B, S]}."""
    return {key: torch.stack([torch.from_numpy(sample[key]) for sample in samples]) for key in ("input_ids", "labels")}
