"""Qwen3, dense: Llama's layer with an RMSNorm on every query and key head (`config.qk_norm`) and a head size that is
free of the hidden size.
"""

from __future__ import annotations

from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.decoder import CausalLM, DecoderLayer
from mindspeed_llm.models.layers.mlp import SwiGLU


class Qwen3DecoderLayer(DecoderLayer):
    """Attention with head norms and a dense SwiGLU."""

    def __init__(self, config: ModelConfig, layer_index: int, device=None):
        mlp = SwiGLU(config.hidden_size, config.intermediate_size, device=device)
        super().__init__(config, layer_index, mlp, device=device)


class Qwen3ForCausalLM(CausalLM):
    """`model_type: qwen3`."""

    layer_class = Qwen3DecoderLayer
