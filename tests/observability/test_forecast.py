"""The forecast's numbers are those that real sharded steps measure: bytes of collectives, state, gathered memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fsdp2 import parallelize
from fsdp2.communication import counters
from fsdp2.engine import set_gradient_sync
from fsdp2.forecast import forecast
from fsdp2.plan import ParallelPlan, QuantizationPlan
from fsdp2.quantization import QuantRecipe
from mindspeed_llm.models import build_model, initialize_weights
from tests.processes import run_processes

MODEL = {
    "model_type": "qwen3_moe",
    "vocab_size": 330,  # no multiple of any number of ranks here
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": False,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [1],
    "norm_topk_prob": True,
}
MICRO_BATCHES = 2


def plan_of(world_size: int, **changes) -> ParallelPlan:
    quantized = changes.pop("recipe", "mxfp8")
    mode = changes.pop("mode", "on-demand")
    quantization = None
    if quantized:
        quantization = QuantizationPlan(
            QuantRecipe.from_name(quantized),
            converters=("quantize.linear.mx", "quantize.moe.mx"),
            all_gather_mode=mode,
        )
    options = {"fsdp_size": world_size, "recompute_modules": ("model.layers.{*}",), "quantization": quantization}
    return ParallelPlan(world_size=world_size, device_type="cpu", **(options | changes))


VARIANTS = {
    "mxfp8": {},
    "bf16": {"recipe": None},
    "tiles": {"recipe": "mxfp8-32x32"},
    "all": {"mode": "all"},
    "recompute": {"recompute": True},
    "stay": {"reshard_after_forward": False},
    "bf16 stay": {"recipe": None, "reshard_after_forward": False},
    "low precision reduction": {"low_precision_reduce_scatter": "mxfp8"},
    "bf16 reduction": {"reduce_dtype": "bf16"},
    "columns": {"recipe": None, "shard_placement": "shard_by_dim_1"},
    "no prefetch": {"num_to_forward_prefetch": 0, "num_to_backward_prefetch": 0},
}


def _measure(variants: dict[str, dict]) -> dict[str, dict]:
    measured = {}
    for name, changes in variants.items():
        changes = dict(changes)
        model = parallelize(build_model(MODEL), plan_of(dist.get_world_size(), **changes))
        initialize_weights(model, 0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for index in range(MICRO_BATCHES):
            set_gradient_sync(model, index == MICRO_BATCHES - 1)
            model(torch.arange(96).view(2, 48)).logits.float().square().mean().backward()
        local = [p.to_local() for p in model.parameters()]
        measured[name] = counters(model).take() | {
            "masters": sum(p.nbytes for p in local),
            "gradients": sum(p.grad.to_local().nbytes for p in model.parameters()),
        }
        optimizer.step()
        moments = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        measured[name]["optimizer"] = sum(m.to_local().nbytes for m in moments)
    return measured


def _compare(measured: dict[str, dict], variants: dict[str, dict], world_size: int) -> None:
    for name, changes in variants.items():
        expected = forecast(build_model(MODEL), plan_of(world_size, **dict(changes)), MICRO_BATCHES)
        found = measured[name]
        for key in ("all_gather_bytes_forward", "all_gather_bytes_backward", "reduce_scatter_bytes"):
            assert getattr(expected.collectives, key) == found[key], (name, key)
        assert expected.collectives.all_reduce_bytes == found["all_reduce_bytes"], name
        for key in ("masters", "gradients", "optimizer"):
            assert getattr(expected.state, key) == found[key], (name, key)
        assert expected.state.gathered_peak == found["unsharded_bytes_peak"], name


@pytest.mark.parametrize("world_size", [1, 2])
def test_bytes_and_memory_are_the_measured_ones(world_size):
    variants = VARIANTS if world_size == 2 else {name: VARIANTS[name] for name in ("mxfp8",)}
    _compare(run_processes(_measure, world_size, variants)[0], variants, world_size)


def test_hybrid_sharding_and_experts_meshes():
    variants = {
        "hybrid": {"fsdp_size": 2, "dp_replicate_size": 2},
        "experts": {"ep_size": 2, "ep_fsdp_size": 2, "expert_shard_placement": "shard_by_dim_0"},
        "replicated experts": {"recipe": None, "ep_size": 2, "ep_fsdp_size": 1},
    }
    _compare(run_processes(_measure, 4, variants)[0], variants, 4)
