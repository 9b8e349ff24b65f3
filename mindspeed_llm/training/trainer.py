"""The training loop: shard the model, then step after step until the end, a signal, or a number that is not finite.

One optimizer step = `gradient_accumulation_steps` micro-batches, gradients reduced once, the global norm clipped,
AdamW. The loss is the mean over the label tokens of the whole global batch. Losses, norms and signals are agreed on by
all ranks, so every rank leaves the loop at the same step.
"""

from __future__ import annotations

import math
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from fsdp2 import parallelize
from fsdp2.communication import counters
from fsdp2.engine import set_gradient_sync
from fsdp2.errors import ConfigurationError
from fsdp2.gradients import clip_grad_norm_
from fsdp2.quantization.health import HealthCollector, TensorHealth
from mindspeed_llm.data import EvaluationLoader, PretrainingLoader
from mindspeed_llm.models import initialize_weights, load_hf_weights, model_flops_per_token, save_hf_weights
from mindspeed_llm.models.initialization import reset_buffers

from . import checkpoint, report
from .background_save import BackgroundSaves
from .checkpoint_folder import skipped
from .evaluation import evaluate
from .expert_balance import ExpertBalance
from .job import Job
from .loss import CHUNK_TOKENS, count_label_tokens, cross_entropy
from .metrics import METRICS_FILE, MetricsWriter, StepMetrics, memory_bytes, read_metrics
from .nonfinite import NonFiniteError, diagnose
from .optimizer import build_optimizer, set_learning_rate
from .peak import peak_tflops
from .profiler import StepProfiler
from .signals import StopRequest


@dataclass(frozen=True)
class StepResult:
    """What all ranks agree on after a step's forward and backward."""

    loss: float  # nats per label token, over the global batch
    router_aux_loss: float | None
    signum: int  # of the signal that a rank received, 0 for none


