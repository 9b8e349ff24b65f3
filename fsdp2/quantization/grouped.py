"""`MXGroupedLinear`: the experts' projection with MX-quantized operands, one group of tokens an expert.

X [T, I] (sorted by expert), W [E, I, O], dY [T, O]; per expert e with rows t:

    forward   Y[t]  = X[t] W[e]       X along I, W along I
    dgrad     dX[t] = dY[t] W[e]^T    dY along O, W along O
    wgrad     dW[e] = X[t]^T dY[t]    X along t, dY along t

Blocks along t must not cross two experts. Rows are laid out with every group padded by zero rows to whole blocks (of 32
in MX recipes), quantized once in that layout, and multiplied group by group. An expert without tokens has no rows and
gets a weight gradient of exactly zero.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from fsdp2.expert_parallel.grouped_linear import GroupedLinear, group_offsets
from fsdp2.quantization.grouped_gemm import grouped_gradient, grouped_product
from fsdp2.quantization.linear import (
    OperandForm,
    planes_of,
    quantized_both,
    weight_operand,
)
from fsdp2.quantization.recipe import QuantRecipe


def row_block(recipe: QuantRecipe) -> int:
    """Rows that share a scale along t; 1 where a scale covers all rows or none are quantized."""
    return max([1, *(tensor.block_shape[1] for tensor in (recipe.inputs, recipe.grads) if tensor.is_quantized)])


class PaddedGroups:
    """Where the rows of each group lie once every group is padded to whole blocks.

    Attributes:
        offsets: [E + 1] host integers in the padded layout.
        rows_T: int64 [T], the padded row of each token row; None when no group needs padding.
    """

    def __init__(self, counts_E: Tensor, rows: int, block: int, device: torch.device):
        tight = group_offsets(counts_E, rows)
        self.offsets = [0]
        shift = []
        for begin, end in itertools.pairwise(tight):
            shift.append(self.offsets[-1] - begin)
            self.offsets.append(self.offsets[-1] + -(-(end - begin) // block) * block)
        self.rows_T = None
        if self.offsets != tight:
            counts = torch.tensor([end - begin for begin, end in itertools.pairwise(tight)])
            self.rows_T = torch.arange(rows) + torch.repeat_interleave(torch.tensor(shift), counts)
            self.rows_T = self.rows_T.to(device, non_blocking=True)

    def pad(self, x_TI: Tensor) -> Tensor:
        """[T, I] -> [T_padded, I], zero rows after each group."""
        if self.rows_T is None:
            return x_TI
        return x_TI.new_zeros(self.offsets[-1], x_TI.shape[1]).index_copy_(0, self.rows_T, x_TI)

    def unpad(self, y_PO: Tensor) -> Tensor:
        """[T_padded, O] -> [T, O]."""
        return y_PO if self.rows_T is None else y_PO.index_select(0, self.rows_T)


class _MXGroupedFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TI: Tensor, w_EIO: Tensor, groups: PaddedGroups, recipe: QuantRecipe) -> Tensor:
        x_PI = groups.pad(x_TI)
        x_along_I, x_along_P = quantized_both(
            x_PI, recipe.inputs, recipe.scale_rule, columns=ctx.needs_input_grad[1]
        )
        ctx.saved_input = OperandForm(x_along_P)
        ctx.save_for_backward(w_EIO, *planes_of(x_along_P))
        ctx.recipe, ctx.groups, ctx.dtype = recipe, groups, x_TI.dtype
        operands = x_along_I, weight_operand(w_EIO, recipe, -2)
        return groups.unpad(grouped_product(*operands, -2, groups.offsets, x_TI))

    @staticmethod
    def backward(ctx, dy_TO: Tensor):
        w_EIO, *planes = ctx.saved_tensors
        recipe, groups = ctx.recipe, ctx.groups
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        dy_PO = groups.pad(dy_TO)
        dy_along_O, dy_along_P = quantized_both(dy_PO, recipe.grads, recipe.scale_rule, wants_dx, wants_dw)
        dx = dw = None
        if wants_dx:
            operands = dy_along_O, weight_operand(w_EIO, recipe, -1)
            dx = groups.unpad(grouped_product(*operands, -1, groups.offsets, dy_TO).to(ctx.dtype))
        if wants_dw:
            operands = ctx.saved_input.restore(tuple(planes)), dy_along_P
            dw = grouped_gradient(*operands, groups.offsets, dy_TO).to(w_EIO.dtype)
        return dx, dw, None, None


class MXGroupedLinear(GroupedLinear):
    """`GroupedLinear` with the three GEMMs of `recipe`: the same parameter and name, groups of any size."""

    recipe: QuantRecipe

    @classmethod
    def from_float(cls, grouped: GroupedLinear, recipe: QuantRecipe) -> MXGroupedLinear:
        """An MXGroupedLinear on the very parameter of `grouped` (weight [E, I, O]); works on the meta device."""
        converted = cls.__new__(cls)
        converted.__dict__.update(grouped.__dict__)
        converted.recipe = recipe
        converted.row_block = row_block(recipe)
        return converted

    def forward(self, x_TI: Tensor, counts_E: Tensor) -> Tensor:
        groups = PaddedGroups(counts_E, x_TI.shape[0], self.row_block, x_TI.device)
        return _MXGroupedFunction.apply(x_TI, self.own_weight(), groups, self.recipe)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"
