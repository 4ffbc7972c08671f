"""Document, sample and shuffle index: the ways to use the last epoch, by both implementations.

The order itself is compared with megatron-core's in test_megatron_core.py, the samples with a plain reading of the
format in test_gpt_dataset.py, and the loops with their definitions in test_index_helpers.py.
"""
from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megatron.data import gpt_index, index_helpers
from megatron.data.gpt_index import PARTS, IndexRequest, build_index, index_fits, load_index
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter
from tests.data.implementations import IMPLEMENTATIONS


def build(module: ModuleType | None, sizes: list[int], request: IndexRequest, **options: int) -> dict[str, Any]:
    raw = np.zeros(4 * len(sizes) + 2, np.uint8)
    unaligned: npt.NDArray[np.int32] = raw[2:].view(np.int32)  # as an .idx file has them
    unaligned[:] = sizes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_helpers, "compiled", module)
        patch.setattr(index_helpers, "_FEW", 0)  # the compiled shuffle for short arrays too
        return build_index(request, unaligned, **options)


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("num_samples", "epochs", "apart"),
    [(1, 1, False), (10, 1, False), (11, 2, True), (17, 2, True), (18, 2, False), (20, 2, False), (77, 8, True)],
)
def test_ways_to_use_the_last_epoch(module: ModuleType | None, num_samples: int, epochs: int, apart: bool) -> None:
    """101 tokens in samples of 10 are 10 samples per epoch, of which 80% are 8."""
    sizes = [31, 0, 1, 40, 29]
    request = IndexRequest("p", "train", "1", 0, 5, 101, num_samples, 10, 1234)
    assert (request.num_epochs, request.separate_last_epoch) == (epochs, apart)
    found = build(module, sizes, request)
    assert [found[part].dtype for part in PARTS] == [np.int32, np.int32, np.uint32]
    documents, order = found["doc_idx"].tolist(), found["shuffle_idx"].tolist()
    total, last = (epochs * 101 - 1) // 10, ((epochs - 1) * 101 - 1) // 10
    assert sorted(documents) == sorted(epochs * [0, 1, 2, 3, 4]) and sorted(order) == list(range(total))
    if apart:  # the last epoch's documents and samples come last, each once
        assert sorted(documents[-5:]) == [0, 1, 2, 3, 4] and sorted(order[last:]) == list(range(last, total))
    assert index_fits(found, request, np.array(sizes, np.int32))


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


def test_blocks_of_the_counting_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    request = IndexRequest("p", "train", "1", 5, 905, 1800, 3000, 1, 3)
    whole = build(None, [2] * 1000, request)
    monkeypatch.setattr(gpt_index, "_BLOCK", 7)
    cut = build(None, [2] * 1000, request)
    assert request.num_epochs == 2 and all(cut[part].tobytes() == whole[part].tobytes() for part in PARTS)


def test_from_files_and_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [3, 0, 11, 1, 40, 2]
    with IndexedDatasetWriter(tmp_path / "x", np.uint16) as writer:
        for size in sizes:
            writer.add_document(list(range(size)))
    indexed = IndexedDataset(tmp_path / "x")
    request = IndexRequest(str(tmp_path / "x"), "train", "1", 0, 6, 57, 30, 4, 9)
    expected = build_index(request, np.array(sizes, np.int32))
    built = load_index(indexed, request, data_cache_path=tmp_path / "cache")
    monkeypatch.setattr(gpt_index, "build_index", None)  # a second build would fail
    read = load_index(indexed, request, data_cache_path=tmp_path / "cache")
    for arrays in (built, read):
        assert all(arrays[part].tolist() == expected[part].tolist() for part in PARTS)
