"""The experts' three GEMMs on quantized operands: one grouped call where a device has it, else one product an expert.

`gemm.matmul` for groups of rows. `offsets` are host integers: rows [offsets[e], offsets[e + 1]) belong to expert e, and
every group is whole blocks (see `grouped.PaddedGroups`).

    forward   X [P, I] along -1,  W [E, I, O] along -2            -> Y  [P, O]
    dgrad     dY [P, O] along -1, W [E, I, O] along -1            -> dX [P, I]
    wgrad     X [P, I] along -2,  dY [P, O] along -2, by groups   -> dW [E, I, O]

Ascend 950 has npu_grouped_matmul. Its calls are checked against the operator's shape function and its documented
layouts; they have not run on a chip.
"""

from __future__ import annotations

from torch import Tensor

from fsdp2.expert_parallel.grouped_linear import grouped_forward, grouped_weight_gradient
from fsdp2.quantization.kernels import backend_for_device, backend_module
from fsdp2.quantization.linear import Operand, multiplied_in, widened
from fsdp2.quantization.mx import MXTensor


def grouped_product(x: Operand, w_EIO: Operand, axis: int, offsets: list[int], like: Tensor) -> Tensor:
    """Rows of group e times W[e], summed over dimension `axis` of W (-2: I, -1: O).

    Args:
        x: [P, I] (or [P, O] with `axis` -1), quantized along -1 or not at all.
        w_EIO: [E, I, O], quantized along `axis` or not at all.
        like: whose dtype the result has.

    Returns:
        [P, O], or [P, I] with `axis` -1.
    """
    if kernels := _native(x, w_EIO):
        return kernels.grouped_matmul(x, w_EIO, offsets, like.dtype)
    x, w_EIO = widened(multiplied_in(like, x, w_EIO), x, w_EIO)
    return grouped_forward(x, w_EIO if axis == -2 else w_EIO.transpose(1, 2), offsets).to(like.dtype)


def grouped_gradient(x_PI: Operand, dy_PO: Operand, offsets: list[int], like: Tensor) -> Tensor:
    """X^T dY of every group, [E, I, O] in the dtype of `like`, exactly zero for an expert without rows."""
    if kernels := _native(x_PI, dy_PO):
        return kernels.grouped_gradient(x_PI, dy_PO, offsets, like.dtype)
    return grouped_weight_gradient(*widened(multiplied_in(like, x_PI, dy_PO), x_PI, dy_PO), offsets).to(like.dtype)


def _native(left: Operand, right: Operand):
    """The backend that multiplies these operands in groups by itself, or None."""
    if not (isinstance(left, MXTensor) and isinstance(right, MXTensor)) or left.codes.shape[0] == 0:
        return None
    device_type = left.codes.device.type
    kernels = backend_module(backend_for_device(device_type), device_type)
    reason = getattr(kernels, "grouped_reason", None)
    return kernels if reason is not None and reason(left, right) is None else None
