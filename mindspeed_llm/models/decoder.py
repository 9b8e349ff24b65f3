"""The decoder-only transformer that all families share: embedding, pre-norm layers, final norm, output projection.

A family's file says which attention and feed-forward its layers have; everything else is here. Every submodule is
reached by calling it, and module names are Hugging Face's, because sharding, quantization and checkpoints attach to
modules by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fsdp2.matmul import Linear
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.layers.attention import GroupedQueryAttention
from mindspeed_llm.models.layers.kv_cache import KeyValueCache
from mindspeed_llm.models.layers.rms_norm import RMSNorm
from mindspeed_llm.models.layers.rotary import RotaryEmbedding, RotaryTable
from mindspeed_llm.models.layers.router import RouterLoad, load_balancing_loss, router_z_loss


@dataclass
class CausalLMOutput:
    """`logits` [B, S, vocab] in the compute dtype. `router_aux_loss`, `router_z_loss`: fp32 scalars, not yet multiplied
    by their coefficients, and `tokens_per_expert` fp32 [MoE layers, E]; None without experts.
    """

    logits: Tensor
    router_aux_loss: Tensor | None = None
    router_z_loss: Tensor | None = None
    tokens_per_expert: Tensor | None = None


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). `mlp` returns its output, or its output and a RouterLoad."""

    def __init__(self, config: ModelConfig, layer_index: int, mlp: nn.Module, device=None):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, device=device)
        self.self_attn = GroupedQueryAttention(config, layer_index, device=device)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, device=device)
        self.mlp = mlp

    def forward(
        self, x_BSH: Tensor, table: RotaryTable, cache: KeyValueCache | None = None
    ) -> tuple[Tensor, RouterLoad | None]:
        x_BSH = x_BSH + self.self_attn(self.input_layernorm(x_BSH), table, cache)
        out = self.mlp(self.post_attention_layernorm(x_BSH))
        y_BSH, load = out if isinstance(out, tuple) else (out, None)
        return x_BSH + y_BSH, load


class Decoder(nn.Module):
    """Token ids [B, S] -> hidden states [B, S, hidden] after the final norm, and the RouterLoad of every MoE layer."""

    def __init__(self, config: ModelConfig, layer_class: type[DecoderLayer], device=None):
        super().__init__()
        self.dynamic_positions = config.rope.rope_type == "dynamic"
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, device=device)
        layers = (layer_class(config, index, device=device) for index in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, device=device)
        self.rotary_emb = RotaryEmbedding(config, device=device)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> tuple[Tensor, list[RouterLoad]]:
        past = cache.length if cache is not None else 0
        length = past + input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(past, length, device=input_ids.device)[None]
        elif self.dynamic_positions:
            length = int(position_ids.max()) + 1
        table = self.rotary_emb(position_ids, length)
        x_BSH, loads = self.embed_tokens(input_ids), []
        for layer in self.layers:
            x_BSH, load = layer(x_BSH, table, cache)
            if load is not None:
                loads.append(load)
        if cache is not None:
            cache.length += input_ids.shape[1]
        return self.norm(x_BSH), loads


class CausalLM(nn.Module):
    """A language model of one family. `model(input_ids [B, S] int64, position_ids=None, cache=None) -> CausalLMOutput`;
    attention is causal.

    `position_ids` int64 [B, S] default to 0..S-1 (behind what `cache` holds). With `config.tie_word_embeddings` the
    output projection's weight is the embedding's parameter itself. `logits_to_keep` > 0 projects only that many last
    positions.
    """

    layer_class: ClassVar[type[DecoderLayer]]
    average_over_ranks: Callable[[Tensor], Tensor] | None = None  # a trainer sets it to balance over the global batch

    def __init__(self, config: ModelConfig, device=None):
        super().__init__()
        self.config = config
        self.model = Decoder(config, self.layer_class, device=device)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False, device=device)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the output projection's weight the embedding's parameter, where the configuration says so: at first, and
        again after `to_empty`, which gives every module a tensor of its own.
        """
        if self.config.tie_word_embeddings and self.lm_head.weight is not self.model.embed_tokens.weight:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        cache: KeyValueCache | None = None,
        logits_to_keep: int = 0,
    ) -> CausalLMOutput:
        hidden_BSH, loads = self.model(input_ids, position_ids, cache)
        logits = self.lm_head(hidden_BSH[:, -logits_to_keep:] if logits_to_keep else hidden_BSH)
        if not loads:
            return CausalLMOutput(logits)
        return CausalLMOutput(
            logits,
            load_balancing_loss(loads, input_ids.numel(), self.average_over_ranks),
            router_z_loss(loads, input_ids.numel()),
            torch.stack([load.tokens_per_expert for load in loads]),
        )
