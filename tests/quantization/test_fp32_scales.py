"""8-bit floats with fp32 scales: blocks of 128, whole rows, columns and tensors, and delayed scaling."""

import itertools
import math

import numpy as np
import pytest
import torch

from fsdp2.errors import ConfigurationError
from fsdp2.quantization import quantize, quantize_dual_axis
from fsdp2.quantization.delayed import DelayedQuantizer

LARGEST = {"E4M3": 448.0, "E5M2": 57344.0}
DTYPE = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


def quantize_by_loops(x: torch.Tensor, name: str, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of a 2-D bf16 tensor in blocks of rows x columns, block by block in numpy, cast by torch."""
    x = x.to(torch.bfloat16).float().numpy()
    codes = np.zeros(x.shape, np.uint8)
    scales = np.zeros((-(-x.shape[0] // rows), -(-x.shape[1] // columns)), np.float32)
    for i, j in itertools.product(*map(range, scales.shape)):
        block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        largest, amax = np.float32(LARGEST[name]), np.abs(x[block]).max()
        scales[i, j] = amax / largest
        scaled = torch.from_numpy(x[block] * (largest / amax)).clamp(-largest, largest)
        codes[block] = scaled.to(DTYPE[name]).view(torch.uint8).numpy()
    return codes, scales


@pytest.mark.parametrize("name", ["E4M3", "E5M2"])
@pytest.mark.parametrize("block_shape", [(1, 128), (128, 128), (1, -1), (-1, -1)])
def test_codes_and_scales(block_shape, name):
    x = torch.randn(300, 200, generator=torch.Generator().manual_seed(0)) * 3e-3
    for axis, q in zip((-1, -2), quantize_dual_axis(x, element_format=name, block_shape=block_shape)):
        lengths = [n if n != -1 else size for n, size in zip(block_shape, x.shape)]
        if axis == -2 and block_shape[0] == 1:
            lengths = [block_shape[1] if block_shape[1] != -1 else 300, 1]
        codes, scales = quantize_by_loops(x, name, *lengths)
        assert q.scales.dtype == torch.float32
        np.testing.assert_array_equal(q.codes.numpy(), codes)
        np.testing.assert_array_equal(q.scales.numpy(), scales)
        again = quantize(x, element_format=name, block_shape=block_shape, axis=axis)
        assert torch.equal(again.codes, q.codes) and torch.equal(again.scales, q.scales)
        error = (q.dequantize(torch.float32) - x).norm() / x.norm()
        assert error < {"E4M3": 0.03, "E5M2": 0.06}[name]


def test_every_matrix_of_a_batch_has_its_own_tensor_scale():
    x = torch.randn(3, 40, 50) * torch.tensor([1.0, 10.0, 100.0]).reshape(3, 1, 1)
    q = quantize(x, block_shape=(-1, -1))
    assert q.scales.shape == (3, 1, 1)
    for matrix, codes in zip(x, q.codes):
        assert torch.equal(quantize(matrix, block_shape=(-1, -1)).codes, codes)


@pytest.mark.parametrize("block_shape", [(1, 128), (128, 128), (1, -1), (-1, -1)])
def test_zeros_tiny_numbers_nan_and_inf(block_shape):
    zeros = quantize(torch.zeros(40, 150), block_shape=block_shape)
    assert not zeros.codes.any() and (zeros.scales > 0).all() and not zeros.dequantize(torch.float32).any()
    tiny = quantize(torch.full((40, 150), 2.0**-133), block_shape=block_shape).dequantize(torch.float32)
    assert tiny.isfinite().all()
    for bad in (math.nan, math.inf):
        x = torch.ones(140, 150)
        x[3, 7] = bad
        q = quantize(x, block_shape=block_shape)
        y = q.dequantize(torch.float32)
        assert q.scales.isnan().sum() == 1 and y[3, 7].isnan() and torch.equal(y.isnan(), q.codes == 0x7F)
    largest = torch.finfo(torch.bfloat16).max
    y = quantize(torch.full((4, 4), largest), block_shape=block_shape).dequantize(torch.float32)
    assert torch.allclose(y, torch.full((4, 4), largest), rtol=1e-6)


def test_formats_without_fp32_scales_are_refused():
    with pytest.raises(ConfigurationError, match="E4M3 and E5M2 only"):
        quantize(torch.ones(4, 4), element_format="E2M1", block_shape=(-1, -1))


def test_delayed_scale_is_the_largest_of_the_last_amaxes():
    quantizer = DelayedQuantizer("E4M3", history_length=2)
    amaxes = [4.0, 8.0, 2.0, 1.0, 1.0]
    used = [4.0, 4.0, 8.0, 8.0, 2.0]  # its own at first, then the largest of the two before
    for amax, expected in zip(amaxes, used):
        q = quantizer(torch.full((4, 4), amax))
        assert q.scales.item() == np.float32(expected) / np.float32(448)
        assert q.dequantize(torch.float32)[0, 0] == min(amax, expected)  # a larger one saturates


def test_delayed_history_survives_a_restart_and_bad_steps():
    first = DelayedQuantizer("E5M2")
    first(torch.full((4, 4), 3.0))
    assert first(torch.full((4, 4), math.nan)).dequantize(torch.float32).isnan().all()
    second = DelayedQuantizer("E5M2")
    second.load_state_dict(first.state_dict())
    x = torch.randn(8, 8)
    a, b = first(x), second(x)
    assert torch.equal(a.codes, b.codes) and torch.equal(a.scales, b.scales)
    assert a.scales.item() == np.float32(3.0) / np.float32(57344)
