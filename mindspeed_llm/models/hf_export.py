"""Write a Hugging Face folder one file at a time, in bf16, fp16, fp32 or MXFP8.

The layout is planned from shapes alone, so "model-00001-of-00007" is known at the first file, and tensors are asked for
one by one: at most one file's worth and one parameter are in memory. In MXFP8 the projections inside the layers are
codes and scales (1.03 bytes an element) and config.json's `quantization_config` says so, with the keys that SGLang
reads; embeddings, output projection, routers and norms stay in bf16.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fsdp2.errors import ConfigurationError, nearest
from fsdp2.quantization.formats import MX_BLOCK
from fsdp2.quantization.mx import quantize
from mindspeed_llm.models.config import ModelConfig
from mindspeed_llm.models.hf_folder import DTYPES, INDEX_FILE, SCALE_SUFFIX, SINGLE_FILE, disk_tensors

MXFP8 = "mxfp8"
_TORCH_NAMES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", MXFP8: "bfloat16"}


def write_hf_folder(
    folder: str | Path,
    config: ModelConfig,
    shapes: Mapping[str, torch.Size],
    read: Callable[[str], Tensor | None],
    *,
    dtype: str = "bf16",
    max_shard_bytes: int = 5_000_000_000,
    progress: Callable[[int], Any] = lambda parameters: None,
) -> None:
    """Write config.json and safetensors of the parameters `shapes`.

    Args:
        read: gives parameter `name` whole, of any floating dtype; called once for each, in order. None on a rank that
            only takes part in gathering it: such a rank writes nothing.
        dtype: a key of DTYPES, or "mxfp8".
        max_shard_bytes: of a file; a single larger tensor makes a larger file.
        progress: called after every parameter with its number of elements.

    A file appears under its name only when it is complete, the index and config.json last.

    Raises:
        ConfigurationError: another dtype.
    """
    if dtype not in _TORCH_NAMES:
        known = ", ".join(_TORCH_NAMES)
        raise ConfigurationError(f"dtype {dtype!r} is not one of {known}{nearest(dtype, _TORCH_NAMES)}")
    target = Path(folder)
    plan, total_bytes = _plan_files(shapes, dtype, max_shard_bytes)
    files = list(dict.fromkeys(plan.values()))
    pending: dict[str, Tensor] = {}
    current, writes = files[0], False
    for name, shape in shapes.items():
        whole = read(name)
        if whole is not None:
            writes = True
            target.mkdir(parents=True, exist_ok=True)
            for disk_name, tensor in _on_disk(name, shape, whole, dtype):
                if plan[disk_name] != current:
                    _write(pending, target / current)
                    pending, current = {}, plan[disk_name]
                pending[disk_name] = tensor
        progress(shape.numel())
    if not writes:
        return
    _write(pending, target / current)
    _remove_stale(target, files)
    if len(files) > 1:
        write_text(
            target / INDEX_FILE, json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": plan}, indent=2)
        )
    described = config.to_hf(_TORCH_NAMES[dtype])
    described.pop("quantization_config", None)
    if dtype == MXFP8:
        kept = [name.removesuffix(".weight") for name in plan if name.endswith(".weight") and not _is_quantized(name)]
        described["quantization_config"] = {
            "quant_method": MXFP8,
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "weight_block_size": [1, MX_BLOCK],
            "activation_scheme": "dynamic",
            "modules_to_not_convert": kept,
        }
    write_text(target / "config.json", json.dumps(described, indent=2))


def _is_quantized(disk_name: str) -> bool:
    """Whether a weight is in MXFP8 in such a folder: the projections of attention and MLPs, experts included."""
    return disk_name.startswith("model.layers.") and disk_name.endswith("_proj.weight")


def _plan_files(shapes: Mapping[str, torch.Size], dtype: str, max_bytes: int) -> tuple[dict[str, str], int]:
    """{disk name: file} in the order of writing, and the bytes of all tensors."""
    groups: list[list[str]] = [[]]
    filled = total = 0
    for name, full_shape in shapes.items():
        for disk_name, _, shape, _ in disk_tensors(name, full_shape):
            names, size = [disk_name], torch.Size(shape).numel() * DTYPES.get(dtype, torch.bfloat16).itemsize
            if dtype == MXFP8 and _is_quantized(disk_name):
                rows, columns = shape
                names, size = [disk_name, disk_name + SCALE_SUFFIX], rows * (columns + -(-columns // MX_BLOCK))
            if groups[-1] and filled + size > max_bytes:
                groups.append([])
                filled = 0
            groups[-1] += names
            filled, total = filled + size, total + size
    count = len(groups)
    named = [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return {disk_name: file for file, group in zip(named, groups) for disk_name in group}, total


def _on_disk(name: str, shape: torch.Size, whole: Tensor, dtype: str) -> Iterator[tuple[str, Tensor]]:
    """(disk name, tensor on the CPU) of one parameter."""
    whole = whole.to(DTYPES.get(dtype, torch.bfloat16)).cpu()
    for disk_name, expert, (width, *_), column in disk_tensors(name, shape):
        # a copy of its own: the whole may be the parameter itself, and a view would keep all experts alive
        part = whole if expert is None else whole[expert, :, column : column + width].t()
        if dtype == MXFP8 and _is_quantized(disk_name):
            quantized = quantize(part.contiguous(), element_format="E4M3", block_shape=(1, MX_BLOCK), axis=-1)
            yield disk_name, quantized.codes.view(torch.float8_e4m3fn)
            yield disk_name + SCALE_SUFFIX, quantized.scales
        else:
            yield disk_name, part.clone(memory_format=torch.contiguous_format)


def _remove_stale(folder: Path, files: list[str]) -> None:
    """Drop the weights of an earlier save: its index would win over a single new file, its other files mislead."""
    (folder / INDEX_FILE).unlink(missing_ok=True)
    for path in [folder / SINGLE_FILE, *folder.glob("model-*-of-*.safetensors")]:
        if path.name not in files:
            path.unlink(missing_ok=True)


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    partial = path.with_name(f".{path.name}.partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, path)


def write_text(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)
