"""`parse_arguments`: CONFIG.yaml and `--group.name value` words to `Arguments`, by the table of flags.

Options, `--help` and conversions are generated from the dataclasses. The command line wins over YAML, YAML over
defaults. Words are taken as text and converted by values.py for both sources. The problems found are raised together
as one ConfigurationError, which names for each the place (flag, or file and line), the value, what is allowed and the
nearest known name.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from fsdp2.errors import ConfigurationError, nearest
from mindspeed_llm.arguments.flag import WORKS, Flag
from mindspeed_llm.arguments.groups import GROUPS, Arguments, all_flags, raise_together
from mindspeed_llm.arguments.values import convert, is_null_word, written
from mindspeed_llm.arguments.yaml_file import read_yaml

_METAVARS = {"bool": "BOOL", "int": "INT", "float": "FLOAT", "str": "TEXT", "str or dict": "TEXT|JSON"}
_NARGS = {"bool": "?", "list of str": "+", "list of int": "+", "str or dict": "+"}


def parse_arguments(argv: Sequence[str], *, program: str = "train_fsdp2.py", purpose: str = "training") -> Arguments:
    """Parse `[CONFIG.yaml] --group.name value ...` (the words after the program's name).

    Args:
        argv: the words.
        program: the name that --help shows.
        purpose: "training", or "inference", for which training.output_dir may be missing (it is then "").

    Raises:
        ConfigurationError: unknown names, wrong types, choices or limits, missing required flags, an unreadable YAML
            file.
        SystemExit: 0, after --help.
    """
    words = list(argv)
    config = words.pop(0) if words and not words[0].startswith("-") else None
    known, stray = _build_parser(program).parse_known_args(words)
    raise_together(_stray_problems(stray))

    values: dict[str, Any] = {}
    problems: list[str] = []
    if config is not None:
        _take_yaml(config, values, problems)
    _take_words(vars(known), values, problems)
    raise_together(problems)
    return _build(values, purpose)


def _take_yaml(path: str, values: dict[str, Any], problems: list[str]) -> None:
    for entry in read_yaml(path, list(GROUPS)):
        row = all_flags().get(entry.key)
        if row is None:
            problems.append(f"{entry.place}: unknown key {entry.key}{_did_you_mean(entry.key)}")
            continue
        try:
            values[row.dotted] = convert(row, _none_if_unset(row, entry.raw) if entry.plain else entry.raw)
        except ValueError as error:
            problems.append(f"{entry.place}: {entry.key}: {written(entry.raw)}: {error}")


def _take_words(words: dict[str, Any], values: dict[str, Any], problems: list[str]) -> None:
    for dotted, raw in words.items():
        row = all_flags()[dotted]
        try:
            values[dotted] = convert(row, _none_if_unset(row, raw))
        except ValueError as error:
            problems.append(f"--{dotted} {written(raw)}: {error}")


def _build(values: dict[str, Any], purpose: str) -> Arguments:
    unset = [row for row in all_flags().values() if row.required and values.get(row.dotted) is None]
    if purpose == "inference":
        values.update({row.dotted: "" for row in unset if row.group == "training"})
        unset = [row for row in unset if row.group != "training"]
    raise_together([f"--{row.dotted} is required: {row.help}" for row in unset])
    _place_quantized_experts(values)
    groups: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for dotted, value in values.items():
        row = all_flags()[dotted]
        groups[row.group][row.name] = value
    return Arguments(**{group: group_class(**groups[group]) for group, group_class in GROUPS.items()})


def _place_quantized_experts(values: dict[str, Any]) -> None:
    """Where experts are gathered as MX codes only one dimension works, which the default is not: it is taken unless the
    other one was asked for, which the plan then refuses with the reason."""

    def value(dotted: str) -> Any:
        return values.get(dotted, all_flags()[dotted].default)

    if (
        value("parallel.ep_fsdp_size") > 1
        and value("model.quant_recipe_name") is not None
        and "quantize.moe.mx" in value("model.quant_converters")
        and value("model.enable_fsdp_low_precision_all_gather")
    ):
        values.setdefault("parallel.efsdp_shard_placement_fn", "shard_by_dim_0")


def _none_if_unset(row: Flag, raw: Any) -> Any:
    """Turn a bare `None` or `null` into None, unless the word is a choice of the flag (`none`)."""
    word = raw[0] if isinstance(raw, list) and len(raw) == 1 else raw
    return None if isinstance(word, str) and is_null_word(word) and word not in row.choices else raw


def _stray_problems(stray: list[str]) -> list[str]:
    names = [word.split("=", 1)[0] for word in stray if word.startswith("--")]
    if names:  # the other stray words are their values
        return [f"unknown flag {name}{_did_you_mean(name)} (--help lists all flags)" for name in names]
    return [f"unexpected word {word!r}: CONFIG.yaml comes first, then --group.name value" for word in stray]


def _did_you_mean(name: str) -> str:
    """Propose the flag of that name in another group, else one that begins with it, else the closest of its group."""
    dashes = "--" if name.startswith("--") else ""
    group, _, last = name.removeprefix(dashes).rpartition(".")
    if not group and (hint := nearest(last, GROUPS)):
        return hint
    dotted_by_last = {row.name: row.dotted for row in all_flags().values()}
    same_group = {row.name: row.dotted for row in all_flags().values() if row.group == group} or dotted_by_last
    begins_with_it = sorted((known for known in same_group if known.startswith(last)), key=len)
    close = difflib.get_close_matches(last, same_group, n=1) or difflib.get_close_matches(last, dotted_by_last, n=1)
    found = ([last] if last in dotted_by_last else []) + begins_with_it + close
    return f"; did you mean '{dashes}{dotted_by_last[found[0]]}'?" if found else ""


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of printing a page of usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message.removeprefix("argument "))


def _build_parser(program: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program,
        usage="%(prog)s [CONFIG.yaml] --group.name value ...",
        description=(
            "The command line wins over CONFIG.yaml, which wins over the defaults. CONFIG.yaml holds the groups below "
            "as keys. A bare boolean flag means True; None or null means unset; lists are separated by spaces."
        ),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for group, group_class in GROUPS.items():
        section = parser.add_argument_group(group, group_class.__doc__)
        for row in all_flags().values():
            if row.group == group:
                section.add_argument(f"--{row.dotted}", help=_help(row), **_argparse_words(row))
    return parser


def _argparse_words(row: Flag) -> dict[str, Any]:
    metavar = "{" + ",".join(row.choices) + "}" if row.choices else _METAVARS.get(row.kind, "WORD")
    words: dict[str, Any] = {"metavar": metavar, "nargs": _NARGS.get(row.kind)}
    if row.kind == "bool":
        words["const"] = "True"
    return words


def _help(row: Flag) -> str:
    text = row.help + (" Required." if row.required else f" Default: {written(row.default)}.")
    if row.status != WORKS:
        text += f" [{row.status}: {row.note}]"
    for values, built in row.unbuilt_by_reason().items():
        text += f" [not built yet: {', '.join(values)}; {built}]"
    return text.replace("%", "%%")
