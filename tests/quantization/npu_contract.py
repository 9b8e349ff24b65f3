"""What the Ascend backend asks of torch_npu 2.13.0, checked in a process that can import the real wheel (test_npu.py).

First on meta tensors, against the operators' own shape functions. Then with CPU kernels registered under the operators'
real schemas, which do what the operators document, so that the layout conversions around them meet real numbers.
"""

import itertools
import math
import os
import sys
import traceback

import torch
import torch_npu

from fsdp2.expert_parallel.grouped_linear import grouped_forward, grouped_weight_gradient
from fsdp2.quantization import MXTensor
from fsdp2.quantization.formats import ELEMENT_FORMATS
from fsdp2.quantization.kernels import npu, reference

DTYPES = {24: torch.float8_e4m3fn, 292: torch.float8_e4m3fn, 23: torch.float8_e5m2, 291: torch.float8_e5m2}
TYPE_NUMBER_BF16, TYPE_NUMBER_FP32 = 15, 6
SHAPES = [(64, 64), (70, 100), (33, 96), (3, 40, 65)]


def exponents(amax, dtype, scale_alg):
    """Documented: 0 floor(log2 amax) - emax; 1 the smallest power of two under which amax does not saturate."""
    largest = torch.finfo(dtype).max
    exponent = torch.frexp(amax).exponent - 1 - int(math.log2(largest))
    if scale_alg == 1:
        exponent = torch.where(amax > largest * torch.exp2(exponent.double()), exponent + 1, exponent)
    return torch.where(amax > 0, exponent, -127).clamp(min=-127)


def rounded(x, exponent, dtype):
    largest = torch.finfo(dtype).max
    return (x / torch.exp2(exponent.double())).clamp(-largest, largest).float().to(dtype)


def paired(exponent, axis):
    """Scale bytes with `axis` cut into pairs and a trailing dimension of 2."""
    scales = (exponent + 127).to(torch.uint8).movedim(axis, -1)
    scales = torch.nn.functional.pad(scales, (0, scales.shape[-1] % 2)).unflatten(-1, (-1, 2))
    return scales.movedim(-2, axis % exponent.ndim).contiguous()


def mx_quant(
    input, *, axis=-1, round_mode="rint", dst_type=296, block_size=32, scale_alg=0, dst_type_max=0.0, max_low_bound=0.0
):
    assert round_mode == "rint" and block_size == 32 and scale_alg in (0, 1), (round_mode, block_size, scale_alg)
    dtype, x = DTYPES[dst_type], input.double().movedim(axis, -1)
    size = x.shape[-1]
    blocks = torch.nn.functional.pad(x, (0, -size % 32)).unflatten(-1, (-1, 32))
    exponent = exponents(blocks.abs().amax(-1), dtype, scale_alg)
    y = rounded(blocks, exponent.unsqueeze(-1), dtype).flatten(-2)[..., :size].movedim(-1, axis)
    return y.contiguous(), paired(exponent.movedim(-1, axis), axis)


def mx_quant_dual(x, *, round_mode="rint", dst_type=296, scale_alg=0, dst_type_max=0.0):
    options = {"round_mode": round_mode, "dst_type": dst_type, "scale_alg": scale_alg}
    return (*mx_quant(x, axis=-1, **options), *mx_quant(x, axis=-2, **options))


def mx_quant_tiles(x, *, round_mode="rint", dst_type=296, scale_alg=0, dst_type_max=0.0):
    dtype, (rows, columns) = DTYPES[dst_type], x.shape[-2:]
    tiles = torch.nn.functional.pad(x.double(), (0, -columns % 32, 0, -rows % 32))
    tiles = tiles.unflatten(-1, (-1, 32)).unflatten(-3, (-1, 32))  # [..., row tile, row, column tile, column]
    exponent = exponents(tiles.abs().amax((-1, -3)), dtype, scale_alg)
    by_row, by_column = exponent.repeat_interleave(32, -2)[..., :rows, :], exponent.repeat_interleave(32, -1)
    spread = by_row.repeat_interleave(32, -1)[..., :columns]
    return rounded(x.double(), spread, dtype), paired(by_row, -1), paired(by_column[..., :columns], -2)


