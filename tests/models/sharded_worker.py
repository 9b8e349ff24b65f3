"""What every rank does in test_sharded.py: kept apart so that a spawned process imports torch and the models, not
pytest and transformers.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from mindspeed_llm.models import build_model, initialize_weights, load_hf_weights, save_hf_weights

LAYOUTS = ("fsdp", "hsdp", "experts_by_dim_1")


def shard(model: torch.nn.Module, layout: str) -> torch.nn.Module:
    """FSDP over all ranks (some get fewer rows, or none), 2 replicas of 2 shards, or experts cut along their inputs."""
    world = dist.get_world_size()
    if layout == "hsdp":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world,))
    merged = layout == "experts_by_dim_1"
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, shard_placement_fn=lambda p: Shard(1) if merged and p.ndim == 3 else None)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    return model


def full_state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every whole parameter, gathered."""
    return {name: parameter.full_tensor().clone() for name, parameter in model.state_dict().items()}


def run(folder: str) -> dict[str, dict]:
    """Initialize, run, load, run and save in every layout; returns, for each layout, weights and logits."""
    results = {}
    ids = torch.arange(24).view(2, 12)
    for layout in LAYOUTS:
        model = shard(build_model(Path(folder) / "hf"), layout)
        initialize_weights(model, seed=7)
        result = {"initial": full_state(model), "initial_logits": model(ids).logits.detach()}
        load_hf_weights(model, Path(folder) / "hf")
        result |= {"loaded": full_state(model), "loaded_logits": model(ids).logits.detach()}
        save_hf_weights(model, Path(folder) / f"saved-{layout}", dtype="fp32", max_shard_bytes=60_000)
        results[layout] = result
    return results
