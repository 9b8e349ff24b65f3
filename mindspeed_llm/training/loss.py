"""Next-token cross entropy: 16-bit logits, fp32 arithmetic, memory that does not grow with the batch.

The usual `cross_entropy(logits.float(), labels)` keeps two more fp32 copies of [tokens, vocabulary] alive. Here the
rows are taken a chunk at a time: each is raised to fp32, gives its loss and at once its gradient (softmax minus
one-hot), and only that gradient is kept, in the logits' own dtype, as in Liger's fused loss (arXiv 2410.10989).

The result is a SUM over tokens times `scale`. A step's scale is one over the label tokens of its whole global batch, so
a run with gradient accumulation, with padding, or on more processes weighs every token alike.
"""

from __future__ import annotations

import torch

from mindspeed_llm.data.loader import IGNORED_LABEL

CHUNK_TOKENS = 1024


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TV, labels_T, scale, chunk_tokens: int) -> torch.Tensor:
        needs_grad = ctx.needs_input_grad[0]
        grad_TV = torch.empty_like(logits_TV) if needs_grad else None
        total = torch.zeros((), dtype=torch.float32, device=logits_TV.device)
        for start in range(0, logits_TV.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            labels_C1 = labels_T[rows].unsqueeze(1)
            ignored_C1 = labels_C1 == IGNORED_LABEL
            index_C1 = labels_C1.masked_fill(ignored_C1, 0)
            log_probs_CV = torch.log_softmax(logits_TV[rows].float(), dim=1)
            total -= log_probs_CV.gather(1, index_C1).masked_fill(ignored_C1, 0.0).sum()
            if needs_grad:
                grad_CV = log_probs_CV.exp_()
                grad_CV.scatter_add_(1, index_C1, torch.full_like(index_C1, -1.0, dtype=torch.float32))
                # Scaled before it is rounded to 16 bits. An ignored row is replaced: its logits may be anything.
                grad_TV[rows] = grad_CV.mul_(scale).masked_fill_(ignored_C1, 0.0)
        if needs_grad:
            ctx.save_for_backward(grad_TV)
        return total * scale

    @staticmethod
    def backward(ctx, grad_loss: torch.Tensor):
        (grad_TV,) = ctx.saved_tensors
        return grad_TV * grad_loss.to(grad_TV.dtype), None, None, None


def cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor | float = 1.0, chunk_tokens: int = CHUNK_TOKENS
) -> torch.Tensor:
    """Return `scale` times the sum of the negative log-likelihoods (nats) of `labels`, an fp32 scalar.

    Args:
        logits: [..., vocabulary], any float dtype.
        labels: [...] int64; already shifted: `labels[i]` is what `logits[i]` predicts. `IGNORED_LABEL` does not count.
        scale: fp32 scalar on the logits' device, or a float; no gradient flows to it.
        chunk_tokens: rows raised to fp32 at a time.
    """
    logits_TV = logits.reshape(-1, logits.shape[-1])
    return _ChunkedCrossEntropy.apply(logits_TV, labels.reshape(-1), scale, chunk_tokens)


def count_label_tokens(labels: torch.Tensor) -> torch.Tensor:
    """Return how many labels count, an int64 scalar on the labels' device."""
    return (labels != IGNORED_LABEL).sum()
