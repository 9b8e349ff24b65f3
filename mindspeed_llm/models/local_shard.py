"""Which part of a parameter this rank holds: the one thing weight initialization and weight loading must know about
sharding.

A parameter is a plain tensor (everything is here) or a DTensor whose dimensions are cut by the mesh dimensions in turn,
each into chunks of ceil(length / parts) rows as `torch.chunk` cuts them, so that the last ranks may hold less or
nothing. Experts that are spread over ranks and sharded along the same dimension are cut in the other order: the
placement of the first mesh dimension says so by its `split_factor`.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard


def parameters_at_rest(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter once (tied ones under their first name), in its sharded form.

    Goes through `state_dict` because that makes a sharded model drop the gathered copies that it kept after a forward;
    `named_parameters` would hand out those.
    """
    parameters, seen = {}, set()
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, nn.Parameter) and id(value) not in seen:
            seen.add(id(value))
            parameters[name] = value
    return parameters


def _is_strided(cut: tuple[int, Placement]) -> bool:
    """Whether FSDP2 cuts here what a later mesh dimension (expert parallelism) has cut already along that dimension."""
    return hasattr(cut[1], "split_factor")


def local_part(parameter: Tensor) -> tuple[Tensor, tuple[slice, ...]]:
    """The tensor this rank holds (written in place by the caller) and, for every dimension, the slice of the whole
    parameter that it is.

    Raises:
        NotImplementedError: a placement other than Replicate and plain Shard.
    """
    if not isinstance(parameter, DTensor):
        return parameter.detach(), tuple(slice(0, length) for length in parameter.shape)
    begin, length = [0] * parameter.ndim, list(parameter.shape)
    coordinate = parameter.device_mesh.get_coordinate()
    if coordinate is None:
        raise NotImplementedError("this rank is outside of the parameter's device mesh")
    cuts = [(dim, place) for dim, place in enumerate(parameter.placements) if not isinstance(place, Replicate)]
    for mesh_dim, placement in sorted(cuts, key=_is_strided):
        if type(placement) is not Shard and not _is_strided((mesh_dim, placement)):
            raise NotImplementedError(f"placement {placement} is not built; built are Replicate and Shard")
        dim, parts = placement.dim, parameter.device_mesh.size(mesh_dim)
        chunk = -(-length[dim] // parts)
        offset = min(coordinate[mesh_dim] * chunk, length[dim])
        begin[dim] += offset
        length[dim] = min(chunk, length[dim] - offset)
    return parameter.detach().to_local(), tuple(slice(b, b + n) for b, n in zip(begin, length))


def whole_tensor(parameter: Tensor) -> Tensor:
    """The whole parameter on every rank: a collective for a DTensor, one gather a mesh dimension that cuts it. Its own
    `full_tensor` does the same, and warns of two gathers where experts are cut twice."""
    if not isinstance(parameter, DTensor):
        return parameter
    cuts = [(dim, place) for dim, place in enumerate(parameter.placements) if not isinstance(place, Replicate)]
    for mesh_dim, _ in sorted(cuts, key=_is_strided, reverse=True):
        placements = list(parameter.placements)
        placements[mesh_dim] = Replicate()
        parameter = parameter.redistribute(placements=placements)
    return parameter.to_local()
