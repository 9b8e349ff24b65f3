"""Llama 2 to 3.x and what shares its architecture (SmolLM2, for one): grouped-query attention without head norms, dense
SwiGLU, optional biases.
"""

from __future__ import annotations

from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.decoder import CausalLM, DecoderLayer
from mindspeed_llm.models.layers.mlp import SwiGLU


class LlamaDecoderLayer(DecoderLayer):
    """Attention and a dense SwiGLU; `config.mlp_bias` gives the latter's projections a bias."""

    def __init__(self, config: ModelConfig, layer_index: int, device=None):
        mlp = SwiGLU(config.hidden_size, config.intermediate_size, bias=config.mlp_bias, device=device)
        super().__init__(config, layer_index, mlp, device=device)


class LlamaForCausalLM(CausalLM):
    """`model_type: llama`."""

    layer_class = LlamaDecoderLayer
