"""Every collective that moves parameters or gradients goes through here and is counted.

FSDP2 lets an object replace its all-gather and its reduce-scatter; ours call the same collectives and add up the bytes
this rank sends into them: its shard, once per gather, by phase, and the input of the reduce-scatter. A run therefore
shows what is on the wire, not what was meant to be.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import torch_private
from fsdp2.quantization.mx import MXTensor, quantize

if TYPE_CHECKING:
    from fsdp2.expert_parallel.layout import ExpertLayout

PHASES = ("forward", "backward")


class Counters:
    """What this rank sent since the last `take`, and the largest total of gathered parameters alive at once.

    `all_gather_bytes_*` count whole gathers; the `_quantized` part is what quantized weights sent in them, and
    `quantized_elements` how many weight elements that was, from which the bytes of the same gathers in bf16 follow.
    `expert_dispatch_*` are token rows on the way to their experts (in backward, gradients of the experts' outputs),
    `expert_combine_*` what comes back.
    """

    def __init__(self, groups: Sequence[Any], has_expert_units: bool = False):
        self._groups, self._has_expert_units = tuple(groups), has_expert_units
        self._reset()

    def _reset(self) -> None:
        self.sent: dict[tuple[str, str], list[int]] = {}  # (collective and phase, dtype on the wire) -> [calls, bytes]
        self.quantized_bytes = {"forward": 0, "backward": 0}
        self.quantized_elements = 0
        self.weights_quantized = 0
        self.unsharded_bytes_peak = 0
        self.dispatch_bytes_if_bf16 = 0
        self.expert_all_gather_bytes = 0 if self._has_expert_units else None  # of units on the experts' mesh

    def add(self, collective: str, sent: Tensor) -> None:
        """This rank hands `sent` to one call of `collective` ("all_gather_forward", "reduce_scatter", ...)."""
        count = self.sent.setdefault((collective, str(sent.dtype).removeprefix("torch.")), [0, 0])
        count[0] += 1
        count[1] += sent.nbytes

    def add_quantized_gather(self, phase: str, sent: int, elements: int) -> None:
        """A quantized weight contributed `sent` bytes for `elements` values of its shard to a gather of `phase`."""
        self.quantized_bytes[phase] += sent
        self.quantized_elements += elements

    def sample_unsharded(self, copying_out: Any = None) -> None:
        """Look at the gathered parameters alive now; `copying_out` is a group whose gather is being copied out and does
        not call itself unsharded yet."""
        alive = sum(
            torch_private.live_gathered_bytes(group)
            for group in self._groups
            if group is copying_out or torch_private.is_unsharded(group)
        )
        self.unsharded_bytes_peak = max(self.unsharded_bytes_peak, alive)

    def _total(self, collective: str, what: int) -> int:
        return sum(count[what] for (name, _), count in self.sent.items() if name == collective)

    def take(self) -> dict[str, int]:
        """The counts by the names of `metrics.jsonl`, and start again from zero."""
        counts = {}
        for what, unit in enumerate(("calls", "bytes")):
            counts |= {f"all_gather_{unit}_{phase}": self._total(f"all_gather_{phase}", what) for phase in PHASES}
            counts |= {f"{name}_{unit}": self._total(name, what) for name in ("reduce_scatter", "all_reduce")}
        for (name, dtype), (_, sent) in sorted(self.sent.items()):
            counts[f"sent_{dtype}_bytes_{name}"] = sent
        counts |= {f"all_gather_bytes_{phase}_quantized": self.quantized_bytes[phase] for phase in PHASES}
        gathered = counts["all_gather_bytes_forward"] + counts["all_gather_bytes_backward"]
        counts["all_gather_bytes_if_bf16"] = gathered - sum(self.quantized_bytes.values()) + 2 * self.quantized_elements
        if any(name.startswith("expert_dispatch") for name, _ in self.sent):
            for name in ("expert_dispatch", "expert_combine"):
                counts[f"{name}_bytes"] = sum(self._total(f"{name}_{phase}", 1) for phase in PHASES)
            counts["expert_dispatch_bytes_if_bf16"] = self.dispatch_bytes_if_bf16
        if self.expert_all_gather_bytes is not None:
            counts["expert_all_gather_bytes"] = self.expert_all_gather_bytes
        counts["weights_quantized"] = self.weights_quantized
        counts["unsharded_bytes_peak"] = self.unsharded_bytes_peak
        self._reset()
        return counts


class _Allocates:
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CountedAllGather(_Allocates):
    """FSDP2's all-gather of one parameter group, counted by the phase the group is in."""

    def __init__(self, counters: Counters, group: Any, of_experts: bool = False):
        self._counters, self._group, self._of_experts = counters, group, of_experts

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False):
        self._counters.add(
            f"all_gather_{'backward' if torch_private.is_backward(self._group) else 'forward'}", input_tensor
        )
        if self._of_experts:
            self._counters.expert_all_gather_bytes += input_tensor.nbytes
        self._counters.sample_unsharded()
        return dist.all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)


