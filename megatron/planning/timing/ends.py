"""The passes of the embedding, on the first stage, and of the last norm and the output layer, on the last one.

As layers/embedding.py and layers/vocabulary_loss.py run them in training: the logits are made in the backward pass, in
chunks of tokens, each turned into its gradient at once; the forward pass of the output layer is its norm alone.
"""
from __future__ import annotations

import functools
from typing import NamedTuple

from megatron.planning.timing import linear
from megatron.planning.timing.layer import norm
from megatron.planning.timing.operations import Memory, Pass, Product, Steps
from megatron.planning.timing.shape import Shape


class EndPasses(NamedTuple):
    """backward, whole; inputs and weights: the halves of a split one."""

    forward: Pass
    backward: Pass
    inputs: Pass
    weights: Pass


@functools.lru_cache(maxsize=4096)
def embedding_passes(shape: Shape) -> EndPasses:
    backward = _embedding_backward(shape)
    return EndPasses(_embedding_forward(shape), backward, backward, ())


@functools.lru_cache(maxsize=4096)
def head_passes(shape: Shape) -> EndPasses:
    steps = Steps()
    linear.weight_gradient(steps, shape, shape.vocabulary, shape.h)
    whole, inputs = (_head_backward(shape, split=split) for split in (False, True))
    return EndPasses((norm(shape),), whole, inputs, steps.done())


def _embedding_forward(shape: Shape) -> Pass:
    steps, whole, local = Steps(), shape.tokens * shape.h, shape.local_tokens * shape.h
    steps.run(Memory(2 * whole * shape.width, 1, "embedding"))
    if shape.t > 1:
        steps.run(Memory(2 * whole * shape.width))  # rows of other ranks become zero
        if shape.sequence_parallel:
            steps.send("reduce_scatter", whole * shape.width)
        else:
            steps.run(Memory(2 * whole * shape.width))
            steps.send("all_reduce", whole * shape.width)
    if shape.positions == "learned_absolute":
        rows = shape.h * shape.local_tokens // shape.b
        steps.run(Memory(2 * rows * shape.width, 1, "embedding"), Memory((2 * local + rows) * shape.width))
    if shape.mixed:
        steps.run(Memory(local * (shape.width + shape.residual)))
    if shape.hidden_dropout:
        fused = shape.kernels.fusions.bias_dropout
        moved = local * (2 * shape.residual if fused else 2 + 4 * shape.residual)
        steps.run(Memory(moved, 1 if fused else 3, "residual"))
    return steps.done()


def _embedding_backward(shape: Shape) -> Pass:
    steps, whole, local = Steps(), shape.tokens * shape.h, shape.local_tokens * shape.h
    if shape.hidden_dropout:
        fused = shape.kernels.fusions.bias_dropout
        moved = local * (2 * shape.residual if fused else 1 + 4 * shape.residual)
        steps.run(Memory(moved, 1 if fused else 2, "residual"))
    if shape.mixed:
        steps.run(Memory(local * (shape.width + shape.residual)))
    if shape.positions == "learned_absolute":
        rows = shape.h * shape.local_tokens // shape.b
        if shape.b > 1:
            steps.run(Memory((local + rows) * shape.width))
        steps.run(*_added_rows(shape, rows))
    if shape.sequence_parallel:
        steps.send("all_gather", whole * shape.width)
    if shape.t > 1:
        steps.run(Memory(2 * whole * shape.width))
    steps.run(*_added_rows(shape, whole))
    return steps.done()


def _added_rows(shape: Shape, elements: int) -> tuple[Memory, ...]:
    """Added to the sum of a table: on a GPU by one kernel after a sort, on a CPU in fp32."""
    if shape.kernels.device != "cpu":
        return (Memory((shape.width + 8) * elements, 3, "embedding"),)
    cast = Memory(elements * (shape.width + 4))
    return (*((cast,) if shape.width != 4 else ()), Memory(12 * elements, 1, "embedding"))


def _head_backward(shape: Shape, *, split: bool) -> Pass:
    steps = Steps()
    steps.wait(*linear.gather(steps, shape, shape.h))
    tokens, at_once = shape.tokens, shape.tokens if split else shape.chunk_tokens
    sent = []
    for first in range(0, tokens, at_once):
        count = min(at_once, tokens - first)
        steps.run(Product(count, shape.vocabulary, shape.h))
        _loss(steps, shape, count)
        steps.run(Product(count, shape.h, shape.vocabulary))
        if first + count == tokens and shape.t > 1:
            kind = "reduce_scatter" if shape.sequence_parallel else "all_reduce"
            sent = [steps.post(kind, tokens * shape.h * shape.width)]
            if not shape.overlap:
                steps.wait(*sent)
        if not split:
            linear.weight_gradient(steps, shape, shape.vocabulary, shape.h, count)
    steps.wait(*sent)
    size = shape.local_tokens * shape.h
    cast = [Memory(size * (shape.width + shape.residual))] if shape.mixed else []
    steps.run(*cast, Memory(3 * size * shape.residual, 1, "norm"))
    return steps.done()


def _loss(steps: Steps, shape: Shape, count: int) -> None:
    """Statistics of a chunk's logits, those of all ranks, and the logits' gradient in their place."""
    size, width = count * shape.vocabulary, shape.width
    fused = shape.kernels.fusions.cross_entropy
    # torch: to fp32, the maximum, the difference, exponentials and their sum.
    steps.run(Memory(size * (width if fused else width + 32), 1 if fused else 5, "loss"))
    if shape.t > 1:
        steps.send("all_gather", 12 * count * shape.t)
    steps.run(Memory(size * (2 * width if fused else 3 * width + 36), 1 if fused else 6, "loss"))
