"""The Ascend backend: torch_npu's MX operators behind the functions of the other backends.

Ascend 950 (A5) quantizes to E4M3 and E5M2 with the rules floor (`scale_alg=0`) and rceil (`scale_alg=1`) in hardware.
Everything else, other formats, other rules, fp32 scales and dequantization, runs through the reference's torch
operators on the same device; so does everything on A2 and A3, which have no MX units: training there must be asked for
(`--model.quant_emulate`), since it is slower than bf16.

The operators keep scales in pairs: the block axis has ceil(blocks / 2) entries and a trailing dimension of 2. `unpair`
and `pair` go between that and the one scale a block that `MXTensor` holds. A GEMM takes codes and scales transposed
the same way, as views.

Proven here: the calls fit torch_npu 2.13.0's operator schemas and shape functions, and the arithmetic around them is
right when the operators do what they document (tests/quantization/test_npu.py). Not proven: their numbers on a chip.
"""

from __future__ import annotations

import functools

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
        if q.element_format not in DTYPES or tuple(q.block_shape) != (1, MX_BLOCK):
            return f"npu_quant_matmul takes E4M3 and E5M2 in blocks of 1x32, not {q.element_format} {q.block_shape}"
    return None


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
    codes, scales = q.codes.view(DTYPES[q.element_format]), pair(q.scales, axis)
    transpose = (axis == 1) != contracted_last
    return (codes.t(), scales.transpose(0, 1)) if transpose else (codes, scales)


def _torch_npu():
    import torch_npu  # only where CANN is installed: elsewhere its import fails

    return torch_npu
