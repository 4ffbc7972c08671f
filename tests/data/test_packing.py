"""Packed samples: no token lost or repeated, and little padding."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data import packed_dataset
from megatron.data.gpt_dataset import IndexRequest
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.packed_dataset import PackedDataset, build_packing
from tests.data.implementations import ascending, request_for
from tests.helpers.examples import examples
from tests.helpers.indexed import write_documents

PAD = 10**6


def write(prefix, sizes):
    write_documents(prefix, ascending(sizes), np.int32)


def dataset(
    prefix, num_samples, seq_length, *, mmap=True, seed=7, bounds=None, data_cache_path=None
):
    indexed = IndexedDataset(prefix, mmap=mmap)
    request = request_for(indexed, num_samples, seq_length, seed, bounds)
    return PackedDataset(indexed, request, pad_id=PAD, data_cache_path=data_cache_path)


def predictions_of(data, sample):
    """Return the pairs (token before, token predicted) that count in `sample`: those in a piece."""
    tokens = data[sample].tolist()
    pairs = []
    at = 0
    for length in data.segments(sample).tolist():
        pairs += list(zip(tokens[at : at + length - 1], tokens[at + 1 : at + length], strict=True))
        at += length
    assert set(tokens[at:]) <= {PAD} and len(tokens) == data.seq_length + 1
    return pairs


SIZES = st.lists(st.sampled_from([0, 1, 2]) | st.integers(0, 40), min_size=1, max_size=25).filter(
    lambda sizes: max(sizes) > 1
)


@pytest.mark.slow
@examples(10)
@given(
    sizes=SIZES,
    seq_length=st.integers(1, 30),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
    mmap=st.booleans(),
    block=st.sampled_from([1, 3, 1 << 20]),
)
def test_every_prediction_once_per_epoch(
    tmp_path_factory,
    sizes,
    seq_length,
    epochs,
    seed,
    mmap,
    block,
):
    prefix = tmp_path_factory.mktemp("packed") / "x"
    write(prefix, sizes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_dataset, "BLOCK", block)
        once = dataset(prefix, 1, seq_length, seed=seed, mmap=mmap)
    data = dataset(prefix, len(once) * (epochs - 1) + 1, seq_length, seed=seed, mmap=mmap)
    assert len(data) == epochs * len(once) and data.num_bins == len(once)
    starts = np.concatenate(([0], np.cumsum(sizes)))
    expected = [(t, t + 1) for a, b in pairwise(starts) for t in range(a, b - 1)]
    for epoch in range(epochs):
        samples = range(epoch * len(once), (epoch + 1) * len(once))
        assert sorted(p for sample in samples for p in predictions_of(data, sample)) == expected
        assert data.tokens_in(np.array(samples)) == data.tokens_per_epoch == len(expected)
    # Each token is in one piece; the first of a later piece also ends the piece before it in its
    # document.
    counts = Counter(t for sample in range(len(once)) for t in data[sample].tolist() if t != PAD)
    for start, size in zip(starts.tolist(), sizes, strict=False):
        for offset in range(size):
            shared = offset % seq_length == 0 and 0 < offset < size - 1
            assert counts[start + offset] == (0 if size == 1 else 2 if shared else 1)
    padding = sum(data[sample].tolist().count(PAD) for sample in range(len(once)))
    assert data.waste == pytest.approx(padding / (len(once) * (seq_length + 1)))


def test_order(tmp_path):
    """More epochs only add to the end, each in another order; a seed changes only the order."""
    write(tmp_path / "x", [5] * 20)

    def drawn(samples, seed=7):
        data = dataset(tmp_path / "x", samples, 4, seed=seed)
        return [data[i].tolist() for i in range(len(data))]

    short = drawn(20)
    long = drawn(75)
    other = drawn(20, seed=8)
    assert (len(short), len(long)) == (20, 80)
    assert short == long[:20] != long[20:40]
    assert short != other and sorted(short) == sorted(other)


def test_padding_is_under_one_percent():
    """Web pages, some very long."""
    random = np.random.RandomState(0)
    count = 40_000
    long = 2000 * (1 + random.pareto(1.3, count))
    drawn = np.where(random.rand(count) < 0.02, long, random.lognormal(5.8, 1.0, count))
    sizes = np.clip(drawn, 1, 2_000_000).astype(np.int32)
    tokens = int(sizes.sum(dtype=np.int64))
    arrays = build_packing(IndexRequest("p", "train", "1", 0, count, tokens, 1, 2048, 1, sizes))
    assert arrays["counts"][1] == tokens - count  # every size is at least 1
    lengths = np.minimum(sizes[arrays["pieces"][:, 0]] - arrays["pieces"][:, 1], 2049)
    filled = np.add.reduceat(lengths, arrays["bin_starts"][:-1])
    assert filled.max() <= 2049 and filled.mean() > 0.99 * 2049


def test_data_that_changed_under_its_cache(tmp_path):
    """Two of 200 documents differ, in bins that no spot check reads.

    The checksum of the sizes detects them. test_gpt_dataset.py changes all of the data.
    """
    sizes = [9] * 102 + [8, 10] + [9] * 96
    write(tmp_path / "x", [9] * 200)
    dataset(tmp_path / "x", 9, 10)
    write(tmp_path / "x", sizes)
    after = dataset(tmp_path / "x", 1, 10)
    assert len({p for i in range(len(after)) for p in predictions_of(after, i)}) == sum(
        sizes
    ) - len(sizes)
