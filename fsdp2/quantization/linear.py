"""`MXLinear`: a linear layer whose three GEMMs multiply MX-quantized operands.

    forward   Y  = X W^T    X along K, W along K
    dgrad     dX = dY W     dY along N, W along N
    wgrad     dW = dY^T X   dY along M, X along M

Blocks run along the contracted dimension (X [M, K], W [N, K], dY [M, N]), so each tensor is quantized along two axes. X
is quantized along both in one pass in forward; only its codes along M are kept for backward (1.03 bytes an element
instead of 2), as saved tensors, so that recomputation frees them. The weight is quantized here, unless it comes out of
a low-precision all-gather and is quantized already (`weights.py`): same bytes either way.

Where no hardware multiplies blocks (`gemm.py`), a product is emulated exactly: both operands are dequantized and
multiplied with fp32 accumulation, which differs from hardware only in the order of accumulation.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from fsdp2.matmul import runs_in_fp32
from fsdp2.quantization.gemm import matmul
from fsdp2.quantization.mx import MXTensor, quantize, quantize_dual_axis
from fsdp2.quantization.recipe import QuantRecipe, TensorRecipe

Operand = Tensor | MXTensor


def quantized(x: Tensor, recipe: TensorRecipe, scale_rule: str, axis: int) -> Operand:
    """`x` [..., R, C] as an operand whose blocks run along `axis` (-1 or -2)."""
    if not recipe.is_quantized:
        return x
    return quantize(
        x, element_format=recipe.element_format, block_shape=recipe.block_shape, axis=axis, scale_rule=scale_rule
    )


def quantized_both(
    x: Tensor, recipe: TensorRecipe, scale_rule: str, rows: bool = True, columns: bool = True
) -> tuple[Operand | None, Operand | None]:
    """`x` [..., R, C] as operands whose blocks run along -1 (`rows`) and along -2 (`columns`), each if it is wanted, in
    one pass over `x`."""
    if not (rows and columns):
        return (
            quantized(x, recipe, scale_rule, -1) if rows else None,
            quantized(x, recipe, scale_rule, -2) if columns else None,
        )
    if not recipe.is_quantized:
        return x, x
    return quantize_dual_axis(
        x, element_format=recipe.element_format, block_shape=recipe.block_shape, scale_rule=scale_rule
    )


def weight_operand(weight: Tensor, recipe: QuantRecipe, axis: int) -> Operand:
    """The weight along `axis`: the plane that was gathered, or one made now from the weight in bf16 or fp32."""
    gathered = getattr(weight, "gathered_plane", None)
    if gathered is None:
        return quantized(weight.detach(), recipe.weight, recipe.scale_rule, axis)
    return dataclasses.replace(gathered(axis), axis=axis)  # a tile's one plane serves both axes


def multiplied_in(like: Tensor, *operands: Operand) -> torch.dtype:
    """The dtype in which operands are multiplied fast and exactly on the device of `like`: bf16 holds an element times
    a power of two, but not times the fp32 scale of a larger block."""
    fp32_scales = any(isinstance(x, MXTensor) and x.scales.dtype == torch.float32 for x in operands)
    return torch.float32 if runs_in_fp32(like) or (fp32_scales and like.device.type == "cpu") else like.dtype


def widened(dtype: torch.dtype, *operands: Operand) -> list[Tensor]:
    """Operands as a GEMM takes them: dequantized to `dtype`."""
    return [x.dequantize(dtype) if isinstance(x, MXTensor) else x.to(dtype) for x in operands]


def product(left: Operand, right: Operand, axes: tuple[int, int], like: Tensor, bias: Tensor | None = None) -> Tensor:
    """The sum over dimension `axes[0]` of `left` and `axes[1]` of `right` (2-D; -1 or -2), plus `bias`, rounded once to
    the dtype of `like`: on block-scaled hardware when both are quantized, else from dequantized operands."""
    if isinstance(left, MXTensor) and isinstance(right, MXTensor):
        return matmul(left, right, out_dtype=like.dtype, bias=bias)
    operands = widened(multiplied_in(like, left, right), left, right)
    a, b = (x if axis == -1 else x.t() for x, axis in zip(operands, axes))
    return (a @ b.t() if bias is None else torch.addmm(bias.to(a.dtype), a, b.t())).to(like.dtype)


def planes_of(x: Operand | None) -> tuple[Tensor, ...]:
    """The tensors that hold an operand, for `save_for_backward`; none for none."""
    if x is None:
        return ()
    return (x.codes, x.scales) if isinstance(x, MXTensor) else (x,)


class OperandForm:
    """What an operand was, without its tensors: kept on the autograd context, where a tensor would outlive
    recomputation."""

    def __init__(self, x: Operand | None):
        self.mx = (x.element_format, x.block_shape, x.axis, x.shape) if isinstance(x, MXTensor) else None

    def restore(self, planes: tuple[Tensor, ...]) -> Operand:
        return MXTensor(*planes, *self.mx) if self.mx else planes[0]


class _MXLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w_NK: Tensor, b_N: Tensor | None, recipe: QuantRecipe) -> Tensor:
        x_MK = x.reshape(-1, x.shape[-1])
        x_along_K, x_along_M = quantized_both(
            x_MK, recipe.inputs, recipe.scale_rule, columns=ctx.needs_input_grad[1]
        )
        ctx.saved_input = OperandForm(x_along_M)
        ctx.save_for_backward(w_NK, *planes_of(x_along_M))
        ctx.recipe, ctx.dtype, ctx.has_bias = recipe, x_MK.dtype, b_N is not None
        y_MN = product(x_along_K, weight_operand(w_NK, recipe, -1), (-1, -1), x_MK, b_N)
        return y_MN.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx, dy: Tensor):
        dy_MN = dy.reshape(-1, dy.shape[-1])
        w_NK, *planes = ctx.saved_tensors
        recipe = ctx.recipe
        wants_dx, wants_dw = ctx.needs_input_grad[:2]
        dy_along_N, dy_along_M = quantized_both(dy_MN, recipe.grads, recipe.scale_rule, wants_dx, wants_dw)
        dx = dw = None
        if wants_dx:
            dx_MK = product(dy_along_N, weight_operand(w_NK, recipe, -2), (-1, -2), dy_MN)
            dx = dx_MK.view(*dy.shape[:-1], -1).to(ctx.dtype)
        if wants_dw:
            x_along_M = ctx.saved_input.restore(tuple(planes))
            dw = product(dy_along_M, x_along_M, (-2, -2), dy_MN).to(w_NK.dtype)
        db = dy_MN.float().sum(0).to(w_NK.dtype) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return dx, dw, db, None


class MXLinear(nn.Linear):
    """`nn.Linear` with the three GEMMs of `recipe`: the same parameters and names, any leading dimensions and token
    count."""

    recipe: QuantRecipe

    @classmethod
    def from_float(cls, linear: nn.Linear, recipe: QuantRecipe) -> MXLinear:
        """An MXLinear on the very parameters (and hooks, and training mode) of `linear`; works on the meta device.

        Args:
            linear: weight [N, K], bias [N] or None.
            recipe: what X, W and dY are quantized to.
        """
        converted = cls.__new__(cls)
        converted.__dict__.update(linear.__dict__)
        converted.recipe = recipe
        return converted

    def forward(self, input: Tensor) -> Tensor:
        device_type = input.device.type
        if torch.is_autocast_enabled(device_type):
            input = input.to(torch.get_autocast_dtype(device_type))
        with torch.autocast(device_type, enabled=False):
            return _MXLinearFunction.apply(input, self.weight, self.bias, self.recipe)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"
