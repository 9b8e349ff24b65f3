"""Every use of private PyTorch API, in one place, checked with torch 2.13.0.

FSDP2 offers the hooks `fsdp_pre_all_gather` / `fsdp_post_all_gather` on a sharded parameter's local tensor, but not the
phase a gather belongs to, nor gathers whose inputs change between forward and backward. Those, and the bytes of the
parameters that are gathered now, come from its internals: `torch.distributed.fsdp._fully_shard`
(`FSDPParamGroup._training_state`, `.fsdp_params`, `.is_sharded`; `FSDPParam.all_gather_outputs`). A new torch version
is adopted by reading those files again and running `tests/fsdp2`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

CHECKED_WITH = ("2.13",)

# The base implementation makes every operation on a subclass return plain tensors: the subclass marks one tensor, and
# nothing derived from it.
plain_results = torch._C._disabled_torch_function_impl


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The FSDP units inside `model`, itself included."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def own_param_groups(module: FSDPModule) -> list[Any]:
    """The parameter groups of one FSDP unit, each of which is gathered and reduced by one collective; none when its
    children own all parameters."""
    return module._get_fsdp_state()._fsdp_param_groups


def param_groups(model: nn.Module) -> Iterator[Any]:
    """The parameter groups of every FSDP unit inside `model`."""
    for module in fsdp_modules(model):
        yield from own_param_groups(module)


def gathered_params(model: nn.Module) -> dict[tuple[int, str], tuple[Any, Any]]:
    """(id of the owning module, parameter name) -> (FSDP's parameter, its group). A tied weight appears under its first
    owner only."""
    found = {}
    for group in param_groups(model):
        for fsdp_param in group.fsdp_params:
            found[(id(fsdp_param._module_info.module), fsdp_param._module_info.param_name)] = (fsdp_param, group)
    return found


def is_backward(group: Any) -> bool:
    """Whether a gather of `group` happens for the backward pass, be it prefetched, FSDP's own, or one of a recomputed
    forward."""
    return group._training_state.name == "PRE_BACKWARD" or torch._C._current_graph_task_id() != -1


def stays_unsharded(group: Any) -> bool:
    """Whether `group` keeps its gathered parameters between forward and backward, so that one gather serves both."""
    return not group._reshard_after_forward


def reduces_gradients(group: Any) -> bool:
    """Whether the backward of the current micro-batch reduces the gradients of `group`: the last one of a step does."""
    return group.reduce_grads


def version(tensor: Tensor) -> int:
    """How often `tensor` or a view of it was changed in place, as autograd counts it."""
    return tensor._version


def gather_group_size(group: Any) -> int:
    """Number of ranks that `group` gathers from."""
    return group._all_gather_process_group.size()


def forget_gather_outputs(fsdp_param: Any) -> None:
    """Let the next gather of `fsdp_param` allocate its outputs anew: FSDP would reuse the first gather's, whose number
    and sizes may differ."""
    fsdp_param.all_gather_outputs = []


def live_gathered_bytes(group: Any) -> int:
    """Bytes of storage that the gathered parameters of `group` occupy on this rank now."""
    return sum(out.untyped_storage().size() for param in group.fsdp_params for out in param.all_gather_outputs)


def is_unsharded(group: Any) -> bool:
    """Whether the parameters of `group` are gathered now."""
    return not group.is_sharded


def replace_local_tensor(parameter: nn.Parameter, local: Tensor) -> None:
    """Make `local` (same shape, dtype, storage) the local tensor of the DTensor `parameter`. FSDP reads the hooks from
    it at its first forward."""
    assert isinstance(parameter, DTensor)
    parameter._local_tensor = local


def process_group_store() -> Any:
    """The key-value store that the default process group was made with."""
    return dist.distributed_c10d._get_default_store()
