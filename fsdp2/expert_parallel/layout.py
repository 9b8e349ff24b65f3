"""Where the experts of a model lie: which modules are expert modules, how many experts a rank holds, and along which
dimension FSDP shards them.

Every rank decides the same, before anything is allocated. An expert module is one whose parameters all belong to
`GroupedLinear`s of the same number of experts; `fsdp2.expert_parallel.dispatch` says what its forward must look like.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fsdp2.errors import ConfigurationError, nearest
from fsdp2.patterns import match_modules

if TYPE_CHECKING:
    from torch import nn

    from fsdp2.plan import ParallelPlan

PLACEMENTS = ("shard_by_dim_0", "shard_by_dim_1")


@dataclass(frozen=True)
class ExpertLayout:
    """How the expert modules `modules` (full names) lie on the ranks.

    Attributes:
        ep_size, shards, replicas: ranks that hold different experts, ranks that share those, copies of the whole.
        shard_dims: module of a weight (full name) -> the dimension along which its [E / ep_size, I, O] is sharded.
    """

    modules: tuple[str, ...]
    ep_size: int
    shards: int
    replicas: int
    shard_dims: dict[str, int]

    def covers(self, weight_module: str) -> bool:
        """Whether the weight of the module of that full name is an expert's."""
        return weight_module in self.shard_dims

    def gathered_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """What one gather of an expert weight of `shape` [E, I, O] assembles."""
        return (shape[0] // self.ep_size, *shape[1:])


def expert_layout(model: nn.Module, plan: ParallelPlan, travels_quantized: set[str]) -> ExpertLayout | None:
    """The layout of the experts of an unconverted `model`, or None where they are sharded like all parameters (ep_size
    and ep_fsdp_size are 1).

    Args:
        travels_quantized: full names of the modules whose weight is to be gathered as MX codes.

    Raises:
        ConfigurationError: patterns that name no expert module, experts that do not divide, a dimension that cannot be
            sharded along.
    """
    if plan.ep_size == 1 and plan.ep_fsdp_size == 1:
        return None
    names = _expert_modules(model, plan)
    shard_dims = {}
    for name in names:
        for weight_name, weight in _grouped_linears(name, model.get_submodule(name)):
            experts = weight.weight.shape[0]
            if experts % plan.ep_size:
                raise ConfigurationError(
                    f"--parallel.ep_size {plan.ep_size}: the {experts} experts of '{name}' do not divide by it; "
                    f"{_largest_divisor(experts, plan.ep_size)} does"
                )
            local = (experts // plan.ep_size, *weight.weight.shape[1:])
            shard_dims[weight_name] = _shard_dim(weight_name, local, plan, weight_name in travels_quantized)
    return ExpertLayout(
        modules=tuple(names),
        ep_size=plan.ep_size,
        shards=plan.ep_fsdp_size,
        replicas=plan.world_size // (plan.ep_size * plan.ep_fsdp_size),
        shard_dims=shard_dims,
    )


def _expert_modules(model: nn.Module, plan: ParallelPlan) -> list[str]:
    found = {}
    for flag, patterns in (("ep_modules", plan.ep_modules), ("ep_fsdp_modules", plan.ep_fsdp_modules)):
        needed = plan.ep_size > 1 if flag == "ep_modules" else plan.ep_fsdp_size > 1
        found[flag] = {name for pattern in patterns for name in _matched(model, flag, pattern)} if needed else set()
        if needed and not found[flag]:
            size_flag = flag.replace("_modules", "_size")
            raise ConfigurationError(f"--parallel.{flag} is empty, but --parallel.{size_flag} is above 1")
    if all(found.values()) and found["ep_modules"] != found["ep_fsdp_modules"]:
        only = sorted(found["ep_modules"] ^ found["ep_fsdp_modules"])[0]
        raise ConfigurationError(
            f"--parallel.ep_modules and --parallel.ep_fsdp_modules must name the same modules when both ep_size and "
            f"ep_fsdp_size are above 1: '{only}' is in one of them only"
        )
    both = found["ep_modules"] | found["ep_fsdp_modules"]
    return [name for name, _ in model.named_modules() if name in both]


def _matched(model: nn.Module, flag: str, pattern: str) -> list[str]:
    matched = match_modules(model, [pattern])
    if not matched:
        names = [name for name, _ in model.named_modules() if name]
        raise ConfigurationError(
            f"--parallel.{flag} '{pattern}' matches no module of the model{nearest(pattern, names)}"
        )
    for name, module in matched:
        inside = _grouped_linears(name, module)
        own = {id(grouped.weight) for _, grouped in inside}
        if not inside or any(id(parameter) not in own for parameter in module.parameters()):
            raise ConfigurationError(
                f"--parallel.{flag} '{pattern}': '{name}' is no expert module, which holds GroupedLinear weights and "
                "nothing else"
            )
    return [name for name, _ in matched]


def _grouped_linears(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    from fsdp2.expert_parallel.grouped_linear import GroupedLinear

    return [
        (f"{name}.{inner}" if inner else name, child)
        for inner, child in module.named_modules()
        if isinstance(child, GroupedLinear)
    ]


def _shard_dim(name: str, local: tuple[int, ...], plan: ParallelPlan, travels_quantized: bool) -> int:
    """The dimension of `local` [E / ep, I, O] to shard over ep_fsdp: what was asked for; unasked, experts (dimension 0)
    where codes travel, else rows of every expert (dimension 1), which divide more often."""
    shards, asked = plan.ep_fsdp_size, plan.expert_shard_placement
    if shards == 1:
        return 0
    if travels_quantized and asked == "shard_by_dim_1":
        raise ConfigurationError(
            f"--parallel.efsdp_shard_placement_fn shard_by_dim_1: the quantized experts '{name}' are gathered as MX "
            "codes and scales, which FSDP2 gathers along dimension 0 only; set shard_by_dim_0, or "
            "--model.enable_fsdp_low_precision_all_gather False"
        )
    if asked is not None:
        dim = PLACEMENTS.index(asked)
    elif travels_quantized:
        dim = 0
    else:
        dim = 1 if local[1] % shards == 0 else 0
    if local[dim] % shards == 0:
        return dim
    if dim == 1:
        raise ConfigurationError(
            f"--parallel.ep_fsdp_size {shards}: shard_by_dim_1 cuts the {local[1]} input features of '{name}', which "
            f"do not divide by it; {_largest_divisor(local[1], shards)} does"
        )
    other = (
        "; --model.enable_fsdp_low_precision_all_gather False with shard_by_dim_1 does not need them to"
        if travels_quantized
        else ""
    )
    raise ConfigurationError(
        f"--parallel.ep_fsdp_size {shards}: a rank holds {local[0]} experts of '{name}' (--parallel.ep_size "
        f"{plan.ep_size}), which do not divide by it; {_largest_divisor(local[0], shards)} does{other}"
    )


def _largest_divisor(number: int, limit: int) -> int:
    return max(size for size in range(1, limit + 1) if number % size == 0)
