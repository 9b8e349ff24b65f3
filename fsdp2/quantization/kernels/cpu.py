"""The CPU backend: the compiled loops of `cpu_numba`, one call a thread, on as many threads as torch uses.

This module turns a tensor of any shape and axis into the [batch, rows, columns] the loops know and gives them output
tensors; no number is computed here. numba is an optional dependency: without it, `mx` runs the reference on the CPU.

Threads are Python's, not numba's: numba's own pool aborts the process when two Python threads enter it at once, as an
autograd backward next to a data loader does, and the loops release the interpreter lock anyway.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from fsdp2.quantization.formats import E8M0_BIAS, MX_BLOCK, ElementFormat
from fsdp2.quantization.kernels import reference
from fsdp2.quantization.kernels.reference import Planes

ELEMENTS_A_THREAD = 1 << 17  # below it, handing work to another thread costs more than it saves


def unavailable_reason() -> str | None:
    """None when numba can be imported and can store what it compiles; else what is missing."""
    try:
        from fsdp2.quantization.kernels import cpu_numba  # noqa: F401
    except ImportError as error:
        return f"numba cannot be imported ({error}); install the version requirements.txt pins"
    except RuntimeError as error:
        return f"numba cannot store compiled code ({error}); set NUMBA_CACHE_DIR to a writable folder"
    return None


def quantize(x: Tensor, fmt: ElementFormat, block_shape: tuple[int, int], axis: int, rule: str) -> Planes:
    """As `reference.quantize`."""
    from fsdp2.quantization.kernels.cpu_numba import COLUMNS, ROWS, TILES

    layout = TILES if block_shape[0] != 1 else ROWS if axis == x.ndim - 1 else COLUMNS
    return _quantize(x, fmt, layout, axis, rule)[0]


def quantize_dual_axis(x: Tensor, fmt: ElementFormat, block_shape: tuple[int, int], rule: str) -> tuple[Planes, Planes]:
    """As `reference.quantize_dual_axis`, reading `x` from memory once."""
    from fsdp2.quantization.kernels.cpu_numba import COLUMNS, ROWS, TILES

    planes = _quantize(x, fmt, TILES if block_shape[0] != 1 else ROWS + COLUMNS, x.ndim - 2, rule)
    return planes[0], planes[-1]


def dequantize(
    codes: Tensor,
    scales: Tensor,
    fmt: ElementFormat,
    block_shape: tuple[int, int],
    axis: int,
    shape: torch.Size,
    dtype: torch.dtype,
) -> Tensor:
    """As `reference.dequantize`."""
    from fsdp2.quantization.kernels.cpu_numba import COLUMNS, ROWS, TILES, dequantize_units

    codes = reference.unpack(codes, shape) if fmt.codes_per_byte == 2 else codes
    layout = TILES if block_shape[0] != 1 else ROWS if axis == len(shape) - 1 else COLUMNS
    size = _three_dimensions(shape, layout, axis)
    codes_3d = codes.contiguous().view(size)
    scales_3d = scales.contiguous().view(_scales_size(size, layout))
    out = torch.empty(size, dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    constants = tuple(map(np.int32, (fmt.mantissa_bits, fmt.bias, fmt.bits, fmt.largest_code)))
    planes = _array(codes_3d), _array(scales_3d), _bits(out) if dtype == torch.bfloat16 else _array(out)
    _over_threads(size, lambda first, last: dequantize_units(*planes, first, last, layout, constants))
    return out.view(shape).to(dtype)


def _quantize(x: Tensor, fmt: ElementFormat, layout: int, axis: int, rule: str) -> list[Planes]:
    """Return the planes that `layout` asks for, rows before columns."""
    from fsdp2.quantization.kernels.cpu_numba import ROWS, TILES, quantize_units

    size = _three_dimensions(x.shape, layout, axis)
    x_3d = x.to(torch.bfloat16).contiguous().view(size)
    layouts = [part for part in (ROWS, layout - ROWS if layout & ROWS else layout) if part and layout & part]
    planes = [
        (torch.empty(size, dtype=torch.uint8), torch.empty(_scales_size(size, part), dtype=torch.uint8))
        for part in layouts
    ]
    # A layout alone fills the pair that is its own and does not touch the other.
    arrays = [_array(plane) for plane in (*planes[0], *planes[-1])]
    min_exponent = fmt.smallest_normal_exponent + E8M0_BIAS
    constants = tuple(map(np.int32, (fmt.mantissa_bits, min_exponent, 16 - fmt.bits, fmt.nan_code)))
    numbers = np.int32(_round_up(fmt, rule)), np.int32(fmt.emax), constants, np.float32(fmt.largest)
    bits = _bits(x_3d)
    _over_threads(size, lambda first, last: quantize_units(bits, *arrays, first, last, layout, *numbers))

    results = []
    for part, (codes, scales) in zip(layouts, planes):
        scales_shape = list(x.shape)
        if part == TILES:
            scales_shape[-2:] = scales.shape[-2:]
        else:
            block_axis = x.ndim - 1 if part == ROWS else axis
            scales_shape[block_axis] = -(-scales_shape[block_axis] // MX_BLOCK)
        codes = codes.view(x.shape)
        results.append((reference.pack(codes) if fmt.codes_per_byte == 2 else codes, scales.view(scales_shape)))
    return results


def _round_up(fmt: ElementFormat, rule: str) -> int:
    """What added to amax's bf16 bits makes the exponent field come out as the rule wants it."""
    return {
        "floor": 0,
        "ceil": 0x7F,  # any mantissa bit carries
        "rceil": 0x7F - (fmt.largest_mantissa_fp32 >> 16),  # a mantissa above the largest element's carries
        "even": 1 << (6 - fmt.mantissa_bits),
    }[rule]


