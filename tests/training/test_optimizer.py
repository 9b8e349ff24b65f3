"""Which parameters decay, and that a state allocated for loading leaves parameters alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fsdp2.errors import ConfigurationError
from mindspeed_llm.models import build_model, initialize_weights
from mindspeed_llm.training.optimizer import allocate_state, build_optimizer, optimizer_tensors, parameter_groups

CONFIG = {
    "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "tie_word_embeddings": True, "attention_bias": True,
}  # fmt: skip
OPTIONS = {"lr": 0.1, "weight_decay": 0.5, "betas": (0.9, 0.95), "epsilon": 1e-8}


@pytest.fixture
def model():
    model = build_model(CONFIG, device="cpu")
    initialize_weights(model, 0)
    return model


def test_norms_and_biases_do_not_decay(model):
    decayed, undecayed = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.1, 0.0)
    assert all(("norm" in name) or name.endswith(".bias") for name in undecayed["names"])
    assert not any(("norm" in name) or name.endswith(".bias") for name in decayed["names"])
    assert {"model.norm.weight", "model.layers.0.self_attn.q_proj.bias"} <= set(undecayed["names"])
    assert {"model.embed_tokens.weight", "model.layers.0.mlp.experts.down_proj.weight"} <= set(decayed["names"])
    assert len(decayed["params"]) + len(undecayed["params"]) == len(list(model.parameters()))  # a tied one counts once


@pytest.mark.parametrize("kind", ["adamw", "fused_adamw"])
def test_a_step_equals_adamw_written_out(kind):
    model = nn.Linear(3, 2)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, kind=kind, **OPTIONS)
    model(torch.ones(1, 3)).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    for name, parameter in model.named_parameters():
        decay = 1 - 0.1 * 0.5 if name == "weight" else 1.0
        expected = before[name] * decay - 0.1 * gradients[name] / (gradients[name].abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), expected)


@pytest.mark.parametrize("kind", ["adamw", "fused_adamw"])
def test_allocating_the_state_changes_no_parameter(model, kind):
    optimizer = build_optimizer(model, kind=kind, **OPTIONS)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    allocate_state(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]
    names = optimizer_tensors(optimizer).keys()
    assert "model.embed_tokens.weight.exp_avg_sq" in names and len(names) == 3 * len(before)


def test_an_unbuilt_optimizer_is_refused(model):
    with pytest.raises(ConfigurationError, match=r"--training.optimizer muon: built are adamw and fused_adamw"):
        build_optimizer(model, kind="muon", **OPTIONS)
