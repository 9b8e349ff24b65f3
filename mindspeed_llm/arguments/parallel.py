"""Flags of the group `parallel`: how parameters are sharded over processes and which activations are recomputed.

`fsdp_size * dp_replicate_size` is the world size, for dense parameters; for experts `ep_size * ep_fsdp_size` divides
it, and what remains are replicas. Tensor and context parallelism keep their flags and their defaults of 1 and are
refused above it until they are built. Module patterns use `*`, `?`, `{*}` and `{0-3}`.
"""
# ruff: noqa: RUF009 -- flag() returns a dataclasses.field

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_llm.arguments.flag import NO_EFFECT, NOT_BUILT, flag

_BUILT = (
    "built are fsdp_size and dp_replicate_size, whose product is the number of processes, and ep_size and ep_fsdp_size"
)
_NO_TP = "tensor parallelism is not built"
_NO_CP = "context parallelism is not built"
_NO_CHUNKS = "enable_chunk_batch is not built"
_FP16 = "built are bf16 and fp32; fp16 needs loss scaling"


@dataclass(frozen=True, kw_only=True)
class ParallelArguments:
    """Sharding, prefetch, mixed precision and recompute."""

    tp_size: int = flag("Tensor parallel size.", 1, status=NOT_BUILT, note=_BUILT, minimum=1)
    fsdp_size: int = flag("Processes that share one copy of the parameters.", 1, minimum=1)
    dp_replicate_size: int = flag("Copies of the sharded parameters (HSDP).", 1, minimum=1)
    recompute: bool = flag("Recompute activations in backward instead of keeping them.", False)
    ep_size: int = flag("Processes that hold different experts.", 1, minimum=1)
    ep_fsdp_size: int = flag(
        "Processes that share one expert's parameters; with 1 and ep_size 1 experts are sharded like all parameters.",
        1,
        minimum=1,
    )
    cp_size: int = flag("Context parallel size.", 1, status=NOT_BUILT, note=_BUILT, minimum=1)
    cp_type: str = flag(
        "Kind of context parallelism.",
        "ulysses",
        choices=("ulysses", "ring", "kvallgather"),
        status=NO_EFFECT,
        note=_NO_CP,
    )
    fsdp_modules: list[str] = flag(
        "Patterns of the modules that are gathered one at a time.",
        ["model.layers.{*}", "model.embed_tokens", "lm_head"],
    )
    ignored_modules: list[str] | None = flag("Patterns of the modules that are not sharded.", None)
    reshard_after_forward: bool = flag(
        "Free gathered parameters after forward and gather them again in backward.", True
    )
    shard_placement_fn: str | None = flag(
        "shard_by_dim_0 or shard_by_dim_1: dimension along which parameters are sharded; along dimension 1 they are "
        "gathered unquantized.",
        None,
    )
    cpu_offload: bool = flag("Keep masters, gradients and optimizer state in host memory.", False)
    efsdp_shard_placement_fn: str | None = flag(
        "Dimension along which experts are sharded over ep_fsdp_size: 0 experts, 1 rows of every expert. Quantized "
        "experts are gathered as codes along dimension 0 only, which is then what this is when unset.",
        "shard_by_dim_1",
        choices=("shard_by_dim_0", "shard_by_dim_1"),
    )
    hook_modules: list[str] = flag(
        "Patterns of the modules that get prefetch hooks.",
        ["model.layers.{*}"],
        status=NO_EFFECT,
        note="every module of fsdp_modules is prefetched in the order of use",
    )
    fsdp_implementation: str = flag(
        "Whose fully_shard is used.",
        "native",
        choices=("custom", "native"),
        status=NO_EFFECT,
        note="torch's fully_shard is always used",
    )
    tp_colwise: list[str] = flag(
        "Patterns of the linear layers split by columns.",
        ["*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"],
        status=NO_EFFECT,
        note=_NO_TP,
    )
    tp_rowwise: list[str] = flag(
        "Patterns of the linear layers split by rows.", ["*.o_proj", "*.down_proj"], status=NO_EFFECT, note=_NO_TP
    )
    ep_modules: list[str] = flag(
        "Patterns of the expert modules spread over ep_size processes.", ["model.layers.{*}.mlp.experts"]
    )
    ep_fsdp_modules: list[str] = flag(
        "Patterns of the expert modules sharded over ep_fsdp_size processes.", ["model.layers.{*}.mlp.experts"]
    )
    ep_dispatcher: str = flag(
        "How tokens reach their experts: eager, or fused, which permutes rows once, into padded groups.",
        "eager",
        choices=("eager", "fused", "mc2"),
        unbuilt={"mc2": "mc2 is an NPU's merged kernel; built are eager and fused"},
    )
    ep_dispatch_precision: str = flag(
        "Format in which tokens travel to their experts: param_dtype, or mxfp8 with 1.03 bytes an element.",
        "param_dtype",
        choices=("param_dtype", "mxfp8"),
    )
    recompute_modules: list[str] = flag(
        "Patterns of the modules whose activations are recomputed.", ["model.layers.{*}"]
    )
    param_dtype: str = flag(
        "Type of gathered parameters and of the computation.",
        "bf16",
        choices=("bf16", "fp16", "fp32"),
        unbuilt={"fp16": _FP16},
    )
    reduce_dtype: str = flag(
        "Type in which gradients are reduced.", "fp32", choices=("bf16", "fp16", "fp32"), unbuilt={"fp16": _FP16}
    )
    num_to_forward_prefetch: int = flag("Modules to gather ahead in forward.", 1, minimum=0)
    num_to_backward_prefetch: int = flag("Modules to gather ahead in backward.", 1, minimum=0)
    low_precision_reduce_scatter: str = flag(
        "Format in which gradients travel: none reduces them in reduce_dtype, mxfp8 sends 1.03 bytes an element.",
        "none",
        choices=("none", "mxfp8"),
    )
    world_size: int | None = flag(
        "Number of processes that --training.dry_run plans for, when they are not there; unset, those there are.",
        None,
        minimum=1,
    )
    device_memory: float | None = flag(
        "GiB of one device: --training.dry_run refuses a layout that needs more and names the nearest that fits.",
        None,
        above=0,
    )
    bandwidth: float | None = flag(
        "GB/s of one rank's link in one direction: --training.dry_run says how long collectives take.", None, above=0
    )
    enable_chunk_batch: bool = flag(
        "Run modules on pieces of the batch.",
        False,
        status=NOT_BUILT,
        note="a smaller per_device_train_batch_size with more gradient_accumulation_steps saves the same memory",
    )
    chunk_mbs: int = flag("Size of a piece.", 1, status=NO_EFFECT, note=_NO_CHUNKS, minimum=1)
    chunk_mbs_batch_dim: int = flag("Batch dimension.", 0, status=NO_EFFECT, note=_NO_CHUNKS, minimum=0)
    chunk_mbs_modules: list[str] = flag(
        "Patterns of the modules that run on pieces.", ["model.layers.{*}"], status=NO_EFFECT, note=_NO_CHUNKS
    )
    chunk_mbs_arg_indexs: list[int] = flag("Positional inputs to cut.", [0], status=NO_EFFECT, note=_NO_CHUNKS)
    chunk_mbs_kwarg_names: list[str] = flag(
        "Keyword inputs to cut.",
        ["position_embeddings", "position_ids", "attention_mask", "input_ids"],
        status=NO_EFFECT,
        note=_NO_CHUNKS,
    )
