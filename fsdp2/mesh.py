"""Device meshes: how the ranks are arranged for sharding and replication.

The world is `dp_replicate x fsdp`: dense parameters are sharded over the inner dimension (ranks of one node, usually)
and replicated over the outer one (hybrid sharding). Experts are arranged a second time, as `ep_replicate x ep_fsdp x
ep`: over ep every rank holds other experts, over ep_fsdp their parameters are sharded, and what remains are replicas.
Tokens travel over ep at every layer, so ep is innermost. Every rank holds other samples, so all are data parallel.
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


def check_expert_mesh_sizes(world_size: int, ep_size: int, ep_fsdp_size: int) -> None:
    """Refuse sizes of the experts' mesh whose product does not divide the world size; what remains are replicas.

    Raises:
        ConfigurationError: a size below 1, or a product that does not divide `world_size`.
    """
    for flag, size in (("ep_size", ep_size), ("ep_fsdp_size", ep_fsdp_size)):
        if size < 1:
            raise ConfigurationError(f"--parallel.{flag} {size}: must be at least 1")
    if world_size % (ep_size * ep_fsdp_size):
        ep_fits = max(size for size in range(1, ep_size + 1) if world_size % size == 0)
        fits = f"--parallel.ep_size {ep_fits} --parallel.ep_fsdp_size {world_size // ep_fits}"
        raise ConfigurationError(
            f"--parallel.ep_size {ep_size} times --parallel.ep_fsdp_size {ep_fsdp_size} is {ep_size * ep_fsdp_size}, "
            f"which does not divide the {world_size} processes; {fits} fits"
        )


def data_parallel_mesh(device_type: str, fsdp_size: int, dp_replicate_size: int) -> DeviceMesh:
    """The mesh that dense parameters are sharded on: ("fsdp",), or ("dp_replicate", "fsdp") for hybrid sharding."""
    from torch.distributed.device_mesh import init_device_mesh

    if dp_replicate_size == 1:
        return init_device_mesh(device_type, (fsdp_size,), mesh_dim_names=("fsdp",))
    return init_device_mesh(device_type, (dp_replicate_size, fsdp_size), mesh_dim_names=("dp_replicate", "fsdp"))


def expert_meshes(
    device_type: str, world_size: int, ep_size: int, ep_fsdp_size: int
) -> tuple[DeviceMesh, DeviceMesh | None]:
    """(The mesh that experts are sharded on by FSDP: ("ep_fsdp",) or ("ep_replicate", "ep_fsdp"); the mesh ("ep",) that
    they are spread over, None for ep_size 1)."""
    from torch.distributed.device_mesh import init_device_mesh

    sizes = {"ep_replicate": world_size // (ep_size * ep_fsdp_size), "ep_fsdp": ep_fsdp_size, "ep": ep_size}
    names = tuple(
        name for name, size in sizes.items() if name == "ep_fsdp" or size > 1
    )  # FSDP needs a dimension of its own, be it of size 1
    mesh = init_device_mesh(device_type, tuple(sizes[name] for name in names), mesh_dim_names=names)
    if ep_size == 1:
        return mesh, None
    sharded = mesh["ep_replicate", "ep_fsdp"] if "ep_replicate" in names else mesh["ep_fsdp"]
    return sharded, mesh["ep"]
