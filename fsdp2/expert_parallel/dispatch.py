"""Tokens travel to the rank that holds their expert, and the expert's output travels back.

The engine wraps the forward of an expert module, which knows nothing of it. Its protocol:

    experts(rows_PH, counts_E, *values_P) -> [P, H']    rows sorted by expert, counts_E rows of each, fp32 values a row

With E experts on `ep` ranks, rank r computes experts [r E/ep, (r + 1) E/ep). Rows sorted by expert are sorted by rank,
so they leave as they are. Counts are exchanged once, with the only wait of the host for the device; from them follow
the sizes of all four all-to-alls (rows out and outputs back in forward, their gradients in backward) and the order:
rows arrive sorted by (source, expert) and are computed sorted by (expert, source).

    eager   that one permutation; a grouped GEMM on MX operands pads its groups to whole blocks by itself
    fused   the permutation goes straight to padded groups, so that the GEMMs of forward and backward pad nothing

Rows may travel as MX codes, 1.03 bytes an element: on the way to the experts, in forward (tokens) and in backward
(gradients of the outputs), where a GEMM quantizes them along the same axis next and finds them quantized already. What
comes back is added up and stays in its dtype, as in DeepSeek-V3 (arXiv:2412.19437, section 3.3.3).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2.communication import Counters, counters
from fsdp2.quantization.mx import MXTensor, quantize

if TYPE_CHECKING:
    from collections.abc import Callable

    from fsdp2.expert_parallel.layout import ExpertLayout
    from fsdp2.plan import ParallelPlan

PADDED_ROWS = 32


@dataclass(frozen=True)
class MXRows:
    """How rows travel as MX codes: blocks of 1 x 32 of these formats."""

    tokens: str = "E4M3"
    gradients: str = "E4M3"
    scale_rule: str = "floor"


class Routes:
    """Where the rows of one forward go. Attributes:
    sent, received: rows to and from each rank of the group, host integers.
    counts: int64 [E / ep], rows of each local expert (padded ones included), on the host.
    place: int64 [R], the row at which each arrived row is computed; None when they arrive in that order.
    computed_rows: the number of those, padded ones included.
    """

    def __init__(self, counts_E: Tensor, group: dist.ProcessGroup, align: int):
        ranks = group.size()
        arriving = torch.empty_like(counts_E)
        dist.all_to_all_single(arriving, counts_E, group=group)
        sent_RE, arriving_RE = torch.stack([counts_E, arriving]).cpu().view(2, ranks, -1)
        self.sent, self.received = sent_RE.sum(1).tolist(), arriving_RE.sum(1).tolist()
        counts = arriving_RE.sum(0)
        self.counts = -(-counts // align) * align
        self.computed_rows = int(self.counts.sum())
        first_of_expert = self.counts.cumsum(0) - self.counts
        first_ER = (first_of_expert[None] + arriving_RE.cumsum(0) - arriving_RE).reshape(-1)  # [rank, expert] flat
        arriving_flat = arriving_RE.reshape(-1)
        shift = first_ER - (arriving_flat.cumsum(0) - arriving_flat)
        rows = int(arriving_flat.sum())
        place = torch.arange(rows) + torch.repeat_interleave(shift, arriving_flat)
        identical = self.computed_rows == rows and bool((shift[arriving_flat > 0] == 0).all())
        self.place = None if identical else place.to(counts_E.device, non_blocking=True)

    def into_place(self, arrived: Tensor) -> Tensor:
        """[R, ...] as it arrived -> [computed rows, ...]; padded rows are zero."""
        if self.place is None:
            return arrived
        padded = self.computed_rows != arrived.shape[0]
        out = (arrived.new_zeros if padded else arrived.new_empty)(self.computed_rows, *arrived.shape[1:])
        return out.index_copy_(0, self.place, arrived)

    def out_of_place(self, computed: Tensor) -> Tensor:
        """The transpose of `into_place`."""
        return computed if self.place is None else computed.index_select(0, self.place)


class Dispatcher:
    """The all-to-alls of one expert module, counted.

    Args:
        group: the ranks that hold different experts.
        align: rows of an expert are padded to a multiple of this.
        mx: how rows travel to their experts as MX codes; None for their own dtype.
    """

    def __init__(self, group: dist.ProcessGroup, counters: Counters, align: int = 1, mx: MXRows | None = None):
        self.group, self.counters, self.align, self.mx = group, counters, align, mx

    def run(self, experts: Callable, rows_PH: Tensor, counts_E: Tensor, *values_P: Tensor) -> Tensor:
        """`experts(rows_PH, counts_E, *values_P)` with every row computed by the rank that holds its expert."""
        routes = Routes(counts_E, self.group, self.align)
        rows, *values = _Dispatch.apply(self, routes, rows_PH, *values_P)
        return _Combine.apply(self, routes, experts(rows, routes.counts, *values))

    def send(self, what: str, rows: Tensor, values: tuple[Tensor, ...], routes: Routes) -> tuple[Tensor, ...]:
        """Rows [P, H] and values [P] to the ranks of their experts, into place, in one all-to-all of bytes."""
        mx_format = self.mx and (self.mx.gradients if what.endswith("backward") else self.mx.tokens)
        parts = [_as_bytes(value[:, None]) for value in values]
        if mx_format:
            quantized = quantize(rows, element_format=mx_format, scale_rule=self.mx.scale_rule)
            parts += [quantized.codes, quantized.scales]
        else:
            parts.append(_as_bytes(rows))
        sent = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
        self.counters.dispatch_bytes_if_bf16 += 2 * rows.numel() + sum(value.nbytes for value in values)
        arrived = routes.into_place(self._exchange(what, sent, routes.sent, routes.received))
        *values_out, = (
            part.contiguous().view(value.dtype)[:, 0]
            for part, value in zip(arrived.split([part.shape[1] for part in parts], 1), values)
        )
        rest = arrived[:, sum(part.shape[1] for part in parts[: len(values)]) :]
        if not mx_format:
            return rest.contiguous().view(rows.dtype), *values_out
        codes, scales = rest.split([quantized.codes.shape[1], quantized.scales.shape[1]], 1)
        shape = (arrived.shape[0], rows.shape[1])
        back = MXTensor(codes.contiguous(), scales.contiguous(), mx_format, (1, 32), -1, shape)
        return back.dequantize(rows.dtype), *values_out

    def send_back(self, what: str, rows: Tensor, values: tuple[Tensor, ...], routes: Routes) -> tuple[Tensor, ...]:
        """The transpose of `send`, in the rows' dtype."""
        parts = [_as_bytes(value[:, None].contiguous()) for value in values] + [_as_bytes(rows.contiguous())]
        sent = routes.out_of_place(torch.cat(parts, 1) if len(parts) > 1 else parts[0])
        arrived = self._exchange(what, sent, routes.received, routes.sent).split([part.shape[1] for part in parts], 1)
        *values_out, rows_out = (
            part.contiguous().view(given.dtype) for part, given in zip(arrived, (*values, rows))
        )
        return rows_out, *(value[:, 0] for value in values_out)

    def _exchange(self, what: str, sent: Tensor, out_rows: list[int], in_rows: list[int]) -> Tensor:
        arrived = sent.new_empty(sum(in_rows), sent.shape[1])
        self.counters.add(what, sent)
        dist.all_to_all_single(arrived, sent, in_rows, out_rows, group=self.group)
        return arrived


