"""Kernels over a vocabulary: a rank's part of the cross entropy, and embedding gradients.

Cross entropy: `local_pass` and `gradient_` are the two halves between which a group exchanges three
numbers per token (megatron/layers/vocabulary.py). Bytes moved for logits of N elements of e bytes:
the local pass N e in, whatever the width of a row; the gradient N e in and N e out, in place: there
is no second array of the logits' size. Padding columns are not read. Numbers per token (labels and
fp32 results, 20 bytes each pass) are negligible.

Embedding: `add_rows_` adds values, each a vector of width w, to the rows that were looked up, in a
fixed order. Bytes moved for n values of e bytes per element, which hit d different rows of a table
of t bytes per element: n w e in, d w t in and out. On a GPU a row that occurs in more than one
chunk of values costs 8 w bytes more for each of these chunks. With e = 2 and 16 values per chunk
this adds 25 percent to the n w e bytes if each chunk has one such row, and 50 percent if it has
two, the maximum. The numbers of the rows are sorted first, which takes 12 bytes of memory per
value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.cost import Memory
from megatron.kernels.library import TYPES, Function, find
from megatron.kernels.operators import (
    check,
    check_all,
    check_beside,
    check_device,
    check_shape,
    check_type,
    operator,
)
from megatron.kernels.ops.elementwise import soft_cap

_LOCAL = Function("mk_entropy_local", "pppppllllf")
_GRADIENT = Function("mk_entropy_gradient", "pppppllllf")

_AT_A_TIME = 1 << 22
"""Number of elements that torch's operators process at a time when there is no kernel, to keep
their copies small.
"""

Three = tuple[Tensor, Tensor, Tensor]


def _check(name: str, logits: Tensor, labels: Tensor, *rest: Any) -> None:
    """Check the arguments of both operators.

    `rest`: the numbers of each token that `gradient_` takes, first, real, and the cap if given.
    """
    tensors = [x for x in rest if isinstance(x, Tensor)]
    numbers = dict(zip(("maximum", "total", "gradient"), tensors, strict=False))
    first, real, *caps = rest[len(tensors) :]
    check_all(name, logits=logits)
    check_type(name, [torch.int64], labels=labels)
    check_device(name, logits, labels=labels, **numbers)
    columns = logits.shape[-1]
    check(name, first >= 0, f"first is {first}; it must not be negative")
    check(name, 0 <= real <= columns, f"real is {real}, but the logits have {columns} columns")
    for cap in caps:
        check(name, cap >= 0, f"cap is {cap}; it must not be negative")
    check_shape(name, logits.shape[:-1], labels=labels, **numbers)
    check_type(name, [torch.float32], **numbers)


def _columns(labels: Tensor, first: int, real: int) -> tuple[Tensor, Tensor]:
    """Return the labels' columns (0 for other ranks' labels), and which labels are this rank's."""
    here = (labels >= first) & (labels < first + real)
    return (labels - first).masked_fill(~here, 0), here


