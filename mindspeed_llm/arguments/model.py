"""Flags of the group `model`: which model and tokenizer, and in which precision its linear layers compute.

`model_name_or_path` is a local folder (or a config.json); nothing is downloaded and no code of a checkpoint is ever
run. The `quant_*` flags choose the MX recipe and the modules it applies to; with `quant_recipe_name` unset the others
are kept but do nothing, so that one flag turns quantization off.
"""
# ruff: noqa: RUF009 -- flag() returns a dataclasses.field

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_llm.arguments.flag import NO_EFFECT, NOT_BUILT, flag
from mindspeed_llm.models.config import MODEL_TYPES

FAMILIES = (
    "gpt_oss",
    "qwen3",
    "qwen3_moe",
    "qwen3_next",
    "step35",
    "mamba3",
    "minimax_m27",
    "longcat_flash_ngram",
    "glm52",
    "deepseek_v4",
    "llama",
)
_NO_HUB = "models are read from local folders and nothing is downloaded"
_VOCABULARY = (
    "the vocabulary is the tokenizer's own; build it with the tokens that are needed (tools/train_tokenizer.py)"
)


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """Model, tokenizer and quantization recipe."""

    model_name_or_path: str = flag(
        "Folder with config.json (and *.safetensors unless train_from_scratch), or a config.json itself."
    )
    model_id: str | None = flag(
        "Model family; unset, config.json's model_type says it.",
        None,
        choices=FAMILIES,
        unbuilt={family: f"built are {', '.join(MODEL_TYPES)}" for family in FAMILIES if family not in MODEL_TYPES},
    )
    init_model_with_meta_device: bool = flag(
        "Build the model without storage and initialize each shard in place.",
        False,
        status=NO_EFFECT,
        note="every model is built on the meta device",
    )
    trust_remote_code: bool = flag(
        "Run Python code that comes with a checkpoint.",
        False,
        status=NO_EFFECT,
        note="code that comes with a checkpoint is never run",
    )
    train_from_scratch: bool = flag("Initialize the weights from training.seed instead of loading them.", False)
    tokenizer_name_or_path: str | None = flag(
        "Tokenizer: a sentencepiece .model, a tokenizer.json, or a folder with either; unset, the model's folder.", None
    )
    cache_dir: str | None = flag("Folder for downloads.", None, status=NO_EFFECT, note=_NO_HUB)
    use_fast_tokenizer: bool = flag(
        "Prefer the Rust implementation of a tokenizer.",
        True,
        status=NO_EFFECT,
        note="the tokenizer's file decides: tokenizer.json is read by tokenizers, .model by sentencepiece",
    )
    resize_vocab: bool = flag(
        "Grow the embedding to the tokenizer's vocabulary.",
        False,
        status=NOT_BUILT,
        note="the model's vocab_size must be at least the tokenizer's; set it in config.json",
    )
    split_special_tokens: bool = flag(
        "Tokenize special tokens as plain text.",
        False,
        status=NOT_BUILT,
        note="text is tokenized by tools/preprocess_data.py before training",
    )
    add_tokens: str | None = flag("Comma-separated tokens to add.", None, status=NOT_BUILT, note=_VOCABULARY)
    add_special_tokens: str | None = flag(
        "Comma-separated special tokens to add.", None, status=NOT_BUILT, note=_VOCABULARY
    )
    new_special_tokens_config: str | None = flag(
        "YAML file that describes new special tokens.", None, status=NOT_BUILT, note=_VOCABULARY
    )
    init_special_tokens: str = flag(
        "How the embeddings of new special tokens start.",
        "noise_init",
        choices=("noise_init", "desc_init", "desc_init_w_noise"),
        status=NO_EFFECT,
        note="no special tokens are added",
    )
    model_revision: str = flag("Branch, tag or commit on a hub.", "main", status=NO_EFFECT, note=_NO_HUB)
    hf_hub_token: str | None = flag("Token of the Hugging Face hub.", None, status=NO_EFFECT, note=_NO_HUB)
    ms_hub_token: str | None = flag("Token of the ModelScope hub.", None, status=NO_EFFECT, note=_NO_HUB)
    om_hub_token: str | None = flag("Token of the Modelers hub.", None, status=NO_EFFECT, note=_NO_HUB)

    quant_recipe_name: str | None = flag(
        "MX recipe: mxfp8, mxfp8-32x32, mxfp8-rceil, mxfp8-hybrid, or the long form "
        "dynamic_MX-1-1-32_E4M3_E4M3_E4M3; None trains without quantization.",
        None,
    )
    quant_apply_modules: list[str] = flag(
        "Patterns of the modules to quantize; each covers everything inside what it names.", ["model.layers.{*}"]
    )
    quant_ignored_modules: list[str] = flag("Patterns of the modules to leave alone.", ["*lm_head", "*gate"])
    quant_converters: list[str] = flag(
        "What to quantize: linear layers, the experts' grouped GEMMs, or both.",
        ["quantize.linear.mx"],
        choices=("quantize.linear.mx", "quantize.moe.mx"),
    )
    quant_format: str | None = flag(
        "Element format of the recipe, to state it (mxfp8: E4M3); must agree with the recipe; unset, the recipe's own.",
        None,
    )
    quant_block_size: int | None = flag(
        "Block size of the recipe, to state it (mxfp8: 32); must agree with the recipe; unset, the recipe's own.",
        None,
        minimum=1,
    )
    quant_scale_rule: str | None = flag(
        "How a block's scale is rounded (mxfp8: floor); unset, the recipe's own.",
        None,
        choices=("floor", "ceil", "rceil", "even"),
    )
    quant_emulate: bool = flag(
        "Train with an MX recipe on an accelerator without MX units (Ascend A2, A3): the same numbers by torch "
        "operations, slower than bf16. Elsewhere it changes nothing.",
        False,
    )
    enable_fsdp_low_precision_all_gather: bool = flag(
        "Quantize weights before the all-gather, so that codes and scales travel instead of bf16.", True
    )
    fsdp_low_precision_all_gather_mode: str = flag(
        "on-demand: each phase gathers the copy it uses; all: both copies in every gather.",
        "on-demand",
        choices=("on-demand", "all"),
    )
