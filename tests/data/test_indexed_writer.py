"""Writing .bin/.idx, against bytes packed with struct; continued, killed and out of space."""

import dataclasses
import itertools
import json
import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter, WriterPosition
from megatron.errors import DataError
from tests.data.forks import MOMENTS, killed_at_each
from tests.data.implementations import names
from tests.data.struct_format import packed, unpacked
from tests.helpers.examples import examples
from tests.helpers.killing import forked, wait_for
from tests.helpers.preprocessing import pair_bytes

OLD = [[[1, 2]], [[3]]]
NEW = [[[4]], [[5, 6]]]
LISTS = st.lists(st.lists(st.lists(st.integers(0, 65535), max_size=6), max_size=4), max_size=6)


def add(writer, documents, dtype="<i8"):
    """Add the documents in one batch."""
    sequences = [sequence for document in documents for sequence in document]
    tokens = np.array([token for sequence in sequences for token in sequence], dtype)
    writer.add_batch(tokens, list(map(len, sequences)), list(map(len, documents)))


@examples(10)
@given(
    documents=LISTS,
    cuts=st.lists(st.integers(0, 6), max_size=3),
    dtype=st.sampled_from(["<u2", "<i4", "<i8"]),
)
def test_batches(tmp_path_factory, documents, cuts, dtype):
    """Any way of cutting documents into batches, or single sequences, gives the bytes of struct."""
    folder = tmp_path_factory.mktemp("batches")
    places = [0, *sorted(cuts), len(documents)]
    with IndexedDatasetWriter(folder / "a.b", dtype) as writer:
        for start, stop in itertools.pairwise(places):
            add(writer, documents[start:stop], "<u2")
        assert writer.num_documents == len(documents)
        assert writer.num_sequences == sum(map(len, documents))
        assert writer.num_tokens == sum(len(s) for d in documents for s in d)
    assert pair_bytes(folder / "a.b") == packed(documents, dtype)
    assert names(folder) == ["a.b.bin", "a.b.idx"]


@examples(10)
@given(before=LISTS, lost=LISTS, after=LISTS)
def test_continue_from_a_position(tmp_path_factory, before, lost, after):
    """Additions after the position are cut off; the rest equals an uninterrupted write."""
    folder = tmp_path_factory.mktemp("continue")
    partial = folder / "corpus_partial"
    writer = IndexedDatasetWriter(folder / "corpus", "<u2", directory=partial)
    add(writer, before)
    position = json.loads(json.dumps(dataclasses.asdict(writer.position())))
    add(writer, lost)
    writer.leave()
    assert names(folder) == ["corpus_partial"]
    resumed = IndexedDatasetWriter(
        folder / "corpus", "<u2", directory=partial, resume=WriterPosition(**position)
    )
    assert resumed.num_documents == len(before)
    add(resumed, after)
    resumed.close()
    assert pair_bytes(folder / "corpus") == packed(before + after, "<u2")
    assert names(folder) == ["corpus.bin", "corpus.idx", "corpus_partial"] and names(partial) == []


def old_or_new_or_none(prefix):
    try:
        IndexedDataset(prefix)
    except DataError:
        assert not Path(f"{prefix}.idx").exists(), prefix
    else:
        assert unpacked(prefix)[1] in (OLD, NEW), prefix


@pytest.mark.slow
@MOMENTS
def test_killed_at_any_moment(tmp_path, every):
    """A killed writer leaves a whole data set or none, and its parts do not accumulate."""

    def write(folder, documents=NEW):
        with IndexedDatasetWriter(folder / "a", "<u2") as writer:
            add(writer, documents)

    for folder in killed_at_each(tmp_path, write, every, lambda here: write(here, OLD)):
        old_or_new_or_none(folder / "a")
        write(folder)
        assert unpacked(folder / "a")[1] == NEW and names(folder) == ["a.bin", "a.idx"]


@pytest.mark.slow
@MOMENTS
def test_publish_may_be_killed(tmp_path, every):
    """A killed publish never mixes old and new data; a second publish completes it."""

    def prepare(folder):
        with IndexedDatasetWriter(folder / "a", "<u2") as writer:
            add(writer, OLD)
        unpublished = IndexedDatasetWriter(folder / "a", "<u2", directory=folder / "parts")
        add(unpublished, NEW)
        with pytest.raises(DataError, match=str(folder / "parts")):
            publish(folder)
        unpublished.seal()

    def publish(folder):
        IndexedDatasetWriter.publish(folder / "a", folder / "parts")

    for folder in killed_at_each(tmp_path, publish, every, prepare):
        old_or_new_or_none(folder / "a")
        for _ in range(2):
            publish(folder)
            assert unpacked(folder / "a")[1] == NEW and names(folder / "parts") == []


def test_one_process_writes_a_data_set(tmp_path):
    """Refuse a second writer while one is open; remove what a killed one left."""
    writer = IndexedDatasetWriter(tmp_path / "a", "<u2")
    with pytest.raises(DataError, match=rf"{tmp_path}/a: process {os.getpid()}\b"):
        IndexedDatasetWriter(tmp_path / "a", "<u2")
    add(writer, NEW)
    writer.leave()  # as if killed: the parts stay, the lock goes
    with IndexedDatasetWriter(tmp_path / "a", "<u2") as writer:
        add(writer, OLD)
    with (
        pytest.raises(DataError, match="65536.*uint16"),
        IndexedDatasetWriter(tmp_path / "a", "<u2") as writer,
    ):
        writer.add_document([2])
        writer.add_document([65536])
    assert names(tmp_path) == ["a.bin", "a.idx"] and unpacked(tmp_path / "a")[1] == OLD


@pytest.mark.parametrize(
    ("dtype", "tokens"),
    [
        ("<u2", [-1]),
        ("<i4", [2**31]),
        ("<u2", [0.5]),
        ("<f4", [2**24 + 1]),
    ],
)
def test_ids_that_do_not_fit(tmp_path, dtype, tokens):
    writer = IndexedDatasetWriter(tmp_path / "a", dtype)
    with pytest.raises(DataError, match=str(np.dtype(dtype))):
        writer.add_batch(np.array(tokens), [1], [1])
    with pytest.raises(DataError, match="2147483648"):
        writer.append_sequences([2**31])
    writer.discard()
    assert names(tmp_path) == []
    with pytest.raises(DataError, match="uint64"):
        IndexedDatasetWriter("x", "<u8")


@pytest.mark.slow
def test_disk_full(tmp_path):
    """The error on a full disk names the file that could not be written, and the parts are removed.

    A limit on the size of files stands for a full disk.
    """

    def child():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, 1 << 12))
        with (
            pytest.raises(DataError, match=rf"{tmp_path}/a"),
            IndexedDatasetWriter(tmp_path / "a", "<i8") as writer,
        ):
            for _ in range(8):
                writer.add_batch(np.zeros(1 << 17, np.int64), [1 << 17], [1])

    assert wait_for(forked(child)) == 0 and names(tmp_path) == []
