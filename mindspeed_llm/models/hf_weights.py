"""Weights between Hugging Face's safetensors and this model, whatever its sharding.

Names on disk are the model's own, but for the experts: on disk every expert has gate_proj, up_proj and down_proj as
[out, in]; in memory a layer's experts are two tensors, gate_up_proj [E, in, 2 out] (gate first) and down_proj [E, in,
out], so that they are sharded and multiplied as one. Loading reads from every file only the slices this rank holds.
Saving gathers one parameter at a time, so no rank ever holds the whole model.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2.errors import ConfigurationError, nearest
from mindspeed_llm.models.initialization import reset_buffers
from mindspeed_llm.models.local_shard import local_part, parameters_at_rest

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_MERGED = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)\.weight")


# ---- names and shapes on disk


def disk_tensors(name: str, shape: torch.Size) -> list[tuple[str, int | None, tuple[int, ...], int]]:
    """What parameter `name` of `shape` is on disk: (disk name, expert or None, disk shape, first column of the memory
    tensor that it fills).
    """
    merged = _MERGED.fullmatch(name)
    if merged is None:
        return [(name, None, tuple(shape), 0)]
    prefix, projection = merged.groups()
    experts, inputs, outputs = shape
    parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
    width = outputs // len(parts)
    return [
        (f"{prefix}.{expert}.{part}.weight", expert, (width, inputs), column * width)
        for expert in range(experts)
        for column, part in enumerate(parts)
    ]


def _ignorable(name: str, tied: bool) -> bool:
    """Tensors that old releases wrote and no model needs: rotary frequencies, and the second copy of a tied output
    projection.
    """
    return name.endswith(".rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


# ---- loading


class _Folder:
    """The tensors of a Hugging Face folder by name; files are opened once, memory-mapped, and read slice by slice."""

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self._open: dict[str, safe_open] = {}
        index = self.folder / INDEX_FILE
        if index.is_file():
            try:
                self.file_of: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigurationError(f"{index}: is not an index of safetensors files: {error}") from None
        elif (self.folder / SINGLE_FILE).is_file():
            self.file_of = dict.fromkeys(self._file(SINGLE_FILE).keys(), SINGLE_FILE)
        else:
            raise ConfigurationError(f"{folder}: holds neither {INDEX_FILE} nor {SINGLE_FILE}")

    def _file(self, name: str):
        if name not in self._open:
            path = self.folder / name
            try:
                self._open[name] = safe_open(path, framework="pt", device="cpu")
            except (SafetensorError, OSError) as error:
                raise ConfigurationError(f"{path}: cannot be read: {error}") from None
        return self._open[name]

    def slice(self, name: str):
        """A lazily read tensor: `.get_shape()`, and indexing reads from the file."""
        try:
            return self._file(self.file_of[name]).get_slice(name)
        except SafetensorError as error:
            raise ConfigurationError(f"{self.folder / self.file_of[name]}: {name}: {error}") from None


@torch.no_grad()
def load_hf_weights(model: nn.Module, folder: str | Path) -> None:
    """Fill every parameter (plain, or DTensor) from the safetensors of `folder`, converted to the parameter's dtype,
    and refill the buffers.

    Each rank reads only its part; there is no communication. Raises ConfigurationError, before anything is written,
    when a tensor is missing, unexpected or of another shape.
    """
    source = _Folder(folder)
    model.tie_weights()
    parameters = parameters_at_rest(model)
    _check(source, parameters, tied=model.config.tie_word_embeddings)
    for name, parameter in parameters.items():
        local, where = local_part(parameter)
        if local.numel() == 0:
            continue
        if _MERGED.fullmatch(name) is None:
            local.copy_(source.slice(name)[where] if where else source.slice(name)[...])
        else:
            _load_experts(source, name, parameter.shape, local, where)
    reset_buffers(model)


def _load_experts(source: _Folder, name: str, shape: torch.Size, local: Tensor, where: tuple[slice, ...]) -> None:
    """Fill the part `where` of the merged tensor [E, in, out] from the experts' own tensors [out, in]."""
    experts, inputs, outputs = where
    values = torch.empty(local.shape, dtype=local.dtype)
    for disk_name, expert, (width, _), column in disk_tensors(name, shape):
        begin, end = max(outputs.start, column), min(outputs.stop, column + width)
        if experts.start <= expert < experts.stop and begin < end:
            piece = source.slice(disk_name)[begin - column : end - column, inputs]
            values[expert - experts.start, :, begin - outputs.start : end - outputs.start] = piece.t()
    local.copy_(values)


