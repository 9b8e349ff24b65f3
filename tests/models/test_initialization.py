"""Initial weights: reproducible, different between seeds and parameters, with the right spread, in any slice alike."""

from __future__ import annotations

import math

import pytest
import torch

from mindspeed_llm.models import build_model, initialize_weights
from mindspeed_llm.models.initialization import BLOCK, normal_slice
from tests.models.families import tiny_config


@pytest.mark.parametrize(
    "where",
    [
        (slice(0, 700), slice(0, 300)),
        (slice(350, 700), slice(0, 300)),
        (slice(218, 219), slice(0, 300)),
        (slice(0, 700), slice(17, 290)),
        (slice(699, 700), slice(299, 300)),
        (slice(300, 300), slice(0, 300)),
    ],
)
def test_a_slice_equals_that_part_of_the_whole(where):
    shape = (700, 300)  # over three blocks
    assert math.prod(shape) > 3 * BLOCK
    whole = normal_slice(shape, (slice(0, 700), slice(0, 300)), seed=1, name="w")
    assert torch.equal(normal_slice(shape, where, seed=1, name="w"), whole[where])


def test_blocks_seeds_and_names_are_independent_standard_normals():
    whole = normal_slice((4 * BLOCK,), (slice(0, 4 * BLOCK),), seed=1, name="w")
    others = [normal_slice((BLOCK,), (slice(0, BLOCK),), seed, name) for seed, name in ((2, "w"), (1, "v"))]
    rows = torch.stack([*whole.view(4, BLOCK), *others])
    correlation = torch.corrcoef(rows) - torch.eye(6)
    assert correlation.abs().max() < 0.03
    assert rows.mean(1).abs().max() < 0.03
    assert (rows.std(1) - 1).abs().max() < 0.02


def test_every_parameter_and_buffer_gets_its_value():
    config = {**tiny_config("llama-tied-biased"), "hidden_size": 128, "initializer_range": 0.05}
    model = build_model(config)
    model.to_empty(device="cpu")
    for tensor in [*model.parameters(), *model.buffers()]:
        tensor.data.fill_(float("nan"))
    initialize_weights(model, seed=3)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            expected = 0.05 / math.sqrt(2 * 3) if residual else 0.05
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
    fresh = build_model(config, device="cpu").model.rotary_emb.inv_freq
    assert torch.equal(model.model.rotary_emb.inv_freq, fresh)
