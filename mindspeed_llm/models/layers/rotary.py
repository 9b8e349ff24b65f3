"""Rotary position embeddings and their long-context scalings.

Pair i of a head's dimensions (i and i + D/2, Hugging Face's "rotate half" layout) turns by position * inv_freq[i],
inv_freq[i] = theta^(-2i/D) (Su et al. 2021, arXiv:2104.09864). A scaling replaces inv_freq, and yarn also multiplies
cos and sin. The formulas are those that transformers computes, because checkpoints were trained with them. All of it
stays in fp32: bf16 cannot tell position 4,097 from 4,096.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mindspeed_llm.models.config import ModelConfig, RotaryConfig


class RotaryTable:
    """cos and sin, fp32 [B or 1, S, 1, D/2]. A plain object on purpose: FSDP casts the tensors among a module's inputs
    to bf16, but not what it does not look into."""

    __slots__ = ("cos", "sin")

    def __init__(self, cos: Tensor, sin: Tensor):
        self.cos, self.sin = cos, sin


class RotaryEmbedding(nn.Module):
    """Makes the table of one batch. `inv_freq` is a buffer that no checkpoint holds; `reset_buffers` refills it after
    materialization from meta.
    """

    inv_freq: Tensor

    def __init__(self, config: ModelConfig, device=None):
        super().__init__()
        self.rope, self.head_dim, self.max_positions = config.rope, config.head_dim, config.max_position_embeddings
        self.attention_factor = yarn_attention_factor(config.rope) if config.rope.rope_type == "yarn" else 1.0
        inv_freq = torch.empty(config.head_dim // 2, dtype=torch.float32, device=device)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.reset_buffers()

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Write the frequencies into `inv_freq`, wherever it lives (nothing happens on the meta device)."""
        self.inv_freq.copy_(inverse_frequencies(self.rope, self.head_dim, self.max_positions))

    def forward(self, position_ids: Tensor, sequence_length: int) -> RotaryTable:
        """position_ids: int64 [B or 1, S]. sequence_length: the longest position seen + 1; only `dynamic` scaling looks
        at it.
        """
        inv_freq = self.inv_freq
        if self.rope.rope_type == "dynamic" and sequence_length > self.max_positions:
            stretched = inverse_frequencies(self.rope, self.head_dim, self.max_positions, sequence_length)
            inv_freq = stretched.to(inv_freq.device)
        angles = position_ids[:, :, None, None].float() * inv_freq
        return RotaryTable(angles.cos() * self.attention_factor, angles.sin() * self.attention_factor)


def inverse_frequencies(rope: RotaryConfig, head_dim: int, max_positions: int, sequence_length: int = 0) -> Tensor:
    """inv_freq, fp32 [head_dim / 2] on the CPU, of every type in `config.ROPE_TYPES`."""
    scaling, theta = rope.scaling, rope.theta
    if rope.rope_type == "dynamic":  # NTK-aware: the base grows with the sequence
        factor, length = scaling["factor"], max(sequence_length, max_positions)
        theta *= (factor * length / max_positions - (factor - 1)) ** (head_dim / (head_dim - 2))
    inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)
    if rope.rope_type == "linear":
        return inv_freq / scaling["factor"]
    if rope.rope_type == "llama3":
        return _llama3(inv_freq, rope)
    if rope.rope_type == "yarn":
        return _yarn(inv_freq, rope, head_dim)
    return inv_freq


def _llama3(inv_freq: Tensor, rope: RotaryConfig) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, a linear blend in between (Llama 3.1)."""
    scaling = rope.scaling
    turns = scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)  # within the original context
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq / scaling["factor"] * (1 - keep) + inv_freq * keep


def _yarn(inv_freq: Tensor, rope: RotaryConfig, head_dim: int) -> Tensor:
    """Between the dimension that makes beta_fast turns and the one that makes beta_slow, blend from kept to divided
    (Peng et al. 2023, arXiv:2309.00071).
    """
    scaling = rope.scaling
    original = scaling["original_max_position_embeddings"]

    def dimension_of(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(scaling.get("beta_fast") or 32), dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low
    divided = (ramp / (high - low if high != low else 0.001)).clamp(0, 1)
    return inv_freq / scaling["factor"] * divided + inv_freq * (1 - divided)


def yarn_attention_factor(rope: RotaryConfig) -> float:
    """What yarn multiplies cos and sin by: given, or from mscale, or 0.1 ln(factor) + 1."""
    scaling = rope.scaling
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def magnitude(mscale: float) -> float:
        return 1.0 if scaling["factor"] <= 1 else 0.1 * mscale * math.log(scaling["factor"]) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return magnitude(1.0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every pair of x [B, S, heads, D] by its position's angle, in fp32."""
    a, b = x.float().chunk(2, dim=-1)
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    out_a, out_b = out.chunk(2, dim=-1)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-1)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin)
    return out