class Trainer:
    """Trains `job` on `device`. torch.distributed must run; construction and `train` are collective."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.job, self.device = job, device
        self.started = time.perf_counter()
        training = job.arguments.training
        _check_same_start(job)
        self.model = parallelize(job.model, job.plan)
        if job.resume_from is not None:
            reset_buffers(self.model)  # no checkpoint holds them
        elif job.arguments.model.train_from_scratch:
            initialize_weights(self.model, training.seed)
        else:
            load_hf_weights(self.model, job.arguments.model.model_name_or_path)
        self.optimizer = build_optimizer(
            self.model,
            kind=training.optimizer,
            lr=training.lr,
            weight_decay=training.weight_decay,
            betas=(training.adam_beta1, training.adam_beta2),
            epsilon=training.adam_epsilon,
        )
        self.loader = PretrainingLoader(
            job.train_data,
            micro_batch_size=training.per_device_train_batch_size,
            gradient_accumulation_steps=training.gradient_accumulation_steps,
            dp_rank=job.launch.rank,
            dp_size=job.launch.world_size,
            num_workers=training.dataloader_num_workers,
        )
        self.state = checkpoint.TrainerState()
        self.notes: list[str] = list(job.notes)  # lines for the console, before the first step
        if job.resume_from is not None:
            self._resume()
        elif earlier := checkpoint.complete_checkpoints(job.checkpoint_root):
            self.notes.append(
                f"this run starts from the beginning; {earlier[-1]} is of an earlier one "
                "(--training.resume_from_checkpoint latest goes on from it)"
            )
        checkpoint.check_space(job.output_dir, self.model, copies=1 if training.save_only_model else 3)
        self.background: BackgroundSaves | None = None
        if training.save_async:
            self.background = BackgroundSaves(job.checkpoint_root, keep=training.save_total_limit)
        self.counters = counters(self.model)
        self.balance = ExpertBalance(
            self.model,
            aux_weight=training.router_aux_loss_coef,
            z_weight=training.router_z_loss_coef,
            bias_rate=training.router_bias_update_rate,
        )
        self.flops_per_token = model_flops_per_token(job.model.config, job.arguments.data.cutoff_len)
        self.peak_tflops = peak_tflops(device, training.peak_tflops)
        self.profiler = StepProfiler(training, job.launch.rank, device)
        self.health = HealthCollector(self.model)
        self.health_rows: list[TensorHealth] = []  # of the last step, where that step was measured
        self.chunk_tokens = job.arguments.optimization.chunk_loss_size or CHUNK_TOKENS
        self.evaluation: dict[str, float] = {}

    def _resume(self) -> None:
        folder = self.job.resume_from
        self.state = checkpoint.load(folder, self.model, self.optimizer, self.device)
        self.loader.load_state_dict(self.state.loader)
        self.notes.append(f"resumed from {folder}: step {self.state.step}, {self.state.tokens:,} tokens")
        if self.state.world_size != self.job.launch.world_size:
            self.notes.append(
                f"resharded from {self.state.world_size} to {self.job.launch.world_size} processes; "
                "random generators start anew"
            )
        broken = skipped(folder.parent, folder)
        self.notes += [f"warning: passed over a newer checkpoint: {text}" for text in broken]
        changed = checkpoint.changed_settings(folder, self.job.arguments.to_yaml())
        self.notes += [f"changed since that checkpoint: {line}" for line in changed]

    def train(self) -> int:
        """Run to the end and return the process's exit status: 0 when finished, 128 + signal when stopped by one, 1
        when a checkpoint in the background failed.

        Raises:
            CheckpointError: a checkpoint could not be written.
            NonFiniteError: the loss or a gradient is NaN or infinite; weights are those before the step.
        """
        job, training = self.job, self.job.arguments.training
        writer = MetricsWriter(
            job.output_dir,
            job.tensorboard_dir,
            rank=job.launch.rank,
            first_step=self.state.step + 1,
            total_steps=job.total_steps,
            global_batch_size=job.global_batch_size,
        )
        for note in self.notes:
            writer.print(note)
        self.model.train()
        with StopRequest() as stop:
            try:
                while self.state.step < job.total_steps:
                    self.profiler.before_step(self.state.step)
                    metrics, signum = self._step(stop)
                    step = self.state.step
                    if traces := self.profiler.after_step(step):
                        writer.print(f"profile up to step {step} written to {traces}")
                    if self.health_rows:
                        writer.log_health(self.health_rows)
                    last = step == job.total_steps
                    if job.valid_data is not None and (last or _is_due(step, training.eval_steps)):
                        self.evaluation = metrics.evaluation = self._evaluate()
                    if last or metrics.evaluation or _is_due(step, training.logging_steps):
                        writer.log(metrics)
                    writer.advance()
                    if self.background is not None:
                        self.background.report(writer.print)
                    if last or signum or self._save_is_due():
                        folder = self._save()
                    if signum and not last:
                        name = signal.Signals(signum).name
                        writer.print(
                            f"{name}: stopped after step {step}, saved {folder}; go on with "
                            "--training.resume_from_checkpoint latest"
                        )
                        return 128 + signum
            finally:
                if self.background is not None:
                    self.background.close()
                    self.background.report(writer.print)
                self.profiler.close()
                writer.close()
        self._finish()
        return 1 if self.background is not None and self.background.failed else 0

    def _step(self, stop: StopRequest) -> tuple[StepMetrics, int]:
        """One optimizer step; returns its metrics and the signal, if any, that a rank received meanwhile."""
        job, training, state = self.job, self.job.arguments.training, self.state
        begin = time.perf_counter()
        micro_batches = next(self.loader)
        measured = _is_due(state.step + 1, training.quant_stats_steps) and not self.health.is_empty
        if measured:
            self.health.start()
        result = self._forward_backward(micro_batches, stop)
        self.health_rows = self.health.finish(state.step + 1) if measured else []
        grad_norm = clip_grad_norm_(self.model, training.max_grad_norm) if math.isfinite(result.loss) else math.nan
        if not math.isfinite(grad_norm):
            self._stop_nonfinite(micro_batches, result, grad_norm)
        lr = job.schedule.at(state.step + 1)
        set_learning_rate(self.optimizer, lr)
        with self.profiler.phase("optimizer"):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        router = self.balance.finish_step()
        tokens = job.global_batch_size * job.arguments.data.cutoff_len
        state.step += 1
        state.tokens += tokens
        state.samples += job.global_batch_size
        state.loader = self.loader.state_dict()
        elapsed = time.perf_counter() - begin
        allocated, reserved = memory_bytes(self.device)
        model_tflops = tokens / elapsed / job.launch.world_size * self.flops_per_token / 1e12
        metrics = StepMetrics(
            step=state.step,
            loss=result.loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=state.tokens,
            samples=state.samples,
            tokens_per_second=tokens / elapsed,
            step_time_s=elapsed,
            router_aux_loss=result.router_aux_loss,
            router=router,
            memory_peak_bytes=allocated,
            memory_reserved_bytes=reserved,
            communication=self.counters.take(),
            model_tflops=model_tflops,
            mfu=model_tflops / self.peak_tflops if self.peak_tflops else None,
        )
        return metrics, result.signum

    def _forward_backward(self, micro_batches: list[dict], stop: StopRequest | None) -> StepResult:
        """Accumulate the gradients of one step; they are reduced with the last micro-batch."""
        batches = [(batch["input_ids"].to(self.device), batch["labels"].to(self.device)) for batch in micro_batches]
        label_tokens = sum(count_label_tokens(labels) for _, labels in batches)
        dist.all_reduce(label_tokens)
        # FSDP averages gradients over ranks: times the number of ranks makes that a sum over the global batch's tokens.
        scale = self.job.launch.world_size / label_tokens.clamp(min=1).float()
        aux_weight = self.job.arguments.training.router_aux_loss_coef / len(batches)
        losses = torch.zeros(2, device=self.device)  # cross entropy, router auxiliary loss
        has_aux = False
        for index, (inputs, labels) in enumerate(batches):
            set_gradient_sync(self.model, index == len(batches) - 1)
            with self.profiler.phase("forward"):
                output = self.model(inputs)
            objective = loss = cross_entropy(output.logits, labels, scale, self.chunk_tokens)
            losses[0] += loss.detach()
            if output.router_aux_loss is not None:
                has_aux = True
                losses[1] += output.router_aux_loss.detach() / len(batches)
                if aux_weight:
                    objective = loss + aux_weight * output.router_aux_loss
            objective = self.balance.add(objective, output, len(batches))
            with self.profiler.phase("backward"):
                objective.backward()
        received = stop.signum if stop is not None else 0
        shared = torch.cat([losses, losses.new_tensor([received == signal.SIGTERM, received == signal.SIGINT])])
        dist.all_reduce(shared)
        loss, aux, terminated, interrupted = shared.tolist()
        world_size = self.job.launch.world_size
        return StepResult(
            loss=loss / world_size,
            router_aux_loss=aux / world_size if has_aux else None,
            signum=signal.SIGTERM if terminated else signal.SIGINT if interrupted else 0,
        )

    def _stop_nonfinite(self, micro_batches: list[dict], result: StepResult, grad_norm: float) -> None:
        where = diagnose(self.model, lambda: self._forward_backward(micro_batches, None))
        saved = checkpoint.complete_checkpoints(self.job.checkpoint_root)
        resume = f"the last checkpoint is {saved[-1]}" if saved else "there is no checkpoint yet"
        raise NonFiniteError(
            f"step {self.state.step + 1}: loss {result.loss}, gradient norm {grad_norm}; {where}. "
            f"Stopped before the optimizer step; {resume}"
        )

    def _evaluate(self) -> dict[str, float]:
        training = self.job.arguments.training
        batches = EvaluationLoader(
            self.job.valid_data,
            micro_batch_size=training.per_device_train_batch_size,
            dp_rank=self.job.launch.rank,
            dp_size=self.job.launch.world_size,
            batches=training.eval_iters,
        )
        results = evaluate(self.model, batches, self.job.tokenizer.token_byte_lengths(), self.device)
        self.counters.take()  # the next step's bytes are its own
        return results

    def _save_is_due(self) -> bool:
        """After every `save_steps` steps, and after the step that completes every `save_epochs`-th epoch."""
        training = self.job.arguments.training
        span = training.save_epochs * self.job.epoch_samples
        samples = self.state.samples
        ended = samples // span > (samples - self.job.global_batch_size) // span
        return ended or _is_due(self.state.step, training.save_steps)

    def _save(self) -> Path:
        """Save now, or begin to; returns the folder."""
        job, training = self.job, self.job.arguments.training
        if self.background is None:
            return checkpoint.save(
                job.checkpoint_root,
                self.model,
                self.optimizer,
                self.state,
                job.arguments.to_yaml(),
                keep=training.save_total_limit,
                only_model=training.save_only_model,
            )
        tensors = checkpoint.run_tensors(self.model, None if training.save_only_model else self.optimizer)
        state = replace(self.state, only_model=training.save_only_model)
        self.background.start(tensors, state, job.arguments.to_yaml())
        return checkpoint.step_folder(job.checkpoint_root, state.step)

    def _finish(self) -> None:
        """Write Hugging Face weights and the report, and print it."""
        job = self.job
        hf_folder = None
        if job.arguments.training.save_hf_weights:
            hf_folder = job.output_dir / "hf"
            save_hf_weights(self.model, hf_folder)
            if job.launch.rank == 0:
                job.tokenizer.save(hf_folder)
        if job.launch.rank == 0:
            rows = read_metrics(job.output_dir / METRICS_FILE)
            wall_s = time.perf_counter() - self.started
            summary = report.RunReport.from_rows(rows, evaluation=self.evaluation, wall_s=wall_s)
            text = report.markdown(
                summary,
                title=f"Run {job.output_dir}",
                places={
                    "TensorBoard": job.tensorboard_dir,
                    "checkpoint": checkpoint.step_folder(job.checkpoint_root, self.state.step),
                    "Hugging Face weights and tokenizer": hf_folder,
                },
                next_command=report.next_command(hf_folder, job.tensorboard_dir),
            )
            report.write(job.output_dir, summary, text)
            print(f"\n{text}", flush=True)


def _check_same_start(job: Job) -> None:
    """Raise on all ranks unless all of them found the same checkpoint to resume from."""
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, str(job.resume_from))
    if len(set(found)) > 1:
        raise ConfigurationError(
            f"ranks see different checkpoints to resume from: {', '.join(sorted(set(found)))}; --training.output_dir "
            f"{job.output_dir} must be on a file system that all of them share"
        )


def _is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0
