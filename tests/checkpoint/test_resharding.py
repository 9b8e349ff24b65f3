"""A run handed from 4 ranks to 2, to 1, to 3 keeps every number and the order of samples; saves in the background copy
what they save.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from mindspeed_llm.data import PretrainingLoader
from mindspeed_llm.training import checkpoint
from mindspeed_llm.training.background_save import BackgroundSaves
from tests.processes import run_processes
from tests.training.conftest import one_process  # noqa: F401 (a fixture)
from tests.training.test_checkpoint import CPU, STATE, everything, one_step, sharded

MICRO_BATCH = {4: 3, 2: 6, 1: 12, 3: 4}  # 12 sequences a step on any number of ranks


class Numbers:
    """A data set whose sample i says i."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"input_ids": np.array([index]), "labels": np.array([index])}


def hand_over(source: Path | None, target: Path) -> tuple[dict, list[list[int]]]:
    """Load `source` (None: train a step), save as `target`; the state, and the samples of 10 steps on this rank."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model, optimizer = sharded(1 if source is None else 2)
    state = STATE
    if source is None:
        one_step(model, optimizer)
    else:
        state = checkpoint.load(checkpoint.find_checkpoint("latest", source), model, optimizer, CPU)
    checkpoint.save(target, model, optimizer, state, "")
    loader = PretrainingLoader(
        Numbers(), micro_batch_size=MICRO_BATCH[size], gradient_accumulation_steps=1, dp_rank=rank, dp_size=size
    )
    loader.load_state_dict(state.loader)
    batches = [[int(i) for batch in next(loader) for i in batch["input_ids"].flatten()] for _ in range(10)]
    return everything(model, optimizer), batches


def test_4_to_2_to_1_to_3_ranks(tmp_path):
    source, first = None, None
    for size in (4, 2, 1, 3):
        ranks = run_processes(hand_over, size, source, tmp_path / f"on_{size}")
        source = tmp_path / f"on_{size}"
        first = first or ranks[0][0]
        for tensors, _ in ranks:
            assert tensors.keys() == first.keys() and all(torch.equal(tensors[name], first[name]) for name in first)
        steps = [[sample for _, batches in ranks for sample in batches[step]] for step in range(10)]
        assert [sample for step in steps for sample in step] == list(range(30, 150))


def test_a_save_in_the_background_holds_what_was_there_when_it_began(tmp_path, one_process):  # noqa: F811
    model, optimizer = sharded(1)
    one_step(model, optimizer)
    saves = BackgroundSaves(tmp_path)
    for _ in range(2):  # the second time into the same buffers
        before = everything(model, optimizer)
        saves.start(checkpoint.run_tensors(model, optimizer), STATE, "")
        one_step(model, optimizer)
    saves.close()
    assert not saves.failed
    model, optimizer = sharded(2)
    checkpoint.load(checkpoint.find_checkpoint("latest", tmp_path), model, optimizer, CPU)
    loaded = everything(model, optimizer)
    assert all(torch.equal(loaded[name], before[name]) for name in before)


def test_a_failed_save_in_the_background_is_reported_once(tmp_path, one_process):  # noqa: F811
    model, _ = sharded(1)
    (tmp_path / "file").write_text("where a folder should be")
    saves = BackgroundSaves(tmp_path / "file")
    saves.start(checkpoint.run_tensors(model, None), STATE, "")
    saves.wait()
    said: list[str] = []
    for _ in range(2):
        saves.report(said.append)
    assert saves.failed and len(said) == 1 and "could not be written: Not a directory" in said[0]
    saves.close()
