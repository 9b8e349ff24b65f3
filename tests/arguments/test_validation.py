"""Checks before torch: sizes, schedule, recipe, patterns and paths, each with the value that would have worked."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fsdp2.errors import ConfigurationError
from mindspeed_llm.arguments import parse_arguments


@pytest.fixture
def words(tmp_path) -> list[str]:
    """A configuration that is right for one process, all its files in `tmp_path`."""
    model = tmp_path / "qwen3_tiny"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (model / "tokenizer.json").write_text("{}")
    for suffix in (".bin", ".idx"):
        (tmp_path / f"corpus_text_document{suffix}").touch()
    return [
        *("--model.model_name_or_path", str(model), "--model.train_from_scratch"),
        *("--data.dataset", str(tmp_path / "corpus_text_document")),
        *("--training.output_dir", str(tmp_path / "out"), "--training.stage", "pt"),
    ]


def refusal(words: list[str], extra: str, world_size: int = 1, purpose: str = "training") -> str:
    arguments = parse_arguments([*words, *extra.split()], purpose=purpose)
    with pytest.raises(ConfigurationError) as error:
        arguments.validate(world_size, purpose=purpose)
    return str(error.value)


def test_right_configurations_pass(words, tmp_path):
    for extra, world_size in (
        ("", 1),
        ("--parallel.fsdp_size 4", 4),
        ("--parallel.fsdp_size 4 --parallel.dp_replicate_size 2", 8),
        ("--parallel.fsdp_size 8 --parallel.ep_size 2 --parallel.ep_fsdp_size 2", 8),
        ("--model.model_id qwen3", 1),
        ("--data.split 98,2,0 --training.eval_steps 5", 1),
        (f"--model.tokenizer_name_or_path {tmp_path / 'qwen3_tiny'}", 1),
        (f"--data.dataset 0.3 {tmp_path / 'corpus_text_document'} 0.7 {tmp_path / 'corpus_text_document.bin'}", 1),
        ("--model.quant_recipe_name mxfp8 --model.quant_format E4M3 --model.quant_block_size 32", 1),
        ("--model.quant_recipe_name mxfp8-32x32 --model.quant_scale_rule rceil", 1),
        ("--model.quant_recipe_name DYNAMIC_mx-1-1-32_e4m3_E4M3_E4M3", 1),
        ("--model.quant_recipe_name None --model.quant_converters quantize.moe.mx --model.quant_scale_rule even", 1),
        ("--training.lr_scheduler_type constant --training.lr 1e-9", 1),
    ):
        parse_arguments([*words, *extra.split()]).validate(world_size)


def test_quantization_words_of_the_reference_recipe_pass(words):
    quantization = (
        "--model.quant_recipe_name mxfp8 --model.quant_format E4M3 --model.quant_block_size 32 "
        "--model.enable_fsdp_low_precision_all_gather --model.quant_converters quantize.linear.mx quantize.moe.mx "
        "--parallel.efsdp_shard_placement_fn shard_by_dim_0"
    )
    arguments = parse_arguments([*words, *quantization.split()])
    arguments.validate(1)
    assert arguments.warnings == []


def test_quantized_experts_are_sharded_where_codes_can_travel_unless_asked_otherwise(words):
    sharded = "--parallel.ep_fsdp_size 2 --parallel.fsdp_size 2 --model.quant_converters quantize.moe.mx"
    quantized = f"{sharded} --model.quant_recipe_name mxfp8"

    def placement(extra: str) -> str | None:
        return parse_arguments([*words, *extra.split()]).parallel.efsdp_shard_placement_fn

    assert placement(sharded) == "shard_by_dim_1"
    assert placement(quantized) == "shard_by_dim_0"
    assert placement(f"{quantized} --model.enable_fsdp_low_precision_all_gather False") == "shard_by_dim_1"
    assert placement(f"{quantized} --parallel.efsdp_shard_placement_fn shard_by_dim_1") == "shard_by_dim_1"


def test_unset_stage_says_which_to_set(words):
    del words[-2:]
    assert "--training.stage sft is not built yet: built is pre-training, --training.stage pt" in refusal(words, "")


@pytest.mark.parametrize(
    "extra,world_size,parts",
    [
        ("", 2, ["--parallel.fsdp_size 1", "2 processes", "--parallel.fsdp_size 2"]),
        ("--parallel.dp_replicate_size 2", 8, ["--parallel.dp_replicate_size 2", "--parallel.fsdp_size 4"]),
        ("--parallel.fsdp_size 3 --parallel.dp_replicate_size 3", 8, ["--parallel.fsdp_size 8"]),
        (
            "--parallel.tp_size 2 --parallel.fsdp_size 2",
            4,
            ["--parallel.tp_size 2 is not built yet: built are fsdp_size"],
        ),
        (
            "--parallel.fsdp_size 8 --parallel.ep_size 3 --parallel.ep_fsdp_size 2",
            8,
            ["--parallel.ep_size 3", "is 6, which does not divide the 8", "--parallel.ep_size 2"],
        ),
        ("--parallel.ep_dispatcher mc2", 1, ["mc2 is not built yet: mc2 is an NPU's merged kernel"]),
        ("--parallel.recompute --parallel.recompute_modules []", 1, ["--parallel.recompute_modules, which is empty"]),
        ("--training.max_steps 0", 1, ["--training.max_steps 0", "at least 1, or -1"]),
        ("--training.lr 1e-7", 1, ["--training.min_lr 1e-06", "--training.lr 1e-07", "1e-07 or less"]),
        (
            "--training.warmup_steps 5 --training.max_steps 4",
            1,
            ["--training.warmup_steps 5", "--training.max_steps 4"],
        ),
        ("--training.eval_steps 5", 1, ["--training.eval_steps 5", "--data.split 100,0,0", "98,2,0"]),
        ("--data.split 1;2", 1, ["--data.split 1;2", "for example"]),
        ("--model.quant_recipe_name mxfp9", 1, ["unknown --model.quant_recipe_name 'mxfp9'", "did you mean 'mxfp8'"]),
        (
            "--model.quant_recipe_name mxfp8 --model.quant_block_size 64",
            1,
            ["--model.quant_block_size 64 contradicts --model.quant_recipe_name 'mxfp8', which has blocks of 32"],
        ),
        ("--model.quant_recipe_name mxfp8 --model.quant_format E5M2", 1, ["--model.quant_format 'E5M2'", "E4M3"]),
        ("--model.quant_recipe_name fp8-blockwise", 1, ["fp8-blockwise", "not built yet", "mxfp8-32x32"]),
        ("--model.quant_recipe_name mxfp8 --model.quant_converters []", 1, ["empty --model.quant_converters"]),
        ("--parallel.fsdp_modules model.layers.{x}", 1, ["--parallel.fsdp_modules", "'{x}'", "'{0-3}'"]),
        ("--model.model_id llama", 1, ["model_type qwen3", "--model.model_id llama"]),
        ("--model.model_id deepseek_v4", 1, ["deepseek_v4 is not built yet: built are llama, qwen3, qwen3_moe"]),
        ("--model.train_from_scratch False", 1, ["holds no *.safetensors", "--model.train_from_scratch"]),
        ("--data.dataset None", 1, ["--data.dataset is required", "tools/preprocess_data.py"]),
        ("--data.dataset 0.3 a b", 1, ["--data.dataset 0.3 a b", "for example 0.3"]),
    ],
)
def test_contradiction_is_refused_with_what_fits(words, extra, world_size, parts):
    message = refusal(words, extra, world_size)
    for part in parts:
        assert part in message


def test_missing_paths_name_the_nearest_neighbour(words, tmp_path):
    for flag, given, proposed in (
        ("model.model_name_or_path", "qwen3_tny", "qwen3_tiny"),
        ("model.tokenizer_name_or_path", "qwen3-tiny", "qwen3_tiny"),
        ("data.dataset", "corpus_txt_document", "corpus_text_document"),
    ):
        message = refusal(words, f"--{flag} {tmp_path / given}")
        assert f"--{flag}" in message and given in message and f"did you mean '{proposed}'?" in message


def test_a_prefix_without_one_of_its_two_files_is_refused(words, tmp_path):
    (tmp_path / "corpus_text_document.bin").unlink()
    assert "corpus_text_document.bin" in refusal(words, "")


def test_a_path_broken_higher_up_names_the_part_that_is_missing(words, tmp_path):
    message = refusal(words, f"--model.model_name_or_path {tmp_path}/nowhere/deeper/model")
    assert f"{tmp_path.resolve()} has no 'nowhere'" in message


def test_a_folder_that_is_no_model_or_tokenizer_is_refused(words, tmp_path):
    (tmp_path / "empty").mkdir()
    message = refusal(
        words, f"--model.model_name_or_path {tmp_path}/empty --model.tokenizer_name_or_path {tmp_path}/empty"
    )
    assert "config.json" in message and "neither tokenizer.json nor a sentencepiece .model" in message


def test_another_model_family_is_refused_with_those_built(words, tmp_path):
    (tmp_path / "qwen3_tiny" / "config.json").write_text('{"model_type": "gpt_oss"}')
    message = refusal(words, "")
    assert "gpt_oss" in message and "qwen3_moe" in message and "llama" in message


def test_a_config_json_alone_has_no_weights_to_load(words, tmp_path):
    file = tmp_path / "qwen3_tiny" / "config.json"
    parse_arguments([*words, "--model.model_name_or_path", str(file)]).validate(1)
    extra = f"--model.model_name_or_path {file} --model.train_from_scratch False"
    assert "has no weights" in refusal(words, extra)


def test_an_output_folder_that_cannot_be_written_is_refused(words, tmp_path):
    assert "is a file" in refusal(words, f"--training.output_dir {tmp_path / 'corpus_text_document.bin'}/run")
    read_only = tmp_path / "read_only"
    read_only.mkdir(mode=0o500)
    if not os.access(read_only, os.W_OK):  # root may write everywhere
        assert "is not writable" in refusal(words, f"--training.output_dir {read_only}/run")


def test_all_problems_are_told_at_once(words):
    message = refusal(words, "--parallel.tp_size 2 --training.max_steps 0 --data.split x", world_size=3)
    assert message.startswith("4 problems:\n- ")


def test_inference_checks_the_model_and_its_weights_only(words, tmp_path):
    inference = ["--model.model_name_or_path", str(tmp_path / "qwen3_tiny"), "--model.train_from_scratch"]
    assert "holds no *.safetensors" in refusal(inference, "", purpose="inference")
    Path(tmp_path / "qwen3_tiny" / "model.safetensors").touch()
    parse_arguments(inference, purpose="inference").validate(1, purpose="inference")
