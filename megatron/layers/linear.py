"""Linear layers whose weights are sharded over the tensor-parallel group.

Column parallel: the weight [out, in] is split along `out`; every rank gets the full input and
computes its shard of the output. Row parallel: the weight is split along `in`; every rank gets its
shard of the input and computes one term of the sum that gives the output.

A product that needs its input gathered or its output summed has to wait for the message. If it is
split into chunks of tokens, one chunk's message is sent while the next is multiplied (Wang et
al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models", ASPLOS 2023). Every element is the same sum over the same terms for any number of chunks.

The number of chunks: with n chunks, M/n of a message of M seconds stays exposed, and each further
chunk costs o seconds (latency, a kernel launch, half-empty tiles): n = sqrt(M/o) is best. 16 MiB
(2048 tokens with 4096 16-bit entries each) take about 0.3 ms at the 50 GB/s between two GCDs of an
MI250X, and o is a few tens of microseconds. This gives the default of 4.

With sequence parallelism a rank has the tokens [s/tp, b, ..] of its slice of the sequence. Chunk i
consists of the i-th part of every rank's slice: all ranks send the same amount, and each gets its
own rows back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.errors import KernelError
from megatron.kernels.cost import recomputed
from megatron.kernels.library import nodes_for
from megatron.kernels.ops.elementwise import bias_gradient, bias_row_blocks
from megatron.layers.context import Fill, LayerContext, constant
from megatron.parallel import collectives
from megatron.parallel.autograd import Context
from megatron.parallel.collectives import Started
from megatron.parallel.deferred_gradients import weight_gradients
from megatron.parallel.sharding import Rows

LEAST_TOKENS = 256
"""Minimum number of tokens in a chunk: twice the rows of the largest tile of matrix products on
GPUs and CPUs, so that few tiles are half empty."""


def _bounds(context: LayerContext, rows: int, tokens: int) -> list[tuple[int, int]]:
    """Divide the `rows` rows of a product with `tokens` tokens into chunks.

    Return start and end of each chunk.
    """
    n = max(1, min(context.chunks, rows, tokens // LEAST_TOKENS))
    return [(rows * i // n, rows * (i + 1) // n) for i in range(n)]


def _gather_async(x: Tensor, context: LayerContext) -> tuple[Tensor, Started]:
    """Return the full input [s, b, ..] and a handle to wait for before reading it."""
    if context.sequence_parallel:
        return collectives.gather_first_async(x, context.tensor)
    return x, collectives.DONE


def one_token(x: Tensor) -> bool:
    """Return whether x [s, b, ..] is one generated token for each sample.

    This is too little work for a fused kernel to be worth its launch.
    """
    return x.shape[0] == 1 and not torch.is_grad_enabled()


def product(x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [s, b, in] times matrix [in, out], plus bias [out]: [s, b, out].

    For one token of a few samples MKL takes up to a third less time with the weights on the left
    (measured with 8 samples, 768 x 3072 and 768 x 50304, AMD EPYC).
    """
    if not one_token(x):
        if bias is None:
            return x @ matrix
        return torch.addmm(bias, x.flatten(0, -2), matrix).view(*x.shape[:-1], len(bias))
    row = x[0]
    if 4 <= row.shape[0] <= 16 and x.dtype == torch.float32 and x.device.type == "cpu":
        y = torch.mm(matrix.t(), row.t()).t().contiguous().unsqueeze(0)
    else:
        y = torch.mm(row, matrix).unsqueeze(0)
    return y if bias is None else y + bias


