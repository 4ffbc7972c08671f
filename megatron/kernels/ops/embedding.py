"""The gradient of a table of embeddings: values are added to the rows that were looked up, in a fixed order.

Bytes moved for n values of e bytes and width w, which hit d different rows of a table of t bytes an element: n w e in,
d w t in and out. On a GPU a row that occurs in more than one chunk of values costs 8 w bytes more for each of them: at
most e = 2 and 16 values to a chunk, 25 percent. Values are sorted by row before, 12 bytes of each are kept.
"""
from __future__ import annotations

import torch

from megatron.kernels.checks import check, check_columns, check_device, check_shape, check_type
from megatron.kernels.library import Function, available, find
from megatron.kernels.register import operator
from megatron.kernels.work import Memory

CHUNK = 16
"""Values that one lane adds up on a GPU: enough to be long beside what it leaves, few enough to fill it with lanes."""

_ADD_ROWS = Function("mk_add_rows", "ppppplllli")


def reference_(table: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """The same in torch's operators: what serves where there is no kernel.

    Each of the two ways to add has a fixed order on one kind of device only (torch.use_deterministic_algorithms).
    """
    total, place = table, rows
    if table.dtype != torch.float32:  # a row is summed where the first of its values lies in their order
        ordered = rows.sort().values
        total, place = table[ordered].float(), torch.searchsorted(ordered, rows)
    if table.device.type == "cpu":
        total.index_add_(0, place, values.float())
    else:
        total.index_put_((place,), values.float(), accumulate=True)
    if total is not table:
        table[rows] = total[place].to(table.dtype)


def _run(table: torch.Tensor, rows: torch.Tensor, values: torch.Tensor, partial: torch.Tensor | None) -> None:
    name = "add_rows_"
    check_type(name, values=values)
    check_device(name, table=table, rows=rows, values=values)
    formats = (torch.float32, torch.bfloat16)
    check(name, table.dtype in formats, f"table is {table.dtype}; it must be float32 or bfloat16")
    check(name, table.dim() == 2 and table.is_contiguous(), f"table of shape {list(table.shape)} and strides "
          f"{table.stride()} must be [rows, n] and contiguous")  # fmt: skip
    check_columns(name, "table", table)
    check(name, len(table) < 2**31, f"table has {len(table)} rows; fewer than 2^31 are needed")
    check(name, rows.dtype in (torch.int64, torch.int32), f"rows is {rows.dtype}; it must be int64 or int32")
    check_shape(name, "rows", rows, (rows.numel(),))
    check_shape(name, "values", values, (len(rows), table.shape[1]))
    check(name, values.is_contiguous(), f"values of strides {values.stride()} is not contiguous")
    if not available(table.device):
        return reference_(table, rows, values)
    ordered, order = rows.to(torch.int32).sort(stable=True)  # half as many passes as over 64 bits
    if table.is_cpu and len(rows):
        least, most = int(ordered[0]), int(ordered[-1])
        check(name, least >= 0 and most < len(table), f"rows are {least} to {most}, but the table has {len(table)}")
    _ADD_ROWS(
        table, table, partial, values, ordered, order, len(rows), CHUNK, *table.shape, table.dtype != torch.float32,
        type_of=values,
    )


_add_rows_ = operator(
    "add_rows_(Tensor(a!) table, Tensor rows, Tensor values, Tensor(b!)? partial) -> ()", _run, lambda *_: None,
    work=lambda table, rows, values, _: Memory(values.nbytes + 2 * table.itemsize * values.numel(), 3, "embedding"),
)


@torch.no_grad()
def add_rows_(table: torch.Tensor, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Add each of the values to its row of the table; a row may occur several times.

    table   fp32 or bf16, contiguous  # [m, n]
    rows    int64 or int32, each at least 0 and less than m  # [count]
    values  fp32, fp16 or bf16  # [count, n]

    Sums are in fp32 and rounded to the table's format once. Their order depends on the rows alone: the same bits every
    time on one kind of device, on a CPU those of index_add_. Nothing waits for the device, so that a GPU leaves out
    rows which the table has not; on a CPU they are an error. Raises KernelError.
    """
    found, partial = find(table.device.type), None
    if found.handle is not None and found.target != "host":
        partial = values.new_empty(-(-len(rows) // CHUNK), 2, values.shape[-1], dtype=torch.float32)
    _add_rows_(table, rows, values.contiguous(), partial)
