"""Initial weights that do not depend on how the model is sharded, so that 1, 2 or 1,000 processes start from the same
model.

Every parameter is seen as a flat row of blocks of 65,536 elements. A block's numbers come from a counter-based
generator (Philox, Salmon et al. 2011) keyed by the seed, the parameter's name and the block's index: any rank can
produce any block without the ones before, and produces only those that its shard touches. Numbers are made on the CPU
and copied, so a CPU, a GPU and an NPU start alike too.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from mindspeed_llm.models.local_shard import local_part, parameters_at_rest

BLOCK = 65536


@torch.no_grad()
def initialize_weights(model: nn.Module, seed: int) -> None:
    """Fill every parameter and buffer of a model built by `build_model`, plain or sharded as DTensors, wherever its
    parameters live.

    Matrices are normal(0, initializer_range); those that write into the residual stream (o_proj, down_proj) are divided
    by sqrt(2 layers), so that the stream's variance does not grow with depth (GPT-2). Norm weights are 1, biases 0. No
    communication; every rank must hold its shard's memory.
    """
    config = model.config
    model.tie_weights()
    residual_std = config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
    for name, parameter in parameters_at_rest(model).items():
        local, where = local_part(parameter)
        if name.endswith(".bias"):
            local.zero_()
        elif parameter.ndim == 1:
            local.fill_(1.0)
        elif local.numel():
            into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            values = normal_slice(tuple(parameter.shape), where, seed, name)
            local.copy_(values.mul_(residual_std if into_residual else config.initializer_range))
    reset_buffers(model)


def reset_buffers(model: nn.Module) -> None:
    """Refill what no checkpoint holds (rotary frequencies): after materialization from the meta device it is
    uninitialized memory.
    """
    for module in model.modules():
        if callable(getattr(module, "reset_buffers", None)):
            module.reset_buffers()


def normal_slice(shape: tuple[int, ...], where: tuple[slice, ...], seed: int, name: str) -> torch.Tensor:
    """The part `where` of the standard normal tensor [shape] that belongs to (seed, name), fp32 on the CPU."""
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), "little")
    lengths = [part.stop - part.start for part in where]
    out = np.empty(math.prod(lengths), dtype=np.float32)
    filled, cached_index, cached = 0, -1, np.empty(0, dtype=np.float32)
    for begin, length in _runs(shape, where):
        end = begin + length
        for index in range(begin // BLOCK, -(-end // BLOCK)):
            if index != cached_index:
                generator = np.random.Generator(np.random.Philox(key=key, counter=[0, 0, index, 0]))
                cached_index, cached = index, generator.standard_normal(BLOCK, dtype=np.float32)
            piece = cached[max(begin - index * BLOCK, 0) : end - index * BLOCK]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
    return torch.from_numpy(out).view(lengths)


def _runs(shape: tuple[int, ...], where: tuple[slice, ...]) -> Iterator[tuple[int, int]]:
    """(flat begin, length) of the contiguous pieces that make up the part, in order."""
    last_cut = max((dim for dim, part in enumerate(where) if part.stop - part.start != shape[dim]), default=0)
    row = math.prod(shape[last_cut + 1 :])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(last_cut)]
    length = (where[last_cut].stop - where[last_cut].start) * row
    for outer in np.ndindex(*(part.stop - part.start for part in where[:last_cut])):
        begin = sum((part.start + i) * stride for part, i, stride in zip(where, outer, strides))
        yield begin + where[last_cut].start * row, length
