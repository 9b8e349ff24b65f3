"""What keeps experts evenly loaded during training, and how even they are: seen from the loop, one object.

Tokens of each expert are added up over a step's micro-batches and once over ranks; from that sum come the selection
biases' next step and the numbers in metrics.jsonl and TensorBoard. The auxiliary loss takes its shares from the global
batch, so that it is the same number in every layout.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from mindspeed_llm.models.decoder import CausalLMOutput
from mindspeed_llm.models.layers.router import load_statistics, update_selection_bias


class ExpertBalance:
    """The balancing of one model with experts; does nothing for a dense one.

    Args:
        aux_weight: of the auxiliary loss, which the loop adds itself; above 0, its shares are averaged over ranks.
        z_weight: of the router z-loss.
        bias_rate: by how much a step moves the selection biases; 0 for none.
    """

    def __init__(self, model: nn.Module, *, aux_weight: float, z_weight: float, bias_rate: float):
        self.model, self.z_weight, self.bias_rate = model, z_weight, bias_rate
        self.tokens_LE: Tensor | None = None
        if aux_weight and dist.get_world_size() > 1:
            model.average_over_ranks = _average_over_ranks

    def add(self, objective: Tensor, output: CausalLMOutput, micro_batches: int) -> Tensor:
        """Count the tokens of a micro-batch's experts; returns `objective` with the z-loss added."""
        if output.tokens_per_expert is None:
            return objective
        tokens_LE = output.tokens_per_expert.detach()
        self.tokens_LE = tokens_LE if self.tokens_LE is None else self.tokens_LE + tokens_LE
        return objective + self.z_weight / micro_batches * output.router_z_loss if self.z_weight else objective

    def finish_step(self) -> dict[str, float | list[float]]:
        """Move the biases; returns `router_*` numbers of the step and `tokens_per_expert`, summed over layers and
        ranks. A collective for a model with experts."""
        if self.tokens_LE is None:
            return {}
        tokens_LE, self.tokens_LE = self.tokens_LE, None
        dist.all_reduce(tokens_LE)
        if self.bias_rate:
            update_selection_bias(self.model, tokens_LE, self.bias_rate)
        statistics = {f"router_{name}": value for name, value in load_statistics(tokens_LE).items()}
        return {**statistics, "tokens_per_expert": tokens_LE.sum(0).tolist()}


def _average_over_ranks(share_E: Tensor) -> Tensor:
    average = share_E.detach().clone()
    dist.all_reduce(average)
    return average / dist.get_world_size()
