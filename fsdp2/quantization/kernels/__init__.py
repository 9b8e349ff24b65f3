"""The kernels behind `fsdp2.quantization.mx`, one module a backend, all with the same three functions and the same
bytes.

Each module defines `unavailable_reason(device_type) -> str | None` and

    quantize(x, fmt, block_shape, axis, rule, amax=None) -> (codes, scales)
    quantize_dual_axis(x, fmt, block_shape, rule) -> ((codes, scales) along -1, (codes, scales) along -2)
    dequantize(codes, scales, fmt, block_shape, axis, shape, dtype) -> Tensor

with `axis` non-negative. `reference` defines what the others must return. A backend whose hardware multiplies quantized
operands also has `matmul_reason(left, right)` and `matmul(left, right, out_dtype, bias)` (see `gemm.py`). Backends load
on first use: importing this package imports none.
"""

from __future__ import annotations

import functools
import importlib
from types import ModuleType

from fsdp2.errors import ConfigurationError, nearest

BACKENDS = ("reference", "cpu", "cuda", "npu")


@functools.cache
def backend_module(name: str, device_type: str) -> ModuleType:
    """Import the backend called `name`, to run on tensors of `device_type`.

    Raises:
        ConfigurationError: there is no such backend, or it cannot run on such tensors here; says why.
    """
    if name not in BACKENDS:
        known = ", ".join(BACKENDS)
        raise ConfigurationError(f"unknown quantization backend '{name}'; known are {known}{nearest(name, BACKENDS)}")
    module = importlib.import_module(f"{__name__}.{name}")
    reason = module.unavailable_reason(device_type)
    if reason:
        raise ConfigurationError(f"quantization backend '{name}' cannot run here: {reason}")
    return module


@functools.cache
def backend_for_device(device_type: str) -> str:
    """Name of the fastest backend that can run on `device_type`; the reference runs on every device."""
    if device_type in BACKENDS:
        try:
            backend_module(device_type, device_type)
            return device_type
        except ConfigurationError:
            pass
    return "reference"


def runnable_backends(device_type: str) -> list[str]:
    """Names of all backends that can run on tensors of `device_type` here."""
    names = []
    for name in BACKENDS:
        try:
            backend_module(name, device_type)
        except ConfigurationError:
            continue
        names.append(name)
    return names
