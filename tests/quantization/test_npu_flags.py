"""Flags of fused operations: which layers they change on which device, and what is said where they change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_llm.arguments.optimization import OptimizationArguments
from mindspeed_llm.models import build_model
from mindspeed_llm.models.layers import attention, fused, npu_ops, rms_norm
from mindspeed_llm.models.layers.moe import dispatch

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "models" / "qwen3_moe_tiny"
EVERY = OptimizationArguments(**dict.fromkeys(fused.FLAGS, True))


@pytest.mark.parametrize("device_type, silent", [("cpu", 0), ("cuda", 1), ("npu", 5)])
def test_a_flag_without_effect_is_said_once(device_type, silent):
    warnings = fused.choose_kernels(build_model(CONFIG), device_type, EVERY)
    assert len(warnings) == len(fused.FLAGS) - silent
    assert all(f"has no effect on {device_type}" in warning for warning in warnings)
    assert fused.choose_kernels(build_model(CONFIG), device_type, OptimizationArguments()) == []


def test_each_device_gets_its_kernels():
    layers = {}
    for device_type in ("cpu", "cuda", "npu"):
        model = build_model(CONFIG)
        fused.choose_kernels(model, device_type, EVERY)
        layers[device_type] = model.model.layers[0]
    assert layers["cpu"].self_attn.attend is attention.causal_attention
    assert layers["cuda"].self_attn.attend is attention.cuda_flash_attention
    assert layers["npu"].self_attn.attend is npu_ops.causal_attention
    assert layers["cuda"].input_layernorm.normalize is rms_norm.rms_norm
    assert layers["npu"].input_layernorm.normalize is npu_ops.rms_norm
    assert layers["cuda"].mlp.dispatch is dispatch and layers["npu"].mlp.dispatch is npu_ops.permute
