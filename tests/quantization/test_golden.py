"""Every array of the golden file, bit for bit, on every backend that runs here.

The file holds vectors made by two independent implementations (a bf16 matrix, its codes and scales under each rule,
dequantized values of all five element formats, blocks along the other axis, and tiles). Nothing in it came from this
package.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from fsdp2.quantization import quantize, quantize_dual_axis
from fsdp2.quantization.formats import SCALE_RULES
from fsdp2.quantization.kernels import runnable_backends

BACKENDS = runnable_backends("cpu")


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(Path(__file__).parent / "golden" / "mx_golden.npz") as file:
        return dict(file)


def bf16(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def assert_same_bits(actual: torch.Tensor, expected: np.ndarray) -> None:
    actual = actual.numpy()
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.view(f"u{actual.itemsize}"), expected.view(f"u{expected.itemsize}"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("element_format", ["E4M3", "E5M2"])
def test_codes_and_scales_of_each_rule(golden, element_format, rule, backend):
    q = quantize(bf16(golden["x_bf16_bits"]), element_format=element_format, scale_rule=rule, backend=backend)
    assert_same_bits(q.codes, golden[f"{element_format.lower()}_{rule}_codes"])
    assert_same_bits(q.scales, golden[f"{element_format.lower()}_{rule}_scales"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1"])
def test_dequantized_values_of_each_format(golden, name, backend):
    x = bf16(golden["x_bf16_bits"])
    values = quantize(x, element_format=name.split("_")[1].upper(), backend=backend).dequantize(torch.float32)
    # The file's author turned an input of -0 into +0; its codes (and ours) keep the sign.
    assert_same_bits(values.where(x != 0, 0.0), golden[f"{name}_floor_dequant_axis-1"])
    assert torch.equal(values[x == 0].view(torch.int32), x[x == 0].float().view(torch.int32))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", ["floor", "rceil"])
@pytest.mark.parametrize("layout", ["axis-2", "32x32"])
def test_other_axis_and_tiles(golden, layout, rule, backend):
    block_shape = (32, 32) if layout == "32x32" else (1, 32)
    x = bf16(golden["x2_bf16_bits"])
    for q in (
        quantize(x, axis=-2, block_shape=block_shape, scale_rule=rule, backend=backend),
        quantize_dual_axis(x, block_shape=block_shape, scale_rule=rule, backend=backend)[1],
    ):
        assert_same_bits(q.codes, golden[f"x2_e4m3_{rule}_{layout}_codes"])
        assert_same_bits(q.scales, golden[f"x2_e4m3_{rule}_{layout}_scales"])
