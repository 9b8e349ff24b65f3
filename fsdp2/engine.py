"""`parallelize`: turn a module into one that is sharded, quantized and recomputed as a plan says.

    convert -> recompute -> spread experts -> fully_shard -> give storage -> count, gather low-precision -> dispatch
    -> prefetch

The model may be on the meta device, since conversion, checks and sharding need no storage; each rank then allocates its
own shards only, uninitialized.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from fsdp2.communication import count_communication
from fsdp2.errors import ConfigurationError, nearest
from fsdp2.expert_parallel.dispatch import attach_dispatchers
from fsdp2.expert_parallel.layout import ExpertLayout
from fsdp2.mesh import data_parallel_mesh, expert_meshes
from fsdp2.patterns import match_modules
from fsdp2.plan import ParallelPlan, WeightGather, lay_out
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
    gathers, experts = lay_out(model, plan)
    units = gathered_units(model, plan)
    ignored = _ignored_parameters(model, plan)
    if plan.quantization is not None:
        from fsdp2.quantization.converters import convert

        convert(model, plan.quantization, [gather.decision for gather in gathers])
        units = [(name, model.get_submodule(name)) for name, _ in units]
    if plan.recompute:
        recompute_modules(model, plan.recompute_modules)
    ep_group = _shard_experts(model, experts, ignored, plan) if experts else None
    _shard(model, units, ignored, plan)
    _give_storage(model, torch.device("cpu") if plan.cpu_offload else _device(plan.device_type))
    _gather_low_precision(model, plan, gathers, experts)
    if ep_group is not None:
        attach_dispatchers(model, experts, ep_group, plan)
    _set_prefetch(units, experts.modules if experts else (), model, plan)
    return model


def set_gradient_sync(model: nn.Module, enabled: bool) -> None:
    """Whether the next backward reduces gradients: off for all but the last micro-batch of a step, so that a step
    reduces once."""
    model.set_requires_gradient_sync(enabled)


def gathered_units(model: nn.Module, plan: ParallelPlan) -> list[tuple[str, nn.Module]]:
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


def _options(plan: ParallelPlan, ignored: set[nn.Parameter]) -> dict:
    """What all calls of fully_shard share."""
    options = {
        "reshard_after_forward": plan.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPES[plan.param_dtype], reduce_dtype=TORCH_DTYPES[plan.reduce_dtype]
        ),
        "ignored_params": ignored,
    }
    if plan.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=plan.device_type != "cpu")
    return options


def _shard(
    model: nn.Module, units: list[tuple[str, nn.Module]], ignored: set[nn.Parameter], plan: ParallelPlan
) -> None:
    options = _options(plan, ignored) | {
        "mesh": data_parallel_mesh(plan.device_type, plan.fsdp_size, plan.dp_replicate_size),
        "shard_placement_fn": lambda parameter: Shard(plan.shard_dim(parameter.shape)),
    }
    for _, module in reversed(units):  # inner units before the ones around them
        fully_shard(module, **options)
    fully_shard(model, **options)


def _shard_experts(
    model: nn.Module, experts: ExpertLayout, ignored: set[nn.Parameter], plan: ParallelPlan
) -> dist.ProcessGroup | None:
    """Spread the experts over ep, shard them over ep_fsdp; returns the group that tokens are dispatched over, if any.

    An expert module is a unit of its own: its mesh is another, and its inputs (fp32 router weights) are not cast.
    """
    sharded_on, spread_over = expert_meshes(plan.device_type, plan.world_size, plan.ep_size, plan.ep_fsdp_size)
    options = _options(plan, ignored) | {"mesh": sharded_on}
    options["mp_policy"] = dataclasses.replace(options["mp_policy"], cast_forward_inputs=False)
    for name in experts.modules:
        module, dims = model.get_submodule(name), {}
        for inner, child in module.named_modules():
            weight_module = f"{name}.{inner}" if inner else name
            if not experts.covers(weight_module):
                continue
            if spread_over is not None:
                child.weight = _spread(child.weight, spread_over)
            dims[child.weight] = experts.shard_dims[weight_module]
        fully_shard(module, shard_placement_fn=lambda parameter, dims=dims: Shard(dims[parameter]), **options)
    return spread_over.get_group() if spread_over is not None else None


def _spread(weight: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """This rank's experts of `weight` [E, I, O], as a DTensor of the whole."""
    local = weight.detach().chunk(mesh.size(), 0)[mesh.get_local_rank()].clone()
    return nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False), weight.requires_grad)


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


def _gather_low_precision(
    model: nn.Module, plan: ParallelPlan, gathers: list[WeightGather], experts: ExpertLayout | None
) -> None:
    counters = count_communication(model, plan.low_precision_reduce_scatter, plan.dp_replicate_size > 1, experts)
    rules = {f"{gather.decision.module}.weight": gather.rule(plan) for gather in gathers if gather.low_precision}
    if rules:
        from fsdp2.quantization.weights import gather_quantized

        gather_quantized(model, rules, counters)


def _set_prefetch(
    units: list[tuple[str, nn.Module]], expert_names: tuple[str, ...], model: nn.Module, plan: ParallelPlan
) -> None:
    """Issue gathers ahead of use, in the order of the model's definition; a unit's experts are gathered with it."""
    slots = [
        [unit, *(model.get_submodule(name) for name in expert_names if name.startswith(unit_name + "."))]
        for unit_name, unit in units
    ]
    for index, (unit, *own) in enumerate(slots):
        forward = slots[index + 1 : index + 1 + plan.num_to_forward_prefetch]
        if plan.num_to_forward_prefetch and (ahead := own + [module for slot in forward for module in slot]):
            unit.set_modules_to_forward_prefetch(ahead)
        backward = slots[max(0, index - plan.num_to_backward_prefetch) : index][::-1]
        if plan.num_to_backward_prefetch and (behind := own + [module for slot in backward for module in slot]):
            unit.set_modules_to_backward_prefetch(behind)
