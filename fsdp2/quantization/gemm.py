"""The product of two quantized matrices: block-scaled hardware where there is any, else dequantize and multiply.

All three GEMMs of a linear layer contract the dimension that the blocks of both operands run along, so one function
serves them: `matmul(left, right)` sums over `left.axis` and `right.axis`.

    forward   X [M, K] along -1,  W [N, K] along -1   -> Y  [M, N]
    dgrad     dY [M, N] along -1, W [N, K] along -2   -> dX [M, K]
    wgrad     dY [M, N] along -2, X [M, K] along -2   -> dW [N, K]

Dequantizing is exact (an element times a power of two fits bf16 but at the very ends of its range), and accumulation is
fp32 on both paths, so they differ in the order of accumulation only. Hardware: Ascend 950 through npu_quant_matmul,
NVIDIA SM100 (Blackwell) through torch.nn.functional.scaled_mm. Neither was at hand when this was written: the calls
are checked against the operators' own shape functions and their documented layouts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp2.matmul import cpu_multiplies_bf16
from fsdp2.quantization.kernels import backend_for_device, backend_module
from fsdp2.quantization.mx import MXTensor


def matmul(left: MXTensor, right: MXTensor, *, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Multiply two 2-D quantized matrices over the dimensions their blocks run along.

    Args:
        left: [M, K] with axis -1, or [K, M] with axis -2.
        right: [N, K] with axis -1, or [K, N] with axis -2.
        out_dtype: of the result; the sum itself is fp32.
        bias: [N], added before the result is rounded.

    Returns:
        [M, N].

    Raises:
        ValueError: an operand is not 2-D, or the contracted sizes differ.
    """
    _check(left, right)
    if native_reason(left, right) is None:
        return _kernels(left).matmul(left, right, out_dtype, bias)
    exact_in_bf16 = torch.float32 not in (left.scales.dtype, right.scales.dtype, out_dtype)
    in_fp32 = left.codes.device.type == "cpu" and not (exact_in_bf16 and cpu_multiplies_bf16())
    operand_dtype = torch.float32 if in_fp32 else torch.bfloat16
    a, b = _contracted_last(left, operand_dtype), _contracted_last(right, operand_dtype)
    product = a @ b.t() if bias is None else torch.addmm(bias.to(operand_dtype), a, b.t())
    return product.to(out_dtype)


def native_reason(left: MXTensor, right: MXTensor) -> str | None:
    """None when hardware multiplies these operands in their quantized form; else why it does not."""
    reason = getattr(_kernels(left), "matmul_reason", None)
    if reason is None:
        return f"there is no block-scaled GEMM for {left.codes.device.type}"
    return reason(left, right)


def _kernels(q: MXTensor):
    device_type = q.codes.device.type
    return backend_module(backend_for_device(device_type), device_type)


def _contracted_last(q: MXTensor, dtype: torch.dtype) -> Tensor:
    x = q.dequantize(dtype)
    return x if q.axis % 2 == 1 else x.t()


def _check(left: MXTensor, right: MXTensor) -> None:
    for name, q in (("left", left), ("right", right)):
        if len(q.shape) != 2:
            raise ValueError(f"{name} must be a matrix, got shape {tuple(q.shape)}")
    sizes = left.shape[left.axis], right.shape[right.axis]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"left {tuple(left.shape)} along {left.axis} and right {tuple(right.shape)} along {right.axis} "
            f"contract {sizes[0]} and {sizes[1]} elements"
        )
