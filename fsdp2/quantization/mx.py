"""Quantize and dequantize: the one door to the kernels of every backend.

A block of 32 numbers shares one power-of-two scale (E8M0, a byte); each number becomes an 8-, 6- or 4-bit float. That
is 1.03125 bytes an element for MXFP8 where bf16 takes 2. Callers see three things: `quantize`, `quantize_dual_axis`
(both block directions in one pass over memory, which a training step needs: the forward GEMM contracts one axis of a
tensor, a backward GEMM the other), and the `MXTensor` they return.

    q = quantize(x)                       # 1x32 blocks along the last axis, E4M3
    y = q.dequantize(torch.bfloat16)      # x, rounded

The same door leads to 8-bit floats with fp32 scales, for blocks of 128 and for whole rows, columns and tensors.
Whatever backend runs, the bytes are those of `kernels/reference.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from fsdp2.quantization import formats
from fsdp2.quantization.formats import BlockShape, ElementFormat
from fsdp2.quantization.kernels import backend_for_device, backend_module


@dataclass(eq=False)
class MXTensor:
    """A quantized tensor: element codes and one scale a block.

    It wraps the planes it is given, without a copy, so that gathered bytes can be used as they are.

    Attributes:
        codes: uint8, in the original shape. E2M1 packs two along the last dimension ([..., ceil(C / 2)], the first in
            the low nibble).
        scales: one a block. Blocks (1, n) along `axis`: the original shape with `axis` shortened to ceil(size / n);
            tiles (n, n): the last two dimensions shortened so. uint8 for blocks of 32: byte b is 2**(b - 127), 255 is
            NaN and makes its block NaN. fp32 for the others.
        element_format: "E4M3", "E5M2", "E3M2", "E2M3" or "E2M1".
        block_shape: a key of `formats.SCALE_FORMATS`.
        axis: the dimension the blocks run along (negative counts from the end; without meaning for tiles).
        shape: the original shape.
    """

    codes: Tensor
    scales: Tensor
    element_format: str
    block_shape: BlockShape
    axis: int
    shape: torch.Size

    def dequantize(self, dtype: torch.dtype = torch.bfloat16, *, backend: str | None = None) -> Tensor:
        """Return the numbers in the original shape as `dtype`: `element * scale`, in fp32, rounded once to `dtype`.

        With E8M0 scales the product is exact in fp32. Rounding up next to the end of fp32's range can make it 2**128,
        which is Inf in fp32 and bf16.
        """
        kernels = _kernels(self.codes, backend)
        fmt = formats.element_format(self.element_format)
        axis = self.axis % len(self.shape)
        return kernels.dequantize(self.codes, self.scales, fmt, tuple(self.block_shape), axis, self.shape, dtype)

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
    amax: Tensor | None = None,
    backend: str | None = None,
) -> MXTensor:
    """Quantize `x` in blocks along `axis`, or in square tiles of its last two dimensions.

    fp32 (fp16, fp64) input is rounded to bf16 first, so that quantizing a master weight and quantizing its bf16 copy
    agree bit for bit. A dimension that is no multiple of the block is padded with zeros inside the kernel. NaN or Inf
    in a block makes the whole block NaN.

    Args:
        x: floating point, any shape, strides and device.
        element_format: "E4M3", "E5M2", "E3M2", "E2M3" or "E2M1".
        block_shape: (1, 32) and (32, 32) have E8M0 scales, (1, 128), (128, 128), (1, -1) and (-1, -1) fp32 ones; -1 is
            the whole dimension. A tensor of three dimensions has one (-1, -1) scale for each of its matrices.
        axis: the dimension that (1, n) blocks run along.
        scale_rule: "floor", "ceil", "rceil" or "even": how an E8M0 scale follows from the block's largest magnitude.
        amax: fp32, the shape of the scales: takes the place of the blocks' own largest magnitudes ("delayed" scaling;
            larger elements saturate). Blocks with fp32 scales only.
        backend: one of `kernels.BACKENDS`; by default the device of `x` decides.

    Raises:
        ConfigurationError: an unknown format, rule or backend; a block shape that there is none of, or not with this
            format; a backend that cannot run here.
    """
    fmt, block, kernels = _checked(x, element_format, block_shape, scale_rule, backend)
    if not -x.ndim <= axis < x.ndim:
        raise IndexError(f"axis {axis} is out of range for a tensor of shape {tuple(x.shape)}")
    if amax is None:
        codes, scales = kernels.quantize(x.detach(), fmt, block, axis % x.ndim, scale_rule)
    elif formats.SCALE_FORMATS[block] == "FP32":
        codes, scales = kernels.quantize(x.detach(), fmt, block, axis % x.ndim, scale_rule, amax.detach())
    else:
        raise ValueError(f"amax was given for blocks {block}, whose E8M0 scales come from their own elements")
    return MXTensor(codes, scales, fmt.name, block, axis, x.shape)


def quantize_dual_axis(
    x: Tensor,
    *,
    element_format: str = "E4M3",
    block_shape: Sequence[int] = (1, formats.MX_BLOCK),
    scale_rule: str = "floor",
    backend: str | None = None,
) -> tuple[MXTensor, MXTensor]:
    """Quantize `x` [..., R, C] along axis -1 and along axis -2 in one pass; each equals `quantize` along that axis.

    A square tile serves both directions, so both results then share one set of planes. Arguments and errors are those
    of `quantize`.
    """
    fmt, block, kernels = _checked(x, element_format, block_shape, scale_rule, backend)
    if x.ndim < 2:
        raise IndexError(f"both axes of a tensor of shape {tuple(x.shape)} were asked for; it needs two dimensions")
    pairs = kernels.quantize_dual_axis(x.detach(), fmt, block, scale_rule)
    rows, columns = (MXTensor(*planes, fmt.name, block, axis, x.shape) for planes, axis in zip(pairs, (-1, -2)))
    return rows, columns


def _checked(
    x: Tensor, element_name: str, block_shape: Sequence[int], scale_rule: str, backend: str | None
) -> tuple[ElementFormat, BlockShape, ModuleType]:
    if not x.is_floating_point():
        raise TypeError(f"only floating-point tensors can be quantized, got {x.dtype}")
    fmt = formats.element_format(element_name)
    block = formats.check_block_shape(block_shape, fmt)
    formats.check_scale_rule(scale_rule)
    needed = 1 if block[0] == 1 else 2
    if x.ndim < needed:
        raise IndexError(f"blocks {block} need a tensor with {needed} or more dimensions, got shape {tuple(x.shape)}")
    return fmt, block, _kernels(x, backend)


def _kernels(x: Tensor, backend: str | None) -> ModuleType:
    return backend_module(backend or backend_for_device(x.device.type), x.device.type)
