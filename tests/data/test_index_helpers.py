"""Index loops in C++ against a literal reading of each definition."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.data import gpt_dataset, indexed_dataset
from megatron.data.datasets import samples_of_component
from megatron.data.gpt_dataset import IndexRequest, build_index
from megatron.data.indexed_dataset import Shuffled
from megatron.data.permutation import permute
from tests.data.implementations import call

# shuffle


def warmed_up(seed, draws):
    """Return a generator in the middle of its words.

    It keeps half of a pair of normal numbers for the next call.
    """
    random = np.random.RandomState(seed)
    random.randint(2**32, size=draws, dtype=np.uint32)
    random.normal()
    return random


@given(
    count=st.integers(0, 12).flatmap(lambda k: st.integers(max(0, 2**k - 2), 2**k + 2))
    | st.integers(0, 9000),
    dtype=st.sampled_from([np.int32, np.uint32, np.int64, np.uint64]),
    seed=st.integers(0, 2**32 - 1),
    draws=st.integers(0, 700),
)
@example(count=2**16, dtype=np.int32, seed=1, draws=0)
@example(count=2**17 + 1, dtype=np.int64, seed=1, draws=623)
def test_shuffle(count, dtype, seed, draws):
    expected = np.arange(count).astype(dtype)
    shuffled = np.arange(count).astype(dtype)
    ours = warmed_up(seed, draws)
    reference = warmed_up(seed, draws)
    reference.shuffle(expected)
    call("shuffle", shuffled, ours)
    assert shuffled.tobytes() == expected.tobytes()
    np.testing.assert_equal(ours.get_state(), reference.get_state())


@pytest.mark.parametrize(
    "last", [2**33 - 1, 2**33, 2**32 + 150, 2**32, 2**32 - 1, 2**31 + 3, 2**40 + 77]
)
def test_shuffle_draws_for_huge_arrays(last):
    """Draws for elements from 2^32 on take two words.

    A single randint draws like shuffle does there.
    """
    random = np.random.RandomState(5)
    before = random.get_state()
    expected = [
        random.randint(0, index + 1, dtype=np.int64) for index in range(last, last - 300, -1)
    ]
    partners, (state, position) = indexed_dataset.compiled.shuffle_partners(
        last, 300, before[1], before[2]
    )
    after = random.get_state()
    assert partners.tolist() == expected and (state == after[1]).all() and position == after[2]


def test_shuffle_index_of_more_samples_than_uint32(monkeypatch):
    """Numbers need 64 bits from 2^32 - 2 on, as in Megatron's source; the order stays the same."""
    assert np.iinfo(np.uint32).max - 1 == gpt_dataset._UINT32_LIMIT
    sizes = np.array([4000, 5000, 1], np.int32)
    request = IndexRequest("p", "train", "1", 0, 3, 9001, 9000, 1, 3, sizes)
    orders = []
    for limit, dtype in ((9001, np.uint32), (9000, np.int64)):
        monkeypatch.setattr(gpt_dataset, "_UINT32_LIMIT", limit)
        orders.append(build_index(request)["shuffle_idx"])
        assert orders[-1].dtype == dtype
    assert len(orders[0]) == 9000 and orders[0].tolist() == orders[1].tolist()


# sample index


