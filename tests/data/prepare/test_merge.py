"""Merged data sets, against lists of documents put one after the other."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tracemalloc
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.data.prepare import merge as library
from megatron.data.prepare.merge import merge, prefixes_in
from megatron.errors import ConfigError, DataError
from tests.data.struct_format import Documents, packed, unpacked
from tools import merge_datasets

ROOT = Path(__file__).resolve().parents[3]


def write(prefix: Path, documents: Documents, dtype: str = "<u2", modes: list[int] | None = None) -> str:
    data, index = packed(documents, dtype, modes)
    Path(f"{prefix}.bin").write_bytes(data)
    Path(f"{prefix}.idx").write_bytes(index)
    return str(prefix)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


PARTS = st.tuples(
    st.sampled_from(["u1", "i1", "<i2", "<i4", "<i8", "<u2"]),
    st.lists(st.lists(st.lists(st.integers(0, 127), max_size=5), max_size=3), max_size=4),
)


@settings(max_examples=20)
@given(parts=st.lists(PARTS, min_size=1, max_size=4), block=st.sampled_from([1, 3, 1 << 20]))
def test_order_and_documents_are_kept(tmp_path_factory: pytest.TempPathFactory, parts, block: int) -> None:
    folder = tmp_path_factory.mktemp("merge")
    inputs = [write(folder / f"part{i}", documents, dtype) for i, (dtype, documents) in enumerate(parts)]
    notices: list[str] = []
    done: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_BLOCK_ENTRIES", block)
        patch.setattr(library, "_COPY_BYTES", 8 * block)
        totals = merge(inputs, folder / "all", say=notices.append, on_progress=done.append)
    dtype, documents, modes = unpacked(folder / "all")
    assert documents == [document for _, part in parts for document in part] and modes == []
    expected_dtype = np.result_type(*(dtype for dtype, _ in parts))
    assert np.dtype(dtype) == expected_dtype and totals.dtype == str(expected_dtype)
    assert len(notices) == sum(np.dtype(dtype) != expected_dtype for dtype, _ in parts)
    assert totals.documents == len(documents) and totals.sequences == sum(map(len, documents))
    assert (done or [0])[-1] == library.total_bytes(inputs)
    assert Path(folder / "all.bin").read_bytes() == packed(documents, dtype)[0]


def test_widened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = write(tmp_path / "small", [[[65535], [1]]], "<u2")
    large = write(tmp_path / "large", [[[100000]]], "<i4")
    arguments = ["--inputs", large, small, "--output-prefix", str(tmp_path / "all")]
    assert merge_datasets.main(arguments) == 0
    assert unpacked(tmp_path / "all") == ("<i4", [[[100000]], [[65535], [1]]], [])
    printed = capsys.readouterr()
    assert "2 documents, 3 sequences, 3 tokens of type int32" in printed.out
    assert "small: tokens of type uint16 are written as int32" in printed.err


def test_modes(tmp_path: Path) -> None:
    one = write(tmp_path / "one", [[[1], [2]]], modes=[1, -1])
    two = write(tmp_path / "two", [[[3]]], modes=[0])
    plain = write(tmp_path / "plain", [[[3]]])
    merge([one, two], tmp_path / "all", require_modes=True)
    assert unpacked(tmp_path / "all") == ("<u2", [[[1], [2]], [[3]]], [1, -1, 0])
    with pytest.raises(ConfigError, match=r"one has a mode for each sequence.* and .*plain has none"):
        merge([one, plain], tmp_path / "other")
    with pytest.raises(ConfigError, match=r"plain has no modes: merge it without --multimodal"):
        merge([plain], tmp_path / "other", require_modes=True)


def test_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron's form: all of a folder, by name; what is no data set is ignored."""
    folder = tmp_path / "parts"
    folder.mkdir()
    for name, token in (("b", 2), ("a.1", 1), ("c", 3)):
        write(folder / name, [[[token]]])
    (folder / "notes.txt").touch()
    (folder / "index-cache").mkdir()
    assert merge_datasets.main(["--input", str(folder), "--output-prefix", str(tmp_path / "new" / "all")]) == 0
    assert unpacked(tmp_path / "new" / "all")[1] == [[[1]], [[2]], [[3]]]
    write(folder / "all", [[[9]]])
    assert merge_datasets.main(["--input", str(folder), "--output-prefix", str(folder / "all")]) == 2
    assert "is the input" in capsys.readouterr().err
    (folder / "d.bin").touch()
    with pytest.raises(DataError, match=r"d\.bin is there, but not d\.idx"):
        prefixes_in(folder)
    with pytest.raises(DataError, match="no .bin and .idx files in it"):
        prefixes_in(tmp_path / "parts" / "index-cache")
    with pytest.raises(DataError, match="no such folder"):
        prefixes_in(tmp_path / "nowhere")


