"""Flags of the group `optimization`: fused kernels of accelerators and memory savers.

Fused kernels change speed, not results, so a flag that asks for one that is not there is accepted with a warning.
What would change results (a window of attention, a fixed router) is refused until it is built.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_llm.arguments.flag import NO_EFFECT, NOT_BUILT, flag

_ELSEWHERE = "; elsewhere no effect: plain torch operations, with the same result."
_DEEPSEEK = "no built model has this operation (it belongs to DeepSeek-V4)"
_GDN = "no built model has a gated delta network (it belongs to Qwen3-Next)"
_CAUSAL = "attention sees all earlier tokens"


@dataclass(frozen=True, kw_only=True)
class OptimizationArguments:
    """Fused operations and memory savers."""

    use_fused_rmsnorm: bool = flag(f"Fused RMSNorm on NPUs{_ELSEWHERE}", False)
    moe_grouped_gemm: bool = flag(
        f"One GEMM for all experts in 16 bits, and fused permutation, on NPUs{_ELSEWHERE}", False
    )
    use_fused_rotary_pos_emb: bool = flag(f"Fused rotary embedding on NPUs{_ELSEWHERE}", False)
    use_fused_swiglu: bool = flag(f"Fused SwiGLU of experts on NPUs{_ELSEWHERE}", False)
    use_flash_attn: bool = flag(
        "Flash attention: the fused operator on NPUs, SDPA's flash kernel alone on CUDA; on a CPU no effect.", False
    )
    use_sparse_flash_attn: bool = flag("Sparse flash attention.", False, status=NO_EFFECT, note=_DEEPSEEK)
    use_fused_lightning_indexer: bool = flag("Fused indexer.", False, status=NO_EFFECT, note=_DEEPSEEK)
    use_fused_lightning_indexer_loss: bool = flag("Fused loss of the indexer.", False, status=NO_EFFECT, note=_DEEPSEEK)
    use_ascend_mhc: bool = flag("Fused hyper-connections.", False, status=NO_EFFECT, note=_DEEPSEEK)
    use_triton_swiglu_limit: bool = flag("Fused clamped SwiGLU.", False, status=NO_EFFECT, note=_DEEPSEEK)
    pre_tokens: int = flag("Earlier tokens that attention sees.", 1048576, status=NOT_BUILT, note=_CAUSAL, minimum=0)
    next_tokens: int = flag("Later tokens that attention sees.", 0, status=NOT_BUILT, note=_CAUSAL, minimum=0)
    use_triton_gdn: bool = flag("Triton kernels of gated delta networks.", False, status=NO_EFFECT, note=_GDN)
    use_flash_gdn: bool = flag("Flash kernels of gated delta networks.", False, status=NO_EFFECT, note=_GDN)
    gdn_chunk_size: int = flag("Chunk of gated delta networks.", 64, status=NO_EFFECT, note=_GDN, minimum=1)
    chunk_loss_size: int | None = flag(
        "Tokens whose logits are raised to fp32 at a time in the loss; unset, 1,024.", None, minimum=1
    )
    use_triton_rmsnormgated: bool = flag("Triton kernel of gated RMSNorm.", False, status=NO_EFFECT, note=_GDN)
    fix_router: bool = flag(
        "Send tokens to the experts in turn, equally many to each, for measurements.", False
    )
