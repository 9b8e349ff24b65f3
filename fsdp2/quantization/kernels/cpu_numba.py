"""The compiled inner loops of the CPU backend: numba, with the 32-wide steps written as LLVM vector code.

A loop over 32 numbers is what LLVM's vectorizer handles worst: it unrolls the loop first and then no longer sees the
reduction in it. So three intrinsics work on `<32 x ...>` vectors directly (LLVM splits them into whatever the processor
has: AVX-512, AVX2, SSE2, NEON), and ordinary numba code walks the tensor. They compute what `reference.py` computes:

- scale: the largest magnitude's bf16 bits plus `round_up`, shifted down to the exponent, are the biased scale + emax;
- encode: adding a power of two whose last fp32 mantissa bit is the element's grid step makes the adder round to the
  grid, nearest even; the low bits of the sum are then the number of steps, `torch.round(x / grid)` of the reference;
- decode: the code's exponent and mantissa moved into an fp32, subnormals converted as integers, times the scale.

Tensors are [batch, rows, columns], contiguous, and come as addresses: making numpy arrays of them would cost as much as
a small tensor's quantization, and would keep FSDP2 from resizing their storage. Work is counted in units of one batch
entry's 32 rows, so that any split over threads gives the same bytes.

All of it is one file because numba's cache of compiled code looks at the file of the cached function alone: a change of
a step in another file would go unnoticed.
"""

from __future__ import annotations

import functools

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, njit, types
from numba.extending import intrinsic

from fsdp2.quantization.formats import MX_BLOCK as BLOCK
from fsdp2.quantization.kernels.cpu import COLUMNS, ROWS, TILES

MAX_COLUMNS = 8192  # 32 rows of so many bf16 are 512 KiB: they stay in the L2 cache between two passes over them
AHEAD = 2048  # elements; processors fetch ahead by themselves too, but not past the next page of 4 KiB
BF16_INFINITY = 0x7F80

_I8, _I16, _I32, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.FloatType()


def _vector(scalar: ir.Type) -> ir.VectorType:
    return ir.VectorType(scalar, BLOCK)


def _constant(scalar: ir.Type, value: int) -> ir.Constant:
    return ir.Constant(_vector(scalar), [value] * BLOCK)


def _splat(builder, value):
    undefined = ir.Constant(_vector(value.type), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, _constant(_I32, 0))


def _address(builder, pointer_value, index, scalar: ir.Type):
    return builder.bitcast(builder.gep(pointer_value, [index]), _vector(scalar).as_pointer())


def _per_element(builder, value, index):
    """An fp32 vector: 32 entries behind a pointer from `index`, or one number repeated."""
    if isinstance(value.type, ir.PointerType):
        return builder.load(_address(builder, value, index, _F32), align=4)
    return _splat(builder, value)


def _largest(builder, magnitudes):
    name = "llvm.vector.reduce.umax.v32i16"
    function_type = ir.FunctionType(_I16, [magnitudes.type])
    reduce = builder.module.globals.get(name) or ir.Function(builder.module, function_type, name)
    return builder.call(reduce, [magnitudes])


@intrinsic
def pointer(typing_context, address, dtype):
    """Return `address`, an integer, as a pointer to `dtype`, for `carray`."""

    def generate(context, b, signature, args):
        return b.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(dtype.instance_type)(types.intp, dtype), generate


@intrinsic
def data(typing_context, array):
    """Return the pointer to a contiguous array's first element; the array must stay alive while it is used.

    Loops take pointers because an array handed to an intrinsic costs a call to count its references, every time.
    """

    def generate(context, b, signature, args):
        return context.make_array(array)(context, b, args[0]).data

    return types.CPointer(array.dtype)(array), generate


