"""Mixture of experts: a router picks k experts a token, the token's copies are sorted by expert, two grouped GEMMs do
the work, the copies are added up.

The (token, expert) pairs are sorted once. From the sort come two index lists that undo each other: `token_of_row` [P]
says which token a sorted row copies, `rows_of_token` [T, k] where a token's copies lie. Copying out and adding back
are each other's transpose, so both directions of both are plain gathers: deterministic on every device and fast on a
CPU, where `index_add` takes a row at a time. An expert without tokens has an empty group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2.expert_parallel.grouped_linear import GroupedLinear, rows_a_group
from fsdp2.matmul import Linear
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.layers.mlp import weighted_swiglu
from mindspeed_llm.models.layers.router import RouterLoad, Routing


class SortedPairs(NamedTuple):
    """The (token, expert) pairs of a layer, sorted by expert, each expert's padded to whole blocks where its GEMMs want
    that (rows without a pair are zero).

    `token_of_row` [P] is the token that a row copies, or T for none; `rows_of_token` [T, k] where a token's copies lie;
    `counts` and `rows_of_expert` [E] the tokens of an expert and its rows, padding included; `experts_TK` is the
    unsorted choice.
    """

    token_of_row: Tensor
    rows_of_token: Tensor
    counts: Tensor
    rows_of_expert: Tensor
    padded: bool
    experts_TK: Tensor

    @classmethod
    def of(cls, experts_TK: Tensor, num_experts: int, block: int) -> SortedPairs:
        tokens, top_k = experts_TK.shape
        expert_of_pair = experts_TK.flatten()
        order = expert_of_pair.argsort(stable=True)
        counts = order.new_zeros(num_experts).scatter_add_(0, expert_of_pair, torch.ones_like(order))
        row = torch.arange(order.numel(), device=order.device)
        padded_counts, total = counts, order.numel()
        if block > 1:
            padded_counts = -(-counts // block) * block
            before = (padded_counts.cumsum(0) - padded_counts) - (counts.cumsum(0) - counts)
            row = row + before[expert_of_pair[order]]
            total = int(padded_counts.sum())
        rows_of_token = torch.empty_like(order)
        rows_of_token[order] = row
        token = order.div(top_k, rounding_mode="floor")
        padded = total != order.numel()
        token_of_row = order.new_full((total,), tokens).index_copy_(0, row, token) if padded else token
        return cls(token_of_row, rows_of_token.view_as(experts_TK), counts, padded_counts, padded, experts_TK)

    def values(self, values_TK: Tensor) -> Tensor:
        """[T, k] values of the pairs -> [P] of the rows."""
        values = values_TK.new_zeros(self.token_of_row.shape[0])
        return values.index_put((self.rows_of_token.flatten(),), values_TK.flatten())

    def copy_out(self, x_TH: Tensor) -> Tensor:
        """[T, H] -> [P, H]."""
        source = torch.cat([x_TH, x_TH.new_zeros(1, x_TH.shape[1])]) if self.padded else x_TH
        return source.index_select(0, self.token_of_row)

    def add_back(self, y_PH: Tensor) -> Tensor:
        """[P, H] -> [T, H], the sum of every token's k rows; fp32 accumulation, one rounding."""
        if y_PH.device.type == "cpu":  # gathers and adds in one pass, ten times as fast; elsewhere not for every dtype
            return F.embedding_bag(self.rows_of_token, y_PH, mode="sum")
        tokens, k = self.rows_of_token.shape
        return y_PH.index_select(0, self.rows_of_token.view(-1)).view(tokens, k, -1).sum(1)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH: Tensor, pairs: SortedPairs) -> Tensor:
        ctx.pairs = pairs
        return pairs.copy_out(x_TH)

    @staticmethod
    def backward(ctx, dy_PH: Tensor):
        return ctx.pairs.add_back(dy_PH), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_PH: Tensor, pairs: SortedPairs) -> Tensor:
        ctx.pairs = pairs
        return pairs.add_back(y_PH)

    @staticmethod
    def backward(ctx, dx_TH: Tensor):
        return ctx.pairs.copy_out(dx_TH), None


def dispatch(x_TH: Tensor, pairs: SortedPairs) -> Tensor:
    """[T, H] -> [P, H], a copy of its token in every row."""
    return _Dispatch.apply(x_TH, pairs)


def combine(y_PH: Tensor, pairs: SortedPairs) -> Tensor:
    """[P, H] -> [T, H], the sum of every token's rows."""
    return _Combine.apply(y_PH, pairs)


class Experts(nn.Module):
    """All experts of a layer: `forward(x_PH, counts_E, weights_P)` with the rows sorted by expert -> [P, hidden], every
    row times its router weight.
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, device=None):
        super().__init__()
        self.gate_up_proj = GroupedLinear(num_experts, hidden_size, 2 * intermediate_size, device=device)
        self.down_proj = GroupedLinear(num_experts, intermediate_size, hidden_size, device=device)
        self.activate = weighted_swiglu

    def forward(self, x_PH: Tensor, counts_E: Tensor, weights_P: Tensor) -> Tensor:
        return self.down_proj(self.activate(self.gate_up_proj(x_PH, counts_E), weights_P), counts_E)


class MixtureOfExperts(nn.Module):
    """[B, S, hidden] -> ([B, S, hidden], RouterLoad); `routing` says which experts a token goes to."""

    def __init__(self, config: ModelConfig, device=None):
        super().__init__()
        self.num_experts = config.num_experts
        self.dispatch, self.combine = dispatch, combine
        self.gate = Linear(config.hidden_size, config.num_experts, bias=False, device=device)
        self.routing = Routing(
            config.num_experts, config.num_experts_per_tok, config.scoring_func, config.norm_topk_prob
        )
        self.experts = Experts(config.num_experts, config.hidden_size, config.moe_intermediate_size, device=device)

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, RouterLoad]:
        x_TH = x_BSH.flatten(0, 1)
        logits_TE = self.gate(x_TH)
        weights_TK, experts_TK, probabilities_TE = self.routing(logits_TE)
        pairs = SortedPairs.of(experts_TK, self.num_experts, rows_a_group(self.experts))
        rows_PH = self.dispatch(x_TH, pairs)
        y_PH = self.experts(rows_PH, pairs.rows_of_expert, pairs.values(weights_TK))
        y_TH = self.combine(y_PH, pairs)
        z_sum = logits_TE.float().logsumexp(-1).square().sum()
        return y_TH.view_as(x_BSH), RouterLoad(probabilities_TE.sum(0), pairs.counts.float(), z_sum)
