"""Batches: the same global batch in every layout, and a resume that continues with exactly the next one."""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from corpora import document_lengths, write_numbered

from fsdp2.errors import ConfigurationError
from mindspeed_llm.data import EvaluationLoader, PretrainingLoader, build_pretraining_datasets


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("d") / "d"
    write_numbered(prefix, document_lengths(100, mean=30))
    return build_pretraining_datasets(str(prefix), split="80,20,0", sequence_length=8, seed=1, train_samples=60)


def loader(dataset, micro=2, accumulation=2, rank=0, size=1, **options) -> PretrainingLoader:
    return PretrainingLoader(
        dataset, micro_batch_size=micro, gradient_accumulation_steps=accumulation, dp_rank=rank, dp_size=size, **options
    )


def rows(step: list[dict[str, torch.Tensor]]) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in step for row in torch.cat([batch["input_ids"], batch["labels"]], 1).tolist()]


def test_shapes_and_length(datasets):
    batches = loader(datasets[0], micro=3, accumulation=2, size=2)
    step = next(batches)
    assert len(step) == 2 and len(batches) == 5
    assert step[0]["input_ids"].shape == step[0]["labels"].shape == (3, 8)
    assert step[0]["input_ids"].dtype == step[0]["labels"].dtype == torch.int64
    assert len(list(batches)) == 4 and batches.state_dict() == {"consumed_samples": 60}
    with pytest.raises(StopIteration):
        next(batches)


@pytest.mark.parametrize("micro,accumulation,size", [(8, 1, 1), (2, 4, 1), (2, 2, 2), (4, 1, 2), (1, 2, 4), (2, 1, 4)])
def test_every_layout_has_the_same_global_batches(datasets, micro, accumulation, size):
    reference = [sorted(rows(step)) for step in loader(datasets[0], micro=8, accumulation=1)]
    ranks = [loader(datasets[0], micro, accumulation, rank, size) for rank in range(size)]
    steps = [sorted(row for step in of_all for row in rows(step)) for of_all in zip(*ranks)]
    assert steps == reference and len(steps) == 7


def test_which_samples_a_micro_batch_holds(datasets):
    for rank in range(3):
        step = list(loader(datasets[0], micro=2, accumulation=2, rank=rank, size=3))[1]
        for a, batch in enumerate(step):
            first = 12 + (a * 3 + rank) * 2
            assert batch["input_ids"].tolist() == [datasets[0][i]["input_ids"].tolist() for i in (first, first + 1)]


@pytest.mark.parametrize("workers", [0, 2])
def test_resume_goes_on_with_the_next_batch(datasets, workers):
    whole = [rows(step) for step in loader(datasets[0], rank=1, size=2)]
    before = loader(datasets[0], rank=1, size=2, num_workers=workers)
    begun = [rows(next(before)) for _ in range(3)]  # workers have read ahead by now; what they read isn't consumed
    assert before.state_dict() == {"consumed_samples": 24}
    after = loader(datasets[0], rank=1, size=2, num_workers=workers)
    next(after)
    after.load_state_dict(before.state_dict())
    assert begun + [rows(step) for step in after] == whole


def test_processes_that_read_ahead_end_with_the_loader(datasets):
    batches = loader(datasets[0], num_workers=2)
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    del batches
    assert multiprocessing.active_children() == []


def test_resume_in_another_layout(datasets):
    whole = [sorted(rows(step)) for step in loader(datasets[0], micro=8, accumulation=1)]
    two = loader(datasets[0], micro=4, accumulation=1, rank=0, size=2)
    next(two), next(two)
    four = [loader(datasets[0], micro=1, accumulation=2, rank=rank, size=4) for rank in range(4)]
    for one in four:
        one.load_state_dict(two.state_dict())
    assert [sorted(row for step in of_all for row in rows(step)) for of_all in zip(*four)] == whole[2:]


def test_a_longer_run_accepts_the_state_and_a_shorter_one_refuses(datasets):
    batches = loader(datasets[0])
    batches.load_state_dict({"consumed_samples": 60})
    assert list(batches) == []
    with pytest.raises(ConfigurationError, match=r"has consumed 64 samples, but this run's dataset has 60"):
        batches.load_state_dict({"consumed_samples": 64})


def test_a_dataset_smaller_than_a_step(datasets):
    with pytest.raises(ConfigurationError, match=r"a step takes 64 sequences \(8 x 4 accumulation steps x 2 ranks\)"):
        loader(datasets[0], micro=8, accumulation=4, size=2)


@pytest.mark.parametrize("micro,size", [(1, 1), (5, 1), (3, 2), (4, 4), (1000, 2)])
def test_evaluation_sees_every_sample_once(datasets, micro, size):
    held_out = datasets[1]
    expected = sorted(tuple(held_out[i]["labels"].tolist()) for i in range(len(held_out)))
    ranks = [EvaluationLoader(held_out, micro_batch_size=micro, dp_rank=rank, dp_size=size) for rank in range(size)]
    assert len({len(list(one)) for one in ranks}) == 1
    seen = [row for one in ranks for batch in one for row in batch["labels"].tolist()]
    assert all(row == [-100] * 8 or -100 not in row for row in seen)
    assert sorted(tuple(row) for row in seen if row[0] != -100) == expected


def test_evaluation_of_a_part_is_the_same_in_every_layout(datasets):
    parts = []
    for micro, size, batches in ((4, 1, 2), (2, 2, 2), (1, 4, 2)):
        ranks = [
            EvaluationLoader(datasets[1], micro_batch_size=micro, dp_rank=r, dp_size=size, batches=batches)
            for r in range(size)
        ]
        parts.append(sorted(row for one in ranks for batch in one for row in map(tuple, batch["labels"].tolist())))
    assert parts[0] == parts[1] == parts[2] and len(parts[0]) == 8
