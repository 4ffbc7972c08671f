"""Orders that leave out some samples, against a count by hand."""

from __future__ import annotations

from itertools import count, islice, pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.gpt_dataset import BlendedDataset, MockDataset
from megatron.data.permutation import permute
from megatron.data.sampler import (
    Consumed,
    Ledger,
    MicroBatchStream,
    Share,
    are_ranges,
    around,
    is_consumed,
    merged,
    sample_order,
)
from megatron.errors import DataError
from tests.helpers.examples import examples

RANGES = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda r: (r[0], r[0] + r[1])), max_size=6
)


def left(ranges: list[tuple[int, int]]) -> set[int]:
    return {n for start, stop in ranges for n in range(start, stop)}


@given(ranges=RANGES)
def test_merged_ranges_hold_the_same_positions_apart(ranges: list[tuple[int, int]]) -> None:
    found = merged(ranges)
    assert left(list(found)) == left(ranges)
    assert all(a[1] < b[0] for a, b in pairwise(found)) and are_ranges([list(r) for r in found])


@given(ranges=RANGES, positions=st.lists(st.integers(0, 80), max_size=10))
def test_positions_are_counted_around_them(
    ranges: list[tuple[int, int]], positions: list[int]
) -> None:
    by_hand = list(islice((n for n in count() if n not in left(ranges)), 81))
    assert around(np.array(positions, np.int64), merged(ranges)).tolist() == [
        by_hand[p] for p in positions
    ]


def by_hand(kind: str, total: int, ranges: list[tuple[int, int]], number: int) -> list[int]:
    """Return the first samples of the order, one by one.

    After a single pass of `total`, the first ones come again.
    """
    kept = list(islice((n for n in count() if n not in left(ranges)), 2 * total))

    def sample(n: int) -> int:
        if kind == "cyclic":
            return int(permute(np.array([n % total]), total, n // total)[0])
        return n if n < total else sample(kept[n - total])

    return [sample(n) for n in kept[:number]]


@pytest.mark.slow
@examples(15)
@given(
    kind=st.sampled_from(["single", "cyclic"]),
    total=st.integers(61, 70),
    ranges=RANGES,
    dp=st.integers(1, 3),
    mbs=st.integers(1, 3),
)
def test_every_layout_goes_around_the_same_samples(
    kind: str, total: int, ranges: list[tuple[int, int]], dp: int, mbs: int
) -> None:
    """All layouts leave out the same samples, also at the end of a single pass.

    The pass keeps its length: the first samples replace those left out.
    """
    if len(left(ranges)) >= total:
        return
    steps = total // (dp * mbs)
    expected = by_hand(kind, total, ranges, steps * dp * mbs)
    order = sample_order(kind, total, ranges)
    order.check(total)
    assert order.indices(np.arange(len(expected))).tolist() == expected
    data = Numbered(total)
    streams = [MicroBatchStream(data, Share(mbs, r, dp), order=order) for r in range(dp)]
    taken = [stream.take(steps) for stream in streams]
    assert [
        int(t) for i in range(steps) for rank in taken for t in rank[i].tokens[:, 0]
    ] == expected
    # counted as consumed
    assert [b.first_sample for b in taken[0]] == [i * dp * mbs for i in range(steps)]


class Numbered(MockDataset):
    """Data set whose sample i begins with token i."""

    def __init__(self, total: int) -> None:
        super().__init__("train", total, 2, 1000, seed=1)

    def __getitem__(self, index: int, /) -> npt.NDArray[np.int64]:
        assert 0 <= index < self.num_samples
        return np.array([index, 0, 0], np.int64)


def test_nothing_left_is_an_error_and_not_an_endless_search() -> None:
    order = sample_order("single", 10, [(0, 4), (4, 12)])
    with pytest.raises(DataError, match=r"\b10\b"):
        order.check(1)
    assert sample_order("single", 10) == sample_order("single", 10, [(3, 3)])


def test_the_ledger_counts_what_is_left_out_and_keeps_it_over_a_roll_back() -> None:
    parts = [MockDataset("train", 80, 4, 50, seed=2) for _ in range(2)]
    for part, name in zip(parts, "ab", strict=True):
        part.name = name
    blend = BlendedDataset(parts, [1, 3], 80)
    whole = Ledger(blend, sample_order("single", 80), 48)
    assert "left_out" not in next(iter(whole.record().values()))

    def samples_of(positions: range) -> dict[str, int]:
        located = blend.by_source(np.array(positions, np.int64))
        return {source.name: len(numbers) for source, numbers in located}

    at_16 = Ledger(blend, sample_order("single", 80), 16).record()
    ranges = [(40, 48)]
    back = whole.rolled_back(ranges, 16, at_16, range(40, 48))
    assert {name: count.left_out for name, count in back.counts.items()} == samples_of(
        range(40, 48)
    )
    back.advance(64)
    taken = {name: samples_of(range(40))[name] + samples_of(range(48, 72))[name] for name in at_16}
    assert {name: count.samples for name, count in back.counts.items()} == taken
    again = back.rolled_back([*ranges, (60, 64)], 16, at_16, range(52, 56))
    assert sum(count.left_out for count in again.counts.values()) == 12
    record = again.record()
    assert all(map(is_consumed, record.values())) and not is_consumed({**at_16["a"], "left": 1})
    carried = Ledger(blend, sample_order("single", 80, [*ranges, (60, 64)]), 16, record)
    assert carried.counts == {name: Consumed(**fields) for name, fields in record.items()}
