"""Held-out loss and bits per byte: the second compares runs whose tokenizers differ.

Bits per byte = (sum of negative log-likelihoods in nats) / ln 2 / (UTF-8 bytes that the label tokens stand for). Every
sequence is counted exactly once, whatever the number of processes: where the last round has too few sequences, the idle
processes run a batch whose labels are all ignored, because FSDP needs every process in every gather.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .loss import IGNORE_INDEX, count_label_tokens, cross_entropy


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: Sequence[dict],
    token_bytes: np.ndarray,
    *,
    batch_size: int,
    rank: int,
    world_size: int,
    device: torch.device,
    max_batches: int = 0,
) -> dict[str, float]:
    """Return `{"loss": nats per token, "bits_per_byte": ...}` over `dataset`. Collective: every rank calls it.

    Args:
        dataset: item -> {"input_ids": int64 [S], "labels": int64 [S]}.
        token_bytes: int [vocabulary], bytes of each token (specials 0).
        batch_size: sequences a forward, on each rank.
        max_batches: forwards a rank at most; 0 evaluates the whole dataset.
    """
    per_round = batch_size * world_size
    rounds = -(-len(dataset) // per_round)
    if max_batches > 0:
        rounds = min(rounds, max_batches)
    token_bytes_V = torch.as_tensor(np.asarray(token_bytes), dtype=torch.int64, device=device)
    totals = torch.zeros(3, dtype=torch.float64, device="cpu")  # nats, tokens, bytes
    was_training = model.training
    model.eval()
    for round_index in range(rounds):
        first = round_index * per_round + rank * batch_size
        inputs_BS, labels_BS = _batch(dataset, first, batch_size, device)
        loss = cross_entropy(model(inputs_BS).logits, labels_BS)
        counted = labels_BS != IGNORE_INDEX
        label_bytes = token_bytes_V[labels_BS.masked_fill(~counted, 0)].masked_fill(~counted, 0).sum()
        totals += torch.tensor(
            [loss.item(), count_label_tokens(labels_BS).item(), label_bytes.item()], dtype=torch.float64
        )
    model.train(was_training)
    _free_gathered_parameters(model)
    dist.all_reduce(totals)
    nats, tokens, text_bytes = totals.tolist()
    return {
        "loss": nats / tokens if tokens else math.nan,
        "bits_per_byte": nats / math.log(2.0) / text_bytes if text_bytes else math.nan,
    }


def _batch(dataset: Sequence[dict], first: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels [size, S] of items `first`...; past the end, item 0 with its labels ignored."""
    items = [dataset[index if index < len(dataset) else 0] for index in range(first, first + size)]
    inputs_BS = torch.stack([torch.as_tensor(item["input_ids"]) for item in items])
    labels_BS = torch.stack([torch.as_tensor(item["labels"]) for item in items])
    labels_BS[max(len(dataset) - first, 0) :] = IGNORE_INDEX
    return inputs_BS.to(device), labels_BS.to(device)


def _free_gathered_parameters(model: nn.Module) -> None:
    """Reshard what a forward without backward left gathered, so that the next training step gathers as always."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
