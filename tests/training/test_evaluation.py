"""Held-out loss and bits per byte against the definition, with padding that must not count."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fsdp2 import ParallelPlan, parallelize
from fsdp2.communication import counters
from mindspeed_llm.data.loader import IGNORED_LABEL
from mindspeed_llm.models import build_model, initialize_weights
from mindspeed_llm.training.evaluation import evaluate
from tests.training.test_checkpoint import CONFIG


@pytest.fixture
def model(one_process):
    plan = ParallelPlan(world_size=1, device_type="cpu", fsdp_size=1, param_dtype="fp32")
    model = parallelize(build_model(CONFIG), plan)
    initialize_weights(model, 3)
    return model


def test_equals_the_definition(model, one_process):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 64, (6, 9), generator=generator)
    batches = [{"input_ids": rows[:, :-1], "labels": rows[:, 1:].clone()} for rows in tokens.split(2)]
    batches[2]["labels"][1] = IGNORED_LABEL
    token_bytes = np.arange(64, dtype=np.int32) % 5  # 0 for some, as for special tokens
    found = evaluate(model, batches, token_bytes, one_process)
    nats = tokens_counted = text_bytes = 0
    for batch in batches:
        logits, labels = model(batch["input_ids"]).logits.detach(), batch["labels"]
        nats += torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").item()
        kept = labels[labels != IGNORED_LABEL]
        tokens_counted += kept.numel()
        text_bytes += int(token_bytes[kept.numpy()].sum())
    assert tokens_counted == 5 * 8
    assert found["loss"] == pytest.approx(nats / tokens_counted, rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / text_bytes, rel=1e-5)


def test_leaves_the_model_as_it_was(model, one_process):
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.int64), "labels": torch.zeros(1, 4, dtype=torch.int64)}

    def train_once() -> dict:
        counters(model).take()
        model(batch["input_ids"]).logits.sum().backward()
        return counters(model).take()

    model.train()
    train_once()
    before = train_once()
    evaluate(model, [batch], np.ones(64, dtype=np.int32), one_process)
    assert model.training
    assert train_once() == before  # what it gathers does not depend on an evaluation before


def test_nothing_to_evaluate_is_nan(model, one_process):
    found = evaluate(model, [], np.ones(64, dtype=np.int32), one_process)
    assert math.isnan(found["loss"]) and math.isnan(found["bits_per_byte"])
