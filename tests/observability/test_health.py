"""Health figures against numbers worked out by hand, and collected through a sharded model on two ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fsdp2 import parallelize
from fsdp2.plan import ParallelPlan, QuantizationPlan
from fsdp2.quantization import QuantRecipe
from fsdp2.quantization.health import _SUMS, HealthCollector, TensorHealth, measure, module_kind
from fsdp2.quantization.linear import MXLinear
from tests.processes import run_processes

MXFP8 = QuantRecipe.from_name("mxfp8")


def sums(x, recipe=MXFP8, axis=-1, **kwargs) -> dict[str, float]:
    values, _ = measure(x, recipe.inputs, recipe.scale_rule, axis, **kwargs)
    return dict(zip(_SUMS, values.tolist()))


def test_counts_of_a_tensor_made_by_hand():
    x = torch.ones(4, 64)
    x[0, 0] = 480.0  # floor's scale is 2**0, and E4M3 ends at 448: saturated; its block is 480 times the rest
    x[0, 1] = 2.0**-11  # half of a quarter of the smallest subnormal: flushed
    x[3] = 0.0  # two blocks that do not count
    found = sums(x)
    assert {k: found[k] for k in ("elements", "nonzero", "saturated", "flushed")} == {
        "elements": 256, "nonzero": 192, "saturated": 1, "flushed": 1,
    }  # fmt: skip
    assert (found["blocks"], found["saturated_blocks"], found["outlier_blocks"]) == (6, 1, 1)
    assert found["noise"] / found["signal"] == pytest.approx((32.0**2 + 2.0**-22) / float(x.square().sum()), rel=1e-6)
    assert found["noise_rceil"] < found["noise"]


def test_scale_exponents_are_the_blocks_scales():
    x = torch.cat([torch.full((2, 32), 2.0**5), torch.full((1, 32), 2.0**-20)])
    values, largest = measure(x, MXFP8.inputs, "floor")
    histogram = values[len(_SUMS) :]
    assert {i - 127: int(n) for i, n in enumerate(histogram) if n} == {5 - 8: 2, -20 - 8: 1}
    assert largest == 2.0**5


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8-rceil", "mxfp8-hybrid", "mxfp8-32x32"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_gaussian_signal_to_noise_is_that_of_the_format(name, axis):
    recipe = QuantRecipe.from_name(name)
    x = torch.randn(96, 160, generator=torch.Generator().manual_seed(1)) * 1e-9  # as small as gradients are
    for tensor in (recipe.inputs, recipe.weight, recipe.grads):
        values, _ = measure(x, tensor, recipe.scale_rule, axis)
        found = dict(zip(_SUMS, values.tolist()))
        decibels = 10 * math.log10(found["signal"] / found["noise"])
        low, high = (29, 33) if tensor.element_format == "E4M3" else (24, 28)
        assert low < decibels < high
        assert found["outlier_blocks"] == 0


def test_a_sample_says_what_the_whole_says():
    x = torch.randn(16, 512, 96, generator=torch.Generator().manual_seed(2))
    x[:, :, 0] *= 1e4  # along -2 these blocks are of one size; along -1 every first block holds an outlier
    whole, part = sums(x, sample_elements=10**9), sums(x, sample_elements=2**16)
    assert part["elements"] <= 2**16 < whole["elements"]
    assert part["outlier_blocks"] / part["blocks"] == pytest.approx(whole["outlier_blocks"] / whole["blocks"], rel=0.1)
    assert sums(x, axis=-2, sample_elements=2**16)["outlier_blocks"] == 0


def test_an_empty_tensor_adds_nothing():
    values, largest = measure(torch.empty(0, 64), MXFP8.inputs, "floor")
    assert values.abs().sum() == 0 and largest == 0


def test_kind_is_the_name_without_layers():
    assert module_kind("model.layers.7.mlp.experts.down_proj") == "mlp.experts.down_proj"
    assert module_kind("lm_head") == "lm_head"


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))


def _collect_sharded(recompute: bool) -> list[TensorHealth]:
    plan = ParallelPlan(
        world_size=2,
        device_type="cpu",
        fsdp_size=2,
        fsdp_modules=("{0-2}",),
        recompute=recompute,
        recompute_modules=("0",),
        quantization=QuantizationPlan(MXFP8, apply_modules=("{0-2}",)),
    )
    model = parallelize(_model(), plan)
    collector = HealthCollector(model)
    x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(torch.distributed.get_rank()))

    def step() -> None:
        model(x[0]).square().mean().backward()
        model(x[1]).square().mean().backward()
        model.zero_grad()

    step()
    collector.start()
    step()
    return collector.finish(7)


@pytest.mark.parametrize("recompute", [False, True])
def test_two_ranks_see_what_one_process_sees(recompute):
    found, other = run_processes(_collect_sharded, 2, recompute)
    assert [str(f) for f in found] == [str(f) for f in other]
    assert [(f.module, f.tensor) for f in found] == [(m, t) for m in "02" for t in ("input", "weight", "gradient")]
    by_key = {(f.module, f.tensor): f for f in found}
    whole = _model()
    for module, weight in (("0", whole[0].weight), ("2", whole[2].weight)):
        expected, largest = measure(weight, MXFP8.weight, "floor")
        expected = dict(zip(_SUMS, expected.tolist()))
        assert by_key[module, "weight"].elements == expected["elements"]
        assert by_key[module, "weight"].amax == float(largest)
        assert 10 ** (by_key[module, "weight"].sqnr_db / 10) == pytest.approx(
            expected["signal"] / expected["noise"], rel=1e-4
        )
    assert by_key["0", "input"].elements == 2 * 32 * 64  # of both ranks, one micro-batch, once though recomputed
    assert by_key["2", "gradient"].elements == 2 * 32 * 64
    assert by_key["0", "input"].step == 7
    assert TensorHealth.from_row(by_key["0", "input"].as_row()) == by_key["0", "input"]


def test_no_hook_stays():
    model = nn.Sequential(MXLinear.from_float(nn.Linear(64, 32), MXFP8))
    collector = HealthCollector(model)
    assert not model[0]._forward_hooks
    collector.start()
    model(torch.randn(8, 64)).sum().backward()
    assert len(collector.finish(1)) == 3
    assert not model[0]._forward_hooks
