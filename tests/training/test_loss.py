"""The chunked cross entropy equals torch's in fp32, value and gradient, whatever the chunk, the padding, the cut."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy as torch_cross_entropy

from mindspeed_llm.training.loss import IGNORED_LABEL, count_label_tokens, cross_entropy

TOKENS, VOCABULARY = 37, 101


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, VOCABULARY, generator=generator) * 3
    labels = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    labels[5:9] = IGNORED_LABEL
    return logits, labels


@pytest.mark.parametrize("chunk", [1, 8, 37, 1000])
def test_equals_torch_in_fp32(batch, chunk):
    logits, labels = batch
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    scale = 1.0 / count_label_tokens(labels)
    loss = cross_entropy(ours, labels, scale, chunk)
    loss.backward()
    expected = torch_cross_entropy(theirs, labels, ignore_index=IGNORED_LABEL)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8)


def test_bf16_logits_are_computed_in_fp32(batch):
    logits, labels = batch[0].bfloat16(), batch[1]
    ours = logits.clone().requires_grad_()
    loss = cross_entropy(ours, labels)
    loss.backward()
    in_fp32 = logits.float().requires_grad_()
    expected = torch_cross_entropy(in_fp32, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    expected.backward()
    assert loss.dtype == torch.float32 and ours.grad.dtype == torch.bfloat16
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours.grad, in_fp32.grad.bfloat16(), rtol=2**-7, atol=0)  # rounded once


def test_micro_batches_with_unequal_padding_weigh_every_token_alike(batch):
    logits, labels = batch
    scale = 1.0 / count_label_tokens(labels)
    whole, cut = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    cross_entropy(whole, labels, scale).backward()
    for rows in (slice(0, 10), slice(10, 12), slice(12, TOKENS)):
        cross_entropy(cut[rows], labels[rows], scale).backward()
    torch.testing.assert_close(cut.grad, whole.grad, rtol=0, atol=0)


def test_upstream_gradient_is_applied(batch):
    logits, labels = batch
    once, thrice = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    cross_entropy(once, labels).backward()
    (3 * cross_entropy(thrice, labels)).backward()
    torch.testing.assert_close(thrice.grad, 3 * once.grad)


def test_an_ignored_row_may_hold_anything():
    logits = torch.zeros(2, 4)
    logits[1] = float("nan")
    logits.requires_grad_()
    loss = cross_entropy(logits, torch.tensor([2, IGNORED_LABEL]))
    loss.backward()
    assert loss.item() == pytest.approx(1.3862944)
    assert torch.isfinite(logits.grad).all()


def test_evaluation_keeps_no_gradient(batch):
    with torch.no_grad():
        assert not cross_entropy(batch[0].requires_grad_(), batch[1]).requires_grad
