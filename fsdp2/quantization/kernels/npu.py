"""The Ascend backend: torch_npu's MX operators behind the functions of the other backends.

Ascend 950 (A5) quantizes to E4M3 and E5M2 with the rules floor (`scale_alg=0`) and rceil (`scale_alg=1`) in hardware.
Everything else, other formats, other rules, fp32 scales and dequantization, runs through the reference's torch
operators on the same device; so does everything on A2 and A3, which have no MX units: training there must be asked for
(`--model.quant_emulate`), since it is slower than bf16.

The operators keep scales in pairs: the block axis has ceil(blocks / 2) entries and a trailing dimension of 2. `unpair`
and `pair` go between that and the one scale a block that `MXTensor` holds; rows in groups have a layout of their own
(`pair_in_groups`). A GEMM takes codes and scales transposed the same way, as views. It knows no 32x32 tiles: a tile's
scale is repeated for its 32 blocks.

Proven here: the calls fit torch_npu 2.13.0's operator schemas and shape functions, and the arithmetic around them is
right when the operators do what they document (tests/quantization/test_npu.py). Not proven: their numbers on a chip.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from fsdp2.quantization.formats import MX_BLOCK, BlockShape, ElementFormat
from fsdp2.quantization.kernels import reference
from fsdp2.quantization.kernels.reference import Planes

DTYPES = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
SCALE_ALGORITHMS = {"floor": 0, "rceil": 1}
WITHOUT_MX = ("Ascend910", "Ascend310")  # how the names of chips before Ascend 950 begin


def mx_hardware_reason(device_name: str) -> str | None:
    """None when the chip of that name (`torch.npu.get_device_name()`) has MX units; else why it has none."""
    if device_name.startswith(WITHOUT_MX):
        return f"{device_name} has no FP8 and no MX units, only Ascend 950 (A5) has"
    return None


def unavailable_reason(device_type: str) -> str | None:
    """None for NPU tensors when torch_npu can be imported; else what is missing."""
    if device_type != "npu":
        return f"it takes NPU tensors, this one is on {device_type}"
    try:
        _torch_npu()
    except (ImportError, RuntimeError) as error:
        return f"torch_npu cannot be imported: {error}"
    return None


def quantize(
    x: Tensor, fmt: ElementFormat, block_shape: BlockShape, axis: int, rule: str, amax: Tensor | None = None
) -> Planes:
    """As `reference.quantize`."""
    if not _in_hardware(x, fmt, block_shape, rule):
        return reference.quantize(x, fmt, block_shape, axis, rule, amax)
    x = x.to(torch.bfloat16).contiguous()
    options = {"dst_type": DTYPES[fmt.name], "scale_alg": SCALE_ALGORITHMS[rule]}
    if block_shape[0] == 1:
        codes, scales = _torch_npu().npu_dynamic_mx_quant(x, axis=axis, block_size=MX_BLOCK, **options)
        return codes.view(torch.uint8), unpair(scales, axis, x.shape[axis])
    codes, row_scales, _ = _torch_npu().npu_dynamic_block_mx_quant(x, **options)
    row_scales = unpair(row_scales, x.ndim - 1, x.shape[-1])  # every row of a tile repeats the tile's scale
    return codes.view(torch.uint8), row_scales[..., ::MX_BLOCK, :].contiguous()


def quantize_dual_axis(x: Tensor, fmt: ElementFormat, block_shape: BlockShape, rule: str) -> tuple[Planes, Planes]:
    """As `reference.quantize_dual_axis`, reading `x` once."""
    if block_shape[0] != 1:
        planes = quantize(x, fmt, block_shape, x.ndim - 1, rule)
        return planes, planes
    if not _in_hardware(x, fmt, block_shape, rule):
        return reference.quantize_dual_axis(x, fmt, block_shape, rule)
    row_codes, row_scales, column_codes, column_scales = _torch_npu().npu_dynamic_mx_quant_with_dual_axis(
        x.to(torch.bfloat16).contiguous(), dst_type=DTYPES[fmt.name], scale_alg=SCALE_ALGORITHMS[rule]
    )
    rows, columns = x.ndim - 2, x.ndim - 1
    return (
        (row_codes.view(torch.uint8), unpair(row_scales, columns, x.shape[columns])),
        (column_codes.view(torch.uint8), unpair(column_scales, rows, x.shape[rows])),
    )


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
    return reference.dequantize(codes, scales, fmt, block_shape, axis, shape, dtype)


def matmul_reason(left, right) -> str | None:
    """None when the operator multiplies these `MXTensor`s itself; else why not."""
    if reason := _device_reason(left.codes.device.type):
        return reason
    for q in (left, right):
        if q.element_format not in DTYPES or tuple(q.block_shape) not in ((1, MX_BLOCK), (MX_BLOCK, MX_BLOCK)):
            return f"the GEMMs take E4M3 and E5M2 with a scale for 32, not {q.element_format} {q.block_shape}"
    return None


def grouped_reason(left, right) -> str | None:
    """None when npu_grouped_matmul multiplies groups of these `MXTensor`s itself; else why not."""
    return matmul_reason(left, right)


def grouped_matmul(x, w, offsets: list[int], out_dtype: torch.dtype) -> Tensor:
    """`grouped_gemm.grouped_product` by npu_grouped_matmul, groups along the rows of `x`."""
    x_codes, x_scales = _operand(x, contracted_last=True)
    w_codes, w_scales = w.codes.view(DTYPES[w.element_format]), pair(_block_scales(w), w.axis % 3)
    if w.axis % 3 == 2:
        w_codes, w_scales = w_codes.transpose(1, 2), w_scales.transpose(1, 2)
    return _grouped(x_codes, x_scales, w_codes, w_scales, offsets, out_dtype, group_type=0)


def grouped_gradient(x, dy, offsets: list[int], out_dtype: torch.dtype) -> Tensor:
    """`grouped_gemm.grouped_gradient` by npu_grouped_matmul, groups along the contracted rows of both."""
    x_codes, dy_codes = (q.codes.view(DTYPES[q.element_format]) for q in (x, dy))
    x_scales, dy_scales = (pair_in_groups(_block_scales(q), offsets) for q in (x, dy))
    return _grouped(x_codes.t(), x_scales.transpose(0, 1), dy_codes, dy_scales, offsets, out_dtype, group_type=2)


def _grouped(
    left: Tensor,
    left_scales: Tensor,
    right: Tensor,
    right_scales: Tensor,
    offsets: list[int],
    out_dtype: torch.dtype,
    group_type: int,
) -> Tensor:
    torch_npu = _torch_npu()
    # The operator's shape function notices none of these.
    experts = len(offsets) - 1
    assert offsets[0] == 0 and offsets[-1] == left.shape[1 if group_type else 0], (offsets, left.shape)
    assert left.shape[1] == right.shape[-2], (left.shape, right.shape)
    assert group_type == 2 or right.shape[0] == experts, (right.shape, experts)
    assert left.is_contiguous() == left_scales.is_contiguous() or 1 in left.shape, "transposed one but not the other"
    assert out_dtype in (torch.bfloat16, torch.float16, torch.float32), out_dtype
    ends = torch.tensor(offsets[1:]).to(left.device, non_blocking=True)  # int64, cumulative: group_list_type 0
    (out,) = torch_npu.npu_grouped_matmul(
        [left],
        [right],
        scale=[right_scales],
        per_token_scale=[left_scales],
        group_list=ends,
        group_list_type=0,
        group_type=group_type,
        split_item=3,
        output_dtype=out_dtype,
        scale_dtype=torch_npu.float8_e8m0fnu,
        per_token_scale_dtype=torch_npu.float8_e8m0fnu,
    )
    return out


def matmul(left, right, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """`gemm.matmul` by npu_quant_matmul: fp32 accumulation, scales applied in the cube unit."""
    torch_npu = _torch_npu()
    left_codes, left_scales = _operand(left, contracted_last=True)
    right_codes, right_scales = _operand(right, contracted_last=False)
    return torch_npu.npu_quant_matmul(
        left_codes,
        right_codes,
        right_scales,
        pertoken_scale=left_scales,
        bias=None if bias is None else bias.float(),
        output_dtype=out_dtype,
        scale_dtype=torch_npu.float8_e8m0fnu,
        pertoken_scale_dtype=torch_npu.float8_e8m0fnu,
        group_sizes=[1, 1, MX_BLOCK],
    )


def unpair(scales: Tensor, axis: int, size: int) -> Tensor:
    """[..., ceil(blocks / 2) at `axis`, ..., 2] -> [..., blocks at `axis`, ...], for a dimension of `size` elements."""
    blocks = -(-size // MX_BLOCK)
    return scales.movedim(-1, axis + 1).flatten(axis, axis + 1).narrow(axis, 0, blocks).contiguous()


def pair(scales: Tensor, axis: int) -> Tensor:
    """The inverse of `unpair`; an odd last block is paired with scale 0, whose elements the operator takes as none."""
    axis %= scales.ndim
    if scales.shape[axis] % 2:
        scales = torch.cat([scales, torch.zeros_like(scales.narrow(axis, 0, 1))], axis)
    return scales.unflatten(axis, (-1, 2)).movedim(axis + 1, -1).contiguous()


def pair_in_groups(scales: Tensor, offsets: list[int]) -> Tensor:
    """[P / 32, C] along the rows of groups -> [P // 64 + E, C, 2]: each group's pairs begin at offset // 64 + e, and
    its odd last block is paired with 0. Every group is whole blocks. The layout of npu_grouped_dynamic_mx_quant, which
    the GEMM that contracts the groups' rows takes."""
    assert all(offset % MX_BLOCK == 0 for offset in offsets), f"groups must be whole blocks of {MX_BLOCK}: {offsets}"
    places = []
    for expert, (begin, end) in enumerate(itertools.pairwise(offsets)):
        first = 2 * (begin // (2 * MX_BLOCK) + expert)
        places += range(first, first + (end - begin) // MX_BLOCK)
    pairs = offsets[-1] // (2 * MX_BLOCK) + len(offsets) - 1
    index = torch.tensor(places, dtype=torch.int64).to(scales.device, non_blocking=True)
    spread = scales.new_zeros(2 * pairs, scales.shape[1]).index_copy(0, index, scales)
    return spread.view(pairs, 2, -1).transpose(1, 2).contiguous()


def _block_scales(q) -> Tensor:
    """The scales of 1x32 blocks along `q.axis`: those of 32x32 tiles repeated, as a tile is 32 such blocks."""
    if q.block_shape[0] == 1:
        return q.scales
    axis = q.axis % len(q.shape)
    across = len(q.shape) - 1 if axis == len(q.shape) - 2 else len(q.shape) - 2
    return q.scales.repeat_interleave(MX_BLOCK, across).narrow(across, 0, q.shape[across])


def _in_hardware(x: Tensor, fmt: ElementFormat, block_shape: BlockShape, rule: str) -> bool:
    known = fmt.name in DTYPES and MX_BLOCK in block_shape and rule in SCALE_ALGORITHMS
    return known and x.numel() > 0 and _device_reason(x.device.type) is None


@functools.cache
def _device_reason(device_type: str) -> str | None:
    """`mx_hardware_reason` of this process's NPU; tensors on other devices, as in the contract test, are not asked."""
    return mx_hardware_reason(torch.get_device_module("npu").get_device_name()) if device_type == "npu" else None


def _operand(q, *, contracted_last: bool) -> tuple[Tensor, Tensor]:
    """Codes and paired scales of a 2-D `MXTensor`, as views with the contracted dimension last or first."""
    axis = q.axis % 2
    codes, scales = q.codes.view(DTYPES[q.element_format]), pair(_block_scales(q), axis)
    transpose = (axis == 1) != contracted_last
    return (codes.t(), scales.transpose(0, 1)) if transpose else (codes, scales)


def _torch_npu():
    import torch_npu  # only where CANN is installed: elsewhere its import fails

    return torch_npu
