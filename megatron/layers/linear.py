"""Linear layers whose weight is cut over the tensor-parallel group.

Column parallel: the weight [out, in] is cut along `out`; every rank sees the whole input and
computes its part of the output. Row parallel: the weight is cut along `in`; every rank sees its
part of the input and computes a term of the output's sum.

In one piece, a product that needs its input gathered, or its output summed, waits for the message.
In chunks of tokens, the message of one chunk is sent while the next is multiplied (the idea of Wang
et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models", ASPLOS 2023). Every element is the same sum over the same terms for any number of chunks.

How many chunks: of a message of M seconds M/n stays visible, and each further chunk costs o seconds
(its latency, the start of a kernel, half-empty tiles), so that n = sqrt(M/o) is best. 16 MiB (2048
tokens of 4096 in 16 bits) take about 0.3 ms at the 50 GB/s between two GCDs of an MI250X, and o is
some tens of microseconds: 4, the default.

With sequence parallelism a rank has the tokens [s/tp, b, ..] of its part of the sequence. Chunk i
consists of the i-th rows of every rank's part, so that all ranks send alike and each gets its own
rows back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kernels.work import recomputed
from megatron.layers.context import Fill, LayerContext, constant
from megatron.parallel import collectives
from megatron.parallel.sharding import deliver, sink_of

LEAST_TOKENS = 256
"""Least tokens of a chunk: twice the rows of the largest tile of matrix products on GPUs and CPUs,
so that few tiles are half empty."""


def _bounds(context: LayerContext, rows: int, tokens: int) -> list[tuple[int, int]]:
    """Return start and end of each chunk of `rows` rows; the product has `tokens` tokens in all."""
    n = max(1, min(context.chunks, rows, tokens // LEAST_TOKENS))
    return [(rows * i // n, rows * (i + 1) // n) for i in range(n)]


def _gather_async(x: Tensor, context: LayerContext) -> tuple[Tensor, Any]:
    """Return the whole input [s, b, ..] and a handle to wait for before it is read."""
    if context.sequence_parallel:
        return collectives.gather_first_async(x, context.tensor)
    return x, collectives.DONE


def gathered_product(
    x: Tensor, matrix: Tensor, context: LayerContext, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """Return x [s(/tp), b, in] of all ranks times matrix [in, out]: [s, b, out].

    With `keep` also the whole x [s, b, in].
    """
    group, size = context.tensor, context.tensor.size
    if size == 1 or not context.sequence_parallel:
        return x @ matrix, x
    bounds = _bounds(context, len(x), size * x[..., 0].numel())
    if len(bounds) == 1:
        whole = collectives.gather_first(x, group)
        return whole @ matrix, whole
    y = x.new_empty(size, *x.shape[:-1], matrix.shape[1])  # [tp, s/tp, b, out]
    kept = x.new_empty(size, *x.shape) if keep else None  # [tp, s/tp, b, in]
    following = collectives.gather_first_async(x[slice(*bounds[0])], group)
    for i, (first, end) in enumerate(bounds):
        part, arrived = following
        if i + 1 < len(bounds):
            following = collectives.gather_first_async(x[slice(*bounds[i + 1])], group)
        arrived.wait()
        # One product over the rows of all ranks, then a copy to their places: a product for each
        # rank would have fewer rows, and a batched one is slower on a CPU.
        y[:, first:end] = (part @ matrix).view(size, end - first, *y.shape[2:])
        if kept is not None:
            kept[:, first:end] = part.view(size, end - first, *x.shape[1:])
    return y.flatten(0, 1), None if kept is None else kept.flatten(0, 1)


def summed_product(x: Tensor, matrix: Tensor, context: LayerContext) -> tuple[Tensor, list[Any]]:
    """Return the sum over the ranks of x [s, b, in] times matrix [in, out]: [s(/tp), b, out].

    The result may be read after wait() on all handles.
    """
    group, scatters = context.tensor, context.sequence_parallel
    if group.size == 1:
        return x @ matrix, []
    parts = group.size if scatters else 1
    rows = len(x) // parts
    bounds = _bounds(context, rows, x[..., 0].numel())
    if len(bounds) == 1:
        y = x @ matrix
        if not scatters:
            return y, [collectives.all_reduce_async(y, group)]
        scattered, work = collectives.reduce_scatter_first_async(y, group)
        return scattered, [work]
    cut = x.unflatten(0, (parts, rows))  # [tp, s/tp, b, in]
    y = x.new_empty(rows, *x.shape[1:-1], matrix.shape[1])
    works = []
    for first, end in bounds:
        part = y[first:end].view(-1, matrix.shape[1])
        rows_of_all = cut[:, first:end].flatten(0, -2)
        if scatters:
            works.append(collectives.reduce_scatter_into_async(part, rows_of_all @ matrix, group))
        else:
            torch.mm(rows_of_all, matrix, out=part)
            works.append(collectives.all_reduce_async(part, group))
    return y, works


def _weight_gradient(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """Compute dW [out, in], the sum over tokens of dy [.., out] times x [.., in].

    It has the weight's shape. None if the weight has a sink, to which it was added.
    """
    dy, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    sink = sink_of(weight)
    if sink is None:
        return (dy.t() @ x).view(weight.shape)
    sink.add_product(dy, x)
    return None


@torch.no_grad()
def deferred_weight_gradient(
    weight: Tensor, dy: Tensor, x: Tensor, gathered: Any = collectives.DONE
) -> None:
    """Compute dW of dy [.., out] and x [.., in] outside of a backward pass.

    Waits for the message `gathered` first.
    """
    gathered.wait()
    gradient = _weight_gradient(weight, dy, x)
    if gradient is not None:
        deliver(weight, gradient)


Again = Callable[[], Tensor] | None
"""Recomputes a layer's input, to the same bits, in the backward pass, without autograd, instead of
keeping it.
"""


class _Linear(torch.autograd.Function):
    """y = x W^T with the messages of its region and a weight gradient that can be deferred.

    Column parallel: x is gathered, and its gradient is a sum over the ranks. Row parallel: y is a
    sum over the ranks, and its gradient is gathered. A gathered x is not kept: it is gathered again
    in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, column: bool, context: LayerContext, again: Again
    ) -> Tensor:
        if again is None:
            ctx.save_for_backward(x)
        ctx.again = again
        # Not saved through autograd: recomputation would return a detached copy, and a deferred
        # gradient must reach the parameter itself.
        ctx.weight = weight
        ctx.column, ctx.context = column, context
        # of x, for engine/gradients.py
        ctx.partial_gradient = not column or context.sequence_parallel
        matrix = weight.view(-1, weight.shape[-1]).t()
        if column:
            return gathered_product(x, matrix, context, keep=False)[0]
        y, works = summed_product(x, matrix, context)
        _wait(works)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.again is None:
            (x,) = ctx.saved_tensors
        else:
            with recomputed():
                x = ctx.again()
        dx, dw = (_Linear._column if ctx.column else _Linear._row)(ctx, x, dy)
        return dx, dw, None, None, None

    @staticmethod
    def _column(ctx: Any, x: Tensor, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Gather x during the product of dx, and sum dx during that of dW.

        A deferred dW gathers x last.
        """
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        context = ctx.context
        now = needs_weight and not context.weight_gradients.deferring
        dx, dw, gathered = None, None, collectives.DONE
        works: list[Any] = []
        if now:
            x, gathered = _gather_async(x, context)
        if needs_x:
            dx, works = summed_product(dy, ctx.weight.view(-1, ctx.weight.shape[-1]), context)
        if not context.overlap:
            _wait(works)
        if now:
            gathered.wait()
            dw = _weight_gradient(ctx.weight, dy, x)
        elif needs_weight:
            # so that a deferred gradient does not keep the graph
            x, gathered = _gather_async(x.detach(), context)
            context.weight_gradients.add(
                partial(deferred_weight_gradient, ctx.weight, dy, x, gathered)
            )
        _wait(works)
        return dx, dw

    @staticmethod
    def _row(ctx: Any, x: Tensor, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        context, queue = ctx.context, ctx.context.weight_gradients
        dx, dw, gathered = None, None, collectives.DONE
        if needs_x:
            dx, whole = gathered_product(
                dy, ctx.weight.view(-1, ctx.weight.shape[-1]), context, needs_weight
            )
            dy = dy if whole is None else whole
        elif needs_weight:
            dy, gathered = _gather_async(dy, context)
        if needs_weight and queue.deferring:
            queue.add(partial(deferred_weight_gradient, ctx.weight, dy, x.detach(), gathered))
        elif needs_weight:
            gathered.wait()
            dw = _weight_gradient(ctx.weight, dy, x)
        return dx, dw


def _wait(works: list[Any]) -> None:
    while works:
        works.pop(0).wait()


def column_parallel_matmul(
    x: Tensor, weight: Tensor, context: LayerContext, again: Again = None
) -> Tensor:
    """Return x [s(/tp), b, in] times this rank's rows of the weight [.., in]: [s, b, out/tp]."""
    result: Tensor = _Linear.apply(x, weight, True, context, again)  # type: ignore[no-untyped-call]
    return result


class ColumnParallelLinear(torch.nn.Module):
    """y = x W^T + b with W cut along its output: [s(/tp), b, in] -> [s, b, out/tp].

    `shape` is the global shape of the weight, [out, in] or [n, out, in] for n matrices side by side
    (a gated unit), which are cut alike and give [s, b, n * out/tp].
    """

    def __init__(
        self, context: LayerContext, name: str, shape: tuple[int, ...], fill: Fill, bias: bool
    ) -> None:
        super().__init__()
        self.context = context
        make = context.parameters.create
        self.weight = make(f"{name}.weight", shape, len(shape) - 2, fill)
        self.bias = (
            make(f"{name}.bias", shape[:-1], len(shape) - 2, constant(0.0), decay=False)
            if bias
            else None
        )

    def apart(self, x: Tensor, again: Again = None) -> tuple[Tensor, Tensor | None]:
        """Return the product and the bias [out/tp], for a kernel that adds it and does more."""
        y = column_parallel_matmul(x, self.weight, self.context, again)
        return y, None if self.bias is None else self.bias.view(-1)

    def forward(self, x: Tensor, again: Again = None) -> Tensor:
        y, bias = self.apart(x, again)
        return y if bias is None else y + bias


class RowParallelLinear(torch.nn.Module):
    """y = x W^T with W [out, in] cut along its input: [s, b, in/tp] -> [s(/tp), b, out].

    The bias, which every rank holds, is returned beside the product so that the caller adds it
    together with dropout and the residual.
    """

    def __init__(
        self, context: LayerContext, name: str, shape: tuple[int, int], fill: Fill, bias: bool
    ) -> None:
        super().__init__()
        self.context = context
        make = context.parameters.create
        self.weight = make(f"{name}.weight", shape, 1, fill)
        self.bias = (
            make(f"{name}.bias", shape[:1], None, constant(0.0), decay=False) if bias else None
        )

    def forward(self, x: Tensor, again: Again = None) -> tuple[Tensor, Tensor | None]:
        return _Linear.apply(x, self.weight, False, self.context, again), self.bias  # type: ignore[no-untyped-call]