def test_output_is_an_input(tmp_path: Path) -> None:
    one = write(tmp_path / "one", [[[1]]])
    before = files(tmp_path)
    (tmp_path / "link.bin").symlink_to(tmp_path / "one.bin")
    for output in (one, str(tmp_path / "x" / ".." / "one"), str(tmp_path / "link")):
        with pytest.raises(ConfigError, match="is the input"):
            merge([one], output)
    (tmp_path / "link.bin").unlink()
    assert files(tmp_path) == before and unpacked(one)[1] == [[[1]]]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d, i: (d[:-1], i), r"b\.bin: 11 bytes, but .*b\.idx describes 12"),
        (
            lambda d, i: (d, i[:38] + b"\x02" + i[39:]),
            r"b\.idx: sequence 2 has 2 tokens from byte 8, after sequences that end at byte 10",
        ),
        (lambda d, i: (d, i[:54] + b"\x03" + i[55:]), r"b\.idx: byte 34: sequence 0 .* next one starts at 3"),
        (lambda d, i: (d, i[:-16] + b"\x09" + i[-15:]), r"b\.idx: document 0 ends before sequence 9"),
        (lambda d, i: (d, i[:-8] + b"\x02" + i[-7:]), r"b\.idx: the document boundaries run from 0 to 2"),
        (lambda d, i: (None, i), r"b\.bin: no such file"),
    ],
)
def test_damaged_inputs(tmp_path: Path, damage, message: str) -> None:
    """Refused with the file named; nothing is left behind and an old output stays."""
    good = write(tmp_path / "a", [[[1]]])
    write(tmp_path / "all", [[[8]]])
    data, index = packed([[[1, 2, 3], [4]], [[5, 6]]], "<u2")
    assert len(index) == 34 + 12 * 3 + 8 * 3
    for suffix, content in zip((".bin", ".idx"), damage(data, index), strict=True):
        if content is not None:
            (tmp_path / f"b{suffix}").write_bytes(content)
    before = files(tmp_path)
    with pytest.raises(DataError, match=message):
        merge([good, tmp_path / "b"], tmp_path / "all")
    assert files(tmp_path) == before and unpacked(tmp_path / "all")[1] == [[[8]]]


def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(tmp_path / "one", [[[1]]])
    real = write(tmp_path / "real", [[[1]]], "<f4")
    before = files(tmp_path)
    with pytest.raises(ConfigError, match="nothing to merge"):
        merge([], tmp_path / "all")
    with pytest.raises(ConfigError, match=r"one has tokens of type uint16 and .*real of type float32"):
        merge([one, real], tmp_path / "all")
    usage = namedtuple("usage", "total used free")
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage(10, 10, 1_000_000))
        assert merge_datasets.main(["--inputs", one, "--output-prefix", str(tmp_path / "all")]) == 2
    assert "0.001 GB free, and the merged data set needs 0.001 GB" in capsys.readouterr().err
    with pytest.raises(DataError, match=r"/dev/null/x: cannot be written"):
        merge([one], "/dev/null/x/all")
    assert files(tmp_path) == before


def test_floats_of_two_widths(tmp_path: Path) -> None:
    merge([write(tmp_path / "a", [[[1]]], "<f4"), write(tmp_path / "b", [[[2]]], "<f8")], tmp_path / "all")
    assert unpacked(tmp_path / "all") == ("<f8", [[[1.0]], [[2.0]]], [])


def test_memory_is_flat(tmp_path: Path) -> None:
    """64 MB of tokens in two million sequences, 40 MB of index, through a few blocks of memory."""
    with IndexedDatasetWriter(tmp_path / "a", "<i4") as writer:
        for _ in range(50):
            writer.add_batch(np.zeros(160_000, np.int32), np.full(20_000, 8), np.ones(20_000, np.int64))
    tracemalloc.start()
    try:
        merge([tmp_path / "a", tmp_path / "a"], tmp_path / "all")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "all.bin").stat().st_size == 64_000_000 and peak < 24 << 20, peak


KILLS = """
import os, random, signal, sys, time
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.prepare.merge import merge
from megatron.errors import DataError
folder, kills = sys.argv[1], int(sys.argv[2])
random.seed(3)
sources = {7: [f"{folder}/a", f"{folder}/b"], 8: [f"{folder}/b", f"{folder}/a", f"{folder}/b"]}
lengths = {7: [7] * 40 + [8] * 30, 8: [8] * 30 + [7] * 40 + [8] * 30}
seen = set()
for kill in range(kills):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        while True:
            for inputs in sources.values():
                merge(inputs, f"{folder}/all")
                os.write(writing, b".")
    os.close(writing)
    assert os.read(reading, 1)  # one data set is written, the next ones are under way
    os.close(reading)
    time.sleep(random.uniform(0.0, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    try:
        merged = IndexedDataset(f"{folder}/all")
    except DataError as error:
        assert ".idx: no such file" in str(error), error
        seen.add("none")
        continue
    first = int(merged[0][0])
    assert [int(merged[i][0]) for i in range(len(merged))] == lengths[first]
    assert all(merged[i].tolist() == [lengths[first][i]] * lengths[first][i] for i in range(len(merged)))
    seen.add("whole")
print(sorted(seen))
"""


def test_kill_at_random_moments(tmp_path: Path) -> None:
    """Killed 25 times: a whole merge or none, and the next one clears away what the killed ones left."""
    write(tmp_path / "a", [[[7] * 7]] * 40)
    write(tmp_path / "b", [[[8] * 8]] * 30)
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path), "25"], cwd=ROOT, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert "whole" in done.stdout
    merge([tmp_path / "a"], tmp_path / "all")
    assert files(tmp_path) == [f"{name}.{suffix}" for name in ("a", "all", "b") for suffix in ("bin", "idx")]
    assert len(IndexedDataset(tmp_path / "all")) == 40
