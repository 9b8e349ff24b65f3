"""Words and YAML to arguments: every way to write a value, which source wins, the round trip, and every mistake."""

from __future__ import annotations

import json
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdp2.errors import ConfigurationError
from mindspeed_llm.arguments import all_flags, parse_arguments
from mindspeed_llm.arguments.flag import Flag

REQUIRED_WORDS = ["--model.model_name_or_path", "m", "--training.output_dir", "o"]


def parse(*words: str):
    return parse_arguments([*REQUIRED_WORDS, *words])


def parse_yaml(tmp_path, text: str, *words: str):
    file = tmp_path / "config.yaml"
    file.write_text(text, encoding="utf-8")
    return parse_arguments([str(file), *REQUIRED_WORDS, *words])


@pytest.mark.parametrize(
    "words,expected",
    [
        ("--parallel.recompute", True),
        ("--parallel.recompute True", True),
        ("--parallel.recompute=true", True),
        ("--parallel.recompute 1", True),
        ("--parallel.recompute False", False),
        ("--parallel.recompute false", False),
        ("--parallel.recompute 0", False),
        ("--parallel.recompute None", False),
        ("--training.lr 3e-3", 3e-3),
        ("--training.lr 1", 1.0),
        ("--training.lr null", 1e-5),
        ("--training.max_steps -1", -1),
        ("--training.save_total_limit None", None),
        ("--training.save_total_limit 7", 7),
        ("--model.quant_converters quantize.linear.mx quantize.moe.mx", ["quantize.linear.mx", "quantize.moe.mx"]),
        ("--model.quant_ignored_modules []", []),
        ('--model.quant_ignored_modules ["*gate","lm_head"]', ["*gate", "lm_head"]),
        ("--parallel.ignored_modules None", None),
        ("--parallel.ignored_modules model.layers.{0-3}", ["model.layers.{0-3}"]),
        ("--parallel.chunk_mbs_arg_indexs 0 2", [0, 2]),
        ("--training.profile_ranks -1", [-1]),
        ("--data.dataset prefix", "prefix"),
        ("--data.dataset 0.3 a 0.7 b", "0.3 a 0.7 b"),
        ('--data.dataset {"a":0.3}', {"a": 0.3}),
        ("--data.split 98,2,0", "98,2,0"),
        ("--parallel.low_precision_reduce_scatter none", "none"),
        ("--training.lr 1 --training.lr 2", 2.0),
    ],
)
def test_value_on_the_command_line(words, expected):
    first = words.split()[0].lstrip("-").split("=")[0]
    value = parse(*words.split()).value(all_flags()[first])
    assert value == expected and type(value) is type(expected)


def test_quoted_list_on_the_command_line_holds_several_words():
    assert parse("--model.quant_converters", "quantize.linear.mx quantize.moe.mx").model.quant_converters == [
        "quantize.linear.mx",
        "quantize.moe.mx",
    ]


@pytest.mark.parametrize(
    "line,expected",
    [
        ("training.lr: 1e-5", 1e-5),  # PyYAML alone reads text here
        ("training.lr: '1e-5'", 1e-5),
        ("training.max_steps: 010", 10),  # and 8 here
        ("parallel.recompute: no", False),
        ("parallel.recompute: True", True),
        ("parallel.recompute:", False),
        ("training.save_total_limit: null", None),
        ("training.save_total_limit: ~", None),
        ("training.save_total_limit: None", None),
        ("data.default_system: None", None),
        ("data.default_system: 'None'", "None"),
        ("data.default_system: ''", ""),
        ("data.split: 100", "100"),
        ("data.split: 100,0,0", "100,0,0"),
        ("training.profile_save_path: 2024-01-01", "2024-01-01"),
        ("model.quant_ignored_modules: '*lm_head'", ["*lm_head"]),
        ("model.quant_ignored_modules: ['*lm_head', '*gate']", ["*lm_head", "*gate"]),
        ("model.quant_ignored_modules: []", []),
        ("model.quant_apply_modules:\n- model.layers.{*}\n- lm_head", ["model.layers.{*}", "lm_head"]),
        ("parallel.ignored_modules: null", None),
        ("training.profile_ranks: [0, -1]", [0, -1]),
        ("data.dataset: {a: 0.3, b: 1}", {"a": 0.3, "b": 1}),
        ("data.dataset: '0.3 a 0.7 b'", "0.3 a 0.7 b"),
        ("data.dataset: [0.3, a, 0.7, b]", "0.3 a 0.7 b"),
    ],
)
def test_value_in_yaml_flat_and_nested(tmp_path, line, expected):
    dotted = line.split(":")[0]
    group, name = dotted.split(".")
    nested = f"{group}:\n  {name}" + line.removeprefix(dotted).replace("\n", "\n  ")
    for text in (line, nested):
        value = parse_yaml(tmp_path, text).value(all_flags()[dotted])
        assert value == expected and type(value) is type(expected)


