"""SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020, arXiv:2002.05202), for dense layers and for experts.

The product is one autograd function. It keeps the two projections' outputs and recomputes the rest, where autograd
would keep three more tensors of that size; it computes in fp32 and rounds once. The experts' variant takes gate and up
as one tensor and multiplies every row by its router weight here, on the smaller side of the down projection, so that
the experts' outputs need not be kept for the weights' gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2.matmul import Linear


def _silu_and_slope(gate: Tensor) -> tuple[Tensor, Tensor]:
    """silu(gate) = gate sigmoid(gate), and its derivative sigmoid + silu (1 - sigmoid), both fp32."""
    wide = gate.float()
    sigmoid = wide.sigmoid()
    silu = wide * sigmoid
    return silu, (1 - sigmoid).mul_(silu).add_(sigmoid)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate.float()).mul_(up).to(gate.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        gate, up = ctx.saved_tensors
        dy = dy.float()
        silu, slope = _silu_and_slope(gate)
        return slope.mul_(dy).mul_(up).to(gate.dtype), silu.mul_(dy).to(up.dtype)


class _WeightedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up_TI: Tensor, weights_T: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_TI, weights_T)
        width = gate_up_TI.shape[1] // 2
        out = gate_up_TI.new_empty(gate_up_TI.shape[0], width)
        for rows in _blocks_in_cache(out):
            gate = gate_up_TI[rows, :width].to(torch.float32, copy=True)
            out[rows] = F.silu(gate, inplace=True).mul_(gate_up_TI[rows, width:]).mul_(weights_T[rows, None])
        return out

    @staticmethod
    def backward(ctx, dy: Tensor):
        gate_up, weights_T = ctx.saved_tensors
        width = dy.shape[1]
        d_gate_up = torch.empty_like(gate_up)
        d_weights = torch.empty_like(weights_T)
        for rows in _blocks_in_cache(dy):
            gate, up = gate_up[rows].float().chunk(2, dim=-1)
            dy_rows, weights = dy[rows].to(torch.float32, copy=True), weights_T[rows, None]
            product = F.silu(gate).mul_(dy_rows)
            d_weights[rows] = torch.linalg.vecdot(product, up)
            d_gate_up[rows, width:] = product.mul_(weights)
            d_gate_up[rows, :width] = torch.ops.aten.silu_backward(dy_rows.mul_(weights).mul_(up), gate)
        return d_gate_up, d_weights


def _blocks_in_cache(x_TI: Tensor) -> list[slice]:
    """Row ranges of [T, I] small enough that a CPU core keeps their fp32 temporaries in its cache: twice as fast
    there."""
    rows = max(x_TI.shape[0], 1)
    if x_TI.device.type == "cpu":
        rows = max(65536 * torch.get_num_threads() // max(x_TI.shape[1], 1), 1)
    return [slice(begin, begin + rows) for begin in range(0, x_TI.shape[0], rows)]


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
