"""A small model with linears, experts (some without tokens), a norm and a head, trained by the gather tests."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2.communication import counters
from fsdp2.engine import set_gradient_sync
from fsdp2.expert_parallel.grouped_linear import GroupedLinear
from fsdp2.gradients import clip_grad_norm_
from fsdp2.quantization import QuantRecipe

LAYERS, HIDDEN, INNER, EXPERTS = 3, 128, 256, 12
QUANTIZED_ELEMENTS = LAYERS * (HIDDEN * INNER * 2 + EXPERTS * HIDDEN * HIDDEN)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)
        self.experts = GroupedLinear(EXPERTS, HIDDEN, HIDDEN)

    def forward(self, x):
        y = self.down(torch.relu(self.up(self.norm(x)))).view(-1, HIDDEN)
        counts = torch.zeros(EXPERTS, dtype=torch.int64)  # fixed routing, some experts without tokens
        counts[0], counts[2], counts[EXPERTS - 1] = 5, 1, y.shape[0] - 6
        return x + self.experts(y, counts).view_as(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * 1.0


def plan_of(
    world: int, *, recipe="mxfp8", apply=("layers.{*}",), gather=True, mode="on-demand", replicate=1, **options
) -> fsdp2.ParallelPlan:
    quantization = None
    if recipe:
        quantization = fsdp2.QuantizationPlan(
            QuantRecipe.from_name(recipe),
            converters=("quantize.linear.mx", "quantize.moe.mx"),
            apply_modules=apply,
            ignored_modules=(),
            low_precision_all_gather=gather,
            all_gather_mode=mode,
        )
    return fsdp2.ParallelPlan(
        world,
        "cpu",
        world // replicate,
        dp_replicate_size=replicate,
        fsdp_modules=("layers.{*}",),
        recompute_modules=("layers.{*}",),
        quantization=quantization,
        **options,
    )


def train(
    plan: fsdp2.ParallelPlan, steps: int = 3, global_batch: int = 12, accumulate: int = 1, each_step=lambda step: None
) -> dict:
    """Train on the same global batches in every layout; returns losses, gradient norms and the last step's counts."""
    torch.manual_seed(0)
    model = fsdp2.parallelize(Model(), plan)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses, norms = [], []
    for step in range(steps):
        batch = torch.randn(global_batch, 8, HIDDEN, generator=torch.Generator().manual_seed(step))
        mine = batch.chunk(plan.world_size)[dist.get_rank()].chunk(accumulate)
        total = torch.zeros(())
        for index, x in enumerate(mine):
            set_gradient_sync(model, index == accumulate - 1)
            loss = (model(x).float() - x.flip(-1)).square().mean() / accumulate
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / plan.world_size)
        norms.append(clip_grad_norm_(model, 1.0))
        optimizer.step()
        optimizer.zero_grad()
        counts = counters(model).take()
        each_step(step)
    weights = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    return {"losses": losses, "norms": norms, "counts": counts, "weights": weights}
