"""From arguments to a job that can start: everything a user can get wrong is found here, before a process allocates.

`prepare` reads the model's configuration, the tokenizer and the datasets' indices, builds the model on the meta device
and makes the plan. Nothing communicates, so each rank finds the same mistake by itself, and a wrong path costs seconds
instead of a queue slot.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp2.errors import ConfigurationError
from fsdp2.plan import ParallelPlan, QuantizationPlan

from .checkpoint_folder import find_checkpoint, newest_whole
from .distributed import Launch
from .output_lock import first_start, restart_count
from .schedule import LearningRateSchedule, warmup_step_count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from mindspeed_llm.arguments import Arguments
    from mindspeed_llm.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Job:
    """What a training run is made of. `model` has no storage yet; `valid_data` is None without a held-out split."""

    arguments: Arguments
    launch: Launch
    plan: ParallelPlan
    plan_text: str
    quantization_rows: list[dict[str, Any]]
    model: nn.Module
    tokenizer: Tokenizer
    train_data: Sequence[dict]
    valid_data: Sequence[dict] | None
    total_steps: int
    schedule: LearningRateSchedule
    resume_from: Path | None
    epoch_samples: int  # sequences of one pass over the training data
    notes: tuple[str, ...] = ()  # what the console should say of the start

    @property
    def output_dir(self) -> Path:
        return Path(self.arguments.training.output_dir)

    @property
    def checkpoint_root(self) -> Path:
        return self.output_dir / "checkpoints"

    @property
    def tensorboard_dir(self) -> Path:
        return Path(self.arguments.training.tensorboard_dir or self.output_dir / "tensorboard")

    @property
    def global_batch_size(self) -> int:
        """Sequences of one optimizer step, over all processes."""
        return sequences_per_step(self.arguments, self.launch.world_size)


def sequences_per_step(arguments: Arguments, world_size: int) -> int:
    training = arguments.training
    return training.per_device_train_batch_size * training.gradient_accumulation_steps * world_size


def prepare(arguments: Arguments, launch: Launch, device_type: str) -> Job:
    """Check a configuration against its model, tokenizer and data, and return the job.

    Raises:
        ConfigurationError: whatever of it cannot work.
    """
    from mindspeed_llm.data import load_tokenizer, tokenizer_checks
    from mindspeed_llm.models import build_model, load_config
    from mindspeed_llm.models.layers.fused import choose_kernels
    from mindspeed_llm.models.layers.router import configure_routing

    model_arguments, training = arguments.model, arguments.training
    config = load_config(model_arguments.model_name_or_path)
    tokenizer = load_tokenizer(model_arguments.tokenizer_name_or_path or model_arguments.model_name_or_path)
    tokenizer_checks(tokenizer, config.vocab_size)
    train_data, valid_data, total_steps, epoch_samples = _datasets(arguments, launch.world_size, config.vocab_size)
    schedule = LearningRateSchedule(
        kind=training.lr_scheduler_type,
        peak=training.lr,
        minimum=training.min_lr,
        warmup_steps=warmup_step_count(training.warmup_steps, training.warmup_ratio, total_steps),
        total_steps=total_steps,
    )
    resume_from, notes = _start_of(arguments)
    plan = parallel_plan(arguments, launch.world_size, device_type)
    plan.check_sizes()
    model = build_model(config)
    configure_routing(
        model, fixed=arguments.optimization.fix_router, balance_by_bias=training.router_bias_update_rate > 0
    )
    notes = (*notes, *choose_kernels(model, device_type, arguments.optimization))
    return Job(
        arguments=arguments,
        launch=launch,
        plan=plan,
        plan_text=plan.describe(model),
        quantization_rows=plan.quantization_rows(model),
        model=model,
        tokenizer=tokenizer,
        train_data=train_data,
        valid_data=valid_data,
        total_steps=total_steps,
        schedule=schedule,
        resume_from=resume_from,
        epoch_samples=epoch_samples,
        notes=notes,
    )


def _start_of(arguments: Arguments) -> tuple[Path | None, tuple[str, ...]]:
    """The checkpoint to resume from, None for the beginning, and what to say of it.

    When torchrun restarts the job after a failure, that is the newest whole one that this job has saved, whatever the
    flag says; before it has saved any, what the flag says.
    """
    wish = arguments.training.resume_from_checkpoint
    root = Path(arguments.training.output_dir) / "checkpoints"
    restarts = restart_count()
    if restarts == 0:
        return find_checkpoint(wish, root), ()
    own = newest_whole(root, saved_after=first_start(root.parent))
    if own is not None:
        return own, (f"restart {restarts} after a failure",)
    found = find_checkpoint(wish, root)
    return found, (
        f"warning: restart {restarts} after a failure; the job had saved nothing to resume from, so it starts "
        f"{f'from {found}' if found else 'from the beginning'} again",
    )


def parallel_plan(arguments: Arguments, world_size: int, device_type: str) -> ParallelPlan:
    """Return the engine's plan that the flags of `parallel` and `model.quant_*` ask for."""
    model, parallel = arguments.model, arguments.parallel
    quantization = None
    if model.quant_recipe_name is not None:
        from fsdp2.quantization import QuantRecipe

        quantization = QuantizationPlan(
            recipe=QuantRecipe.from_name(
                model.quant_recipe_name,
                scale_rule=model.quant_scale_rule,
                quant_format=model.quant_format,
                quant_block_size=model.quant_block_size,
            ),
            converters=tuple(model.quant_converters),
            apply_modules=tuple(model.quant_apply_modules),
            ignored_modules=tuple(model.quant_ignored_modules),
            low_precision_all_gather=model.enable_fsdp_low_precision_all_gather,
            all_gather_mode=model.fsdp_low_precision_all_gather_mode,
        )
    return ParallelPlan(
        world_size=world_size,
        device_type=device_type,
        fsdp_size=parallel.fsdp_size,
        dp_replicate_size=parallel.dp_replicate_size,
        fsdp_modules=tuple(parallel.fsdp_modules),
        ignored_modules=tuple(parallel.ignored_modules or ()),
        reshard_after_forward=parallel.reshard_after_forward,
        recompute=parallel.recompute,
        recompute_modules=tuple(parallel.recompute_modules),
        param_dtype=parallel.param_dtype,
        reduce_dtype=parallel.reduce_dtype,
        num_to_forward_prefetch=parallel.num_to_forward_prefetch,
        num_to_backward_prefetch=parallel.num_to_backward_prefetch,
        quantization=quantization,
        low_precision_reduce_scatter=parallel.low_precision_reduce_scatter,
        shard_placement=parallel.shard_placement_fn,
        cpu_offload=parallel.cpu_offload,
        ep_size=parallel.ep_size,
        ep_fsdp_size=parallel.ep_fsdp_size,
        ep_modules=tuple(parallel.ep_modules),
        ep_fsdp_modules=tuple(parallel.ep_fsdp_modules),
        expert_shard_placement=parallel.efsdp_shard_placement_fn,
        ep_dispatcher=parallel.ep_dispatcher,
        ep_dispatch_precision=parallel.ep_dispatch_precision,
    )


def _datasets(arguments: Arguments, world_size: int, vocab_size: int):
    """Return the training data, the held-out data or None, the number of steps, and the samples of one epoch.

    With `max_steps` unset the steps follow from `num_train_epochs`.
    """
    from mindspeed_llm.data import build_pretraining_datasets

    data, training = arguments.data, arguments.training
    per_step = sequences_per_step(arguments, world_size)

    def build(train_samples: int | None):
        return build_pretraining_datasets(
            data.dataset,
            split=data.split,
            sequence_length=data.cutoff_len,
            seed=training.seed,
            train_samples=train_samples,
            shuffle=not training.disable_shuffling,
            vocab_size=vocab_size,
        )

    one_epoch = build(None)[0]
    if one_epoch is None:
        raise ConfigurationError(f"--data.split {data.split}: the first number, the training share, must be above 0")
    steps = training.max_steps
    if steps < 0:
        steps = max(1, math.ceil(training.num_train_epochs * len(one_epoch) / per_step))
    train_data, valid_data, _ = build(steps * per_step)
    return train_data, valid_data, steps, len(one_epoch)
