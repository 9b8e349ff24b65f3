"""Weights that cross the all-gather as MX codes: the shard that quantizes before it, and the gathered weight that is
codes.

The fp32 master stays a plain DTensor: optimizers, checkpoints and initialization see ordinary tensors. Only the local
    tensor of the DTensor is marked as `MXShardedWeight`, on which FSDP2 calls two hooks. `fsdp_pre_all_gather`
    quantizes the shard (1.03125 bytes an element a plane, where bf16 sends 2); `fsdp_post_all_gather` wraps the
    gathered bytes, without a copy, as `MXGatheredWeight`, which an `MXLinear` multiplies with.

Which planes a gather carries, with blocks of 1x32, for the phase it belongs to:

    forward gather    blocks along the forward axis; both planes when the weights stay gathered until backward
    backward gather   blocks along the other axis; both planes when the module recomputes its forward in backward
    mode "all"        both planes always

A 32x32 tile serves both axes, so one plane is sent in every case.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import torch_private
from fsdp2.communication import Counters
from fsdp2.quantization.mx import MXTensor, quantize, quantize_dual_axis
from fsdp2.quantization.recipe import TensorRecipe

TILE = (32, 32)


@dataclass(frozen=True)
class GatherRule:
    """How one weight is quantized for its gathers.

    Attributes:
        recipe: element format and block shape of the weight.
        scale_rule: how a block's scale follows from its largest value.
        forward_axis: -1 or -2, the axis the forward GEMM contracts (nn.Linear's [N, K]: -1; experts' [E, I, O]: -2).
        both_always: send both planes in every gather (`all`), instead of those the phase needs (`on-demand`).
        recomputed: the forward of the weight's module runs again in backward.
    """

    recipe: TensorRecipe
    scale_rule: str
    forward_axis: int
    both_always: bool = False
    recomputed: bool = False

    def axes(self, backward: bool, stays_gathered: bool) -> tuple[int, ...]:
        """The block axes of the planes that a gather must carry."""
        forward_axis, backward_axis = self.forward_axis, -3 - self.forward_axis
        if self.recipe.block_shape == TILE:
            return (forward_axis,)
        if self.both_always:
            return (forward_axis, backward_axis)
        if backward:
            return (forward_axis, backward_axis) if self.recomputed else (backward_axis,)
        return (forward_axis, backward_axis) if stays_gathered else (forward_axis,)

    def plane_bytes(self, shape: tuple[int, ...], axis: int) -> int:
        """Bytes of codes and scales of a shard of `shape` [..., R, C] in blocks along `axis`."""
        *outer, rows, columns = shape
        blocks = {-1: (rows, -(-columns // 32)), -2: (-(-rows // 32), columns)}[axis]
        if self.recipe.block_shape == TILE:
            blocks = (-(-rows // 32), -(-columns // 32))
        count = 1
        for size in outer:
            count *= size
        codes = -(-columns // 2) if self.recipe.element_format == "E2M1" else columns
        return count * (rows * codes + blocks[0] * blocks[1])

    def planes(self, shard: Tensor, axes: tuple[int, ...]) -> list[MXTensor]:
        """`shard` [..., R, C] quantized along `axes`."""
        options = {
            "element_format": self.recipe.element_format,
            "block_shape": self.recipe.block_shape,
            "scale_rule": self.scale_rule,
        }
        if len(axes) == 1:
            return [quantize(shard, axis=axes[0], **options)]
        along_rows, along_columns = quantize_dual_axis(shard, **options)
        return [along_rows if axis == -1 else along_columns for axis in axes]


class GradientMode:
    """Whether the forward that gathers now will be followed by a backward. FSDP2 runs the gather hooks without
    gradients, so a hook before its own notes it."""

    def __init__(self, model: nn.Module):
        self.enabled = True
        for module in torch_private.fsdp_modules(model):
            module.register_forward_pre_hook(self._note, prepend=True)

    def _note(self, *_: Any) -> None:
        self.enabled = torch.is_grad_enabled()


class ShardGather:
    """The gathers of one weight's shard on this rank: which planes, quantized when, counted.

    A shard is quantized once a step, along both axes in one pass: the backward gather sends what the forward gather
    kept, and further micro-batches of the step, whose predecessors reduced no gradients, send it again. The codes are
    dropped by the backward that reduces gradients, after which the master may change, and are never used once the
    master was changed in place.
    """

    def __init__(
        self,
        rule: GatherRule,
        parameter: nn.Parameter,
        fsdp_param: Any,
        group: Any,
        counters: Counters,
        mode: GradientMode,
    ):
        self.rule, self.parameter, self.fsdp_param, self.group = rule, parameter, fsdp_param, group
        self.counters, self.mode = counters, mode
        self.kept: dict[int, MXTensor] = {}
        self.kept_versions: tuple[int, int] | None = None
        self.kept_for_next_micro_batch = False

    def planes(self, shard: Tensor, backward: bool) -> list[MXTensor]:
        """The planes that a gather of this phase carries, from `shard` or kept from an earlier gather of the step."""
        stays = torch_private.stays_unsharded(self.group)
        axes = self.rule.axes(backward, stays)
        versions = torch_private.version(self.parameter), torch_private.version(shard)
        usable = self.kept_versions == versions and (backward or self.kept_for_next_micro_batch)
        if not usable or not self.kept.keys() >= set(axes):
            keeps = self.mode.enabled and not backward
            wanted = tuple(dict.fromkeys((*axes, *self.rule.axes(True, stays)))) if keeps else axes
            self.kept = dict(zip(wanted, self.rule.planes(shard.detach(), wanted)))
            self.kept_versions = versions
            self.counters.weights_quantized += 1
        planes = [self.kept[axis] for axis in axes]
        reduces = torch_private.reduces_gradients(self.group)
        if not backward:
            self.kept_for_next_micro_batch = self.mode.enabled and not reduces
        if (backward and reduces) or not self.mode.enabled or (stays and reduces):
            self.kept, self.kept_versions = {}, None
        return planes


class MXShardedWeight(Tensor):
    """This rank's shard of a weight, fp32 or bf16, quantized when FSDP2 gathers it. Operations on it give plain
    tensors."""

    __torch_function__ = torch_private.plain_results
    gather: ShardGather

    def to(self, *args: Any, **kwargs: Any) -> Tensor:
        """As `Tensor.to`, still marked: FSDP2 brings an offloaded shard to the device before it asks for its planes."""
        moved = super().to(*args, **kwargs).as_subclass(MXShardedWeight)
        moved.gather = self.gather
        return moved

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module: nn.Module, mp_policy):
        """The shard in the planes of the current phase; returns (uint8 tensors to gather, the axes and sizes to rebuild
        planes from)."""
        gather = self.gather
        backward = torch_private.is_backward(gather.group)
        planes = gather.planes(self, backward)
        axes = tuple(plane.axis for plane in planes)
        torch_private.forget_gather_outputs(gather.fsdp_param)
        tensors = [tensor for plane in planes for tensor in (plane.codes, plane.scales)]
        if torch_private.gather_group_size(gather.group) == 1:
            # Without a collective FSDP2 takes the first tensor only, so one buffer holds them all.
            sizes = [tensor.shape for tensor in tensors]
            return (torch.cat([tensor.reshape(-1) for tensor in tensors]),), (axes, outer_size, sizes)
        gather.counters.add_quantized_gather(
            "backward" if backward else "forward", sum(t.nbytes for t in tensors), self.numel()
        )
        return tuple(tensors), (axes, outer_size, None)

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata, param_dtype: torch.dtype, *, out: Tensor | None = None
    ):
        """Wrap the gathered bytes. FSDP2 frees them itself when it reshards (they are its all-gather outputs), so no
        inner tensors are named."""
        axes, shape, packed_sizes = metadata
        self.gather.counters.sample_unsharded(copying_out=self.gather.group)
        if packed_sizes is not None:
            parts = gathered[0].split([size.numel() for size in packed_sizes])
            gathered = tuple(part.view(size) for part, size in zip(parts, packed_sizes))
        recipe = self.gather.rule.recipe
        planes = {
            axis: MXTensor(codes, scales, recipe.element_format, recipe.block_shape, axis, shape)
            for axis, codes, scales in zip(axes, gathered[0::2], gathered[1::2])
        }
        if out is not None:
            held = out.to_local() if isinstance(out, DTensor) else out  # a DTensor where experts are spread over ranks
            held.planes.clear()
            held.planes.update(planes)
            return None
        return MXGatheredWeight(planes, shape, param_dtype, gathered[0].device), ()


class MXGatheredWeight(Tensor):
    """A gathered weight: MX planes by block axis under the shape and dtype of the weight they stand for.

    `gathered_plane(axis)` gives the plane an MX GEMM multiplies with. Any other operation sees the dequantized weight.
    """

    planes: dict[int, MXTensor]

    @staticmethod
    def __new__(cls, planes: dict[int, MXTensor], shape: torch.Size, dtype: torch.dtype, device: torch.device):
        weight = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        weight.planes = planes
        return weight

    def gathered_plane(self, axis: int) -> MXTensor:
        """The plane whose blocks run along `axis` (-1 or -2); a tile's one plane serves both.

        Raises:
            RuntimeError: the gather of this phase did not carry that plane.
        """
        plane = self.planes.get(axis)
        if plane is None:
            first = next(iter(self.planes.values()), None)
            if first is None or tuple(first.block_shape) != TILE:
                raise RuntimeError(
                    f"the gathered weight holds planes along {sorted(self.planes)}, "
                    f"and blocks along {axis} are asked for"
                )
            plane = first
        return plane

    def dequantize_weight(self) -> Tensor:
        """The weight in its dtype, from the plane at hand (the forward one where both are)."""
        return next(iter(self.planes.values())).dequantize(self.dtype)

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"MXGatheredWeight(shape={tuple(self.shape)}, dtype={self.dtype}, axes={sorted(self.planes)})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        # FSDP2 makes a parameter of what the hook returned through as_strided and detach: both must stay this weight,
        # on the same planes.
        weight = args[0]
        same = func in (torch.ops.aten.as_strided.default, torch.ops.aten.detach.default, torch.ops.aten.alias.default)
        # DTensor.to_local views the local tensor as itself
        same = same or (func is torch.ops.aten.view.default and tuple(args[1]) == tuple(weight.shape))
        if same:
            return cls(weight.planes, weight.shape, weight.dtype, weight.device)
        plain = torch.utils._pytree.tree_map_only(cls, cls.dequantize_weight, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def gather_quantized(model: nn.Module, rules: dict[str, GatherRule], counters: Counters) -> None:
    """Let the weights named in `rules` (full parameter name -> rule) cross their gathers quantized.

    Call after `fully_shard` and after the parameters have storage, before the first forward. Every rank must hold an
    even, whole-block shard of each (the plan decides this for all ranks alike).
    """
    fsdp_params = torch_private.gathered_params(model)
    mode = GradientMode(model)
    modules = dict(model.named_modules())
    for name, rule in rules.items():
        module_name, _, parameter_name = name.rpartition(".")
        module = modules[module_name]
        fsdp_param, group = fsdp_params[(id(module), parameter_name)]
        parameter = getattr(module, parameter_name)
        marked = parameter.to_local().detach().as_subclass(MXShardedWeight)
        marked.gather = ShardGather(rule, parameter, fsdp_param, group, counters, mode)
        torch_private.replace_local_tensor(parameter, marked)
