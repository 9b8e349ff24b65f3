"""What only an accelerator can answer: the golden bytes come out of its kernels, and its GEMMs agree with the CPU's.

    DEVICE=cuda python -m pytest tests/gpu        (npu, or cpu to try the tests themselves)

Without DEVICE they run where torch sees a GPU or an NPU, and are skipped elsewhere. `check.sh` runs them first.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from fsdp2.expert_parallel.grouped_linear import GroupedLinear
from fsdp2.quantization import QuantRecipe, quantize, quantize_dual_axis
from fsdp2.quantization.formats import SCALE_RULES
from fsdp2.quantization.grouped import MXGroupedLinear
from fsdp2.quantization.kernels import backend_for_device
from fsdp2.quantization.linear import MXLinear
from mindspeed_llm.training.distributed import device_type

DEVICE = os.environ.get("DEVICE") or device_type()
GOLDEN = Path(__file__).parents[1] / "quantization" / "golden" / "mx_golden.npz"

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and "DEVICE" not in os.environ, reason="torch sees no accelerator here"
)


def test_the_device_s_own_kernels_are_used():
    assert DEVICE == "cpu" or backend_for_device(DEVICE) == DEVICE


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("element_format", ["E4M3", "E5M2"])
def test_golden_codes_and_scales(element_format, rule):
    with np.load(GOLDEN) as file:
        golden = dict(file)
    x = torch.from_numpy(golden["x_bf16_bits"].view(np.int16)).view(torch.bfloat16).to(DEVICE)
    q = quantize(x, element_format=element_format, scale_rule=rule)
    for name in ("codes", "scales"):
        expected = golden[f"{element_format.lower()}_{rule}_{name}"]
        np.testing.assert_array_equal(getattr(q, name).cpu().numpy(), expected.view(np.uint8), err_msg=name)


@pytest.mark.parametrize("shape", [(64, 64), (70, 100), (257, 1000), (3, 40, 65), (4096, 2048)])
def test_both_axes_give_the_cpu_s_bytes(shape):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-20, 20, shape, generator=generator).float())
    for here, there in zip(quantize_dual_axis(x.to(DEVICE)), quantize_dual_axis(x, backend="reference")):
        assert torch.equal(here.codes.cpu(), there.codes) and torch.equal(here.scales.cpu(), there.scales)
        values = here.dequantize(torch.bfloat16).cpu()
        assert torch.equal(values, there.dequantize(torch.bfloat16, backend="reference"))


def gradients(module: torch.nn.Module, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Output, input gradient and parameter gradients in fp32 on the CPU, for the same output gradient every time."""
    x = inputs[0].clone().requires_grad_()
    y = module(x, *inputs[1:])
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y))
    return [tensor.detach().float().cpu() for tensor in (y, x.grad, *(p.grad for p in module.parameters()))]


def assert_close(here: list[torch.Tensor], there: list[torch.Tensor]) -> None:
    """Only the order of accumulation and the final rounding to bf16 may differ."""
    for a, b in zip(here, there, strict=True):
        assert (a - b).norm() <= 4e-3 * b.norm()
        assert (a - b).abs().max() <= 2e-2 * b.abs().max()


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-32x32", "mxfp8-rceil", "mxfp8-hybrid"])
@pytest.mark.parametrize("tokens, size_in, size_out", [(256, 512, 384), (100, 96, 64)])
def test_a_quantized_linear_agrees_with_the_cpu(recipe, tokens, size_in, size_out):
    torch.manual_seed(1)
    linear = torch.nn.Linear(size_in, size_out, bias=False).bfloat16()
    x = torch.randn(tokens, size_in).bfloat16()
    results = []
    for device in (DEVICE, "cpu"):
        copy = torch.nn.Linear(size_in, size_out, bias=False).bfloat16().to(device)
        copy.load_state_dict(linear.state_dict())
        results.append(gradients(MXLinear.from_float(copy, QuantRecipe.from_name(recipe)), x.to(device)))
    assert_close(*results)


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8-32x32"])
def test_quantized_experts_agree_with_the_cpu(recipe):
    torch.manual_seed(1)
    weight, counts = torch.randn(4, 128, 96) / 11, torch.tensor([70, 0, 33, 97])
    x = torch.randn(int(counts.sum()), 128).bfloat16()
    results = []
    for device in (DEVICE, "cpu"):
        experts = GroupedLinear(4, 128, 96).bfloat16().to(device)
        with torch.no_grad():
            experts.weight.copy_(weight)
        experts = MXGroupedLinear.from_float(experts, QuantRecipe.from_name(recipe))
        results.append(gradients(experts, x.to(device), counts.to(device)))
    assert_close(*results)
