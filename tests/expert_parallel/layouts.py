"""What every rank does in the tests of this folder: train the same tiny Qwen3-MoE on the same global batches in one
layout after the other, and give back losses, norms, whole gradients and bytes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import fsdp2
from fsdp2.communication import counters
from fsdp2.engine import set_gradient_sync
from fsdp2.gradients import clip_grad_norm_
from fsdp2.quantization import QuantRecipe
from mindspeed_llm.models import build_model, initialize_weights
from mindspeed_llm.models.layers.router import configure_routing
from mindspeed_llm.models.local_shard import whole_tensor
from mindspeed_llm.training.expert_balance import ExpertBalance

EXPERTS = 8
CONFIG = {
    "model_type": "qwen3_moe",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
LAYOUTS = {
    "fsdp 4": {"fsdp_size": 4},
    "ep 2 x ep_fsdp 2": {"fsdp_size": 4, "ep_size": 2, "ep_fsdp_size": 2},
    "ep 4": {"fsdp_size": 4, "ep_size": 4},
    "dp_replicate 2 x fsdp 2": {"fsdp_size": 2, "dp_replicate_size": 2},
    "dp_replicate 2 x fsdp 2, ep 2, replicas 2": {"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2},
    "ep_fsdp 2, replicas 2": {"fsdp_size": 4, "ep_fsdp_size": 2},
}


def plan_of(world: int, *, recipe: str | None = None, gather: bool = True, **options) -> fsdp2.ParallelPlan:
    quantization = None
    if recipe:
        quantization = fsdp2.QuantizationPlan(
            QuantRecipe.from_name(recipe),
            converters=("quantize.linear.mx", "quantize.moe.mx"),
            low_precision_all_gather=gather,
        )
    options = {"fsdp_size": world, "param_dtype": "bf16" if recipe else "fp32"} | options
    return fsdp2.ParallelPlan(world, "cpu", quantization=quantization, **options)


def batch_of(step: int, length: int, sequences: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, CONFIG["vocab_size"], (sequences, length + 1), generator=generator)


def train(
    plan: fsdp2.ParallelPlan,
    steps: int = 10,
    accumulate: int = 1,
    config: dict | None = None,
    length: int = 16,
    balance: dict | None = None,
) -> dict:
    """Losses, gradient norms, the whole gradients of the first step, the counts of the last, the final weights."""
    config = CONFIG | (config or {})
    balance = {"aux_weight": 0.0, "z_weight": 0.0, "bias_rate": 0.0} | (balance or {})
    model = build_model(config)
    configure_routing(model, balance_by_bias=balance["bias_rate"] > 0)
    model = fsdp2.parallelize(model, plan)
    initialize_weights(model, seed=3)
    experts = ExpertBalance(model, **balance)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses, norms, gradients = [], [], {}
    for step in range(steps):
        batch = batch_of(step, length)
        tokens = batch[:, 1:].numel()
        mine = batch.chunk(plan.world_size)[dist.get_rank()].chunk(accumulate)
        total = torch.zeros(())
        for index, ids in enumerate(mine):
            set_gradient_sync(model, index == accumulate - 1)
            output = model(ids[:, :-1])
            logits = output.logits.float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
            objective = loss * plan.world_size / tokens + balance["aux_weight"] / accumulate * output.router_aux_loss
            experts.add(objective, output, accumulate).backward()
            total += loss.detach() / tokens
        dist.all_reduce(total)
        losses.append(total.item())
        if step == 0:
            gradients = {name: whole_tensor(p.grad).clone() for name, p in model.named_parameters()}
        norms.append(clip_grad_norm_(model, 1.0))
        optimizer.step()
        optimizer.zero_grad()
        load = experts.finish_step()
        counts = counters(model).take()
    weights = {name: whole_tensor(p).clone() for name, p in model.named_parameters()}
    return {
        "losses": losses,
        "norms": norms,
        "gradients": gradients,
        "counts": counts,
        "weights": weights,
        "load": load,
    }


def train_layouts(
    layouts: dict[str, dict], options: dict, settings: dict, steps: dict[str, int] | None = None
) -> dict[str, dict]:
    """`train` in every layout, with the plan's `options` and the `settings` of `train` in all of them, for `steps` of
    each; rank 0 answers."""
    world, results = dist.get_world_size(), {}
    for name, layout in layouts.items():
        of_layout = {"steps": steps[name]} if steps else {}
        results[name] = train(plan_of(world, **options | layout), **settings | of_layout)
    return results if dist.get_rank() == 0 else {}
