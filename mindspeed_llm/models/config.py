"""The model's configuration: Hugging Face's `config.json`, read once into a frozen dataclass and checked before any
tensor exists.

A `config.json` from any release of transformers is the only model description this project has; there is no format of
our own. Reading it is where a feature that is not built (a sliding window, another activation, an unknown rope type) is
refused, so that no model ever trains as something it is not. Defaults of absent keys are those of transformers'
configuration class of the same family. Nothing here imports torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp2.errors import ConfigurationError, nearest

MODEL_TYPES = ("llama", "qwen3", "qwen3_moe")
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
_ARCHITECTURES = dict(zip(MODEL_TYPES, ("LlamaForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")))

# What transformers' configuration class assumes when config.json does not say.
_FAMILY_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {
        "max_position_embeddings": 2048,
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
    },
    "qwen3": {
        "max_position_embeddings": 32768,
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "num_hidden_layers": 32,
    },
    "qwen3_moe": {
        "max_position_embeddings": 32768,
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
    },
}
_QWEN_MOE_DEFAULTS: dict[str, int] = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary position embedding: `theta` is the base, `rope_type` one of ROPE_TYPES, `scaling` that type's own numbers
    as config.json names them.
    """

    theta: float
    rope_type: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer of one of MODEL_TYPES. Names are Hugging Face's; `source` is the config.json it came
    from.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RotaryConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    initializer_range: float = 0.02
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    scoring_func: str = "softmax"
    router_aux_loss_coef: float = 0.001
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    source: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def is_moe_layer(self, index: int) -> bool:
        """Whether decoder layer `index` has experts (transformers' rule: every `decoder_sparse_step`-th, except
        `mlp_only_layers`).
        """
        sparse = (index + 1) % self.decoder_sparse_step == 0
        return self.num_experts > 0 and sparse and index not in self.mlp_only_layers

    @classmethod
    def from_dict(cls, source: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Read a parsed config.json; `where` names it in messages. Raises ConfigurationError for what is missing,
        impossible or not built.
        """
        reader = _Reader(source, where)
        model_type = source.get("model_type")
        if model_type not in MODEL_TYPES:
            built = ", ".join(MODEL_TYPES) + nearest(str(model_type), MODEL_TYPES)
            raise ConfigurationError(f"{where}: model_type {model_type!r} is not built; built are {built}")
        _refuse_unbuilt(source, where)
        defaults = _FAMILY_DEFAULTS[model_type]
        hidden_size = reader.integer("hidden_size", defaults["hidden_size"])
        heads = reader.integer("num_attention_heads", 32)
        kv_heads = reader.integer("num_key_value_heads", {"llama": heads, "qwen3": 32, "qwen3_moe": 4}[model_type])
        head_dim = reader.integer("head_dim", 128 if model_type == "qwen3" else hidden_size // heads)
        if "head_dim" not in source and model_type != "qwen3" and hidden_size % heads:
            raise ConfigurationError(
                f"{where}: hidden_size {hidden_size} is not divisible by num_attention_heads {heads}, "
                "and there is no head_dim"
            )
        if heads % kv_heads:
            raise ConfigurationError(
                f"{where}: num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
            )
        if head_dim % 2:
            raise ConfigurationError(f"{where}: head_dim {head_dim} must be even for rotary position embeddings")
        max_positions = reader.integer("max_position_embeddings", defaults["max_position_embeddings"])
        moe = _read_moe(source, reader, where) if model_type == "qwen3_moe" else {}
        return cls(
            model_type=model_type,
            vocab_size=reader.integer("vocab_size", defaults["vocab_size"]),
            hidden_size=hidden_size,
            intermediate_size=reader.integer("intermediate_size", defaults["intermediate_size"]),
            num_hidden_layers=reader.integer("num_hidden_layers", defaults["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=reader.number("rms_norm_eps", 1e-6),
            rope=_read_rope(source, max_positions, where),
            tie_word_embeddings=bool(source.get("tie_word_embeddings", False)),
            attention_bias=bool(source.get("attention_bias", False)),
            mlp_bias=model_type == "llama" and bool(source.get("mlp_bias", False)),
            qk_norm=model_type != "llama",
            initializer_range=reader.number("initializer_range", 0.02),
            bos_token_id=source.get("bos_token_id"),
            eos_token_id=source.get("eos_token_id"),
            source=dict(source),
            **moe,
        )

    @classmethod
    def from_path(cls, path: str | Path) -> ModelConfig:
        """Read `path`, a config.json or a folder that holds one."""
        file = Path(path)
        if file.is_dir():
            file = file / "config.json"
        if not file.is_file():
            raise ConfigurationError(
                f"{path}: no such model configuration; give a folder that holds a config.json, or a config.json itself"
            )
        try:
            source = json.loads(file.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            raise ConfigurationError(f"{file}: cannot be read as JSON: {error}") from None
        if not isinstance(source, dict):
            raise ConfigurationError(f"{file}: must hold a JSON object, not a {type(source).__name__}")
        return cls.from_dict(source, str(file))

    def to_hf(self, dtype: str = "bfloat16") -> dict[str, Any]:
        """The config.json that every release of transformers reads: the source's keys, rope in the form that releases 4
        and 5 both know.
        """
        stale = ("rope_parameters", "dtype", "torch_dtype", "transformers_version", "_name_or_path")
        out = {key: value for key, value in self.source.items() if key not in stale}
        out.update(
            architectures=[_ARCHITECTURES[self.model_type]],
            model_type=self.model_type,
            torch_dtype=dtype,
            head_dim=self.head_dim,
        )
        out["rope_theta"] = self.rope.theta
        scaled = self.rope.rope_type != "default"
        out["rope_scaling"] = {"rope_type": self.rope.rope_type, **self.rope.scaling} if scaled else None
        return out


class _Reader:
    """Typed access to one config.json, so that a wrong value is refused with the key's name."""

    def __init__(self, source: Mapping[str, Any], where: str):
        self.source, self.where = source, where

    def integer(self, key: str, default: int, minimum: int = 1) -> int:
        value = self.source.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ConfigurationError(f"{self.where}: {key} must be an integer of at least {minimum}, not {value!r}")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.source.get(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0:
            raise ConfigurationError(f"{self.where}: {key} must be a number of at least 0, not {value!r}")
        return float(value)


def _refuse_unbuilt(source: Mapping[str, Any], where: str) -> None:
    def refuse(key: str, built: str) -> None:
        raise ConfigurationError(f"{where}: {key} = {source.get(key)!r} is not built; built is {built}")

    if source.get("hidden_act", "silu") not in ("silu", "swish"):
        refuse("hidden_act", "silu")
    if source.get("use_sliding_window"):
        refuse("use_sliding_window", "full causal attention (false)")
    if any(kind != "full_attention" for kind in source.get("layer_types") or ()):
        refuse("layer_types", "full_attention in every layer")
    if source.get("attention_dropout"):
        refuse("attention_dropout", "0.0")
    quantized = source.get("quantization_config")
    if quantized and not (isinstance(quantized, Mapping) and quantized.get("quant_method") == "mxfp8"):
        refuse("quantization_config", "weights in bf16, fp16, fp32 or mxfp8 (quantize with --model.quant_recipe_name)")
    if source.get("partial_rotary_factor", 1.0) not in (None, 1, 1.0):
        refuse("partial_rotary_factor", "1.0, rotation of the whole head")


def _read_moe(source: Mapping[str, Any], reader: _Reader, where: str) -> dict[str, Any]:
    sizes = {key: reader.integer(key, default) for key, default in _QWEN_MOE_DEFAULTS.items()}
    if source.get("num_experts") is None and source.get("num_local_experts") is not None:
        sizes["num_experts"] = reader.integer("num_local_experts", 0)
    if sizes["num_experts_per_tok"] > sizes["num_experts"]:
        raise ConfigurationError(
            f"{where}: num_experts_per_tok {sizes['num_experts_per_tok']} exceeds num_experts {sizes['num_experts']}"
        )
    scoring_func = source.get("scoring_func") or "softmax"
    if scoring_func not in ("softmax", "sigmoid"):
        raise ConfigurationError(
            f"{where}: scoring_func {scoring_func!r} is not built; built are softmax, sigmoid"
            f"{nearest(str(scoring_func), ('softmax', 'sigmoid'))}"
        )
    return {
        **sizes,
        "scoring_func": scoring_func,
        "norm_topk_prob": bool(source.get("norm_topk_prob", False)),
        "router_aux_loss_coef": reader.number("router_aux_loss_coef", 0.001),
        "decoder_sparse_step": reader.integer("decoder_sparse_step", 1),
        "mlp_only_layers": tuple(source.get("mlp_only_layers") or ()),
    }


def _read_rope(source: Mapping[str, Any], max_positions: int, where: str) -> RotaryConfig:
    """Release 4 writes rope_theta and rope_scaling (with `type` in old files), release 5 writes both into
    rope_parameters.
    """
    key = "rope_parameters" if source.get("rope_parameters") else "rope_scaling"
    scaling = dict(source.get(key) or {})
    theta = scaling.pop("rope_theta", None) or source.get("rope_theta") or 10000.0
    old_name = scaling.pop("type", None)
    rope_type = scaling.pop("rope_type", None) or old_name or "default"
    if rope_type not in ROPE_TYPES:
        built = ", ".join(ROPE_TYPES) + nearest(str(rope_type), ROPE_TYPES)
        raise ConfigurationError(f"{where}: {key}.rope_type {rope_type!r} is not built; built are {built}")
    if scaling.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigurationError(f"{where}: {key}.partial_rotary_factor is not built; built is 1.0 (the whole head)")
    if rope_type == "default":
        return RotaryConfig(theta=float(theta))
    if rope_type in ("yarn", "llama3"):
        original = source.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
        scaling["original_max_position_embeddings"] = original or max_positions
    if rope_type == "yarn" and scaling.get("factor") is None:
        scaling["factor"] = max_positions / scaling["original_max_position_embeddings"]
    for name in ("factor", "low_freq_factor", "high_freq_factor") if rope_type == "llama3" else ("factor",):
        if not isinstance(scaling.get(name), (int, float)) or not scaling[name] > 0:
            raise ConfigurationError(
                f"{where}: {key} of type {rope_type!r} needs a positive {name}, not {scaling.get(name)!r}"
            )
    if rope_type == "llama3" and not scaling["high_freq_factor"] > scaling["low_freq_factor"]:
        raise ConfigurationError(
            f"{where}: {key}.high_freq_factor {scaling['high_freq_factor']} must exceed "
            f"low_freq_factor {scaling['low_freq_factor']}"
        )
    return RotaryConfig(theta=float(theta), rope_type=rope_type, scaling=scaling)
