"""Decoder-only language models in tree, described by Hugging Face's config.json: llama, qwen3, qwen3_moe.

`build_model` makes one, `initialize_weights` or `load_hf_weights` fills it in any sharded layout, `save_hf_weights`
writes what transformers loads. Nothing here knows about quantization or FSDP. Names load on first use, so that reading
a configuration does not pay for importing torch.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "ModelConfig": "config",
    "CausalLMOutput": "decoder",
    "KeyValueCache": "layers.kv_cache",
    "build_model": "registry",
    "load_config": "registry",
    "parameter_count": "registry",
    "model_flops_per_token": "registry",
    "initialize_weights": "initialization",
    "load_hf_weights": "hf_weights",
    "save_hf_weights": "hf_weights",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
