"""SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202), for dense layers and for experts.

The product is one autograd function. It keeps the two projections' outputs and recomputes the rest, where autograd would keep three more tensors of
that size; it computes in fp32 and rounds once. The experts' variant takes gate and up as one tensor and multiplies every row by its router weight here,
on the smaller side of the down projection, so that the experts' outputs need not be kept for the weights' gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsdp2.matmul import Linear


def _swiglu_gradients(dy: Tensor, gate: Tensor, up: Tensor, d_gate: Tensor, d_up: Tensor) -> None:
    """Write dy * up * silu'(gate) and dy * silu(gate) into d_gate and d_up. All [T, I]; computed in fp32."""
    gate = gate.float()
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    d_up.copy_(dy * silu)
    # silu' = sigmoid + silu (1 - sigmoid) = sigmoid + silu - silu sigmoid
    slope = sigmoid.add_(silu).addcmul_(silu, sigmoid - silu, value=-1)
    d_gate.copy_(slope.mul_(dy).mul_(up))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_TI: Tensor, up_TI: Tensor) -> Tensor:
        ctx.save_for_backward(gate_TI, up_TI)
        return nn.functional.silu(gate_TI.float()).mul_(up_TI).to(gate_TI.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        _swiglu_gradients(dy.float(), gate, up, d_gate, d_up)
        return d_gate, d_up


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up_TI: Tensor, weights_T: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_TI, weights_T)
        gate, up = gate_up_TI.chunk(2, dim=-1)
        return nn.functional.silu(gate.float()).mul_(up).mul_(weights_T[:, None]).to(gate_up_TI.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        gate_up, weights_T = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        dy = dy.float()
        d_gate_up = torch.empty_like(gate_up)
        d_gate, d_up = d_gate_up.chunk(2, dim=-1)
        _swiglu_gradients(dy * weights_T[:, None], gate, up, d_gate, d_up)
        d_weights = None
        if ctx.needs_input_grad[1]:
            d_weights = (nn.functional.silu(gate.float()).mul_(up).mul_(dy)).sum(-1).to(weights_T.dtype)
        return d_gate_up, d_weights


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [..., I]."""
    return _SwiGLU.apply(gate, up)


def weighted_swiglu(gate_up_TI: Tensor, weights_T: Tensor) -> Tensor:
    """silu(gate) * up * weight: gate_up_TI [T, 2I] with gate first, weights_T [T] -> [T, I]."""
    return _WeightedSwiGLU.apply(gate_up_TI, weights_T)


class SwiGLU(nn.Module):
    """The dense feed-forward layer, [..., hidden] -> [..., hidden]."""

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False, device=None):
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size, bias=bias, device=device)
        self.up_proj = Linear(hidden_size, intermediate_size, bias=bias, device=device)
        self.down_proj = Linear(intermediate_size, hidden_size, bias=bias, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
