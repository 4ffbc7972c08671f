"""The .bin/.idx format, against bytes packed here with struct."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.indexed_dataset import IndexedDataset, token_dtype
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.errors import DataError

DOCUMENTS = [[[5, 6, 7], [8]], [[65535]], [[], [1, 2]]]  # documents of sequences of tokens
FORMATS = {"<u2": (8, "H", 2), "<i4": (4, "i", 4), "<i8": (5, "q", 8), "u1": (1, "B", 1)}


def packed(documents: list[list[list[int]]], dtype: str) -> tuple[bytes, bytes]:
    """(.bin, .idx) from the layout in the format's description, without numpy."""
    code, letter, itemsize = FORMATS[dtype]
    sequences = [sequence for document in documents for sequence in document]
    data = b"".join(struct.pack("<" + letter, token) for sequence in sequences for token in sequence)
    index = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    starts = [0]
    for document in documents:
        starts.append(starts[-1] + len(document))
    index += struct.pack("<Q", len(sequences)) + struct.pack("<Q", len(starts))
    index += b"".join(struct.pack("<i", len(sequence)) for sequence in sequences)
    offset = 0
    for sequence in sequences:
        index += struct.pack("<q", offset)
        offset += len(sequence) * itemsize
    return data, index + b"".join(struct.pack("<q", start) for start in starts)


def write(prefix: Path, documents: list[list[list[int]]], dtype: str) -> None:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            for sequence in document:
                writer.add_sequence(sequence)
            writer.end_document()


@pytest.mark.parametrize("dtype", ["<u2", "<i4", "<i8"])
def test_written_bytes(tmp_path: Path, dtype: str) -> None:
    write(tmp_path / "a.b", DOCUMENTS, dtype)
    data, index = packed(DOCUMENTS, dtype)
    assert (tmp_path / "a.b.bin").read_bytes() == data
    assert (tmp_path / "a.b.idx").read_bytes() == index
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.b.bin", "a.b.idx"]


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("dtype", ["<u2", "<i4", "<i8"])
def test_reads_packed_bytes(tmp_path: Path, dtype: str, mmap: bool) -> None:
    data, index = packed(DOCUMENTS, dtype)
    (tmp_path / "a.bin").write_bytes(data)
    (tmp_path / "a.idx").write_bytes(index)
    indexed = IndexedDataset(tmp_path / "a", mmap=mmap)
    assert [indexed[i].tolist() for i in range(len(indexed))] == [[5, 6, 7], [8], [65535], [], [1, 2]]
    assert indexed.read(0, 1).tolist() == [6, 7] and indexed.read(0, 1, 1).tolist() == [6]
    assert indexed.document_indices.tolist() == [0, 2, 3, 5] and indexed.num_documents == 3
    assert indexed.num_tokens == 7 and indexed.tokens_between(1, 3) == 2 and indexed.tokens_between(3, 3) == 0
    assert indexed.modes is None
    for sequence, offset, length in ((5, 0, None), (-1, 0, None), (0, 1, 3), (0, -1, 1)):
        with pytest.raises(IndexError):
            indexed.read(sequence, offset, length)


def test_reads_modes(tmp_path: Path) -> None:
    data, index = packed([[[1], [2]]], "<u2")
    (tmp_path / "a.bin").write_bytes(data)
    (tmp_path / "a.idx").write_bytes(index + bytes([0, 3]))
    modes = IndexedDataset(tmp_path / "a").modes
    assert modes is not None and modes.tolist() == [0, 3]


@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=6), max_size=4), max_size=5),
    mmap=st.booleans(),
)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]], mmap: bool) -> None:
    prefix = tmp_path_factory.mktemp("round") / "x"
    write(prefix, documents, "<u2")
    assert (prefix.with_suffix(".bin").read_bytes(), prefix.with_suffix(".idx").read_bytes()) == packed(
        documents, "<u2"
    )
    indexed = IndexedDataset(prefix, mmap=mmap)
    assert [indexed[i].tolist() for i in range(len(indexed))] == [s for document in documents for s in document]


def test_dtype_follows_vocabulary() -> None:
    assert token_dtype(65499) == np.uint16 and token_dtype(65500) == np.int32


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d, i: (None, i), r"a\.bin: no such file"),
        (lambda d, i: (d, None), r"a\.idx: no such file"),
        (lambda d, i: (d, b"TNTIDX\x00\x00" + i), "old cached/lazy format"),
        (lambda d, i: (d, b"PAR1" + i[4:]), "instead of b'MMIDIDX"),
        (lambda d, i: (d, i[:20]), "shorter than its own header"),
        (lambda d, i: (d, i[:9] + struct.pack("<Q", 2) + i[17:]), "format version 2"),
        (lambda d, i: (d, i[:17] + b"\x09" + i[18:]), "type code 9"),
        (lambda d, i: (d, i[:-8]), r"a\.idx: 126 bytes.*needs 134"),
        (lambda d, i: (d, i[:-8] + struct.pack("<q", 4)), "do not run from 0 to 5"),
        (lambda d, i: (d[:-2], i), r"a\.bin: 12 bytes, but .*a\.idx describes 14: the file is truncated"),
        (lambda d, i: (d + b"\0\0", i), r"a\.bin: 16 bytes, but .*a\.idx describes 14: the file belongs to another"),
    ],
)
def test_damaged_files(tmp_path: Path, damage, message: str) -> None:
    data, index = packed([*DOCUMENTS[:2], [[]], [[1, 2]]], "<u2")
    assert (len(data), len(index)) == (14, 34 + 12 * 5 + 8 * 5)
    for suffix, content in zip((".bin", ".idx"), damage(data, index), strict=True):
        if content is not None:
            (tmp_path / f"a{suffix}").write_bytes(content)
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / "a")


def test_bin_truncated_while_open(tmp_path: Path) -> None:
    write(tmp_path / "a", [[[1, 2, 3, 4]]], "<u2")
    indexed = IndexedDataset(tmp_path / "a", mmap=False)
    with open(tmp_path / "a.bin", "r+b") as file:
        file.truncate(4)
    assert indexed.read(0, 0, 2).tolist() == [1, 2]
    with pytest.raises(DataError, match="ends at byte 4"):
        indexed.read(0)


def write_too_large(prefix: Path) -> None:
    with IndexedDatasetWriter(prefix, "<u2") as writer:
        writer.add_document([2])
        writer.add_document([65536])


def test_failed_write_leaves_old_files(tmp_path: Path) -> None:
    write(tmp_path / "a", [[[1]]], "<u2")
    with pytest.raises(DataError, match=r"ids 65536\.\.65536 do not fit into uint16"):
        write_too_large(tmp_path / "a")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [1]


def test_writer_refuses() -> None:
    with pytest.raises(DataError, match="cannot be written"):
        IndexedDatasetWriter("/dev/null/x", "<u2")
    with pytest.raises(DataError, match="tokens of type uint64"):
        IndexedDatasetWriter("x", "<u8")
