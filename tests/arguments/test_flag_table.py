"""The table of flags against the contract, and what each status promises: another value than the default warns or is
refused.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from flags_contract import ADDED, CONTRACT, REQUIRED

from fsdp2.errors import ConfigurationError
from mindspeed_llm.arguments import GROUPS, all_flags, parse_arguments
from mindspeed_llm.arguments.flag import NO_EFFECT, NOT_BUILT, WORKS, Flag
from mindspeed_llm.arguments.values import written

ROOT = Path(__file__).resolve().parents[2]
REQUIRED_WORDS = ["--model.model_name_or_path", "m", "--training.output_dir", "o"]
EVERY_FLAG = [
    pytest.param(group, *row, id=f"{group}.{row[0]}")
    for table in (CONTRACT, ADDED)
    for group, rows in table.items()
    for row in rows
]
WIDER_CHOICES = {  # what is allowed here beyond the contract, or checked where the contract leaves text open
    "model.model_id": ("llama",),
    "training.lr_scheduler_type": ("wsd",),
}
CHECKED_ELSEWHERE = {"model.quant_recipe_name"}  # any recipe of the grammar; validation asks the recipe parser
CLOSED = {
    "model.quant_converters": ("quantize.linear.mx", "quantize.moe.mx"),
    "parallel.efsdp_shard_placement_fn": ("shard_by_dim_0", "shard_by_dim_1"),
}


def rows_with(status: str) -> list[Flag]:
    return [row for row in all_flags().values() if row.status == status]


def another_value(row: Flag) -> str:
    """A value that parses and isn't the default, as text."""
    if row.choices:
        return next(choice for choice in row.choices if choice not in (row.default, written(row.default)))
    if row.kind == "bool":
        return str(not row.default)
    if row.kind in ("int", "float"):
        return str((row.default or 0) + (1 if row.kind == "int" else 0.125))
    return "3 4" if row.kind == "list of int" else "something_else"


@pytest.mark.parametrize("group,name,kind,choices,default", EVERY_FLAG)
def test_flag_has_the_name_type_choices_and_default_of_the_contract(group, name, kind, choices, default):
    row = all_flags()[f"{group}.{name}"]
    assert row.kind + ("?" if row.optional else "") == kind
    assert row.required == (default is REQUIRED)
    if not row.required:
        assert row.default == default and type(row.default) is type(default)
    if row.dotted not in CHECKED_ELSEWHERE:
        assert set(row.choices) == {*choices, *WIDER_CHOICES.get(row.dotted, ()), *CLOSED.get(row.dotted, ())}


def test_there_is_no_flag_outside_the_contract():
    known = {f"{group}.{row[0]}" for table in (CONTRACT, ADDED) for group, rows in table.items() for row in rows}
    assert set(all_flags()) == known
    assert list(GROUPS) == ["model", "data", "parallel", "training", "inference", "optimization"]


def test_defaults_give_the_contracts_values_and_no_warning():
    arguments = parse_arguments(REQUIRED_WORDS)
    for row in all_flags().values():
        if not row.required:
            assert arguments.value(row) == row.default
    assert arguments.warnings == []


def test_list_defaults_are_not_shared_between_runs():
    first, second = parse_arguments(REQUIRED_WORDS), parse_arguments(REQUIRED_WORDS)
    first.model.quant_converters.append("x")
    assert second.model.quant_converters == ["quantize.linear.mx"]


@pytest.mark.parametrize("row", rows_with(NO_EFFECT), ids=lambda row: row.dotted)
def test_a_flag_without_effect_is_accepted_with_one_line(row):
    value = another_value(row)
    arguments = parse_arguments([*REQUIRED_WORDS, f"--{row.dotted}", *value.split()])
    assert arguments.warnings == [f"--{row.dotted} {value} has no effect: {row.note}"]


@pytest.mark.parametrize("row", rows_with(NOT_BUILT), ids=lambda row: row.dotted)
def test_a_flag_that_is_not_built_is_refused_with_what_is(row):
    value = another_value(row)
    arguments = parse_arguments([*REQUIRED_WORDS, f"--{row.dotted}", *value.split()])
    with pytest.raises(ConfigurationError, match=re.escape(f"--{row.dotted} {value} is not built yet: {row.note}")):
        arguments.validate(1)


@pytest.mark.parametrize(
    "row,value",
    [pytest.param(row, value, id=f"{row.dotted}-{value}") for row in all_flags().values() for value in row.unbuilt],
)
def test_a_value_that_is_not_built_is_refused_with_what_is(row, value):
    arguments = parse_arguments([*REQUIRED_WORDS, f"--{row.dotted}", value])
    with pytest.raises(ConfigurationError, match=re.escape(f"--{row.dotted} {value} is not built yet")):
        arguments.validate(1)


def test_only_the_stage_has_a_default_that_is_not_built():
    with_unbuilt_values = [row for row in all_flags().values() if row.unbuilt]
    assert [row.dotted for row in with_unbuilt_values if row.default in row.unbuilt] == ["training.stage"]


def test_every_flag_says_what_it_is_and_why_it_does_nothing():
    for row in all_flags().values():
        assert row.help.endswith("."), row.dotted
        assert bool(row.note) == (row.status != WORKS), row.dotted


def test_help_is_grouped_and_complete_and_does_not_import_torch():
    code = (
        "import sys; from mindspeed_llm.arguments import parse_arguments\n"
        "try: parse_arguments(['--help'])\n"
        "finally: print('TORCH' if 'torch' in sys.modules else 'LIGHT')"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0 and result.stdout.endswith("LIGHT\n"), result.stderr
    sections = re.split(r"^(model|data|parallel|training|inference|optimization):$", result.stdout, flags=re.M)
    text_of = dict(zip(sections[1::2], sections[2::2]))
    for row in all_flags().values():
        assert f"  --{row.dotted} " in text_of[row.group]
    words = " ".join(text_of["training"].split())
    assert "--training.lr FLOAT Peak learning rate. Default: 1e-05." in words
    assert "{cosine,linear,constant,wsd}" in words


def test_validation_does_not_import_torch():
    code = (
        "import sys; from mindspeed_llm.arguments import parse_arguments\n"
        f"arguments = parse_arguments({[*REQUIRED_WORDS, '--model.quant_recipe_name', 'mxfp8']!r})\n"
        "try: arguments.validate(2)\n"
        "except ValueError: pass\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_the_page_of_arguments_is_current():
    result = subprocess.run(
        [sys.executable, "tools/arguments_page.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    page = (ROOT / "docs" / "arguments.md").read_text(encoding="utf-8")
    assert all(f"| `{dotted}` |" in page for dotted in all_flags())
