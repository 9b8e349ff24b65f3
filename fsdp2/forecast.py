"""What a plan will cost, before launch: the bytes of every collective of a step and the memory of one rank.

Exact arithmetic on a model on the meta device, for any number of ranks in one process. FSDP2 pads each parameter's
shard to the largest one and gathers a unit's parameters in one collective; a quantized weight sends the planes of its
`GatherRule`; gradients are reduced once a step. A test holds every number to what `fsdp2.communication` counts in real
runs. All figures are those of rank 0, whose shards are the largest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import nn

from fsdp2.engine import gathered_units
from fsdp2.patterns import match_modules
from fsdp2.plan import ParallelPlan, lay_out

_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
_FP32 = 4


@dataclass(frozen=True)
class Collectives:
    """Bytes that rank 0 sends into the collectives of one optimizer step, by the names of the counters, and the seconds
    that they take on links of a given speed.

    `received_bytes` is what crosses a rank's link in one direction, with every collective in its ring form: an
    all-gather of n ranks moves n - 1 shards, a reduce-scatter (n - 1)/n of its input, an all-reduce twice that.
    """

    all_gather_bytes_forward: int
    all_gather_bytes_backward: int
    reduce_scatter_bytes: int
    all_reduce_bytes: int
    received_bytes: int

    def seconds(self, bytes_per_second: float) -> float:
        """Time of a step's collectives on links of this speed, without overlap and without latency."""
        return self.received_bytes / bytes_per_second


@dataclass(frozen=True)
class StateMemory:
    """Bytes on rank 0 that do not depend on the batch: fp32 masters, fp32 gradients, AdamW's two moments, parameters
    that are not sharded, the largest total of gathered parameters alive at once (`unsharded_bytes_peak`), and the
    unreduced gradients that accumulate over several micro-batches, unsharded and in the type they are reduced in."""

    masters: int
    gradients: int
    optimizer: int
    unsharded: int
    gathered_peak: int
    on_host: bool = False
    accumulated: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        trained = 0 if self.on_host else self.masters + self.gradients + self.optimizer
        return trained + self.unsharded + self.gathered_peak + self.accumulated