def test_command_line_wins_over_yaml_and_yaml_over_defaults(tmp_path):
    text = "training:\n  lr: 2.0\n  max_steps: 5\ntraining.seed: 7\nparallel: {recompute: true}\ninference:\n"
    arguments = parse_yaml(tmp_path, text, "--training.lr", "3", "--training.save_total_limit", "None")
    training = arguments.training
    assert (training.lr, training.max_steps, training.seed, training.save_total_limit) == (3.0, 5, 7, None)
    assert arguments.parallel.recompute is True and training.logging_steps == 1


def test_anchors_and_merge_keys_of_yaml_work(tmp_path):
    text = "model: {quant_apply_modules: &modules [a, b]}\nparallel: {recompute_modules: *modules}\n"
    assert parse_yaml(tmp_path, text).parallel.recompute_modules == ["a", "b"]
    text = "training: {<<: [{lr: 4, seed: 1, max_steps: 5}, {max_steps: 6}], seed: 2}\n"
    training = parse_yaml(tmp_path, text).training
    assert (training.lr, training.seed, training.max_steps) == (4.0, 2, 5)


def test_required_flags_can_come_from_yaml(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: {model_name_or_path: here}\ntraining: {output_dir: there}\n")
    assert parse_arguments([str(file)]).training.output_dir == "there"


def test_inference_needs_no_output_folder():
    arguments = parse_arguments(["--model.model_name_or_path", "m"], purpose="inference")
    assert arguments.training.output_dir == ""
    with pytest.raises(ConfigurationError, match=r"--training.output_dir is required"):
        parse_arguments(["--model.model_name_or_path", "m"])


@pytest.mark.parametrize(
    "words,parts",
    [
        ("--parallel.fsdp_siz 3", ["--parallel.fsdp_siz", "did you mean '--parallel.fsdp_size'?"]),
        ("--parallel.fsdp_siz=3", ["--parallel.fsdp_siz;", "'--parallel.fsdp_size'"]),
        ("--model.model_nam x", ["'--model.model_name_or_path'"]),
        ("--training.recompute", ["--training.recompute", "'--parallel.recompute'"]),
        ("--lr 3", ["--lr", "'--training.lr'"]),
        ("--trainng.lr 3", ["--trainng.lr", "'--training.lr'"]),
        ("--training.zzzzzz 3", ["unknown flag --training.zzzzzz (--help"]),
        ("--training.l 3", ["unknown flag --training.l"]),  # no abbreviations
        ("--training.lr abc", ["--training.lr abc", "a number, at least 0"]),
        ("--training.lr nan", ["--training.lr nan", "a number"]),
        ("--training.lr -1", ["--training.lr -1", "at least 0"]),
        ("--training.adam_beta1 1", ["--training.adam_beta1 1", "less than 1"]),
        ("--training.adam_epsilon 0", ["--training.adam_epsilon 0", "more than 0"]),
        ("--training.seed 1.5", ["--training.seed 1.5", "a whole number"]),
        ("--training.seed", ["--training.seed", "one argument"]),
        ("--parallel.recompute maybe", ["--parallel.recompute maybe", "True or False"]),
        ("--training.optimizer adam", ["--training.optimizer adam", "adamw, muon, fused_adamw", "'adamw'"]),
        ("--model.quant_converters quantize.linar.mx", ["quantize.linar.mx", "'quantize.linear.mx'"]),
        ("--model.quant_ignored_modules None", ["--model.quant_ignored_modules None", "[]"]),
        ("--training.profile_ranks a", ["--training.profile_ranks a", "whole numbers"]),
        ('--data.dataset {"a"', ["--data.dataset", "JSON"]),
        ("--training.lr 1 2", ["unexpected word '2'", "CONFIG.yaml comes first"]),
        ("extra.yaml", ["extra.yaml", "CONFIG.yaml comes first"]),
    ],
)
def test_mistake_on_the_command_line(words, parts):
    with pytest.raises(ConfigurationError) as error:
        parse(*words.split())
    for part in parts:
        assert part in str(error.value)


@pytest.mark.parametrize(
    "text,parts",
    [
        ("training:\n  lr: 1\n  sede: 2\n", ["config.yaml, line 3: unknown key training.sede", "'training.seed'"]),
        ("trainig:\n  lr: 1\n", ["config.yaml, line 1: unknown key trainig; did you mean 'training'?"]),
        ("\nlr: 1\n", ["config.yaml, line 2: unknown key lr; did you mean 'training.lr'?"]),
        ("training: {lr: abc}\n", ["config.yaml, line 1: training.lr: abc: allowed is a number"]),
        ("training:\n  lr: [1, 2]\n", ["line 2: training.lr: 1 2: takes one value, not a list"]),
        ("training:\n  lr: {a: 1}\n", ["line 2: training.lr", "not a group of keys"]),
        ("training: 5\n", ["line 1: training is a group of flags"]),
        ("- a\n- b\n", ["line 1: expected lines of `key: value`"]),
        ("training:\n  lr: 1\ntraining.lr: 2\n", ["line 3: training.lr is given twice, first at", "line 2"]),
        ("training:\n  lr: 1\n  lr: 2\n", ["line 3: training.lr is given twice"]),
        ("model:\n  quant_ignored_modules: *lm_head\n", ["line 2, column", "alias", "quote module patterns"]),
        ("model: [\n", ["config.yaml, line"]),
        ("data: {dataset: !!python/object:os.system {}}\n", ["line 1"]),
        ("a: 1\n---\nb: 2\n", ["config.yaml, line 2"]),
        ("a: \x00\n", ["config.yaml"]),
    ],
)
def test_mistake_in_yaml(tmp_path, text, parts):
    with pytest.raises(ConfigurationError) as error:
        parse_yaml(tmp_path, text)
    for part in parts:
        assert part in str(error.value)


def test_yaml_file_that_cannot_be_read(tmp_path):
    (tmp_path / "pretrain_tiny.yaml").write_text("")
    with pytest.raises(ConfigurationError, match=r"pretrain_tny.yaml; did you mean 'pretrain_tiny.yaml'"):
        parse_arguments([str(tmp_path / "pretrain_tny.yaml")])
    with pytest.raises(ConfigurationError, match=r"no_such_folder/a.yaml; .* has no 'no_such_folder'"):
        parse_arguments(["no_such_folder/a.yaml"])
    with pytest.raises(ConfigurationError, match="cannot be read"):
        parse_arguments([str(tmp_path)])
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe4\n")
    with pytest.raises(ConfigurationError, match=r"latin.yaml cannot be read"):
        parse_arguments([str(tmp_path / "latin.yaml")])


def test_all_mistakes_are_told_at_once(tmp_path):
    with pytest.raises(ConfigurationError) as error:
        parse_yaml(tmp_path, "training: {sede: 1, lr: x}\n", "--training.optimizer", "sgd")
    lines = str(error.value).splitlines()
    assert lines[0] == "3 problems:" and len(lines) == 4
    assert "sede" in lines[1] and "training.lr" in lines[2] and "--training.optimizer sgd" in lines[3]


WORDS = st.text(string.ascii_letters + string.digits + "._*{}-?:#'\"/ äöπ", min_size=1, max_size=12)


def values_of(row: Flag) -> st.SearchStrategy:
    """Any value of a flag that parsing can give."""
    if row.choices:
        element = st.sampled_from(row.choices)
        value = st.lists(element) if row.kind.startswith("list") else element
    elif row.kind == "bool":
        value = st.booleans()
    elif row.kind in ("int", "float"):
        low = max((bound for bound in (row.minimum, row.above) if bound is not None), default=-1e9)
        high = row.below if row.below is not None else 1e9
        numbers = st.integers(int(low), int(high)) if row.kind == "int" else st.floats(low, high)
        value = numbers.filter(lambda n: (row.above is None or n > row.above) and (row.below is None or n < row.below))
    elif row.kind == "list of int":
        value = st.lists(st.integers(-9, 9))
    elif row.kind == "list of str":
        value = st.lists(WORDS.map(lambda word: "".join(word.split()).lstrip("[") or "x"))  # patterns have no spaces
    elif row.kind == "str or dict":
        mapping = st.dictionaries(WORDS, st.floats(allow_nan=False) | WORDS | st.none(), max_size=2)
        value = WORDS.filter(lambda word: not word.startswith("{")) | mapping
    else:
        value = WORDS | st.sampled_from(["None", "null", "true", "1e5", "~", "", "12:30", "010", "- a", "a: b", "a\nb"])
    return st.none() | value if row.optional else value


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_resolved_configuration_gives_the_same_arguments_again(tmp_path, data):
    rows = data.draw(
        st.lists(st.sampled_from(list(all_flags().values())), max_size=8, unique_by=lambda row: row.dotted)
    )
    groups: dict[str, dict] = {"model": {"model_name_or_path": "m"}, "training": {"output_dir": "o"}}
    for row in rows:
        groups.setdefault(row.group, {})[row.name] = data.draw(values_of(row), label=row.dotted)
    first_file, second_file = tmp_path / "first.yaml", tmp_path / "second.yaml"
    # JSON text is YAML with every text quoted: written without the code under test.
    first_file.write_text(json.dumps(groups), encoding="utf-8")
    first = parse_arguments([str(first_file)])
    for row in rows:
        assert first.value(row) == groups[row.group][row.name]
    second_file.write_text(first.to_yaml(), encoding="utf-8")
    second = parse_arguments([str(second_file)])
    assert second == first and second.to_yaml() == first.to_yaml()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(max_size=8) | st.sampled_from([f"--{name}" for name in all_flags()]), max_size=6))
def test_any_words_parse_or_are_refused(words):
    try:
        parse_arguments(words)
    except ConfigurationError as error:
        assert str(error)
    except SystemExit as stop:
        assert stop.code == 0 and {"-h", "--help"} & set(words)