def gathered_product(
    x: Tensor, matrix: Tensor, context: LayerContext, keep: bool, bias: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return all ranks' x [s(/tp), b, in] times matrix [in, out], plus bias [out]: [s, b, out].

    The second result is the full x [s, b, in]; without `keep` it may be None.
    """
    group = context.tensor
    size = context.tensor.size
    if size == 1 or not context.sequence_parallel:
        return product(x, matrix, bias), x
    bounds = _bounds(context, len(x), size * x[..., 0].numel())
    if len(bounds) == 1:
        full = collectives.gather_first(x, group)
        return product(full, matrix, bias), full
    y = x.new_empty(size, *x.shape[:-1], matrix.shape[1])  # [tp, s/tp, b, out]
    gathered = x.new_empty(size, *x.shape) if keep else None  # [tp, s/tp, b, in]
    following = collectives.gather_first_async(x[slice(*bounds[0])], group)
    for i, (first, end) in enumerate(bounds):
        chunk, arrived = following
        if i + 1 < len(bounds):
            following = collectives.gather_first_async(x[slice(*bounds[i + 1])], group)
        arrived.wait()
        # One matrix product over the rows of all ranks, then a copy that puts them in order: a
        # product for each rank would have fewer rows, and a batched one is slower on a CPU.
        y[:, first:end] = product(chunk, matrix, bias).view(size, end - first, *y.shape[2:])
        if gathered is not None:
            gathered[:, first:end] = chunk.view(size, end - first, *x.shape[1:])
    return y.flatten(0, 1), None if gathered is None else gathered.flatten(0, 1)


def summed_product(
    x: Tensor, matrix: Tensor, context: LayerContext
) -> tuple[Tensor, list[Started]]:
    """Return the sum over the ranks of x [s, b, in] times matrix [in, out]: [s(/tp), b, out].

    The result may be read after wait() on all handles of the returned list.
    """
    group = context.tensor
    scatters = context.sequence_parallel
    if group.size == 1:
        return product(x, matrix), []
    ranks = group.size if scatters else 1
    rows = len(x) // ranks
    bounds = _bounds(context, rows, x[..., 0].numel())
    if len(bounds) == 1:
        y = product(x, matrix)
        if not scatters:
            return y, [collectives.all_reduce_async(y, group)]
        scattered, work = collectives.reduce_scatter_first_async(y, group)
        return scattered, [work]
    cut = x.unflatten(0, (ranks, rows))  # [tp, s/tp, b, in]
    y = x.new_empty(rows, *x.shape[1:-1], matrix.shape[1])
    works = []
    for first, end in bounds:
        chunk = y[first:end].view(-1, matrix.shape[1])
        rows_of_all = cut[:, first:end].flatten(0, -2)
        if scatters:
            works.append(collectives.reduce_scatter_into_async(chunk, rows_of_all @ matrix, group))
        else:
            torch.mm(rows_of_all, matrix, out=chunk)
            works.append(collectives.all_reduce_async(chunk, group))
    return y, works


Weights = tuple[Tensor, ...]
"""Weights whose concatenated rows are the matrix of one product; usually a single weight."""


def _matrix(weights: Weights) -> Tensor:
    """Return the matrix [out, in] of the weights.

    It is a view if they are adjacent in memory, as in an engine's flat weights.
    """
    first = weights[0]
    width = weights[0].shape[-1]
    if len(weights) == 1:
        return first.view(-1, width)
    storage = first.untyped_storage()._cdata
    end = first.storage_offset()
    for weight in weights:
        if (weight.untyped_storage()._cdata, weight.storage_offset()) != (storage, end):
            return torch.cat([weight.view(-1, width) for weight in weights])
        end += weight.numel()
    return first.as_strided(((end - first.storage_offset()) // width, width), (width, 1))


def _partial_gradient(column: bool, context: LayerContext) -> bool:
    """Return whether parameters before a layer get terms of a sum over the tensor ranks.

    See engine.gradients.Terms.
    """
    return not column or context.sequence_parallel


RecomputeInput = Callable[[], Tensor] | None
"""Recomputes a layer's input in the backward pass, bit for bit and without autograd. None: the
input is kept.
"""


class _Linear(torch.autograd.Function):
    """y = x W^T + b, with its tensor-parallel messages and a weight gradient that can be deferred.

    Column parallel: x is gathered, and its gradient is a sum over the ranks. Row parallel: y is a
    sum over the ranks, and its gradient is gathered. Without sequence parallelism nothing is
    gathered. A gathered x is not kept: it is gathered again in the backward pass. Frozen weights do
    not need x.
    """

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        column: bool,
        context: LayerContext,
        recompute_input: RecomputeInput,
        bias: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        trains = any(weight.requires_grad for weight in weights)
        ctx.recompute_input = recompute_input if trains else None
        ctx.hooks = None
        if trains and recompute_input is None:
            # Saved as autograd would save it, but before the product: recomputation ends as soon as
            # the last tensor is saved, and does not compute a product after it.
            hooks = getattr(
                torch._C._autograd, "_top_saved_tensors_default_hooks", None
            )  # from torch 2.7 on
            ctx.hooks = hooks and hooks(True)
            if ctx.hooks is None:
                ctx.save_for_backward(x)
            else:
                ctx.packed = ctx.hooks[0](x)
        # Not saved through autograd: recomputation would return a detached copy, and a deferred
        # gradient must reach the parameter itself.
        ctx.weights = weights
        ctx.bias = bias
        ctx.versions = [weight._version for weight in weights]
        ctx.column = column
        ctx.context = context
        # whether x's gradient is partial, for engine/gradients.py
        ctx.partial_gradient = _partial_gradient(column, context)
        return _Linear.compute(x, column, context, weights, bias)

    @staticmethod
    def compute(
        x: Tensor, column: bool, context: LayerContext, weights: Weights, bias: Tensor | None = None
    ) -> Tensor:
        """Return y, without gradients; only a column-parallel layer adds its bias here."""
        matrix = _matrix(weights).t()
        if column:
            return gathered_product(x, matrix, context, False, bias)[0]
        y, works = summed_product(x, matrix, context)
        _wait(works)
        return y

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True; cheaper than once_differentiable
            raise KernelError(
                "linear layers have no second derivative: call backward without create_graph=True"
            )
        if ctx.versions != [weight._version for weight in ctx.weights]:
            raise KernelError(
                "a weight of a linear layer was changed in place between its forward and its "
                "backward pass"
            )
        saved = ctx.saved_tensors  # raises an error if the graph has been freed
        keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        # The graph lives until its backward pass ends; these references, and with them the tensors
        # from which x is computed, are dropped earlier.
        if ctx.hooks is not None:
            x = ctx.hooks[1](ctx.packed)
            if not keeps_graph:
                ctx.hooks = ctx.packed = None
        elif ctx.recompute_input is not None:
            recompute_input = ctx.recompute_input
            if not keeps_graph:
                ctx.recompute_input = None
            with recomputed():
                x = recompute_input()
            del recompute_input
        else:
            x = saved[0] if saved else None
        dx, dw = (_Linear._column if ctx.column else _Linear._row)(ctx, x, dy)
        db = None
        if ctx.needs_input_grad[4]:
            db = bias_gradient(ctx.bias, dy, ctx.context.fusions.bias_dropout)
        return dx, None, None, None, db, *(dw or [None] * len(ctx.weights))

    @staticmethod
    def _column(
        ctx: Context, x: Tensor | None, dy: Tensor
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Gather x while dx is computed and, with overlap, sum dx while dW is computed.

        If dW is deferred, x is gathered last. Without x there is no dW.
        """
        needs_x = ctx.needs_input_grad[0]
        context = ctx.context
        deferring = context.weight_gradients.deferring
        dx = None
        dw = list[Tensor | None]()
        gathered = collectives.DONE
        works: list[Started] = []
        full = None
        if x is not None and not deferring:
            full, gathered = _gather_async(x, context)
        if needs_x:
            dx, works = summed_product(dy, _matrix(ctx.weights), context)
        if not context.overlap:
            _wait(works)
        if full is not None:
            gathered.wait()
            dw = weight_gradients(ctx.weights, dy, full)
        elif x is not None:
            _defer(context, ctx.weights, dy, *_gather_async(x.detach(), context))
        _wait(works)
        return dx, dw

    @staticmethod
    def _row(
        ctx: Context, x: Tensor | None, dy: Tensor
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        needs_x = ctx.needs_input_grad[0]
        context = ctx.context
        queue = ctx.context.weight_gradients
        dx = None
        dw = list[Tensor | None]()
        gathered = collectives.DONE
        if needs_x:
            dx, full = gathered_product(dy, _matrix(ctx.weights), context, x is not None)
            dy = dy if full is None else full
        elif x is not None:
            dy, gathered = _gather_async(dy, context)
        if x is not None and queue.deferring:
            _defer(context, ctx.weights, dy, x, gathered)
        elif x is not None:
            gathered.wait()
            dw = weight_gradients(ctx.weights, dy, x)
        return dx, dw


def _defer(
    context: LayerContext, weights: Weights, dy: Tensor, x: Tensor, gathered: Started
) -> None:
    """Put the weight gradient into the queue; `gathered` is the all-gather of dy or x."""
    # A CUDA graph has to contain the wait.
    if dy.is_cuda and torch.cuda.is_current_stream_capturing():
        gathered.wait()
        gathered = collectives.DONE
    context.weight_gradients.add_product(weights, dy, x, gathered)


def _wait(works: list[Started]) -> None:
    while works:
        works.pop(0).wait()


def _chunks(x: Tensor, column: bool, context: LayerContext) -> int:
    """Return the number of chunks for products with x, forward and backward."""
    if context.chunks == 1:
        return 1
    rows = len(x)
    tokens = x.numel() // x.shape[-1]
    if context.sequence_parallel:
        size = context.tensor.size
        rows, tokens = (rows, tokens * size) if column else (rows // size, tokens)
    return len(_bounds(context, rows, tokens))


def linear(
    x: Tensor,
    column: bool,
    context: LayerContext,
    recompute_input: RecomputeInput,
    weights: Weights,
    bias: Tensor | None = None,
) -> Tensor:
    """Return y of _Linear, without an autograd node if gradients are disabled.

    For one token, such a node would take half as long as all the rest.
    """
    nodes = nodes_for(x)
    usual = recompute_input is None and len(weights) == 1 and not one_token(x)
    usual = usual and (weights[0].requires_grad or not torch.is_grad_enabled())
    if nodes is not None and usual and context.region is not NotImplemented:
        partial_sums = 0
        gathers = column and context.sequence_parallel
        if bias is not None and context.fusions.bias_dropout:
            rows = x.numel() // x.shape[-1]  # this rank's; the gradient has the rows of all ranks
            partial_sums = bias_row_blocks(rows * context.tensor.size if gathers else rows, bias)
        made: Tensor = nodes.linear(
            x,
            weights[0],
            bias,
            context.weight_gradients,
            partial_sums,
            context.region,
            column,
            _partial_gradient(column, context),
            _chunks(x, column, context),
        )
        if made is not NotImplemented:
            return made
    if not torch.is_grad_enabled():
        return _Linear.compute(x, column, context, weights, bias)
    y: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
        x, column, context, recompute_input, bias, *weights
    )
    return y


class Adapter(nn.Module):
    """Low-rank adapter of a linear layer: f B A x is added to W x (Hu et al., arXiv 2106.09685).

    A [rank, in] begins as in PEFT, with entries of at most 1 / sqrt(in); B [.., out, rank] is zero.
    The tensor ranks divide the dimension that they divide in W, and all hold the other factor.

    factor       f
    shape, rows  see ColumnParallelLinear
    dims         dimensions of A and B that the tensor ranks divide
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        shape: tuple[int, ...],
        dims: tuple[int | None, int | None],
        rank: int,
        factor: float,
        rows: tuple[Rows | None, Rows | None] = (None, None),
    ) -> None:
        super().__init__()
        self.dims = dims
        self.factor = factor
        self.keeps = not context.gives_terms  # the kind of gradient that the layer gives
        make = context.parameters.create
        of_all: dict[str, Any] = {"partial_gradient": context.gives_terms}
        of_a, of_b = ({"dim": dim, **(of_all if dim is None else {})} for dim in dims)
        self.a = make(f"{name}.lora_a", (rank, shape[-1]), fill=_of_inputs, **of_a)
        b = f"{name}.lora_b", (*shape[:-1], rank)
        self.b = make(*b, fill=constant(0.0), rows=rows[0], **of_b)
        self.b_shared: nn.Parameter | None = None
        if rows[1] is not None:
            self.b_shared = make(*b, fill=constant(0.0), rows=rows[1], **of_b)

    def forward(
        self, x: Tensor, y: Tensor, context: LayerContext, recompute_input: RecomputeInput
    ) -> Tensor:
        """Return y, the layer's product with x, plus the adapter's."""
        alone = self.keeps, context.alone()
        of_a, of_b = (
            alone if dim is None else (column, context)
            for dim, column in zip(self.dims, (False, True), strict=True)
        )
        b: Weights = (self.b,) if self.b_shared is None else (self.b, self.b_shared)
        narrow = linear(x, *of_a, recompute_input, (self.a,))
        return y + linear(narrow * self.factor, *of_b, None, b)


def _of_inputs(block: Tensor, generator: torch.Generator, shape: tuple[int, ...]) -> None:
    block.uniform_(-(shape[-1] ** -0.5), shape[-1] ** -0.5, generator=generator)


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with W split along its output: [s(/tp), b, in] -> [s, b, out/tp].

    `shape` is the global shape of the weight, [out, in] or [n, out, in] for n matrices side by side
    (a gated unit), each split in this way, giving [s, b, n * out/tp].

    rows  this rank's rows of the weight if shards are uneven: those that no other rank holds, then
          those that several ranks hold (weight_shared, bias_shared). The entries of the result are
          in this order
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        shape: tuple[int, ...],
        fill: Fill,
        bias: bool,
        rows: tuple[Rows, Rows] | None = None,
    ) -> None:
        super().__init__()
        self.context = context
        make = context.parameters.create
        dim = len(shape) - 2
        zero = constant(0.0)
        local, shared = rows or (None, None)
        self.weight = make(f"{name}.weight", shape, dim, fill, rows=local)
        self.weight_shared: nn.Parameter | None = None
        self.bias: nn.Parameter | None = None
        self.bias_shared: nn.Parameter | None = None
        if shared is not None:
            self.weight_shared = make(f"{name}.weight", shape, dim, fill, rows=shared)
        if bias:
            self.bias = make(f"{name}.bias", shape[:-1], dim, zero, rows=local, decay=False)
            if shared is not None:
                self.bias_shared = make(
                    f"{name}.bias", shape[:-1], dim, zero, rows=shared, decay=False
                )
        adapter = context.adapter(name)
        split = local, shared
        dims = None, dim
        self.adapter = adapter and Adapter(context, name, shape, dims, *adapter, split)

    def apart(
        self, x: Tensor, recompute_input: RecomputeInput = None
    ) -> tuple[Tensor, Tensor | None]:
        """Return the product and the bias [out/tp], for a kernel that also adds the bias."""
        y = linear(x, True, self.context, recompute_input, self._weights())
        if self.adapter is not None:
            y = self.adapter(x, y, self.context, recompute_input)
        bias = self.bias
        shared = self.bias_shared
        if bias is None or shared is None:
            # A vector is returned as it is: a view would have no accumulator.
            return y, bias if bias is None or bias.dim() == 1 else bias.view(-1)
        return y, torch.cat([bias, shared])

    def forward(self, x: Tensor, recompute_input: RecomputeInput = None) -> Tensor:
        bias = self.bias
        plain = self.adapter is None and self.bias_shared is None
        if plain and (bias is None or bias.dim() == 1):
            return linear(x, True, self.context, recompute_input, self._weights(), bias)
        y, vector = self.apart(x, recompute_input)
        return y if vector is None else y + vector

    def merged_weight(self) -> Tensor:
        """Return this rank's rows of the weight, with the adapter's part."""
        if self.adapter is None:
            return self.weight
        product = self.adapter.b.flatten(0, -2) @ self.adapter.a
        return self.weight + self.adapter.factor * product.view_as(self.weight)

    def _weights(self) -> Weights:
        shared = self.weight_shared
        return (self.weight,) if shared is None else (self.weight, shared)


class ReplicatedLinear(nn.Module):
    """y = x W^T with W [out, in] on all tensor ranks: [s(/tp), b, in] -> [s(/tp), b, out]."""

    def __init__(
        self, context: LayerContext, name: str, shape: tuple[int, int], fill: Fill
    ) -> None:
        super().__init__()
        self.context = context.alone()
        self.column = not context.gives_terms  # the kind of gradient that the input gets
        self.weight = context.parameters.create(f"{name}.weight", shape, None, fill)
        adapter = context.adapter(name)
        self.adapter = adapter and Adapter(context, name, shape, (None, None), *adapter)

    def forward(self, x: Tensor, recompute_input: RecomputeInput = None) -> Tensor:
        y = linear(x, self.column, self.context, recompute_input, (self.weight,))
        if self.adapter is not None:
            y = self.adapter(x, y, self.context, recompute_input)
        return y


class RowParallelLinear(nn.Module):
    """y = x W^T with W [out, in] split along its input: [s, b, in/tp] -> [s(/tp), b, out].

    The bias, which every rank holds, is returned separately: the caller adds it together with
    dropout and the residual.

    summed  False: return this rank's term of the sum, [s, b, out], for a caller that adds the terms
            of several layers before sending one message
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        shape: tuple[int, int],
        fill: Fill,
        bias: bool,
        summed: bool = True,
    ) -> None:
        super().__init__()
        self.context = context if summed else context.alone()
        make = context.parameters.create
        self.weight = make(f"{name}.weight", shape, 1, fill)
        self.bias = (
            make(f"{name}.bias", shape[:1], None, constant(0.0), decay=False) if bias else None
        )
        adapter = context.adapter(name)
        self.adapter = adapter and Adapter(self.context, name, shape, (1, None), *adapter)

    def forward(
        self, x: Tensor, recompute_input: RecomputeInput = None
    ) -> tuple[Tensor, Tensor | None]:
        y = linear(x, False, self.context, recompute_input, (self.weight,))
        if self.adapter is not None:
            y = self.adapter(x, y, self.context, recompute_input)
        return y, self.bias
