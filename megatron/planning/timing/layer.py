"""The passes of one transformer layer, as layers/transformer.py runs them.

Bytes are those of the kernels (kernels/ops), or where torch's operators run instead, of each of its passes over the
data. Sums over tokens for gradients of biases and norms are made in the same pass and are not counted again.
"""
from __future__ import annotations

import functools
from typing import NamedTuple

from megatron.planning.timing import linear
from megatron.planning.timing.operations import Attention, Memory, Pass, Product, Steps
from megatron.planning.timing.shape import Shape


class LayerPasses(NamedTuple):
    """forward; the same as recomputation runs it, inside of a group of layers and at its end, where what no gradient
    needs is left out; backward, whole; and its two halves of a split backward pass."""

    forward: Pass
    inside: Pass
    at_end: Pass
    backward: Pass
    inputs: Pass
    weights: Pass


@functools.lru_cache(maxsize=4096)
def layer_passes(shape: Shape) -> LayerPasses:
    forward, at_end = _forward(shape), _forward(shape, last_sum=not _skipped_at_end(shape))
    return LayerPasses(
        forward, forward, at_end, _backward(shape, split=False), _backward(shape, split=True), _weights(shape)
    )


def _skipped_at_end(shape: Shape) -> bool:
    """torch's recomputation stops at the last tensor that was kept: the fused sum after the MLP keeps none."""
    return shape.fused_dropout or not shape.hidden_dropout


def _weights(shape: Shape) -> Pass:
    """The second half of a split backward pass: what was deferred, the last first."""
    steps = Steps()
    for n, k in (
        (shape.projection, shape.h), (shape.h, shape.attended), (shape.up, shape.h), (shape.h, shape.inner)
    ):  # fmt: skip
        linear.weight_gradient(steps, shape, n, k)
    return steps.done()


# -- forward -----------------------------------------------------------------------------------------------------------


def _forward(shape: Shape, *, last_sum: bool = True) -> Pass:
    steps = Steps()
    steps.run(norm(shape))
    linear.column_forward(steps, shape, shape.projection, shape.h)
    if shape.bias:
        steps.run(Memory(2 * shape.tokens * shape.projection * shape.width))
    steps.run(*_apart(shape), *_core(shape))
    linear.row_forward(steps, shape, shape.h, shape.attended)
    if shape.adds_before_norm:
        steps.run(*_add_norm(shape))
    else:
        steps.run(*_residual(shape), norm(shape))
    linear.column_forward(steps, shape, shape.up, shape.h)
    steps.run(*activation(shape))
    linear.row_forward(steps, shape, shape.h, shape.inner)
    if last_sum:
        steps.run(*_residual(shape))
    return steps.done()


def norm(shape: Shape) -> Memory:
    """A norm of the residual stream."""
    size = shape.local_tokens * shape.h
    if shape.mixed:  # in fp32, and then to the format of the weights
        return Memory(size * (2 * shape.residual + shape.residual + shape.width), 2, "norm")
    return Memory(2 * size * shape.width, 1, "norm")


def norm_backward(shape: Shape, *, added: bool = False) -> tuple[Memory, ...]:
    """`added`: the gradient of the sum comes in by the same kernel; else it is added to the norm's afterwards."""
    size = shape.local_tokens * shape.h
    if shape.fused_norm and added:
        return (Memory(4 * size * shape.width, 1, "norm"),)
    cast = (Memory(size * (shape.residual + shape.width), 1, "norm"),) if shape.mixed else ()
    return (*cast, Memory(3 * size * shape.residual, 1, "norm"), Memory(3 * size * shape.residual, 1, "residual"))


def _add_norm(shape: Shape) -> tuple[Memory, ...]:
    if shape.fused_norm:
        return (Memory(4 * shape.local_tokens * shape.h * shape.width, 1, "norm"),)
    return (*_residual(shape), norm(shape))


