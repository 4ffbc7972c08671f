"""The .bin/.idx format, against bytes packed here with struct."""

import errno
import os
import resource
import struct
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data import indexed_dataset
from megatron.data.indexed_dataset import IndexedDataset, SequenceSlices
from megatron.errors import DataError, NodeError
from tests.data.struct_format import packed, write

DOCUMENTS = [[[5, 6, 7], [8]], [[65535]], [[], [1, 2]]]  # documents of sequences of tokens


def gathered(indexed, *slices):
    """Return the tokens of slices, each as (sequence, offset, length)."""
    sequences, offsets, lengths = np.array(slices, np.int64).reshape(-1, 3).T
    out = np.full(max(0, int(lengths.clip(-1, 8).sum())), -1, np.int64)
    indexed.gather(SequenceSlices(sequences.astype(np.int32), offsets, lengths), out)
    return out.tolist()


@given(
    documents=st.lists(st.lists(st.lists(st.integers(0, 127), max_size=6), max_size=3), max_size=5),
    data=st.data(),
    dtype=st.sampled_from(["u1", "i1", "<i2", "<i4", "<i8", "<u2"]),
    mmap=st.booleans(),
)
def test_reads_packed_bytes(
    tmp_path_factory,
    documents,
    data,
    dtype,
    mmap,
):
    """Any pieces equal slices of lists, in any order, overlapping ones included."""
    indexed = IndexedDataset(
        write(tmp_path_factory.mktemp("read") / "x", documents, dtype), mmap=mmap
    )
    sequences = [sequence for document in documents for sequence in document]
    assert [indexed[i].tolist() for i in range(len(indexed))] == sequences
    starts = [0, *accumulate(map(len, documents))]
    assert indexed.document_indices.tolist() == starts and indexed.modes is None
    assert indexed.num_documents == len(documents)
    cut = data.draw(st.integers(0, len(sequences)))
    assert indexed.tokens_between(cut, len(sequences)) == sum(map(len, sequences[cut:]))
    assert indexed.num_tokens == sum(map(len, sequences))
    chosen = []
    expected = []
    if sequences:
        for number in data.draw(st.lists(st.integers(0, len(sequences) - 1), max_size=12)):
            tokens = sequences[number]
            offset = data.draw(st.integers(0, len(tokens)))
            length = data.draw(st.integers(0, len(tokens) - offset))
            chosen.append((number, offset, length))
            expected += tokens[offset : offset + length]
            assert indexed.read(number, offset).tolist() == tokens[offset:]
            assert indexed.read(*chosen[-1]).tolist() == tokens[offset : offset + length]
    assert gathered(indexed, *chosen) == expected


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d, i: (d, b"TNTIDX\x00\x00" + i), r"a\.idx"),
        (lambda d, i: (d, i[:17] + b"\x09" + i[18:]), r"a\.idx: .* 9\b"),
        (lambda d, i: (d, i[:-8] + struct.pack("<q", 4)), r"a\.idx: .* 4\b.* 5\b"),
        (lambda d, i: (d[:-2], i), r"a\.bin: 12\b.*a\.idx .* 14\b"),
    ],
)
def test_damaged_files(tmp_path, damage, message):
    data, index = packed([*DOCUMENTS[:2], [[]], [[1, 2]]], "<u2")
    assert (len(data), len(index)) == (14, 34 + 12 * 5 + 8 * 5)
    for suffix, content in zip((".bin", ".idx"), damage(data, index), strict=True):
        if content is not None:
            (tmp_path / f"a{suffix}").write_bytes(content)
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / "a")


