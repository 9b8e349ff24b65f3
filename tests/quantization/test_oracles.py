"""Against implementations of others: torchao's `to_mx` where it is right, and microxcaling's signal-to-noise ratios."""

import math

import pytest
import torch

from fsdp2.quantization import quantize
from fsdp2.quantization.formats import SCALE_RULES

mx_tensor = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", reason="torchao 0.18.0 is not installed")

DTYPES = {
    "E4M3": torch.float8_e4m3fn,
    "E5M2": torch.float8_e5m2,
    "E2M1": torch.float4_e2m1fn_x2,
}


def finite_where_torchao_is_right(columns: int, name: str) -> torch.Tensor:
    """bf16 [2048, columns] with blocks of all magnitudes whose scale is above 2**-127.

    With that scale, and with Inf, torchao 0.18.0 is wrong: it takes byte 0 for 2**-126.
    """
    generator = torch.Generator().manual_seed(0)
    smallest = -126 + {"E4M3": 8, "E5M2": 15, "E2M1": 2}[name]
    exponent = torch.randint(smallest, 127, (2048, 1), generator=generator)
    exponent = exponent + torch.randint(-12, 1, (2048, columns), generator=generator)
    mantissa = 1 + torch.randint(0, 128, (2048, columns), generator=generator) / 128
    sign = torch.randint(0, 2, (2048, columns), generator=generator) * 2 - 1
    x = torch.ldexp((sign * mantissa).double(), exponent.double()).to(torch.bfloat16)
    x[:, ::32] = torch.ldexp(mantissa[:, :1].double(), exponent.amax(1, keepdim=True).double()).to(torch.bfloat16)
    return x


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("name", DTYPES)
def test_equal_to_torchao(name, rule):
    x = finite_where_torchao_is_right(96, name)
    mode = mx_tensor.ScaleCalculationMode[rule.upper()]
    scales, codes = mx_tensor.to_mx(x, DTYPES[name], 32, mode)
    q = quantize(x, element_format=name, scale_rule=rule)
    assert torch.equal(q.scales, scales.view(torch.uint8))
    assert torch.equal(q.codes, codes.view(torch.uint8))


def sqnr_db(x: torch.Tensor, y: torch.Tensor) -> float:
    """10 log10 of signal power over error power."""
    return (10 * torch.log10(x.double().square().sum() / (x.double() - y.double()).square().sum())).item()


@pytest.mark.parametrize(
    ("name", "block_shape", "expected"),
    [
        ("E4M3", (1, 32), 30.6),
        ("E4M3", (32, 32), 31.4),
        ("E5M2", (1, 32), 25.3),
        ("E2M3", (1, 32), 30.9),
        ("E3M2", (1, 32), 25.3),
        ("E2M1", (1, 32), 18.8),
    ],
)
def test_signal_to_noise_of_a_normal_matrix(name, block_shape, expected):
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    y = quantize(x, element_format=name, block_shape=block_shape).dequantize(torch.float32)
    assert math.isclose(sqnr_db(x, y), expected, abs_tol=0.3)
