"""The .bin/.idx format, against bytes packed here with struct."""

from __future__ import annotations

import os
import resource
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.indexed_dataset import IndexedDataset, SequenceSlices, token_dtype
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.errors import DataError
from tests.data.struct_format import packed

DOCUMENTS = [[[5, 6, 7], [8]], [[65535]], [[], [1, 2]]]  # documents of sequences of tokens


def write(prefix: Path, documents: list[list[list[int]]], dtype: str) -> None:
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            tokens = np.array([token for sequence in document for token in sequence], dtype)
            writer.add_batch(tokens, list(map(len, document)), [len(document)])


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("dtype", ["<u2", "<i4", "<i8"])
def test_reads_packed_bytes(tmp_path: Path, dtype: str, mmap: bool) -> None:
    data, index = packed(DOCUMENTS, dtype)
    (tmp_path / "a.bin").write_bytes(data)
    (tmp_path / "a.idx").write_bytes(index)
    indexed = IndexedDataset(tmp_path / "a", mmap=mmap)
    assert [indexed[i].tolist() for i in range(len(indexed))] == [
        [5, 6, 7],
        [8],
        [65535],
        [],
        [1, 2],
    ]
    assert indexed.read(0, 1).tolist() == [6, 7] and indexed.read(0, 1, 1).tolist() == [6]
    assert indexed.document_indices.tolist() == [0, 2, 3, 5] and indexed.num_documents == 3
    assert (
        indexed.num_tokens == 7
        and indexed.tokens_between(1, 3) == 2
        and indexed.tokens_between(3, 3) == 0
    )
    assert indexed.modes is None
    for sequence, offset, length in ((5, 0, None), (-1, 0, None), (0, 1, 3), (0, -1, 1)):
        with pytest.raises(IndexError):
            indexed.read(sequence, offset, length)


def test_dtype_follows_vocabulary() -> None:
    assert token_dtype(65499) == np.uint16 and token_dtype(65500) == np.int32


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d, i: (None, i), r"a\.bin"),
        (lambda d, i: (d, None), r"a\.idx"),
        (lambda d, i: (d, b"TNTIDX\x00\x00" + i), r"a\.idx"),
        (lambda d, i: (d, b"PAR1" + i[4:]), "b'PAR1.*b'MMIDIDX"),
        (lambda d, i: (d, i[:20]), r"a\.idx: 20\b"),
        (lambda d, i: (d, i[:9] + struct.pack("<Q", 2) + i[17:]), r"a\.idx: .* 2\b"),
        (lambda d, i: (d, i[:17] + b"\x09" + i[18:]), r"a\.idx: .* 9\b"),
        (lambda d, i: (d, i[:-8]), r"a\.idx: 126 bytes.* 134"),
        (lambda d, i: (d, i[:26] + struct.pack("<Q", 0) + i[34:-40]), r"a\.idx"),
        (lambda d, i: (d, i[:-8] + struct.pack("<q", 4)), r"a\.idx: .* 4\b.* 5\b"),
        (lambda d, i: (d[:-2], i), r"a\.bin: 12\b.*a\.idx .* 14\b"),
        (lambda d, i: (d + b"\0\0", i), r"a\.bin: 16\b.*a\.idx .* 14\b"),
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
    out = np.zeros(4, np.int64)
    indexed.gather(SequenceSlices([0], [0], [4]), out)
    assert out.tolist() == [1, 2, 3, 4]
    with open(tmp_path / "a.bin", "r+b") as file:
        file.truncate(4)
    message = r"a\.bin: .* 4, .* 8\b"
    with pytest.raises(DataError, match=message):
        indexed.read(0)
    with pytest.raises(DataError, match=message):
        indexed.gather(SequenceSlices([0], [0], [4]), out)
    assert indexed.read(0, 0, 2).tolist() == [1, 2]


@st.composite
def pieces(draw: st.DrawFn) -> tuple[list[list[int]], list[tuple[int, int, int]]]:
    """Draw sequences, and pieces of them as (sequence, offset, length)."""
    sequences = draw(st.lists(st.lists(st.integers(0, 255), max_size=9), min_size=1, max_size=8))
    chosen = []
    for sequence in draw(st.lists(st.integers(0, len(sequences) - 1), max_size=12)):
        offset = draw(st.integers(0, len(sequences[sequence])))
        chosen.append((sequence, offset, draw(st.integers(0, len(sequences[sequence]) - offset))))
    return sequences, chosen


