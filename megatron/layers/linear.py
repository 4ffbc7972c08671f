"""Linear layers whose weight is cut over the tensor-parallel group.

Column parallel: the weight [out, in] is cut along `out`; every rank sees the whole input, makes its part of the output.
Row parallel: the weight is cut along `in`; every rank sees its part of the input and makes a term of the output's sum.
"""
from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatron.layers.context import LayerContext
from megatron.layers.parameters import Fill, constant
from megatron.parallel import collectives
from megatron.parallel.deferred import WeightGradients
from megatron.parallel.mappings import reduce_from_tensor_region
from megatron.parallel.topology import Group


@torch.no_grad()
def _accumulate_deferred(parameter: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    gradient = _matmul_gradient(dy, x, parameter.shape)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def _matmul_gradient(dy: torch.Tensor, x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """dW [out, in] = sum over tokens of dy [.., out] times x [.., in], in the weight's shape."""
    return (dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])).view(shape)


class _Linear(torch.autograd.Function):
    """y = x W^T, with the collectives of a column-parallel input and with a weight gradient that can wait.

    gather: x is this rank's [s/tp, b, h] of the sequence; the whole is gathered, again in the backward pass rather than
    kept. reduce: x is the same on all ranks, so its gradient is a sum over them. Both may be off.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, group: Group, gather: bool, reduce: bool, overlap: bool,
        queue: WeightGradients,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        # Not saved through autograd: recomputation would hand back a detached copy, and a deferred gradient must reach
        # the parameter itself.
        ctx.weight = weight
        ctx.group, ctx.gather, ctx.reduce, ctx.overlap, ctx.queue = group, gather, reduce, overlap, queue
        whole = collectives.gather_first(x, group) if gather else x
        return F.linear(whole, weight.view(-1, weight.shape[-1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        whole, gathered = collectives.gather_first_async(x, ctx.group) if ctx.gather and needs_weight else (x, None)
        dx, reduced = None, None
        if needs_x:
            dx = dy @ weight.view(-1, weight.shape[-1])
        if gathered is not None:
            gathered.wait()
        if dx is not None and ctx.gather:
            dx, reduced = collectives.reduce_scatter_first_async(dx, ctx.group)
        elif dx is not None and ctx.reduce:
            reduced = collectives.all_reduce_async(dx, ctx.group)
        if reduced is not None and not ctx.overlap:
            reduced.wait()
        dw = None
        if needs_weight and ctx.queue.deferring:
            ctx.queue.add(partial(_accumulate_deferred, weight, dy, whole))
        elif needs_weight:
            dw = _matmul_gradient(dy, whole, weight.shape)
        if reduced is not None and ctx.overlap:
            reduced.wait()
        return dx, dw, None, None, None, None, None


def column_parallel_matmul(x: torch.Tensor, weight: torch.Tensor, context: LayerContext) -> torch.Tensor:
    """x [s(/tp), b, in] times this rank's rows of the weight [.., in]: [s, b, out/tp]."""
    parallel = context.tensor.size > 1
    gather = parallel and context.sequence_parallel
    return _Linear.apply(
        x, weight, context.tensor, gather, parallel and not gather, context.overlap, context.weight_gradients
    )


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

    def apart(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The product and the bias [out/tp] that is still to be added to it, for a kernel that does both and more."""
        y = column_parallel_matmul(x, self.weight, self.context)
        return y, None if self.bias is None else self.bias.view(-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, bias = self.apart(x)
        return y if bias is None else y + bias


class RowParallelLinear(torch.nn.Module):
    """y = x W^T with W [out, in] cut along its input: [s, b, in/tp] -> [s(/tp), b, out].

    The bias, which every rank holds, is returned beside the product so that the caller adds it together with dropout
    and the residual.
    """

    def __init__(self, context: LayerContext, name: str, shape: tuple[int, int], fill: Fill, bias: bool) -> None:
        super().__init__()
        self.context = context
        make, partial_gradient = context.parameters.create, context.sequence_parallel
        self.weight = make(f"{name}.weight", shape, 1, fill)
        self.bias = None
        if bias:
            self.bias = make(
                f"{name}.bias", shape[:1], None, constant(0.0), decay=False, partial_gradient=partial_gradient
            )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        c = self.context
        y = _Linear.apply(x, self.weight, c.tensor, False, False, c.overlap, c.weight_gradients)
        return reduce_from_tensor_region(y, c.tensor, c.sequence_parallel), self.bias
