"""What a configured step costs a rank, as text: memory and bytes with and without quantization, and whether it fits.

`--training.dry_run` prints it for the processes there are or for `--parallel.world_size N` of them, `tools/plan.py` for
a configuration without data. Nothing is allocated: the model lives on the meta device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from fsdp2.errors import ConfigurationError
from fsdp2.forecast import Forecast, forecast
from fsdp2.plan import ParallelPlan, lay_out
from mindspeed_llm.training.activations import Activations, activations

if TYPE_CHECKING:
    from mindspeed_llm.arguments import Arguments

GIB = 2**30
LARGEST_WORLD_SIZE = 16384
WASTEFUL_PADDING = 1.1


@dataclass(frozen=True)
class Step:
    """The batch of one rank: sequences of a micro-batch, tokens of a sequence, micro-batches of a step."""

    batch: int
    sequence: int
    micro_batches: int = 1


@dataclass(frozen=True)
class Cost:
    """A plan's forecast and the activations of a micro-batch, on rank 0."""

    forecast: Forecast
    activations: Activations

    @property
    def total(self) -> int:
        """Bytes on the device, without the temporaries of single operations."""
        return self.forecast.state.total + self.activations.peak


def cost(model: nn.Module, plan: ParallelPlan, step: Step) -> Cost:
    """What `plan` costs; `model` (with a `config`) is unconverted and on the meta device."""
    gathers, _ = lay_out(model, plan)
    quantized = {gather.decision.module for gather in gathers if gather.decision.quantized}
    return Cost(
        forecast(model, plan, step.micro_batches),
        activations(model.config, plan, quantized, step.batch, step.sequence),
    )


def of_arguments(arguments: Arguments, model: nn.Module, plan: ParallelPlan) -> str:
    """`report` of what the flags ask for.

    Raises:
        ConfigurationError: it does not fit into `--parallel.device_memory`.
    """
    training, parallel = arguments.training, arguments.parallel
    step = Step(
        training.per_device_train_batch_size, arguments.data.cutoff_len, training.gradient_accumulation_steps
    )
    return report(model, plan, step, device_memory=parallel.device_memory, bandwidth=parallel.bandwidth)


def report(
    model: nn.Module,
    plan: ParallelPlan,
    step: Step,
    *,
    device_memory: float | None = None,
    bandwidth: float | None = None,
) -> str:
    """The table of costs.

    Args:
        device_memory: GiB of one device; None does not check.
        bandwidth: GB/s of a rank's link in one direction; None gives no times.

    Raises:
        ConfigurationError: it does not fit into `device_memory`; names the nearest layout that does.
    """
    costs = {plan.quantization.recipe.name: cost(model, plan, step)} if plan.quantization else {}
    costs[f"{plan.param_dtype}, unquantized"] = cost(model, dataclasses.replace(plan, quantization=None), step)
    lines = [
        f"a step of {step.micro_batches} micro-batch(es) of {step.batch} x {step.sequence} tokens on rank 0:",
        *_table(costs, bandwidth),
    ]
    chosen = next(iter(costs.values()))
    if chosen.forecast.uneven:
        names = ", ".join(chosen.forecast.uneven[:4]) + (", ..." if len(chosen.forecast.uneven) > 4 else "")
        lines.append(f"  padded because they do not divide: {len(chosen.forecast.uneven)} parameters ({names})")
        if chosen.forecast.padding > WASTEFUL_PADDING:
            lines.append(
                f"  padding makes rank 0 hold {chosen.forecast.padding:.2f} times its share: a smaller "
                "--parallel.fsdp_size with --parallel.dp_replicate_size, or experts spread over --parallel.ep_size, "
                "divide better"
            )
    if plan.ep_size > 1:
        lines.append("  token dispatch of expert parallelism is not counted: it depends on the routing")
    if device_memory is not None:
        _check_fit(model, plan, step, chosen, device_memory)
        lines.append(f"  fits into {device_memory:g} GiB: {chosen.total / GIB:,.2f} GiB and temporaries")
    return "\n".join(lines)