def quant_matmul(
    x1, x2, scale, *, offset=None, pertoken_scale=None, bias=None, output_dtype=None, x1_dtype=None, x2_dtype=None,
    pertoken_scale_dtype=None, scale_dtype=None, group_sizes=None, y_scale=None,
):  # fmt: skip
    assert scale_dtype == pertoken_scale_dtype == torch_npu.float8_e8m0fnu and list(group_sizes) == [1, 1, 32]
    assert pertoken_scale.shape == (x1.shape[0], -(-x1.shape[1] // 64), 2), (x1.shape, pertoken_scale.shape)
    assert scale.shape == (-(-x2.shape[0] // 64), x2.shape[1], 2), (x2.shape, scale.shape)
    for codes, scales in ((x1, pertoken_scale), (x2, scale)):  # the shape functions do not notice, the hardware does
        assert codes.is_contiguous() == scales.is_contiguous(), "codes and scales must be transposed alike"

    def numbers(codes, scales, axis):
        powers = torch.exp2(scales.double() - 127).movedim(-1, axis + 1).flatten(axis, axis + 1)
        return codes.double() * powers.repeat_interleave(32, axis).narrow(axis, 0, codes.shape[axis])

    y = numbers(x1, pertoken_scale, 1) @ numbers(x2, scale, 0)
    y = y if bias is None else y + bias
    return y.to({TYPE_NUMBER_BF16: torch.bfloat16, TYPE_NUMBER_FP32: torch.float32}[output_dtype])


def grouped_numbers(codes, scales, ends):
    """[P, C] codes whose blocks run along the rows of groups, with the scales of `npu_grouped_dynamic_mx_quant`."""
    out, begin = torch.empty(codes.shape, dtype=torch.float64), 0
    for group, end in enumerate(ends):
        first, rows = begin // 64 + group, end - begin
        powers = torch.exp2(scales[first : first + -(-rows // 64)].double() - 127).transpose(1, 2).flatten(0, 1)
        out[begin:end] = codes[begin:end].double() * powers.repeat_interleave(32, 0)[:rows]
        begin = end
    return out


def grouped_mx_quant(
    x, group_index, *, round_mode="rint", dst_type=23, blocksize=32, scale_alg=0, dst_type_max=0.0
):
    assert group_index.dtype == torch.int32 and blocksize == 32
    ends, codes = group_index.tolist(), torch.empty(x.shape, dtype=DTYPES[dst_type])
    scales, begin = torch.zeros(x.shape[0] // 64 + len(ends), x.shape[1], 2, dtype=torch.uint8), 0
    for group, end in enumerate(ends):
        y, s = mx_quant(x[begin:end], axis=0, dst_type=dst_type, scale_alg=scale_alg)
        codes[begin:end] = y
        scales[begin // 64 + group : begin // 64 + group + s.shape[0]] = s
        begin = end
    return codes, scales


def grouped_matmul(
    x, weight, *, bias=None, scale=None, offset=None, antiquant_scale=None, antiquant_offset=None,
    per_token_scale=None, group_list=None, activation_input=None, activation_quant_scale=None,
    activation_quant_offset=None, split_item=0, group_type=None, group_list_type=0, act_type=0, tuning_config=None,
    output_dtype=None, x_dtype=None, weight_dtype=None, scale_dtype=None, per_token_scale_dtype=None,
):  # fmt: skip
    assert bias is None and split_item == 3 and group_list_type == 0 and group_list.dtype == torch.int64
    assert scale_dtype == per_token_scale_dtype == torch_npu.float8_e8m0fnu
    (x,), (w,), (ws,), (xs,) = x, weight, scale, per_token_scale
    ends = group_list.tolist()
    if group_type == 2:
        assert not x.is_contiguous() and not xs.is_contiguous()
        assert xs.shape == (x.shape[0], x.shape[1] // 64 + len(ends), 2), (x.shape, xs.shape)
        a, b = grouped_numbers(x.t(), xs.transpose(0, 1), ends), grouped_numbers(w, ws, ends)
        y = torch.stack([a[begin:end].t() @ b[begin:end] for begin, end in itertools.pairwise([0, *ends])])
    else:
        assert group_type == 0 and ws.shape == (w.shape[0], -(-w.shape[1] // 64), w.shape[2], 2), (w.shape, ws.shape)
        assert xs.shape == (x.shape[0], -(-x.shape[1] // 64), 2)

        def numbers(codes, scales, axis):
            powers = torch.exp2(scales.double() - 127).movedim(-1, axis + 1).flatten(axis, axis + 1)
            return codes.double() * powers.repeat_interleave(32, axis).narrow(axis, 0, codes.shape[axis])

        a, b = numbers(x, xs, 1), numbers(w, ws, 1)
        y = torch.cat([a[p:q] @ b[e] for e, (p, q) in enumerate(itertools.pairwise([0, *ends]))])
    return [y.to({TYPE_NUMBER_BF16: torch.bfloat16, TYPE_NUMBER_FP32: torch.float32}[output_dtype])]


def check_shapes_on_meta():
    for shape, name, rule in itertools.product(SHAPES, ("E4M3", "E5M2"), ("floor", "rceil")):
        x, fmt = torch.empty(shape, dtype=torch.bfloat16, device="meta"), ELEMENT_FORMATS[name]
        for axis, block in [*((axis, (1, 32)) for axis in range(len(shape))), (len(shape) - 1, (32, 32))]:
            ours, expected = (b.quantize(x, fmt, block, axis, rule) for b in (npu, reference))
            for a, b in zip(ours, expected):
                assert a.shape == b.shape and a.dtype == b.dtype, (shape, name, axis, block, a.shape, b.shape)
        for ours, expected in zip(*(b.quantize_dual_axis(x, fmt, (1, 32), rule) for b in (npu, reference))):
            assert [t.shape for t in ours] == [t.shape for t in expected], (shape, name)


def register_documented_kernels():
    """Return the library: the kernels live as long as it does."""
    library = torch.library.Library("npu", "IMPL")
    library.impl("npu_dynamic_mx_quant", mx_quant, "CPU")
    library.impl("npu_dynamic_mx_quant_with_dual_axis", mx_quant_dual, "CPU")
    library.impl("npu_dynamic_block_mx_quant", mx_quant_tiles, "CPU")
    library.impl("npu_quant_matmul", quant_matmul, "CPU")
    library.impl("npu_grouped_dynamic_mx_quant", grouped_mx_quant, "CPU")
    library.impl("npu_grouped_matmul", grouped_matmul, "CPU")
    return library


def check_bytes_on_cpu():
    for shape, name, rule in itertools.product(SHAPES, ELEMENT_FORMATS, ("floor", "rceil", "even")):
        fmt, x = ELEMENT_FORMATS[name], torch.randn(shape) * torch.exp2(torch.randint(-20, 20, shape).float())
        x[..., :32, :7] = 0
        for axis, block in [*((axis, (1, 32)) for axis in range(len(shape))), (len(shape) - 1, (32, 32))]:
            ours, expected = (b.quantize(x, fmt, block, axis, rule) for b in (npu, reference))
            assert all(torch.equal(a, b) for a, b in zip(ours, expected)), (shape, name, rule, axis, block)
        for ours, expected in zip(*(b.quantize_dual_axis(x, fmt, (1, 32), rule) for b in (npu, reference))):
            assert all(torch.equal(a, b) for a, b in zip(ours, expected)), (shape, name, rule)


def check_gemms():
    for device, left_axis, right_axis in itertools.product(("meta", "cpu"), (-1, -2), (-1, -2)):
        m, n, k = 48, 80, 96  # an odd number of blocks to contract
        operands = []
        for size, axis in ((m, left_axis), (n, right_axis)):
            shape = torch.Size((size, k) if axis == -1 else (k, size))
            planes = reference.quantize(torch.randn(shape), ELEMENT_FORMATS["E4M3"], (1, 32), axis % 2, "floor")
            operands.append(MXTensor(*(plane.to(device) for plane in planes), "E4M3", (1, 32), axis, shape))
        assert npu.matmul_reason(*operands) is None
        for dtype in (torch.bfloat16, torch.float32):
            y = npu.matmul(*operands, dtype, torch.ones(n, device=device))
            assert y.shape == (m, n) and y.dtype == dtype, (y.shape, y.dtype)
        if device == "cpu":
            a, b = (q.dequantize(torch.float32, backend="reference").double() for q in operands)
            expected = (a if left_axis == -1 else a.t()) @ (b.t() if right_axis == -1 else b) + 1
            torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-5)


def check_grouped_layout():
    """Our pairs of a group's scales are where the operator that quantizes groups puts them."""
    offsets = [0, 32, 32, 160, 256, 352]
    x = torch.randn(offsets[-1], 40, dtype=torch.bfloat16)
    ends = torch.tensor(offsets[1:], dtype=torch.int32)
    codes, scales = torch_npu.npu_grouped_dynamic_mx_quant(x, ends, dst_type=torch.float8_e4m3fn, blocksize=32)
    meta = torch_npu.npu_grouped_dynamic_mx_quant(x.to("meta"), ends.to("meta"), dst_type=torch.float8_e4m3fn)
    assert scales.shape == meta[1].shape, (scales.shape, meta[1].shape)
    ours = reference.quantize(x, ELEMENT_FORMATS["E4M3"], (1, 32), 0, "floor")
    assert torch.equal(codes.view(torch.uint8), ours[0])
    assert torch.equal(scales, npu.pair_in_groups(ours[1], offsets))


def check_grouped_gemms():
    offsets, sizes = [0, 32, 32, 160, 256], (96, 80)  # a group without rows, odd numbers of blocks
    rows, experts = offsets[-1], len(offsets) - 1
    for device, w_axis, w_block in itertools.product(("meta", "cpu"), (-1, -2), ((1, 32), (32, 32))):
        def mx(shape, axis, block=(1, 32), device=device):
            planes = reference.quantize(torch.randn(shape), ELEMENT_FORMATS["E4M3"], block, axis % len(shape), "floor")
            return MXTensor(*(plane.to(device) for plane in planes), "E4M3", block, axis, torch.Size(shape))

        w, x = mx((experts, *sizes), w_axis, w_block), mx((rows, sizes[1] if w_axis == -1 else sizes[0]), -1)
        y = npu.grouped_matmul(x, w, offsets, torch.float32)
        left, right = mx((rows, sizes[0]), -2), mx((rows, sizes[1]), -2)
        dw = npu.grouped_gradient(left, right, offsets, torch.float32)
        assert y.shape == (rows, sizes[0] if w_axis == -1 else sizes[1]), y.shape
        assert dw.shape == (experts, *sizes), dw.shape
        if device == "cpu":
            a, b, c, d = (q.dequantize(torch.float32, backend="reference") for q in (x, w, left, right))
            expected = grouped_forward(a, b.transpose(1, 2) if w_axis == -1 else b, offsets)
            torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(dw, grouped_weight_gradient(c, d, offsets), rtol=1e-5, atol=1e-4)


def main() -> int:
    try:
        check_shapes_on_meta()
        library = register_documented_kernels()
        check_bytes_on_cpu()
        check_gemms()
        check_grouped_layout()
        check_grouped_gemms()
        del library
    except Exception:
        traceback.print_exc()
        return 1
    print("torch_npu", torch_npu.__version__, "contract holds")
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # torch_npu's own shutdown may abort without a device
