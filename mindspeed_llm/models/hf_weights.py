"""Weights between a Hugging Face folder and this model, whatever its sharding.

Loading reads from every file only the slices this rank holds, of weights in bf16, fp16, fp32 or MXFP8. Saving gathers
one parameter at a time, so no rank ever holds the whole model. Names and layouts on disk are `hf_folder.py`'s.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2.errors import ConfigurationError, nearest
from mindspeed_llm.models.hf_export import write_hf_folder
from mindspeed_llm.models.hf_folder import DTYPES, MERGED, TensorFolder, disk_tensors
from mindspeed_llm.models.initialization import reset_buffers
from mindspeed_llm.models.local_shard import local_part, parameters_at_rest, whole_tensor

__all__ = ["DTYPES", "check_fits", "load_hf_weights", "read_parameter", "save_hf_weights"]


def _ignorable(name: str, tied: bool) -> bool:
    """Tensors that old releases wrote and no model needs: rotary frequencies, and the second copy of a tied output
    projection.
    """
    return name.endswith(".rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


@torch.no_grad()
def load_hf_weights(model: nn.Module, folder: str | Path) -> None:
    """Fill every parameter (plain, or DTensor) from the safetensors of `folder`, converted to the parameter's dtype,
    and refill the buffers.

    Each rank reads only its part; there is no communication. Raises ConfigurationError, before anything is written,
    when a tensor is missing, unexpected or of another shape.
    """
    source = TensorFolder(folder)
    model.tie_weights()
    parameters = parameters_at_rest(model)
    check_fits(source, parameters, tied=model.config.tie_word_embeddings)
    for name, parameter in parameters.items():
        local, where = local_part(parameter)
        if local.numel() == 0:
            continue
        if MERGED.fullmatch(name) is None:
            local.copy_(source.slice(name)[where] if where else source.slice(name)[...])
        else:
            _load_experts(source, name, parameter.shape, local, where)
    reset_buffers(model)


def read_parameter(source: TensorFolder, name: str, shape: torch.Size) -> Tensor:
    """The whole parameter `name` in fp32."""
    whole = torch.empty(shape)
    if MERGED.fullmatch(name) is None:
        return whole.copy_(source.slice(name)[...])
    _load_experts(source, name, shape, whole, tuple(slice(0, length) for length in shape))
    return whole


def _load_experts(source: TensorFolder, name: str, shape: torch.Size, local: Tensor, where: tuple[slice, ...]) -> None:
    """Fill the part `where` of the merged tensor [E, in, out] from the experts' own tensors [out, in]."""
    experts, inputs, outputs = where
    values = torch.empty(local.shape, dtype=local.dtype)
    for disk_name, expert, (width, _), column in disk_tensors(name, shape):
        begin, end = max(outputs.start, column), min(outputs.stop, column + width)
        if experts.start <= expert < experts.stop and begin < end:
            piece = source.slice(disk_name)[begin - column : end - column, inputs]
            values[expert - experts.start, :, begin - outputs.start : end - outputs.start] = piece.t()
    local.copy_(values)


def check_fits(source: TensorFolder, parameters: dict[str, nn.Parameter], tied: bool) -> None:
    """Raise ConfigurationError unless the folder holds exactly the model's `parameters`, in their shapes."""
    wanted = {name: shape for key, p in parameters.items() for name, _, shape, _ in disk_tensors(key, p.shape)}
    known = wanted.keys() | source.scale_of.values()
    missing = [name for name in wanted if name not in source.file_of]
    unexpected = [name for name in source.file_of if name not in known and not _ignorable(name, tied)]
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


@torch.no_grad()
def save_hf_weights(
    model: nn.Module, folder: str | Path, dtype: str = "bf16", max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write config.json and safetensors that transformers loads. Collective: every rank calls it, rank 0 writes.

    See `write_hf_folder` for `dtype` and `max_shard_bytes`.
    """
    writes = not dist.is_initialized() or dist.get_rank() == 0
    parameters = parameters_at_rest(model)

    def read(name: str) -> Tensor | None:
        whole = parameters[name].detach()
        whole = whole if dtype not in DTYPES else whole.to(DTYPES[dtype])  # gathered in the dtype that is written
        whole = whole_tensor(whole)
        return whole if writes else None

    shapes = {name: parameter.shape for name, parameter in parameters.items()}
    write_hf_folder(folder, model.config, shapes, read, dtype=dtype, max_shard_bytes=max_shard_bytes)
    if dist.is_initialized():
        dist.barrier()  # nobody reads the folder before it is complete
