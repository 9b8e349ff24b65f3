"""The router's options: scores, a bias that only selects, a fixed router, the losses and what is reported."""

from __future__ import annotations

import pytest
import torch

from fsdp2.errors import ConfigurationError
from mindspeed_llm.models import ModelConfig, build_model, initialize_weights
from mindspeed_llm.models.layers.moe import MixtureOfExperts
from mindspeed_llm.models.layers.router import (
    Routing,
    configure_routing,
    load_statistics,
    router_z_loss,
    update_selection_bias,
)
from tests.expert_parallel.layouts import CONFIG, EXPERTS


def logits(tokens: int = 64) -> torch.Tensor:
    return torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(0))


def test_sigmoid_scores_choose_and_weigh_by_themselves():
    weights, experts, probabilities = Routing(EXPERTS, 3, "sigmoid", normalize=False)(logits())
    expected = logits().sigmoid().topk(3)
    assert torch.equal(experts, expected.indices) and torch.equal(weights, expected.values)
    torch.testing.assert_close(probabilities.sum(-1), torch.ones(64))
    normalized, _, _ = Routing(EXPERTS, 3, "sigmoid", normalize=True)(logits())
    torch.testing.assert_close(normalized, weights / weights.sum(-1, keepdim=True))


def test_the_bias_selects_but_does_not_weigh():
    routing = Routing(EXPERTS, 2, "softmax", normalize=False)
    routing.balance_by_bias("cpu")
    routing.selection_bias[5] = 10.0
    weights, experts, probabilities = routing(logits())
    assert (experts == 5).any(1).all()
    assert torch.equal(weights, probabilities.gather(1, experts))


def test_the_bias_evens_out_a_skewed_router():
    layer = MixtureOfExperts(ModelConfig.from_dict(CONFIG))
    configure_routing(layer, balance_by_bias=True)
    skew = torch.linspace(0, 1.5, EXPERTS)
    loads = []
    for _ in range(60):
        _, experts, _ = layer.routing(logits(512) + skew)
        loads.append(experts.flatten().bincount(minlength=EXPERTS)[None].float())
        update_selection_bias(layer, loads[-1], 0.01)
    before, after = load_statistics(loads[0]), load_statistics(loads[-1])
    assert after["load_max_over_mean"] < 1.3 < 2 < before["load_max_over_mean"]
    assert after["load_entropy"] > 0.99 > before["load_entropy"]


def test_a_fixed_router_loads_all_experts_alike_and_still_learns():
    model = build_model(CONFIG, device="cpu")
    initialize_weights(model, seed=0)
    configure_routing(model, fixed=True)
    output = model(torch.zeros(2, 16, dtype=torch.int64))
    assert torch.equal(output.tokens_per_expert, torch.full((2, EXPERTS), 2 * 16 * 2 / EXPERTS))
    output.logits.float().logsumexp(-1).sum().backward()
    assert model.get_parameter("model.layers.0.mlp.gate.weight").grad.abs().sum() > 0


def test_z_loss_is_the_mean_squared_log_sum_exp():
    layer = MixtureOfExperts(ModelConfig.from_dict(CONFIG))
    x = torch.randn(2, 8, CONFIG["hidden_size"])
    load = layer(x)[1]
    expected = layer.gate(x).flatten(0, 1).logsumexp(-1).square().mean()
    torch.testing.assert_close(router_z_loss([load, load], 16), expected)


def test_statistics_of_the_extremes():
    even, one = torch.full((2, 4), 5.0), torch.tensor([[20.0, 0, 0, 0]])
    assert load_statistics(even) == pytest.approx(
        {"load_entropy": 1.0, "load_max_over_mean": 1.0, "dropped_tokens": 0.0}
    )
    assert load_statistics(one) == pytest.approx(
        {"load_entropy": 0.0, "load_max_over_mean": 4.0, "dropped_tokens": 0.0}
    )


def test_an_unknown_score_function_is_refused():
    with pytest.raises(ConfigurationError, match="scoring_func 'softmaxx' is not built; built are softmax, sigmoid"):
        ModelConfig.from_dict(CONFIG | {"scoring_func": "softmaxx"})
