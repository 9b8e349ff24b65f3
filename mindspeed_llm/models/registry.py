"""From a config.json to a model: which class builds which `model_type`, and how large and how costly that model is.

`build_model` allocates nothing by default: the meta device holds shapes only, so a 235-billion-parameter model is built
in milliseconds on any machine, sharded, and only then given memory. Sizes and FLOPs come from the configuration alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.decoder import CausalLM
from mindspeed_llm.models.llama import LlamaForCausalLM
from mindspeed_llm.models.qwen3 import Qwen3ForCausalLM
from mindspeed_llm.models.qwen3_moe import Qwen3MoeForCausalLM

MODEL_CLASSES: dict[str, type[CausalLM]] = {
    "llama": LlamaForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "qwen3_moe": Qwen3MoeForCausalLM,
}


def load_config(config_or_path: ModelConfig | Mapping[str, Any] | str | Path) -> ModelConfig:
    """A ModelConfig from itself, from a parsed config.json, or from the path of a config.json or of a folder that holds
    one.
    """
    if isinstance(config_or_path, ModelConfig):
        return config_or_path
    if isinstance(config_or_path, Mapping):
        return ModelConfig.from_dict(config_or_path)
    return ModelConfig.from_path(config_or_path)


def build_model(
    config_or_path: ModelConfig | Mapping[str, Any] | str | Path, device: str | torch.device = "meta"
) -> CausalLM:
    """The model with fp32 parameters on `device`, in training mode. Values are set by `initialize_weights` or
    `load_hf_weights`.

    Raises ConfigurationError when the configuration is missing, unreadable, impossible, or asks for something that is
    not built.
    """
    config = load_config(config_or_path)
    return MODEL_CLASSES[config.model_type](config, device=device)


def parameter_count(config: ModelConfig) -> tuple[int, int]:
    """(all parameters, parameters that one token uses). They differ by the experts a token is not sent to; tied
    embeddings count once.
    """
    total = sum(parameter.numel() for parameter in build_model(config).parameters())
    moe_layers = sum(config.is_moe_layer(index) for index in range(config.num_hidden_layers))
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    return total, total - moe_layers * (config.num_experts - config.num_experts_per_tok) * expert


def model_flops_per_token(config: ModelConfig, sequence_length: int) -> int:
    """FLOPs of forward and backward for one token: 6 a multiplied parameter, and 12 * layers * heads * head_dim *
    sequence_length for attention.

    The convention of PaLM (arXiv:2204.02311, appendix B): the embedding lookup is free, the output projection is not,
    the causal half is not deducted, recomputation is not counted.
    """
    _, active = parameter_count(config)
    lookup = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * sequence_length
    return 6 * (active - lookup) + attention