@given(data=st.data(), wide=st.booleans())
def test_sample_index(data, wide):
    """The reference lists the place of every token."""
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    documents = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=200))
    seq_length = data.draw(st.integers(1, 7))
    places = [(p, offset) for p, d in enumerate(documents) for offset in range(sizes[d])]
    num_samples = data.draw(st.integers(0, max(0, (len(places) - 1) // seq_length)))
    unaligned = np.zeros(4 * len(sizes) + 2, np.uint8)[2:].view(np.int32)  # as in an .idx file
    unaligned[:] = sizes
    arguments = unaligned, np.array(documents, np.int32), seq_length, num_samples
    rows = call("build_sample_index", *arguments, int32_max=len(documents) - wide)
    assert rows.dtype == (np.int64 if wide else np.int32)
    expected = [(0, 0), *(places[i * seq_length] for i in range(1, num_samples + 1))]
    assert [tuple(row) for row in rows.tolist()] == expected


# blend


@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=40), size=st.integers(0, 300))
@example(weights=[1.0] * 256, size=512)
@example(weights=[1.0] * 400, size=800)
def test_blend_index(weights, size):
    """The reference is the definition, one sample at a time."""
    check_blend(np.array(weights) / np.sum(weights), size)


@pytest.mark.parametrize("count", [7, 8, 15, 16, 17, 24, 25, 31, 255])
def test_blend_of_many(count):
    """Equal and random weights cover all the ways of cutting the loop into vectors."""
    check_blend(np.full(count, 1 / count), 3 * count)
    weights = np.random.RandomState(count).gamma(0.5, size=count).clip(1e-3)
    check_blend(weights / weights.sum(), 3 * count)


def check_blend(shares, size):
    which, sample = call("build_blend_index", shares, size)
    assert which.dtype == (np.uint8 if len(shares) <= 255 else np.int32)
    assert sample.dtype == np.int64
    counts = np.zeros(len(shares))
    for k in range(size):
        chosen = np.argmax(shares * max(k, 1) - counts)  # the first of equal ones
        assert (which[k], sample[k]) == (chosen, counts[chosen])
        counts[chosen] += 1
    for share, count in zip(shares, counts, strict=True):
        assert count <= samples_of_component(size, share)


# gather


FIVE = np.arange(5, dtype=np.int32)  # two sequences, of 3 and 2 tokens


def gather(slice_, code=4, sizes=(3, 2), pointers=(0, 12), places=None):
    """Gather the first token of FIVE and a slice; return (done, out, which was full of -7)."""
    sequence, offset, length = slice_
    out = np.full(1 + max(0, min(length, 5)) if places is None else places, -7, np.int64)
    slices = np.array([0, sequence]), np.array([0, offset]), np.array([1, length])
    index = np.array(sizes, np.int32), np.array(pointers, np.int64)
    gather_slices = indexed_dataset.compiled.gather_slices
    return gather_slices(FIVE.view(np.uint8), code, *index, *slices, out), out.tolist()


@pytest.mark.parametrize(
    ("slice_", "tokens"),
    [
        ((0, 0, 3), [0, 0, 1, 2]),
        ((0, 2, 1), [0, 2]),
        ((0, 3, 0), [0]),
        ((0, 2, 2), None),
        ((0, 4, 0), None),
        ((1, 1, 1), [0, 4]),
        ((1, 1, 2), None),
        ((1, -1, 2), None),
        ((1, 1, -1), None),
        ((2, 0, 0), None),
        ((-1, 0, 1), None),
        ((1, 2**62, 2**62), None),
        ((-(2**63), 0, 1), None),
    ],
)
def test_gather_stays_within_the_sequences(slice_, tokens):
    done, out = gather(slice_)
    assert done == (tokens is not None)
    assert out == tokens or (tokens is None and set(out) == {-7})


@pytest.mark.parametrize(
    "wrong",
    [
        dict(sizes=(3, 3)),
        dict(sizes=(4, 2)),
        dict(sizes=(3, -1), pointers=(0, 24)),
        dict(pointers=(0, 16)),
        dict(pointers=(0, 24)),
        dict(pointers=(0, -(2**63))),
        dict(pointers=(-(2**63), 12)),
        dict(pointers=(2, 14)),
        dict(code=5),
        dict(code=6),
        dict(places=3),
    ],
)
def test_gather_refuses_a_damaged_index(wrong):
    done, out = gather((1, 0, 1), **wrong)
    assert not done and set(out) == {-7}


def test_gather_reads_arrays_that_are_not_aligned():
    raw = np.zeros(8 * 4 + 1, np.uint8)[1:]
    sizes = raw[:8].view(np.int32)
    pointers = raw[8:24].view(np.int64)
    sizes[:] = 3, 2
    pointers[:] = 0, 12
    out = np.empty(2, np.int64)
    slices = np.array([1], np.int32), np.array([0]), np.array([2])
    gather_slices = indexed_dataset.compiled.gather_slices
    assert gather_slices(FIVE.view(np.uint8), 4, sizes, pointers, *slices, out)
    assert out.tolist() == [3, 4]


# documents of a sample


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=200),
    key=st.integers(0, 2**64 - 1),
    stride=st.integers(1, 70),
    data=st.data(),
)
def test_documents_between(sizes, key, stride, data):
    first = data.draw(st.integers(0, len(sizes) - 1))
    count = data.draw(st.integers(1, len(sizes) - first))
    order = (first + permute(np.arange(count), count, key)).tolist()
    line = [(document, i) for document in order for i in range(sizes[document])]
    before = [0, *accumulate(sizes[document] for document in order)]
    array = np.array(sizes, np.int32)
    documents = Shuffled(first, count, key)
    starts = indexed_dataset.token_starts(array, documents, stride)
    assert starts.tolist() == [*before[:-1:stride], before[-1]]
    begin = data.draw(st.integers(0, len(line)))
    end = data.draw(st.integers(begin, len(line)))
    slices = indexed_dataset.documents_between(array, documents, starts, stride, begin, end)
    triples = list(zip(*map(np.ndarray.tolist, slices), strict=True))
    assert [(d, o + i) for d, o, n in triples for i in range(n)] == line[begin:end]
    assert len({d for d, _, _ in triples}) == len(triples) and all(n for _, _, n in triples)


