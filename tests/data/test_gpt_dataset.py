"""Samples and their order, against a plain reading of the format: join, cut, shuffle."""

import hashlib
import struct

import numpy as np
import pytest

from megatron.data.gpt_dataset import BlendedDataset, GPTDataset, IndexRequest
from megatron.data.index_cache import CacheEntry
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.packed_dataset import PackedDataset
from megatron.errors import DataError
from tests.data.implementations import ascending, request_for
from tests.data.struct_format import packed
from tests.helpers.indexed import write_documents


def write(prefix, sizes, first_token=0):
    """Write documents of these sizes with ascending tokens, and return them."""
    documents = ascending(sizes, first_token)
    write_documents(prefix, documents, np.int32)
    return documents


def expected_samples(documents, seq_length, seed):
    """Return the samples of one epoch in draw order; orders of more: test_megatron_core.py."""
    random = np.random.RandomState(seed)
    order = np.arange(len(documents))
    random.shuffle(order)
    stream = [token for document in order for token in documents[document]]
    starts = np.arange(0, len(stream) - seq_length, seq_length)
    random.shuffle(starts)
    return [stream[start : start + seq_length + 1] for start in starts]


def dataset(prefix, num_samples, seq_length):
    indexed = IndexedDataset(prefix)
    return GPTDataset(indexed, request_for(indexed, num_samples, seq_length, 7))


def test_cache_names(tmp_path):
    request = IndexRequest(
        "data/c_text_document",
        "train",
        "969, 30, 1",
        0,
        9,
        100,
        20,
        10,
        1234,
        np.empty(0, np.int32),
    )
    text = (
        "GPT Dataset\n\nData prefix data/c_text_document\nDataset name train\nNumber of samples "
        "20\nNumber of epochs 3\nSequence length 10\nRandom seed 1234\nSplit 969, 30, 1\n"
    )
    assert request.description == text
    # by coreutils' md5sum
    assert CacheEntry(tmp_path, text, ()).key == "080d8f8952a5415a447540cfde4092e1"
    write(tmp_path / "c", [30, 30])
    built = dataset(tmp_path / "c", 5, 10)
    key = hashlib.md5(built.description.encode()).hexdigest()
    cache = tmp_path / "index-cache"
    dtypes = {"doc_idx": np.int32, "sample_idx": np.int32, "shuffle_idx": np.uint32}
    assert sorted(p.name for p in cache.iterdir()) == [
        f"{key}.dsc",
        *(f"{key}_{name}.npy" for name in dtypes),
    ]
    assert (cache / f"{key}.dsc").read_text().startswith(built.description)
    assert {name: np.load(cache / f"{key}_{name}.npy").dtype for name in dtypes} == dtypes


@pytest.mark.parametrize("packed_samples", [True, False])
@pytest.mark.parametrize("size", [-4, 9])
def test_sizes_that_cannot_be_right_are_found_before_an_index_is_built(
    tmp_path, size, packed_samples
):
    """Impossible sizes are found before an index is built.

    All sizes are read then, because checks of the ends miss a number in the middle.
    """
    data, index = packed([[[1] * 8], [[2] * 8], [[3] * 8], [[4] * 8]], "<u2")
    at = 34 + 4  # of the second size
    (tmp_path / "a.bin").write_bytes(data)
    (tmp_path / "a.idx").write_bytes(index[:at] + struct.pack("<i", size) + index[at + 4 :])
    indexed = IndexedDataset(tmp_path / "a")
    request = IndexRequest(str(tmp_path / "a"), "train", "1", 0, 4, 32, 3, 5, 1, indexed.sizes)
    with pytest.raises(DataError, match=rf"a\.idx.* {at}\b.* {size}\b"):
        (PackedDataset if packed_samples else GPTDataset)(indexed, request)


def test_a_damaged_index_is_named(tmp_path):
    write(tmp_path / "x", [30, 30])
    built = dataset(tmp_path / "x", 5, 10)
    sample = int(built._shuffle[2])
    for row in ([1, 25], [0, 0], [7, 3], [-3, 0]):
        rows = np.array(built._rows)
        rows[sample] = row
        damaged = dataset(tmp_path / "x", 5, 10)
        damaged._rows = rows
        with pytest.raises(DataError, match=f"{tmp_path}/x.* 2 .*--data-cache-path"):
            damaged[2]
    built._documents = np.array([0, 99], np.int32)
    with pytest.raises(DataError, match="--data-cache-path"):
        [built[i] for i in range(5)]


@pytest.mark.parametrize("sizes", [[40, 60], [50, 50, 20]])
def test_data_that_changed_under_its_cache(tmp_path, sizes):
    write(tmp_path / "x", [10, 50, 40])
    before = dataset(tmp_path / "x", 9, 10)
    documents = write(tmp_path / "x", sizes)
    after = dataset(tmp_path / "x", 9, 10)
    assert before.description == after.description or sizes == [50, 50, 20]
    assert [after[i].tolist() for i in range(len(after))] == expected_samples(documents, 10, 7)


def test_blend(tmp_path):
    first = write(tmp_path / "a", [40, 33])
    second = write(tmp_path / "b", [90], first_token=1000)
    sources = [dataset(tmp_path / "a", 9, 8), dataset(tmp_path / "b", 5, 8)]
    cache = tmp_path / "cache"
    for path in (None, cache, cache):  # in memory, written, read
        blend = BlendedDataset(sources, [2, 1], 12, data_cache_path=path)
        a = iter(expected_samples(first, 8, 7))
        b = iter(expected_samples(second, 8, 7))
        # errors of (2/3, 1/3): k=0 a; k=1: -1/3, 1/3 b; k=2: 1/3, -1/3 a; then the pattern a, b, a
        # again
        assert [blend[i].tolist() for i in range(12)] == [
            next(b if i % 3 == 1 else a) for i in range(12)
        ]
    # _index and _sample_index
    assert len(list(cache.glob("*_index.npy"))) == 2 and len(blend) == 12
    assert (
        blend.where(1, 3) == sources[1].where(0, 3) != blend.where(0, 3) == sources[0].where(0, 3)
    )
    first, second = blend.by_source(np.array([4, 0, 5]))
    assert (first[0], first[1].tolist()) == (sources[0], [0, 3])
    assert (second[0], second[1].tolist()) == (sources[1], [1])
    assert blend.segments(3) is None
    with pytest.raises(IndexError):
        blend[12]
