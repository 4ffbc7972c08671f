"""Operators of a layer with experts: tokens to their experts' rows and back, and grouped products.

Each token has k choices. The rows of an expert follow each other, those of expert 0 first. `order`
names the token of each row, `places` the row of each choice; they are inverse to each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megatron.kernels.ops.elementwise import wider
from megatron.parallel.sharding import WeightGradients, deliver, sink_of


def _rows(y: Tensor, places: Tensor) -> Tensor:
    """Return the row of each choice in fp32 [t, k, h] (fp64 for fp64 y), zeros where it has none."""
    chosen = (
        wider(y)[places.clamp(min=0)] if len(y) else wider(y).new_zeros(*places.shape, y.shape[-1])
    )
    return chosen.masked_fill((places < 0).unsqueeze(-1), 0.0)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        rows = x[order.clamp(min=0)] if len(x) else x.new_zeros(len(order), x.shape[-1])
        return rows.masked_fill_((order < 0).unsqueeze(-1), 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _rows(gradient, *ctx.saved_tensors).sum(1).to(gradient.dtype), None, None


def permute(x: Tensor, order: Tensor, places: Tensor) -> Tensor:
    """Return the rows of tokens x [t, h] in the order of their experts, [n, h].

    order   the token of each row; -1: a row of zeros  # [n], int64
    places  the row of each choice, -1: it has none  # [t, k], int64

    The gradient of a token is the sum over its rows, in fp32, in the order of its choices.
    """
    rows: Tensor = _Permute.apply(x, order, places)  # type: ignore[no-untyped-call]
    return rows


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(y, places, weights)
        return (_rows(y, places) * weights.unsqueeze(-1)).sum(1).to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        y, places, weights = ctx.saved_tensors
        wide = wider(gradient).unsqueeze(1)  # [t, 1, h]
        dy = y.new_zeros(len(y) + 1, y.shape[-1])  # the last row takes those of dropped choices
        dy[places.masked_fill(places < 0, len(y))] = (wide * weights.unsqueeze(-1)).to(y.dtype)
        return dy[:-1], None, (wide * _rows(y, places)).sum(-1)


def unpermute(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over each token's choices of weight times row of y [n, h], [t, h].

    places   the row of each choice, -1: it adds nothing  # [t, k], int64
    weights  fp32  # [t, k]

    The sum is in fp32 and in the order of the choices. Rows that no choice names get a gradient of
    zero, and so does the weight of a choice without a row.
    """
    tokens: Tensor = _Unpermute.apply(y, places, weights)  # type: ignore[no-untyped-call]
    return tokens


# -- grouped products ------------------------------------------------------------------------------

_torchs_own = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)


@cache
def _groups_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch has one kernel for products of groups of rows (grouped_mm).

    On a CPU it is no faster than a loop. Builds that lack it raise, so a small product whose
    result is exact is tried once for each device.
    """
    if device.type == "cpu" or _torchs_own is None:
        return False
    x = (torch.arange(64, device=device) % 7).to(dtype).expand(48, 64).contiguous()
    w = (
        (torch.arange(32, device=device) % 5)
        .to(dtype)
        .view(1, 32, 1)
        .expand(3, 32, 64)
        .contiguous()
    )
    ends = torch.tensor([16, 16, 48], dtype=torch.int32, device=device)
    try:
        y = _torchs_own(x, w.transpose(1, 2), offs=ends)
    except (RuntimeError, TypeError):
        return False
    return torch.equal(y, x @ w[0].t())


def _products(x: Tensor, matrices: Tensor, sizes: Sequence[int], ends: Tensor | None) -> Tensor:
    """Return the product of each expert's rows of x [n, in] and its matrix [E, in, out], [n, out].

    ends: see _ends.
    """
    if ends is not None and _torchs_own is not None:
        y: Tensor = _torchs_own(x, matrices, offs=ends)
        return y
    y = x.new_empty(len(x), matrices.shape[-1])
    for rows, matrix, out in zip(x.split(sizes), matrices, y.split(sizes), strict=True):
        torch.mm(rows, matrix, out=out)
    return y


def _ends(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor | None:
    """Return the last row of each expert, excluded, for torch's own; None where it is not used."""
    wide = all(n * x.element_size() % 16 == 0 for n in (x.shape[-1], weight[0, ..., 0].numel()))
    if x.is_meta or not wide or not _groups_products(x.device, x.dtype):
        return None
    return counts.cumsum(0).to(device=x.device, dtype=torch.int32, non_blocking=True)


@torch.no_grad()
def _weight_gradient(weight: Tensor, dy: Tensor, x: Tensor, sizes: Sequence[int]) -> Tensor | None:
    """Return each expert's dy^T x in the weight's shape; None where a sink took it."""
    sink = sink_of(weight)
    if sink is not None:
        sink.add_product(dy, x, counts=sizes)
        return None
    found = torch.empty_like(weight)
    for a, b, out in zip(dy.split(sizes), x.split(sizes), found, strict=True):
        torch.mm(a.t(), b, out=out.view(a.shape[-1], b.shape[-1]))
    return found


def _deferred(weight: Tensor, dy: Tensor, x: Tensor, sizes: Sequence[int]) -> None:
    gradient = _weight_gradient(weight, dy, x, sizes)
    if gradient is not None:
        deliver(weight, gradient)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, counts: Tensor, queue: WeightGradients | None
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.queue = weight, queue  # not saved: see layers/linear.py
        if x.is_meta:  # without data all experts count as equally busy
            first, more = divmod(len(x), len(weight))
            ctx.sizes = [first + (e < more) for e in range(len(weight))]
        else:
            ctx.sizes = counts.tolist()
        ctx.ends = _ends(x, weight, counts)
        return _products(x, _matrices(weight).transpose(1, 2), ctx.sizes, ctx.ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x,), dx, dw = ctx.saved_tensors, None, None
        dy = dy.contiguous()
        if ctx.needs_input_grad[0]:
            dx = _products(dy, _matrices(ctx.weight), ctx.sizes, ctx.ends)
        if ctx.needs_input_grad[1]:
            if ctx.queue is not None and ctx.queue.deferring:
                ctx.queue.add(partial(_deferred, ctx.weight, dy, x.detach(), ctx.sizes))
            else:
                dw = _weight_gradient(ctx.weight, dy, x, ctx.sizes)
        return dx, dw, None, None


def _matrices(weight: Tensor) -> Tensor:
    return weight.detach().view(len(weight), -1, weight.shape[-1])  # [E, out, in]


def grouped_product(
    x: Tensor, weight: Tensor, counts: Tensor, queue: WeightGradients | None = None
) -> Tensor:
    """Return x W^T for each expert's rows of x [n, in], [n, out].

    weight  a matrix for each expert  # [E, out, in], or [E, m, out/m, in] for m side by side
    counts  rows of each expert, in all n; may be 0  # [E], int64
    queue   where the weight's gradient waits while a schedule defers it

    counts on a GPU make the host wait for it once; on the host they do not. The weight's gradient
    is added to its sink, without a second tensor of its size.
    """
    y: Tensor = _Grouped.apply(x, weight, counts, queue)  # type: ignore[no-untyped-call]
    return y
