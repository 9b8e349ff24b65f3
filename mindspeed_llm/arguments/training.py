"""Flags of the group `training`: steps, optimizer, schedule, checkpoints, logs and profiling.

A step is one optimizer update: `gradient_accumulation_steps` micro-batches of `per_device_train_batch_size` sequences
on every process. `stage` has the reference stack's default `sft`, which is not built yet, so a run says
`--training.stage pt`.
"""
# ruff: noqa: RUF009 -- flag() returns a dataclasses.field

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_llm.arguments.flag import NO_EFFECT, flag


@dataclass(frozen=True, kw_only=True)
class TrainingArguments:
    """The training loop."""

    output_dir: str = flag("Folder for everything a run writes.")
    stage: str = flag(
        "pt: pre-training; sft: supervised fine-tuning.",
        "sft",
        choices=("pt", "sft"),
        unbuilt={"sft": "built is pre-training, --training.stage pt"},
    )
    seed: int = flag("Seed of initialization and of the order of samples.", 42, minimum=0)
    deterministic: bool | None = flag("Use only kernels whose results repeat.", True)

    optimizer: str = flag(
        "Optimizer; fused_adamw updates all parameters in one kernel where the device has one.",
        "adamw",
        choices=("adamw", "muon", "fused_adamw"),
        unbuilt={"muon": "built are adamw and fused_adamw"},
    )
    lr: float = flag("Peak learning rate.", 1e-05, minimum=0)
    weight_decay: float = flag("Weight decay; norms and biases have none.", 0.01, minimum=0)
    adam_beta1: float = flag("Decay of the mean of gradients.", 0.9, minimum=0, below=1)
    adam_beta2: float = flag("Decay of the mean of squared gradients.", 0.95, minimum=0, below=1)
    adam_epsilon: float = flag("Added to the denominator.", 1e-08, above=0)
    max_grad_norm: float = flag("Clip the global gradient norm to this; 0 does not clip.", 1.0, minimum=0)
    lr_scheduler_type: str = flag(
        "Shape of the learning rate after warmup; wsd stays at the peak and falls in the last fifth.",
        "cosine",
        choices=("cosine", "linear", "constant", "wsd"),
    )
    warmup_ratio: float = flag("Part of the steps that warm up.", 0.03, minimum=0, below=1)
    warmup_steps: int = flag("Steps that warm up; above 0 it wins over warmup_ratio.", 0, minimum=0)
    min_lr: float = flag("Learning rate at the end of cosine and linear.", 1e-06, minimum=0)
    num_train_epochs: float = flag("Passes over the data, when max_steps is not set.", 3.0, above=0)
    max_steps: int = flag("Steps to train; -1 trains num_train_epochs.", -1, minimum=-1)
    gradient_accumulation_steps: int = flag("Micro-batches of one step.", 1, minimum=1)
    per_device_train_batch_size: int = flag("Sequences of one micro-batch on one process.", 8, minimum=1)
    disable_shuffling: bool = flag("Read documents in the order they are stored.", False)
    router_aux_loss_coef: float = flag("Weight of the load-balancing loss of MoE routers.", 0.0, minimum=0)
    router_z_loss_coef: float = flag("Weight of the z-loss of MoE routers, which keeps logits small.", 0.0, minimum=0)
    router_bias_update_rate: float = flag(
        "How far a step moves the biases that balance experts without a loss (DeepSeek-V3: 0.001); 0 for none.",
        0.0,
        minimum=0,
    )
    indexer_loss_coeff: float = flag(
        "Weight of the loss of a sparse-attention indexer.", 1.0, status=NO_EFFECT, note="no built model has an indexer"
    )
    mtp_loss_scaling_factor: float = flag(
        "Weight of the multi-token prediction loss.",
        0.3,
        status=NO_EFFECT,
        note="no built model predicts several tokens",
    )
    calculate_per_token_loss: bool = flag(
        "Average the loss over tokens instead of over micro-batches.",
        False,
        status=NO_EFFECT,
        note="pre-training sequences are equally long, so both averages are the same",
    )

    save_steps: int = flag("Steps between checkpoints; one is saved at the end too.", 500, minimum=1)
    save_total_limit: int | None = flag("Checkpoints to keep; None keeps all.", 3, minimum=1)
    save_epochs: int = flag("Epochs between checkpoints, beside those of save_steps.", 1, minimum=1)
    save_only_model: bool = flag(
        "Leave optimizer, random generators and loader out of checkpoints; nothing can be resumed from them.", False
    )
    save_async: bool = flag(
        "Write checkpoints while training goes on; a failed one is reported and makes the run's exit status 1.", False
    )
    save_hf_weights: bool = flag("Write Hugging Face weights to OUTPUT_DIR/hf at the end.", True)
    resume_from_checkpoint: str | None = flag(
        "Checkpoint to go on from: its folder; latest: the last one saved; auto: the newest whole one, or the start "
        "where none is.",
        None,
    )

    eval_steps: int = flag(
        "Steps between evaluations; 0 evaluates only at the end, if --data.split holds data out.", 0, minimum=0
    )
    eval_iters: int = flag("Batches of one evaluation; 0 takes all that is held out.", 0, minimum=0)

    logging_steps: int = flag("Steps between lines of the log.", 1, minimum=1)
    log_throughput: bool = flag("Log TFLOP/s of each device too; tokens per second are always logged.", False)
    peak_tflops: float | None = flag(
        "Peak TFLOP/s of one device, which model FLOPs utilization (MFU) is a share of; unset, dense bf16 from a "
        "table, on CPU measured.",
        None,
        above=0,
    )
    log_cpu_memory: bool = flag(
        "Log the memory of the process.",
        False,
        status=NO_EFFECT,
        note="peak memory is always logged, of the device and on CPU of the process",
    )
    tensorboard_dir: str | None = flag("Folder of TensorBoard events; unset, OUTPUT_DIR/tensorboard.", None)
    quant_stats_steps: int = flag(
        "Steps between measurements of quantized inputs, weights and gradients (saturation, underflow, SQNR, scales) "
        "into OUTPUT_DIR/quantization_health.jsonl and TensorBoard; 0 measures nothing.",
        0,
        minimum=0,
    )
    dry_run: bool = flag("Check everything, print and save the plan, and stop before anything is allocated.", False)

    dataloader_num_workers: int = flag("Processes that read ahead.", 0, minimum=0)
    dataloader_prefetch_factor: int | None = flag(
        "Batches that each worker reads ahead.",
        None,
        status=NO_EFFECT,
        note="the loader's own default is used",
        minimum=1,
    )
    dataloader_pin_memory: bool = flag(
        "Read batches into page-locked memory.", True, status=NO_EFFECT, note="the device decides"
    )
    dataloader_persistent_workers: bool = flag(
        "Keep workers between epochs.", False, status=NO_EFFECT, note="the loader crosses epochs without a restart"
    )
    dataloader_drop_last: bool = flag(
        "Leave out the last batch of an epoch when it is short.",
        False,
        status=NO_EFFECT,
        note="batches cross the end of an epoch, so none is short",
    )

    profile: bool = flag("Record a profile; tools/profile_report.py makes a page of it.", False)
    profile_step_start: int = flag("Steps before the first profiled one.", 0, minimum=0)
    profile_step_end: int = flag("Last step to profile; -1: only one step.", -1, minimum=-1)
    profile_ranks: list[int] = flag("Ranks to profile; -1: all.", [-1])
    profile_level: str = flag("Detail of an NPU profile: level_none, level0, level1 or level2.", "level0")
    profile_export_type: str = flag("File format of an NPU profile: text or db.", "text")
    profile_data_simplification: bool = flag("Drop the raw data of an NPU profile.", False)
    profile_with_cpu: bool = flag("Record CPU operators beside an accelerator's; on CPU they always are.", False)
    profile_with_stack: bool = flag("Record call stacks.", False)
    profile_with_memory: bool = flag("Record allocations.", False)
    profile_record_shapes: bool = flag("Record the shapes of operators' inputs.", False)
    profile_save_path: str = flag("Folder of profiles.", "./profile")
