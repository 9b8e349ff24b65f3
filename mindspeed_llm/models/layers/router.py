"""The router: which k experts a token goes to, with which weights, and what keeps the experts evenly loaded.

    scores     softmax over all experts, or a sigmoid for each (DeepSeek-V3), in fp32
    selection  the k largest scores plus a bias that only selects (DeepSeek-V3, arXiv:2412.19437, section 2.1.2: after
               a step the bias of an overloaded expert falls by a fixed rate, that of an underloaded one rises); or,
               fixed, experts in turn, so that a measurement does not depend on what the router has learned
    weights    the chosen scores, divided by their sum where the model normalizes

What is measured on the way feeds the auxiliary loss (`load_balancing_loss`) and the z-loss (ST-MoE, arXiv:2202.08906,
eq. 5), which keeps logits small.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn


class RouterLoad(NamedTuple):
    """What one layer's router did: the sum over tokens of its probabilities and the tokens that each expert got, both
    [E] fp32, and the sum over tokens of squared log-sum-exp of the logits, a scalar."""

    probability_sum: Tensor
    tokens_per_expert: Tensor
    z_sum: Tensor


class Routing(nn.Module):
    """Logits [T, E] -> (weights [T, k] fp32, experts [T, k] int64, probabilities [T, E] fp32).

    Args:
        score_function: "softmax" or "sigmoid".
        normalize: divide the k weights by their sum.
    """

    def __init__(self, num_experts: int, top_k: int, score_function: str, normalize: bool):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.score_function, self.normalize = score_function, normalize
        self.fixed = False
        self.register_buffer("selection_bias", None)

    def balance_by_bias(self, device: torch.device | str) -> None:
        """From now on select with a bias [E] fp32, zero at first, that `update_selection_bias` moves."""
        self.register_buffer("selection_bias", torch.zeros(self.num_experts, dtype=torch.float32, device=device))

    def reset_buffers(self) -> None:
        """Zero the bias."""
        if self.selection_bias is not None:
            self.selection_bias.zero_()

    def forward(self, logits_TE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE = logits_TE.float()
        if self.score_function == "sigmoid":
            scores_TE = logits_TE.sigmoid()
            probabilities_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
        else:
            scores_TE = probabilities_TE = logits_TE.softmax(-1)
        if self.fixed:
            pairs = torch.arange(scores_TE.shape[0] * self.top_k, device=scores_TE.device)
            experts_TK = (pairs % self.num_experts).view(-1, self.top_k)
            weights_TK = scores_TE.gather(1, experts_TK)
        elif self.selection_bias is not None:
            experts_TK = (scores_TE.detach() + self.selection_bias).topk(self.top_k, dim=-1).indices
            weights_TK = scores_TE.gather(1, experts_TK)
        else:
            weights_TK, experts_TK = scores_TE.topk(self.top_k, dim=-1)
        if self.normalize:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return weights_TK, experts_TK, probabilities_TE


def configure_routing(model: nn.Module, *, fixed: bool = False, balance_by_bias: bool = False) -> None:
    """Set every router of `model` (on the meta device or with storage; before it is sharded) to what a run asks for."""
    for module in model.modules():
        if isinstance(module, Routing):
            module.fixed = fixed
            if balance_by_bias:
                module.balance_by_bias(next(model.parameters()).device)


@torch.no_grad()
def update_selection_bias(model: nn.Module, tokens_LE: Tensor, rate: float) -> None:
    """After a step: lower the bias of experts that got more than the mean of their layer by `rate`, raise the others.

    Args:
        tokens_LE: tokens of each expert in each MoE layer, over all ranks and micro-batches of the step.
    """
    routers = [module for module in model.modules() if isinstance(module, Routing)]
    for router, tokens_E in zip(routers, tokens_LE, strict=True):
        router.selection_bias += rate * (tokens_E.mean() - tokens_E).sign().to(router.selection_bias)


def load_balancing_loss(
    loads: list[RouterLoad], tokens: int, average_over_ranks: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """E * sum over experts of (share of tokens sent to it) * (its mean probability), both taken over all MoE layers
    together.

    This is transformers' `load_balancing_loss_func` (Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6): top_k when the
    load is even. Scalar, fp32, unscaled. With `average_over_ranks` the share is that of the global batch (Qiu et al.
    2025, arXiv:2501.11873); the mean over ranks is then the loss of one rank with all tokens.
    """
    rows = tokens * len(loads)
    probability = torch.stack([load.probability_sum for load in loads]).sum(0) / rows
    share = torch.stack([load.tokens_per_expert for load in loads]).sum(0) / rows
    if average_over_ranks is not None:
        share = average_over_ranks(share)
    return probability.numel() * (probability * share).sum()


def router_z_loss(loads: list[RouterLoad], tokens: int) -> Tensor:
    """Mean over tokens and MoE layers of squared log-sum-exp of the router's logits. Scalar, fp32, unscaled."""
    return torch.stack([load.z_sum for load in loads]).sum() / (tokens * len(loads))


def load_statistics(tokens_LE: Tensor) -> dict[str, float]:
    """How even the load is, over the layers of a model: `load_entropy`, 1 when all experts of a layer got equally many,
    0 when one got all (mean of the layers); `load_max_over_mean`, the fullest expert's load over its layer's mean (the
    worst layer); `dropped_tokens`, 0: every token reaches all its experts."""
    share_LE = tokens_LE.double() / tokens_LE.sum(-1, keepdim=True).clamp(min=1)
    experts = tokens_LE.shape[-1]
    entropy = -torch.special.xlogy(share_LE, share_LE).sum(-1) / max(math.log(experts), 1e-9)
    return {
        "load_entropy": entropy.mean().item(),
        "load_max_over_mean": (share_LE.amax(-1) * experts).max().item(),
        "dropped_tokens": 0.0,
    }
