"""The specification of block-scaled quantization in plain torch: what every other kernel reproduces, byte for byte.

Read it top to bottom: cut the tensor into blocks, take each block's largest magnitude, derive the block's scale from
it, divide by the scale, round to the element's grid. An E8M0 scale comes from the bits of the largest magnitude, and
dividing by a power of two is exact, so the result depends on no library's idea of `log2`, division or rounding. It
runs on any device torch runs on.

Sources: OCP Microscaling Formats (MX) Specification v1.0, sections 5.3 (E8M0) and 6.3 (conversion); arXiv 2506.08027
(the round-up rule); arXiv 2412.19437, section 3.3 (fp32 scales of 1x128 and 128x128 blocks).
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp2.quantization.formats import (
    E8M0_BIAS,
    E8M0_NAN,
    FP32_MANTISSA_BITS,
    SCALE_FORMATS,
    SMALLEST_AMAX,
    WHOLE,
    BlockShape,
    ElementFormat,
)

FP32_MANTISSA_MASK = (1 << FP32_MANTISSA_BITS) - 1
Planes = tuple[Tensor, Tensor]  # codes, scales


def unavailable_reason(device_type: str) -> str | None:
    """Always available."""
    return None


def quantize(
    x: Tensor, fmt: ElementFormat, block_shape: BlockShape, axis: int, rule: str, amax: Tensor | None = None
) -> Planes:
    """Return `(codes, scales)` of `x` (any floating dtype, any strides); see `fsdp2.quantization.mx.quantize`."""
    values = x.to(torch.bfloat16).to(torch.float32)
    lengths = block_lengths(x.shape, block_shape, axis)
    own_amax = block_amax(values, lengths)
    if SCALE_FORMATS[block_shape] == "E8M0":
        scales = e8m0_scales(own_amax, fmt, rule)
        factors, bad = reciprocal(scales), scales == E8M0_NAN
    else:
        scales, factors = fp32_scales(own_amax if amax is None else amax, fmt)
        bad = ~(own_amax.isfinite() & scales.isfinite())
        scales = scales.masked_fill(bad, torch.nan)
    bad = expand(bad, lengths, x.shape)
    scaled = values.masked_fill(bad, 0.0) * expand(factors, lengths, x.shape)
    codes = encode(scaled, fmt).masked_fill(bad, fmt.nan_code)
    return pack(codes) if fmt.codes_per_byte == 2 else codes, scales


def quantize_dual_axis(x: Tensor, fmt: ElementFormat, block_shape: BlockShape, rule: str) -> tuple[Planes, Planes]:
    """Return `((codes, scales) along axis -1, (codes, scales) along axis -2)`."""
    along_rows = quantize(x, fmt, block_shape, x.ndim - 1, rule)
    return along_rows, along_rows if block_shape[0] != 1 else quantize(x, fmt, block_shape, x.ndim - 2, rule)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    fmt: ElementFormat,
    block_shape: BlockShape,
    axis: int,
    shape: torch.Size,
    dtype: torch.dtype,
) -> Tensor:
    """Return `element * scale` as `dtype`: computed in fp32 (exact when the scale is a power of two), rounded once."""
    codes = unpack(codes, shape) if fmt.codes_per_byte == 2 else codes
    values = torch.tensor(fmt.values(), dtype=torch.float32, device=codes.device)[codes.long()]
    scales = power_of_two(scales) if SCALE_FORMATS[block_shape] == "E8M0" else scales
    return (values * expand(scales, block_lengths(shape, block_shape, axis), shape)).to(dtype)


def block_lengths(shape: torch.Size, block_shape: BlockShape, axis: int) -> list[int]:
    """Elements of one block along each dimension: `(1, n)` runs along `axis`, `(n, n)` is a tile of the last two."""
    lengths = [1] * len(shape)
    if block_shape[0] == 1:
        lengths[axis] = block_shape[1]
    else:
        lengths[-2:] = block_shape
    return [max(size, 1) if length == WHOLE else length for length, size in zip(lengths, shape)]


def block_amax(values: Tensor, lengths: list[int]) -> Tensor:
    """Largest magnitude of each block (NaN when one is in it): `ceil(size / length)` of them along each dimension.

    Ragged ends are padded with zeros.
    """
    padding = [n for size, length in zip(reversed(values.shape), reversed(lengths)) for n in (0, -size % length)]
    padded = torch.nn.functional.pad(values.abs(), padding) if any(padding) else values.abs()
    blocked = padded.reshape([n for size, length in zip(padded.shape, lengths) for n in (size // length, length)])
    return blocked.amax(dim=tuple(range(1, blocked.ndim, 2)))


def e8m0_scales(amax: Tensor, fmt: ElementFormat, rule: str) -> Tensor:
    """The scale byte of each block from the bits of its fp32 `amax`: 0 for a block of zeros, 255 for NaN and Inf."""
    bits = amax.contiguous().view(torch.int32)
    if rule == "even":  # round amax half up to the element's mantissa bits: floor then sees the rounded number
        bits = bits + (1 << (FP32_MANTISSA_BITS - 1 - fmt.mantissa_bits))
    exponent, mantissa = bits >> FP32_MANTISSA_BITS, bits & FP32_MANTISSA_MASK
    if rule == "ceil":
        exponent = exponent + (mantissa != 0)
    elif rule == "rceil":
        exponent = exponent + (mantissa > fmt.largest_mantissa_fp32)
    scales = (exponent - fmt.emax).clamp(min=0)  # the exponent field carries the bias 127, and so does the scale
    return scales.masked_fill(~amax.isfinite(), E8M0_NAN).to(torch.uint8)


def fp32_scales(amax: Tensor, fmt: ElementFormat) -> Planes:
    """Return `(scale, factor)` of each block: codes are multiplied by amax / largest, numbers by largest / amax."""
    amax = amax.clamp(min=SMALLEST_AMAX)
    largest = torch.full_like(amax, fmt.largest)  # with a Python number torch multiplies by a rounded reciprocal
    return amax / largest, largest / amax


def encode(scaled: Tensor, fmt: ElementFormat) -> Tensor:
    """Round finite fp32 values to `fmt` (nearest even, saturating) and return one code a byte, uint8."""
    magnitude = scaled.abs().clamp(max=fmt.largest)
    exponent = (magnitude.view(torch.int32) >> FP32_MANTISSA_BITS) - E8M0_BIAS
    exponent = exponent.clamp(min=fmt.smallest_normal_exponent)  # below it the grid no longer gets finer: subnormals
    grid = ((exponent - fmt.mantissa_bits + E8M0_BIAS) << FP32_MANTISSA_BITS).view(torch.float32)
    steps = torch.round(magnitude / grid).to(torch.int32)  # torch.round is half to even
    # A normal has 2**mantissa_bits .. 2**(mantissa_bits + 1) steps: added to the exponent field, they carry into it.
    code = ((exponent - fmt.smallest_normal_exponent) << fmt.mantissa_bits) + steps
    return (code | (torch.signbit(scaled).to(torch.int32) << (fmt.bits - 1))).to(torch.uint8)


def power_of_two(scales: Tensor) -> Tensor:
    """`2**(byte - 127)` as fp32, from bits: byte 0 is the subnormal 2**-127, byte 255 is NaN."""
    bits = scales.to(torch.int32) << FP32_MANTISSA_BITS
    bits = bits.masked_fill(scales == 0, 1 << (FP32_MANTISSA_BITS - 1)).masked_fill(scales == E8M0_NAN, 0x7FC00000)
    return bits.view(torch.float32)


def reciprocal(scales: Tensor) -> Tensor:
    """`2**(127 - byte)` as fp32, from bits. No quantized block has byte 254, so neither end overflows."""
    return ((2 * E8M0_BIAS - scales.to(torch.int32)).clamp(min=1) << FP32_MANTISSA_BITS).view(torch.float32)


def expand(per_block: Tensor, lengths: list[int], shape: torch.Size) -> Tensor:
    """Repeat one value a block to one value an element of `shape`."""
    for dim, (length, size) in enumerate(zip(lengths, shape)):
        if length != 1:
            per_block = per_block.repeat_interleave(length, dim).narrow(dim, 0, size)
    return per_block


def pack(codes: Tensor) -> Tensor:
    """Two 4-bit codes a byte along the last dimension, the first in the low nibble: [..., C] -> [..., ceil(C / 2)]."""
    codes = torch.nn.functional.pad(codes, (0, codes.shape[-1] % 2))
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `pack` for a tensor of `shape`."""
    return torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)[..., : shape[-1]]
