"""Converters: which modules of a model become MX modules, and why the others do not.

    quantize.linear.mx   nn.Linear      -> MXLinear
    quantize.moe.mx      GroupedLinear  -> MXGroupedLinear   (the experts)

`decide` looks at every linear and expert weight of a model and gives each a decision, a recipe or the reason it is left
alone; `convert` carries the decisions out. Both run before anything is allocated or sharded (the model may be on the
meta device), on every rank alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from fsdp2.errors import ConfigurationError, nearest
from fsdp2.expert_parallel.grouped_linear import GroupedLinear
from fsdp2.matmul import Linear
from fsdp2.patterns import covers
from fsdp2.plan import QuantizationPlan
from fsdp2.quantization.grouped import MXGroupedLinear
from fsdp2.quantization.linear import MXLinear

CONVERTERS = {
    "quantize.linear.mx": (nn.Linear, MXLinear, "linear"),
    "quantize.moe.mx": (GroupedLinear, MXGroupedLinear, "experts"),
}
PLAIN_FORWARDS = (nn.Linear.forward, Linear.forward, GroupedLinear.forward)


@dataclass(frozen=True)
class WeightDecision:
    """What happens to one linear or expert weight.

    Attributes:
        module: full module name.
        kind: "linear" or "experts".
        shape: of the whole weight, [N, K] or [E, I, O].
        quantized: whether the module's GEMMs run on the recipe.
        reason: why not, empty when quantized.
    """

    module: str
    kind: str
    shape: tuple[int, ...]
    quantized: bool
    reason: str


def _weights(model: nn.Module) -> Iterable[tuple[str, nn.Module, str, str]]:
    for name, module in model.named_modules():
        for converter, (source, _, kind) in CONVERTERS.items():
            if isinstance(module, source):
                yield name, module, converter, kind


def _reason_to_leave(name: str, module: nn.Module, converter: str, plan: QuantizationPlan | None) -> str:
    if plan is None:
        return "no quantization recipe"
    if converter not in plan.converters:
        return f"converter {converter} is not in quant_converters"
    if not covers(name, plan.apply_modules):
        return "outside quant_apply_modules"
    for pattern in plan.ignored_modules:
        if covers(name, [pattern]):
            return f"quant_ignored_modules '{pattern}'"
    if type(module).forward not in PLAIN_FORWARDS:
        return f"{type(module).__name__} has a forward of its own"
    return ""


def decide(model: nn.Module, plan: QuantizationPlan | None) -> list[WeightDecision]:
    """A decision for every linear and expert weight of an unconverted `model`, in the model's order.

    Raises:
        ConfigurationError: an unknown converter, one that finds no module, or a pattern of `apply_modules` under which
            nothing is quantized.
    """
    if plan is not None and plan.recipe.strategy != "dynamic":
        raise ConfigurationError(
            f"--model.quant_recipe_name {plan.recipe.name}: layers take their scales from the tensors themselves "
            f"(dynamic); {plan.recipe.strategy} scaling is built for single tensors only (DelayedQuantizer)"
        )
    decisions = []
    for name, module, converter, kind in _weights(model):
        reason = _reason_to_leave(name, module, converter, plan)
        decisions.append(WeightDecision(name, kind, tuple(module.weight.shape), not reason, reason))
    if plan is not None:
        _refuse_empty(model, plan, decisions)
    return decisions


def _refuse_empty(model: nn.Module, plan: QuantizationPlan, decisions: list[WeightDecision]) -> None:
    for converter in plan.converters:
        if converter not in CONVERTERS:
            raise ConfigurationError(
                f"--model.quant_converters '{converter}': allowed are {', '.join(CONVERTERS)}"
                f"{nearest(converter, CONVERTERS)}"
            )
        source, _, kind = CONVERTERS[converter]
        if not any(decision.kind == kind for decision in decisions):
            raise ConfigurationError(
                f"--model.quant_converters '{converter}' finds no {source.__name__} in this model; remove it"
            )
    names = [name for name, _ in model.named_modules() if name]
    for pattern in plan.apply_modules:
        if not any(covers(name, [pattern]) for name in names):
            raise ConfigurationError(
                f"--model.quant_apply_modules '{pattern}' matches no module of the model{nearest(pattern, names)}"
            )
        if not any(decision.quantized and covers(decision.module, [pattern]) for decision in decisions):
            inside = next((d for d in decisions if covers(d.module, [pattern])), None)
            why = (
                f"'{inside.module}' and the rest of them stay: {inside.reason}"
                if inside
                else "no linear or expert module lies inside"
            )
            raise ConfigurationError(f"--model.quant_apply_modules '{pattern}' quantizes nothing: {why}")


def convert(model: nn.Module, plan: QuantizationPlan, decisions: list[WeightDecision]) -> None:
    """Replace the modules that `decisions` quantize, in place, keeping parameters, names and hooks."""
    classes = {kind: target for _, target, kind in CONVERTERS.values()}
    for decision in decisions:
        if decision.quantized:
            parent_name, _, child = decision.module.rpartition(".")
            parent = model.get_submodule(parent_name)
            setattr(parent, child, classes[decision.kind].from_float(getattr(parent, child), plan.recipe))
