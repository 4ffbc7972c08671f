"""The products of the tensor-parallel layers with their messages, as layers/linear.py and chunked_products.py run them.

Each function appends to a pass. A column-parallel layer gathers its input [s/t, b, k] under sequence parallelism and
sums its gradient over the ranks; a row-parallel one sums its output and gathers its gradient.
"""
from __future__ import annotations

from megatron.planning.timing.operations import Memory, Product, Steps, Wait
from megatron.planning.timing.shape import Shape

LEAST_TOKENS = 256  # as layers/chunked_products.py has it, which needs torch; a test compares the two
BLOCK, _LEAST_ROWS = 1 << 20, 256  # as parallel/sink.py


def _bounds(shape: Shape, rows: int) -> list[int]:
    """Rows of each chunk of a product over all tokens, cut along `rows` rows of the sequence."""
    n = max(1, min(shape.chunks, rows, shape.tokens // LEAST_TOKENS))
    return [rows * (i + 1) // n - rows * i // n for i in range(n)]


def gathered_product(steps: Steps, shape: Shape, n: int, k: int, *, keep: bool) -> None:
    """[s(/t), b, k] of all ranks times [k, n]; `keep`: the gathered input is needed once more."""
    if shape.t == 1 or not shape.sequence_parallel:
        steps.run(Product(shape.tokens, n, k))
        return
    parts = [rows * shape.b * shape.t for rows in _bounds(shape, shape.s // shape.t)]
    arrived = steps.post("all_gather", parts[0] * k * shape.width)
    for i, rows in enumerate(parts):
        here = arrived
        if i + 1 < len(parts):
            arrived = steps.post("all_gather", parts[i + 1] * k * shape.width)
        steps.wait(here)
        steps.run(Product(rows, n, k))
        if len(parts) > 1:
            steps.run(Memory(2 * rows * (n + (k if keep else 0)) * shape.width, 2 if keep else 1))


def summed_product(steps: Steps, shape: Shape, n: int, k: int) -> list[Wait]:
    """[s, b, k] times [k, n], summed over the ranks; returns what to wait for."""
    if shape.t == 1:
        steps.run(Product(shape.tokens, n, k))
        return []
    kind = "reduce_scatter" if shape.sequence_parallel else "all_reduce"
    parts = shape.t if shape.sequence_parallel else 1
    chunks = [rows * shape.b * parts for rows in _bounds(shape, shape.s // parts)]
    sent = []
    for rows in chunks:
        if len(chunks) > 1 and parts > 1:
            steps.run(Memory(2 * rows * k * shape.width))
        steps.run(Product(rows, n, k))
        sent.append(steps.post(kind, rows * n * shape.width))
    return sent


def gather(steps: Steps, shape: Shape, k: int) -> list[Wait]:
    """Start to gather [s/t, b, k], where that is needed; returns what to wait for."""
    return [steps.post("all_gather", shape.tokens * k * shape.width)] if shape.sequence_parallel else []


def weight_gradient(steps: Steps, shape: Shape, n: int, k: int, tokens: int | None = None) -> None:
    """The gradient [n, k] of a weight over so many tokens (None: all), added to its sum.

    The first micro-batch of a step, which overwrites the sum instead, saves a reading of it.
    """
    tokens, size = shape.tokens if tokens is None else tokens, n * k
    if not shape.direct_sums:
        steps.run(Product(n, k, tokens), Memory(size * (shape.width + 2 * shape.sum_width)))
    elif shape.kernels.sums_in_fp32 or shape.sum_width == shape.width:
        # Of an fp32 product the old sum costs no more than the lines that a result is written to.
        steps.run(Product(n, k, tokens, moved=size * (2 * shape.sum_width - shape.width) if shape.width < 4 else 0))
    else:
        rows = min(n, max(BLOCK // k, _LEAST_ROWS))
        whole, rest = divmod(n, rows)
        for part in [rows] * whole + [rest] * (rest > 0):
            steps.run(Product(part, k, tokens), Memory(part * k * (shape.width + 8)))


def column_forward(steps: Steps, shape: Shape, n: int, k: int) -> None:
    """[s(/t), b, k] -> [s, b, n]."""
    gathered_product(steps, shape, n, k, keep=False)


def row_forward(steps: Steps, shape: Shape, n: int, k: int) -> None:
    """[s, b, k] -> [s(/t), b, n]."""
    steps.wait(*summed_product(steps, shape, n, k))


def column_backward(steps: Steps, shape: Shape, n: int, k: int, *, split: bool) -> list[Wait]:
    """The input is gathered behind the product of its gradient, which is summed behind that of the weight's.

    `split`: the weight's gradient is left to weight_gradient(), after what is returned has arrived.
    """
    if not split:
        gathered = gather(steps, shape, k)
        sent = summed_product(steps, shape, k, n)
        if not shape.overlap:
            steps.wait(*sent)
        steps.wait(*gathered)
        weight_gradient(steps, shape, n, k)
        steps.wait(*sent)
        return []
    sent = summed_product(steps, shape, k, n)
    if not shape.overlap:
        steps.wait(*sent)
    gathered = gather(steps, shape, k)
    steps.wait(*sent)
    return gathered


def row_backward(steps: Steps, shape: Shape, n: int, k: int, *, split: bool) -> None:
    """The gradient [s(/t), b, n] is gathered for its product with the weight, and kept for the weight's gradient."""
    gathered_product(steps, shape, k, n, keep=True)
    if not split:
        weight_gradient(steps, shape, n, k)
