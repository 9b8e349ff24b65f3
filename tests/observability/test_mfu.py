"""The FLOPs that MFU counts are those torch counts; a peak comes from the table, a flag, or a measurement."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from mindspeed_llm.models import build_model, initialize_weights, model_flops_per_token
from mindspeed_llm.training.loss import cross_entropy
from mindspeed_llm.training.peak import peak_tflops, table_tflops

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen3"} | SIZES,
        {"model_type": "llama"} | SIZES | {"tie_word_embeddings": True},
        {"model_type": "qwen3_moe"} | SIZES | EXPERTS,
    ],
    ids=["dense", "tied", "experts"],
)
def test_flops_are_those_torch_counts(config):
    model = build_model(config, device="cpu")
    initialize_weights(model, 0)
    tokens = torch.randint(0, 320, (2, 48))
    # The counter knows the plain attention's products; the fused CPU kernel's it does not.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        cross_entropy(model(tokens).logits, tokens).backward()
    # 6 N counts norm weights too, which are multiplied, but not in a product that torch counts.
    norms = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim == 1)
    expected = (model_flops_per_token(model.config, 48) - 6 * norms) * tokens.numel()
    assert counter.get_total_flops() == expected


@pytest.mark.parametrize(
    "name, tflops",
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA B200", 2250.0),
        ("Ascend910B3", 313.0),
        ("Ascend910_9382", 376.0),
        ("Ascend950PR", 500.0),
        ("GeForce 256", None),
    ],
)
def test_table(name, tflops):
    assert table_tflops(name) == tflops


def test_a_cpu_is_measured_and_a_flag_wins():
    measured = peak_tflops(torch.device("cpu"))
    assert 1e-3 < measured < 100
    assert peak_tflops(torch.device("cpu"), override=12.5) == 12.5
