"""Mixture of experts: a router picks k experts a token, the token's copies are sorted by expert, two grouped GEMMs do
the work, the copies are added up.

The (token, expert) pairs are sorted once. From the sort come two index lists that undo each other: `token_of_pair` [P]
says which token a sorted pair copies, `pairs_of_token` [T, k] where a token's copies lie. Copying out and adding back
are each other's transpose, so both directions of both are plain gathers: deterministic on every device and fast on a
CPU, where `index_add` takes a row at a time. An expert without tokens has an empty group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp2.expert_parallel.grouped_linear import GroupedLinear
from fsdp2.matmul import Linear
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.layers.mlp import weighted_swiglu


class RouterLoad(NamedTuple):
    """What one layer's router did, for the balancing loss: the sum over tokens of its probabilities and the number of
    tokens it chose, both [E] fp32.
    """

    probability_sum: Tensor
    tokens_per_expert: Tensor


def _copy_out(x_TH: Tensor, token_of_pair: Tensor) -> Tensor:
    return x_TH.index_select(0, token_of_pair)


def _add_back(y_PH: Tensor, pairs_of_token: Tensor) -> Tensor:
    """Sum of every token's k rows; fp32 accumulation, one rounding."""
    if y_PH.device.type == "cpu":  # gathers and adds in one pass, ten times as fast; elsewhere not every dtype has it
        return F.embedding_bag(pairs_of_token, y_PH, mode="sum")
    tokens, k = pairs_of_token.shape
    return y_PH.index_select(0, pairs_of_token.view(-1)).view(tokens, k, -1).sum(1)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TH: Tensor, token_of_pair: Tensor, pairs_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(pairs_of_token)
        return _copy_out(x_TH, token_of_pair)

    @staticmethod
    def backward(ctx, dy_PH: Tensor):
        return _add_back(dy_PH, *ctx.saved_tensors), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y_PH: Tensor, token_of_pair: Tensor, pairs_of_token: Tensor) -> Tensor:
        ctx.save_for_backward(token_of_pair)
        return _add_back(y_PH, pairs_of_token)

    @staticmethod
    def backward(ctx, dx_TH: Tensor):
        return _copy_out(dx_TH, *ctx.saved_tensors), None, None


class Experts(nn.Module):
    """All experts of a layer: `forward(x_PH, counts_E, weights_P)` with the rows sorted by expert -> [P, hidden], every
    row times its router weight.
    """

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int, device=None):
        super().__init__()
        self.gate_up_proj = GroupedLinear(num_experts, hidden_size, 2 * intermediate_size, device=device)
        self.down_proj = GroupedLinear(num_experts, intermediate_size, hidden_size, device=device)

    def forward(self, x_PH: Tensor, counts_E: Tensor, weights_P: Tensor) -> Tensor:
        return self.down_proj(weighted_swiglu(self.gate_up_proj(x_PH, counts_E), weights_P), counts_E)


class MixtureOfExperts(nn.Module):
    """[B, S, hidden] -> ([B, S, hidden], RouterLoad). Router probabilities are a softmax over all experts in fp32; the
    k largest are the weights, divided by their sum when `norm_topk_prob`."""

    def __init__(self, config: ModelConfig, device=None):
        super().__init__()
        self.num_experts, self.top_k = config.num_experts, config.num_experts_per_tok
        self.normalize = config.norm_topk_prob
        self.gate = Linear(config.hidden_size, config.num_experts, bias=False, device=device)
        self.experts = Experts(config.num_experts, config.hidden_size, config.moe_intermediate_size, device=device)

    def forward(self, x_BSH: Tensor) -> tuple[Tensor, RouterLoad]:
        x_TH = x_BSH.flatten(0, 1)
        probabilities_TE = self.gate(x_TH).softmax(-1, dtype=torch.float32)
        weights_TK, experts_TK = probabilities_TE.topk(self.top_k, dim=-1)
        if self.normalize:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)

        expert_of_pair = experts_TK.flatten()
        order = expert_of_pair.argsort(stable=True)
        pairs_of_token = torch.empty_like(order)
        pairs_of_token[order] = torch.arange(order.numel(), device=order.device)
        pairs_of_token = pairs_of_token.view_as(experts_TK)
        token_of_pair = order.div(self.top_k, rounding_mode="floor")
        counts_E = order.new_zeros(self.num_experts).scatter_add_(0, expert_of_pair, torch.ones_like(order))

        rows_PH = _Dispatch.apply(x_TH, token_of_pair, pairs_of_token)
        y_PH = self.experts(rows_PH, counts_E, weights_TK.flatten()[order])
        y_TH = _Combine.apply(y_PH, token_of_pair, pairs_of_token)
        return y_TH.view_as(x_BSH), RouterLoad(probabilities_TE.sum(0), counts_E.float())


def load_balancing_loss(loads: list[RouterLoad], tokens: int) -> Tensor:
    """E * sum over experts of (share of tokens sent to it) * (its mean probability), both taken over all MoE layers
    together.

    This is transformers' `load_balancing_loss_func` (Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6): top_k when the
    load is even. Scalar, fp32, unscaled.
    """
    rows = tokens * len(loads)
    probability = torch.stack([load.probability_sum for load in loads]).sum(0) / rows
    share = torch.stack([load.tokens_per_expert for load in loads]).sum(0) / rows
    return probability.numel() * (probability * share).sum()
