"""The learning rate of every update, against torch's own schedulers where they have the same shape."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsdp2.errors import ConfigurationError
from mindspeed_llm.training.schedule import LearningRateSchedule, warmup_step_count

KINDS = ("cosine", "linear", "constant", "wsd")


def test_the_reference_stacks_first_line():
    """Its console shows 9.999994E-06 at iteration 1 of 2,000 with lr 1e-5, min_lr 1e-6, no warmup."""
    rate = LearningRateSchedule("cosine", 1e-5, 1e-6, 0, 2000).at(1)
    assert f"{rate:.6E}" == "9.999994E-06"


@pytest.mark.parametrize(("kind", "eta_min"), [("cosine", 1e-4), ("linear", 0.0)])
def test_equals_torch(kind, eta_min):
    steps, peak = 50, 3e-3
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=peak)
    if kind == "cosine":
        theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min)
    else:
        theirs = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    ours = LearningRateSchedule(kind, peak, eta_min, 0, steps)
    for step in range(1, steps + 1):
        optimizer.step()
        theirs.step()
        assert ours.at(step) == pytest.approx(optimizer.param_groups[0]["lr"], rel=1e-6, abs=1e-12)


@given(
    kind=st.sampled_from(KINDS),
    total=st.integers(1, 5000),
    warmup=st.integers(0, 5000),
    peak=st.floats(1e-6, 1.0),
    share=st.floats(0.0, 1.0),
)
def test_rises_to_the_peak_then_never_rises_again(kind, total, warmup, peak, share):
    warmup = min(warmup, total)
    schedule = LearningRateSchedule(kind, peak, peak * share, warmup, total)
    rates = [schedule.at(step) for step in range(1, total + 1)]
    assert all(0 < rate <= peak * (1 + 1e-12) or share == 0 for rate in rates)
    rising, falling = rates[:warmup], rates[max(warmup - 1, 0) :]
    assert all(a < b for a, b in itertools.pairwise(rising))
    assert all(a >= b * (1 - 1e-12) for a, b in itertools.pairwise(falling))
    if warmup:
        assert rates[warmup - 1] == pytest.approx(peak) or warmup == total
    if warmup < total:
        assert rates[-1] == pytest.approx(peak if kind == "constant" else peak * share, rel=1e-6, abs=peak * 1e-9)


def test_wsd_is_stable_for_four_fifths():
    schedule = LearningRateSchedule("wsd", 1.0, 0.0, 10, 100)
    assert all(schedule.at(step) == 1.0 for step in range(10, 81))
    assert schedule.at(90) == pytest.approx(1 - math.sqrt(0.5))
    assert schedule.at(100) == 0.0


def test_warmup_steps_win_over_the_ratio():
    assert warmup_step_count(7, 0.5, 100) == 7
    assert warmup_step_count(0, 0.03, 300) == 9
    assert warmup_step_count(0, 0.03, 10) == 1


def test_contradictions_name_the_flag():
    with pytest.raises(ConfigurationError, match=r"--training.lr_scheduler_type cosin.*did you mean 'cosine'"):
        LearningRateSchedule("cosin", 1.0, 0.0, 0, 10)
    with pytest.raises(ConfigurationError, match=r"--training.min_lr 2 is above --training.lr 1"):
        LearningRateSchedule("linear", 1.0, 2.0, 0, 10)
    with pytest.raises(ConfigurationError, match=r"--training.warmup_steps 11"):
        LearningRateSchedule("linear", 1.0, 0.0, 11, 10)
