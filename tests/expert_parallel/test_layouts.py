"""One initialization, one global batch: the same losses, norms and gradients in every layout. Real gloo ranks."""

from __future__ import annotations

import pytest

from tests.expert_parallel import layouts
from tests.processes import run_processes

ISSUE_LAYOUTS = ("fsdp 4", "ep 2 x ep_fsdp 2", "ep 4", "dp_replicate 2 x fsdp 2")


def results(names, options, settings):
    """The layout of one rank under "one", and those of four: ten steps of those of the issue, three of the others."""
    alone = run_processes(layouts.train_layouts, 1, {"one": {"fsdp_size": 1}}, options, settings)[0]
    chosen = {name: layouts.LAYOUTS[name] for name in names}
    steps = {name: 10 if name in ISSUE_LAYOUTS else 3 for name in names}
    return alone | run_processes(layouts.train_layouts, 4, chosen, options, settings, steps)[0]


@pytest.fixture(scope="module")
def exact():
    """With the auxiliary loss, whose shares are the global batch's, and the z-loss."""
    return results(layouts.LAYOUTS, {}, {"balance": {"aux_weight": 0.1, "z_weight": 0.01}})


@pytest.fixture(scope="module")
def quantized():
    settings = {"config": {"initializer_range": 0.02}, "length": 64}
    return results(ISSUE_LAYOUTS, {"recipe": "mxfp8"}, settings)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_in_fp32_every_layout_trains_alike(exact, layout):
    one, other = exact["one"], exact[layout]
    steps = len(other["losses"])
    assert other["losses"] == pytest.approx(one["losses"][:steps], rel=1e-5)
    assert other["norms"] == pytest.approx(one["norms"][:steps], rel=1e-5)
    assert other["gradients"].keys() == one["gradients"].keys()
    for name, gradient in one["gradients"].items():
        assert (other["gradients"][name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    if steps == len(one["losses"]):
        assert other["load"] == one["load"]
        for name, weight in one["weights"].items():
            assert (other["weights"][name] - weight).abs().max() <= 1e-4, name


@pytest.mark.parametrize("layout", ISSUE_LAYOUTS)
def test_in_mxfp8_every_layout_trains_alike(quantized, layout):
    """Blocks along tokens hold other tokens in other layouts, so the weights' gradients are rounded differently."""
    one, other = quantized["one"], quantized[layout]
    assert other["losses"][0] == pytest.approx(one["losses"][0], rel=1e-6)
    assert other["losses"] == pytest.approx(one["losses"], rel=2e-3)
    assert other["norms"] == pytest.approx(one["norms"], rel=2e-3)
    for name, gradient in one["gradients"].items():
        assert (other["gradients"][name] - gradient).norm() <= 0.05 * gradient.norm(), name


def test_gathers_of_experts_shrink_by_ep_and_by_the_codes(exact, quantized):
    """Two layers' experts, gathered in forward and in backward; fp32 in one run, codes and scales in the other."""
    config = layouts.CONFIG
    elements = 2 * config["num_experts"] * 3 * config["hidden_size"] * config["moe_intermediate_size"]
    assert exact["ep_fsdp 2, replicas 2"]["counts"]["expert_all_gather_bytes"] == 2 * 4 * elements // 2
    assert exact["ep 2 x ep_fsdp 2"]["counts"]["expert_all_gather_bytes"] == 2 * 4 * elements // 4
    assert quantized["ep 2 x ep_fsdp 2"]["counts"]["expert_all_gather_bytes"] == 2 * elements // 4 * 33 // 32
    assert quantized["ep 4"]["counts"]["expert_all_gather_bytes"] == 0


def test_tokens_travel_as_codes_in_half_the_bytes():
    settings = {"config": {"hidden_size": 256, "initializer_range": 0.02}, "steps": 1}
    plain, mx = {"ep_size": 4}, {"ep_size": 4, "ep_dispatch_precision": "mxfp8"}
    runs = run_processes(layouts.train_layouts, 4, {"plain": plain, "mx": mx}, {"recipe": "mxfp8"}, settings)[0]
    sent, as_bf16 = runs["mx"]["counts"]["expert_dispatch_bytes"], runs["plain"]["counts"]["expert_dispatch_bytes"]
    assert runs["mx"]["counts"]["expert_dispatch_bytes_if_bf16"] == pytest.approx(as_bf16, rel=0.1)  # routers differ
    assert sent <= 0.52 * runs["mx"]["counts"]["expert_dispatch_bytes_if_bf16"]
    assert runs["mx"]["losses"] == runs["plain"]["losses"]  # quantizing twice is quantizing once
    assert runs["mx"]["norms"] == pytest.approx(runs["plain"]["norms"], rel=2e-3)


def test_accumulation_and_recomputation_change_nothing():
    layout = {"both": layouts.LAYOUTS["ep 2 x ep_fsdp 2"]}
    recompute = {"recompute": True, "recompute_modules": ("model.layers.{*}",)}
    plain = run_processes(layouts.train_layouts, 4, layout, {}, {"steps": 2})[0]["both"]
    other = run_processes(layouts.train_layouts, 4, layout, recompute, {"steps": 2, "accumulate": 2})[0]["both"]
    assert other["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert other["norms"] == pytest.approx(plain["norms"], rel=1e-5)
    assert other["counts"]["expert_all_gather_bytes"] == 2 * plain["counts"]["expert_all_gather_bytes"]
