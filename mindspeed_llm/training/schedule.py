"""The learning rate of every update, as a pure function of the update's number.

A run is resumed with its step count alone: nothing here has state. Update `n` counts from 1 and the last update is
`total_steps`, so the first update already has a rate above zero and the last one uses `min_lr`.

`wsd` (warmup, stable, decay) is MiniCPM's schedule (arXiv 2404.06395) with the 1 - sqrt decay that Hägele et al. found
best (arXiv 2405.18392).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fsdp2.errors import ConfigurationError, nearest

KINDS = ("cosine", "linear", "constant", "wsd")
WSD_DECAY_FRACTION = 0.2  # of all updates; Hägele et al. see no gain beyond 20 %


@dataclass(frozen=True)
class LearningRateSchedule:
    """Warmup from 0 to `peak`, then the decay of `kind` down to `minimum`.

    Args:
        kind: one of `KINDS`; `constant` ignores `minimum`.
        peak, minimum: learning rates; `minimum` must not exceed `peak`.
        warmup_steps: updates of linear warmup; update `warmup_steps` is the first at `peak`.
        total_steps: updates of the whole run.

    Raises:
        ConfigurationError: an unknown kind, or values that contradict each other.
    """

    kind: str
    peak: float
    minimum: float
    warmup_steps: int
    total_steps: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigurationError(
                f"--training.lr_scheduler_type {self.kind}: allowed are {', '.join(KINDS)}{nearest(self.kind, KINDS)}"
            )
        if self.kind != "constant" and self.minimum > self.peak:
            raise ConfigurationError(
                f"--training.min_lr {self.minimum:g} is above --training.lr {self.peak:g}; the decay ends at min_lr"
            )
        if not 0 <= self.warmup_steps <= self.total_steps:
            raise ConfigurationError(
                f"--training.warmup_steps {self.warmup_steps}: allowed is 0 to the run's {self.total_steps} steps"
            )

    def at(self, step: int) -> float:
        """Return the learning rate of update `step` (1 is the first)."""
        if step < self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        decay_steps = self.total_steps - self.warmup_steps
        if self.kind == "wsd":
            decay_steps = min(decay_steps, max(1, round(WSD_DECAY_FRACTION * self.total_steps)))
        decayed = step - (self.total_steps - decay_steps)  # updates into the decay
        progress = min(max(decayed / max(decay_steps, 1), 0.0), 1.0)
        if self.kind == "cosine":
            remaining = 0.5 * (1.0 + math.cos(math.pi * progress))
        elif self.kind == "linear":
            remaining = 1.0 - progress
        else:
            remaining = 1.0 - math.sqrt(progress)
        return self.minimum + (self.peak - self.minimum) * remaining


def warmup_step_count(warmup_steps: int, warmup_ratio: float, total_steps: int) -> int:
    """Return the updates of warmup: `warmup_steps` when above 0, else that share of the run, rounded up."""
    return warmup_steps if warmup_steps > 0 else math.ceil(warmup_ratio * total_steps)