def _check(source: _Folder, parameters: dict[str, nn.Parameter], tied: bool) -> None:
    wanted = {name: shape for key, p in parameters.items() for name, _, shape, _ in disk_tensors(key, p.shape)}
    missing = [name for name in wanted if name not in source.file_of]
    unexpected = [name for name in source.file_of if name not in wanted and not _ignorable(name, tied)]
    problems = []
    if missing:
        hint = nearest(missing[0], unexpected) if unexpected else ""
        problems.append(f"{len(missing)} tensors of the model are missing, the first is {missing[0]}{hint}")
    if unexpected:
        problems.append(f"{len(unexpected)} tensors belong to nothing in the model, the first is {unexpected[0]}")
    if not problems:
        for name, shape in wanted.items():
            found = tuple(source.slice(name).get_shape())
            if found != shape:
                problems.append(f"{name} has shape {list(found)}, config.json asks for {list(shape)}")
                break
    if problems:
        raise ConfigurationError(f"{source.folder}: the weights do not fit the model: {'; '.join(problems)}")


# ---- saving


@torch.no_grad()
def save_hf_weights(
    model: nn.Module, folder: str | Path, dtype: str = "bf16", max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write config.json and safetensors that transformers loads. Collective: every rank calls it, rank 0 writes.

    `dtype` is one of DTYPES. Parameters are gathered one by one; rank 0 keeps at most one file's worth
    (`max_shard_bytes`, or a single larger tensor) in memory. More than one file comes with an index. A file appears
    under its name only when it is complete, the index and config.json last.
    """
    if dtype not in DTYPES:
        raise ConfigurationError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}{nearest(dtype, DTYPES)}")
    target, writes = Path(folder), not dist.is_initialized() or dist.get_rank() == 0
    if writes:
        target.mkdir(parents=True, exist_ok=True)
    plan, total_bytes = _plan_files(model, DTYPES[dtype].itemsize, max_shard_bytes)
    files = list(dict.fromkeys(plan.values()))
    pending: dict[str, Tensor] = {}
    current = files[0]
    for disk_name, tensor in _full_tensors(model, DTYPES[dtype], keep=writes):
        if plan[disk_name] != current:
            _write(pending, target / current)
            pending, current = {}, plan[disk_name]
        pending[disk_name] = tensor
    if writes:
        _write(pending, target / current)
        _remove_stale(target, files)
        if len(files) > 1:
            index = {"metadata": {"total_size": total_bytes}, "weight_map": plan}
            _write_text(target / INDEX_FILE, json.dumps(index, indent=2))
        names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
        _write_text(target / "config.json", json.dumps(model.config.to_hf(names[dtype]), indent=2))
    if dist.is_initialized():
        dist.barrier()  # nobody reads the folder before it is complete


def _plan_files(model: nn.Module, itemsize: int, max_bytes: int) -> tuple[dict[str, str], int]:
    """{disk name: file} in the order of writing, and the bytes of all tensors. Computed from shapes, so that "of 00007"
    is known at the first file.
    """
    groups: list[list[str]] = [[]]
    filled = total = 0
    for name, parameter in parameters_at_rest(model).items():
        for disk_name, _, shape, _ in disk_tensors(name, parameter.shape):
            size = torch.Size(shape).numel() * itemsize
            if groups[-1] and filled + size > max_bytes:
                groups.append([])
                filled = 0
            groups[-1].append(disk_name)
            filled, total = filled + size, total + size
    count = len(groups)
    named = [SINGLE_FILE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    return {disk_name: file for file, group in zip(named, groups) for disk_name in group}, total


def _full_tensors(model: nn.Module, dtype: torch.dtype, keep: bool) -> Iterator[tuple[str, Tensor]]:
    """(disk name, tensor on the CPU) of every parameter, in order; nothing on ranks that do not keep, which only take
    part in the gathers.
    """
    for name, parameter in parameters_at_rest(model).items():
        whole = parameter.detach().to(dtype)
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        if not keep:
            continue
        whole = whole.cpu()
        for disk_name, expert, (width, *_), column in disk_tensors(name, parameter.shape):
            # a copy of its own: the whole may be the parameter itself, and a view would keep all experts alive
            part = whole if expert is None else whole[expert, :, column : column + width].t()
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


def _write_text(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)