def _table(costs: dict[str, Cost], bandwidth: float | None) -> list[str]:
    def row(label: str, values: list[str]) -> str:
        return f"  {label:<38}" + "".join(f"{value:>24}" for value in values)

    def memory(label: str, values: list[int]) -> str:
        return row(label, [f"{v / GIB:,.3f} GiB" if v >= GIB else f"{v / 2**20:,.3f} MiB" for v in values])

    def sent(label: str, values: list[int]) -> str:
        return row(label, [f"{value:,} B" for value in values])

    every = list(costs.values())
    states, wires = [c.forecast.state for c in every], [c.forecast.collectives for c in every]
    lines = [
        row("", list(costs)),
        memory("masters, fp32", [s.masters for s in states]),
        memory("gradients, fp32", [s.gradients for s in states]),
        memory("AdamW moments, fp32", [s.optimizer for s in states]),
        memory("parameters not sharded", [s.unsharded for s in states]),
        *(
            [memory("gradients of micro-batches, unsharded", [s.accumulated for s in states])]
            if any(s.accumulated for s in states)
            else []
        ),
        memory("gathered parameters, peak", [s.gathered_peak for s in states]),
        memory("activations kept", [c.activations.kept for c in every]),
        memory("activations of one recomputed layer", [c.activations.recomputed for c in every]),
        memory("total on the device", [c.total for c in every]),
        sent("all-gather in forward, sent", [w.all_gather_bytes_forward for w in wires]),
        sent("all-gather in backward, sent", [w.all_gather_bytes_backward for w in wires]),
        sent("reduce-scatter, sent", [w.reduce_scatter_bytes for w in wires]),
        sent("all-reduce over replicas, sent", [w.all_reduce_bytes for w in wires]),
    ]
    if bandwidth is not None:
        times = [f"{w.seconds(bandwidth * 1e9) * 1e3:,.1f} ms" for w in wires]
        lines.append(row(f"collectives at {bandwidth:g} GB/s, no overlap", times))
    return lines


def _check_fit(model: nn.Module, plan: ParallelPlan, step: Step, found: Cost, device_memory: float) -> None:
    if found.total <= device_memory * GIB:
        return
    message = (
        f"--parallel.device_memory {device_memory:g}: a rank of this layout needs {found.total / GIB:,.2f} GiB, "
        f"{found.forecast.state.total / GIB:,.2f} of them for parameters and optimizer"
    )
    for words, other, batch in _nearby(plan, step):
        total = cost(model, other, dataclasses.replace(step, batch=batch)).total
        if total <= device_memory * GIB:
            raise ConfigurationError(f"{message}; the nearest that fits is {words} ({total / GIB:,.2f} GiB)")
    raise ConfigurationError(f"{message}; up to {LARGEST_WORLD_SIZE} processes no layout fits")


def _nearby(plan: ParallelPlan, step: Step) -> Iterator[tuple[str, ParallelPlan, int]]:
    """Layouts in the order a user would try them: recompute, a smaller micro-batch, more processes."""
    recomputed = dataclasses.replace(
        plan, recompute=True, recompute_modules=plan.recompute_modules or ("model.layers.{*}",)
    )
    recompute_words = [] if plan.recompute else ["--parallel.recompute"]
    variants = [(recompute_words, recomputed)] if recompute_words else []
    smaller = sorted({max(1, step.batch // 2), 1} - {step.batch}, reverse=True)
    variants_with_batch = [(words, other, step.batch) for words, other in variants]
    variants_with_batch += [
        ([*recompute_words, f"--training.per_device_train_batch_size {batch}"], recomputed, batch) for batch in smaller
    ]
    size = plan.fsdp_size
    while size * plan.dp_replicate_size <= LARGEST_WORLD_SIZE // 2:
        size *= 2
        world_size = size * plan.dp_replicate_size
        sizes = {"fsdp_size": size, "world_size": world_size}
        words = [f"{world_size} processes with --parallel.fsdp_size {size}"]
        variants_with_batch.append((words, dataclasses.replace(plan, **sizes), step.batch))
        if recompute_words:
            other = dataclasses.replace(recomputed, **sizes)
            variants_with_batch.append(([*words, *recompute_words], other, step.batch))
    for words, other, batch in variants_with_batch:
        yield " ".join(words), other, batch
