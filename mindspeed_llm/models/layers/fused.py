"""Which operations of a model run as one kernel of the device: chosen by device and flag when the model is built.

A layer holds the function it computes with as an attribute, the plain one at first. `choose_kernels` replaces those
that flags name by the device's; a flag without a kernel on this device changes nothing and is said once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from fsdp2.expert_parallel import npu_grouped
from fsdp2.expert_parallel.grouped_linear import GroupedLinear
from mindspeed_llm.models.layers import attention, moe, npu_ops, rms_norm

if TYPE_CHECKING:
    from mindspeed_llm.arguments.optimization import OptimizationArguments

FLAGS = ("use_fused_rmsnorm", "use_fused_rotary_pos_emb", "use_fused_swiglu", "use_flash_attn", "moe_grouped_gemm")
ON_CUDA = ("use_flash_attn",)
NOTHING = {
    "use_flash_attn": "torch's scaled_dot_product_attention picks its kernel",
    "moe_grouped_gemm": "experts multiply group by group, with the same result",
}


def choose_kernels(model: nn.Module, device_type: str, flags: OptimizationArguments) -> list[str]:
    """Give the layers of `model` (before it is sharded) the kernels of `device_type` that `flags` ask for.

    Returns:
        a warning for every flag that has no effect on that device.
    """
    asked = [name for name in FLAGS if getattr(flags, name)]
    there = {"npu": FLAGS, "cuda": ON_CUDA}.get(device_type, ())
    for module in model.modules():
        for name in asked:
            if name in there:
                _choose(module, name, device_type)
    return [
        f"warning: --optimization.{name} has no effect on {device_type}: "
        f"{NOTHING.get(name, 'the plain torch operation is used, with the same result')}"
        for name in asked
        if name not in there
    ]


def _choose(module: nn.Module, flag: str, device_type: str) -> None:
    if flag == "use_fused_rmsnorm" and isinstance(module, rms_norm.RMSNorm):
        module.normalize = npu_ops.rms_norm
    elif flag == "use_fused_rotary_pos_emb" and isinstance(module, attention.GroupedQueryAttention):
        module.rotate = npu_ops.rotate
    elif flag == "use_flash_attn" and isinstance(module, attention.GroupedQueryAttention):
        module.attend = npu_ops.causal_attention if device_type == "npu" else attention.cuda_flash_attention
    elif flag == "use_fused_swiglu" and isinstance(module, moe.Experts):
        module.activate = npu_ops.weighted_swiglu
    elif flag == "moe_grouped_gemm" and isinstance(module, moe.MixtureOfExperts):
        module.dispatch, module.combine = npu_ops.permute, npu_ops.unpermute
    elif flag == "moe_grouped_gemm" and isinstance(module, GroupedLinear):
        module.products = npu_grouped.PRODUCTS
