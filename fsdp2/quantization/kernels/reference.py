"""The specification of block-scaled quantization in plain torch: what every other kernel must reproduce, byte for byte.

Read it top to bottom: cut the tensor into blocks, take each block's largest magnitude, derive its E8M0 scale from the
bits of that number, divide by the scale (exact, it is a power of two), round to the element's grid. Only integer bit
operations and exact multiplications occur, so the result depends on no library's idea of `log2` or rounding. It runs on
any device torch runs on.

Sources: OCP Microscaling Formats (MX) v1.0, section 6.3 (conversion) and 5.3 (E8M0); arXiv 2506.08027 for the round-up
rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp2.quantization.formats import E8M0_BIAS, E8M0_NAN, FP32_MANTISSA_BITS, ElementFormat

FP32_MANTISSA_MASK = (1 << FP32_MANTISSA_BITS) - 1


def unavailable_reason() -> str | None:
    """Always available."""
    return None


Planes = tuple[Tensor, Tensor]  # codes, scales


def quantize(x: Tensor, fmt: ElementFormat, block_shape: tuple[int, int], axis: int, rule: str) -> Planes:
    """Return `(codes, scales)` of `x` (any floating dtype, any strides), both uint8; see
    `fsdp2.quantization.mx.quantize` for shapes.
    """
    values = x.to(torch.bfloat16).to(torch.float32)
    lengths = block_lengths(x.shape, block_shape, axis)
    scales = e8m0_scales(block_amax(values, lengths), fmt, rule)
    not_a_number = expand(scales, lengths, x.shape) == E8M0_NAN
    scaled = values.masked_fill(not_a_number, 0.0) * expand(reciprocal(scales), lengths, x.shape)
    codes = encode(scaled, fmt).masked_fill(not_a_number, fmt.nan_code)
    return pack(codes) if fmt.codes_per_byte == 2 else codes, scales


def quantize_dual_axis(
    x: Tensor, fmt: ElementFormat, block_shape: tuple[int, int], rule: str
) -> tuple[Planes, Planes]:
    """Return `((codes, scales) along axis -1, (codes, scales) along axis -2)`."""
    along_rows = quantize(x, fmt, block_shape, x.ndim - 1, rule)
    return along_rows, along_rows if block_shape[0] != 1 else quantize(x, fmt, block_shape, x.ndim - 2, rule)


def dequantize(
    codes: Tensor,
    scales: Tensor,
    fmt: ElementFormat,
    block_shape: tuple[int, int],
    axis: int,
    shape: torch.Size,
    dtype: torch.dtype,
) -> Tensor:
    """Return `element * 2**s` as `dtype`: exact in fp32, then rounded once to nearest even."""
    codes = unpack(codes, shape) if fmt.codes_per_byte == 2 else codes
    values = torch.tensor(fmt.values(), dtype=torch.float32, device=codes.device)[codes.long()]
    return (values * expand(power_of_two(scales), block_lengths(shape, block_shape, axis), shape)).to(dtype)


def block_lengths(shape: torch.Size, block_shape: tuple[int, int], axis: int) -> list[int]:
    """Elements of one block along each dimension: `(1, n)` runs along `axis`, `(n, n)` is a tile of the last two
    dimensions.
    """
    lengths = [1] * len(shape)
    if block_shape[0] == 1:
        lengths[axis] = block_shape[1]
    else:
        lengths[-2:] = block_shape
    return lengths


def block_amax(values: Tensor, lengths: list[int]) -> Tensor:
    """Largest magnitude of each block (NaN when one is in it), `ceil(size / length)` along each dimension; ragged ends
    are padded with zeros.
    """
    padding = [n for size, length in zip(reversed(values.shape), reversed(lengths)) for n in (0, -size % length)]
    padded = torch.nn.functional.pad(values.abs(), padding) if any(padding) else values.abs()
    blocked = padded.reshape([n for size, length in zip(padded.shape, lengths) for n in (size // length, length)])
    return blocked.amax(dim=tuple(range(1, blocked.ndim, 2)))


def e8m0_scales(amax: Tensor, fmt: ElementFormat, rule: str) -> Tensor:
    """The scale byte of each block from the bits of its fp32 `amax`; 0 for an all-zero block, 255 when `amax` is NaN or
    Inf.
    """
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