@dataclass(frozen=True)
class _Parameter:
    """A parameter as one unit gathers it."""

    shape: tuple[int, ...]  # what a gather assembles
    shards: int
    shard_dim: int
    trained: bool
    rule: object | None  # a GatherRule where it is gathered as codes

    @property
    def shard_shape(self) -> tuple[int, ...]:
        """The padded shard: of the largest rank."""
        shape = list(self.shape)
        shape[self.shard_dim] = -(-shape[self.shard_dim] // self.shards)
        return tuple(shape)

    @property
    def shard_elements(self) -> int:
        return math.prod(self.shard_shape)

    def gather_bytes(self, plan: ParallelPlan, backward: bool) -> int:
        """Bytes of this rank's shard in one gather of a phase."""
        if self.rule is None:
            return self.shard_elements * _BYTES[plan.param_dtype]
        axes = self.rule.axes(backward, not plan.reshard_after_forward)
        return sum(self.rule.plane_bytes(self.shard_shape, axis) for axis in axes)


@dataclass(frozen=True)
class _Unit:
    """Parameters gathered by one collective, sharded over `shards` ranks and replicated `replicas` times."""

    name: str
    parameters: tuple[_Parameter, ...]
    shards: int
    replicas: int

    def gather_bytes(self, plan: ParallelPlan, backward: bool) -> int:
        return sum(parameter.gather_bytes(plan, backward) for parameter in self.parameters)


@dataclass(frozen=True)
class Forecast:
    """Everything that follows from a plan and a model alone."""

    collectives: Collectives
    state: StateMemory
    uneven: tuple[str, ...]  # parameters whose sharded dimension does not divide: padded in memory and on the wire
    padding: float  # what rank 0 holds over an even share


def forecast(model: nn.Module, plan: ParallelPlan, micro_batches: int = 1) -> Forecast:
    """The cost of one optimizer step of `micro_batches` micro-batches.

    Args:
        model: unconverted, best on the meta device: it is only looked at.

    Raises:
        ConfigurationError: as `parallelize` does, for what does not fit.
    """
    plan.check_sizes()
    units, unsharded, uneven = _units(model, plan)
    gathered = {False: 0, True: 0}
    received = 0
    for backward in _gathering_phases(plan):
        for unit in units:
            sent = _sent(unit, plan, backward) * micro_batches
            gathered[backward] += sent
            received += sent * (unit.shards - 1)
    scattered = reduced = 0
    for unit in units:
        trained = [parameter for parameter in unit.parameters if parameter.trained]
        part = sum(parameter.shard_elements for parameter in trained)
        if unit.shards > 1:
            sent = _reduce_scatter_bytes(part, unit.shards, plan)
            scattered += sent
            received += sent * (unit.shards - 1) // unit.shards
        if unit.replicas > 1:
            over_replicas = part * _BYTES[plan.reduce_dtype]
            reduced += over_replicas
            received += 2 * over_replicas * (unit.replicas - 1) // unit.replicas
    elements = sum(parameter.shard_elements for unit in units for parameter in unit.parameters)
    trained = sum(parameter.shard_elements for unit in units for parameter in unit.parameters if parameter.trained)
    share = sum(math.prod(p.shape) / p.shards for unit in units for p in unit.parameters)
    return Forecast(
        Collectives(gathered[False], gathered[True], scattered, reduced, received),
        StateMemory(
            masters=elements * _FP32,
            gradients=trained * _FP32,
            optimizer=2 * trained * _FP32,
            unsharded=unsharded * _FP32,
            gathered_peak=_gathered_peak(units, plan),
            on_host=plan.cpu_offload,
            accumulated=_accumulated(units, plan) if micro_batches > 1 else 0,
        ),
        uneven,
        elements / share if share else 1.0,
    )


def _accumulated(units: list[_Unit], plan: ParallelPlan) -> int:
    """Gradients are reduced once a step (`engine.set_gradient_sync`); until then every rank keeps whole ones."""
    parameters = (parameter for unit in units for parameter in unit.parameters if parameter.trained)
    return sum(math.prod(parameter.shape) for parameter in parameters) * _BYTES[plan.reduce_dtype]


def _gathering_phases(plan: ParallelPlan) -> tuple[bool, ...]:
    """Whether each gather of a micro-batch belongs to backward."""
    return (False, True) if plan.reshard_after_forward else (False,)


def _sent(unit: _Unit, plan: ParallelPlan, backward: bool) -> int:
    return unit.gather_bytes(plan, backward) if unit.shards > 1 else 0


def _reduce_scatter_bytes(part: int, shards: int, plan: ParallelPlan) -> int:
    """Input bytes of a reduce-scatter whose output has `part` elements."""
    if plan.low_precision_reduce_scatter == "mxfp8":
        return shards * (part + -(-part // 32))
    return shards * part * _BYTES[plan.reduce_dtype]


def _gathered_peak(units: list[_Unit], plan: ParallelPlan) -> int:
    """The root lives through forward and backward; beside it one unit at a time, with the experts inside it."""

    def alive(unit: _Unit) -> int:
        return max(unit.gather_bytes(plan, backward) for backward in _gathering_phases(plan)) * unit.shards

    if not plan.reshard_after_forward:
        return sum(alive(unit) for unit in units)
    root, *others = units
    return alive(root) + max(
        (
            alive(unit) + sum(alive(inner) for inner in others if inner.name.startswith(unit.name + "."))
            for unit in others
        ),
        default=0,
    )


def _units(model: nn.Module, plan: ParallelPlan) -> tuple[list[_Unit], int, tuple[str, ...]]:
    """The units, root first; elements of parameters that are not sharded; names of those that do not divide."""
    gathers, experts = lay_out(model, plan)
    rules = {f"{g.decision.module}.weight": g.rule(plan) for g in gathers if g.low_precision}
    owners = [(name, plan.dp_replicate_size, plan.fsdp_size) for name, _ in gathered_units(model, plan)]
    if experts is not None:
        owners += [(name, experts.replicas, experts.shards) for name in experts.modules]
    ignored = {id(p) for _, m in match_modules(model, plan.ignored_modules) for p in m.parameters()}
    members: dict[str, list[_Parameter]] = {"": [], **{name: [] for name, _, _ in owners}}
    unsharded, uneven = 0, []
    for name, parameter in model.named_parameters():  # a tied weight appears once, under its first owner
        if id(parameter) in ignored:
            unsharded += parameter.numel()
            continue
        owner = max((unit for unit in members if not unit or name.startswith(unit + ".")), key=len)
        module_name = name.rpartition(".")[0]
        shape, shards, dim = tuple(parameter.shape), plan.fsdp_size, plan.shard_dim(parameter.shape)
        if experts is not None and experts.covers(module_name):
            shape, shards = experts.gathered_shape(shape), experts.shards
            dim = experts.shard_dims[module_name]
        if shape[dim] % shards:
            uneven.append(name)
        members[owner].append(_Parameter(shape, shards, dim, parameter.requires_grad, rules.get(name)))
    sizes = {"": (plan.dp_replicate_size, plan.fsdp_size)} | {name: sizes for name, *sizes in owners}
    units = [_Unit(name, tuple(found), sizes[name][1], sizes[name][0]) for name, found in members.items()]
    return units, unsharded, tuple(uneven)
