"""Linear layers whose weight is cut over the tensor-parallel group.

Column parallel: the weight [out, in] is cut along `out`; every rank sees the whole input, makes its part of the output.
Row parallel: the weight is cut along `in`; every rank sees its part of the input and makes a term of the output's sum.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron.kernels.work import recomputed
from megatron.layers.chunked_products import Messages, gathered_product, summed_product
from megatron.layers.context import LayerContext
from megatron.layers.parameters import Fill, constant
from megatron.parallel import collectives
from megatron.parallel.deferred import WeightGradients
from megatron.parallel.sink import deliver, sink_of


def _weight_gradient(weight: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """dW [out, in] = sum over tokens of dy [.., out] times x [.., in], in the weight's shape.

    None where the weight has a sink, which has it then.
    """
    dy, x = dy.reshape(-1, dy.shape[-1]), x.reshape(-1, x.shape[-1])
    sink = sink_of(weight)
    if sink is None:
        return (dy.t() @ x).view(weight.shape)
    sink.add_product(dy, x)
    return None


@torch.no_grad()
def deferred_weight_gradient(
    weight: torch.Tensor, dy: torch.Tensor, x: torch.Tensor, gathered: Any = collectives.DONE
) -> None:
    """Add dW of dy [.., out] and x [.., in] outside of a backward pass, once the message `gathered` has arrived."""
    gathered.wait()
    gradient = _weight_gradient(weight, dy, x)
    if gradient is not None:
        deliver(weight, gradient)


Again = Callable[[], torch.Tensor] | None
"""Makes a layer's input again, to the same bits, in the backward pass, where autograd is off; it is not kept then."""


class _Linear(torch.autograd.Function):
    """y = x W^T with the messages of its region and a weight gradient that can wait.

    Column parallel: x is gathered, and its gradient is a sum over the ranks. Row parallel: y is a sum over the ranks,
    and its gradient is gathered. A gathered x is not kept: it is gathered again in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, column: bool, messages: Messages, overlap: bool,
        queue: WeightGradients, again: Again,
    ) -> torch.Tensor:
        if again is None:
            ctx.save_for_backward(x)
        ctx.again = again
        # Not saved through autograd: recomputation would hand back a detached copy, and a deferred gradient must reach
        # the parameter itself.
        ctx.weight = weight
        ctx.column, ctx.messages, ctx.overlap, ctx.queue = column, messages, overlap, queue
        ctx.partial_gradient = not column or messages.sequence_parallel  # of x, for engine/gradients.py
        matrix = weight.view(-1, weight.shape[-1]).t()
        if column:
            return gathered_product(x, matrix, messages, keep=False)[0]
        y, works = summed_product(x, matrix, messages)
        _wait(works)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.again is None:
            (x,) = ctx.saved_tensors
        else:
            with recomputed():
                x = ctx.again()
        dx, dw = (_Linear._column if ctx.column else _Linear._row)(ctx, x, dy)
        return dx, dw, None, None, None, None, None

    @staticmethod
    def _column(ctx: Any, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """x is gathered behind dx' product, dx is summed behind dW's; but a dW that waits lets dx go first."""
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        messages, now = ctx.messages, needs_weight and not ctx.queue.deferring
        dx, dw, gathered = None, None, collectives.DONE
        works: list[Any] = []
        if now:
            x, gathered = messages.gather_async(x)
        if needs_x:
            dx, works = summed_product(dy, ctx.weight.view(-1, ctx.weight.shape[-1]), messages)
        if not ctx.overlap:
            _wait(works)
        if now:
            gathered.wait()
            dw = _weight_gradient(ctx.weight, dy, x)
        elif needs_weight:
            x, gathered = messages.gather_async(x.detach())  # what waits must not hold the graph, and by it the input
            ctx.queue.add(partial(deferred_weight_gradient, ctx.weight, dy, x, gathered))
        _wait(works)
        return dx, dw

    @staticmethod
    def _row(ctx: Any, x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        dx, dw, gathered = None, None, collectives.DONE
        if needs_x:
            dx, whole = gathered_product(dy, ctx.weight.view(-1, ctx.weight.shape[-1]), ctx.messages, needs_weight)
            dy = dy if whole is None else whole
        elif needs_weight:
            dy, gathered = ctx.messages.gather_async(dy)
        if needs_weight and ctx.queue.deferring:
            ctx.queue.add(partial(deferred_weight_gradient, ctx.weight, dy, x.detach(), gathered))
        elif needs_weight:
            gathered.wait()
            dw = _weight_gradient(ctx.weight, dy, x)
        return dx, dw


def _wait(works: list[Any]) -> None:
    while works:
        works.pop(0).wait()


def _linear(
    x: torch.Tensor, weight: torch.Tensor, context: LayerContext, column: bool, again: Again
) -> torch.Tensor:
    messages = Messages(context.tensor, context.sequence_parallel, context.chunks)
    return _Linear.apply(x, weight, column, messages, context.overlap, context.weight_gradients, again)


def column_parallel_matmul(
    x: torch.Tensor, weight: torch.Tensor, context: LayerContext, again: Again = None
) -> torch.Tensor:
    """x [s(/tp), b, in] times this rank's rows of the weight [.., in]: [s, b, out/tp]."""
    return _linear(x, weight, context, True, again)


class ColumnParallelLinear(torch.nn.Module):
    """y = x W^T + b with W cut along its output: [s(/tp), b, in] -> [s, b, out/tp].

    `shape` is the global shape of the weight, [out, in] or [n, out, in] for n matrices side by side (a gated unit),
    which are cut alike and give [s, b, n * out/tp].
    """

    def __init__(self, context: LayerContext, name: str, shape: tuple[int, ...], fill: Fill, bias: bool) -> None:
        super().__init__()
        self.context = context
        make = context.parameters.create
        self.weight = make(f"{name}.weight", shape, len(shape) - 2, fill)
        self.bias = make(f"{name}.bias", shape[:-1], len(shape) - 2, constant(0.0), decay=False) if bias else None

    def apart(self, x: torch.Tensor, again: Again = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The product and the bias [out/tp] that is still to be added to it, for a kernel that does both and more."""
        y = column_parallel_matmul(x, self.weight, self.context, again)
        return y, None if self.bias is None else self.bias.view(-1)

    def forward(self, x: torch.Tensor, again: Again = None) -> torch.Tensor:
        y, bias = self.apart(x, again)
        return y if bias is None else y + bias


class RowParallelLinear(torch.nn.Module):
    """y = x W^T with W [out, in] cut along its input: [s, b, in/tp] -> [s(/tp), b, out].

    The bias, which every rank holds, is returned beside the product so that the caller adds it together with dropout
    and the residual.
    """

    def __init__(self, context: LayerContext, name: str, shape: tuple[int, int], fill: Fill, bias: bool) -> None:
        super().__init__()
        self.context = context
        make = context.parameters.create
        self.weight = make(f"{name}.weight", shape, 1, fill)
        self.bias = make(f"{name}.bias", shape[:1], None, constant(0.0), decay=False) if bias else None

    def forward(self, x: torch.Tensor, again: Again = None) -> tuple[torch.Tensor, torch.Tensor | None]:
        return _linear(x, self.weight, self.context, False, again), self.bias
