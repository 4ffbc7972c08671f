"""Gradients of a table's rows: sums against float64, runs of any length, and repeatable bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.kernels.ops.vocabulary import CHUNK, add_rows_, reference_
from tests.kernels.numerics.reference import (
    EXAMPLES,
    SIMULATED,
    assert_close,
    devices,
    moved_on,
    random,
    refused,
    types,
    without_simulator,
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


@devices
@types
@tables
@EXAMPLES
@given(
    runs=RUNS,
    width=WIDTHS,
    height=st.sampled_from([9, 40]),
    moved=st.booleans(),
    seed=st.integers(0, 99),
)
def test_sums(
    device,
    dtype,
    table_dtype,
    runs,
    width,
    height,
    moved,
    seed,
):
    """Sums of n additions in fp32 are off by at most n 2^-24 of the sum of magnitudes.

    Source: Higham, 2002, section 3.1.
    """
    rows = rows_of(runs, height, seed)
    values, table = (
        random((len(rows), width), dtype, device, seed),
        random((height, width), table_dtype, device, 3),
    )
    values, table = (moved_on(values), moved_on(table)) if moved else (values, table)
    wide, terms = table.double().cpu(), values.double().cpu()
    size = wide.abs().index_add_(0, rows, terms.abs())
    wide.index_add_(0, rows, terms)
    for add in (add_rows_,) if SIMULATED else (add_rows_, reference_):
        found = table.clone() if not moved else moved_on(table)
        add(found, rows.to(device), values)
        assert_close(found, wide, table_dtype, 2.0**-24 * (len(rows) + 1) * size)


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


@devices
def test_the_same_bits_every_time(device):
    rows = rows_of([1500 if not SIMULATED else 100, 700, 1, 20, 3], 4, 0).to(device)
    values = random((len(rows), 40), torch.float32, device, 1)
    for add in (add_rows_, reference_):
        found = []
        for _ in range(5):
            table = random((4, 40), torch.float32, device, 2)
            add(table, rows, values)
            found.append(table)
        assert all(torch.equal(table, found[0]) for table in found)


@without_simulator
@tables
@types
def test_a_cpu_has_the_bits_of_torch(dtype, table_dtype):
    """A run on a CPU gives the same bits with a library and without one."""
    for width in (5, 8, 96):
        rows, tables = (
            rows_of([300, 40, 40, 1], 6, width),
            [random((6, width), table_dtype, "cpu", 1) for _ in "ab"],
        )
        values = random((len(rows), width), dtype, "cpu", 2)
        add_rows_(tables[0], rows, values)
        reference_(tables[1], rows, values)
        assert torch.equal(*tables)


@pytest.mark.gpu
def test_rows_that_the_table_has_not_are_left_out():
    table = torch.zeros(3, 8, device="cuda")
    rows = torch.tensor([-1, 1, 3, 1] + [2**31 - 1] * 2 * CHUNK, device="cuda")
    add_rows_(table, rows, torch.ones(len(rows), 8, device="cuda"))
    assert table[:, 0].tolist() == [0, 2, 0]


def test_what_is_refused():
    table, rows, values = torch.zeros(3, 8), torch.tensor([0, 2]), torch.zeros(2, 8)
    refused(lambda: add_rows_(table, rows + 1, values), 1, 3)
    refused(lambda: add_rows_(table, rows - 1, values), -1, 3)
    refused(lambda: add_rows_(table.half(), rows, values), "table", "float16")
    refused(lambda: add_rows_(table.t(), rows, values[:, :3]), "table", "contiguous")
    refused(lambda: add_rows_(table, rows.double(), values), "rows", "float64")
    refused(lambda: add_rows_(table, rows, values.double()), "values", "float64")
    refused(lambda: add_rows_(table, rows, values[:, :4]), "values", [2, 4], [2, 8])
    refused(lambda: add_rows_(table, rows[None], values), "rows", [1, 2])
