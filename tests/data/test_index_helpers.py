"""Index loops: C++, numpy and a literal reading of each definition must agree."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.data import indexed_dataset
from megatron.data.datasets import samples_of_part
from megatron.errors import DataError
from tests.data import numpy_loops
from tests.data.implementations import IMPLEMENTATIONS, NEEDS_COMPILED, call


def test_a_checkout_that_was_not_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed_dataset, "compiled", None)
    with pytest.raises(DataError, match=r"pip install -e \."):
        indexed_dataset.build_blend_index(np.ones(1), 4)


# shuffle


def warmed_up(seed: int, draws: int) -> np.random.RandomState:
    """Return a generator in the middle of its words.

    It keeps half of a pair of normal numbers for the next call.
    """
    random = np.random.RandomState(seed)
    random.randint(2**32, size=draws, dtype=np.uint32)
    random.normal()
    return random


def same_state(one: np.random.RandomState, other: np.random.RandomState) -> bool:
    first: Any = one.get_state()
    second: Any = other.get_state()
    return first[0] == second[0] and (first[1] == second[1]).all() and first[2:] == second[2:]


@pytest.mark.slow
@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@given(
    count=st.integers(0, 12).flatmap(lambda k: st.integers(max(0, 2**k - 2), 2**k + 2))
    | st.integers(0, 9000),
    dtype=st.sampled_from([np.int32, np.uint32, np.int64, np.uint64]),
    seed=st.integers(0, 2**32 - 1),
    draws=st.integers(0, 700),
)
@example(count=2**16, dtype=np.int32, seed=1, draws=0)
@example(count=2**17 + 1, dtype=np.int64, seed=1, draws=623)
def test_shuffle(module: ModuleType, count: int, dtype: type, seed: int, draws: int) -> None:
    expected, found = np.arange(count).astype(dtype), np.arange(count).astype(dtype)
    ours, theirs = warmed_up(seed, draws), warmed_up(seed, draws)
    theirs.shuffle(expected)
    call(module, "shuffle", found, ours)
    assert found.tobytes() == expected.tobytes() and same_state(ours, theirs)


@NEEDS_COMPILED
@pytest.mark.parametrize(
    "last", [2**33 - 1, 2**33, 2**32 + 150, 2**32, 2**32 - 1, 2**31 + 3, 2**40 + 77]
)
def test_shuffle_draws_for_huge_arrays(last: int) -> None:
    """Draws for elements from 2^32 on take two words.

    A single randint draws like shuffle does there.
    """
    assert indexed_dataset.compiled is not None
    random = np.random.RandomState(5)
    before: Any = random.get_state()
    expected = [
        random.randint(0, place + 1, dtype=np.int64) for place in range(last, last - 300, -1)
    ]
    partners, (state, position) = indexed_dataset.compiled.shuffle_partners(
        last, 300, before[1], before[2]
    )
    after: Any = random.get_state()
    assert partners.tolist() == expected and (state == after[1]).all() and position == after[2]


# sample index


def walk(
    sizes: list[int], document_index: list[int], seq_length: int, num_samples: int
) -> list[tuple[int, int]]:
    """Find the place of token i * seq_length by listing the place of every token."""
    places = [
        (p, offset)
        for p, document in enumerate(document_index)
        for offset in range(sizes[document])
    ]
    return [(0, 0)] + [places[i * seq_length] for i in range(1, num_samples + 1)]


def build_samples(
    module: ModuleType,
    sizes: list[int],
    documents: list[int],
    seq_length: int,
    num_samples: int,
    **options: int,
) -> npt.NDArray[Any]:
    arrays = np.array(sizes, np.int32), np.array(documents, np.int32)
    result: npt.NDArray[Any] = call(
        module, "build_sample_index", *arrays, seq_length, num_samples, **options
    )
    return result


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@given(data=st.data(), block=st.integers(1, 5))
def test_sample_index(module: ModuleType, data: st.DataObject, block: int) -> None:
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    documents = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=200))
    seq_length = data.draw(st.integers(1, 7))
    tokens = sum(sizes[d] for d in documents)
    num_samples = data.draw(st.integers(0, max(0, (tokens - 1) // seq_length)))
    with pytest.MonkeyPatch.context() as patch:
        # of the numpy loop, which would otherwise take all at once
        patch.setattr(numpy_loops, "_BLOCK", block)
        rows = build_samples(module, sizes, documents, seq_length, num_samples)
    assert rows.dtype == np.int32 and rows.shape == (num_samples + 1, 2)
    assert [tuple(row) for row in rows.tolist()] == walk(sizes, documents, seq_length, num_samples)


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_sample_index_of_more_documents_than_int32(module: ModuleType) -> None:
    sizes, documents = [3, 0, 4], [2, 1, 0, 2]
    narrow = build_samples(module, sizes, documents, 2, 5, int32_max=4)
    wide = build_samples(module, sizes, documents, 2, 5, int32_max=3)
    assert narrow.dtype == np.int32 and wide.dtype == np.int64 and narrow.tolist() == wide.tolist()
    assert [tuple(row) for row in wide.tolist()] == walk(sizes, documents, 2, 5)


# blend


def build_blend(
    module: ModuleType, weights: list[float], size: int
) -> tuple[npt.NDArray, npt.NDArray]:
    which, sample = call(module, "build_blend_index", np.array(weights) / np.sum(weights), size)
    return which, sample


@pytest.mark.slow
@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=40), size=st.integers(0, 300))
def test_blend_index(module: ModuleType, weights: list[float], size: int) -> None:
    which, sample = build_blend(module, weights, size)
    assert which.dtype == np.uint8 and sample.dtype == np.int64
    shares = [w / float(np.sum(weights)) for w in weights]
    taken = [0] * len(weights)
    for k in range(size):  # the definition, one data set at a time
        errors = [share * max(k, 1) - count for share, count in zip(shares, taken, strict=True)]
        chosen = errors.index(max(errors))
        assert (which[k], sample[k]) == (chosen, taken[chosen])
        taken[chosen] += 1
    for share, count in zip(shares, taken, strict=True):
        assert count <= samples_of_part(size, share)


@NEEDS_COMPILED
@pytest.mark.parametrize("count", [1, 7, 8, 15, 16, 17, 24, 25, 31, 255, 256, 400])
def test_blend_of_many(count: int) -> None:
    """Equal and random weights cover all the ways of cutting the compiled loop into vectors."""
    for weights in (
        [1.0] * count,
        np.random.RandomState(count).gamma(0.5, size=count).clip(1e-3).tolist(),
    ):
        which, sample = build_blend(indexed_dataset.compiled, weights, 3 * count)
        expected_which, expected_sample = build_blend(numpy_loops, weights, 3 * count)
        assert which.dtype == expected_which.dtype == (np.uint8 if count <= 255 else np.int32)
        assert (
            which.tobytes() == expected_which.tobytes()
            and sample.tobytes() == expected_sample.tobytes()
        )
    assert sorted(build_blend(indexed_dataset.compiled, [1.0] * count, count)[0].tolist()) == list(
        range(count)
    )


# gather


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@given(
    code=st.sampled_from([1, 2, 3, 4, 5, 8]),
    seed=st.integers(0, 99),
    runs=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 12)), max_size=9),
)
def test_gather(module: ModuleType, code: int, runs: list[tuple[int, int]], seed: int) -> None:
    # the letters of Python's struct
    kind = {1: "B", 2: "b", 3: "<h", 4: "<i", 5: "<q", 8: "<H"}[code]
    data = np.frombuffer(np.random.RandomState(seed).bytes(90 + 12 * 8), np.uint8)
    expected: list[int] = []
    for start, length in runs:
        size = np.dtype(kind).itemsize
        parts = [data[start + size * i : start + size * (i + 1)].tobytes() for i in range(length)]
        expected += [int.from_bytes(part, "little", signed=kind[-1].islower()) for part in parts]
    starts, lengths = (np.array([run[i] for run in runs], np.int64) for i in (0, 1))
    out = np.zeros(len(expected), np.int64)
    assert module.gather_tokens(data, code, starts, lengths, out) == -1
    assert out.tolist() == expected


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("run", "fits"),
    [
        ((16, 1), True),
        ((17, 1), False),
        ((20, 0), True),
        ((21, 0), False),
        ((-1, 0), False),
        ((0, 6), False),
        ((0, 5), True),
        ((0, -1), False),
        ((2**62, 2**62), False),
        ((4, 2**62), False),
        ((-(2**63), 1), False),
    ],
)
def test_gather_stays_within_the_bytes(
    module: ModuleType, run: tuple[int, int], fits: bool
) -> None:
    data, out = np.arange(20, dtype=np.uint8), np.full(2 + max(0, min(run[1], 5)), -7, np.int64)
    arguments = data, 4, np.array([0, run[0]]), np.array([2, run[1]]), out
    outside = module.gather_tokens(*arguments)
    assert outside == (-1 if fits else 1) and (-7 not in out if fits else (out == -7).all())


# packing


def pack_by_the_rule(lengths: list[int], capacity: int) -> list[int]:
    """Pack by the plain rule, best fit decreasing: look at every bin for every piece."""
    room: list[int] = []
    since: list[int] = []  # the time when the bin got the room it has
    bins = [0] * len(lengths)
    for time, piece in enumerate(sorted(range(len(lengths)), key=lambda p: (-lengths[p], p))):
        fitting = [b for b in range(len(room)) if room[b] >= lengths[piece]]
        if fitting:
            chosen = min(fitting, key=lambda b: (room[b], -since[b]))
        else:
            chosen = len(room)
            room.append(capacity)
            since.append(time)
        room[chosen] -= lengths[piece]
        since[chosen] = time
        bins[piece] = chosen
    return bins


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@given(
    data=st.data(),
    capacity=st.sampled_from([1, 2, 3, 10, 63, 64, 65, 300, 5000]),
    wide=st.booleans(),
)
def test_best_fit(module: ModuleType, data: st.DataObject, capacity: int, wide: bool) -> None:
    length = st.integers(1, capacity) | st.integers(1, max(1, capacity // 4))
    lengths = data.draw(st.lists(length, max_size=120))
    array = np.array(lengths, np.int32)
    limit = max(0, len(lengths) - 1) if wide and lengths else len(lengths)
    bins, num_bins = call(module, "best_fit_pack", array, capacity, int32_max=limit)
    assert bins.dtype == (np.int64 if limit < len(lengths) else np.int32)
    assert bins.tolist() == pack_by_the_rule(lengths, capacity)
    filled = np.bincount(bins, weights=lengths, minlength=num_bins)
    assert len(filled) == num_bins and (filled <= capacity).all() and (filled > 0).all()
    starts, order = call(module, "group_by_bin", bins, num_bins)
    assert starts.dtype == np.int64 and order.dtype == bins.dtype and starts[-1] == len(lengths)
    for b in range(num_bins):
        assert order[starts[b] : starts[b + 1]].tolist() == [
            p for p in range(len(lengths)) if bins[p] == b
        ]


@NEEDS_COMPILED
@pytest.mark.parametrize("capacity", [100, 200, 1000, 5000, 300_000])
def test_best_fit_of_many(capacity: int) -> None:
    """Many rooms over many words of the bitmap come and go, compared with the numpy path."""
    random = np.random.RandomState(capacity)
    for lengths in (
        random.randint(1, capacity + 1, 3000),
        np.minimum(capacity, random.geometric(5 / capacity, 3000)),
        random.choice([1, capacity // 7, capacity // 3, capacity // 2 + 1, capacity - 1], 3000),
    ):
        sizes = lengths.astype(np.int32)
        bins, num_bins = call(indexed_dataset.compiled, "best_fit_pack", sizes, capacity)
        expected, expected_bins = call(numpy_loops, "best_fit_pack", sizes, capacity)
        assert bins.tobytes() == expected.tobytes() and num_bins == expected_bins


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_refuses(module: ModuleType) -> None:
    """Refuse arguments that would lead outside the arrays."""
    data, one, out = np.zeros(8, np.uint8), np.array([1]), np.full(2, -7, np.int64)
    for code, lengths in ((1, [3]), (1, [1, 1]), (6, [2])):
        with pytest.raises(ValueError):
            module.gather_tokens(data, code, one, np.array(lengths), out)
    wrong: list[tuple[str, tuple[Any, ...]]] = [
        *(
            ("best_fit_pack", (np.array(lengths, np.int32), capacity))
            for lengths, capacity in (([3, 0], 5), ([6], 5), ([1], 0))
        ),
        *(("group_by_bin", (np.array(bins, np.int32), 2)) for bins in ([0, 2], [-1, 0])),
        *(
            (
                "build_sample_index",
                (np.array([5], np.int32), np.array(documents, np.int32), seq_length, 1),
            )
            for documents, seq_length in (([0], 5), ([], 1))
        ),
    ]
    if module is not numpy_loops:
        wrong += [
            (
                "build_sample_index",
                (np.array([3, 4], np.int32), np.array([0, document], np.int32), 2, 3),
            )
            for document in (2, -1)
        ]
    for function, arguments in wrong:
        with pytest.raises(ValueError):
            call(module, function, *arguments)
    assert (out == -7).all()
