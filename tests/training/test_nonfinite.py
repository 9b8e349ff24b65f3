"""The diagnosis names the first bad module, for values that go wrong in forward, in backward, and in a weight."""

from __future__ import annotations

import torch
from torch import nn

from mindspeed_llm.training.nonfinite import diagnose


class Root(nn.Module):
    """sqrt: finite in forward at 0, infinite slope in backward."""

    def forward(self, x):
        return x.sqrt()


class Overflow(nn.Module):
    def forward(self, x):
        return x * 1e38 * 1e38


def chain(middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), middle, nn.Linear(4, 1))


def replay_of(model: nn.Module, x: torch.Tensor):
    return lambda: model(x).sum().backward()


def test_forward(one_process):
    model = chain(Overflow())
    sentence = diagnose(model, replay_of(model, torch.ones(2, 4)))
    assert sentence.startswith("the first value that is not finite is the output of 2 (rank 0)")


def test_backward(one_process):
    model = chain(Root())
    with torch.no_grad():
        model[0].bias.fill_(-100.0)  # ReLU gives exact zeros
    sentence = diagnose(model, replay_of(model, torch.ones(2, 4)))
    assert sentence == "the first value that is not finite is the gradient at the output of 1 (rank 0)"


def test_weight(one_process):
    model = chain(nn.Linear(4, 4))
    with torch.no_grad():
        model[2].weight[1, 2] = float("inf")
    sentence = diagnose(model, replay_of(model, torch.ones(2, 4)))
    assert "is the output of 2 (rank 0)" in sentence and sentence.endswith("not finite: 2.weight")


def test_gradient_of_a_weight_alone(one_process):
    """Every output and its gradient are finite; only the product that makes the weight's gradient overflows."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1e-38)
    x = torch.full((1, 1), 1e38)
    sentence = diagnose(model, lambda: (model(x) * 1e10).sum().backward())
    assert sentence == "outputs are finite, gradients are not: 0.weight"


def test_a_fault_that_does_not_repeat(one_process):
    model = chain(nn.Identity())
    assert "does not repeat" in diagnose(model, replay_of(model, torch.ones(2, 4)))
    assert all(not module._forward_hooks for module in model.modules())
