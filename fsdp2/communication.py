"""Every collective that moves parameters or gradients goes through here and is counted.

FSDP2 lets an object replace its all-gather and its reduce-scatter; ours call the same collectives and add up the bytes
this rank sends into them: its shard, once per gather, by phase, and the input of the reduce-scatter. A run therefore
shows what is on the wire, not what was meant to be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import torch_private


class Counters:
    """Bytes this rank sent since the last `take`, and the largest total of gathered parameters alive at once.

    `all_gather_bytes_*` count whole gathers; the `_quantized` part is what quantized weights sent in them, and
    `quantized_elements` how many weight elements that was, from which the bytes of the same gathers in bf16 follow.
    """

    def __init__(self, groups: Sequence[Any]):
        self._groups = tuple(groups)
        self._reset()

    def _reset(self) -> None:
        self.all_gather_bytes = {"forward": 0, "backward": 0}
        self.quantized_bytes = {"forward": 0, "backward": 0}
        self.quantized_elements = 0
        self.reduce_scatter_bytes = 0
        self.unsharded_bytes_peak = 0

    def add_quantized_gather(self, phase: str, sent: int, elements: int) -> None:
        """A quantized weight contributed `sent` bytes for `elements` values of its shard to a gather of `phase`."""
        self.quantized_bytes[phase] += sent
        self.quantized_elements += elements

    def sample_unsharded(self, copying_out: Any = None) -> None:
        """Look at the gathered parameters alive now; `copying_out` is a group whose gather is being copied out and does
        not call itself unsharded yet."""
        alive = sum(
            torch_private.live_gathered_bytes(g)
            for g in self._groups
            if g is copying_out or torch_private.is_unsharded(g)
        )
        self.unsharded_bytes_peak = max(self.unsharded_bytes_peak, alive)

    def take(self) -> dict[str, int]:
        """The counts by the names of `metrics.jsonl`, and start again from zero."""
        total = sum(self.all_gather_bytes.values())
        counts = {f"all_gather_bytes_{phase}": self.all_gather_bytes[phase] for phase in ("forward", "backward")}
        counts |= {
            f"all_gather_bytes_{phase}_quantized": self.quantized_bytes[phase] for phase in ("forward", "backward")
        }
        counts["all_gather_bytes_if_bf16"] = total - sum(self.quantized_bytes.values()) + 2 * self.quantized_elements
        counts["reduce_scatter_bytes"] = self.reduce_scatter_bytes
        counts["unsharded_bytes_peak"] = self.unsharded_bytes_peak
        self._reset()
        return counts


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CountedAllGather(_Allocates):
    """FSDP2's all-gather of one parameter group, counted by the phase the group is in."""

    def __init__(self, counters: Counters, group: Any):
        self._counters, self._group = counters, group

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False):
        phase = "backward" if torch_private.is_backward(self._group) else "forward"
        self._counters.all_gather_bytes[phase] += input_tensor.nbytes
        self._counters.sample_unsharded()
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class CountedReduceScatter(_Allocates):
    """FSDP2's reduce-scatter of one parameter group, counted."""

    def __init__(self, counters: Counters):
        self._counters = counters

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op, async_op: bool = False
    ):
        self._counters.reduce_scatter_bytes += input_tensor.nbytes
        return dist.reduce_scatter_single(
            output=output_tensor, input=input_tensor, group=group, op=op, async_op=async_op
        )


def count_communication(model: nn.Module) -> Counters:
    """Send every collective of the FSDP units of `model` through counted ones, and keep their counters on the model."""
    model.communication_counters = counters = Counters(list(torch_private.param_groups(model)))
    for module in model.modules():
        if isinstance(module, torch_private.FSDPModule):
            for group in torch_private.own_param_groups(module):
                module.set_custom_all_gather(CountedAllGather(counters, group))
                module.set_custom_reduce_scatter(CountedReduceScatter(counters))
            # FSDP's own pre-hook gathers; ours is registered after it and sees the result.
            module.register_forward_pre_hook(lambda *_: counters.sample_unsharded())
    return counters


def counters(model: nn.Module) -> Counters:
    """The counters of a model that `parallelize` returned."""
    found = getattr(model, "communication_counters", None)
    if found is None:
        raise ValueError("the model has no communication counters: pass what fsdp2.parallelize returned")
    return found