@given(
    case=pieces(),
    dtype=st.sampled_from(["u1", "<i2", "<i4", "<i8", "<u2"]),
    mmap=st.booleans(),
)
def test_gather(tmp_path_factory: pytest.TempPathFactory, case, dtype: str, mmap: bool) -> None:
    """Gather equals slices of lists, for any order of pieces, overlapping ones included."""
    sequences, chosen = case
    prefix = tmp_path_factory.mktemp("gather") / "x"
    write(prefix, [sequences], dtype)
    indexed = IndexedDataset(prefix, mmap=mmap)
    expected = [
        token for s, offset, length in chosen for token in sequences[s][offset : offset + length]
    ]
    out = np.full(len(expected), -1, np.int64)
    columns = np.array(chosen, np.int64).reshape(-1, 3).T
    indexed.gather(SequenceSlices(columns[0].astype(np.int32), columns[1], columns[2]), out)
    assert out.tolist() == expected


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize(
    ("sequence", "offset", "length"),
    [(4, 0, 0), (-1, 0, 1), (0, 2, 2), (0, -1, 1), (0, 0, -1), (0, 1, 2**62)],
)
def test_gather_outside(
    tmp_path: Path, mmap: bool, sequence: int, offset: int, length: int
) -> None:
    write(tmp_path / "a", [[[1, 2, 3]], [[4]], [[5]], [[6]]], "<i4")
    indexed = IndexedDataset(tmp_path / "a", mmap=mmap)
    with pytest.raises(IndexError, match=f"{sequence}"):
        indexed.gather(
            SequenceSlices([1, sequence], [0, offset], [1, length]),
            np.empty(max(1 + length, 0) % 8, np.int64),
        )


def test_gather_refuses_floats(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a", "<f4") as writer:
        writer.add_document(np.array([0.5], np.float32))
    assert IndexedDataset(tmp_path / "a")[0].tolist() == [0.5]
    with pytest.raises(DataError, match=r"a\.idx.*float32"):
        IndexedDataset(tmp_path / "a").gather(SequenceSlices([0], [0], [1]), np.empty(1, np.int64))


SIZES_AT, POINTERS_AT = 34, 34 + 4 * 4


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize(
    ("at", "value", "damaged"),
    [
        (SIZES_AT + 4, struct.pack("<i", -2), {1}),
        (SIZES_AT + 4, struct.pack("<i", 3), {1}),
        (POINTERS_AT + 8, struct.pack("<q", 2**62), {0, 1}),
        (POINTERS_AT + 16, struct.pack("<q", -(2**63)), {1, 2}),
    ],
)
def test_damaged_entries(
    tmp_path: Path, at: int, value: bytes, damaged: set[int], mmap: bool
) -> None:
    """Damage that opening cannot see is reported on reading, with file and byte.

    Undamaged entries are still read.
    """
    sequences = [[1, 2, 3], [4, 5], [6], [7]]
    data, index = packed([sequences], "<u2")
    (tmp_path / "a.bin").write_bytes(data)
    (tmp_path / "a.idx").write_bytes(index[:at] + value + index[at + len(value) :])
    indexed = IndexedDataset(tmp_path / "a", mmap=mmap)
    for sequence, tokens in enumerate(sequences):
        out = np.zeros(len(tokens), np.int64)
        if sequence in damaged:
            message = (
                rf"a\.idx\b.* {SIZES_AT + 4 * sequence}\b.* {sequence}\b.* "
                rf"{POINTERS_AT + 8 * sequence}\b"
            )
            with pytest.raises(DataError, match=message):
                indexed.read(sequence)
            with pytest.raises(DataError, match=message):
                indexed.gather(SequenceSlices([sequence], [0], [len(tokens)]), out)
        else:
            assert indexed[sequence].tolist() == tokens
            indexed.gather(SequenceSlices([sequence], [0], [len(tokens)]), out)
            assert out.tolist() == tokens


@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=3), min_size=1, max_size=5
    ),
    place=st.floats(0, 1, exclude_max=True),
    new=st.integers(0, 255),
    cut=st.booleans(),
    mmap=st.booleans(),
)
def test_damage_is_seen_or_harmless(
    tmp_path_factory: pytest.TempPathFactory,
    documents,
    place: float,
    new: int,
    cut: bool,
    mmap: bool,
) -> None:
    """Any changed byte of the index, or a cut anywhere, gives DataError or the original tokens.

    The type is left alone here: the files have no second record of it, nor of document starts.
    """
    data, index = packed(documents, "<u2")
    at = int(place * len(index))
    if at == 17 and not cut:
        at = 18
    damaged = index[:at] if cut else index[:at] + bytes([new]) + index[at + 1 :]
    folder = tmp_path_factory.mktemp("damage")
    (folder / "a.bin").write_bytes(data)
    (folder / "a.idx").write_bytes(damaged)
    sequences = [sequence for document in documents for sequence in document]
    try:
        indexed = IndexedDataset(folder / "a", mmap=mmap)
        assert len(indexed) == len(sequences)
        assert [indexed[i].tolist() for i in range(len(indexed))] == sequences
        lengths = [len(sequence) for sequence in sequences]
        out = np.empty(sum(lengths), np.int64)
        indexed.gather(SequenceSlices(range(len(lengths)), [0] * len(lengths), lengths), out)
        assert out.tolist() == [token for sequence in sequences for token in sequence]
        assert indexed.num_tokens == len(out)
    except DataError as error:
        assert "a.idx" in str(error) or "a.bin" in str(error)


