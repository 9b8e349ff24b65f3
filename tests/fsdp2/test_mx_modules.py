"""The three GEMMs of MXLinear and MXGroupedLinear against products of separately dequantized operands in fp64."""

import pytest
import torch
from torch import nn

from fsdp2.expert_parallel.grouped_linear import GroupedLinear
from fsdp2.matmul import Linear
from fsdp2.quantization import MXGroupedLinear, MXLinear, QuantRecipe, quantize
from fsdp2.quantization.formats import WHOLE

RECIPES = [
    "mxfp8",
    "mxfp8-rceil",
    "mxfp8-hybrid",
    "mxfp8-32x32",
    "mxfp6",
    "mxfp4-weights",
    "fp8-blockwise",
    "fp8-per-tensor",
    "fp8-per-channel",
    "dynamic_MX-1-1-32_E4M3_E4M3_BF16",
    "dynamic_MX-1-1-32_BF16_E4M3_E4M3",
]


def rounded(x, recipe, scale_rule, axis):
    if not recipe.is_quantized:
        return x.double()
    options = {"element_format": recipe.element_format, "block_shape": recipe.block_shape, "scale_rule": scale_rule}
    return quantize(x, axis=axis, **options).dequantize(torch.float32).double()


def close(actual, expected):
    """Equal up to one rounding to bf16 and the order of accumulation."""
    torch.testing.assert_close(actual.double(), expected, rtol=2**-7, atol=1e-2 * expected.abs().mean().item() + 1e-7)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("tokens", [1, 33, 64])
def test_linear_gemms_use_the_contracted_axis(name, tokens):
    torch.manual_seed(0)
    recipe = QuantRecipe.from_name(name)
    layer = MXLinear.from_float(nn.Linear(96, 80, dtype=torch.bfloat16), recipe)
    x = torch.randn(tokens, 96, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    rule, w = recipe.scale_rule, layer.weight.detach()
    close(y, rounded(x.detach(), recipe.inputs, rule, -1) @ rounded(w, recipe.weight, rule, -1).T + layer.bias.double())
    close(x.grad, rounded(dy, recipe.grads, rule, -1) @ rounded(w, recipe.weight, rule, -2))
    close(layer.weight.grad, rounded(dy, recipe.grads, rule, -2).T @ rounded(x.detach(), recipe.inputs, rule, -2))
    close(layer.bias.grad, dy.double().sum(0))
    assert layer.weight.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("name", RECIPES)
def test_grouped_gemms_never_let_a_block_cross_two_experts(name):
    torch.manual_seed(0)
    recipe = QuantRecipe.from_name(name)
    counts = [5, 0, 44, 32, 1]
    layer = MXGroupedLinear.from_float(GroupedLinear(5, 64, 96, dtype=torch.bfloat16), recipe)
    x = torch.randn(sum(counts), 64, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x, torch.tensor(counts))
    dy = torch.randn_like(y)
    y.backward(dy)
    rule, begin, weight = recipe.scale_rule, 0, layer.weight.detach()
    for expert, count in enumerate(counts):
        rows = slice(begin, begin + count)
        begin += count
        if count == 0:
            assert torch.count_nonzero(layer.weight.grad[expert]) == 0
            continue
        close(y[rows], of_group(x, rows, recipe.inputs, rule, -1) @ rounded(weight[expert], recipe.weight, rule, -2))
        close(
            x.grad[rows],
            of_group(dy, rows, recipe.grads, rule, -1) @ rounded(weight[expert], recipe.weight, rule, -1).T,
        )
        dw = of_group(x, rows, recipe.inputs, rule, -2).T @ of_group(dy, rows, recipe.grads, rule, -2)
        close(layer.weight.grad[expert], dw)


def of_group(x, rows, recipe, rule, axis):
    """The group's rows, quantized by themselves; with all rows where one scale covers a whole tensor or column."""
    whole = recipe.is_quantized and recipe.block_shape[1] == WHOLE
    return rounded(x.detach(), recipe, rule, axis)[rows] if whole else rounded(x.detach()[rows], recipe, rule, axis)


def test_leading_dimensions_and_strides_do_not_matter():
    torch.manual_seed(0)
    layer = MXLinear.from_float(nn.Linear(64, 64), QuantRecipe.from_name("mxfp8"))
    flat = torch.randn(24, 64)
    cube = flat.view(2, 12, 64)
    strided = torch.randn(2, 64, 12).copy_(cube.transpose(1, 2)).transpose(1, 2)
    assert not strided.is_contiguous()
    assert torch.equal(layer(cube).view(24, 64), layer(flat)) and torch.equal(layer(strided), layer(cube))


def test_frozen_weight_frozen_input_and_no_grad():
    layer = MXLinear.from_float(nn.Linear(64, 32), QuantRecipe.from_name("mxfp8"))
    x = torch.randn(40, 64, requires_grad=True)
    expected = layer(x)
    expected.sum().backward()
    dx, dw = x.grad, layer.weight.grad.clone()
    layer.weight.requires_grad_(False)
    x2 = x.detach().requires_grad_()
    layer(x2).sum().backward()
    assert torch.equal(x2.grad, dx)
    layer.weight.requires_grad_(True).grad = None
    layer(x.detach()).sum().backward()
    assert torch.equal(layer.weight.grad, dw)
    with torch.no_grad():
        assert torch.equal(layer(x), expected)


def test_autocast_computes_in_its_dtype():
    layer = MXLinear.from_float(nn.Linear(64, 32), QuantRecipe.from_name("mxfp8"))
    x = torch.randn(8, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, layer(x).to(torch.bfloat16), rtol=2**-7, atol=2**-8)  # the bias is rounded too


def test_the_saved_activation_is_the_fp8_copy():
    saved = []
    layer = MXLinear.from_float(nn.Linear(256, 64, dtype=torch.bfloat16), QuantRecipe.from_name("mxfp8"))
    x = torch.randn(512, 256, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x)
    activation = sum(t.nbytes for t in saved if t is not layer.weight and t.shape != layer.weight.shape)
    assert activation == x.numel() * 33 // 32  # 1.03125 bytes an element, bf16 would keep 2


def test_conversion_shares_parameters_and_names():
    linear = Linear(64, 32)
    names = [name for name, _ in linear.named_parameters()]
    converted = MXLinear.from_float(linear, QuantRecipe.from_name("mxfp8"))
    assert converted.weight is linear.weight and converted.bias is linear.bias
    assert [name for name, _ in converted.named_parameters()] == names
    assert MXLinear.from_float(nn.Linear(64, 32, device="meta"), converted.recipe).weight.is_meta


def test_a_nan_or_inf_reaches_the_output():
    layer = MXLinear.from_float(nn.Linear(64, 32), QuantRecipe.from_name("mxfp8"))
    for bad in (float("nan"), float("inf")):
        x = torch.randn(4, 64)
        x[2, 40] = bad
        y = layer(x)
        assert y[2].isnan().all() and y[[0, 1, 3]].isfinite().all()
