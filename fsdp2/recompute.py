"""Activation recomputation: the chosen modules keep only their inputs and run forward again in backward.

The checkpoint wraps the instance's `forward`, not the module: names stay as they are, and FSDP's hooks stay outside of
it, so that the recomputed forward finds its parameters gathered by the backward gather. That gather must then carry
what a forward needs too (see `quantization/weights.py`).
"""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp2.errors import ConfigurationError, nearest
from fsdp2.patterns import match_modules


def recompute_modules(model: nn.Module, patterns: tuple[str, ...]) -> list[str]:
    """Make the modules that `patterns` name recompute their forward in backward (non-reentrant); returns their names.

    Raises:
        ConfigurationError: a pattern names no module, or a module inside another recomputed one.
    """
    names = []
    for pattern in patterns:
        matched = match_modules(model, [pattern])
        if not matched:
            known = [name for name, _ in model.named_modules()]
            raise ConfigurationError(
                f"--parallel.recompute_modules '{pattern}' names no module{nearest(pattern, known)}"
            )
        for name, module in matched:
            if name not in names:
                module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
                names.append(name)
    for inner in names:
        outer = next((name for name in names if inner.startswith(name + ".")), None)
        if outer:
            raise ConfigurationError(
                f"--parallel.recompute_modules: '{inner}' lies inside '{outer}', which is recomputed "
                "as a whole; keep one of the two"
            )
    return names
