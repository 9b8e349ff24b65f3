"""Keys and values of the tokens already seen, so that generating a token costs one token's work.

The buffers are allocated once, for the longest sequence that was asked for; `append` writes behind what is there and
hands back the filled part.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValueCache:
    """Room for `max_length` positions in every layer. `length` is the number filled; the model advances it after its
    last layer.
    """

    def __init__(self, max_length: int):
        self.max_length, self.length = max_length, 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, kv_heads, S, D] of the next S positions; return all keys and values so far, [B, kv_heads,
        length + S, D].
        """
        end = self.length + k.shape[2]
        if end > self.max_length:
            raise ValueError(f"the cache holds {self.max_length} positions, {end} are needed")
        if layer not in self._keys:
            shape = (*k.shape[:2], self.max_length, k.shape[3])
            self._keys[layer] = torch.empty(shape, dtype=k.dtype, device=k.device)
            self._values[layer] = torch.empty(shape, dtype=v.dtype, device=v.device)
        self._keys[layer][:, :, self.length : end] = k
        self._values[layer][:, :, self.length : end] = v
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]
