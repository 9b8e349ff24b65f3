"""Name the module that made a loss or a gradient NaN or infinite.

A run stops before the optimizer step that would write the bad numbers into every weight. Then the step is repeated with
hooks on all modules: weights and batch are unchanged, so the same numbers appear again, and the first module whose
output (in forward order) or whose output's gradient (in backward order) is not finite is the place to look. Only the
stopping run pays for this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2.gradients import nonfinite_parameters

SHOWN = 4


class NonFiniteError(RuntimeError):
    """The loss or a gradient is not finite; no weight has been changed by this step."""


def diagnose(model: nn.Module, replay: Callable[[], None]) -> str:
    """Return what is not finite first, and on which rank, as one sentence. Collective: every rank calls it.

    Args:
        model: as it was in the failed step.
        replay: runs forward and backward of the failed step again, without an optimizer step.
    """
    model.zero_grad(set_to_none=True)
    forward: list[str] = []
    backward: list[str] = []
    handles = [
        module.register_forward_hook(_watch(name, forward, backward)) for name, module in model.named_modules() if name
    ]
    try:
        replay()
    finally:
        for handle in handles:
            handle.remove()
    weights = [name for name, parameter in model.named_parameters() if not _is_finite(_local(parameter))]
    gradients = nonfinite_parameters(model)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (weights, forward[:1], backward[:1]))
    return _sentence(found, gradients)


def _watch(name: str, forward: list[str], backward: list[str]) -> Callable:
    """Return a forward hook that notes `name` when the module's output, or that output's gradient, is not finite."""

    def hook(module: nn.Module, inputs: tuple, output: Any) -> None:
        outputs = list(_float_tensors(output))
        if not all(_is_finite(tensor) for tensor in outputs):
            clean = all(_is_finite(tensor) for tensor in _float_tensors(inputs))
            forward.append(f"the output of {name}" + ("" if clean else ", whose input is not finite either"))
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(watch_gradient)

    def watch_gradient(gradient: Tensor) -> None:
        if not _is_finite(gradient):
            backward.append(f"the gradient at the output of {name}")

    return hook


def _sentence(found: list[tuple[list[str], list[str], list[str]]], gradients: list[str]) -> str:
    """Choose among all ranks' findings: a weight explains an output, an output explains a gradient."""
    weights = sorted({name for of_rank in found for name in of_rank[0]})
    for kind in (1, 2):
        for rank, of_rank in enumerate(found):
            if of_rank[kind]:
                sentence = f"the first value that is not finite is {of_rank[kind][0]} (rank {rank})"
                return sentence + (f"; weights that are not finite: {_some(weights)}" if weights else "")
    if weights:
        return f"weights that are not finite: {_some(weights)}"
    if gradients:
        return f"outputs are finite, gradients are not: {_some(gradients)}"
    return "repeating the step gave finite numbers: the fault does not repeat (memory, hardware, or a race)"


def _some(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _float_tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, dict):
        yield from _float_tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _float_tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        yield from _float_tensors([getattr(value, name) for name in value.__dataclass_fields__])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _is_finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor.detach()).all())