@intrinsic
def next_chunk(typing_context, counter):
    """Return the integer behind a pointer and add one to it, so that each thread gets another."""

    def generate(context, b, signature, args):
        return b.atomic_rmw("add", args[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(counter), generate


@intrinsic
def prefetch(typing_context, values, at, write):
    """Ask for the cache line of values[at] ahead of its use, to write it when `write` is 1; no address is wrong."""

    def generate(context, b, signature, args):
        name, pointer_type = "llvm.prefetch.p0", _I8.as_pointer()
        function_type = ir.FunctionType(ir.VoidType(), [pointer_type, _I32, _I32, _I32])
        function = b.module.globals.get(name) or ir.Function(b.module, function_type, name)
        address = b.bitcast(b.gep(args[0], [args[1]]), pointer_type)
        for_write = ir.Constant(_I32, write.literal_value)
        b.call(function, [address, for_write, ir.Constant(_I32, 3), ir.Constant(_I32, 1)])
        return context.get_dummy_value()

    if not isinstance(write, types.IntegerLiteral):
        return None
    return types.void(values, types.intp, write), generate


@intrinsic
def block_amax(typing_context, x, at):
    """Return the largest magnitude, as bf16 bits, of the 32 numbers x[at:at+32]."""

    def generate(context, b, signature, args):
        return _largest(b, b.and_(b.load(_address(b, *args, _I16), align=2), _constant(_I16, 0x7FFF)))

    return types.uint16(x, types.intp), generate


@intrinsic
def block_and_column_amax(typing_context, x, at, column_amax, column):
    """As `block_amax`, and raise column_amax[column:column+32] to the magnitudes of x[at:at+32]."""

    def generate(context, b, signature, args):
        magnitude = b.and_(b.load(_address(b, *args[:2], _I16), align=2), _constant(_I16, 0x7FFF))
        address = _address(b, *args[2:], _I16)
        so_far = b.load(address, align=2)
        b.store(b.select(b.icmp_unsigned(">", magnitude, so_far), magnitude, so_far), address, align=2)
        return _largest(b, magnitude)

    return types.uint16(x, types.intp, column_amax, types.intp), generate


@intrinsic
def encode_block(
    typing_context, x, at, factor, factor_at, codes, codes_at, mantissa_bits, min_exponent, sign_shift, top
):
    """Write the codes of x[at:at+32] * factor to codes[codes_at:]. `factor` is a number or a pointer.

    min_exponent: biased fp32 exponent of the smallest normal. sign_shift: 16 - bits of a code. top: largest element.
    """

    def generate(context, b, signature, args):
        bits = b.load(_address(b, args[0], args[1], _I16), align=2)
        mantissa, min_exponent, sign_shift, top = args[6:10]
        to_exponent = ir.Constant(_I32, 23)
        magnitude = b.zext(b.and_(bits, _constant(_I16, 0x7FFF)), _vector(_I32))
        magnitude = b.bitcast(b.shl(magnitude, _constant(_I32, 16)), _vector(_F32))
        magnitude = b.fmul(magnitude, _per_element(b, args[2], args[3]))
        top_v, min_exponent_v = _splat(b, top), _splat(b, min_exponent)
        magnitude = b.select(b.fcmp_ordered("<", magnitude, top_v), magnitude, top_v)
        exponent = b.lshr(b.bitcast(magnitude, _vector(_I32)), _splat(b, to_exponent))
        exponent = b.select(b.icmp_signed(">", exponent, min_exponent_v), exponent, min_exponent_v)
        # magic = 2**(exponent + 23 - mantissa), plus the code of the exponent in its last bits: both are linear in it.
        slope = b.add(b.shl(ir.Constant(_I32, 1), to_exponent), b.shl(ir.Constant(_I32, 1), mantissa))
        start = b.sub(b.shl(b.sub(to_exponent, mantissa), to_exponent), b.shl(min_exponent, mantissa))
        magic = b.add(b.mul(exponent, _splat(b, slope)), _splat(b, start))
        code = b.bitcast(b.fadd(b.bitcast(magic, _vector(_F32)), magnitude), _vector(_I32))
        sign = b.lshr(b.and_(bits, _constant(_I16, 0x8000)), _splat(b, b.trunc(sign_shift, _I16)))
        code = b.or_(b.trunc(code, _vector(_I8)), b.trunc(sign, _vector(_I8)))
        b.store(code, _address(b, args[4], args[5], _I8), align=1)
        return context.get_dummy_value()

    factor = factor if isinstance(factor, types.CPointer) else types.float32
    index, integer = types.intp, types.int32
    signature = (x, index, factor, index, codes, index, integer, integer, integer, types.float32)
    return types.void(*signature), generate


@intrinsic
def encode_normal_block(typing_context, x, at, offset, offset_at, codes, codes_at, mantissa_bits, sign_shift, top_code):
    """As `encode_block`, in 16-bit arithmetic, when every element comes out normal; return whether one did not.

    A normal result's mantissa is that of x, rounded, whatever the scale: cut off the last bits, nearest even, and the
    scale is a difference of exponents. `offset` (int16, a number or a pointer) is that difference in steps of the code.
    """

    def generate(context, b, signature, args):
        bits = b.load(_address(b, args[0], args[1], _I16), align=2)
        mantissa, sign_shift, top_code = (b.trunc(arg, _I16) for arg in args[6:9])
        one = ir.Constant(_I16, 1)
        dropped = b.sub(ir.Constant(_I16, 7), mantissa)  # of bf16's 7 mantissa bits
        below_half = b.sub(b.shl(one, b.sub(dropped, one)), one)
        magnitude = b.and_(bits, _constant(_I16, 0x7FFF))
        odd = b.and_(b.lshr(magnitude, _splat(b, dropped)), _constant(_I16, 1))
        steps = b.lshr(b.add(b.add(magnitude, _splat(b, below_half)), odd), _splat(b, dropped))
        offset_v = args[2]
        if isinstance(offset_v.type, ir.PointerType):
            offset_v = b.load(_address(b, args[2], args[3], _I16), align=2)
        else:
            offset_v = _splat(b, offset_v)
        code, top_v = b.sub(steps, offset_v), _splat(b, top_code)
        small = b.icmp_signed("<", code, _splat(b, b.shl(one, mantissa)))
        code = b.select(b.icmp_signed("<", code, top_v), code, top_v)
        code = b.or_(code, b.lshr(b.and_(bits, _constant(_I16, 0x8000)), _splat(b, sign_shift)))
        b.store(b.trunc(code, _vector(_I8)), _address(b, args[4], args[5], _I8), align=1)
        return b.icmp_unsigned("!=", b.bitcast(small, ir.IntType(BLOCK)), ir.Constant(ir.IntType(BLOCK), 0))

    offset = offset if isinstance(offset, types.CPointer) else types.int16
    index, integer = types.intp, types.int32
    return types.boolean(x, index, offset, index, codes, index, integer, integer, integer), generate


@intrinsic
def decode_block(typing_context, codes, at, factor, factor_at, out, out_at, mantissa_bits, bias, bits, largest_code):
    """Write codes[at:at+32], decoded and times `factor`, to out[out_at:]: fp32, or bf16 bits when `out` is uint16."""

    def generate(context, b, signature, args):
        integers, floats = _vector(_I32), _vector(_F32)
        code = b.zext(b.load(_address(b, args[0], args[1], _I8), align=1), integers)
        sign_mask = b.shl(ir.Constant(_I32, 1), b.sub(args[8], ir.Constant(_I32, 1)))
        magnitude = b.and_(code, _splat(b, b.sub(sign_mask, ir.Constant(_I32, 1))))
        shift = b.sub(ir.Constant(_I32, 23), args[6])
        moved = b.shl(magnitude, _splat(b, shift))
        rebias = b.shl(b.sub(ir.Constant(_I32, 127), args[7]), ir.Constant(_I32, 23))
        normal = b.add(moved, _splat(b, rebias))
        # Codes past the largest become exponent 255, which keeps Inf and NaN apart by their mantissa as IEEE does.
        special = b.or_(moved, _constant(_I32, 0x7F800000))
        smallest = b.shl(b.sub(ir.Constant(_I32, 128), b.add(args[7], args[6])), ir.Constant(_I32, 23))
        subnormal = b.fmul(b.uitofp(magnitude, floats), _splat(b, b.bitcast(smallest, _F32)))
        first_normal = _splat(b, b.shl(ir.Constant(_I32, 1), args[6]))
        bits_v = b.select(b.icmp_signed("<", magnitude, first_normal), b.bitcast(subnormal, integers), normal)
        bits_v = b.select(b.icmp_signed(">", magnitude, _splat(b, args[9])), special, bits_v)
        value = b.fmul(b.bitcast(bits_v, floats), _per_element(b, args[2], args[3]))
        sign = b.shl(b.and_(code, _splat(b, sign_mask)), _splat(b, b.sub(ir.Constant(_I32, 32), args[8])))
        result = b.or_(b.bitcast(value, integers), sign)
        if out.dtype == types.uint16:
            odd = b.and_(b.lshr(result, _constant(_I32, 16)), _constant(_I32, 1))
            rounded = b.add(b.add(result, _constant(_I32, 0x7FFF)), odd)
            result = b.trunc(b.lshr(rounded, _constant(_I32, 16)), _vector(_I16))
            b.store(result, _address(b, args[4], args[5], _I16), align=2)
        else:
            b.store(result, _address(b, args[4], args[5], _I32), align=4)
        return context.get_dummy_value()

    factor = factor if isinstance(factor, types.CPointer) else types.float32
    index, integer = types.intp, types.int32
    signature = (codes, index, factor, index, out, index, integer, integer, integer, integer)
    return types.void(*signature), generate


@intrinsic
def decode_normal_block(typing_context, codes, at, offset, offset_at, out, out_at, mantissa_bits, bits, largest_code):
    """As `decode_block`, in 16-bit arithmetic, when every code is zero or normal; return whether one is not.

    A code's exponent and mantissa are those of the bf16 result but for a difference of exponents: `offset` (int16, a
    number or a pointer), (biased scale - bias) << 7, must keep all exponents of the format normal.
    """

    def generate(context, b, signature, args):
        code = b.zext(b.load(_address(b, args[0], args[1], _I8), align=1), _vector(_I16))
        mantissa, bits, largest = (b.trunc(arg, _I16) for arg in args[6:9])
        one, seven = ir.Constant(_I16, 1), ir.Constant(_I16, 7)
        offset_v = args[2]
        if isinstance(offset_v.type, ir.PointerType):
            offset_v = b.load(_address(b, args[2], args[3], _I16), align=2)
        else:
            offset_v = _splat(b, offset_v)
        magnitude = b.and_(code, _splat(b, b.sub(b.shl(one, b.sub(bits, one)), one)))
        first_normal = b.shl(one, mantissa)
        normal = b.add(b.shl(magnitude, _splat(b, b.sub(seven, mantissa))), offset_v)
        is_zero = b.icmp_unsigned("==", magnitude, _constant(_I16, 0))
        past = b.icmp_unsigned(
            ">", b.sub(magnitude, _splat(b, first_normal)), _splat(b, b.sub(largest, first_normal))
        )  # smaller ones wrap around
        sign = b.and_(b.shl(code, _splat(b, b.sub(ir.Constant(_I16, 16), bits))), _constant(_I16, 0x8000))
        result = b.or_(b.select(is_zero, _constant(_I16, 0), normal), sign)
        if out.dtype == types.uint16:
            b.store(result, _address(b, args[4], args[5], _I16), align=2)
        else:
            result = b.shl(b.zext(result, _vector(_I32)), _constant(_I32, 16))
            b.store(result, _address(b, args[4], args[5], _I32), align=4)
        special = b.bitcast(b.and_(past, b.not_(is_zero)), ir.IntType(BLOCK))
        return b.icmp_unsigned("!=", special, ir.Constant(ir.IntType(BLOCK), 0))

    offset = offset if isinstance(offset, types.CPointer) else types.int16
    index, integer = types.intp, types.int32
    return types.boolean(codes, index, offset, index, out, index, integer, integer, integer), generate


@njit(nogil=True, error_model="numpy")
def _scale_byte(amax, round_up, emax):
    byte = np.int32(max(np.int32(np.int32(np.int32(amax) + round_up) >> np.int32(7)) - emax, np.int32(0)))
    return np.int32(255) if amax >= BF16_INFINITY else byte


@njit(nogil=True, error_model="numpy")
def _inverse(byte):
    """2**(127 - byte); 0 for a NaN block, whose codes are overwritten."""
    return np.int32(max(np.int32(254) - np.int32(byte), np.int32(0)) << np.int32(23)).view(np.float32)


@njit(nogil=True, error_model="numpy")
def _offset(byte, fmt):
    """What `encode_normal_block` subtracts; so much that nothing is normal where x itself may be subnormal."""
    bias = np.int32(128) - fmt[1]
    return np.int16(np.int32(byte - bias) << (fmt[0] & np.int32(7)) if byte >= bias else np.int32(0x7FFF))


@njit(nogil=True, error_model="numpy")
def _power(byte):
    """2**(byte - 127), the inverse of `_inverse`: byte 0 is a subnormal, byte 255 is NaN."""
    if byte == 0:
        return np.int32(0x00400000).view(np.float32)
    if byte == 255:
        return np.float32(np.nan)
    return np.int32(np.int32(byte) << np.int32(23)).view(np.float32)


@njit(nogil=True, error_model="numpy")
def _quantize_row_block(x, at, codes, codes_at, amax, column, both, round_up, emax, fmt, top):
    """Quantize x[at:at+32] as one block into codes[codes_at:]; return the scale byte."""
    prefetch(x, at + AHEAD, 0)
    prefetch(codes, codes_at + AHEAD, 1)
    largest = block_and_column_amax(x, at, amax, column) if both else block_amax(x, at)
    byte = _scale_byte(largest, round_up, emax)
    if encode_normal_block(x, at, _offset(byte, fmt), 0, codes, codes_at, fmt[0], fmt[2], fmt[4]):
        encode_block(x, at, _inverse(byte), 0, codes, codes_at, fmt[0], fmt[1], fmt[2], top)
    if byte == 255:
        for i in range(BLOCK):
            codes[codes_at + i] = np.uint8(fmt[3])
    return byte


@njit(nogil=True, error_model="numpy")
def _quantize_row(
    x, start, count, codes, scales, scales_at, amax, both, round_up, emax, fmt, top, tail_x, tail_codes
):
    """Quantize x[start:start+count], part of one row, in blocks of 32; the last one is padded with zeros.

    With `both`, raise `amax` of the columns on the way.
    """
    whole = count - count % BLOCK
    for c in range(0, whole, BLOCK):
        byte = _quantize_row_block(x, start + c, codes, start + c, amax, c, both, round_up, emax, fmt, top)
        scales[scales_at + c // BLOCK] = np.uint8(byte)
    if whole < count:
        _copy_tail(x, start + whole, count - whole, tail_x)
        tail, tail_to = data(tail_x), data(tail_codes)
        byte = _quantize_row_block(tail, 0, tail_to, 0, amax, whole, both, round_up, emax, fmt, top)
        scales[scales_at + whole // BLOCK] = np.uint8(byte)
        for i in range(count - whole):
            codes[start + whole + i] = tail_codes[i]


@njit(nogil=True, error_model="numpy")
def _copy_tail(values, start, count, tail):
    tail[:] = 0
    for i in range(count):
        tail[i] = values[start + i]


@njit(nogil=True, error_model="numpy")
def _encode_columns(x, start, count, offsets, factors, codes, fmt, top, tail_x, tail_codes):
    """Encode x[start:start+count], part of one row, with an offset and a factor for every column."""
    whole = count - count % BLOCK
    for c in range(0, whole, BLOCK):
        at = start + c
        prefetch(codes, at + AHEAD, 1)
        if encode_normal_block(x, at, offsets, c, codes, at, fmt[0], fmt[2], fmt[4]):
            encode_block(x, at, factors, c, codes, at, fmt[0], fmt[1], fmt[2], top)
    if whole < count:
        _copy_tail(x, start + whole, count - whole, tail_x)
        encode_block(data(tail_x), 0, factors, whole, data(tail_codes), 0, fmt[0], fmt[1], fmt[2], top)
        for i in range(count - whole):
            codes[start + whole + i] = tail_codes[i]


@njit(nogil=True, error_model="numpy")
def _raise_amax(x, start, count, amax, tail_x):
    """Raise `amax` of the columns to the magnitudes of x[start:start+count], part of one row."""
    whole = count - count % BLOCK
    for c in range(0, whole, BLOCK):
        prefetch(x, start + c + AHEAD, 0)
        block_and_column_amax(x, start + c, amax, c)
    if whole < count:
        _copy_tail(x, start + whole, count - whole, tail_x)
        block_and_column_amax(data(tail_x), 0, amax, whole)


@njit(nogil=True, error_model="numpy")
def _scale_columns(amax, round_up, emax, fmt, scales, offsets, factors):
    """Turn each amax into its scale byte, offset and factor; return the largest amax."""
    largest = np.uint16(0)
    for i in range(amax.size):
        byte = _scale_byte(amax[i], round_up, emax)
        scales[i] = byte
        offsets[i] = _offset(byte, fmt)
        factors[i] = _inverse(byte)
        largest = max(largest, amax[i])
    return largest


@njit(nogil=True, error_model="numpy")
def _scale_tiles(amax, round_up, emax, fmt, scales, offsets, factors):
    """As `_scale_columns`, with one scale for every 32 columns."""
    largest = np.uint16(0)
    for tile in range(scales.size):
        tile_amax = np.uint16(0)
        for i in range(tile * BLOCK, min(tile * BLOCK + BLOCK, amax.size)):
            tile_amax = max(tile_amax, amax[i])
        byte = _scale_byte(tile_amax, round_up, emax)
        scales[tile] = byte
        for i in range(tile * BLOCK, tile * BLOCK + BLOCK):
            offsets[i] = _offset(byte, fmt)
            factors[i] = _inverse(byte)
        largest = max(largest, tile_amax)
    return largest


@njit(nogil=True, error_model="numpy")
def _quantize_units(
    x, row_codes, row_scales, column_codes, column_scales, size, first, last, layout, round_up, emax, fmt, top
):
    """Quantize units first..last of x [batch, rows, columns], bf16.

    ROWS writes row_codes (shape of x) and row_scales [batch, rows, ceil(columns / 32)]; COLUMNS writes column_codes and
    column_scales [batch, ceil(rows / 32), columns]; TILES writes column_codes and column_scales [batch,
    ceil(rows / 32), ceil(columns / 32)], all uint8. What is not written may be any address.
    round_up: what to add to amax's bf16 bits (int32). emax: int32. fmt: int32 (mantissa bits, biased exponent of the
    smallest normal, 16 - bits, NaN code, code of the largest element). top: the largest element, fp32.
    """
    batches, rows, columns = size
    units = (rows + BLOCK - 1) // BLOCK
    column_blocks = (columns + BLOCK - 1) // BLOCK
    width = min(column_blocks * BLOCK, MAX_COLUMNS)
    amax = np.empty(width, np.uint16)
    offsets, factors = np.empty(width, np.int16), np.empty(width, np.float32)
    tail_x, tail_codes = np.empty(BLOCK, np.uint16), np.empty(BLOCK, np.uint8)
    tiles = layout == TILES
    scales_a_unit = column_blocks if tiles else columns
    flat = pointer(x, np.uint16)
    row_out, column_out = pointer(row_codes, np.uint8), pointer(column_codes, np.uint8)
    row_scales_out = pointer(row_scales, np.uint8)
    column_scales_out = carray(pointer(column_scales, np.uint8), batches * units * scales_a_unit)
    for unit in range(first, last):
        batch, top_row = unit // units, unit % units * BLOCK
        row_range = range(batch * rows + top_row, batch * rows + min(top_row + BLOCK, rows))
        for c0 in range(0, columns, width):
            count = min(width, columns - c0)
            amax[:] = 0
            column_amax = data(amax)
            if layout & ROWS:
                both = layout & COLUMNS != 0
                for r in row_range:
                    start, at = r * columns + c0, r * column_blocks + c0 // BLOCK
                    _quantize_row(
                        flat, start, count, row_out, row_scales_out, at, column_amax, both, round_up, emax, fmt, top,
                        tail_x, tail_codes,
                    )  # fmt: skip
            else:
                for r in row_range:
                    _raise_amax(flat, r * columns + c0, count, column_amax, tail_x)
            if layout & (COLUMNS | TILES):
                factors[count:] = 0.0
                if tiles:
                    at = unit * scales_a_unit + c0 // BLOCK
                    scales = column_scales_out[at : at + (count + BLOCK - 1) // BLOCK]
                    largest = _scale_tiles(amax[:count], round_up, emax, fmt, scales, offsets, factors)
                else:
                    at = unit * scales_a_unit + c0
                    scales = column_scales_out[at : at + count]
                    largest = _scale_columns(amax[:count], round_up, emax, fmt, scales, offsets, factors)
                for r in row_range:
                    start = r * columns + c0
                    _encode_columns(
                        flat, start, count, data(offsets), data(factors), column_out, fmt, top, tail_x, tail_codes
                    )
                if largest >= BF16_INFINITY:
                    for i in range(count):
                        if scales[i // BLOCK if tiles else i] == 255:
                            for r in row_range:
                                column_out[r * columns + c0 + i] = np.uint8(fmt[3])


@njit(nogil=True, error_model="numpy")
def _decode_block(codes, at, per_column, offsets, factors, i, exact, out, out_at, fmt):
    """Decode codes[at:at+32] with the scale i, or the scales of the columns from i; see `_decode_row`."""
    if per_column:
        if exact and not decode_normal_block(codes, at, offsets, i, out, out_at, fmt[0], fmt[2], fmt[3]):
            return
        decode_block(codes, at, factors, i, out, out_at, fmt[0], fmt[1], fmt[2], fmt[3])
    else:
        if exact and not decode_normal_block(codes, at, offsets[i], 0, out, out_at, fmt[0], fmt[2], fmt[3]):
            return
        decode_block(codes, at, factors[i], 0, out, out_at, fmt[0], fmt[1], fmt[2], fmt[3])


@njit(nogil=True, error_model="numpy")
def _decode_row(codes, start, count, offsets, factors, per_column, exact, out, fmt, tail_codes, tail_out):
    """Decode codes[start:start+count], part of one row, with a scale a column or a scale every 32 columns.

    A scale is a factor and, where `exact`, an offset of exponents too.
    """
    whole = count - count % BLOCK
    for c in range(0, whole, BLOCK):
        i = c if per_column else c // BLOCK
        prefetch(codes, start + c + AHEAD, 0)
        prefetch(out, start + c + AHEAD, 1)
        _decode_block(codes, start + c, per_column, offsets, factors, i, exact, out, start + c, fmt)
    if whole < count:
        _copy_tail(codes, start + whole, count - whole, tail_codes)
        i = whole if per_column else whole // BLOCK
        _decode_block(data(tail_codes), 0, per_column, offsets, factors, i, exact, data(tail_out), 0, fmt)
        for i in range(count - whole):
            out[start + whole + i] = tail_out[i]


@njit(nogil=True, error_model="numpy")
def _encode_units(x, factors, codes, size, first, last, row_length, column_length, fmt, top):
    """Encode units first..last of x [batch, rows, columns], bf16, times given factors, without finding any scale.

    factors: fp32 [batch, ceil(rows / row_length), ceil(columns / column_length)]; column_length is 1 or at least
    `columns` or a multiple of 32. fmt, top as in `quantize_units`.
    """
    rows, columns = size[1], size[2]
    units = (rows + BLOCK - 1) // BLOCK
    row_blocks = (rows + row_length - 1) // row_length
    column_blocks = (columns + column_length - 1) // column_length
    whole = columns - columns % BLOCK
    tail_x, tail_codes = np.empty(BLOCK, np.uint16), np.empty(BLOCK, np.uint8)
    tail_factors = np.zeros(BLOCK, np.float32)
    flat, scale, out = pointer(x, np.uint16), pointer(factors, np.float32), pointer(codes, np.uint8)
    for unit in range(first, last):
        batch, top_row = unit // units, unit % units * BLOCK
        for r in range(top_row, min(top_row + BLOCK, rows)):
            start = (batch * rows + r) * columns
            at = (batch * row_blocks + r // row_length) * column_blocks
            if column_length == 1:
                for c in range(0, whole, BLOCK):
                    encode_block(flat, start + c, scale, at + c, out, start + c, fmt[0], fmt[1], fmt[2], top)
            else:
                for c in range(0, whole, BLOCK):
                    factor = scale[at + c // column_length]
                    encode_block(flat, start + c, factor, 0, out, start + c, fmt[0], fmt[1], fmt[2], top)
            if whole < columns:
                rest = columns - whole
                _copy_tail(flat, start + whole, rest, tail_x)
                for i in range(rest):
                    tail_factors[i] = scale[at + (whole + i) // column_length]
                tail, tail_to = data(tail_x), data(tail_codes)
                encode_block(tail, 0, data(tail_factors), 0, tail_to, 0, fmt[0], fmt[1], fmt[2], top)
                for i in range(rest):
                    out[start + whole + i] = tail_codes[i]


@njit(nogil=True, error_model="numpy")
def _dequantize_units(
    codes, scales, scale_dtype, out, out_dtype, size, first, last, row_length, column_length, exponents, fmt
):
    """Decode units first..last of codes [batch, rows, columns] into `out`: fp32, or bf16 when out_dtype is np.uint16.

    scales: [batch, ceil(rows / row_length), ceil(columns / column_length)], bytes with `exponents` (scale_dtype
    np.uint8), else numbers (np.float32). column_length is 1 or at least `columns` or a multiple of 32.
    fmt: int32 (mantissa bits, exponent bias, bits, largest code).
    """
    rows, columns = size[1], size[2]
    units = (rows + BLOCK - 1) // BLOCK
    row_blocks = (rows + row_length - 1) // row_length
    column_blocks = (columns + column_length - 1) // column_length
    per_column = column_length == 1
    blocks_a_scale = (column_length + BLOCK - 1) // BLOCK  # not used per column
    needed = columns if per_column else (columns + BLOCK - 1) // BLOCK
    room = (columns + BLOCK - 1) // BLOCK * BLOCK
    factors, offsets = np.zeros(room, np.float32), np.zeros(room, np.int16)
    smallest, largest = fmt[1], np.int32(254) + fmt[1] - (fmt[3] >> (fmt[0] & np.int32(7)))
    exact = False
    tail_codes, tail_out = np.empty(BLOCK, np.uint8), np.empty(BLOCK, out_dtype)
    flat, flat_out, scales_in = pointer(codes, np.uint8), pointer(out, out_dtype), pointer(scales, scale_dtype)
    for unit in range(first, last):
        batch, top_row = unit // units, unit % units * BLOCK
        for r in range(top_row, min(top_row + BLOCK, rows)):
            if r == top_row or r % row_length == 0:
                at = (batch * row_blocks + r // row_length) * column_blocks
                exact = exponents
                for i in range(needed):
                    scale = scales_in[at + (i if per_column or blocks_a_scale == 1 else i // blocks_a_scale)]
                    if exponents:
                        byte = np.int32(scale)
                        factors[i] = _power(byte)
                        offsets[i] = np.int16((byte - fmt[1]) << np.int32(7))
                        exact &= smallest <= byte <= largest
                    else:
                        factors[i] = np.float32(scale)
            start = (batch * rows + r) * columns
            _decode_row(
                flat, start, columns, data(offsets), data(factors), per_column, exact, flat_out, fmt, tail_codes,
                tail_out,
            )  # fmt: skip


# What threads run: void(int64 *words) with words = next chunk, units a chunk, units, and the arguments of the function
# that each one calls. Compiled when first used, stored for the next process.


def _loop(function):
    return cfunc(types.void(types.CPointer(types.int64)), cache=True, nopython=True, error_model="numpy")(function)


@functools.cache
def quantize_loop():
    """`_quantize_units` for threads."""

    def quantize(words):
        a = carray(words, 20)
        fmt = np.int32(a[14]), np.int32(a[15]), np.int32(a[16]), np.int32(a[17]), np.int32(a[18])
        top = np.int32(a[19]).view(np.float32)
        first = next_chunk(words) * a[1]
        while first < a[2]:
            _quantize_units(
                a[3], a[4], a[5], a[6], a[7], (a[8], a[9], a[10]), first, min(first + a[1], a[2]), a[11],
                np.int32(a[12]), np.int32(a[13]), fmt, top,
            )  # fmt: skip
            first = next_chunk(words) * a[1]

    return _loop(quantize)


@functools.cache
def encode_loop():
    """`_encode_units` for threads."""

    def encode(words):
        a = carray(words, 17)
        fmt = np.int32(a[11]), np.int32(a[12]), np.int32(a[13]), np.int32(a[14]), np.int32(a[15])
        top = np.int32(a[16]).view(np.float32)
        first = next_chunk(words) * a[1]
        while first < a[2]:
            last = min(first + a[1], a[2])
            _encode_units(a[3], a[4], a[5], (a[6], a[7], a[8]), first, last, a[9], a[10], fmt, top)
            first = next_chunk(words) * a[1]

    return _loop(encode)


@functools.cache
def dequantize_loop(scale_dtype, out_dtype):
    """`_dequantize_units` for threads, one for every scale_dtype (np.uint8, np.float32) and out_dtype (np.uint16,
    np.float32)."""
    exponents = scale_dtype is np.uint8

    def dequantize(words):
        a = carray(words, 15)
        fmt = np.int32(a[11]), np.int32(a[12]), np.int32(a[13]), np.int32(a[14])
        first = next_chunk(words) * a[1]
        while first < a[2]:
            _dequantize_units(
                a[3], a[4], scale_dtype, a[5], out_dtype, (a[6], a[7], a[8]), first, min(first + a[1], a[2]), a[9],
                a[10], exponents, fmt,
            )  # fmt: skip
            first = next_chunk(words) * a[1]

    return _loop(dequantize)
