"""Recipes: which element format, block and scale each of a linear layer's three tensors gets, and the names users call
them by.

A recipe has a short name (`mxfp8`) or a long one that spells everything out:

    <strategy>_<granularity>[-b0-b1-b2]_<inputs>_<weight>_<grads>[_<scale rule>]      dynamic_MX-1-1-32_E4M3_E4M3_E4M3

in any case. `b0-b1-b2` is the block of the WEIGHT ([experts,] rows, columns); inputs and gradients always have one row
per block, because a tile over tokens would let one token's outlier decide another token's precision. The scale rule is
written only when it is not `floor`. BF16 for one of the three tensors leaves that one unquantized. Torch is not
imported here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fsdp2.errors import ConfigurationError, nearest
from fsdp2.quantization.formats import (
    ELEMENT_FORMATS,
    SCALE_FORMATS,
    SCALE_RULES,
    UNQUANTIZED,
    WHOLE,
    check_scale_rule,
    element_format,
)

EIGHT_BIT = ("E4M3", "E5M2")
NAMED_RECIPES = {
    "mxfp8": "dynamic_MX-1-1-32_E4M3_E4M3_E4M3",
    "mxfp8-rceil": "dynamic_MX-1-1-32_E4M3_E4M3_E4M3_rceil",
    "mxfp8-hybrid": "dynamic_MX-1-1-32_E4M3_E4M3_E5M2",
    "mxfp8-32x32": "dynamic_MX-1-32-32_E4M3_E4M3_E4M3",
    "mxfp6": "dynamic_MX-1-1-32_E2M3_E2M3_E3M2",
    "mxfp4-weights": "dynamic_MX-1-1-32_E4M3_E2M1_E4M3",
    "fp8-blockwise": "dynamic_blockwise-1-128-128_E4M3_E4M3_E4M3",
    "fp8-per-tensor": "dynamic_per_tensor_E4M3_E4M3_E5M2",
    "fp8-per-channel": "dynamic_per_channel_E4M3_E4M3_E4M3",
    "fp8-delayed": "delayed_per_tensor_E4M3_E4M3_E5M2",
}


@dataclass(frozen=True)
class Granularity:
    """What one scale covers. `blocks`: the weight blocks a name may spell out, each with the block of inputs and
    gradients; first is default.
    """

    name: str
    scale_format: str  # "E8M0" (a power of two, one byte) or "FP32" (amax / largest, four bytes)
    blocks: dict[tuple[int, int], tuple[int, int]]
    spelled_out: bool  # whether the long name carries the block
    element_formats: tuple[str, ...]
    strategies: tuple[str, ...] = ("dynamic",)


GRANULARITIES = {
    row.name.lower(): row
    for row in (
        Granularity("MX", "E8M0", {(1, 32): (1, 32), (32, 32): (1, 32)}, True, tuple(ELEMENT_FORMATS)),
        Granularity("blockwise", "FP32", {(128, 128): (1, 128), (1, 128): (1, 128)}, True, EIGHT_BIT),
        Granularity("per_tensor", "FP32", {(WHOLE, WHOLE): (WHOLE, WHOLE)}, False, EIGHT_BIT, ("dynamic", "delayed")),
        Granularity("per_channel", "FP32", {(1, WHOLE): (1, WHOLE)}, False, EIGHT_BIT),
    )
}
_LONG_NAME = re.compile(r"([^_]+)_(.+?)((?:-\d+)*)_([^_]+)_([^_]+)_([^_]+?)(?:_(floor|ceil|rceil|even))?")
_GRAMMAR = "<strategy>_<granularity>[-b0-b1-b2]_<inputs>_<weight>_<grads>, for example " + NAMED_RECIPES["mxfp8"]


@dataclass(frozen=True)
class TensorRecipe:
    """How one tensor is quantized: its element format and block. BF16 with an empty block means that it is not."""

    element_format: str
    block_shape: tuple[int, ...]  # (rows, columns), columns along the contracted axis; () for BF16

    @property
    def is_quantized(self) -> bool:
        return self.element_format != UNQUANTIZED

    @property
    def scale_format(self) -> str | None:
        """"E8M0", "FP32", or None for an unquantized tensor."""
        return SCALE_FORMATS[self.block_shape] if self.is_quantized else None

    @property
    def bytes_per_element(self) -> float:
        """Bytes of code and scale an element takes in memory and on the wire; scales of whole dimensions count as
        nothing.
        """
        if not self.is_quantized:
            return 2.0
        rows, columns = self.block_shape
        scale = 0.0 if columns == WHOLE else {"E8M0": 1, "FP32": 4}[self.scale_format] / (rows * columns)
        return 1.0 / element_format(self.element_format).codes_per_byte + scale


@dataclass(frozen=True)
class QuantRecipe:
    """The quantization of a linear layer's inputs, weight and output gradients. Build it with `from_name`; equal
    recipes have equal names.
    """

    name: str  # the short name where one exists, else the long one
    strategy: str  # "dynamic": the scale comes from the tensor itself; "delayed": from its amax in the last steps
    granularity: str
    inputs: TensorRecipe
    weight: TensorRecipe
    grads: TensorRecipe
    scale_rule: str  # one of SCALE_RULES; only E8M0 scales have a choice, the others say "floor"

    @classmethod
    def from_name(
        cls,
        name: str,
        *,
        scale_rule: str | None = None,
        quant_format: str | None = None,
        quant_block_size: int | None = None,
    ) -> QuantRecipe:
        """Return the recipe called `name`, short or long, in any case.

        `scale_rule` (`--model.quant_scale_rule`) sets the rule of an MX recipe whose name does not fix one.
        `quant_format` and `quant_block_size` must agree with the recipe. None means that the user gave no such flag.
        Raises `ConfigurationError` naming both values on any conflict.
        """
        short = name.lower()
        recipe, rule_in_name = _parse(NAMED_RECIPES.get(short, name), name)
        if quant_format is not None:
            recipe._check_format(quant_format)
        if quant_block_size is not None:
            recipe._check_block_size(quant_block_size)
        if scale_rule is not None:
            recipe = recipe._with_rule(check_scale_rule(scale_rule), rule_in_name)
        return recipe

    @property
    def long_name(self) -> str:
        """The name that spells everything out; `from_name` of it gives an equal recipe."""
        row = GRANULARITIES[self.granularity.lower()]
        block = next((own for own, other in row.blocks.items() if self._has_blocks(own, other)), next(iter(row.blocks)))
        spelled = f"-1-{block[0]}-{block[1]}" if row.spelled_out else ""
        formats = "_".join(t.element_format for t in (self.inputs, self.weight, self.grads))
        rule = f"_{self.scale_rule}" if self.scale_rule != SCALE_RULES[0] else ""
        return f"{self.strategy}_{self.granularity}{spelled}_{formats}{rule}"

    def _has_blocks(self, weight_block: tuple[int, int], other_block: tuple[int, int]) -> bool:
        tensors = ((self.weight, weight_block), (self.inputs, other_block), (self.grads, other_block))
        return all(t.block_shape == block for t, block in tensors if t.is_quantized)

    def _named(self, **changes) -> QuantRecipe:
        fields = {**self.__dict__, **changes}
        recipe = QuantRecipe(**fields)
        short = {long: short for short, long in NAMED_RECIPES.items()}
        return QuantRecipe(**{**fields, "name": short.get(recipe.long_name, recipe.long_name)})

    def _with_rule(self, rule: str, rule_in_name: str | None) -> QuantRecipe:
        if rule == self.scale_rule:
            return self
        if rule_in_name is not None:
            raise ConfigurationError(
                f"quant_scale_rule '{rule}' contradicts quant_recipe_name '{self.name}', which fixes the rule "
                f"'{rule_in_name}'; give only one of them"
            )
        if GRANULARITIES[self.granularity.lower()].scale_format != "E8M0":
            raise ConfigurationError(
                f"quant_scale_rule '{rule}' does not apply to quant_recipe_name '{self.name}', whose scales are fp32 "
                f"(amax / largest); scale rules belong to MX recipes such as mxfp8"
            )
        return self._named(scale_rule=rule)

    def _check_format(self, quant_format: str) -> None:
        used = [self.inputs.element_format, self.weight.element_format]
        if quant_format.upper() not in used:
            raise ConfigurationError(
                f"quant_format '{quant_format}' contradicts quant_recipe_name '{self.name}', which quantizes inputs to "
                f"{used[0]} and weights to {used[1]}; drop quant_format or choose another recipe"
            )

    def _check_block_size(self, size: int) -> None:
        sizes = {t.block_shape[1] for t in (self.inputs, self.weight, self.grads) if t.is_quantized}
        if sizes != {size}:
            has = "has no blocks" if WHOLE in sizes else f"has blocks of {', '.join(map(str, sorted(sizes)))}"
            raise ConfigurationError(
                f"quant_block_size {size} contradicts quant_recipe_name '{self.name}', which {has}; "
                f"drop quant_block_size or choose another recipe"
            )


def _parse(long_name: str, given: str) -> tuple[QuantRecipe, str | None]:
    """Return the recipe of a long name and the scale rule the name fixes (None when it leaves it open); `given` is what
    the user wrote.
    """
    match = _LONG_NAME.fullmatch(long_name.lower())
    if match is None:
        known, hint = ", ".join(NAMED_RECIPES), nearest(given.lower(), NAMED_RECIPES)
        raise ConfigurationError(f"unknown quant_recipe_name '{given}'; known are {known}, and {_GRAMMAR}{hint}")
    strategy, granularity_name, block_text, *format_names, rule = match.groups()
    row = GRANULARITIES.get(granularity_name)
    if row is None:
        known = [r.name for r in GRANULARITIES.values()]
        hint = nearest(granularity_name, known)
        raise _refusal(given, f"unknown granularity '{granularity_name}'; known are {', '.join(known)}{hint}")
    if strategy not in row.strategies:
        hint = nearest(strategy, row.strategies)
        raise _refusal(given, f"{row.name} has no strategy '{strategy}', only {' and '.join(row.strategies)}{hint}")
    weight_block = _block(row, block_text, given)
    other_block = row.blocks[weight_block]
    inputs, weight, grads = (
        _tensor(row, f, block, given) for f, block in zip(format_names, (other_block, weight_block, other_block))
    )
    if not any(t.is_quantized for t in (inputs, weight, grads)):
        raise _refusal(given, "it quantizes nothing; use None, or a format other than BF16 for one of the tensors")
    if rule and row.scale_format != "E8M0":
        raise _refusal(given, f"scale rule '{rule}' does not apply: {row.name} has fp32 scales, which have no rule")
    recipe = QuantRecipe("", strategy, row.name, inputs, weight, grads, rule or SCALE_RULES[0])
    return recipe._named(), rule


def _refusal(given: str, problem: str) -> ConfigurationError:
    return ConfigurationError(f"quant_recipe_name '{given}': {problem}")


def _block(row: Granularity, text: str, given: str) -> tuple[int, int]:
    """The weight block that `-b0-b1-b2` spells, or the granularity's default."""
    if not text:
        return next(iter(row.blocks))
    sizes = tuple(int(n) for n in text[1:].split("-"))
    allowed = [(1, *block) for block in row.blocks] if row.spelled_out else []
    if sizes not in allowed:
        can = " or ".join("-".join(map(str, block)) for block in allowed) or "no block"
        raise _refusal(given, f"block {text[1:]} does not fit {row.name}, which takes {can}")
    return sizes[1:]


def _tensor(row: Granularity, format_name: str, block: tuple[int, int], given: str) -> TensorRecipe:
    if format_name.upper() == UNQUANTIZED:
        return TensorRecipe(UNQUANTIZED, ())
    try:
        fmt = element_format(format_name).name
    except ConfigurationError as error:
        raise _refusal(given, f"{error} (or {UNQUANTIZED} to leave that tensor alone)") from None
    if fmt not in row.element_formats:
        raise _refusal(given, f"{row.name} takes {', '.join(row.element_formats)} or {UNQUANTIZED}, not {fmt}")
    return TensorRecipe(fmt, block)
