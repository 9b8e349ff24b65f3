"""The experts' projection: one GEMM a group of rows, the rows of a group multiplied by the weight of one expert.

`GroupedLinear` holds the weights of all experts of a projection as one parameter [E, in, out], so that they are
sharded, gathered and quantized as one. Its input is the tokens sorted by expert. An expert that got no token
contributes nothing and gets a gradient of exactly zero.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2.matmul import runs_in_fp32


def rows_a_group(experts: nn.Module) -> int:
    """The multiple to which a caller of `experts` may pad each expert's rows by zero rows, so that no projection inside
    pads them again; 1 where rows travel to other ranks first, which would carry the padding too."""
    if getattr(experts, "dispatcher", None) is not None:
        return 1
    return max((module.row_block for module in experts.modules() if isinstance(module, GroupedLinear)), default=1)


def group_offsets(counts_E: Tensor, rows: int) -> list[int]:
    """Row offsets of the groups, [E + 1] host integers: group e is rows [offsets[e], offsets[e + 1]).

    Raises:
        ValueError: `counts_E` does not add up to `rows` (a row without an expert would silently stay zero).
    """
    offsets = [0]
    for count in counts_E.tolist():
        offsets.append(offsets[-1] + count)
    if offsets[-1] != rows:
        raise ValueError(f"token counts of the experts add up to {offsets[-1]}, but there are {rows} rows")
    return offsets


class _GroupedMM(torch.autograd.Function):
    """Y[rows of e] = X[rows of e] W[e], a loop over the experts; products accumulate in fp32, only the given tensors
    are kept."""

    @staticmethod
    def forward(ctx, x_TI: Tensor, w_EIO: Tensor, offsets: list[int], products: Products) -> Tensor:
        ctx.save_for_backward(x_TI, w_EIO)
        ctx.offsets, ctx.products = offsets, products
        wide = torch.float32 if runs_in_fp32(x_TI) else x_TI.dtype
        return products.forward(x_TI.to(wide), w_EIO.to(wide), offsets).to(x_TI.dtype)

    @staticmethod
    def backward(ctx, dy_TO: Tensor):
        x_TI, w_EIO = ctx.saved_tensors
        wide = torch.float32 if runs_in_fp32(x_TI) else x_TI.dtype
        dy_TO = dy_TO.to(wide)
        dx = (
            ctx.products.forward(dy_TO, w_EIO.to(wide).transpose(1, 2), ctx.offsets).to(x_TI.dtype)
            if ctx.needs_input_grad[0]
            else None
        )
        dw = (
            ctx.products.weight_gradient(x_TI.to(wide), dy_TO, ctx.offsets).to(w_EIO.dtype)
            if ctx.needs_input_grad[1]
            else None
        )
        return dx, dw, None, None


def grouped_forward(x_TI: Tensor, w_EIO: Tensor, offsets: list[int]) -> Tensor:
    """[T, O]: rows of group e times w_EIO[e]. Both in one dtype."""
    y_TO = x_TI.new_empty(x_TI.shape[0], w_EIO.shape[2])
    for expert, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if end > begin:
            torch.mm(x_TI[begin:end], w_EIO[expert], out=y_TO[begin:end])
    return y_TO


def grouped_weight_gradient(x_TI: Tensor, dy_TO: Tensor, offsets: list[int]) -> Tensor:
    """[E, I, O]: X^T dY of every group, exactly zero for an empty one."""
    dw_EIO = x_TI.new_empty(len(offsets) - 1, x_TI.shape[1], dy_TO.shape[1])
    for expert, (begin, end) in enumerate(itertools.pairwise(offsets)):
        if end > begin:
            torch.mm(x_TI[begin:end].t(), dy_TO[begin:end], out=dw_EIO[expert])
        else:
            dw_EIO[expert].zero_()
    return dw_EIO


class Products(NamedTuple):
    """How groups are multiplied: functions with the signatures of `grouped_forward` and `grouped_weight_gradient`."""

    forward: Callable[[Tensor, Tensor, list[int]], Tensor]
    weight_gradient: Callable[[Tensor, Tensor, list[int]], Tensor]


class GroupedLinear(nn.Module):
    """E bias-free projections in one parameter.

    Args:
        num_experts: E.
        in_features, out_features: I and O; `weight` is [E, I, O] (input-major, as torch's grouped GEMMs take it).

    `forward(x_TI, counts_E)`: x_TI [T, I] sorted by expert, counts_E int64 [E] rows of each expert -> [T, O].
    `row_block`: groups of a multiple of this many rows are computed as they are, others are padded inside.
    `products`: how groups are multiplied, by default expert by expert.
    """

    row_block = 1
    products = Products(grouped_forward, grouped_weight_gradient)

    def __init__(self, num_experts: int, in_features: int, out_features: int, device=None, dtype=None):
        super().__init__()
        self.num_experts, self.in_features, self.out_features = num_experts, in_features, out_features
        self.weight = nn.Parameter(torch.empty(num_experts, in_features, out_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(in_features), as `nn.Linear` does."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)

    def own_weight(self) -> Tensor:
        """The weights of the experts that this rank computes, [E, I, O] or, with expert parallelism, [E / ep, I, O]."""
        return self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight

    def forward(self, x_TI: Tensor, counts_E: Tensor) -> Tensor:
        return _GroupedMM.apply(x_TI, self.own_weight(), group_offsets(counts_E, x_TI.shape[0]), self.products)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, in_features={self.in_features}, out_features={self.out_features}"
