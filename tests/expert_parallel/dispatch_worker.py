"""What every rank does in test_dispatch.py: run one expert module over four ranks on rows that it chooses."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2.quantization import QuantRecipe
from mindspeed_llm.models.layers.moe import Experts

EXPERTS, HIDDEN, INNER, RANKS = 8, 64, 32, 4

# Rows of each expert on each rank.
CASES = {
    "even": [[3] * EXPERTS] * RANKS,
    "uneven": [[(7 * rank + 5 * expert) % 9 for expert in range(EXPERTS)] for rank in range(RANKS)],
    "all to one expert": [[0] * 5 + [40 + rank] + [0] * 2 for rank in range(RANKS)],
    "a rank without tokens": [[0] * EXPERTS if rank == 1 else [4] * EXPERTS for rank in range(RANKS)],
    "one token": [[0, 0, 1] + [0] * 5 if rank == 3 else [0] * EXPERTS for rank in range(RANKS)],
    "no token at all": [[0] * EXPERTS] * RANKS,
    "every token to every expert": [[5] * EXPERTS] * RANKS,
}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.experts = Experts(EXPERTS, HIDDEN, INNER)

    def forward(self, rows, counts, weights):
        return self.experts(rows * self.scale, counts, weights)


def inputs(case: str, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, counts, weights and the gradient of the output, of one rank."""
    counts = torch.tensor(CASES[case][rank])
    generator = torch.Generator().manual_seed(100 + rank)
    rows = torch.randn(int(counts.sum()), HIDDEN, generator=generator)
    weights = torch.rand(rows.shape[0], generator=generator)
    return rows, counts, weights, torch.randn(rows.shape, generator=generator)


def layer() -> Layer:
    torch.manual_seed(0)
    return Layer()


def run_cases(cases: list[str], recipe: str | None, options: dict) -> dict[str, dict[str, torch.Tensor]]:
    """Outputs, input gradients and whole weight gradients (averaged over ranks, as FSDP does) of every case."""
    quantization = recipe and fsdp2.QuantizationPlan(
        QuantRecipe.from_name(recipe),
        converters=("quantize.moe.mx",),
        apply_modules=("experts",),
        ignored_modules=(),
    )
    world = dist.get_world_size()
    plan = fsdp2.ParallelPlan(
        world,
        "cpu",
        world,
        fsdp_modules=(),
        param_dtype="bf16" if recipe else "fp32",
        quantization=quantization or None,
        ep_modules=("experts",),
        ep_fsdp_modules=("experts",),
        **options,
    )
    model, results = fsdp2.parallelize(layer(), plan), {}
    for case in cases:
        rows, counts, weights, dy = inputs(case, dist.get_rank())
        rows, weights = rows.requires_grad_(), weights.requires_grad_()
        y = model(rows, counts, weights)
        y.backward(dy.to(y.dtype))
        gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
        results[case] = {"y": y.detach(), "rows": rows.grad, "weights": weights.grad, **gradients}
        model.zero_grad()
    return results
