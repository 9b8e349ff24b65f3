"""Gradient norms and clipping over sharded parameters, the same number on every rank and in every layout.

A rank's gradients are shards: the squared norms of the shards add up over the mesh dimensions that shard a parameter,
and must not be added over those that replicate it. Parameters are therefore grouped by mesh and placement, and the
groups' scalars are joined.
"""

from __future__ import annotations

import math
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shards(model: nn.Module) -> dict[tuple, list[tuple[str, Tensor]]]:
    """Gradients of this rank as (parameter name, local tensor), grouped by the (mesh, sharded mesh dimensions) they are
    sharded over."""
    groups = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        if isinstance(parameter.grad, DTensor):
            grad = parameter.grad
            # Experts are cut along dimension 0 twice, which FSDP2 calls strided and no plain shard.
            sharding = tuple(dim for dim, placement in enumerate(grad.placements) if not placement.is_replicate())
            groups[(grad.device_mesh, sharding)].append((name, grad.to_local()))
        else:
            groups[(None, ())].append((name, parameter.grad))
    return groups


def _sum_of_squares(grads: list[Tensor]) -> Tensor:
    """Sum of squares that does not depend on how rows are spread over ranks, so that clipping scales alike in every
    layout: a row's norm is one fp32 number wherever the row lies, and fp64 adds them up (fp32 where there is no fp64).
    """
    wide = torch.float64 if grads[0].device.type in ("cpu", "cuda") else torch.float32
    norms = [torch.linalg.vector_norm(grad, dim=-1) if grad.ndim > 1 else grad for grad in grads]
    return torch.cat([norm.reshape(-1) for norm in norms]).to(wide).square().sum()


@torch.no_grad()
def gradient_norm(model: nn.Module) -> float:
    """Global L2 norm of all gradients, as a host number; NaN or Inf when one of them is."""
    total = 0.0
    for (mesh, sharding), shards in _shards(model).items():
        squares = _sum_of_squares([grad for _, grad in shards])
        for dim in sharding:
            dist.all_reduce(squares, group=mesh.get_group(dim))
        total += squares.item()
    return math.sqrt(total) if not math.isnan(total) else math.nan


@torch.no_grad()
def clip_grad_norm_(model: nn.Module, max_norm: float) -> float:
    """Scale all gradients so that their global L2 norm is at most `max_norm`; returns the norm before clipping.

    Args:
        model: a model after `parallelize` (or a plain one); gradients are DTensors or plain tensors.
        max_norm: the bound; 0 or less measures without clipping. A non-finite norm clips nothing: the caller must stop.
    """
    norm = gradient_norm(model)
    if max_norm > 0 and math.isfinite(norm) and norm > max_norm:
        locals_ = [grad for shards in _shards(model).values() for _, grad in shards]
        torch._foreach_mul_(locals_, max_norm / (norm + 1e-6))
    return norm


@torch.no_grad()
def nonfinite_parameters(model: nn.Module) -> list[str]:
    """Names of the parameters whose gradient holds NaN or Inf on any rank, in the model's order (a collective: every
    rank calls it)."""
    names, flags = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grad = parameter.grad
            names.append(name)
            flags.append(0 if grad is None or bool(torch.isfinite(_local(grad)).all()) else 1)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    bad = torch.tensor(flags, dtype=torch.int32, device=device)
    if dist.is_initialized():
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
    return [name for name, is_bad in zip(names, bad.tolist()) if is_bad]