class CountedReduceScatter(_Allocates):
    """FSDP2's reduce-scatter of one parameter group, counted: the sum of `input_tensor` [ranks * n] over the ranks, of
    which this rank's part goes to `output_tensor` [n]."""

    def __init__(self, counters: Counters):
        self._counters = counters

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op, async_op: bool = False
    ):
        output, input = output_tensor, input_tensor
        self._counters.add("reduce_scatter", input)
        if input.device.type != "cpu":
            return dist.reduce_scatter_single(output=output, input=input, group=group, op=op, async_op=async_op)
        _check_operation(op)
        # gloo's own reduce-scatter puts twice these bytes on the wire (measured on two hosts: 4 bytes an element where
        # an exchange of the parts sends 2); sums are in the order of the ranks.
        received = torch.empty_like(input)
        dist.all_to_all_single(received, input, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, out=output)
        if op == dist.ReduceOp.AVG:
            output /= group.size()
        return None


def _check_operation(op: dist.ReduceOp) -> None:
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise NotImplementedError(f"this reduce-scatter adds or averages, it cannot {op}")


class QuantizedReduceScatter(CountedReduceScatter):
    """Gradients travel as E4M3 codes with an E8M0 scale per 32 values: 1.03125 bytes an element, where fp32 takes 4.

    Every rank quantizes each owner's part once and sends it in one all-to-all; the owner adds the dequantized parts and
    its own, exact one, in fp32 and in the order of the ranks. Nothing is quantized twice, so the error does not grow
    with the number of ranks. The scale is rounded up (`rceil`): a saturated gradient would be a biased one.
    """

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op, async_op: bool = False
    ):
        output, input = output_tensor, input_tensor
        _check_operation(op)
        ranks, mine = group.size(), group.rank()
        parts = input.view(ranks, -1)
        quantized = quantize(parts, scale_rule="rceil")
        sent = torch.cat([quantized.codes, quantized.scales], dim=1)
        received = torch.empty_like(sent)
        self._counters.add("reduce_scatter", sent)
        dist.all_to_all_single(received, sent, group=group)
        codes, scales = received.split([quantized.codes.shape[1], quantized.scales.shape[1]], dim=1)
        total = torch.zeros_like(output, dtype=torch.float32)
        for rank in range(ranks):
            if rank == mine:
                total += parts[mine]
            else:
                total += MXTensor(codes[rank], scales[rank], "E4M3", (1, 32), -1, output.shape).dequantize(
                    torch.float32
                )
        output.copy_(total / ranks if op == dist.ReduceOp.AVG else total)


def count_communication(
    model: nn.Module, reduce_scatter: str = "none", replicated: bool = False, experts: ExpertLayout | None = None
) -> Counters:
    """Send every collective of the FSDP units of `model` through counted ones, and keep their counters on the model.

    Args:
        reduce_scatter: "none" reduces gradients in FSDP2's reduce dtype, "mxfp8" sends them quantized.
        replicated: parameters are replicated too (hybrid sharding): an all-reduce over the replicas follows.
        experts: which units lie on the experts' mesh, with its own replicas. A rank's experts see the tokens of ep_size
            ranks, but FSDP2 averages over the ranks that share those experts only: their gradients are divided by
            ep_size here.
    """
    on_expert_mesh = {id(model.get_submodule(name)) for name in experts.modules} if experts else set()
    model.communication_counters = counters = Counters(list(torch_private.param_groups(model)), experts is not None)
    reduce_scatter_class = QuantizedReduceScatter if reduce_scatter == "mxfp8" else CountedReduceScatter

    def reduced(gradients: Tensor, *, over_replicas: bool, ranks_of_tokens: int) -> None:
        if over_replicas:
            counters.add("all_reduce", gradients)
        if ranks_of_tokens > 1:
            gradients.div_(ranks_of_tokens)

    for module in torch_private.fsdp_modules(model):
        of_experts = id(module) in on_expert_mesh
        for group in torch_private.own_param_groups(module):
            module.set_custom_all_gather(CountedAllGather(counters, group, of_experts))
            module.set_custom_reduce_scatter(reduce_scatter_class(counters))
            over_replicas = experts.replicas > 1 if of_experts else replicated
            ranks_of_tokens = experts.ep_size if of_experts else 1
            if over_replicas or ranks_of_tokens > 1:  # FSDP2 calls the hook with what it has just reduced
                module.set_all_reduce_hook(
                    functools.partial(reduced, over_replicas=over_replicas, ranks_of_tokens=ranks_of_tokens)
                )
        # FSDP's own pre-hook gathers; ours is registered after it and sees the result.
        module.register_forward_pre_hook(lambda *_: counters.sample_unsharded())
    return counters


def counters(model: nn.Module) -> Counters:
    """The counters of a model that `parallelize` returned."""
    found = getattr(model, "communication_counters", None)
    if found is None:
        raise ValueError("the model has no communication counters: pass what fsdp2.parallelize returned")
    return found
