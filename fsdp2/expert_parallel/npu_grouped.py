"""The experts' GEMMs in 16 bits as one npu_grouped_matmul each, on A2, A3 and A5.

Same functions as `grouped_linear.grouped_forward` and `grouped_weight_gradient`. The operator's shape function notices
neither wrong sizes nor an int32 list of groups, so they are asserted here. Never run on a chip.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fsdp2.expert_parallel.grouped_linear import Products


def grouped_forward(x_TI: Tensor, w_EIO: Tensor, offsets: list[int]) -> Tensor:
    """[T, O]: rows of group e times w_EIO[e]; groups along the rows."""
    assert x_TI.shape[1] == w_EIO.shape[1] and w_EIO.shape[0] == len(offsets) - 1, (x_TI.shape, w_EIO.shape)
    assert x_TI.shape[0] == offsets[-1], (x_TI.shape, offsets)
    return _grouped(x_TI, w_EIO, offsets, group_type=0)


def grouped_weight_gradient(x_TI: Tensor, dy_TO: Tensor, offsets: list[int]) -> Tensor:
    """[E, I, O]: X^T dY of every group; the operator takes X as a transposed view."""
    assert x_TI.shape[0] == dy_TO.shape[0] == offsets[-1], (x_TI.shape, dy_TO.shape, offsets)
    return _grouped(x_TI.contiguous().t(), dy_TO.contiguous(), offsets, group_type=2)


PRODUCTS = Products(grouped_forward, grouped_weight_gradient)


def _grouped(left: Tensor, right: Tensor, offsets: list[int], group_type: int) -> Tensor:
    import torch_npu  # only where CANN is installed: elsewhere its import fails

    if offsets[-1] == 0:
        shape = (0, right.shape[2]) if group_type == 0 else (len(offsets) - 1, left.shape[0], right.shape[1])
        return left.new_zeros(shape)
    assert left.dtype == right.dtype and left.dtype in (torch.bfloat16, torch.float16), (left.dtype, right.dtype)
    ends = torch.tensor(offsets[1:]).to(left.device, non_blocking=True)  # int64, cumulative: group_list_type 0
    (out,) = torch_npu.npu_grouped_matmul(
        [left], [right], group_list=ends, group_list_type=0, group_type=group_type, split_item=3
    )
    return out
