"""FSDP2 training of any `nn.Module`, with weights that travel through the all-gather as MXFP8.

`parallelize(model, plan)` converts, shards and returns the model; `plan` says what to do and is checked before anything
is allocated. This package knows no model, tokenizer or trainer. Names load on first use, so that checking arguments
does not pay for importing torch.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "ConfigurationError": "errors",
    "ParallelPlan": "plan",
    "QuantizationPlan": "plan",
    "parallelize": "engine",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
