"""A loaded model with its tokenizer, and text in and out of it, piece by piece as it is produced.

One process, one device. The weights are those of a Hugging Face folder; on a CPU they are kept in fp32, which is the
fast format there, elsewhere in `param_dtype`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from fsdp2.errors import ConfigurationError
from mindspeed_llm.data import load_tokenizer, tokenizer_checks
from mindspeed_llm.inference.generation import generation_settings, stream_tokens
from mindspeed_llm.models import build_model, load_hf_weights
from mindspeed_llm.models.hf_weights import DTYPES


class Session:
    """Continue texts with the model of `folder`.

    Args:
        folder: config.json, safetensors and, unless `tokenizer_path` is given, a tokenizer.
        tokenizer_path: a tokenizer file or folder.
        device: where to run.
        param_dtype: one of bf16, fp16, fp32; a CPU always runs in fp32.

    Raises:
        ConfigurationError: a file is missing or does not fit.
    """

    def __init__(self, folder: str | Path, tokenizer_path: str | Path | None, device: torch.device, param_dtype: str):
        self.device = device
        self.tokenizer = load_tokenizer(tokenizer_path or folder)
        dtype = torch.float32 if device.type == "cpu" else DTYPES[param_dtype]
        model = build_model(folder)
        tokenizer_checks(self.tokenizer, model.config.vocab_size)
        self.model = model.to(dtype).to_empty(device=device).eval()
        load_hf_weights(self.model, folder)
        self.eos_ids, self.sampling = generation_settings(folder, model.config.eos_token_id)
        if not self.eos_ids and self.tokenizer.eos_id is not None:
            self.eos_ids = (self.tokenizer.eos_id,)

    def continue_text(self, prompt: str, max_new_tokens: int, *, do_sample: bool, seed: int) -> Iterator[str]:
        """Yield the continuation in pieces of whole characters (a character's tokens may come one by one)."""
        ids = self.tokenizer.encode(prompt)
        if not ids:
            raise ConfigurationError("the prompt is empty")
        prompt_ids = torch.tensor([ids], dtype=torch.int64, device=self.device)
        tokens = stream_tokens(
            self.model,
            prompt_ids,
            max_new_tokens,
            eos_ids=self.eos_ids,
            sampling=self.sampling if do_sample else None,
            seed=seed,
        )
        shown = self.tokenizer.decode(ids)
        for token in tokens:
            ids.append(int(token))
            text = self.tokenizer.decode(ids)
            if not text.endswith("\ufffd"):
                yield text[len(shown) :]
                shown = text
        yield self.tokenizer.decode(ids)[len(shown) :]
