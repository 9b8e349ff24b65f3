"""How many bytes of activations a step keeps for backward, from the model's configuration alone.

Counted are the tensors that the layers save (`save_for_backward`, each storage once), term by term in the order of the
model's forward; weights are not among them. A test holds the sum to what a real forward saves. Where layers are
recomputed, their inputs are kept and one layer's activations live at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsdp2.patterns import covers
from fsdp2.plan import ParallelPlan
from fsdp2.quantization.formats import MX_BLOCK
from fsdp2.quantization.recipe import QuantRecipe
from mindspeed_llm.models.config import ModelConfig

_INT64, _FP32 = 8, 4
_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch on one rank: kept through forward, and what backward of one recomputed layer adds."""

    kept: int
    recomputed: int

    @property
    def peak(self) -> int:
        return self.kept + self.recomputed


def activations(config: ModelConfig, plan: ParallelPlan, quantized: set[str], batch: int, sequence: int) -> Activations:
    """Bytes that a forward of `batch` x `sequence` tokens keeps.

    Args:
        quantized: full names of the modules whose GEMMs run on the plan's recipe.
    """
    size = _BYTES[plan.param_dtype]
    tokens = batch * sequence
    recipe = plan.quantization.recipe if plan.quantization else None
    kept = largest = 0
    for index in range(config.num_hidden_layers):
        name = f"model.layers.{index}"
        layer = _layer(config, plan, name, tokens, _input_bytes(recipe, quantized, size), size)
        if plan.recompute and covers(name, plan.recompute_modules):
            kept += tokens * config.hidden_size * size
            largest = max(largest, layer)
        else:
            kept += layer
    rotary = sequence * config.head_dim * _FP32  # cosines and sines, each of half the head
    # Final norm's input and its one number a row, the output projection's input, and the logits' gradient, which the
    # chunked loss makes in forward. The logits themselves are freed with it.
    head = tokens * (2 * config.hidden_size * size + _FP32 + config.vocab_size * size) + tokens * _INT64
    return Activations(kept + rotary + head, largest)


def _input_bytes(recipe: QuantRecipe | None, quantized: set[str], size: int) -> Callable[[str], float]:
    """Bytes an element of a projection's saved input: codes and scales, or the compute dtype."""

    def of(module: str) -> float:
        return recipe.inputs.bytes_per_element if module in quantized and recipe.inputs.is_quantized else size

    return of


def _layer(
    config: ModelConfig, plan: ParallelPlan, name: str, tokens: int, input_bytes: Callable[[str], float], size: int
) -> int:
    heads, kv_heads = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    hidden = config.hidden_size
    on_cpu = plan.device_type == "cpu"
    attention_size = _FP32 if on_cpu else size
    a_token = 2 * (hidden * size + _FP32)  # both norms: their input and one number a row
    a_token += _inputs(hidden, [f"{name}.self_attn.{p}_proj" for p in "qkv"], input_bytes, size)
    if config.qk_norm:
        a_token += (heads + kv_heads) * size
        a_token += (config.num_attention_heads + config.num_key_value_heads) * _FP32
    # Queries, keys, values and output of the attention, and its log-sum-exp a head.
    a_token += (2 * heads + 2 * kv_heads) * attention_size + config.num_attention_heads * _FP32
    a_token += heads * input_bytes(f"{name}.self_attn.o_proj")
    if size == attention_size and input_bytes(f"{name}.self_attn.o_proj") == size:
        a_token -= heads * size  # the projection keeps the attention's own output
    rest = 0
    if config.is_moe_layer(int(name.rpartition(".")[2])):
        per_token, rest = _experts(config, f"{name}.mlp", tokens, input_bytes, size)
        a_token += per_token
    else:
        inner = config.intermediate_size
        a_token += _inputs(hidden, [f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"], input_bytes, size)
        a_token += 2 * inner * size + inner * input_bytes(f"{name}.mlp.down_proj")
    return round(a_token * tokens + rest)


def _inputs(width: int, modules: list[str], input_bytes: Callable[[str], float], size: int) -> float:
    """Bytes a token of one tensor that several projections read: each keeps codes of its own, the others share it."""
    own = [input_bytes(module) for module in modules if input_bytes(module) != size]
    shared = size if len(own) < len(modules) else 0
    return width * (sum(own) + shared)


def _experts(
    config: ModelConfig, name: str, tokens: int, input_bytes: Callable[[str], float], size: int
) -> tuple[float, float]:
    """(bytes a token, bytes beside them) of a router and its experts."""
    k, inner = config.num_experts_per_tok, config.moe_intermediate_size
    a_token = config.hidden_size * size  # the router's input
    a_token += 2 * config.num_experts * _FP32 + _FP32  # probabilities; logits and their log-sum-exp
    a_token += k * (_INT64 + _FP32) + _FP32 * config.norm_topk_prob  # choices, weights, the sum they are divided by
    a_token += 3 * k * _INT64  # order of the pairs, and both directions of the dispatch
    gate_up, down = input_bytes(f"{name}.experts.gate_up_proj"), input_bytes(f"{name}.experts.down_proj")
    # SwiGLU keeps its input and the router's weights, the projections theirs.
    a_row = config.hidden_size * gate_up + 2 * inner * size + _FP32 + inner * down
    rows = tokens * k
    if gate_up != size or down != size:  # groups of any size are padded to whole blocks: by half a block on average
        rows += min(config.num_experts, rows) * (MX_BLOCK - 1) / 2
    return a_token, a_row * rows
