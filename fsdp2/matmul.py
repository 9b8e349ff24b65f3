"""Matrix products that run at the device's real speed, whatever the dtype.

A CPU without bf16 units multiplies bf16 matrices 8 times slower than fp32 ones (7-9 against 56-85 GFLOP/s a core,
AVX2); one with AVX512-BF16 or AMX twice as fast or more (215 against 100, Zen 4). Where it is slower, GEMMs run on
exact fp32 copies and round the result once, which is also what an accelerator does (fp32 accumulation, one rounding):
same numbers, full speed. Only the 16-bit tensors are kept for backward. Elsewhere these are the plain torch operations.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@functools.cache
def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has bf16 units."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def runs_in_fp32(x: Tensor) -> bool:
    """Whether a GEMM on `x` goes through fp32 copies: 16-bit floats on a CPU that has no units for them."""
    if x.device.type != "cpu":
        return False
    return x.dtype == torch.float16 or (x.dtype == torch.bfloat16 and not cpu_multiplies_bf16())


class _LinearThroughFp32(torch.autograd.Function):
    """Y = X W^T + b with X [..., K], W [N, K], b [N] in 16 bits, every product accumulated in fp32."""

    @staticmethod
    def forward(ctx, x: Tensor, w_NK: Tensor, b_N: Tensor | None) -> Tensor:
        x_MK = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(x_MK, w_NK)
        ctx.has_bias = b_N is not None
        w_KN = w_NK.float().t()
        y_MN = x_MK.float() @ w_KN if b_N is None else torch.addmm(b_N.float(), x_MK.float(), w_KN)
        return y_MN.view(*x.shape[:-1], -1).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        x_MK, w_NK = ctx.saved_tensors
        dy_MN = dy.reshape(-1, dy.shape[-1]).float()
        dx = (dy_MN @ w_NK.float()).view(*dy.shape[:-1], -1).to(x_MK.dtype) if ctx.needs_input_grad[0] else None
        dw = (dy_MN.t() @ x_MK.float()).to(w_NK.dtype) if ctx.needs_input_grad[1] else None
        db = dy_MN.sum(0).to(w_NK.dtype) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return dx, dw, db


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(x, weight, bias)`: x [..., K], weight [N, K], bias [N] -> [..., N]; 16-bit products on a CPU run
    through fp32."""
    if not runs_in_fp32(x) or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    return _LinearThroughFp32.apply(x, weight, bias)


class Linear(nn.Linear):
    """`nn.Linear` on `fsdp2.matmul.linear`: the same parameters, names and results."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