def _three_dimensions(shape: torch.Size, layout: int, axis: int) -> tuple[int, int, int]:
    """View `shape` as [batch, rows, columns] with the blocks along the columns (ROWS), the rows (COLUMNS) or both."""
    from fsdp2.quantization.kernels.cpu_numba import ROWS, TILES

    if layout == ROWS:
        return 1, math.prod(shape[:-1]), shape[-1]
    axis = len(shape) - 2 if layout & (ROWS | TILES) else axis
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


def _scales_size(size: tuple[int, int, int], layout: int) -> tuple[int, int, int]:
    from fsdp2.quantization.kernels.cpu_numba import COLUMNS, ROWS

    batch, rows, columns = size
    rows_of_blocks, columns_of_blocks = -(-rows // MX_BLOCK), -(-columns // MX_BLOCK)
    return batch, rows if layout == ROWS else rows_of_blocks, columns if layout == COLUMNS else columns_of_blocks


def _array(x: Tensor) -> np.ndarray:
    """The memory of `x` as numpy sees it. `Tensor.numpy` would forbid resizing the storage from then on, and FSDP2
    frees gathered weights by resizing theirs to nothing."""
    return np.from_dlpack(x)


def _bits(x: Tensor) -> np.ndarray:
    return _array(x.view(torch.int16)).view(np.uint16)


def _over_threads(size: tuple[int, int, int], work: Callable[[int, int], None]) -> None:
    """Run `work(first, last)` over all units of `size`, split over at most `torch.get_num_threads()` threads."""
    units = size[0] * -(-size[1] // MX_BLOCK)
    if math.prod(size) == 0:
        return
    threads = min(torch.get_num_threads(), units, max(1, math.prod(size) // ELEMENTS_A_THREAD))
    cuts = [units * i // threads for i in range(threads + 1)]
    pending = [_pool(os.getpid(), threads).submit(work, *cuts[i : i + 2]) for i in range(1, threads)]
    work(cuts[0], cuts[1])
    for other in pending:
        other.result()


@functools.cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Worker threads of this process (a forked child has none of its parent's)."""
    return ThreadPoolExecutor(max_workers=threads - 1, thread_name_prefix="mx-quantize")