def _row_chunks(logits: Tensor) -> Iterator[slice]:
    """Yield the ranges of rows of logits [n, v] that are processed at a time."""
    step = max(1, _AT_A_TIME // max(1, logits.shape[-1]))
    for start in range(0, logits.shape[0], step):
        yield slice(start, start + step)


def _three(logits: Tensor, labels: Tensor, *_: float) -> Three:
    """Return three empty tensors with a number for each token, fp32 (fp64 for fp64 logits)."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    a, b, c = (torch.empty(labels.shape, dtype=dtype, device=logits.device) for _ in range(3))
    return a, b, c


def _local(
    out: Three, logits: Tensor, labels: Tensor, first: int, real: int, cap: float = 0.0
) -> None:
    shape = labels.numel(), logits.shape[-1]
    _LOCAL(logits, *out, logits, labels.contiguous(), *shape, first, real, cap)


def local_reference(
    logits: Tensor, labels: Tensor, first: int, real: int, cap: float = 0.0
) -> Three:
    """Compute `local_pass` with torch's operators on a few rows at a time; fp64 for fp64 logits."""
    out = _three(logits, labels)
    rows = labels.numel()
    maxima, totals, targets = (x.view(rows) for x in out)
    flat = logits.view(rows, logits.shape[-1])
    labels = labels.reshape(rows)
    if real == 0:
        maxima.fill_(float("-inf"))
        totals.zero_()
        targets.zero_()
        return out
    for chunk in _row_chunks(flat):
        wide = flat[chunk, :real].to(maxima.dtype)
        if cap:
            wide = soft_cap(wide, cap)
        columns, here = _columns(labels[chunk], first, real)
        # For amax, NaN is the largest value; the kernel leaves NaNs to the sum.
        maximum = wide.nan_to_num(float("-inf"), float("inf"), float("-inf")).amax(-1)
        shift = maximum.masked_fill(maximum == float("-inf"), 0.0)
        target = wide.gather(-1, columns.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
        maxima[chunk] = maximum
        targets[chunk] = target
        totals[chunk] = (wide - shift.unsqueeze(-1)).exp_().sum(-1)
    return out


def _gradient(
    logits: Tensor,
    labels: Tensor,
    maximum: Tensor,
    total: Tensor,
    gradient: Tensor,
    first: int,
    real: int,
    cap: float = 0.0,
) -> None:
    rows = labels.numel()
    flat = (x.reshape(rows) for x in (labels, maximum, total, gradient))
    _GRADIENT(logits, logits, *flat, rows, logits.shape[-1], first, real, cap)
    _overwritten(logits)


def gradient_reference(
    logits: Tensor,
    labels: Tensor,
    maximum: Tensor,
    total: Tensor,
    gradient: Tensor,
    first: int,
    real: int,
    cap: float = 0.0,
) -> None:
    """Compute `gradient_` with torch's operators on a few rows at a time."""
    rows = labels.numel()
    flat = logits.view(rows, logits.shape[-1])
    labels, maximum, total, gradient = (x.reshape(rows) for x in (labels, maximum, total, gradient))
    scaled = gradient / total
    for chunk in _row_chunks(flat):
        columns, here = _columns(labels[chunk], first, real)
        wide = flat[chunk, :real].to(gradient.dtype)
        slope = None
        if cap:
            wide = soft_cap(wide, cap)
            slope = 1.0 - (wide / cap).square()
        wide = wide - maximum[chunk].unsqueeze(-1)
        out = wide.exp_().mul_(scaled[chunk].unsqueeze(-1))
        if real:
            at_label = gradient[chunk].masked_fill(~here, 0.0)
            out.scatter_add_(-1, columns.unsqueeze(-1), -at_label.unsqueeze(-1))
        if slope is not None:
            out.mul_(slope)
        flat[chunk, :real] = out.to(logits.dtype)
        flat[chunk, real:] = 0.0
    _overwritten(logits)


def _overwritten(logits: Tensor) -> None:
    """Make autograd refuse any backward pass that has saved these logits."""
    if not logits.is_inference():
        torch.autograd.graph.increment_version(logits)


local_pass = operator(
    "cross_entropy_local(Tensor logits, Tensor labels, int first, int real, float cap=0.) -> "
    "(Tensor, Tensor, Tensor)",
    _local,
    local_reference,
    _three,
    check=_check,
    work="loss",
)
"""Return (maximum, sum of exponentials, target logit) of one rank's part of the vocabulary, fp32
[..].

logits [.., v], contiguous, of the entries first, first + 1, ..., of which only the first `real`
exist; labels int64 [..], ids in the full vocabulary. With a cap other than 0, a logit x counts as
cap tanh(x / cap). The sum is over exp(logit - maximum); if no logit is above -inf, the maximum is
-inf and the sum 0. A NaN shows in the sum, never in the maximum. The target is 0 if the label is
another rank's. Has no gradient: see `gradient_`. Raises KernelError for other types, shapes or
layouts.
"""

gradient_ = operator(
    "cross_entropy_gradient_(Tensor(a!) logits, Tensor labels, Tensor maximum, Tensor total, "
    "Tensor gradient, int first, int real, float cap=0.) -> ()",
    _gradient,
    gradient_reference,
    check=_check,
    work="loss",
)
"""Overwrite the logits with the gradient of the losses, (exp(logit - maximum) / total - onehot) *
gradient[token].

maximum, total and gradient are fp32 [..]: the largest logit and the sum of exp(logit - maximum)
over the full vocabulary, and the losses' gradient; the others as in `local_pass`. Padding columns
get 0; a label of another rank subtracts nothing. With a cap, the gradient is multiplied by the
derivative of cap tanh(x / cap). The logits' version counter increases, so that a backward pass that
saved them fails.
"""


CHUNK = 16
"""Values that one lane adds up on a GPU: enough to outweigh its result, few enough to use all
lanes.
"""

_ADD_ROWS = Function("mk_add_rows", "ppppplllli")


def reference_(table: Tensor, rows: Tensor, values: Tensor, partial: Tensor | None = None) -> None:
    """Add values to rows with torch's operators.

    Each of torch's two ways to add has a fixed order on only one kind of device
    (torch.use_deterministic_algorithms).
    """
    total = table
    position = rows
    # each row is summed at the position of its first value
    if table.dtype != torch.float32:
        ordered = rows.sort().values
        total = table[ordered].float()
        position = torch.searchsorted(ordered, rows)
    if table.device.type == "cpu":
        total.index_add_(0, position, values.float())
    else:
        total.index_put_((position,), values.float(), accumulate=True)
    if total is not table:
        table[rows] = total[position].to(table.dtype)


def _check_rows(
    name: str, table: Tensor, rows: Tensor, values: Tensor, partial: Tensor | None
) -> None:
    check_beside(name, table, [torch.float32, torch.bfloat16], table=table)
    check(name, table.dim() == 2, f"table has {table.dim()} dimension(s); [rows, n] is needed")
    check_beside(name, table, [torch.int64, torch.int32], (rows.numel(),), rows=rows)
    check_beside(name, table, TYPES, (rows.numel(), table.shape[1]), values=values)


def _run(table: Tensor, rows: Tensor, values: Tensor, partial: Tensor | None) -> None:
    ordered, order = rows.to(torch.int32).sort(stable=True)  # half as many passes as over 64 bits
    if table.is_cpu and len(rows):
        least = int(ordered[0])
        most = int(ordered[-1])
        size = len(table)
        check(
            "add_rows_",
            least >= 0 and most < size,
            f"rows are {least} to {most}, but the table has {size}",
        )
    _ADD_ROWS(
        table,
        table,
        partial,
        values,
        ordered,
        order,
        len(rows),
        CHUNK,
        *table.shape,
        table.dtype != torch.float32,
        type_of=values,
    )


_add_rows_ = operator(
    "add_rows_(Tensor(a!) table, Tensor rows, Tensor values, Tensor(b!)? partial) -> ()",
    _run,
    reference_,
    check=_check_rows,
    work=lambda table, rows, values, _: Memory(
        values.nbytes + 2 * table.itemsize * values.numel(), 3, "embedding"
    ),
)


@torch.no_grad()
def add_rows_(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add each of the values to its row of the table; a row may occur several times.

    table   fp32 or bf16, contiguous  # [m, n]
    rows    int64 or int32, each at least 0 and less than m  # [count]
    values  fp32, fp16 or bf16  # [count, n]

    Sums are in fp32 and rounded to the table's format once. The order of additions depends on the
    rows alone, and on a CPU it is that of index_add_: the same bits every time on one kind of
    device. Nothing waits for the device, so the kernel on a GPU ignores rows outside the table.
    Raises KernelError for other types and shapes, and from the kernel on a CPU for rows outside the
    table; without a kernel torch raises its own error for these.
    """
    library = find(table.device.type)
    partial = None
    if library.handle is not None and library.target != "host":
        partial = values.new_empty(-(-len(rows) // CHUNK), 2, values.shape[-1], dtype=torch.float32)
    _add_rows_(table, rows.contiguous(), values.contiguous(), partial)
