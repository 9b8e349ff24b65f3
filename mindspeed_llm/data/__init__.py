"""Text to batches: tokenizers, the Megatron `.bin/.idx` dataset, packing for pre-training, and a loader that resumes
exactly.

Names load on first use, so that preprocessing and its worker processes don't pay for importing torch.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "load_tokenizer": "tokenizer",
    "tokenizer_checks": "checks",
    "IndexedDataset": "indexed_dataset",
    "IndexedDatasetWriter": "indexed_dataset",
    "build_pretraining_datasets": "pretraining",
    "PretrainingLoader": "loader",
    "EvaluationLoader": "loader",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
