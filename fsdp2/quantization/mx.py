"""Quantize and dequantize: the one door to the kernels of every backend.

A block of 32 numbers shares one power-of-two scale (E8M0, a byte); each number becomes an 8-, 6- or 4-bit float. That
is 1.03125 bytes an element for MXFP8 where bf16 takes 2. Callers see three things: `quantize`, `quantize_dual_axis`
(both block directions in one pass over memory, which a training step needs: the forward GEMM contracts one axis of a
tensor, a backward GEMM the other), and the `MXTensor` they return.

    q = quantize(x)                       # 1x32 blocks along the last axis, E4M3
    y = q.dequantize(torch.bfloat16)      # x, rounded

Whatever backend runs, the bytes are those of `kernels/reference.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fsdp2.errors import ConfigurationError
from fsdp2.quantization import formats
from fsdp2.quantization.kernels import backend_for_device, backend_module

MX_BLOCK_SHAPES = ((1, formats.MX_BLOCK), (formats.MX_BLOCK, formats.MX_BLOCK))


@dataclass(eq=False)
class MXTensor:
    """A quantized tensor: element codes and one scale a block. Wraps the planes it is given, without a copy, so
    gathered bytes can be used as is.

    codes: uint8, the original shape; E2M1 packs two along the last dimension ([..., ceil(C / 2)], the first in the low
    nibble). scales: uint8 E8M0. Blocks (1, 32) along `axis`: the original shape with `axis` shortened to ceil(n / 32);
    tiles (32, 32): the last two
        dimensions shortened so. Byte b is 2**(b - 127); 255 is NaN and makes the whole block NaN.
    element_format: "E4M3", "E5M2", "E3M2", "E2M3" or "E2M1".   block_shape: (1, 32) or (32, 32). axis: the dimension
    the blocks run along (negative counts from the end; no meaning for tiles).   shape: the original shape.
    """

    codes: Tensor
    scales: Tensor
    element_format: str
    block_shape: tuple[int, int]
    axis: int
    shape: torch.Size

    def dequantize(self, dtype: torch.dtype = torch.bfloat16, *, backend: str | None = None) -> Tensor:
        """Return the numbers as `dtype` (bf16 or fp32), in the original shape: `element * 2**s`, exact in fp32 and
        rounded once to bf16.

        A block scaled up next to the top of the fp32 range can hold values of 2**128, which are Inf in both types.
        """
        kernels = backend_module(backend or backend_for_device(self.codes.device.type))
        fmt = formats.element_format(self.element_format)
        axis = self.axis % len(self.shape)
        return kernels.dequantize(self.codes, self.scales, fmt, self.block_shape, axis, self.shape, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        return self.codes.nbytes + self.scales.nbytes


def quantize(
    x: Tensor,
    *,
    element_format: str = "E4M3",
    block_shape: Sequence[int] = (1, formats.MX_BLOCK),
    axis: int = -1,
    scale_rule: str = "floor",
    backend: str | None = None,
) -> MXTensor:
    """Quantize `x` (floating point, any shape and strides, on any device) in blocks along `axis`, or in (32, 32) tiles
    of the last two dimensions.

    fp32 (and fp16, fp64) input is rounded to bf16 first, so that quantizing a master weight and quantizing its bf16
    copy agree bit for bit. A dimension that is no multiple of 32 is padded with zeros inside the kernel. NaN or Inf in
    a block gives scale 255: the block is NaN. `backend` forces one of `kernels.BACKENDS`; by default the device of `x`
    decides. Raises `ConfigurationError` for an unknown format, rule or backend, a block shape that is not built, or a
    backend that cannot run.
    """
    fmt, block, kernels = _checked(x, element_format, block_shape, scale_rule, backend)
    if not -x.ndim <= axis < x.ndim:
        raise IndexError(f"axis {axis} is out of range for a tensor of shape {tuple(x.shape)}")
    codes, scales = kernels.quantize(x.detach(), fmt, block, axis % x.ndim, scale_rule)
    return MXTensor(codes, scales, fmt.name, block, axis, x.shape)


def quantize_dual_axis(
    x: Tensor,
    *,
    element_format: str = "E4M3",
    block_shape: Sequence[int] = (1, formats.MX_BLOCK),
    scale_rule: str = "floor",
    backend: str | None = None,
) -> tuple[MXTensor, MXTensor]:
    """Quantize `x` [..., R, C] along axis -1 and along axis -2 in one pass; each result equals that of `quantize` with
    that axis.

    A (32, 32) tile serves both directions, so both results then share one set of planes.
    """
    fmt, block, kernels = _checked(x, element_format, block_shape, scale_rule, backend)
    if x.ndim < 2:
        raise IndexError(f"both axes of a tensor of shape {tuple(x.shape)} were asked for; it needs two dimensions")
    pairs = kernels.quantize_dual_axis(x.detach(), fmt, block, scale_rule)
    rows, columns = (MXTensor(*planes, fmt.name, block, axis, x.shape) for planes, axis in zip(pairs, (-1, -2)))
    return rows, columns


def _checked(x: Tensor, element_name: str, block_shape: Sequence[int], scale_rule: str, backend: str | None):
    if not x.is_floating_point():
        raise TypeError(f"only floating-point tensors can be quantized, got {x.dtype}")
    block = tuple(block_shape)
    if block not in MX_BLOCK_SHAPES:
        raise ConfigurationError(f"block_shape {block} is not supported; use (1, 32) along an axis or (32, 32) tiles")
    needed = 1 if block[0] == 1 else 2
    if x.ndim < needed:
        raise IndexError(f"blocks {block} need a tensor with {needed} or more dimensions, got shape {tuple(x.shape)}")
    formats.check_scale_rule(scale_rule)
    return formats.element_format(element_name), block, backend_module(backend or backend_for_device(x.device.type))
