"""Rotary frequencies at published sizes equal those of transformers, for every scaling and way of writing it down."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mindspeed_llm.models import load_config
from mindspeed_llm.models.layers.rotary import RotaryEmbedding
from tests.models.families import LLAMA3_ROPE

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS = {
    "none": None,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "linear, old name": {"type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama 3.1": {**LLAMA3_ROPE, "original_max_position_embeddings": 8192},
    "qwen3 yarn": YARN,
    "yarn, not truncated": {**YARN, "truncate": False, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn, original from the model": {"rope_type": "yarn", "factor": 4.0},
    "yarn, factor below 1": {**YARN, "factor": 0.5},
    "yarn, given attention factor": {**YARN, "attention_factor": 0.8},
    "deepseek yarn": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7},
}
BASE = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 131072}


@pytest.mark.parametrize("written", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_tables_equal_transformers(scaling, written):
    rope = SCALINGS[scaling]
    if written == "rope_scaling":
        source = {**BASE, "rope_theta": 500000.0, "rope_scaling": rope}
    else:  # release 5
        source = {**BASE, "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default", **(rope or {})}}
    positions = torch.tensor([[0, 1, 5, 4096, 100_000, 200_000]])
    theirs = LlamaRotaryEmbedding(LlamaConfig(**{k: v for k, v in source.items() if k != "model_type"}))
    ours = RotaryEmbedding(load_config(source))
    torch.testing.assert_close(ours.inv_freq, theirs.original_inv_freq, rtol=1e-6, atol=0)
    cos, sin = theirs(torch.zeros(1), positions)
    table = ours(positions, int(positions.max()) + 1)
    for got, expected in ((table.cos, cos), (table.sin, sin)):
        # angles reach 200,000: a difference of one fp32 rounding in the frequency is 0.02 there
        torch.testing.assert_close(got[:, :, 0], expected[..., :64], rtol=1e-3, atol=0.03)