# packing


def pack_by_the_rule(lengths, capacity):
    """Pack by the plain rule, best fit decreasing: look at every bin for every piece."""
    room = np.full(len(lengths), capacity)
    since = np.zeros(len(lengths))  # the time when the bin got the room it has
    bins = [0] * len(lengths)
    opened = 0
    for time, piece in enumerate(np.argsort(-lengths, kind="stable").tolist()):
        fitting = np.flatnonzero(room[:opened] >= lengths[piece])
        if len(fitting):
            fitting = fitting[room[fitting] == room[fitting].min()]
            chosen = int(fitting[since[fitting].argmax()])
        else:
            chosen = opened
            opened += 1
        room[chosen] -= lengths[piece]
        since[chosen] = time
        bins[piece] = chosen
    return bins


@given(
    data=st.data(),
    capacity=st.sampled_from([1, 2, 3, 10, 63, 64, 65, 300, 5000]),
    wide=st.booleans(),
)
def test_best_fit(data, capacity, wide):
    length = st.integers(1, capacity) | st.integers(1, max(1, capacity // 4))
    lengths = data.draw(st.lists(length, max_size=120))
    array = np.array(lengths, np.int32)
    limit = max(0, len(lengths) - 1) if wide and lengths else len(lengths)
    bins, num_bins = call("best_fit_pack", array, capacity, int32_max=limit)
    assert bins.dtype == (np.int64 if limit < len(lengths) else np.int32)
    assert bins.tolist() == pack_by_the_rule(array, capacity)
    assert num_bins == len({*bins.tolist()})
    starts, order = call("group_by_bin", bins, num_bins)
    assert starts.dtype == np.int64 and order.dtype == bins.dtype and starts[-1] == len(lengths)
    for b in range(num_bins):
        assert order[starts[b] : starts[b + 1]].tolist() == np.flatnonzero(bins == b).tolist()


@pytest.mark.parametrize("capacity", [200, 5000, 300_000])
def test_best_fit_of_many(capacity):
    """Many rooms over many words of the bitmap come and go."""
    random = np.random.RandomState(capacity)
    for lengths in (
        random.randint(1, capacity + 1, 3000),
        np.minimum(capacity, random.geometric(5 / capacity, 3000)),
        random.choice([1, capacity // 7, capacity // 3, capacity // 2 + 1, capacity - 1], 3000),
    ):
        bins, _ = call("best_fit_pack", lengths.astype(np.int32), capacity)
        assert bins.tolist() == pack_by_the_rule(lengths, capacity)


def test_refuses():
    """Refuse arguments that would lead outside the arrays."""

    def refused(function, *arguments):
        with pytest.raises(ValueError):
            call(function, *arguments)

    for sizes, capacity in (([3, 0], 5), ([6], 5)):
        refused("best_fit_pack", np.array(sizes, np.int32), capacity)
    for shuffled in (Shuffled(0, 3, 1), Shuffled(2, 1, 1), Shuffled(-1, 2, 1), Shuffled(0, 0, 1)):
        refused("token_starts", np.array([1, 2], np.int32), shuffled, 2)
    refused("group_by_bin", np.array([0, 2], np.int32), 2)
    for sizes, documents, seq_length, samples in (
        ([5], [0], 5, 1),
        ([3, 4], [0, 2], 2, 3),
    ):
        arrays = np.array(sizes, np.int32), np.array(documents, np.int32)
        refused("build_sample_index", *arrays, seq_length, samples)