@pytest.mark.campaign("large")
@pytest.mark.parametrize("mmap", [True, False])
def test_pointers_beyond_32_bits(tmp_path: Path, mmap: bool) -> None:
    """Pointers above 2^31 and 2^32 are read. The .bin of 6 GB is a hole except for a few tokens."""
    sizes = [2**30 + 5, 2**29, 3, 2**31 - 2**29 - 100, 2]
    starts = np.concatenate([[0], np.cumsum(np.array(sizes, np.int64) * 2)]).tolist()
    assert starts[1] > 2**31 and starts[4] > 2**32
    with open(tmp_path / "a.bin", "wb") as file:
        for start, tokens in (
            (0, [1]),
            (starts[1] - 4, [2, 3]),
            (starts[2], [4, 5, 6]),
            (starts[4], [7, 8]),
        ):
            file.seek(start)
            file.write(struct.pack(f"<{len(tokens)}H", *tokens))
    (tmp_path / "a.idx").write_bytes(
        struct.pack("<9sQBQQ5i5q2q", b"MMIDIDX\x00\x00", 1, 8, 5, 2, *sizes, *starts[:-1], 0, 5)
    )
    indexed = IndexedDataset(tmp_path / "a", mmap=mmap)
    assert indexed.num_tokens == sum(sizes)
    assert indexed[2].tolist() == [4, 5, 6] and indexed[4].tolist() == [7, 8]
    assert indexed.read(0, sizes[0] - 2).tolist() == [2, 3]
    out = np.empty(7, np.int64)
    indexed.gather(SequenceSlices([4, 0, 2, 0], [0, sizes[0] - 2, 1, 0], [2, 2, 2, 1]), out)
    assert out.tolist() == [7, 8, 2, 3, 5, 6, 1]


@pytest.mark.parametrize(
    "count", [10_000_000, pytest.param(110_000_000, marks=pytest.mark.campaign("large"))]
)
@pytest.mark.parametrize("mmap", [True, False])
def test_opening_reads_no_more_of_a_large_index(tmp_path: Path, mmap: bool, count: int) -> None:
    """Opening a large index touches few of its pages.

    It has empty documents: a hole of 20 bytes each, with its ends written.
    """
    with open(tmp_path / "a.idx", "wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, count, count + 1))
        file.seek(34 + 12 * count + 8 * count)
        file.write(struct.pack("<q", count))
    (tmp_path / "a.bin").touch()
    before = resource.getrusage(resource.RUSAGE_SELF)
    indexed = IndexedDataset(tmp_path / "a", mmap=mmap)
    assert (len(indexed), indexed.num_documents, indexed.num_tokens) == (count, count, 0)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt < 2000


@pytest.mark.parametrize("mmap", [True, False])
def test_nothing_in_it(tmp_path: Path, mmap: bool) -> None:
    for documents in ([], [[], []], [[[]], [[], []]]):
        write(tmp_path / "a", documents, "<i4")
        indexed = IndexedDataset(tmp_path / "a", mmap=mmap)
        assert (indexed.num_tokens, indexed.num_documents) == (0, len(documents))
        indexed.gather(SequenceSlices([], [], []), np.empty(0, np.int64))


def test_unreadable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", [[[1]]], "<u2")

    def refused(*arguments: object) -> int:
        raise OSError(5, "Input/output error", str(tmp_path / "a.bin"))

    indexed = IndexedDataset(tmp_path / "a", mmap=False)
    monkeypatch.setattr(os, "pread", refused)
    with pytest.raises(DataError, match=r"a\.bin.* 0\b.*Input/output error"):
        indexed.read(0)
    monkeypatch.setattr(os, "dup", refused)
    with pytest.raises(DataError, match=r"a\.bin.*Input/output error"):
        IndexedDataset(tmp_path / "a", mmap=False)
