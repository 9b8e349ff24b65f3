"""The product of quantized matrices: against fp64 products of the dequantized operands, and what hardware would get."""

import pytest
import torch

from fsdp2.quantization import MXTensor, quantize
from fsdp2.quantization.gemm import matmul, native_reason
from fsdp2.quantization.kernels import cuda


def operands(m: int, n: int, k: int, left_axis: int, right_axis: int, **options) -> tuple[MXTensor, MXTensor]:
    generator = torch.Generator().manual_seed(m + n + k)
    left = torch.randn((m, k) if left_axis == -1 else (k, m), generator=generator)
    right = torch.randn((n, k) if right_axis == -1 else (k, n), generator=generator)
    return quantize(left, axis=left_axis, **options), quantize(right, axis=right_axis, **options)


@pytest.mark.parametrize("left_axis", [-1, -2])
@pytest.mark.parametrize("right_axis", [-1, -2])
@pytest.mark.parametrize("element_format", ["E4M3", "E2M1"])
def test_contracts_the_blocks_of_both_operands(left_axis, right_axis, element_format):
    left, right = operands(40, 24, 70, left_axis, right_axis, element_format=element_format)
    bias = torch.randn(24).to(torch.bfloat16).float()
    a, b = left.dequantize(torch.float32).double(), right.dequantize(torch.float32).double()
    expected = (a if left_axis == -1 else a.t()) @ (b.t() if right_axis == -1 else b) + bias
    y = matmul(left, right, out_dtype=torch.float32, bias=bias)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)
    rounded = matmul(left, right, out_dtype=torch.bfloat16, bias=bias)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.double(), expected, rtol=2**-8, atol=1e-4)  # one rounding to 8 bits


def test_operands_that_do_not_fit_are_refused():
    left, right = operands(32, 32, 64, -1, -1)
    with pytest.raises(ValueError, match="contract 64 and 32"):
        matmul(left, quantize(torch.ones(32, 32)), out_dtype=torch.float32)
    with pytest.raises(ValueError, match="must be a matrix"):
        matmul(quantize(torch.ones(2, 32, 32)), right, out_dtype=torch.float32)
    assert "cpu" in native_reason(left, right)


def on_meta(q: MXTensor) -> MXTensor:
    return MXTensor(q.codes.to("meta"), q.scales.to("meta"), q.element_format, q.block_shape, q.axis, q.shape)


@pytest.mark.parametrize("left_axis", [-1, -2])
@pytest.mark.parametrize("right_axis", [-1, -2])
def test_scaled_mm_accepts_what_we_hand_it(left_axis, right_axis):
    """torch's shape function checks dtypes, contiguity, swizzle and padded scale sizes, as the CUDA kernel would."""
    left, right = (on_meta(q) for q in operands(48, 80, 96, left_axis, right_axis))  # no multiple of 128 anywhere
    y = cuda.matmul(left, right, torch.bfloat16, torch.ones(80, device="meta"))
    assert y.shape == (48, 80) and y.dtype == torch.bfloat16


@pytest.mark.parametrize("shape", [(128, 4), (130, 5), (300, 17)])
def test_swizzled_scales_lie_where_the_tensor_cores_look(shape):
    scales = torch.randint(0, 255, shape, dtype=torch.uint8)
    flat = cuda.swizzle_scales(scales)
    column_tiles = -(-shape[1] // 4)
    assert flat.numel() == -(-shape[0] // 128) * column_tiles * 512
    for r, c in ((0, 0), (31, 3), (32, 1), (127, 2), (shape[0] - 1, shape[1] - 1)):
        tile = (r // 128) * column_tiles + c // 4
        assert flat[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] == scales[r, c]
    assert int(flat.long().sum()) == int(scales.long().sum())  # the padding is zero
