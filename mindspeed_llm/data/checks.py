"""Checks across data and model that belong to neither alone: does the vocabulary fit, does a token of the corpus fit.

An id beyond the embedding is the costliest data mistake: on an accelerator it reads foreign memory or stops the run
with an error that names nothing. So the tokenizer is compared with the model before a model is allocated, and every
sequence that is read is compared with it too.
"""

from __future__ import annotations

import numpy as np

from fsdp2.errors import ConfigurationError

from .tokenizer import Tokenizer


def tokenizer_checks(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raise ConfigurationError when the tokenizer has ids that the model's embedding of `vocab_size` rows lacks."""
    if tokenizer.vocab_size > vocab_size:
        raise ConfigurationError(
            f"tokenizer {tokenizer.path}: its vocabulary of {tokenizer.vocab_size:,} exceeds the model's vocab_size"
            f" of {vocab_size:,};"
            f" use the model's own tokenizer or set vocab_size in its config.json to at least {tokenizer.vocab_size}"
        )


def token_checks(tokens: np.ndarray, vocab_size: int, prefix: str) -> None:
    """Raise ConfigurationError when one of `tokens` (any shape) from the dataset `prefix` is no id of a model with
    `vocab_size` ids."""
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise ConfigurationError(
            f"--data.dataset {prefix}: it holds token {low if low < 0 else high}, but the model's vocabulary ends at"
            f" {vocab_size - 1};"
            " it was preprocessed with another tokenizer: run tools/preprocess_data.py again with this model's"
        )
