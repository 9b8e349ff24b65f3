"""Convert between a run's checkpoint (torch DCP) and a Hugging Face folder, parameter by parameter.

    python tools/convert_checkpoint.py OUTPUT_DIR/checkpoints/step_00000200 HF_FOLDER [--dtype bf16|fp16|fp32|mxfp8]
    python tools/convert_checkpoint.py HF_FOLDER CHECKPOINT_FOLDER

The direction follows from what SOURCE is; a run's folder stands for its last checkpoint. To Hugging Face, the model's
configuration and the tokenizer are those of the checkpoint's config.yaml unless --model or --tokenizer names others.
A Hugging Face folder becomes a checkpoint of weights alone, in fp32. No more than one file's worth (--max-shard-bytes)
and one parameter are in memory. Exit status 2 with one message when something does not fit.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed.checkpoint as dcp
import yaml
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from tqdm import tqdm

from fsdp2.errors import ConfigurationError
from mindspeed_llm.data import load_tokenizer
from mindspeed_llm.models import build_model, load_config
from mindspeed_llm.models.hf_export import MXFP8, write_hf_folder
from mindspeed_llm.models.hf_folder import DTYPES, TensorFolder
from mindspeed_llm.models.hf_weights import check_fits, read_parameter
from mindspeed_llm.models.local_shard import parameters_at_rest
from mindspeed_llm.training import checkpoint_folder
from mindspeed_llm.training.checkpoint_folder import CONFIG_FILE, STATE_FILE, TrainerState
from mindspeed_llm.training.dcp_files import SafeReader


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="checkpoint, folder of a run, or Hugging Face folder")
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("--dtype", default="bf16", choices=(*DTYPES, MXFP8), help="of Hugging Face weights")
    parser.add_argument("--model", type=Path, help="config.json or its folder; default: what the run used")
    parser.add_argument("--tokenizer", type=Path, help="to put beside the weights; default: what the run used")
    parser.add_argument("--max-shard-bytes", type=int, default=5_000_000_000, help="of a safetensors file")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is how it should be here
    try:
        if (options.source / "config.json").is_file():
            to_checkpoint(options.source, options.target)
        else:
            to_hugging_face(options)
    except (ConfigurationError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def to_hugging_face(options: argparse.Namespace) -> None:
    """Write the weights of a checkpoint, complete or of the model alone, as a Hugging Face folder."""
    source = options.source
    if not (source / STATE_FILE).exists():
        found = checkpoint_folder.complete_checkpoints(source) or checkpoint_folder.complete_checkpoints(
            source / "checkpoints"
        )
        source = found[-1] if found else source
    if what := checkpoint_folder.problem(source, resume=False):
        raise ConfigurationError(f"{what}; wanted is a checkpoint, a run's folder or a Hugging Face folder")
    settings = (yaml.safe_load((source / CONFIG_FILE).read_text(encoding="utf-8")) or {}).get("model", {})
    model_path = options.model or settings.get("model_name_or_path")
    if not model_path:
        raise ConfigurationError(f"{source / CONFIG_FILE} names no model: give --model")
    model = build_model(load_config(model_path))
    reader = SafeReader(source)
    saved = reader.read_metadata().state_dict_metadata
    shapes = {name: parameter.shape for name, parameter in parameters_at_rest(model).items()}
    for name, shape in shapes.items():
        entry = saved.get(f"model.{name}")
        if entry is None or tuple(entry.size) != tuple(shape):
            found = "lacks it" if entry is None else f"has it as {list(entry.size)}"
            raise ConfigurationError(f"{source} is not of the model {model_path}: {name} is {list(shape)}, it {found}")

    def read(name: str) -> torch.Tensor:
        entry = saved[f"model.{name}"]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        dcp.load({f"model.{name}": tensor}, storage_reader=SafeReader(source), no_dist=True)
        return tensor

    with _bar(shapes) as bar:
        write_hf_folder(
            options.target,
            model.config,
            shapes,
            read,
            dtype=options.dtype,
            max_shard_bytes=options.max_shard_bytes,
            progress=bar.update,
        )
    tokenizer = options.tokenizer or settings.get("tokenizer_name_or_path") or settings.get("model_name_or_path")
    try:
        load_tokenizer(str(tokenizer)).save(options.target)
    except ConfigurationError as error:
        if options.tokenizer:
            raise
        print(f"warning: no tokenizer beside the weights (--tokenizer names one): {error}", file=sys.stderr)


class _ReadWhenWritten(DefaultSavePlanner):
    """Plans a checkpoint from shapes, and reads every tensor from the Hugging Face folder when it is written."""

    def __init__(self, source: TensorFolder, shapes: dict[str, torch.Size], bar: tqdm) -> None:
        super().__init__()
        self.source, self.shapes, self.bar = source, shapes, bar

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        name = index.fqn.removeprefix("model.")
        self.bar.update(self.shapes[name].numel())
        return read_parameter(self.source, name, self.shapes[name])


def to_checkpoint(source: Path, target: Path) -> None:
    """Write a Hugging Face folder's weights as a checkpoint of weights alone, in fp32."""
    if target.exists() and any(target.iterdir()):
        raise ConfigurationError(f"{target}: is not empty; name a new folder")
    model = build_model(load_config(source))
    parameters = parameters_at_rest(model)
    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    folder = TensorFolder(source)
    check_fits(folder, parameters, tied=model.config.tie_word_embeddings)
    temporary = target.with_name(f"writing_{target.name}")
    temporary.mkdir(parents=True, exist_ok=True)
    if target.exists():
        target.rmdir()
    with _bar(shapes) as bar:
        planned = {f"model.{name}": torch.empty(shape, device="meta") for name, shape in shapes.items()}
        planner = _ReadWhenWritten(folder, shapes, bar)
        dcp.save(planned, storage_writer=FileSystemWriter(temporary), planner=planner, no_dist=True)
    names = {"model": {"model_name_or_path": str(source), "tokenizer_name_or_path": str(source)}}
    state = replace(TrainerState(), only_model=True)
    checkpoint_folder.commit(temporary, target, state, yaml.safe_dump(names))


def _bar(shapes: dict[str, torch.Size]) -> tqdm:
    total = sum(shape.numel() for shape in shapes.values())
    return tqdm(total=total, unit=" parameters", unit_scale=True, dynamic_ncols=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
