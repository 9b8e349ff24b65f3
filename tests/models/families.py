"""Tiny configurations of every family and variant, and transformers' own model of each, with weights large enough for
every path to matter.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers

_COMMON = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
_MOE = {
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "output_router_logits": True,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied-biased": {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama-rope-linear": {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.5}},
    "llama-rope-dynamic": {
        "model_type": "llama",
        "max_position_embeddings": 16,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    },
    "llama-rope-llama3": {"model_type": "llama", "rope_scaling": LLAMA3_ROPE},
    "qwen3": {"model_type": "qwen3", "head_dim": 32},
    "qwen3-tied-yarn": {
        "model_type": "qwen3",
        "head_dim": 16,
        "tie_word_embeddings": True,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    },
    "qwen3-biased-yarn-mscale": {
        "model_type": "qwen3",
        "head_dim": 32,
        "attention_bias": True,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 8.0,
            "beta_slow": 0.5,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "truncate": False,
        },
    },
    "qwen3_moe": {"model_type": "qwen3_moe", **_MOE},
    "qwen3_moe-not-normalized-some-dense": {
        "model_type": "qwen3_moe",
        **_MOE,
        "norm_topk_prob": False,
        "mlp_only_layers": [1],
    },
    "qwen3_moe-idle-experts": {"model_type": "qwen3_moe", **_MOE, "num_experts": 64, "num_experts_per_tok": 1},
}


def tiny_config(variant: str) -> dict[str, Any]:
    """A config.json of the variant, as release 4 of transformers writes it."""
    return copy.deepcopy({**_COMMON, **VARIANTS[variant]})


def reference_model(variant: str, **overrides: Any) -> transformers.PreTrainedModel:
    """transformers' model in fp32, eager attention; norms and biases away from their neutral values."""
    config = transformers.AutoConfig.for_model(**{**tiny_config(variant), **overrides})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.3 + (0.0 if name.endswith("bias") else 1.0))
            else:
                parameter.copy_(torch.randn_like(parameter) * (0.3 if "gate.weight" in name else 0.1))
    return model


def save_reference(
    variant: str, folder: Path, max_shard_size: str = "5GB", **overrides: Any
) -> transformers.PreTrainedModel:
    """The reference model, written to `folder` as transformers writes it. `overrides` replace keys of the config."""
    model = reference_model(variant, **overrides)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model
