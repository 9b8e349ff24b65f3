"""torch_npu's fused operations, each with the signature of the plain torch function that it stands in for.

All calls of torch_npu on the model's side are here; `fused.choose_kernels` hands them to the layers that flags ask for.
They carry autograd, and exist on A2, A3 and A5. Their shape functions do not notice wrong dtypes or masks, so these are
asserted here. Checked by tests/quantization/test_npu.py on torch_npu 2.13.0's shape functions and, with the documented
formulas as CPU kernels, against the plain functions; never run on a chip.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_llm.models.layers.moe import SortedPairs, combine, dispatch
from mindspeed_llm.models.layers.rotary import RotaryTable

COMPRESSED_MASK = 2048  # rows and columns of the mask that sparse modes 2 to 4 take, whatever the sequence's length
RIGHT_DOWN_CAUSAL = 3  # sparse mode: the last query sees every key


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As `rms_norm.rms_norm`: x [..., H], weight [H]."""
    return _torch_npu().npu_rms_norm(x, weight.to(x.dtype), eps)[0]


def rotate(x: Tensor, table: RotaryTable, dtype: torch.dtype) -> Tensor:
    """As `attention.rotate_heads`: x [B, S, heads, D]. In fp32: bf16 cannot tell late positions apart."""
    cos, sin = (torch.cat([half, half], -1) for half in (table.cos, table.sin))  # [B or 1, S, 1, D]
    assert cos.dtype == torch.float32 and cos.shape[1] == x.shape[1], (cos.dtype, cos.shape, x.shape)
    return _torch_npu().npu_rotary_mul(x.float(), cos, sin, "half").to(dtype)


def weighted_swiglu(gate_up_TI: Tensor, weights_T: Tensor) -> Tensor:
    """As `mlp.weighted_swiglu`: gate_up_TI [T, 2I], weights_T fp32 [T] -> [T, I]."""
    product_TI = _torch_npu().npu_swiglu(gate_up_TI, dim=-1)
    return (product_TI * weights_T[:, None]).to(gate_up_TI.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, grouped: bool) -> Tensor:
    """As `attention.causal_attention`: q [B, heads, Sq, D]; k, v [B, kv_heads, Sk, D], Sk >= Sq."""
    assert q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16), (q.dtype, k.dtype, v.dtype)
    assert k.shape[2] >= q.shape[2] and q.shape[1] % k.shape[1] == 0, (q.shape, k.shape)
    masked = torch.ones(COMPRESSED_MASK, COMPRESSED_MASK, dtype=torch.bool, device=q.device).triu(1)  # True: not seen
    return _torch_npu().npu_fusion_attention(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        q.shape[1],
        "BNSD",
        atten_mask=masked,
        scale=q.shape[-1] ** -0.5,
        sparse_mode=RIGHT_DOWN_CAUSAL,
    )[0]


def permute(x_TH: Tensor, pairs: SortedPairs) -> Tensor:
    """As `moe.dispatch`, which pads rows where quantized GEMMs want whole blocks; the operator cannot."""
    if pairs.padded:
        return dispatch(x_TH, pairs)
    return _torch_npu().npu_moe_token_permute(x_TH, pairs.experts_TK.int())[0]


def unpermute(y_PH: Tensor, pairs: SortedPairs) -> Tensor:
    """As `moe.combine`. The operator adds a token's rows only when it is given weights; they are 1 here."""
    if pairs.padded:
        return combine(y_PH, pairs)
    ones_TK = torch.ones(pairs.rows_of_token.shape, dtype=y_PH.dtype, device=y_PH.device)
    return _torch_npu().npu_moe_token_unpermute(y_PH, pairs.rows_of_token.flatten().int(), ones_TK)


def _torch_npu():
    import torch_npu  # only where CANN is installed: elsewhere its import fails

    return torch_npu
