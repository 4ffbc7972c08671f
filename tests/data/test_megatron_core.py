"""The .bin/.idx files against megatron-core's IndexedDataset, both directions, all types.

megatron-core is looked for in the folder that MEGATRON_CORE_FOLDER names, then in build/peers/, where it is installed
from PyPI if it is not there.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.data.prepare.merge import merge

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.16.1"
DTYPES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")
Documents = list[list[list[float]]]


def find_core() -> Path:
    """The folder with megatron-core; skips where there is none and PyPI is out of reach."""
    named = os.environ.get("MEGATRON_CORE_FOLDER")
    folder = Path(named) if named else ROOT / "build" / "peers" / f"megatron-core-{VERSION}"
    if (folder / "megatron" / "core").is_dir():
        return folder
    if named:
        pytest.skip(f"MEGATRON_CORE_FOLDER={named} has no megatron/core in it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Installed under another name first: a killed installation is not taken for a whole one.
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += ["--only-binary", ":all:", "--retries", "1", "--timeout", "15", "--target", f"{temporary}/core"]
        done = subprocess.run([*pip, f"megatron-core=={VERSION}"], capture_output=True, text=True, timeout=200)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            pytest.skip(f"megatron-core {VERSION} cannot be installed from PyPI: {reason}")
        with contextlib.suppress(OSError):  # another test process was faster
            os.rename(f"{temporary}/core", folder)
    return folder


def documents_of(dtype: str) -> Documents:
    """Documents of several sequences, empty sequences and documents without any, and the limits of the type."""
    if np.dtype(dtype).kind == "f":
        low, high = -1.5, float(np.finfo(np.float32).max)
    else:
        low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    random = np.random.RandomState(0)
    long = random.randint(0, 127, 5000).tolist()
    return [[[1, 2, 3], [4]], [], [[low, high]], [[], [5], []], [long], [[]], [[6], [7, 8]], []]


MODES = [0, 1, -1, 2, 0, 127, -128, 3, 1, 0]


@dataclass(frozen=True)
class Exchange:
    """The files both sides wrote, and what megatron-core read of ours: by (dtype, with modes, mapped)."""

    folder: Path
    read: dict[tuple[str, bool, bool], dict[str, Any]]

    def prefix(self, side: str, dtype: str, modes: bool) -> Path:
        return self.folder / f"{side}_{dtype}_{'modes' if modes else 'plain'}"


@pytest.fixture(scope="module")
def exchange(tmp_path_factory: pytest.TempPathFactory) -> Exchange:
    core = find_core()
    result = Exchange(tmp_path_factory.mktemp("exchange"), {})
    jobs: list[dict[str, Any]] = []
    reads: list[tuple[int, tuple[str, bool, bool]]] = []
    for dtype in DTYPES:
        documents = documents_of(dtype)
        for modes in (False, True):
            ours, theirs = str(result.prefix("ours", dtype, modes)), str(result.prefix("theirs", dtype, modes))
            write(ours, dtype, documents, modes)
            jobs.append({"write": theirs, "dtype": dtype, "documents": documents, "modes": MODES if modes else None})
            for mapped in (True, False):
                reads.append((len(jobs), (dtype, modes, mapped)))
                jobs.append({"read": ours, "mmap": mapped, "multimodal": modes})
            inputs, merged = [theirs, ours, theirs], str(result.prefix("merged_theirs", dtype, modes))
            jobs.append({"merge": merged, "dtype": dtype, "inputs": inputs, "multimodal": modes})
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("core_peer.py")), str(core)],
        input=json.dumps(jobs), capture_output=True, text=True, timeout=200, cwd=result.folder, env=environment,
    )  # fmt: skip
    if done.returncode and "ImportError" in done.stderr.strip().splitlines()[-1]:
        pytest.skip(f"megatron-core does not import here: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    result.read.update({key: answers[at] for at, key in reads})
    return result


def write(prefix: str, dtype: str, documents: Documents, modes: bool) -> None:
    kinds = iter(MODES)
    with IndexedDatasetWriter(prefix, dtype, with_modes=modes) as writer:
        for document in documents:
            tokens = np.array([token for sequence in document for token in sequence], dtype)
            sequence_modes = [next(kinds) for _ in document] if modes else None
            writer.add_batch(tokens, list(map(len, document)), [len(document)], sequence_modes)


@pytest.mark.parametrize("modes", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_files_are_the_same(exchange: Exchange, dtype: str, modes: bool) -> None:
    """Byte for byte, what both sides write of the same documents."""
    ours, theirs = exchange.prefix("ours", dtype, modes), exchange.prefix("theirs", dtype, modes)
    for suffix in (".bin", ".idx"):
        assert Path(f"{ours}{suffix}").read_bytes() == Path(f"{theirs}{suffix}").read_bytes()


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("modes", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_megatron_core_reads_ours(exchange: Exchange, dtype: str, modes: bool, mapped: bool) -> None:
    documents = documents_of(dtype)
    assert exchange.read[dtype, modes, mapped] == {
        "dtype": dtype,
        "sequences": [sequence for document in documents for sequence in document],
        "modes": MODES if modes else None,
        "lengths": [len(sequence) for document in documents for sequence in document],
        "document_indices": [0, *accumulate(map(len, documents))],
    }


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("modes", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_we_read_megatron_core(exchange: Exchange, dtype: str, modes: bool, mapped: bool) -> None:
    documents = documents_of(dtype)
    sequences = [sequence for document in documents for sequence in document]
    indexed = IndexedDataset(exchange.prefix("theirs", dtype, modes), mmap=mapped)
    assert indexed.dtype == np.dtype(dtype)
    assert [indexed[i].tolist() for i in range(len(indexed))] == sequences
    assert indexed.document_indices.tolist() == [0, *accumulate(map(len, documents))]
    assert (None if indexed.modes is None else indexed.modes.tolist()) == (MODES if modes else None)
    if np.dtype(dtype).kind in "iu":
        lengths = np.array(list(map(len, sequences)))
        out = np.empty(int(lengths.sum()), np.int64)
        order = np.random.RandomState(1).permutation(len(sequences))
        indexed.gather(order, np.zeros(len(order), np.int64), lengths[order], out)
        assert out.tolist() == [token for i in order for token in sequences[i]]


@pytest.mark.parametrize("modes", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_merged_files_are_the_same(exchange: Exchange, dtype: str, modes: bool) -> None:
    """Byte for byte, our merge and megatron-core's add_index of both sides' files."""
    ours, theirs = exchange.prefix("ours", dtype, modes), exchange.prefix("theirs", dtype, modes)
    merged = exchange.prefix("merged_ours", dtype, modes)
    merge([theirs, ours, theirs], merged)
    for suffix in (".bin", ".idx"):
        expected = Path(f"{exchange.prefix('merged_theirs', dtype, modes)}{suffix}").read_bytes()
        assert Path(f"{merged}{suffix}").read_bytes() == expected
