"""Continue token sequences: the prompt goes through the model once, then every new token costs one token's work.

Greedy takes the likeliest token. Sampling draws from the softmax at a temperature, cut to the `top_k` likeliest tokens
and then to the smallest set whose probability reaches `top_p` (Holtzman et al. 2020, arXiv:1904.09751), in the order
that transformers applies them. Settings come from the folder's generation_config.json, as there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from fsdp2.errors import ConfigurationError
from mindspeed_llm.models import KeyValueCache


@dataclass(frozen=True)
class Sampling:
    """How to draw a token. `top_k` 0 and `top_p` 1.0 cut nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def draw(self, logits_BV: Tensor, generator: torch.Generator) -> Tensor:
        """Sample a token id a row, int64 [B]. `generator` lives on the CPU, so that a seed means the same anywhere."""
        logits_BV = logits_BV.float().cpu() / self.temperature
        if 0 < self.top_k < logits_BV.shape[-1]:
            smallest_kept = logits_BV.topk(self.top_k).values[:, -1:]
            logits_BV = logits_BV.masked_fill(logits_BV < smallest_kept, float("-inf"))
        if self.top_p < 1.0:
            ordered, ids = logits_BV.sort(descending=True)
            before = ordered.softmax(-1).cumsum(-1).roll(1, -1)  # probability of all likelier tokens
            before[:, 0] = 0.0
            cut = torch.empty_like(ids, dtype=torch.bool).scatter_(1, ids, before >= self.top_p)
            logits_BV = logits_BV.masked_fill(cut, float("-inf"))
        return torch.multinomial(logits_BV.softmax(-1), 1, generator=generator)[:, 0]


@torch.no_grad()
def stream_tokens(
    model: nn.Module,
    prompt_ids: Tensor,
    max_new_tokens: int,
    *,
    eos_ids: tuple[int, ...] = (),
    sampling: Sampling | None = None,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Yield the next token of every sequence, int64 [B] on the model's device, one step at a time.

    Args:
        model: `model(input_ids, cache=..., logits_to_keep=1)`.
        prompt_ids: int64 [B, P], P >= 1: prompts of one length.
        max_new_tokens: steps at most; fewer when every sequence has produced one of `eos_ids`, or where the model's
            max_position_embeddings end. A sequence that has ended goes on with the first of `eos_ids`.
        sampling: None takes the likeliest token.

    Raises:
        ConfigurationError: the prompt is empty, or fills max_position_embeddings.
    """
    batch, length = prompt_ids.shape
    limit = model.config.max_position_embeddings
    if model.config.rope.rope_type == "dynamic":  # made to go beyond
        limit = length + max_new_tokens
    if length == 0:
        raise ConfigurationError("the prompt is empty")
    if length >= limit and max_new_tokens:
        raise ConfigurationError(f"the prompt has {length} tokens, the model's max_position_embeddings is {limit}")
    generator = torch.Generator().manual_seed(seed)
    steps = min(max_new_tokens, limit - length)
    cache = KeyValueCache(length + steps)
    ended = torch.zeros(batch, dtype=torch.bool, device=prompt_ids.device)
    ids = prompt_ids
    for _ in range(steps):
        logits = model(ids, cache=cache, logits_to_keep=1).logits[:, -1]
        token = logits.argmax(-1) if sampling is None else sampling.draw(logits, generator).to(logits.device)
        if eos_ids:
            token = token.masked_fill(ended, eos_ids[0])
            ended |= torch.isin(token, torch.tensor(eos_ids, device=token.device))
        yield token
        if eos_ids and bool(ended.all()):
            return
        ids = token[:, None]


def generate(model: nn.Module, prompt_ids: Tensor, max_new_tokens: int, **options) -> Tensor:
    """Return the prompts with what follows, int64 [B, P + N]; `options` are those of `stream_tokens`."""
    new = list(stream_tokens(model, prompt_ids, max_new_tokens, **options))
    return torch.cat([prompt_ids, *(token[:, None] for token in new)], dim=1)


def generation_settings(folder: str | Path, config_eos: int | list[int] | None) -> tuple[tuple[int, ...], Sampling]:
    """(ids that end a text, how to sample), from the folder's generation_config.json, else from config.json's eos."""
    file = Path(folder) / "generation_config.json"
    values = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    eos = values.get("eos_token_id", config_eos)
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    sampling = Sampling(
        temperature=values.get("temperature") or 1.0,
        top_k=values.get("top_k") or 0,
        top_p=values.get("top_p") or 1.0,
    )
    return eos_ids, sampling
