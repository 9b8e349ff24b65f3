"""Checks before torch is imported: what is not built is refused, sizes and flags must agree, and paths must exist.

Each check takes the arguments and yields its problems; `validate` raises them together. A check that needs a model or a
corpus in memory is not here: whoever opens those raises it, still before training starts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from fsdp2.errors import ConfigurationError
from fsdp2.mesh import check_expert_mesh_sizes, check_mesh_sizes
from fsdp2.patterns import matches
from fsdp2.quantization.recipe import QuantRecipe
from mindspeed_llm.arguments.flag import NOT_BUILT
from mindspeed_llm.arguments.groups import Arguments, all_flags, raise_together
from mindspeed_llm.arguments.paths import missing
from mindspeed_llm.arguments.values import written
from mindspeed_llm.data.blend import parse_blend
from mindspeed_llm.data.split import parse_split
from mindspeed_llm.models.config import MODEL_TYPES, ModelConfig

_PATTERN_FLAGS = (
    "model.quant_apply_modules",
    "model.quant_ignored_modules",
    "parallel.fsdp_modules",
    "parallel.ignored_modules",
    "parallel.recompute_modules",
    "parallel.ep_modules",
    "parallel.ep_fsdp_modules",
)


def validate(arguments: Arguments, world_size: int, purpose: str) -> None:
    """See `Arguments.validate`."""
    problems = [*_not_built(arguments, purpose), *_model(arguments, purpose), *_tokenizer(arguments)]
    if purpose != "inference":
        problems += [*_sizes(arguments, world_size), *_quantization(arguments), *_patterns(arguments)]
    if purpose == "training":
        problems += [*_schedule(arguments), *_dataset(arguments), *_output_dir(arguments)]
    raise_together(problems)


def _not_built(arguments: Arguments, purpose: str) -> Iterator[str]:
    groups = ("model", "inference", "optimization") if purpose == "inference" else None
    for row in all_flags().values():
        if groups and row.group not in groups:
            continue
        value = arguments.value(row)
        if isinstance(value, (str, int)) and value in row.unbuilt:
            yield f"--{row.dotted} {written(value)} is not built yet: {row.unbuilt[value]}"
        elif row.status == NOT_BUILT and value != row.default:
            yield f"--{row.dotted} {written(value)} is not built yet: {row.note}"


def _sizes(arguments: Arguments, world_size: int) -> Iterator[str]:
    parallel = arguments.parallel
    if parallel.world_size is not None and not arguments.training.dry_run:
        yield (
            f"--parallel.world_size {parallel.world_size} plans for processes that are not there: "
            "add --training.dry_run, or leave it out to train"
        )
    for check, sizes in (
        (check_mesh_sizes, (parallel.fsdp_size, parallel.dp_replicate_size)),
        (check_expert_mesh_sizes, (parallel.ep_size, parallel.ep_fsdp_size)),
    ):
        try:
            check(world_size, *sizes)
        except ConfigurationError as error:
            yield str(error)
    if parallel.recompute and not parallel.recompute_modules:
        yield "--parallel.recompute True needs --parallel.recompute_modules, which is empty"


def _schedule(arguments: Arguments) -> Iterator[str]:
    training = arguments.training
    if training.max_steps == 0:
        yield "--training.max_steps 0: allowed is a whole number, at least 1, or -1 to train num_train_epochs"
    if training.lr_scheduler_type != "constant" and training.min_lr > training.lr:
        yield (
            f"--training.min_lr {training.min_lr} is above --training.lr {training.lr}; "
            f"it is where {training.lr_scheduler_type} ends, so set it to {training.lr} or less"
        )
    if 0 < training.max_steps < training.warmup_steps:
        yield (
            f"--training.warmup_steps {training.warmup_steps} is more than --training.max_steps {training.max_steps}; "
            f"set it to {training.max_steps} or less"
        )


def _quantization(arguments: Arguments) -> Iterator[str]:
    model = arguments.model
    if model.quant_recipe_name is None:
        return
    try:
        recipe = QuantRecipe.from_name(
            model.quant_recipe_name,
            scale_rule=model.quant_scale_rule,
            quant_format=model.quant_format,
            quant_block_size=model.quant_block_size,
        )
    except ConfigurationError as error:
        yield re.sub(r"(?<!model\.)\b(quant_(?:recipe_name|scale_rule|format|block_size))\b", r"--model.\1", str(error))
        return
    tensors = (recipe.inputs, recipe.weight, recipe.grads)
    if any(tensor.scale_format == "FP32" for tensor in tensors):
        yield (
            f"--model.quant_recipe_name {model.quant_recipe_name} has fp32 scales, which is not built yet: "
            f"built are MX recipes, for example mxfp8 and mxfp8-32x32"
        )
    for name in ("quant_converters", "quant_apply_modules"):
        if not getattr(model, name):
            yield (
                f"--model.quant_recipe_name {model.quant_recipe_name} with an empty --model.{name} quantizes nothing; "
                f"set --model.quant_recipe_name None to train without quantization"
            )


def _patterns(arguments: Arguments) -> Iterator[str]:
    for dotted in _PATTERN_FLAGS:
        for pattern in arguments.value(all_flags()[dotted]) or ():
            try:
                matches("", [pattern])
            except ConfigurationError as error:
                yield f"--{dotted}: {error}"


def _model(arguments: Arguments, purpose: str) -> Iterator[str]:
    model = arguments.model
    path = Path(model.model_name_or_path)
    if not path.exists():
        yield f"--model.model_name_or_path: {missing(str(path))} (names of a model hub are not downloaded)"
        return
    try:
        config = ModelConfig.from_path(path)
    except ConfigurationError as error:
        yield f"--model.model_name_or_path: {error}"
        return
    where = f"--model.model_name_or_path {path}"
    if model.model_id in MODEL_TYPES and model.model_id != config.model_type:
        yield f"{where} has model_type {config.model_type}, which contradicts --model.model_id {model.model_id}"
    if model.train_from_scratch and purpose != "inference":
        return
    if path.is_file():
        yield f"{where} has no weights; give a folder that has, or initialize them with --model.train_from_scratch"
    elif not any(path.glob("*.safetensors")):
        yield f"{where} holds no *.safetensors; give a folder that does, or set --model.train_from_scratch"


def _tokenizer(arguments: Arguments) -> Iterator[str]:
    given = arguments.model.tokenizer_name_or_path
    if given is None:
        return
    path = Path(given)
    if not path.exists():
        yield f"--model.tokenizer_name_or_path: {missing(given)} (names of a model hub are not downloaded)"
    elif path.is_dir() and not (path / "tokenizer.json").is_file() and not any(path.glob("*.model")):
        yield f"--model.tokenizer_name_or_path {given} holds neither tokenizer.json nor a sentencepiece .model"


def _dataset(arguments: Arguments) -> Iterator[str]:
    data = arguments.data
    try:
        held_out = parse_split(data.split)[1]
    except ConfigurationError as error:
        yield str(error)
        return
    if arguments.training.eval_steps > 0 and held_out == 0:
        yield (
            f"--training.eval_steps {arguments.training.eval_steps} contradicts --data.split {data.split}, which holds "
            "nothing out; set for example --data.split 98,2,0"
        )
    if not data.dataset:
        yield "--data.dataset is required for training: the prefix of a .bin/.idx pair (tools/preprocess_data.py)"
        return
    try:
        prefixes, _ = parse_blend(data.dataset)
    except ConfigurationError as error:
        yield str(error)
        return
    for prefix in prefixes:
        for suffix in (".idx", ".bin"):
            if not Path(prefix + suffix).is_file():
                yield f"--data.dataset: {missing(prefix, suffix)}; tools/preprocess_data.py writes .bin/.idx pairs"
                break


def _output_dir(arguments: Arguments) -> Iterator[str]:
    path = Path(arguments.training.output_dir)
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    if not existing.is_dir():
        yield f"--training.output_dir {path}: {existing} is a file, not a folder"
    elif not os.access(existing, os.W_OK):
        yield f"--training.output_dir {path}: {existing} is not writable"