def _as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dispatcher: Dispatcher, routes: Routes, rows_PH: Tensor, *values_P: Tensor):
        ctx.dispatcher, ctx.routes = dispatcher, routes
        return dispatcher.send("expert_dispatch_forward", rows_PH, values_P, routes)

    @staticmethod
    def backward(ctx, drows: Tensor, *dvalues: Tensor):
        return None, None, *ctx.dispatcher.send_back("expert_combine_backward", drows, dvalues, ctx.routes)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dispatcher: Dispatcher, routes: Routes, rows: Tensor):
        ctx.dispatcher, ctx.routes = dispatcher, routes
        return dispatcher.send_back("expert_combine_forward", rows, (), routes)[0]

    @staticmethod
    def backward(ctx, dy_PH: Tensor):
        return None, None, ctx.dispatcher.send("expert_dispatch_backward", dy_PH, (), ctx.routes)[0]


def attach_dispatchers(model: nn.Module, experts: ExpertLayout, group: dist.ProcessGroup, plan: ParallelPlan) -> None:
    """Let the tokens of every expert module of `experts` travel over `group` as `plan` says."""
    mx = None
    if plan.ep_dispatch_precision == "mxfp8":
        mx = MXRows()
        recipe = plan.quantization.recipe if plan.quantization else None
        if recipe and all(side.is_quantized and side.block_shape == (1, 32) for side in (recipe.inputs, recipe.grads)):
            mx = MXRows(recipe.inputs.element_format, recipe.grads.element_format, recipe.scale_rule)
    quantized = plan.quantization is not None and "quantize.moe.mx" in plan.quantization.converters
    align = PADDED_ROWS if plan.ep_dispatcher == "fused" and quantized else 1
    for name in experts.modules:
        module = model.get_submodule(name)
        dispatcher = Dispatcher(group, counters(model), align, mx)
        module.dispatcher = dispatcher
        module.forward = functools.partial(dispatcher.run, module.forward)
