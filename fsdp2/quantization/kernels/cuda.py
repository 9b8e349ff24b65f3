"""The CUDA backend: Triton kernels for quantize, dual-axis quantize and dequantize, with the bytes of the reference.

One program handles a tile of 32 rows and a few blocks of columns: it reads the tile once, and writes codes and scales
for the rows, the columns, both, or the 32x32 tiles. The arithmetic is that of `cpu_numba`: integer scales from bf16
bits, and rounding by adding a power of two whose last mantissa bit is the element's grid step. Offsets are 64-bit: a
tensor of more than 2**31 elements is nothing special.

Triton's interpreter (TRITON_INTERPRET=1) runs the same kernels on CPU tensors; the tests use it. Blocks with fp32
scales are left to the reference, which runs on any device.
"""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # the reason is given by `unavailable_reason`; the kernels below are then not defined
    triton = None

from fsdp2.quantization.formats import E8M0_BIAS, MX_BLOCK, SCALE_FORMATS, BlockShape, ElementFormat
from fsdp2.quantization.kernels import reference
from fsdp2.quantization.kernels.reference import Planes

COLUMNS_A_PROGRAM = 128
DTYPES = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


def unavailable_reason(device_type: str) -> str | None:
    """None for CUDA tensors with Triton, and for CPU tensors under its interpreter; else what is missing."""
    if triton is None:
        return "triton cannot be imported; CUDA builds of torch bring it along"
    if device_type == "cuda" or (device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1"):
        return None
    return f"it takes CUDA tensors, this one is on {device_type} (CPU tensors: with TRITON_INTERPRET=1)"


def quantize(
    x: Tensor, fmt: ElementFormat, block_shape: BlockShape, axis: int, rule: str, amax: Tensor | None = None
) -> Planes:
    """As `reference.quantize`."""
    if SCALE_FORMATS[block_shape] == "FP32":
        return reference.quantize(x, fmt, block_shape, axis, rule, amax)
    tiles, rows = block_shape[0] != 1, block_shape[0] == 1 and axis == x.ndim - 1
    return _quantize(x, fmt, rule, axis, rows=rows, columns=not (tiles or rows), tiles=tiles)[0]


def quantize_dual_axis(x: Tensor, fmt: ElementFormat, block_shape: BlockShape, rule: str) -> tuple[Planes, Planes]:
    """As `reference.quantize_dual_axis`, reading `x` once."""
    if SCALE_FORMATS[block_shape] == "FP32":
        return reference.quantize_dual_axis(x, fmt, block_shape, rule)
    tiles = block_shape[0] != 1
    planes = _quantize(x, fmt, rule, x.ndim - 2, rows=not tiles, columns=not tiles, tiles=tiles)
    return planes[0], planes[-1]


def dequantize(
    codes: Tensor,
    scales: Tensor,
    fmt: ElementFormat,
    block_shape: BlockShape,
    axis: int,
    shape: torch.Size,
    dtype: torch.dtype,
) -> Tensor:
    """As `reference.dequantize`."""
    if SCALE_FORMATS[block_shape] == "FP32":
        return reference.dequantize(codes, scales, fmt, block_shape, axis, shape, dtype)
    codes = reference.unpack(codes, shape) if fmt.codes_per_byte == 2 else codes
    to_bf16 = dtype == torch.bfloat16
    out = torch.empty(shape, dtype=torch.bfloat16 if to_bf16 else torch.float32, device=codes.device)
    tiles = block_shape[0] != 1
    by_rows = not tiles and axis == len(shape) - 1
    batch, rows, columns = _three_dimensions(shape, by_rows, tiles, axis)
    if out.numel():
        _dequantize_kernel[_grid(batch, rows, columns)](
            codes.contiguous(),
            scales.contiguous(),
            out.view(torch.int16) if to_bf16 else out,
            rows,
            columns,
            -(-rows // MX_BLOCK),
            BY_ROWS=by_rows,
            TILES=tiles,
            TO_BF16=to_bf16,
            BITS=fmt.bits,
            MANTISSA_BITS=fmt.mantissa_bits,
            BIAS=fmt.bias,
            LARGEST_CODE=fmt.largest_code,
            WIDTH=COLUMNS_A_PROGRAM,
        )
    return out.to(dtype)


def matmul_reason(left, right) -> str | None:
    """None when scaled_mm multiplies these `MXTensor`s itself; else why not."""
    device = left.codes.device
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 10:
        return "block-scaled GEMMs need SM100 (Blackwell)"
    for q in (left, right):
        kept, contracted = q.shape[-1 - q.axis % 2], q.shape[q.axis]
        if q.element_format not in DTYPES or tuple(q.block_shape) != (1, MX_BLOCK):
            return f"scaled_mm takes E4M3 and E5M2 in blocks of 1x32, not {q.element_format} {q.block_shape}"
        if contracted % MX_BLOCK or kept % 16:
            return f"scaled_mm takes whole blocks and multiples of 16 rows, not {tuple(q.shape)} along {q.axis}"
    if left.element_format == right.element_format == "E5M2":
        return "scaled_mm does not multiply E5M2 by E5M2"
    return None


def matmul(left, right, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """`gemm.matmul` by scaled_mm: operands with the contracted dimension last, the second as a transposed view."""
    functional = torch.nn.functional
    left_codes, left_scales = _operand(left)
    right_codes, right_scales = _operand(right)
    recipe, swizzle = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
    return functional.scaled_mm(
        left_codes,
        right_codes.t(),
        left_scales,
        recipe,
        right_scales,
        recipe,
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        bias=None if bias is None else bias.to(out_dtype),
        output_dtype=out_dtype,
    )


def swizzle_scales(scales: Tensor) -> Tensor:
    """[rows, blocks] uint8 -> the flat layout of Blackwell's tensor cores, rows padded to 128 and blocks to 4.

    128 x 4 tiles follow each other; inside one, the scale of row r and block c lies at (r % 32) * 16 + r // 32 * 4 + c.
    Source: cuBLAS documentation, "1D Block Scaling Factors Layout".
    """
    rows, blocks = scales.shape
    padded = torch.nn.functional.pad(scales, (0, -blocks % 4, 0, -rows % 128))
    tiles = padded.view(-(-rows // 128), 4, 32, -(-blocks // 4), 4)  # [row tile, r // 32, r % 32, column tile, c]
    return tiles.permute(0, 3, 2, 1, 4).flatten()


def _operand(q) -> tuple[Tensor, Tensor]:
    """Codes [kept, contracted], contiguous, and swizzled scales of a 2-D `MXTensor`."""
    codes, scales = (q.codes, q.scales) if q.axis % 2 == 1 else (q.codes.t().contiguous(), q.scales.t())
    return codes.view(DTYPES[q.element_format]), swizzle_scales(scales).view(torch.float8_e8m0fnu)


def _quantize(
    x: Tensor, fmt: ElementFormat, rule: str, axis: int, *, rows: bool, columns: bool, tiles: bool
) -> list[Planes]:
    """Return the planes asked for, rows before columns or tiles."""
    only_rows = rows and not columns
    batch, row_count, column_count = _three_dimensions(x.shape, only_rows, tiles, axis)
    x = x.to(torch.bfloat16).contiguous()
    planes = []
    for wanted, dims in ((rows, (-1,)), (columns, (axis,)), (tiles, (-2, -1))):
        if wanted:
            scales_shape = list(x.shape)
            for dim in dims:
                scales_shape[dim] = -(-scales_shape[dim] // MX_BLOCK)
            new = {"dtype": torch.uint8, "device": x.device}
            planes.append((torch.empty(x.shape, **new), torch.empty(scales_shape, **new)))
    round_up = {
        "floor": 0,
        "ceil": 0x7F,
        "rceil": 0x7F - (fmt.largest_mantissa_fp32 >> 16),
        "even": 1 << (6 - fmt.mantissa_bits),
    }[rule]
    if x.numel():
        _quantize_kernel[_grid(batch, row_count, column_count)](
            x.view(torch.int16),
            *planes[0],
            *planes[-1],
            row_count,
            column_count,
            -(-row_count // MX_BLOCK),
            ROWS=rows,
            COLUMNS=columns,
            TILES=tiles,
            ROUND_UP=round_up,
            EMAX=fmt.emax,
            MANTISSA_BITS=fmt.mantissa_bits,
            MIN_EXPONENT=fmt.smallest_normal_exponent + E8M0_BIAS,
            SIGN_SHIFT=16 - fmt.bits,
            NAN_CODE=fmt.nan_code,
            LARGEST=fmt.largest,
            WIDTH=COLUMNS_A_PROGRAM,
        )
    return [(reference.pack(codes), scales) for codes, scales in planes] if fmt.codes_per_byte == 2 else planes


def _three_dimensions(shape: torch.Size, only_rows: bool, tiles: bool, axis: int) -> tuple[int, int, int]:
    """`shape` as [batch, rows, columns] with the blocks along columns, rows (`axis`), or both."""
    if only_rows:
        return 1, math.prod(shape[:-1]), shape[-1]
    axis = len(shape) - 2 if tiles else axis
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def _grid(batch: int, rows: int, columns: int) -> tuple[int, int]:
    # The first grid dimension takes up to 2**31 - 1 programs, the second only 65,535.
    return batch * -(-rows // MX_BLOCK), -(-columns // COLUMNS_A_PROGRAM)


if triton is not None:

    @triton.jit
    def _scale_byte(amax, ROUND_UP: tl.constexpr, EMAX: tl.constexpr):
        byte = tl.maximum(((amax + ROUND_UP) >> 7) - EMAX, 0)
        return tl.where(amax >= 0x7F80, 255, byte)

    @triton.jit
    def _encode(
        bits,
        byte,
        MANTISSA_BITS: tl.constexpr,
        MIN_EXPONENT: tl.constexpr,
        SIGN_SHIFT: tl.constexpr,
        NAN_CODE: tl.constexpr,
        LARGEST: tl.constexpr,
    ):
        # `byte` is broadcast to one scale an element. 2**(127 - byte); a NaN block's codes are overwritten below.
        factor = (tl.maximum(254 - byte, 0) << 23).to(tl.float32, bitcast=True)
        magnitude = ((bits & 0x7FFF) << 16).to(tl.float32, bitcast=True) * factor
        magnitude = tl.where(magnitude < LARGEST, magnitude, LARGEST)
        exponent = tl.maximum(magnitude.to(tl.int32, bitcast=True) >> 23, MIN_EXPONENT)
        magic = (exponent + (23 - MANTISSA_BITS)) << 23
        steps = (magic.to(tl.float32, bitcast=True) + magnitude).to(tl.int32, bitcast=True) - magic
        code = ((exponent - MIN_EXPONENT) << MANTISSA_BITS) + steps
        code = code | ((bits & 0x8000) >> SIGN_SHIFT)
        return tl.where(byte == 255, NAN_CODE, code).to(tl.uint8)

    @triton.jit
    def _quantize_kernel(
        x,
        row_codes,
        row_scales,
        column_codes,
        column_scales,
        rows,
        columns,
        units,
        ROWS: tl.constexpr,
        COLUMNS: tl.constexpr,
        TILES: tl.constexpr,
        ROUND_UP: tl.constexpr,
        EMAX: tl.constexpr,
        MANTISSA_BITS: tl.constexpr,
        MIN_EXPONENT: tl.constexpr,
        SIGN_SHIFT: tl.constexpr,
        NAN_CODE: tl.constexpr,
        LARGEST: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        BLOCKS: tl.constexpr = WIDTH // 32
        unit = tl.program_id(0).to(tl.int64)
        batch, row0 = unit // units, unit % units * 32
        r, c = tl.arange(0, 32), tl.program_id(1).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
        b = tl.program_id(1).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
        column_blocks = (columns + 31) // 32
        row = batch * rows + row0 + r
        inside = (row0 + r < rows)[:, None] & (c < columns)[None, :]
        at = row[:, None] * columns + c[None, :]
        bits = tl.load(x + at, mask=inside, other=0).to(tl.int32) & 0xFFFF
        magnitude = bits & 0x7FFF
        if ROWS:
            byte = _scale_byte(tl.max(tl.reshape(magnitude, (32, BLOCKS, 32)), 2), ROUND_UP, EMAX)
            inside_scales = (row0 + r < rows)[:, None] & (b < column_blocks)[None, :]
            tl.store(row_scales + row[:, None] * column_blocks + b[None, :], byte.to(tl.uint8), mask=inside_scales)
            byte = tl.reshape(tl.broadcast_to(byte[:, :, None], (32, BLOCKS, 32)), (32, WIDTH))
            code = _encode(bits, byte, MANTISSA_BITS, MIN_EXPONENT, SIGN_SHIFT, NAN_CODE, LARGEST)
            tl.store(row_codes + at, code, mask=inside)
        if COLUMNS:
            byte = _scale_byte(tl.max(magnitude, 0), ROUND_UP, EMAX)
            tl.store(column_scales + unit * columns + c, byte.to(tl.uint8), mask=c < columns)
            byte = tl.broadcast_to(byte[None, :], (32, WIDTH))
            code = _encode(bits, byte, MANTISSA_BITS, MIN_EXPONENT, SIGN_SHIFT, NAN_CODE, LARGEST)
            tl.store(column_codes + at, code, mask=inside)
        if TILES:
            byte = _scale_byte(tl.max(tl.reshape(tl.max(magnitude, 0), (BLOCKS, 32)), 1), ROUND_UP, EMAX)
            tl.store(column_scales + unit * column_blocks + b, byte.to(tl.uint8), mask=b < column_blocks)
            byte = tl.reshape(tl.broadcast_to(byte[:, None], (BLOCKS, 32)), (1, WIDTH))
            byte = tl.broadcast_to(byte, (32, WIDTH))
            code = _encode(bits, byte, MANTISSA_BITS, MIN_EXPONENT, SIGN_SHIFT, NAN_CODE, LARGEST)
            tl.store(column_codes + at, code, mask=inside)

    @triton.jit
    def _dequantize_kernel(
        codes,
        scales,
        out,
        rows,
        columns,
        units,
        BY_ROWS: tl.constexpr,
        TILES: tl.constexpr,
        TO_BF16: tl.constexpr,
        BITS: tl.constexpr,
        MANTISSA_BITS: tl.constexpr,
        BIAS: tl.constexpr,
        LARGEST_CODE: tl.constexpr,
        WIDTH: tl.constexpr,
    ):
        unit = tl.program_id(0).to(tl.int64)
        batch, row0 = unit // units, unit % units * 32
        r, c = tl.arange(0, 32), tl.program_id(1).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
        column_blocks = (columns + 31) // 32
        row = batch * rows + row0 + r
        inside = (row0 + r < rows)[:, None] & (c < columns)[None, :]
        at = row[:, None] * columns + c[None, :]
        if BY_ROWS:
            scale_at = row[:, None] * column_blocks + (c // 32)[None, :]
        elif TILES:
            scale_at = unit * column_blocks + (c // 32)[None, :] + 0 * r[:, None]
        else:
            scale_at = unit * columns + c[None, :] + 0 * r[:, None]
        byte = tl.load(scales + scale_at, mask=inside, other=127).to(tl.int32)
        power = tl.where(byte == 0, 0x00400000, tl.where(byte == 255, 0x7FC00000, byte << 23))
        code = tl.load(codes + at, mask=inside, other=0).to(tl.int32)
        magnitude = code & ((1 << (BITS - 1)) - 1)
        moved = magnitude << (23 - MANTISSA_BITS)
        # 2**(smallest normal exponent - mantissa bits): what one step of a subnormal code is worth.
        step = tl.full((32, WIDTH), (128 - BIAS - MANTISSA_BITS) << 23, tl.int32).to(tl.float32, bitcast=True)
        subnormal = (magnitude.to(tl.float32) * step).to(tl.int32, bitcast=True)
        value = tl.where(magnitude < (1 << MANTISSA_BITS), subnormal, moved + ((127 - BIAS) << 23))
        value = tl.where(magnitude > LARGEST_CODE, moved | 0x7F800000, value)
        value = (value | ((code >> (BITS - 1)) << 31)).to(tl.float32, bitcast=True)
        value = value * power.to(tl.float32, bitcast=True)
        if TO_BF16:  # by hand: nearest even for subnormals too, on every device
            bits = value.to(tl.int32, bitcast=True)
            value = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16)
        tl.store(out + at, value, mask=inside)
