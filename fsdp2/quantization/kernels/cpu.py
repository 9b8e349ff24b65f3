"""The CPU backend: the compiled loops of `cpu_numba` on torch's own threads.

This module turns a tensor of any shape and axis into the [batch, rows, columns] the loops know and gives them output
tensors; no number is computed here. numba is an optional dependency: without it, `mx` runs the reference on the CPU.
"""

from __future__ import annotations

import functools
import importlib
import math
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from fsdp2.quantization.formats import E8M0_BIAS, MX_BLOCK, SCALE_FORMATS, WHOLE, BlockShape, ElementFormat
from fsdp2.quantization.kernels import reference
from fsdp2.quantization.kernels.cpu_threads import run_on_threads
from fsdp2.quantization.kernels.reference import Planes

ROWS, COLUMNS, TILES = 1, 2, 4  # how blocks lie: 1x32, 32x1, 32x32; ROWS + COLUMNS asks for both
ELEMENTS_A_CHUNK = 1 << 16  # a chunk's numbers and codes stay in a core's cache
ELEMENTS_FOR_THREADS = 1 << 16  # below it, handing work to another thread costs more than it saves


def unavailable_reason(device_type: str) -> str | None:
    """None for CPU tensors when numba can be imported and can store what it compiles; else what is missing."""
    if device_type != "cpu":
        return f"it takes CPU tensors, this one is on {device_type}"
    try:
        _loops()
    except ImportError as error:
        return f"numba cannot be imported ({error}); install the version requirements.txt pins"
    except RuntimeError as error:
        return f"numba cannot store compiled code ({error}); set NUMBA_CACHE_DIR to a writable folder"
    return None


def quantize(
    x: Tensor, fmt: ElementFormat, block_shape: BlockShape, axis: int, rule: str, amax: Tensor | None = None
) -> Planes:
    """As `reference.quantize`."""
    if SCALE_FORMATS[block_shape] == "FP32":
        return _quantize_with_fp32_scales(x, fmt, block_shape, axis, amax)
    return _quantize(x, fmt, _layout(block_shape, axis, x.ndim), axis, rule)[0]


