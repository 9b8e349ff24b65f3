"""The element formats of block-scaled quantization: how many bits, which values, how they are packed.

One frozen row per format, so that every kernel, recipe check, test and document reads the same numbers. Source: OCP
Microscaling Formats (MX) Specification v1.0, sections 5.1 to 5.3; E5M2 keeps the infinities of IEEE 754 in its code
space, but quantization never produces them: every conversion here saturates at the largest finite value. Nothing here
needs torch, so that a recipe's name is checked before torch is imported.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdp2.errors import ConfigurationError, nearest

E8M0_BIAS = 127  # a scale byte b stands for 2**(b - 127); byte 0 is 2**-127, no zero and no infinity
E8M0_NAN = 255
MX_BLOCK = 32
WHOLE = -1  # a block length: the whole dimension
BlockShape = tuple[int, int]  # (rows, columns), the columns along the axis that the blocks follow
SCALE_FORMATS: dict[BlockShape, str] = {  # "E8M0": a power of two, a byte; "FP32": amax / largest, four bytes
    (1, 32): "E8M0",
    (32, 32): "E8M0",
    (1, 128): "FP32",
    (128, 128): "FP32",
    (WHOLE, WHOLE): "FP32",
    (1, WHOLE): "FP32",
}
SMALLEST_AMAX = 2.0**-110  # of an fp32-scaled block: smaller ones are scaled as if it were this, so nothing overflows
FP32_MANTISSA_BITS = 23


@dataclass(frozen=True)
class ElementFormat:
    """A floating-point element with one sign bit, `exponent_bits` and `mantissa_bits`, in code order sign | exponent |
    mantissa.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest_code: int  # the code of the largest finite value, sign 0
    nan_code: int  # what the elements of a NaN block hold; 0 where only the scale can say NaN
    codes_per_byte: int = 1  # E2M1 packs two along the last dimension, the first in the low nibble

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def smallest_normal_exponent(self) -> int:
        return 1 - self.bias

    @property
    def largest(self) -> float:
        return self.value_of(self.largest_code)

    @property
    def emax(self) -> int:
        """Exponent of the largest value: `floor(log2(largest))`."""
        return math.frexp(self.largest)[1] - 1

    @property
    def largest_mantissa_fp32(self) -> int:
        """The 23 mantissa bits of `largest` as fp32: an amax above them does not fit under the scale that `floor`
        chooses.
        """
        return int((self.largest / 2.0**self.emax - 1.0) * 2**FP32_MANTISSA_BITS)

    def value_of(self, code: int) -> float:
        """Return the number that `code` (0 .. 2**bits - 1) stands for."""
        sign = -1.0 if code >> (self.bits - 1) else 1.0
        magnitude = code & ((1 << (self.bits - 1)) - 1)
        if magnitude > self.largest_code:
            infinity = self.name == "E5M2" and magnitude == self.largest_code + 1
            return sign * math.inf if infinity else math.nan
        exponent, mantissa = magnitude >> self.mantissa_bits, magnitude & ((1 << self.mantissa_bits) - 1)
        fraction = mantissa / 2**self.mantissa_bits
        if exponent == 0:
            return sign * fraction * 2.0**self.smallest_normal_exponent
        return sign * (1.0 + fraction) * 2.0 ** (exponent - self.bias)

    def values(self) -> list[float]:
        """All `2**bits` values in code order: the decoding table."""
        return [self.value_of(code) for code in range(2**self.bits)]


ELEMENT_FORMATS = {
    fmt.name: fmt
    for fmt in (
        ElementFormat("E4M3", 4, 3, bias=7, largest_code=0x7E, nan_code=0x7F),
        ElementFormat("E5M2", 5, 2, bias=15, largest_code=0x7B, nan_code=0x7F),
        ElementFormat("E3M2", 3, 2, bias=3, largest_code=0x1F, nan_code=0),
        ElementFormat("E2M3", 2, 3, bias=1, largest_code=0x1F, nan_code=0),
        ElementFormat("E2M1", 2, 1, bias=1, largest_code=0x07, nan_code=0, codes_per_byte=2),
    )
}
UNQUANTIZED = "BF16"
SCALE_RULES = ("floor", "ceil", "rceil", "even")


def element_format(name: str) -> ElementFormat:
    """Return the format called `name` (any case); raise `ConfigurationError` for an unknown one and for HiF8, which is
    refused by name.
    """
    key = name.upper()
    if key in ELEMENT_FORMATS:
        return ELEMENT_FORMATS[key]
    if key in ("HIF8", "HIFP8", "HIFLOAT8"):
        raise ConfigurationError(
            f"element format '{name}' (HiFloat8) is not supported: its code has no fixed exponent field and the OCP MX "
            f"formats do not define it; use one of {', '.join(ELEMENT_FORMATS)}"
        )
    known = ", ".join(ELEMENT_FORMATS)
    raise ConfigurationError(f"unknown element format '{name}'; known are {known}{nearest(key, ELEMENT_FORMATS)}")


def check_block_shape(block_shape: tuple[int, ...], fmt: ElementFormat) -> BlockShape:
    """Return `block_shape` as a tuple when blocks of it hold elements of `fmt`, else raise `ConfigurationError`."""
    block = tuple(block_shape)
    if block not in SCALE_FORMATS:
        known = ", ".join(str(known) for known in SCALE_FORMATS)
        raise ConfigurationError(f"block_shape {block} is not supported; known are {known} (-1: the whole dimension)")
    if SCALE_FORMATS[block] == "FP32" and fmt.bits != 8:
        raise ConfigurationError(
            f"element format {fmt.name} with block_shape {block}: fp32 scales go with E4M3 and E5M2 only; "
            f"use blocks (1, 32) or (32, 32)"
        )
    return block


def check_scale_rule(rule: str) -> str:
    """Return `rule` when it is one of `SCALE_RULES`, else raise `ConfigurationError`."""
    if rule not in SCALE_RULES:
        known = ", ".join(SCALE_RULES)
        raise ConfigurationError(f"unknown scale rule '{rule}'; known are {known}{nearest(rule, SCALE_RULES)}")
    return rule
