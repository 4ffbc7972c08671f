"""Document, sample and shuffle index against a slow re-statement of the published algorithm: one list, one step."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data import gpt_index, index_helpers
from megatron.data.gpt_index import PARTS, IndexRequest, build_index, index_fits, load_index
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter

IMPLEMENTATIONS = [
    pytest.param(None, id="numpy"),
    pytest.param(
        index_helpers.compiled,
        id="compiled",
        marks=pytest.mark.skipif(
            index_helpers.compiled is None, reason="the C++ extension is not built: pip install -e ."
        ),
    ),
]


class Walk:
    """The published order, by its description: Megatron-DeepSpeed draws with one RandomState(seed), first for the
    documents of all epochs, then for the samples. A last epoch of which fewer than 80% of an epoch's samples are needed
    is kept apart in both. Samples are found by a walk, token by token, over the shuffled documents."""

    def __init__(self, sizes: list[int], start: int, stop: int, num_samples: int, seq_length: int, seed: int) -> None:
        self.sizes, self.seq_length = sizes, seq_length
        self.random = np.random.RandomState(seed)
        epoch = list(range(start, stop))
        tokens = sum(sizes[start:stop])
        self.epochs, have = 1, tokens
        while (have - 1) // seq_length < num_samples:
            self.epochs, have = self.epochs + 1, have + tokens
        before_last = (have - tokens - 1) // seq_length
        needed, whole = num_samples - before_last, (tokens - 1) // seq_length
        self.apart = self.epochs > 1 and needed < int(0.80 * whole)
        if self.apart:
            self.documents = self.shuffled(epoch * (self.epochs - 1)) + self.shuffled(epoch)
        else:
            self.documents = self.shuffled(epoch * self.epochs)
        self.rows = self.walk((have - 1) // seq_length)
        samples = list(range((have - 1) // seq_length))
        cut = before_last if self.apart else len(samples)
        self.order = self.shuffled(samples[:cut]) + self.shuffled(samples[cut:])

    def shuffled(self, items: list[int]) -> list[int]:
        array = np.array(items, np.int64)
        self.random.shuffle(array)
        return array.tolist()

    def walk(self, num_samples: int) -> list[list[int]]:
        position, offset = 0, 0  # of the token under the finger
        rows = [[0, 0]]
        for _ in range(num_samples):
            for _ in range(self.seq_length):
                while offset >= self.sizes[self.documents[position]]:  # an empty document has no token to stand on
                    position, offset = position + 1, 0
                offset += 1
            while offset >= self.sizes[self.documents[position]]:
                position, offset = position + 1, 0
            rows.append([position, offset])
        return rows


def build(module: ModuleType | None, sizes: list[int], request: IndexRequest, **options: int) -> dict[str, Any]:
    raw = np.zeros(4 * len(sizes) + 2, np.uint8)
    unaligned: npt.NDArray[np.int32] = raw[2:].view(np.int32)  # as an .idx file has them
    unaligned[:] = sizes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_helpers, "compiled", module)
        patch.setattr(index_helpers, "_FEW", 0)  # the compiled shuffle for short arrays too
        return build_index(request, unaligned, **options)


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@settings(max_examples=300)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 1, 2, 3, 7, 20]) | st.integers(0, 50), min_size=1, max_size=40),
    bounds=st.tuples(st.integers(0, 39), st.integers(1, 40)),
    num_samples=st.integers(1, 150),
    seq_length=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_order(
    module: ModuleType | None, sizes: list[int], bounds: tuple[int, int], num_samples: int, seq_length: int, seed: int
) -> None:
    start = min(bounds[0], len(sizes) - 1)
    stop = min(max(bounds[1], start + 1), len(sizes))
    tokens = sum(sizes[start:stop])
    if not tokens:
        return
    num_samples = min(num_samples, 2 + 8 * tokens // seq_length)  # 8 epochs and a bit
    request = IndexRequest("p", "train", "1", start, stop, tokens, num_samples, seq_length, seed)
    expected = Walk(sizes, start, stop, num_samples, seq_length, seed)
    found = build(module, sizes, request)
    assert (request.num_epochs, request.separate_last_epoch) == (expected.epochs, expected.apart)
    assert [found[part].dtype for part in PARTS] == [np.int32, np.int32, np.uint32]
    assert found["doc_idx"].tolist() == expected.documents
    assert found["sample_idx"].tolist() == expected.rows
    assert found["shuffle_idx"].tolist() == expected.order
    assert index_fits(found, request, np.array(sizes, np.int32))


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("num_samples", "epochs", "apart"),
    [(1, 1, False), (10, 1, False), (11, 2, True), (17, 2, True), (18, 2, False), (20, 2, False), (77, 8, True)],
)
def test_ways_to_use_the_last_epoch(module: ModuleType | None, num_samples: int, epochs: int, apart: bool) -> None:
    """101 tokens in samples of 10 are 10 samples per epoch, of which 80% are 8."""
    sizes = [31, 0, 1, 40, 29]
    request = IndexRequest("p", "train", "1", 0, 5, 101, num_samples, 10, 1234)
    expected = Walk(sizes, 0, 5, num_samples, 10, 1234)
    assert (request.num_epochs, request.separate_last_epoch) == (epochs, apart) == (expected.epochs, expected.apart)
    found = build(module, sizes, request)
    assert [found[part].tolist() for part in PARTS] == [expected.documents, expected.rows, expected.order]
    if apart:  # the last epoch's documents come last, each once
        assert sorted(found["doc_idx"][-5:].tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@pytest.mark.parametrize("sizes", [[1000], [1, 0, 1, 0, 1], [2], [0, 0, 5000, 0]], ids=str)
@pytest.mark.parametrize("seq_length", [1, 3, 2000])
def test_few_and_giant_documents(module: ModuleType | None, sizes: list[int], seq_length: int) -> None:
    """A split without a whole sample is repeated until it has one."""
    request = IndexRequest("p", "train", "1", 0, len(sizes), sum(sizes), 7, seq_length, 3)
    expected = Walk(sizes, 0, len(sizes), 7, seq_length, 3)
    found = build(module, sizes, request)
    assert [found[part].tolist() for part in PARTS] == [expected.documents, expected.rows, expected.order]
    assert len(found["shuffle_idx"]) >= 7


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_shuffle_index_of_more_samples_than_uint32(module: ModuleType | None) -> None:
    """Numbers that need 64 bits from a limit on, which is 2^32 - 2 in Megatron, and the same order."""
    request = IndexRequest("p", "train", "1", 0, 3, 9001, 9000, 1, 3)
    narrow = build(module, [4000, 5000, 1], request, uint32_limit=9001)
    wide = build(module, [4000, 5000, 1], request, uint32_limit=9000)
    assert len(narrow["shuffle_idx"]) == 9000
    assert narrow["shuffle_idx"].dtype == np.uint32 and wide["shuffle_idx"].dtype == np.int64
    assert narrow["shuffle_idx"].tolist() == wide["shuffle_idx"].tolist()
    assert np.iinfo(np.uint32).max - 1 == gpt_index._UINT32_LIMIT  # as Megatron's source has it


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_blocks_of_the_counting_loop(module: ModuleType | None, monkeypatch: pytest.MonkeyPatch) -> None:
    request = IndexRequest("p", "train", "1", 5, 905, 1800, 3000, 1, 3)
    whole = build(module, [2] * 1000, request)
    monkeypatch.setattr(gpt_index, "_BLOCK", 7)
    cut = build(module, [2] * 1000, request)
    assert request.num_epochs == 2 and all(cut[part].tobytes() == whole[part].tobytes() for part in PARTS)


def test_from_files_and_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [3, 0, 11, 1, 40, 2]
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        for size in sizes:
            writer.add_document(list(range(size)))
    indexed = IndexedDataset(tmp_path / "x")
    request = IndexRequest(str(tmp_path / "x"), "train", "1", 0, 6, 57, 30, 4, 9)
    expected = Walk(sizes, 0, 6, 30, 4, 9)
    built = load_index(indexed, request, data_cache_path=tmp_path / "cache")
    monkeypatch.setattr(gpt_index, "build_index", None)  # a second build would fail
    read = load_index(indexed, request, data_cache_path=tmp_path / "cache")
    for arrays in (built, read):
        assert [arrays[part].tolist() for part in PARTS] == [expected.documents, expected.rows, expected.order]
