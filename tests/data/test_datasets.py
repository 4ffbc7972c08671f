"""build_datasets: which files, which split, how many samples."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron.data.datasets import Datasets, build_datasets
from megatron.data.gpt_dataset import TokenDataset
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.errors import ConfigError, DataError
from tests.helpers.processes import run_processes

SEQ_LENGTH = 8


def config(**data: Any) -> Any:
    """The settings that build_datasets reads."""
    defaults = {
        "data_path": None,
        "data_file_list": None,
        "split": "8,1,1",
        "mock_data": False,
        "data_cache_path": None,
        "train_data_path": None,
        "valid_data_path": None,
        "test_data_path": None,
        "mmap_bin_files": True,
    }
    return SimpleNamespace(
        data=SimpleNamespace(**{**defaults, **data}),
        model=SimpleNamespace(seq_length=SEQ_LENGTH, vocab_size=50),
        training=SimpleNamespace(seed=1234),
    )


def write(folder: Path, name: str, documents: int, first_token: int = 0) -> str:
    """Documents of 20 equal tokens: document i holds first_token + i."""
    prefix = str(folder / name)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for i in range(documents):
            writer.add_document([first_token + i] * 20)
    return prefix


def tokens_in(dataset: TokenDataset | None) -> set[int]:
    assert dataset is not None
    return {int(token) for i in range(len(dataset)) for token in dataset[i]}


@pytest.mark.parametrize("mmap", [True, False])
def test_split_of_one(tmp_path: Path, mmap: bool) -> None:
    prefix = write(tmp_path, "a", 10)
    built = build_datasets(config(data_path=(prefix,), mmap_bin_files=mmap), 40, 7, 3)
    assert (tokens_in(built.train), tokens_in(built.valid), tokens_in(built.test)) == (set(range(8)), {8}, {9})
    assert built.train is not None and built.valid is not None and len(built.train) >= 40 and len(built.valid) >= 7


def test_none_where_no_data_or_no_samples(tmp_path: Path) -> None:
    prefix = write(tmp_path, "a", 10)
    built = build_datasets(config(data_path=(prefix,), split="9,1,0"), 5, 0, 5)
    assert built.train is not None and built.valid is None and built.test is None
    assert build_datasets(config(data_path=(prefix,)), 0, 0, 0) == Datasets(None, None, None)
    with pytest.raises(DataError, match="no training data: --split is '0,1'"):
        build_datasets(config(data_path=(prefix,), split="0,1"), 5, 5, 0)


def test_blend(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a", 10), write(tmp_path, "b", 10, 100)
    built = build_datasets(config(data_path=("3", a, "1", b), data_cache_path=str(tmp_path / "cache")), 100, 8, 0)
    assert built.train is not None and len(built.train) == 100
    from_b = sum(int(built.train[i][0]) >= 100 for i in range(100))
    assert from_b == 25  # the greedy order keeps every share within one sample of its weight
    assert tokens_in(built.valid) == {8, 108}
    assert not (tmp_path / "index-cache").exists()  # everything went to --data-cache-path


def test_blend_with_a_part_too_small_for_a_split(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a", 10), write(tmp_path, "b", 1, 100)
    built = build_datasets(config(data_path=("1", b, "1", a)), 10, 10, 0)
    assert tokens_in(built.valid) == {8} and 100 in tokens_in(built.train)


def test_paths_of_their_own(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a", 4), write(tmp_path, "b", 4, 100)
    # An index of the split of `a` with the same counts must not be mistaken for the index of all of `a`.
    build_datasets(config(data_path=(a,), split="1,1"), 4, 4, 0)
    built = build_datasets(config(train_data_path=(a,), valid_data_path=("1", b, "1", a), split="1,1"), 4, 40, 4)
    assert tokens_in(built.train) == {0, 1, 2, 3} and tokens_in(built.valid) == {0, 1, 2, 3, 100, 101, 102, 103}
    assert built.test is None
    with pytest.raises(DataError, match="give --train-data-path"):
        build_datasets(config(valid_data_path=(b,)), 4, 4, 0)


def test_file_list(tmp_path: Path) -> None:
    a, b = write(tmp_path, "a", 4), write(tmp_path, "b", 4, 100)
    (tmp_path / "list").write_text(f"0.5 {a} web\n0.5 {b} books\n")
    built = build_datasets(config(data_file_list=str(tmp_path / "list"), split="1"), 40, 0, 0)
    assert tokens_in(built.train) == {0, 1, 2, 3, 100, 101, 102, 103}


def test_mock() -> None:
    built = build_datasets(config(mock_data=True), 5, 4, 0)
    assert built.train is not None and len(built.train) == 5 and len(built.train[0]) == SEQ_LENGTH + 1
    assert built.valid is not None and (built.valid[0] != built.train[0]).any() and built.test is None


def test_refuses(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.idx: no such file"):
        build_datasets(config(data_path=(str(tmp_path / "nowhere"),)), 1, 1, 1)
    with pytest.raises(ConfigError, match="no data: give --data-path"):
        build_datasets(config(), 1, 1, 1)
    with pytest.raises(ConfigError, match="exclude each other"):
        build_datasets(config(data_path=("a",), train_data_path=("b",)), 1, 1, 1)
    without_vocabulary = config(mock_data=True)
    without_vocabulary.model.vocab_size = None
    with pytest.raises(ConfigError, match="--vocab-size"):
        build_datasets(without_vocabulary, 1, 1, 1)


def read_on_a_rank(rank: int, prefix: str) -> list[list[int]]:
    built = build_datasets(config(data_path=(prefix,)), 30, 5, 0)
    assert built.train is not None and built.valid is not None
    return [built.train[i].tolist() for i in range(30)] + [built.valid[i].tolist() for i in range(5)]


def test_ranks_agree_without_talking(tmp_path: Path) -> None:
    prefix = write(tmp_path, "a", 10)
    results = run_processes(4, read_on_a_rank, prefix)
    assert results == [read_on_a_rank(0, prefix)] * 4
    assert len(list((tmp_path / "index-cache").iterdir())) == 8  # two indexes of three arrays and a description
