"""`parallelize`: turn a module into one that is sharded, quantized and recomputed as a plan says.

    convert -> recompute -> fully_shard -> give storage -> count and gather low-precision -> prefetch

The model may be on the meta device: conversion, checks and sharding need no storage, and each rank then allocates its
    own shards only, uninitialized.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from fsdp2.communication import count_communication
from fsdp2.errors import ConfigurationError, nearest
from fsdp2.mesh import data_parallel_mesh
from fsdp2.patterns import match_modules
from fsdp2.plan import ParallelPlan, WeightGather, gather_plan
from fsdp2.recompute import recompute_modules

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def parallelize(model: nn.Module, plan: ParallelPlan) -> nn.Module:
    """Lay `model` out over the ranks of the running process group and return it (converted in place).

    Args:
        model: any module; on the meta device, or with values, which are then kept.
        plan: how; `plan.world_size` must be the size of the default process group, which must be initialized (for one
            process too).

    Returns:
        `model`, an FSDP module whose parameters are fp32 DTensors. On meta before, its parameters and buffers are now
        allocated on `plan.device_type` but hold nothing sensible: initialize or load them next.

    Raises:
        ConfigurationError: the plan does not fit itself or the model. Raised on every rank, before anything is
            allocated.
    """
    plan.check_sizes()
    gathers = gather_plan(model, plan)
    units = _units(model, plan)
    ignored = _ignored_parameters(model, plan)
    if plan.quantization is not None:
        from fsdp2.quantization.converters import convert

        convert(model, plan.quantization, [gather.decision for gather in gathers])
        units = [(name, model.get_submodule(name)) for name, _ in units]
    if plan.recompute:
        recompute_modules(model, plan.recompute_modules)
    _shard(model, units, ignored, plan)
    _give_storage(model, torch.device("cpu") if plan.cpu_offload else _device(plan.device_type))
    _gather_low_precision(model, plan, gathers)
    _set_prefetch([module for _, module in units], plan)
    return model


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward reduces gradients: off for all but the last micro-batch of a step, so that a step
    reduces once."""
    model.set_requires_gradient_sync(enabled)


def _units(model: nn.Module, plan: ParallelPlan) -> list[tuple[str, nn.Module]]:
    """The modules gathered as one, outermost excluded, in the model's order. Modules that share a parameter with the
    outside are left to the root, which gathers it once for all its users (tied embeddings)."""
    names = [name for name, _ in model.named_modules() if name]
    for pattern in plan.fsdp_modules:
        if not match_modules(model, [pattern]):
            raise ConfigurationError(
                f"--parallel.fsdp_modules '{pattern}' matches no module of the model{nearest(pattern, names)}"
            )
    users: dict[int, set[str]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            users.setdefault(id(parameter), set()).add(name)
    units = []
    for name, module in match_modules(model, plan.fsdp_modules):
        inside = {inner for inner in names if inner == name or inner.startswith(name + ".")}
        if all(users[id(parameter)] <= inside for parameter in module.parameters()):
            units.append((name, module))
    return units


def _ignored_parameters(model: nn.Module, plan: ParallelPlan) -> set[nn.Parameter]:
    """Parameters that stay whole on every rank. FSDP does not reduce their gradients, so they must not have any."""
    ignored = set()
    for pattern in plan.ignored_modules:
        matched = match_modules(model, [pattern])
        if not matched:
            names = [name for name, _ in model.named_modules() if name]
            raise ConfigurationError(
                f"--parallel.ignored_modules '{pattern}' matches no module of the model{nearest(pattern, names)}"
            )
        for name, module in matched:
            for parameter in module.parameters():
                if parameter.requires_grad:
                    raise ConfigurationError(
                        f"--parallel.ignored_modules '{pattern}': '{name}' is trained, and the gradients of an ignored "
                        "module are not reduced over ranks; freeze it or shard it"
                    )
                ignored.add(parameter)
    return ignored


def _shard(
    model: nn.Module, units: list[tuple[str, nn.Module]], ignored: set[nn.Parameter], plan: ParallelPlan
) -> None:
    mesh = data_parallel_mesh(plan.device_type, plan.fsdp_size, plan.dp_replicate_size)
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPES[plan.param_dtype], reduce_dtype=TORCH_DTYPES[plan.reduce_dtype]
    )
    options = {
        "mesh": mesh,
        "reshard_after_forward": plan.reshard_after_forward,
        "mp_policy": policy,
        "ignored_params": ignored,
        "shard_placement_fn": lambda parameter: Shard(plan.shard_dim(parameter.shape)),
    }
    if plan.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=plan.device_type != "cpu")
    for _, module in reversed(units):  # inner units before the ones around them
        fully_shard(module, **options)
    fully_shard(model, **options)


def _device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.accelerator.current_device_index())


def _give_storage(model: nn.Module, device: torch.device) -> None:
    """Allocate what is on meta, one tensor for each parameter or buffer object, so that tied ones stay tied. FSDP takes
    the new ones up at its first forward."""
    made: dict[int, nn.Parameter | torch.Tensor] = {}
    for module in model.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:
                    empty = torch.empty_like(tensor, device=device)
                    made[id(tensor)] = (
                        nn.Parameter(empty, requires_grad=tensor.requires_grad)
                        if isinstance(tensor, nn.Parameter)
                        else empty
                    )
                store[name] = made[id(tensor)]


def _gather_low_precision(model: nn.Module, plan: ParallelPlan, gathers: list[WeightGather]) -> None:
    counters = count_communication(model, plan.low_precision_reduce_scatter, plan.dp_replicate_size > 1)
    rules = {f"{gather.decision.module}.weight": gather.rule(plan) for gather in gathers if gather.low_precision}
    if rules:
        from fsdp2.quantization.weights import gather_quantized

        gather_quantized(model, rules, counters)


def _set_prefetch(units: list[nn.Module], plan: ParallelPlan) -> None:
    """Issue gathers ahead of use, in the order of the model's definition."""
    for index, unit in enumerate(units):
        if ahead := units[index + 1 : index + 1 + plan.num_to_forward_prefetch]:
            unit.set_modules_to_forward_prefetch(ahead)
        if behind := units[max(0, index - plan.num_to_backward_prefetch) : index][::-1]:
            unit.set_modules_to_backward_prefetch(behind)
