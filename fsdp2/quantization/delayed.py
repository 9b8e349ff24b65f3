"""Delayed scaling: a per-tensor scale from the largest magnitudes of the last steps instead of the tensor itself.

With a scale known beforehand, a kernel can quantize while it produces the tensor, without a pass to find the largest
element first. The price is saturation when a tensor outgrows its recent past. `DelayedQuantizer` keeps the history of
one tensor of one layer as a buffer, so that a resumed run quantizes exactly as the uninterrupted one would have.

The rule (largest of the history; no margin) is that of NVIDIA Transformer Engine's DelayedScaling recipe with
`amax_compute_algo="max"`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fsdp2.quantization.formats import WHOLE
from fsdp2.quantization.mx import MXTensor, quantize

HISTORY_LENGTH = 16


class DelayedQuantizer(nn.Module):
    """Quantizes one tensor of one layer, step after step, with a scale from its last `history_length` amaxes.

    The first step has no past and uses the tensor's own amax. NaN and Inf make that step's result NaN and stay out of
    the history.
    """

    amax_history: Tensor  # fp32 [history_length], newest first; 0 where nothing was recorded yet

    def __init__(self, element_format: str, history_length: int = HISTORY_LENGTH):
        super().__init__()
        if history_length < 1:
            raise ValueError(f"history_length must be at least 1, got {history_length}")
        self.element_format = element_format
        self.register_buffer("amax_history", torch.zeros(history_length, dtype=torch.float32))

    @torch.no_grad()
    def forward(self, x: Tensor, *, backend: str | None = None) -> MXTensor:
        """Quantize `x` [R, C] with one fp32 scale and record its amax."""
        amax = x.to(torch.bfloat16).abs().amax().float() if x.numel() else torch.zeros((), device=x.device)
        past = self.amax_history.amax()
        used = torch.where(past > 0, past, amax).reshape([1] * x.ndim)
        recorded = torch.where(amax.isfinite(), amax, past)
        self.amax_history.copy_(torch.cat([recorded.reshape(1), self.amax_history[:-1]]))
        return quantize(
            x, element_format=self.element_format, block_shape=(WHOLE, WHOLE), amax=used, backend=backend
        )

    def extra_repr(self) -> str:
        return f"{self.element_format}, history_length={len(self.amax_history)}"
