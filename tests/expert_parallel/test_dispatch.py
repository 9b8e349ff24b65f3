"""Tokens reach their experts and come back right, whatever the router did. Real gloo ranks."""

from __future__ import annotations

import pytest
import torch

from tests.expert_parallel import dispatch_worker as worker
from tests.processes import run_processes

LAYOUTS = {"ep 4": {"ep_size": 4}, "ep 2 x ep_fsdp 2": {"ep_size": 2, "ep_fsdp_size": 2}}
PARAMETERS = ("scale", "experts.gate_up_proj.weight", "experts.down_proj.weight")


@pytest.fixture(scope="module", params=LAYOUTS)
def ranks(request):
    return run_processes(worker.run_cases, worker.RANKS, list(worker.CASES), None, LAYOUTS[request.param])


@pytest.mark.parametrize("case", worker.CASES)
def test_as_if_every_rank_held_all_experts(ranks, case):
    layer = worker.layer()
    for rank, results in enumerate(ranks):
        rows, counts, weights, dy = worker.inputs(case, rank)
        rows, weights = rows.requires_grad_(), weights.requires_grad_()
        y = layer(rows, counts, weights)
        y.backward(dy)
        torch.testing.assert_close(results[case]["y"], y.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(results[case]["rows"], rows.grad, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(results[case]["weights"], weights.grad, rtol=1e-5, atol=1e-6)
    for name in PARAMETERS:  # the sum over ranks' tokens; FSDP averages over ranks
        expected = layer.get_parameter(name).grad / worker.RANKS
        for results in ranks:
            torch.testing.assert_close(results[case][name], expected, rtol=1e-5, atol=1e-6)


def test_fused_gives_the_bits_of_eager_in_mxfp8():
    """Padding where the rows are permuted, or in every GEMM: the same blocks, the same numbers."""
    cases = ["uneven", "all to one expert", "one token", "no token at all"]
    eager, fused = (
        run_processes(worker.run_cases, worker.RANKS, cases, "mxfp8", {"ep_size": 4, "ep_dispatcher": dispatcher})
        for dispatcher in ("eager", "fused")
    )
    for one, other in zip(eager, fused):
        for case in cases:
            for name, value in one[case].items():
                assert torch.equal(value, other[case][name]), (case, name)


def test_an_expert_without_tokens_has_no_gradient():
    results = run_processes(
        worker.run_cases, worker.RANKS, ["all to one expert"], "mxfp8", {"ep_size": 4, "ep_dispatch_precision": "mxfp8"}
    )[0]["all to one expert"]
    for name in PARAMETERS[1:]:
        assert results[name][5].count_nonzero() > 0
        assert results[name][:5].count_nonzero() == results[name][6:].count_nonzero() == 0
