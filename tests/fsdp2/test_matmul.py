"""16-bit GEMMs through fp32, and the plain grouped GEMM, against fp64."""

import pytest
import torch
import torch.nn.functional as F

from fsdp2.expert_parallel.grouped_linear import GroupedLinear
from fsdp2.matmul import Linear, linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_rounds_once(dtype):
    torch.manual_seed(0)
    x = torch.randn(3, 7, 64, dtype=dtype, requires_grad=True)
    layer = Linear(64, 48, dtype=dtype)
    y = layer(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    x64, w64, dy64 = x.detach().double().view(-1, 64), layer.weight.detach().double(), dy.double().view(-1, 48)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double().view(-1, 48), x64 @ w64.T + layer.bias.double(), rtol=eps, atol=1e-5)
    torch.testing.assert_close(x.grad.double().view(-1, 64), dy64 @ w64, rtol=eps, atol=1e-5)
    torch.testing.assert_close(layer.weight.grad.double(), dy64.T @ x64, rtol=eps, atol=1e-5)
    torch.testing.assert_close(layer.bias.grad.double(), dy64.sum(0), rtol=eps, atol=1e-5)


def test_fp32_is_plain_torch():
    x, w = torch.randn(5, 8), torch.randn(6, 8)
    assert torch.equal(linear(x, w), F.linear(x, w))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", [[3, 0, 9, 4], [0, 0, 16, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
def test_grouped_linear_equals_a_loop_over_experts(dtype, counts):
    torch.manual_seed(0)
    layer = GroupedLinear(4, 32, 24, dtype=dtype)
    x = torch.randn(sum(counts), 32, dtype=dtype, requires_grad=True)
    y = layer(x, torch.tensor(counts))
    y.sum().backward()
    begin, eps = 0, torch.finfo(dtype).eps
    for expert, count in enumerate(counts):
        rows = x.detach().double()[begin : begin + count]
        w = layer.weight.detach().double()[expert]
        torch.testing.assert_close(y.double()[begin : begin + count], rows @ w, rtol=eps, atol=1e-5)
        dw = rows.sum(0)[:, None].expand(32, 24)
        torch.testing.assert_close(layer.weight.grad.double()[expert], dw, rtol=eps, atol=1e-5)
        begin += count


def test_counts_that_miss_rows_are_an_error():
    with pytest.raises(ValueError, match="add up to 3, but there are 4 rows"):
        GroupedLinear(2, 8, 8)(torch.randn(4, 8), torch.tensor([1, 2]))
