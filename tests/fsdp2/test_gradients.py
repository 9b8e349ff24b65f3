"""Gradient norm and clipping: the single-process numbers in every layout; non-finite gradients named on every rank."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2.gradients import clip_grad_norm_, gradient_norm, nonfinite_parameters
from tests.processes import run_processes


def small_model() -> nn.Sequential:
    torch.manual_seed(0)  # 7 and 3 rows: shards are uneven, and empty on the last of 4 ranks
    return nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 3))


def full_batch() -> torch.Tensor:
    return torch.randn(8, 10, generator=torch.Generator().manual_seed(1))


def measure() -> list[dict]:
    world, results = dist.get_world_size(), []
    for replicate in (1, 2) if world == 4 else (1,):
        plan = fsdp2.ParallelPlan(
            world, "cpu", world // replicate, replicate, fsdp_modules=("0",), param_dtype="fp32", reduce_dtype="fp32"
        )
        model = fsdp2.parallelize(copy.deepcopy(small_model()), plan)
        model(full_batch().chunk(world)[dist.get_rank()]).square().mean().backward()
        norm = clip_grad_norm_(model, 0.01)
        clipped = {name: p.grad.full_tensor().clone() for name, p in model.named_parameters()}
        after = gradient_norm(model)
        finite = nonfinite_parameters(model)
        if dist.get_rank() % (world // replicate) == 0:  # the same shard of every replica
            model[2].weight.grad.to_local().fill_(math.nan)
        results.append({
            "norm": norm,
            "after": after,
            "clipped": clipped,
            "finite": finite,
            "bad": nonfinite_parameters(model),
            "bad norm": clip_grad_norm_(model, 1.0),
        })
    return results


@pytest.mark.parametrize("world", [2, 4])
def test_the_same_norm_in_every_layout(world):
    reference = small_model()
    reference(full_batch()).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01).item()
    for rank in run_processes(measure, world):
        for result in rank:
            assert result["norm"] == pytest.approx(norm, rel=1e-6)
            assert result["after"] == pytest.approx(0.01, rel=1e-4)
            for name, parameter in reference.named_parameters():
                torch.testing.assert_close(result["clipped"][name], parameter.grad, rtol=1e-5, atol=1e-8)
            assert result["finite"] == [] and result["bad"] == ["2.weight"]
            assert math.isnan(result["bad norm"])


def test_without_sharding():
    model = small_model()
    model(full_batch()).sum().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    assert clip_grad_norm_(model, 0) == pytest.approx(expected, rel=1e-6)
    assert gradient_norm(model) == pytest.approx(expected, rel=1e-6)
