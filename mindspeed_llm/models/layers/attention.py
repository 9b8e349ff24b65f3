"""Causal grouped-query attention with rotary positions and, for Qwen3, an RMSNorm on every query and key head.

The projections are modules of their own, named as in Hugging Face, so that FSDP, quantization and tensor parallelism
find them. What lies between the projections and the softmax (head norm, rotation) is one autograd function: it computes
in fp32, rounds once, and keeps only the projections' outputs. A 16-bit tensor on a CPU is widened for
`scaled_dot_product_attention`, whose bf16 path is slower there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsdp2.matmul import Linear
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.layers.kv_cache import KeyValueCache
from mindspeed_llm.models.layers.rms_norm import RMSNorm
from mindspeed_llm.models.layers.rotary import RotaryTable, rotate


class _Rotate(torch.autograd.Function):
    """rotate(x). The transpose of a rotation is the rotation back, so nothing but the angles is kept."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return rotate(x, cos, sin).to(dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        cos, sin = ctx.saved_tensors
        return rotate(dy, cos, -sin).to(ctx.dtype), None, None, None


def rotate_heads(x: Tensor, table: RotaryTable, dtype: torch.dtype) -> Tensor:
    """Turn x [B, S, heads, D] by its positions' angles, as `dtype`."""
    return _Rotate.apply(x, table.cos, table.sin, dtype)


class GroupedQueryAttention(nn.Module):
    """[B, S, hidden] -> [B, S, hidden]. `num_key_value_heads` divides `num_attention_heads`; every key/value head
    serves a group of query heads. `rotate` and `attend` are the functions between the projections
    (`fused.choose_kernels`).
    """

    def __init__(self, config: ModelConfig, layer_index: int, device=None):
        super().__init__()
        heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        bias = config.attention_bias
        self.head_dim, self.grouped, self.layer_index = dim, kv_heads != heads, layer_index
        self.rotate, self.attend = rotate_heads, causal_attention
        self.q_proj = Linear(config.hidden_size, heads * dim, bias=bias, device=device)
        self.k_proj = Linear(config.hidden_size, kv_heads * dim, bias=bias, device=device)
        self.v_proj = Linear(config.hidden_size, kv_heads * dim, bias=bias, device=device)
        self.o_proj = Linear(heads * dim, config.hidden_size, bias=bias, device=device)
        if config.qk_norm:
            self.q_norm = RMSNorm(dim, config.rms_norm_eps, device=device)
            self.k_norm = RMSNorm(dim, config.rms_norm_eps, device=device)
        else:
            self.q_norm = self.k_norm = None

    def forward(self, x_BSH: Tensor, table: RotaryTable, cache: KeyValueCache | None = None) -> Tensor:
        # -1: the number of heads follows from the projection, which tensor parallelism splits
        by_head = (*x_BSH.shape[:2], -1, self.head_dim)
        q = self.q_proj(x_BSH).view(by_head)
        k = self.k_proj(x_BSH).view(by_head)
        v = self.v_proj(x_BSH).view(by_head).transpose(1, 2)
        dtype = torch.float32 if x_BSH.device.type == "cpu" else x_BSH.dtype  # as fast there, and exact
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = self.rotate(q, table, dtype).transpose(1, 2)  # [B, heads, S, D]
        k = self.rotate(k, table, dtype).transpose(1, 2)
        v = v.to(dtype)
        if cache is not None:
            k, v = cache.append(self.layer_index, k, v)
        out = self.attend(q, k, v, self.grouped)
        return self.o_proj(out.transpose(1, 2).to(x_BSH.dtype).flatten(2))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> Tensor:
    """softmax(q k^T / sqrt(D)) v, where the last query sees every key. q [B, heads, Sq, D]; k, v [B, kv_heads, Sk, D],
    Sk >= Sq.
    """
    queries, keys = q.shape[2], k.shape[2]
    mask = None
    if 1 < queries < keys:  # is_causal lets query 0 see key 0 only; here the last query and the last key coincide
        mask = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    is_causal = mask is None and queries > 1
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)


def cuda_flash_attention(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> Tensor:
    """`causal_attention` by SDPA's flash kernel alone, which has no masks and no fp32: a prompt behind cached
    tokens, a single query and fp32 take whichever kernel fits."""
    if q.shape[2] != k.shape[2] or q.dtype == torch.float32:
        return causal_attention(q, k, v, grouped)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return causal_attention(q, k, v, grouped)
