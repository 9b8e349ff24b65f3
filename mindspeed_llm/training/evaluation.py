"""Held-out loss and bits per byte: the second compares runs whose tokenizers differ.

Bits per byte = (sum of negative log-likelihoods in nats) / ln 2 / (UTF-8 bytes that the label tokens stand for). The
sums are taken over all ranks, so the result is that of the whole held-out set, however it was spread over processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from .loss import IGNORED_LABEL, cross_entropy


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: Iterable[dict], token_bytes: np.ndarray, device: torch.device
) -> dict[str, float]:
    """Return `{"loss": nats per token, "bits_per_byte": ...}`. Collective: every rank calls it.

    Args:
        batches: this rank's {"input_ids": int64 [B, S], "labels": int64 [B, S]}; as many on every rank, because FSDP
            needs all of them in every gather. Labels that are `IGNORED_LABEL` do not count.
        token_bytes: int [vocabulary], bytes of each token (specials 0).
    """
    token_bytes_V = torch.as_tensor(np.asarray(token_bytes), dtype=torch.int64, device=device)
    totals = torch.zeros(3, dtype=torch.float64)  # nats, tokens, bytes
    was_training = model.training
    model.eval()
    for batch in batches:
        labels_BS = batch["labels"].to(device)
        nats = cross_entropy(model(batch["input_ids"].to(device)).logits, labels_BS)
        counted = labels_BS[labels_BS != IGNORED_LABEL]
        totals += torch.tensor([nats.item(), counted.numel(), token_bytes_V[counted].sum().item()], dtype=torch.float64)
    model.train(was_training)
    _free_gathered_parameters(model)
    dist.all_reduce(totals)
    nats, tokens, text_bytes = totals.tolist()
    return {
        "loss": nats / tokens if tokens else math.nan,
        "bits_per_byte": nats / math.log(2.0) / text_bytes if text_bytes else math.nan,
    }


def _free_gathered_parameters(model: nn.Module) -> None:
    """Reshard what a forward without backward left gathered, so that the next training step gathers as always."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
