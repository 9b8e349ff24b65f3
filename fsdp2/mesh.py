"""Device meshes: how the ranks are arranged for sharding and replication.

The world is `dp_replicate x fsdp`: parameters are sharded over the inner dimension (ranks of one node, usually) and
replicated over the outer one (hybrid sharding). Every rank holds other samples, so both dimensions are data parallel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdp2.errors import ConfigurationError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_mesh_sizes(world_size: int, fsdp_size: int, dp_replicate_size: int) -> None:
    """Refuse sizes that do not multiply to the world size, naming the one that would.

    Raises:
        ConfigurationError: a size below 1, or a product other than `world_size`.
    """
    for flag, size in (("fsdp_size", fsdp_size), ("dp_replicate_size", dp_replicate_size)):
        if size < 1:
            raise ConfigurationError(f"--parallel.{flag} {size}: must be at least 1")
    if fsdp_size * dp_replicate_size != world_size:
        fits = (
            f"--parallel.fsdp_size {world_size // dp_replicate_size}"
            if world_size % dp_replicate_size == 0
            else f"--parallel.fsdp_size {world_size} --parallel.dp_replicate_size 1"
        )
        raise ConfigurationError(
            f"--parallel.fsdp_size {fsdp_size} times --parallel.dp_replicate_size {dp_replicate_size} is "
            f"{fsdp_size * dp_replicate_size}, but {world_size} "
            f"processes were started: the product must be the number of processes; {fits} fits"
        )


def data_parallel_mesh(device_type: str, fsdp_size: int, dp_replicate_size: int) -> DeviceMesh:
    """The mesh that dense parameters are sharded on: ("fsdp",), or ("dp_replicate", "fsdp") for hybrid sharding."""
    from torch.distributed.device_mesh import init_device_mesh

    if dp_replicate_size == 1:
        return init_device_mesh(device_type, (fsdp_size,), mesh_dim_names=("fsdp",))
    return init_device_mesh(device_type, (dp_replicate_size, fsdp_size), mesh_dim_names=("dp_replicate", "fsdp"))
