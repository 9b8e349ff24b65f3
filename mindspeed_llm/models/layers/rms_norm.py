"""Root mean square normalization, with a backward pass that a CPU can afford.

y = x / sqrt(mean(x^2) + eps) * weight over the last dimension, statistics in fp32 (Zhang & Sennrich 2019,
arXiv:1910.07467). Accelerators have a fused kernel behind `F.rms_norm`. On a CPU that call decomposes into a dozen
small operations whose backward takes three times what the formula needs, so there the formula is written out as one
autograd function that keeps only the input and one number a row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension of an fp32 tensor, kept as a dimension of size 1."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def rms_norm_backward(dy: Tensor, x: Tensor, weight: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients in fp32 for the input and the weight.

    With n = x r: dx = r (dy w - n mean(dy w n)) and dw = sum over rows of dy n. `dy` and `x` are fp32 [..., H];
    `weight` is [H]; `r` is [..., 1].
    """
    width = x.shape[-1]
    n = x * r
    dyn = (dy * n).view(-1, width)
    weight = weight.float()
    mean = (dyn @ weight).view(r.shape).div_(width)
    dx = (dy * weight).addcmul_(n, mean, value=-1).mul_(r)
    return dx, dyn.sum(0)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        r = inverse_rms(wide, eps)
        ctx.save_for_backward(x, weight, r)
        return (wide * r).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight, r = ctx.saved_tensors
        dx, dw = rms_norm_backward(dy.float(), x.float(), weight, r)
        return dx.to(x.dtype), dw.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize x [..., H] with weight [H]; the result has x's dtype."""
    if x.device.type == "cpu":
        return _RMSNorm.apply(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


class RMSNorm(nn.Module):
    """`rms_norm` with its weight [hidden_size], which starts at 1. `normalize` computes it (`fused.choose_kernels`)."""

    def __init__(self, hidden_size: int, eps: float, device=None):
        super().__init__()
        self.eps, self.normalize = eps, rms_norm
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return self.normalize(x, self.weight, self.eps)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"
