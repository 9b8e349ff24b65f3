"""Qwen3-MoE: Qwen3's attention, and experts in place of the dense layer wherever `config.is_moe_layer` says so
(everywhere in the published sizes).
"""

from __future__ import annotations

from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.decoder import CausalLM, DecoderLayer
from mindspeed_llm.models.layers.mlp import SwiGLU
from mindspeed_llm.models.layers.moe import MixtureOfExperts


class Qwen3MoeDecoderLayer(DecoderLayer):
    """Attention with head norms, then experts or, in a layer left dense, a SwiGLU of `config.intermediate_size`."""

    def __init__(self, config: ModelConfig, layer_index: int, device=None):
        if config.is_moe_layer(layer_index):
            mlp = MixtureOfExperts(config, device=device)
        else:
            mlp = SwiGLU(config.hidden_size, config.intermediate_size, device=device)
        super().__init__(config, layer_index, mlp, device=device)


class Qwen3MoeForCausalLM(CausalLM):
    """`model_type: qwen3_moe`."""

    layer_class = Qwen3MoeDecoderLayer
