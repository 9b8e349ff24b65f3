"""AdamW over the sharded fp32 masters, with weight decay on matrices only.

Norm weights and biases are 1-D: decaying them pulls a scale or an offset towards zero without regularizing anything, so
they form their own group. The optimizer sees ordinary DTensors; quantization happens after the step, when a weight is
gathered, so no optimizer ever meets a quantized tensor.
"""

from __future__ import annotations

import torch
from torch import nn

from fsdp2.errors import ConfigurationError


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Return two AdamW groups: parameters of two or more dimensions with `weight_decay`, all others with none.

    Each group carries `names`, in the order of its `params`; a tied parameter appears once, under its first name.
    """
    decayed = {"params": [], "names": [], "weight_decay": weight_decay}
    undecayed = {"params": [], "names": [], "weight_decay": 0.0}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            group = decayed if parameter.ndim >= 2 else undecayed
            group["params"].append(parameter)
            group["names"].append(name)
    return [group for group in (decayed, undecayed) if group["params"]]


def build_optimizer(
    model: nn.Module,
    *,
    kind: str,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    epsilon: float,
) -> torch.optim.Optimizer:
    """Return AdamW over `parameter_groups`: `adamw` is multi-tensor, `fused_adamw` one kernel for the whole update."""
    if kind not in ("adamw", "fused_adamw"):
        raise ConfigurationError(f"--training.optimizer {kind}: built are adamw and fused_adamw")
    groups = parameter_groups(model, weight_decay)
    if not groups:
        raise ConfigurationError("the model has no trainable parameter")
    fused = kind == "fused_adamw"
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=epsilon, fused=fused, foreach=not fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the state's tensors by name, `<parameter>.<state key>`; they share storage with the optimizer."""
    return {
        f"{name}.{key}": value
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"])
        for key, value in optimizer.state[parameter].items()
    }


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer create its state tensors, so that a checkpoint can be loaded into them.

    One step with zero gradients at rate zero does that for any optimizer and leaves the parameters as they are.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    set_learning_rate(optimizer, 0.0)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates):
        group["lr"] = rate