def _residual(shape: Shape) -> tuple[Memory, ...]:
    """residual + dropout(x + bias)."""
    size = shape.local_tokens * shape.h
    total = size * (2 * shape.residual + shape.width)
    if not shape.drops or shape.fused_dropout:
        return (Memory(total, 1, "residual"),)
    kernels, moved = 1, float(total)
    if shape.bias:
        kernels, moved = kernels + 1, moved + 2 * size * shape.width
    if shape.hidden_dropout:  # a mask of bytes is drawn, multiplied in, then the scale
        kernels, moved = kernels + 3, moved + size * (2 + 4 * shape.width)
    return (Memory(moved, kernels, "residual"),)


def _apart(shape: Shape) -> tuple[Memory, ...]:
    """Queries and keys out of the projection, turned by their positions."""
    queries = shape.tokens * shape.attended
    if shape.rotary:
        return _rotation(shape)
    copied = shape.kernels.attention != "blocked" and shape.n > shape.g and shape.groups > 1
    return (Memory(2 * queries * shape.width),) if copied else ()


def _rotation(shape: Shape) -> tuple[Memory, ...]:
    size = shape.tokens * (shape.n + shape.g) * shape.d // shape.t
    if shape.kernels.fusions.rotary:
        return (Memory(2 * size * shape.width, 2),)
    # Of each turned element: to fp32, four halves of products, two of sums, one concatenation, and back.
    turned = size * shape.rotary // shape.d
    return (Memory(turned * (44 + 2 * shape.width) + 2 * (size - turned) * shape.width, 18),)


def _core(shape: Shape) -> tuple[Attention | Memory | Product, ...]:
    attention = Attention(shape.b, shape.heads, shape.s, shape.d)
    out = shape.tokens * shape.attended * shape.width
    if shape.kernels.attention == "unfused":
        return (*_scores(shape), Product(_rows(shape), shape.d, shape.s, shape.b * shape.groups), Memory(2 * out))
    if shape.kernels.attention == "blocked":
        return (attention,)
    return (attention, *([Memory(2 * out)] if _samples_first(shape) else []))


def _rows(shape: Shape) -> int:
    """Rows of scores of one group of heads."""
    return shape.s * shape.n // shape.g


def _score_count(shape: Shape) -> int:
    return shape.b * shape.heads * shape.s**2


def _samples_first(shape: Shape) -> bool:
    """Whether samples stand before positions in attention's output, which the products around it want behind them."""
    return shape.b > 1 and shape.positions == "alibi"


def _scores(shape: Shape) -> tuple[Memory | Product, ...]:
    """Explicit attention as far as its weights."""
    count, width = _score_count(shape), shape.width
    found: list[Memory | Product] = []
    if shape.n > shape.g:
        found.append(Memory(2 * shape.tokens * shape.attended * width))
    found.append(Product(_rows(shape), shape.s, shape.d, shape.b * shape.groups))
    if shape.positions == "alibi":
        found.append(Memory(3 * count * width))
    fused = shape.kernels.fusions.masked_softmax
    # The kernel reads what a row sees; torch goes to fp32, scales, masks, takes the softmax and comes back.
    found.append(Memory(count * (1.5 * width if fused else 25 + 2 * width), 1 if fused else 5))
    if shape.attention_dropout:
        fused = shape.kernels.fusions.bias_dropout
        found.append(Memory(count * (2 * width if fused else 2 + 4 * width), 1 if fused else 3))
    return tuple(found)


def activation(shape: Shape) -> tuple[Memory, ...]:
    """Bias and activation of the MLP."""
    size, width = shape.tokens * shape.inner, shape.width
    ins = 2 if shape.gated else 1
    if shape.kernels.fusions.bias_activation:
        return (Memory((ins + 1) * size * width, 1, "activation"),)
    bias = [Memory(2 * ins * size * width)] if shape.bias else []
    # SwiGLU by torch: the gate's function, then the product.
    return (*bias, Memory((5 if shape.gated else 2) * size * width, 2 if shape.gated else 1, "activation"))


# -- backward ----------------------------------------------------------------------------------------------------------


