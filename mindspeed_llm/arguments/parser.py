"""`parse_arguments`: CONFIG.yaml and `--group.name value` words to `Arguments`, by the table of flags.

Options, `--help` and conversions are generated from the dataclasses. The command line wins over YAML, YAML over
defaults. Words are taken as text and converted by values.py for both sources. All problems of the input are collected
and raised as one ConfigurationError, which names for each the place (flag, or file and line), the value, what is
allowed and the nearest known name.
"""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from typing import Any, NoReturn

from fsdp2.errors import ConfigurationError, nearest
from mindspeed_llm.arguments.flag import NO_EFFECT, NOT_BUILT, Flag
from mindspeed_llm.arguments.groups import GROUPS, Arguments, all_flags, written
from mindspeed_llm.arguments.values import convert, is_null_word
from mindspeed_llm.arguments.yaml_file import read_yaml

_METAVARS = {"bool": "BOOL", "int": "INT", "float": "FLOAT", "str": "TEXT", "str or dict": "TEXT|JSON"}
_NARGS = {"bool": "?", "list of str": "+", "list of int": "+", "str or dict": "+"}


def parse_arguments(argv: Sequence[str], *, program: str = "train_fsdp2.py", purpose: str = "training") -> Arguments:
    """Parse `[CONFIG.yaml] --group.name value ...` (without the program's name).

    program: the name that --help shows. purpose: "training", or "inference", for which training.output_dir may be missing (it is then "").
    Raises ConfigurationError for unknown names, wrong types, choices or limits, and missing required flags; SystemExit(0) after --help.
    """
    parser = _build_parser(program)
    known, stray = parser.parse_known_args(list(argv))
    problems = [_stray_message(word) for word in stray if word.startswith("-")]
    if not problems:
        problems = [f"unexpected word {word!r}: CONFIG.yaml comes first, then --group.name value" for word in stray]
    if problems:
        _raise(problems)

    words = vars(known)
    values: dict[str, Any] = {}
    config = words.pop("config", None)
    if config is not None:
        _take_yaml(config, values, problems)
    for dotted, raw in words.items():
        row = all_flags()[dotted]
        try:
            values[dotted] = convert(row, _null_if_unset(row, raw))
        except ValueError as error:
            problems.append(f"--{dotted} {written(raw)}: {error}")
    if problems:
        _raise(problems)
    return _build(values, purpose)


def _take_yaml(path: str, values: dict[str, Any], problems: list[str]) -> None:
    for entry in read_yaml(path, list(GROUPS)):
        row = all_flags().get(entry.key)
        if row is None:
            problems.append(f"{entry.place}: unknown key {entry.key}{_did_you_mean(entry.key, '')}")
            continue
        try:
            values[row.dotted] = convert(row, _null_if_unset(row, entry.raw) if entry.plain else entry.raw)
        except ValueError as error:
            problems.append(f"{entry.place}: {entry.key}: {written(entry.raw)}: {error}")


def _build(values: dict[str, Any], purpose: str) -> Arguments:
    missing_flags = []
    for row in all_flags().values():
        if row.required and values.get(row.dotted) is None:
            if purpose == "inference" and row.group == "training":
                values[row.dotted] = ""
            else:
                missing_flags.append(f"--{row.dotted} is required: {row.help}")
    if missing_flags:
        _raise(missing_flags)
    groups = {}
    for group, group_class in GROUPS.items():
        own = {
            row.name: values[row.dotted] for row in all_flags().values() if row.group == group and row.dotted in values
        }
        groups[group] = group_class(**own)
    return Arguments(**groups)


def _null_if_unset(row: Flag, raw: Any) -> Any:
    """Turn a bare `None` or `null` into None, unless the word is a choice of the flag (`none`)."""
    word = raw[0] if isinstance(raw, list) and len(raw) == 1 else raw
    return None if isinstance(word, str) and is_null_word(word) and word not in row.choices else raw


def _raise(problems: list[str]) -> NoReturn:
    if len(problems) == 1:
        raise ConfigurationError(problems[0])
    raise ConfigurationError(f"{len(problems)} problems:\n" + "\n".join(f"- {problem}" for problem in problems))


def _stray_message(word: str) -> str:
    name = word.split("=", 1)[0]
    return f"unknown flag {name}{_did_you_mean(name.lstrip('-'), '--')} (--help lists all flags)"


def _did_you_mean(name: str, prefix: str) -> str:
    """Propose the flag of that name in another group, else the closest name of the same group, else the closest of all."""
    flags = all_flags()
    group, _, last = name.rpartition(".")
    same_name = [dotted for dotted in flags if dotted.rpartition(".")[2] == last]
    if same_name:
        return f"; did you mean '{prefix}{same_name[0]}'?"
    in_group = [dotted for dotted in flags if dotted.startswith(f"{group}.")]
    by_last_name = {dotted.rpartition(".")[2]: dotted for dotted in in_group or flags}
    hint = nearest(last, by_last_name)
    if not hint:
        return nearest(f"{prefix}{name}", [f"{prefix}{dotted}" for dotted in flags])
    for last_name, dotted in by_last_name.items():
        if f"'{last_name}'" in hint:
            return hint.replace(f"'{last_name}'", f"'{prefix}{dotted}'")
    return hint


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of printing a page of usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(message.replace("argument --", "--", 1))


def _build_parser(program: str) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program,
        usage="%(prog)s [CONFIG.yaml] --group.name value ...",
        description="Values of the command line win over CONFIG.yaml, which wins over the defaults. CONFIG.yaml holds the groups "
        "below as keys. A bare boolean flag means True; None or null means unset; lists are separated by spaces.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.description = textwrap.fill(parser.description, 110)
    parser.add_argument("config", nargs="?", metavar="CONFIG.yaml", help="configuration file, before all flags")
    for group, group_class in GROUPS.items():
        section = parser.add_argument_group(group, group_class.__doc__)
        for row in all_flags().values():
            if row.group == group:
                section.add_argument(f"--{row.dotted}", help=_help(row), **_argparse_words(row))
    return parser


def _argparse_words(row: Flag) -> dict[str, Any]:
    words: dict[str, Any] = {
        "metavar": "{" + ",".join(row.choices) + "}" if row.choices else _METAVARS.get(row.kind, "WORD")
    }
    if row.kind in _NARGS:
        words["nargs"] = _NARGS[row.kind]
    if row.kind == "bool":
        words["const"] = "True"
    return words


def _help(row: Flag) -> str:
    text = row.help + (" Required." if row.required else f" Default: {written(row.default)}.")
    if row.status in (NO_EFFECT, NOT_BUILT):
        text += f" [{row.status}: {row.note}]"
    for value, built in row.unbuilt.items():
        text += f" [{value} not built yet: {built}]"
    return text.replace("%", "%%")