def quantize_dual_axis(x: Tensor, fmt: ElementFormat, block_shape: BlockShape, rule: str) -> tuple[Planes, Planes]:
    """As `reference.quantize_dual_axis`; with E8M0 scales, `x` is read from memory once."""
    if SCALE_FORMATS[block_shape] == "FP32":
        along_rows = quantize(x, fmt, block_shape, x.ndim - 1, rule)
        return along_rows, along_rows if block_shape[0] != 1 else quantize(x, fmt, block_shape, x.ndim - 2, rule)
    planes = _quantize(x, fmt, TILES if block_shape[0] != 1 else ROWS + COLUMNS, x.ndim - 2, rule)
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
    codes = reference.unpack(codes, shape) if fmt.codes_per_byte == 2 else codes
    layout = _layout(block_shape, axis, len(shape))
    size = _three_dimensions(shape, layout, axis)
    codes, scales = codes.contiguous(), scales.contiguous()
    out = torch.empty(shape, dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    scale_dtype = np.uint8 if scales.dtype == torch.uint8 else np.float32
    out_dtype = np.uint16 if dtype == torch.bfloat16 else np.float32
    addresses = codes.data_ptr(), scales.data_ptr(), out.data_ptr()
    loop = _loops().dequantize_loop(scale_dtype, out_dtype)
    _over_threads(loop, size, *addresses, *size, *_lengths(size, layout, block_shape), *_decoding_constants(fmt))
    return out.to(dtype)


def _quantize_with_fp32_scales(
    x: Tensor, fmt: ElementFormat, block_shape: BlockShape, axis: int, amax: Tensor | None
) -> Planes:
    """As `reference.quantize`: scales by torch, codes by `encode_units`."""
    layout = _layout(block_shape, axis, x.ndim)
    size = _three_dimensions(x.shape, layout, axis)
    x = x.to(torch.bfloat16).contiguous()
    lengths = reference.block_lengths(x.shape, block_shape, axis)
    own_amax = reference.block_amax(x, lengths).to(torch.float32)
    scales, factors = reference.fp32_scales(own_amax if amax is None else amax, fmt)
    bad = ~(own_amax.isfinite() & scales.isfinite())
    codes = torch.empty(x.shape, dtype=torch.uint8)
    _, _, *constants = _encoding_constants(fmt, "floor")
    factors = factors.contiguous()
    addresses = x.data_ptr(), factors.data_ptr(), codes.data_ptr()
    _over_threads(_loops().encode_loop(), size, *addresses, *size, *_lengths(size, layout, block_shape), *constants)
    if bad.any():
        scales = scales.masked_fill(bad, torch.nan)
        codes.masked_fill_(reference.expand(bad, lengths, x.shape), fmt.nan_code)
    return codes, scales


def _quantize(x: Tensor, fmt: ElementFormat, layout: int, axis: int, rule: str) -> list[Planes]:
    """Return the planes that `layout` asks for, rows before columns."""
    size = _three_dimensions(x.shape, layout, axis)
    x = x.to(torch.bfloat16).contiguous()
    planes = []
    for part in (ROWS, COLUMNS, TILES):
        if layout & part:
            scales_shape = list(x.shape)
            for dim in (-2, -1) if part == TILES else (-1,) if part == ROWS else (axis,):
                scales_shape[dim] = -(-scales_shape[dim] // MX_BLOCK)
            planes.append((torch.empty(x.shape, dtype=torch.uint8), torch.empty(scales_shape, dtype=torch.uint8)))
    # A layout alone fills the pair that is its own and does not touch the other.
    addresses = [tensor.data_ptr() for tensor in (x, *planes[0], *planes[-1])]
    _over_threads(_loops().quantize_loop(), size, *addresses, *size, layout, *_encoding_constants(fmt, rule))
    return [(reference.pack(codes), scales) for codes, scales in planes] if fmt.codes_per_byte == 2 else planes


@functools.cache
def _encoding_constants(fmt: ElementFormat, rule: str) -> tuple[int, ...]:
    """`round_up, emax, *fmt, top` of `quantize_loop`; top as its bits."""
    round_up = {  # added to amax's bf16 bits, it makes the exponent field come out as the rule wants it
        "floor": 0,
        "ceil": 0x7F,  # any mantissa bit carries
        "rceil": 0x7F - (fmt.largest_mantissa_fp32 >> 16),  # a mantissa above the largest element's carries
        "even": 1 << (6 - fmt.mantissa_bits),
    }[rule]
    codes = fmt.mantissa_bits, fmt.smallest_normal_exponent + E8M0_BIAS, 16 - fmt.bits, fmt.nan_code, fmt.largest_code
    return round_up, fmt.emax, *codes, int(np.float32(fmt.largest).view(np.int32))


@functools.cache
def _decoding_constants(fmt: ElementFormat) -> tuple[int, ...]:
    """`fmt` of `dequantize_loop`."""
    return fmt.mantissa_bits, fmt.bias, fmt.bits, fmt.largest_code


def _layout(block_shape: BlockShape, axis: int, ndim: int) -> int:
    return TILES if block_shape[0] != 1 else ROWS if axis == ndim - 1 else COLUMNS


def _lengths(size: tuple[int, int, int], layout: int, block_shape: BlockShape) -> tuple[int, int]:
    """Rows and columns that one scale covers in the three-dimensional view; a WHOLE dimension counts as its size."""
    along = block_shape[1]
    rows = along if layout != ROWS else 1
    columns = along if layout != COLUMNS else 1
    return (max(size[1], 1) if rows == WHOLE else rows), (max(size[2], MX_BLOCK) if columns == WHOLE else columns)


def _three_dimensions(shape: torch.Size, layout: int, axis: int) -> tuple[int, int, int]:
    """`shape` as [batch, rows, columns] with the blocks along the columns (ROWS), the rows (COLUMNS) or both."""
    if layout == ROWS:
        return 1, math.prod(shape[:-1]), shape[-1]
    axis = axis if layout == COLUMNS else len(shape) - 2
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def _over_threads(loop, size: tuple[int, int, int], *words: int) -> None:
    """Run a loop of `cpu_numba` over all units of `size`; it takes them in chunks, whoever is free the next one."""
    units, elements = size[0] * -(-size[1] // MX_BLOCK), math.prod(size)
    if elements == 0:
        return
    chunk = max(1, ELEMENTS_A_CHUNK * units // elements)
    threads = torch.get_num_threads() if elements >= ELEMENTS_FOR_THREADS and units > 1 else 1
    run_on_threads(loop, threads, 0, chunk, units, *words)


@functools.cache
def _loops() -> ModuleType:
    return importlib.import_module("fsdp2.quantization.kernels.cpu_numba")