def _backward(shape: Shape, *, split: bool) -> Pass:
    steps, again = Steps(), shape.again
    norms_again = "layernorm" in again and not shape.residual_after_norm
    steps.run(*_residual_backward(shape))
    if "mlp_act" in again:
        fused = shape.kernels.fusions.bias_activation
        steps.run(*(activation(shape) if fused else activation(shape)[-1:]), again=True)
    linear.row_backward(steps, shape, shape.h, shape.inner, split=split)
    steps.run(*_activation_backward(shape))
    if norms_again:
        steps.run(norm(shape), again=True)
    linear.column_backward(steps, shape, shape.up, shape.h, split=split)
    steps.run(*norm_backward(shape, added=shape.adds_before_norm))
    if not shape.adds_before_norm:
        steps.run(*_residual_backward(shape))
    linear.row_backward(steps, shape, shape.h, shape.attended, split=split)
    if "core_attn" in again:
        unfused = shape.kernels.attention == "unfused"
        steps.run(*(_scores(shape) if unfused else _core(shape)), again=True)
    steps.run(*_core_backward(shape), *_apart_backward(shape))
    if shape.bias:
        steps.run(Memory(shape.tokens * shape.projection * shape.width))
    if norms_again:
        steps.run(norm(shape), again=True)
    linear.column_backward(steps, shape, shape.projection, shape.h, split=split)
    steps.run(*norm_backward(shape))
    return steps.done()


def _residual_backward(shape: Shape) -> tuple[Memory, ...]:
    """The gradient of the residual is the one that comes in."""
    size = shape.local_tokens * shape.h
    if not shape.drops:
        return ()
    if shape.fused_dropout:
        return (Memory(2 * size * shape.width, 1, "residual"),)
    kernels, moved = 0, 0.0
    if shape.mixed:
        kernels, moved = 1, float(size * (shape.residual + shape.width))
    if shape.hidden_dropout:
        kernels, moved = kernels + 2, moved + size * (1 + 4 * shape.width)
    if shape.bias:
        kernels, moved = kernels + 1, moved + size * shape.width
    return (Memory(moved, kernels, "residual"),)


def _activation_backward(shape: Shape) -> tuple[Memory, ...]:
    size, width = shape.tokens * shape.inner, shape.width
    if shape.kernels.fusions.bias_activation:
        return (Memory((5 if shape.gated else 3) * size * width, 1, "activation"),)
    # SwiGLU by torch: two products, the gate's function, and both halves side by side.
    moved, kernels = ((13, 4) if shape.gated else (3, 1))
    bias = [Memory((2 if shape.gated else 1) * size * width)] if shape.bias else []
    return (Memory(moved * size * width, kernels, "activation"), *bias)


def _core_backward(shape: Shape) -> tuple[Attention | Memory | Product, ...]:
    attention = Attention(shape.b, shape.heads, shape.s, shape.d, backward=True)
    out = shape.tokens * shape.attended * shape.width
    if shape.kernels.attention == "unfused":
        return (*_scores_backward(shape), Memory(2 * out))
    if shape.kernels.attention == "blocked":
        return (attention,)
    # The weight's gradient needs attention's output in the order of the tokens once more.
    return (*([Memory(2 * out)] if _samples_first(shape) else []), attention)


def _scores_backward(shape: Shape) -> tuple[Memory | Product, ...]:
    rows, s, d, batch = _rows(shape), shape.s, shape.d, shape.b * shape.groups
    count, width = _score_count(shape), shape.width
    found: list[Memory | Product] = [Product(rows, s, d, batch), Product(s, d, rows, batch)]
    if shape.attention_dropout:
        fused = shape.kernels.fusions.bias_dropout
        found.append(Memory(count * (2 * width if fused else 1 + 4 * width), 1 if fused else 2))
    fused = shape.kernels.fusions.masked_softmax
    found.append(Memory(count * (3 * width if fused else 36 + 2 * width), 1 if fused else 5))
    return (*found, Product(rows, d, s, batch), Product(s, d, rows, batch))


def _apart_backward(shape: Shape) -> tuple[Memory, ...]:
    """Gradients of queries, keys and values side by side again."""
    if shape.kernels.attention == "blocked" and not shape.rotary:
        return ()
    joined = Memory(2 * shape.tokens * shape.projection * shape.width)
    return (*(_rotation(shape) if shape.rotary else ()), joined)
