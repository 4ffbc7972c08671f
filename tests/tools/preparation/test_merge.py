"""Merged data sets, against concatenated lists of documents."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data import indexed_dataset, indexed_writer
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.errors import ConfigError, DataError
from megatron_inspection import dataset
from tests.data.implementations import names
from tests.data.struct_format import packed, unpacked, write
from tools import merge_datasets
from tools.merge_datasets import merge, prefixes_in

SOURCES = st.tuples(
    st.sampled_from(["u1", "i1", "<i2", "<i4", "<i8", "<u2"]),
    st.lists(st.lists(st.lists(st.integers(0, 127), max_size=5), max_size=3), max_size=4),
)


@pytest.mark.slow
@given(sources=st.lists(SOURCES, min_size=1, max_size=4), block=st.sampled_from([1, 3, 1 << 20]))
def test_order_and_documents_are_kept(tmp_path_factory, sources, block):
    folder = tmp_path_factory.mktemp("merge")
    inputs = [
        write(folder / f"part{i}", documents, dtype) for i, (dtype, documents) in enumerate(sources)
    ]
    notices = []
    done = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_datasets, "_BLOCK_ENTRIES", block)
        patch.setattr(merge_datasets, "_COPY_BYTES", 8 * block)
        totals = merge(inputs, folder / "all", say=notices.append, on_progress=done.append)
    dtype, documents, modes = unpacked(folder / "all")
    assert documents == [document for _, content in sources for document in content] and modes == []
    expected_dtype = np.result_type(*(dtype for dtype, _ in sources))
    assert np.dtype(dtype) == expected_dtype and totals.dtype == expected_dtype
    assert len(notices) == sum(np.dtype(dtype) != expected_dtype for dtype, _ in sources)
    assert totals.num_documents == len(documents) and totals.num_sequences == sum(
        map(len, documents)
    )
    assert (done or [0])[-1] == indexed_dataset.bin_bytes(inputs)
    assert Path(folder / "all.bin").read_bytes() == packed(documents, dtype)[0]


def test_multimodal_data_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="one.*multimodal"):
        merge([write(tmp_path / "one", [[[1], [2]]], modes=[1, -1])], tmp_path / "all")


def test_folder(tmp_path, capsys):
    """Merge all of a folder, by name, as Megatron does. Files that are no data set are ignored."""
    folder = tmp_path / "parts"
    folder.mkdir()
    for name, token in (("b", 2), ("a.1", 1), ("c", 3)):
        write(folder / name, [[[token]]])
    (folder / "notes.txt").touch()
    (folder / "index-cache").mkdir()
    assert (
        merge_datasets.main(
            ["--input", str(folder), "--output-prefix", str(tmp_path / "new" / "all")]
        )
        == 0
    )
    assert unpacked(tmp_path / "new" / "all")[1] == [[[1]], [[2]], [[3]]]
    write(folder / "all", [[[9]]])
    assert (
        merge_datasets.main(["--input", str(folder), "--output-prefix", str(folder / "all")]) == 2
    )
    assert str(folder / "all") in capsys.readouterr().err
    (folder / "d.bin").touch()
    with pytest.raises(DataError, match=r"d\.bin.*d\.idx"):
        prefixes_in(folder)


def test_output_is_an_input(tmp_path):
    one = write(tmp_path / "one", [[[1]]])
    before = names(tmp_path)
    (tmp_path / "link.bin").symlink_to(tmp_path / "one.bin")
    for output in (one, str(tmp_path / "x" / ".." / "one"), str(tmp_path / "link")):
        with pytest.raises(ConfigError, match=one):
            merge([one], output)
    (tmp_path / "link.bin").unlink()
    assert names(tmp_path) == before and unpacked(one)[1] == [[[1]]]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d, i: (d[:-1], i), r"b\.bin: 11 .*b\.idx .*12"),
        (lambda d, i: (d, i[:46] + b"\x03" + i[47:]), r"b\.idx: .*sequence 0 .* 3\b"),
    ],
)
def test_damaged_inputs(tmp_path, damage, message):
    """Damaged inputs are refused by name; nothing is left behind and an old output stays."""
    good = write(tmp_path / "a", [[[1]]])
    write(tmp_path / "all", [[[8]]])
    data, index = packed([[[1, 2, 3], [4]], [[5, 6]]], "<u2")
    assert len(index) == 34 + 12 * 3 + 8 * 3
    for suffix, content in zip((".bin", ".idx"), damage(data, index), strict=True):
        if content is not None:
            (tmp_path / f"b{suffix}").write_bytes(content)
    before = names(tmp_path)
    with pytest.raises(DataError, match=message):
        merge([good, tmp_path / "b"], tmp_path / "all")
    assert names(tmp_path) == before and unpacked(tmp_path / "all")[1] == [[[8]]]


def test_memory_is_flat(tmp_path, monkeypatch):
    """Memory is flat for 6.4 MB of tokens in 200,000 sequences, with 4 MB of index.

    They pass through a few blocks when they are merged, and in a full check.
    """
    monkeypatch.setattr(dataset, "_BLOCK_ENTRIES", 1 << 12)
    monkeypatch.setattr(dataset, "_BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(merge_datasets, "_BLOCK_ENTRIES", 1 << 12)
    monkeypatch.setattr(merge_datasets, "_COPY_BYTES", 1 << 16)
    monkeypatch.setattr(indexed_dataset, "_BLOCK", 1 << 12)
    monkeypatch.setattr(indexed_writer, "_BLOCK_ENTRIES", 1 << 12)
    monkeypatch.setattr(indexed_writer, "_BUFFER_BYTES", 1 << 16)
    with IndexedDatasetWriter(tmp_path / "a", "<i4") as writer:
        writer.add_batch(
            np.zeros(800_000, np.int32), np.full(100_000, 8), np.ones(100_000, np.int64)
        )
    tracemalloc.start()
    try:
        merge([tmp_path / "a", tmp_path / "a"], tmp_path / "all")
        result = dataset.inspect(tmp_path / "all", vocab_size=10, validate=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result.sound and result.lengths.documents == 200_000
    assert (tmp_path / "all.bin").stat().st_size == 6_400_000 and peak < 1 << 20, peak
