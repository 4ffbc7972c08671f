"""Gradients of a table's rows: sums against float64, runs of any length, and repeatable bits."""

import pytest
import torch
from hypothesis import strategies as st

from megatron.kernels.ops.vocabulary import CHUNK, add_rows_, reference_
from tests.kernels.numerics.reference import (
    SIMULATED,
    assert_close,
    devices,
    drawn,
    moved_on,
    random,
    refused,
)

tables = pytest.mark.parametrize("table_dtype", [torch.float32, torch.bfloat16])

# Runs within a chunk of values, up to its end, over its end, over several chunks, and over more
# than one block adds up at a time.
RUNS = st.lists(
    st.sampled_from([1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 5 * CHUNK + 7, 18 * CHUNK]),
    max_size=8,
)
# Widths of one column per lane, of packs, and of each layout of the launcher.
WIDTHS = st.sampled_from([1, 7, 8, 20, 64, 65, 72, 128, 264, *([] if SIMULATED else [768, 1032])])


def rows_of(runs, height, seed):
    """Return each run's row repeated by its length, in random order.

    Some rows may have two runs.
    """
    generator = torch.Generator().manual_seed(seed)
    owners = torch.randint(height, (len(runs),), generator=generator)
    rows = owners.repeat_interleave(torch.tensor(runs, dtype=torch.int64))
    return rows[torch.randperm(len(rows), generator=generator)]


@tables
@drawn(
    runs=RUNS,
    width=WIDTHS,
    height=st.sampled_from([9, 40]),
    moved=st.booleans(),
)
def test_sums(device, dtype, table_dtype, runs, width, height, moved, seed):
    """Sums of n additions in fp32 are off by at most n 2^-24 of the sum of magnitudes.

    Source: Higham, 2002, section 3.1.
    """
    rows = rows_of(runs, height, seed)
    copy = moved_on if moved else torch.clone
    values = copy(random((len(rows), width), dtype, device, seed))
    table = random((height, width), table_dtype, device, 3)
    wide = table.double().cpu()
    terms = values.double().cpu()
    size = wide.abs().index_add_(0, rows, terms.abs())
    wide.index_add_(0, rows, terms)
    adds = [add_rows_] * 2 + ([] if SIMULATED else [reference_] * 2)
    results = [copy(table) for _ in adds]
    for i, (add, sums) in enumerate(zip(adds, results, strict=True)):
        add(sums, rows.to(device), values)
        assert_close(sums, wide, table_dtype, 2.0**-24 * (len(rows) + 1) * size)
        # The same bits every time, and on a CPU with a library and without one.
        assert torch.equal(sums, results[0 if device == "cpu" else i // 2 * 2])


@devices
@tables
def test_rows_are_rounded_once(device, table_dtype):
    """Rows are rounded once.

    256 ones are 256; added one by one in bf16, of 8 bits, those after the first 256 would all be
    lost.
    """
    rows = torch.tensor([4, 1] * 512 + [3], device=device)
    for add in (add_rows_, reference_):
        table = torch.zeros(5, 8, dtype=table_dtype, device=device)
        add(table, rows, torch.ones(1025, 8, dtype=torch.bfloat16, device=device))
        add(table, rows[:1], torch.full((1, 8), 8.0, dtype=torch.bfloat16, device=device))
        assert table[:, 0].tolist() == [0, 512, 0, 1, 520] and bool((table == table[:, :1]).all())


@pytest.mark.gpu
def test_rows_that_the_table_has_not_are_left_out():
    table = torch.zeros(3, 8, device="cuda")
    rows = torch.tensor([-1, 1, 3, 1] + [2**31 - 1] * 2 * CHUNK, device="cuda")
    add_rows_(table, rows, torch.ones(len(rows), 8, device="cuda"))
    assert table[:, 0].tolist() == [0, 2, 0]


def test_what_is_refused():
    table = torch.zeros(3, 8)
    rows = torch.tensor([0, 2])
    values = torch.zeros(2, 8)
    refused(lambda: add_rows_(table, rows + 1, values), 1, 3)
    refused(lambda: add_rows_(table, rows - 1, values), -1, 3)
    refused(lambda: add_rows_(table.half(), rows, values), "table", "float16")
    refused(lambda: add_rows_(table.t(), rows, values[:, :3]), "table", "contiguous")
    refused(lambda: add_rows_(table, rows.double(), values), "rows", "float64")
    refused(lambda: add_rows_(table, rows, values.double()), "values", "float64")
    refused(lambda: add_rows_(table, rows, values[:, :4]), "values", [2, 4], [2, 8])
    refused(lambda: add_rows_(table, rows[None], values), "rows", [1, 2])
