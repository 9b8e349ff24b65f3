"""The six groups together: the `Arguments` object that everything downstream receives, and the list of all flags.

`Arguments.to_yaml()` is what a run keeps as config.yaml: every flag with its resolved value, such that reading it
back gives an equal object.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import yaml

from fsdp2.errors import ConfigurationError
from mindspeed_llm.arguments.data import DataArguments
from mindspeed_llm.arguments.flag import NO_EFFECT, Flag, flags_of
from mindspeed_llm.arguments.inference import InferenceArguments
from mindspeed_llm.arguments.model import ModelArguments
from mindspeed_llm.arguments.optimization import OptimizationArguments
from mindspeed_llm.arguments.parallel import ParallelArguments
from mindspeed_llm.arguments.training import TrainingArguments
from mindspeed_llm.arguments.values import is_null_word, written

GROUPS: dict[str, type] = {
    "model": ModelArguments,
    "data": DataArguments,
    "parallel": ParallelArguments,
    "training": TrainingArguments,
    "inference": InferenceArguments,
    "optimization": OptimizationArguments,
}


@functools.cache
def all_flags() -> dict[str, Flag]:
    """Return every flag by its dotted name (`training.lr`), in the order of --help."""
    return {row.dotted: row for group, group_class in GROUPS.items() for row in flags_of(group, group_class)}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """A resolved configuration: `.model.quant_recipe_name`, `.training.lr`, ... Equal objects describe the same run."""

    model: ModelArguments
    data: DataArguments
    parallel: ParallelArguments
    training: TrainingArguments
    inference: InferenceArguments
    optimization: OptimizationArguments

    def value(self, row: Flag) -> Any:
        return getattr(getattr(self, row.group), row.name)

    @property
    def warnings(self) -> list[str]:
        """One line for every flag that was set to something other than its default and has no effect here."""
        return [
            f"--{row.dotted} {written(self.value(row))} has no effect: {row.note}"
            for row in all_flags().values()
            if row.status == NO_EFFECT and self.value(row) != row.default
        ]

    def to_yaml(self) -> str:
        """Return the configuration as YAML, group by group; `parse_arguments([file])` of it gives an equal object."""
        groups = {
            group: {row.name: self.value(row) for row in flags_of(group, group_class)}
            for group, group_class in GROUPS.items()
        }
        return yaml.dump(groups, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)

    def on(self, world_size: int) -> Arguments:
        """The same for `world_size` processes: a layout that nobody chose (all sizes 1) shards over all of them."""
        sizes = (self.parallel.fsdp_size, self.parallel.dp_replicate_size)
        if sizes != (1, 1) or world_size == 1:
            return self
        return dataclasses.replace(self, parallel=dataclasses.replace(self.parallel, fsdp_size=world_size))

    def validate(self, world_size: int, *, purpose: str = "training") -> None:
        """Refuse what cannot work, before torch is imported or anything is allocated.

        Args:
            world_size: number of processes.
            purpose: "training"; "planning", which needs no dataset; or "inference", which needs no layout either.

        Raises:
            ConfigurationError: names every problem that was found.
        """
        from mindspeed_llm.arguments.validation import validate

        validate(self, world_size, purpose)


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes texts such as `None`, which mean "unset" when they stand bare."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if is_null_word(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def raise_together(problems: list[str]) -> None:
    """Raise one ConfigurationError that lists all problems; nothing when there are none."""
    if len(problems) == 1:
        raise ConfigurationError(problems[0])
    if problems:
        raise ConfigurationError(f"{len(problems)} problems:\n" + "\n".join(f"- {problem}" for problem in problems))
