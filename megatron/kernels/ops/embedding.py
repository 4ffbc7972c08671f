"""The gradient of an embedding table: values are added to the rows that were looked up, in a fixed
order.

Bytes moved for n values of e bytes and width w, which hit d different rows of a table of t bytes an
element: n w e in, d w t in and out. On a GPU a row that occurs in more than one chunk of values
costs 8 w bytes more for each of them: at most e = 2 and 16 values to a chunk, 25 percent. Values
are sorted by row first, 12 bytes of each are kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kernels.library import TYPES, Function, find
from megatron.kernels.operators import (
    check,
    check_beside,
    check_contiguous,
    check_shape,
    check_type,
    operator,
)
from megatron.kernels.work import Memory

CHUNK = 16
"""Values that one lane adds up on a GPU: enough to outweigh what it leaves, few enough to use all
lanes.
"""

_ADD_ROWS = Function("mk_add_rows", "ppppplllli")


def reference_(table: Tensor, rows: Tensor, values: Tensor, partial: Tensor | None = None) -> None:
    """Add values to rows with torch's operators.

    Each of the two ways to add has a fixed order on one kind of device only
    (torch.use_deterministic_algorithms).
    """
    total, place = table, rows
    # a row is summed where the first of its values lies in their order
    if table.dtype != torch.float32:
        ordered = rows.sort().values
        total, place = table[ordered].float(), torch.searchsorted(ordered, rows)
    if table.device.type == "cpu":
        total.index_add_(0, place, values.float())
    else:
        total.index_put_((place,), values.float(), accumulate=True)
    if total is not table:
        table[rows] = total[place].to(table.dtype)


def _check(name: str, table: Tensor, rows: Tensor, values: Tensor, partial: Tensor | None) -> None:
    check_type(name, [torch.float32, torch.bfloat16], table=table)
    check_beside(name, table, TYPES, values=values)
    check_beside(name, table, [torch.int64, torch.int32], rows=rows)
    check_contiguous(name, table=table)
    check(name, table.dim() == 2, f"table has {table.dim()} dimension(s); [rows, n] is needed")
    check_shape(name, (rows.numel(),), rows=rows)
    check_shape(name, (len(rows), table.shape[1]), values=values)


def _run(table: Tensor, rows: Tensor, values: Tensor, partial: Tensor | None) -> None:
    ordered, order = rows.to(torch.int32).sort(stable=True)  # half as many passes as over 64 bits
    if table.is_cpu and len(rows):
        least, most, size = int(ordered[0]), int(ordered[-1]), len(table)
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
    check=_check,
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

    Sums are in fp32 and rounded to the table's format once. Their order depends on the rows alone:
    the same bits every time on one kind of device, on a CPU those of index_add_. Nothing waits for
    the device, so a GPU ignores rows outside of the table; on a CPU they are an error. Raises
    KernelError.
    """
    found, partial = find(table.device.type), None
    if found.handle is not None and found.target != "host":
        partial = values.new_empty(-(-len(rows) // CHUNK), 2, values.shape[-1], dtype=torch.float32)
    _add_rows_(table, rows.contiguous(), values.contiguous(), partial)
