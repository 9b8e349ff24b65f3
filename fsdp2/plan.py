"""The plan: what will be sharded, quantized, recomputed and gathered, checked and shown before anything is allocated.

`ParallelPlan` holds values only; it is what the outside hands to `parallelize`. `gather_plan` and the rows and text
made from it answer, for every weight and on every rank alike, how its gathers travel and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdp2.errors import ConfigurationError, nearest
from fsdp2.expert_parallel.layout import ExpertLayout, expert_layout
from fsdp2.mesh import check_expert_mesh_sizes, check_mesh_sizes
from fsdp2.patterns import covers, match_modules

if TYPE_CHECKING:
    from torch import nn

    from fsdp2.quantization.recipe import QuantRecipe

DTYPES = ("bf16", "fp16", "fp32")
GATHER_MODES = ("on-demand", "all")
REDUCE_SCATTERS = ("none", "mxfp8")
SHARD_PLACEMENTS = ("shard_by_dim_0", "shard_by_dim_1")
DISPATCHERS = ("eager", "fused", "mc2")
DISPATCH_PRECISIONS = ("param_dtype", "mxfp8")


@dataclass(frozen=True)
class QuantizationPlan:
    """Which modules run on which recipe, and how their weights are gathered.

    Attributes:
        recipe: what inputs, weights and gradients are quantized to.
        converters: "quantize.linear.mx", "quantize.moe.mx".
        apply_modules, ignored_modules: patterns (`fsdp2.patterns`) of modules; a pattern covers everything inside the
            module it names.
        low_precision_all_gather: quantize the shard before the gather; False gathers bf16 and quantizes after (the same
            numbers).
        all_gather_mode: "on-demand" sends the planes that the phase needs, "all" both always.
    """

    recipe: QuantRecipe
    converters: tuple[str, ...] = ("quantize.linear.mx",)
    apply_modules: tuple[str, ...] = ("model.layers.{*}",)
    ignored_modules: tuple[str, ...] = ("*lm_head", "*gate")
    low_precision_all_gather: bool = True
    all_gather_mode: str = "on-demand"


@dataclass(frozen=True)
class ParallelPlan:
    """How a model is laid out over the ranks.

    Attributes:
        world_size, device_type: number of processes; "cpu", "cuda" or "npu".
        fsdp_size, dp_replicate_size: parameters are sharded over the first and replicated over the second; their
            product is the world size.
        fsdp_modules: patterns of the modules that are gathered as one; what they leave over belongs to the root.
        ignored_modules: patterns of modules that stay whole on every rank; their parameters must be frozen.
        reshard_after_forward: free gathered weights after forward and gather again in backward.
        recompute, recompute_modules: rerun the forward of these modules in backward instead of keeping activations.
        param_dtype, reduce_dtype: of computation and gathers, of the gradient reduction; masters stay fp32.
        num_to_forward_prefetch, num_to_backward_prefetch: gathers issued ahead of use; 0 leaves it to FSDP2.
        quantization: None for none.
        low_precision_reduce_scatter: "none" reduces gradients in reduce_dtype, "mxfp8" sends them as MX codes.
        shard_placement: None or "shard_by_dim_0" shards rows; "shard_by_dim_1" shards columns of the parameters whose
            second dimension divides by fsdp_size.
        cpu_offload: masters, gradients and optimizer state live in host memory; shards go to the device to be gathered.
        ep_size, ep_fsdp_size: ranks that hold different experts, ranks over which these are sharded; with the replicas
            that remain their product is the world size. Both 1: experts are sharded like all parameters.
        ep_modules, ep_fsdp_modules: patterns of the expert modules that are spread over ranks, that are sharded on
            their own mesh.
        expert_shard_placement: as shard_placement, of experts [E, I, O] over ep_fsdp_size; None chooses what works.
        ep_dispatcher, ep_dispatch_precision: how tokens travel to their experts (`fsdp2.expert_parallel.dispatch`), and
            in which precision: "param_dtype", or "mxfp8".
    """

    world_size: int
    device_type: str
    fsdp_size: int
    dp_replicate_size: int = 1
    fsdp_modules: tuple[str, ...] = ("model.layers.{*}", "model.embed_tokens", "lm_head")
    ignored_modules: tuple[str, ...] = ()
    reshard_after_forward: bool = True
    recompute: bool = False
    recompute_modules: tuple[str, ...] = ()
    param_dtype: str = "bf16"
    reduce_dtype: str = "fp32"
    num_to_forward_prefetch: int = 1
    num_to_backward_prefetch: int = 1
    quantization: QuantizationPlan | None = None
    low_precision_reduce_scatter: str = "none"
    shard_placement: str | None = None
    cpu_offload: bool = False
    ep_size: int = 1
    ep_fsdp_size: int = 1
    ep_modules: tuple[str, ...] = ("model.layers.{*}.mlp.experts",)
    ep_fsdp_modules: tuple[str, ...] = ("model.layers.{*}.mlp.experts",)
    expert_shard_placement: str | None = None
    ep_dispatcher: str = "eager"
    ep_dispatch_precision: str = "param_dtype"

    def check_sizes(self) -> None:
        """Refuse values that cannot work, without looking at a model.

        Raises:
            ConfigurationError: names the flag, its value and what fits.
        """
        check_mesh_sizes(self.world_size, self.fsdp_size, self.dp_replicate_size)
        check_expert_mesh_sizes(self.world_size, self.ep_size, self.ep_fsdp_size)
        for flag, value in (("param_dtype", self.param_dtype), ("reduce_dtype", self.reduce_dtype)):
            if value not in DTYPES:
                raise ConfigurationError(
                    f"--parallel.{flag} '{value}': allowed are {', '.join(DTYPES)}{nearest(value, DTYPES)}"
                )
        for flag, value in (
            ("num_to_forward_prefetch", self.num_to_forward_prefetch),
            ("num_to_backward_prefetch", self.num_to_backward_prefetch),
        ):
            if value < 0:
                raise ConfigurationError(f"--parallel.{flag} {value}: must be 0 or more")
        for flag, value, allowed in (
            ("low_precision_reduce_scatter", self.low_precision_reduce_scatter, REDUCE_SCATTERS),
            ("shard_placement_fn", self.shard_placement, (None, *SHARD_PLACEMENTS)),
            ("efsdp_shard_placement_fn", self.expert_shard_placement, (None, *SHARD_PLACEMENTS)),
            ("ep_dispatcher", self.ep_dispatcher, DISPATCHERS),
            ("ep_dispatch_precision", self.ep_dispatch_precision, DISPATCH_PRECISIONS),
        ):
            if value not in allowed:
                words = [word for word in allowed if word]
                raise ConfigurationError(
                    f"--parallel.{flag} '{value}': allowed are {', '.join(words)}{nearest(value, words)}"
                )
        if self.ep_dispatcher == "mc2":
            where = "" if self.device_type == "npu" else f"; this run is on {self.device_type}"
            raise ConfigurationError(
                f"--parallel.ep_dispatcher mc2 needs an NPU's merged compute-and-communicate kernels{where}, and is "
                "not built: set eager or fused"
            )
        if self.quantization and self.quantization.all_gather_mode not in GATHER_MODES:
            mode = self.quantization.all_gather_mode
            raise ConfigurationError(
                f"--model.fsdp_low_precision_all_gather_mode '{mode}': allowed are {', '.join(GATHER_MODES)}"
                f"{nearest(mode, GATHER_MODES)}"
            )

    def shard_dim(self, shape: Sequence[int]) -> int:
        """The dimension along which a parameter of `shape` is sharded."""
        by_columns = self.shard_placement == "shard_by_dim_1" and len(shape) > 1 and shape[1] % self.fsdp_size == 0
        return 1 if by_columns else 0

    def quantization_rows(self, model: nn.Module) -> list[dict[str, Any]]:
        """One JSON-ready row for every linear and expert weight of an unconverted `model`.

        Keys: module, kind, shape, recipe (None when left alone), reason (why left alone), gather ("mx" or the dtype),
            gather_reason (why a quantized weight is gathered unquantized), gather_bytes_forward, gather_bytes_backward,
            gather_bytes_bf16 (sent by one rank in one gather).
        """
        return [gather.row(self) for gather in gather_plan(model, self)]

    def describe(self, model: nn.Module) -> str:
        """The plan of an unconverted `model` in a few lines for people."""
        return describe(model, self)


@dataclass(frozen=True)
class WeightGather:
    """How one linear or expert weight is computed with and gathered.

    Attributes:
        decision: see `converters.decide`.
        low_precision, reason: whether it is gathered as MX codes, and why not.
        recomputed: the forward of its module runs again in backward.
        shape, shards, shard_dim: what one gather assembles, from how many ranks, along which dimension.
    """

    decision: Any
    low_precision: bool
    reason: str
    recomputed: bool
    shape: tuple[int, ...]
    shards: int
    shard_dim: int

    def row(self, plan: ParallelPlan) -> dict[str, Any]:
        elements = 1
        for size in self.shape:
            elements *= size
        elements //= self.shards
        plain = elements * (4 if plan.param_dtype == "fp32" else 2)
        regathered = plan.reshard_after_forward
        forward, backward = plain, plain if regathered else 0
        if self.low_precision:
            forward = self._plane_bytes(plan, backward=False)
            backward = self._plane_bytes(plan, backward=True) if regathered else 0
        return {
            "module": self.decision.module,
            "kind": self.decision.kind,
            "shape": list(self.decision.shape),
            "recipe": plan.quantization.recipe.name if self.decision.quantized else None,
            "reason": self.decision.reason,
            "gather": "mx" if self.low_precision else plan.param_dtype,
            "gather_reason": self.reason,
            "gather_bytes_forward": forward if self.shards > 1 else 0,
            "gather_bytes_backward": backward if self.shards > 1 else 0,
            "gather_bytes_bf16": 2 * elements if self.shards > 1 else 0,
        }

    def _plane_bytes(self, plan: ParallelPlan, backward: bool) -> int:
        rule = self.rule(plan)
        rows, *inner = self.shape
        shard = (rows // self.shards, *inner)
        return sum(rule.plane_bytes(shard, axis) for axis in rule.axes(backward, not plan.reshard_after_forward))

    def rule(self, plan: ParallelPlan):
        """The `GatherRule` of this weight."""
        from fsdp2.quantization.weights import GatherRule

        recipe = plan.quantization.recipe
        return GatherRule(
            recipe=recipe.weight,
            scale_rule=recipe.scale_rule,
            forward_axis=-1 if self.decision.kind == "linear" else -2,
            both_always=plan.quantization.all_gather_mode == "all",
            recomputed=self.recomputed,
        )


def gather_plan(model: nn.Module, plan: ParallelPlan) -> list[WeightGather]:
    """How every linear and expert weight of an unconverted `model` is gathered, in the model's order; the same on every
    rank."""
    return lay_out(model, plan)[0]


def lay_out(model: nn.Module, plan: ParallelPlan) -> tuple[list[WeightGather], ExpertLayout | None]:
    """`gather_plan`, and where the experts lie (None where they are sharded like all parameters)."""
    from fsdp2.quantization.converters import decide

    owners = {}
    for name, module in model.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(f"{name}.{parameter_name}")
    decisions = decide(model, plan.quantization)
    reasons = {}
    for decision in decisions:
        if decision.quantized:
            users = owners[id(model.get_submodule(decision.module).weight)]
            reasons[decision.module] = _why_never_low_precision(decision, plan, users)
    experts = expert_layout(model, plan, {module for module, reason in reasons.items() if not reason})
    gathers = []
    for decision in decisions:
        shape, shards, shard_dim = decision.shape, plan.fsdp_size, plan.shard_dim(decision.shape)
        if experts is not None and experts.covers(decision.module):
            shape, shards = experts.gathered_shape(shape), experts.shards
            shard_dim = experts.shard_dims[decision.module]
        reason = ""
        if decision.quantized:
            reason = reasons[decision.module] or _why_not_these_shards(decision.kind, shape, shards, shard_dim)
        recomputed = plan.recompute and covers(decision.module, plan.recompute_modules)
        low_precision = decision.quantized and not reason
        gathers.append(WeightGather(decision, low_precision, reason, recomputed, shape, shards, shard_dim))
    return gathers, experts


def _why_never_low_precision(decision: Any, plan: ParallelPlan, owners: list[str]) -> str:
    recipe = plan.quantization.recipe.weight
    if not plan.quantization.low_precision_all_gather:
        return "enable_fsdp_low_precision_all_gather is False"
    if recipe.block_shape not in ((1, 32), (32, 32)):
        return f"a weight of recipe {plan.quantization.recipe.name} is not block-scaled MX"
    if len(owners) > 1:
        others = [owner for owner in owners if owner != f"{decision.module}.weight"]
        return f"shared with {', '.join(others)}, which needs it in {plan.param_dtype}"
    if covers(decision.module, plan.ignored_modules):
        return "inside parallel.ignored_modules: not sharded"
    return ""


def _why_not_these_shards(kind: str, shape: tuple[int, ...], shards: int, shard_dim: int) -> str:
    rows = shape[0]
    if shard_dim != 0 and shards > 1:
        return "sharded along dimension 1: FSDP2 gathers codes and scales along dimension 0 only"
    if rows % shards:
        return f"{rows} rows do not divide by {shards} ranks"
    if kind == "linear" and shards > 1 and (rows // shards) % 32:
        return f"a shard of {rows // shards} rows would cut a block of 32"
    return ""


def describe(model: nn.Module, plan: ParallelPlan) -> str:
    """See `ParallelPlan.describe`."""
    gathers, experts = lay_out(model, plan)
    parameters = {id(p): p for p in model.parameters()}.values()
    total = sum(p.numel() for p in parameters)
    of_experts = _expert_elements(model, experts)
    per_rank = (total - of_experts) // plan.fsdp_size + of_experts // (plan.ep_size * plan.ep_fsdp_size)
    lines = [
        f"plan: {total / 1e6:,.1f} M parameters on {plan.world_size} {plan.device_type} rank(s): "
        f"sharded over {plan.fsdp_size}, replicated over {plan.dp_replicate_size}; "
        f"{per_rank * 4 / 2**20:,.1f} MiB of fp32 masters a rank, {per_rank * 8 / 2**20:,.1f} MiB of AdamW state",
        f"  units gathered as one: {len(match_modules(model, plan.fsdp_modules))} + root; "
        f"compute {plan.param_dtype}, reduce {_reduction(plan)}; "
        f"weights {'are freed after forward' if plan.reshard_after_forward else 'stay gathered until backward'}; "
        f"recompute {', '.join(plan.recompute_modules) if plan.recompute else 'off'}"
        f"{'; masters in host memory' if plan.cpu_offload else ''}",
    ]
    if experts is not None:
        lines.append(_describe_experts(experts, of_experts, plan))
    if plan.quantization is None:
        return "\n".join([*lines, "  quantization: off"])
    on = [g for g in gathers if g.decision.quantized]
    off = [g for g in gathers if not g.decision.quantized]
    lines.append(
        f"  quantization: {plan.quantization.recipe.name} in {len(on)} of {len(gathers)} linear and expert weights"
    )
    lines += _grouped("left alone", [(g.decision.reason, g.decision.module) for g in off])
    low = [g for g in on if g.low_precision]
    lines += _grouped(
        f"gathered in {plan.param_dtype}", [(g.reason, g.decision.module) for g in on if not g.low_precision]
    )
    if low and any(g.shards > 1 for g in low):
        rows = [g.row(plan) for g in low]
        sent = sum(r["gather_bytes_forward"] + r["gather_bytes_backward"] for r in rows)
        bf16 = sum(r["gather_bytes_bf16"] for r in rows) * (2 if plan.reshard_after_forward else 1)
        lines.append(
            f"  low-precision all-gather: {len(low)} weights, {sent / 2**20:,.2f} MiB a step and rank "
            f"instead of {bf16 / 2**20:,.2f} in bf16 ({sent / bf16:.3f})"
        )
        if (
            any(g.recomputed for g in low)
            and plan.quantization.all_gather_mode == "on-demand"
            and plan.quantization.recipe.weight.block_shape != (32, 32)
        ):
            lines.append(
                "  recompute: backward gathers of recomputed modules carry both planes (their forward runs again); "
                "forward gathers stay at one"
            )
    return "\n".join(lines)


def _expert_elements(model: nn.Module, experts: ExpertLayout | None) -> int:
    if experts is None:
        return 0
    return sum(parameter.numel() for name in experts.modules for parameter in model.get_submodule(name).parameters())


def _describe_experts(experts: ExpertLayout, elements: int, plan: ParallelPlan) -> str:
    dims = sorted(set(experts.shard_dims.values()))
    placed = f"sharded over {experts.shards} (dimension {', '.join(map(str, dims))})"
    if experts.ep_size > 1:
        precision = "" if plan.ep_dispatch_precision == "param_dtype" else f" in {plan.ep_dispatch_precision}"
        placed = f"spread over {experts.ep_size}, {placed}, tokens dispatched {plan.ep_dispatcher}{precision}"
    return (
        f"  experts: {elements / 1e6:,.1f} M parameters in {len(experts.modules)} modules {placed}, "
        f"replicated over {experts.replicas}"
    )


def _reduction(plan: ParallelPlan) -> str:
    return (
        plan.reduce_dtype if plan.low_precision_reduce_scatter == "none" else f"in {plan.low_precision_reduce_scatter}"
    )


def _grouped(what: str, reasons: list[tuple[str, str]]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    for reason, module in reasons:
        by_reason.setdefault(reason, []).append(module)
    return [
        f"  {what}: {len(names)} ({names[0]}{', ...' if len(names) > 1 else ''}): {reason}"
        for reason, names in by_reason.items()
    ]
