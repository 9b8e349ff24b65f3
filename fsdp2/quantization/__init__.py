"""Block-scaled (MX) quantization: formats, recipes, the quantize/dequantize door, and the modules whose three GEMMs run
on it.

Names load on first use, so that checking a recipe's name does not pay for importing torch.
"""

from __future__ import annotations

import importlib

_HOMES = {
    "QuantRecipe": "recipe",
    "TensorRecipe": "recipe",
    "MXTensor": "mx",
    "quantize": "mx",
    "quantize_dual_axis": "mx",
    "MXLinear": "linear",
    "MXGroupedLinear": "grouped",
}
__all__ = list(_HOMES)


def __getattr__(name: str):
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