def test_bin_truncated_while_open(tmp_path):
    indexed = IndexedDataset(write(tmp_path / "a", [[[1, 2, 3, 4]]]), mmap=False)
    assert gathered(indexed, (0, 0, 4)) == [1, 2, 3, 4]
    with open(tmp_path / "a.bin", "r+b") as file:
        file.truncate(4)
    message = r"a\.bin: .* 4, .* 8\b"
    with pytest.raises(DataError, match=message):
        indexed.read(0)
    with pytest.raises(DataError, match=message):
        gathered(indexed, (0, 0, 4))
    assert indexed.read(0, 0, 2).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EIO, NodeError),
        (errno.ESTALE, NodeError),
        (errno.ESHUTDOWN, NodeError),  # Python has it as BrokenPipeError
        (errno.EACCES, DataError),
        (errno.ENOENT, DataError),
    ],
)
def test_an_error_of_the_node_is_not_one_of_the_data(tmp_path, monkeypatch, number, kind):
    prefix = write(tmp_path / "a", [[[1, 2]]])
    indexed = IndexedDataset(prefix, mmap=False)

    def fail(path, *_):
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(kind, match=rf"a\.bin: byte 0\b.*{os.strerror(number)}"):
        indexed.read(0)
    monkeypatch.setattr(indexed_dataset, "map_index", fail)
    with pytest.raises(kind, match=rf"a\.idx.*{os.strerror(number)}"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize(
    "piece",
    [(4, 0, 0), (-1, 0, 1), (0, 2, 2), (0, -1, 1), (0, 0, -1), (0, 1, 2**62)],
)
def test_nothing_outside_is_read(tmp_path, mmap, piece):
    indexed = IndexedDataset(write(tmp_path / "a", [[[1, 2, 3]], [[4]], [[5]], [[6]]]), mmap=mmap)
    with pytest.raises(IndexError):
        indexed.read(*piece)
    with pytest.raises(IndexError, match=f"{piece[0]}"):
        gathered(indexed, (1, 0, 1), piece)


SIZES_AT = 34
POINTERS_AT = 34 + 4 * 4


@pytest.mark.parametrize(
    ("mmap", "at", "value", "damaged"),
    [
        (True, SIZES_AT + 4, struct.pack("<i", -2), {1}),
        (False, SIZES_AT + 4, struct.pack("<i", 3), {1}),
        (True, POINTERS_AT + 8, struct.pack("<q", 2**62), {0, 1}),
        (False, POINTERS_AT + 16, struct.pack("<q", -(2**63)), {1, 2}),
    ],
)
def test_damaged_entries(tmp_path, at, value, damaged, mmap):
    """Damage that opening cannot see is reported on reading, with file and byte.

    Undamaged entries are still read.
    """
    sequences = [[1, 2, 3], [4, 5], [6], [7]]
    write(tmp_path / "a", [sequences])
    with open(tmp_path / "a.idx", "r+b") as file:
        file.seek(at)
        file.write(value)
    indexed = IndexedDataset(tmp_path / "a", mmap=mmap)
    for sequence, tokens in enumerate(sequences):
        for read in (
            lambda: indexed.read(sequence).tolist(),  # noqa: B023
            lambda: gathered(indexed, (sequence, 0, len(tokens))),  # noqa: B023
        ):
            if sequence in damaged:
                numbers = (SIZES_AT + 4 * sequence, sequence, POINTERS_AT + 8 * sequence)
                message = r"a\.idx\b" + "".join(rf".* {number}\b" for number in numbers)
                with pytest.raises(DataError, match=message):
                    read()
            else:
                assert read() == tokens


@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 65535), max_size=5), max_size=3), min_size=1, max_size=5
    ),
    fraction=st.floats(0, 1, exclude_max=True),
    new=st.integers(0, 255),
    cut=st.booleans(),
    mmap=st.booleans(),
)
def test_damage_is_seen_or_harmless(
    tmp_path_factory,
    documents,
    fraction,
    new,
    cut,
    mmap,
):
    """Any changed byte of the index, or a cut anywhere, gives DataError or the original tokens.

    The type is left alone here: the files have no second record of it, nor of document starts.
    """
    data, index = packed(documents, "<u2")
    at = int(fraction * len(index))
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
        assert [gathered(indexed, (i, 0, len(s))) for i, s in enumerate(sequences)] == sequences
        assert indexed.num_tokens == sum(map(len, sequences))
    except DataError as error:
        assert "a.idx" in str(error) or "a.bin" in str(error)


@pytest.mark.campaign("large")
@pytest.mark.parametrize("mmap", [True, False])
def test_pointers_beyond_32_bits(tmp_path, mmap):
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
    slices = (4, 0, 2), (0, sizes[0] - 2, 2), (2, 1, 2), (0, 0, 1)
    assert gathered(indexed, *slices) == [7, 8, 2, 3, 5, 6, 1]


@pytest.mark.parametrize(
    "count", [10_000_000, pytest.param(110_000_000, marks=pytest.mark.campaign("large"))]
)
@pytest.mark.parametrize("mmap", [True, False])
def test_opening_reads_no_more_of_a_large_index(tmp_path, mmap, count):
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
