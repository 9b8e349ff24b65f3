"""The low-precision reduce-scatter: its bytes, its error against fp32, what it does with NaN, and training on it."""

import math

import pytest
import torch
import torch.distributed as dist

from fsdp2.communication import CountedReduceScatter, Counters, QuantizedReduceScatter
from tests.fsdp2.gather_model import plan_of, train
from tests.processes import run_processes


def reduce_both() -> dict:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    size = 1000  # no multiple of 32
    inputs = torch.randn(ranks, ranks * size, generator=torch.Generator().manual_seed(3))
    results = {"exact": inputs.view(ranks, ranks, size)[:, rank].double().sum(0)}
    for name, kind in (("fp32", CountedReduceScatter), ("mxfp8", QuantizedReduceScatter)):
        counters = Counters([])
        reduce = kind(counters)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) if name == "mxfp8" else (dist.ReduceOp.SUM,):
            output = torch.empty(size)
            reduce(output, inputs[rank].clone(), dist.group.WORLD, op)
            results[name, str(op)] = output
        results[name, "bytes"] = counters.take()["reduce_scatter_bytes"]
    poisoned = inputs[rank].clone()
    if rank == ranks - 1:
        poisoned[5] = math.nan  # belongs to rank 0
    output = torch.empty(size)
    QuantizedReduceScatter(Counters([]))(output, poisoned, dist.group.WORLD, dist.ReduceOp.SUM)
    results["nan"] = output.isnan().sum().item()
    return results


def test_sums_in_fp32_without_requantizing():
    ranks = 3
    for rank, result in enumerate(run_processes(reduce_both, ranks)):
        exact = result["exact"]
        mx = result["mxfp8", str(dist.ReduceOp.SUM)].double()
        error = (mx - exact).norm() / exact.norm()
        # Only what travelled carries the error of E4M3 (0.027 rms on normal numbers): the owner's part is exact.
        assert error < 0.03 * math.sqrt((ranks - 1) / ranks) * 1.1
        assert abs((mx - exact).mean()) < 4 * (mx - exact).std() / math.sqrt(exact.numel())  # unbiased
        torch.testing.assert_close(result["mxfp8", str(dist.ReduceOp.AVG)].double() * ranks, mx, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(result["fp32", str(dist.ReduceOp.SUM)].double(), exact, rtol=1e-5, atol=1e-5)
        blocks = ranks * math.ceil(1000 / 32)
        assert result["mxfp8", "bytes"] == 2 * (ranks * 1000 + blocks)
        assert result["fp32", "bytes"] == 4 * ranks * 1000
        assert result["nan"] == (32 if rank == 0 else 0)


def train_both() -> dict:
    world = dist.get_world_size()
    results = {}
    for name in ("none", "mxfp8"):
        for replicate in (1, 2):
            plan = plan_of(world, recipe="mxfp8-32x32", replicate=replicate, low_precision_reduce_scatter=name)
            results[name, replicate] = train(plan, steps=4)
    return results


def test_training_on_quantized_gradients():
    ranks = run_processes(train_both, 4)
    for replicate in (1, 2):
        plain, low = ranks[0]["none", replicate], ranks[0]["mxfp8", replicate]
        ratio = low["counts"]["reduce_scatter_bytes"] / plain["counts"]["reduce_scatter_bytes"]
        assert ratio == pytest.approx(1.03125 / 4, rel=2e-3)  # ragged ends of small groups
        assert low["losses"] == pytest.approx(plain["losses"], rel=5e-3)
        assert low["norms"][0] == pytest.approx(plain["norms"][0], rel=5e-3)
        assert low["losses"] == ranks[-1]["mxfp8", replicate]["losses"]
        assert (low["counts"]["all_reduce_bytes"] > 0) == (replicate == 2)
