"""Several data sets joined into one, in order, by copying their bytes: memory does not grow with the data."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.index_helpers import INT32_MAX
from megatron.data.indexed_dataset import TYPE_CODES, Index, IndexedDataset, bin_path, idx_path, map_index
from megatron.data.indexed_writer import IndexedDatasetWriter, remove_stale_parts
from megatron.errors import ConfigError, DataError

_COPY_BYTES = 1 << 22
_BLOCK_ENTRIES = 1 << 18
_SPARE_BYTES = 1 << 20  # for the folder itself and the rounding of files to blocks


@dataclass(frozen=True)
class MergeTotals:
    """What was written."""

    sequences: int
    documents: int
    tokens: int
    dtype: str


def prefixes_in(folder: str | os.PathLike[str]) -> list[str]:
    """The data sets of a folder, by name: Megatron's order. Other files are ignored.

    Raises DataError when there is none, or for a .bin or .idx without the other.
    """
    path = Path(folder)
    if not path.is_dir():
        raise DataError(f"{path}: no such folder")
    files = {entry.name for entry in path.iterdir() if entry.suffix in (".bin", ".idx") and entry.is_file()}
    names = sorted({name[:-4] for name in files})
    for name in names:
        for suffix, other in ((".bin", ".idx"), (".idx", ".bin")):
            if name + suffix not in files:
                raise DataError(
                    f"{path / name}{other} is there, but not {name}{suffix}: finish or remove this data set"
                )
    if not names:
        raise DataError(f"{path}: no .bin and .idx files in it")
    return [str(path / name) for name in names]


def merge(
    inputs: Sequence[str | os.PathLike[str]],
    output_prefix: str | os.PathLike[str],
    *,
    require_modes: bool = False,
    on_progress: Callable[[int], None] = lambda _: None,
    say: Callable[[str], None] = lambda _: None,
) -> MergeTotals:
    """Write the sequences and documents of `inputs`, one data set after the other, as one data set.

    Integer types that differ become the smallest type that holds them all, which `say` is told. The output appears
    when it is complete; parts of a merge that was killed on this host are removed by the next one. `on_progress` gets
    the bytes of .bin files copied so far. Raises ConfigError when the output is one of the inputs or the inputs cannot
    be joined, and DataError for damaged inputs and for an output that cannot be written or does not fit on the disk.
    """
    if not inputs:
        raise ConfigError("nothing to merge: name at least one data set")
    _check_output(inputs, output_prefix)
    sources = [_describe(prefix) for prefix in inputs]
    dtype = _common_dtype(sources)
    with_modes = _have_modes(sources, require_modes)
    for source in sources:
        if source.dtype != dtype:
            say(f"{source.prefix}: tokens of type {source.dtype} are written as {dtype}, the type that holds all")
    sequences = sum(source.sequences for source in sources)
    if sequences > INT32_MAX:
        say(f"{sequences} sequences: training reads {INT32_MAX} of one data set at most; blend parts instead")
    _check_space(Path(os.path.abspath(output_prefix)), sources, dtype)
    done = 0
    with IndexedDatasetWriter(output_prefix, dtype, with_modes=with_modes) as writer:
        for source in sources:
            dataset = IndexedDataset(source.prefix, mmap=False)
            if _describe(source.prefix) != source:
                raise DataError(f"{source.prefix}: changed while it was being merged: merge again")
            _add_structure(writer, map_index(idx_path(source.prefix)), source.prefix)
            for tokens in _tokens(dataset):
                writer.append_tokens(tokens)
                done += tokens.nbytes
                on_progress(done)
    return MergeTotals(writer.num_sequences, writer.num_documents, writer.num_tokens, str(dtype))


@dataclass(frozen=True)
class _Source:
    """What is known of an input while it is not open: there may be more inputs than a process can have open files."""

    prefix: str
    dtype: np.dtype[Any]
    sequences: int
    documents: int
    tokens: int
    has_modes: bool


def _describe(prefix: str | os.PathLike[str]) -> _Source:
    d = IndexedDataset(prefix, mmap=False)
    return _Source(d.prefix, d.dtype, len(d), d.num_documents, d.num_tokens, d.modes is not None)


def total_bytes(inputs: Sequence[str | os.PathLike[str]]) -> int:
    """Bytes of the .bin files, for a progress bar; files that are missing count as empty."""
    return sum(bin_path(p).stat().st_size for p in inputs if bin_path(p).is_file())


def _check_output(inputs: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str]) -> None:
    for target in (bin_path(output), idx_path(output)):
        for prefix in inputs:
            for source in (bin_path(prefix), idx_path(prefix)):
                same = target.exists() and source.exists() and target.samefile(source)
                if same or os.path.realpath(target) == os.path.realpath(source):
                    raise ConfigError(
                        f"--output-prefix {os.fspath(output)} is the input {os.fspath(prefix)}: choose another name, "
                        f"or another folder if the inputs are all of a folder"
                    )


def _common_dtype(sources: Sequence[_Source]) -> np.dtype[Any]:
    kinds = {("float" if s.dtype.kind == "f" else "integer"): s for s in sources}
    if len(kinds) > 1:
        one, other = kinds["integer"], kinds["float"]
        raise ConfigError(
            f"{one.prefix} has tokens of type {one.dtype} and {other.prefix} of type {other.dtype}: integers and "
            f"floats cannot be merged without loss"
        )
    dtype = np.result_type(*(s.dtype for s in sources)).newbyteorder("<")
    assert dtype in TYPE_CODES, f"{dtype} is no type of the format"
    return dtype


def _have_modes(sources: Sequence[_Source], required: bool) -> bool:
    with_modes = [s for s in sources if s.has_modes]
    without = [s for s in sources if not s.has_modes and s.sequences]
    if required and without:
        raise ConfigError(f"{without[0].prefix} has no modes: merge it without --multimodal")
    if with_modes and without:
        raise ConfigError(
            f"{with_modes[0].prefix} has a mode for each sequence (multimodal data) and {without[0].prefix} has none: "
            f"merge them apart"
        )
    return bool(with_modes)


def _check_space(output: Path, sources: Sequence[_Source], dtype: np.dtype[Any]) -> None:
    folder = output.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_stale_parts(output)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror}") from error
    # The parts of the index are there twice for a moment: in their own files and joined.
    index = sum(18 * s.sequences + 16 * s.documents for s in sources) + 1024
    needed = sum(s.tokens for s in sources) * dtype.itemsize + index + _SPARE_BYTES
    if needed > free:
        raise DataError(
            f"{folder}: {free / 1e9:.3f} GB free, and the merged data set needs {needed / 1e9:.3f} GB: make room or "
            f"choose another --output-prefix; nothing was written"
        )


def _add_structure(writer: IndexedDatasetWriter, index: Index, prefix: str) -> None:
    """Append sizes, modes and document ends, checking that .idx is sound."""
    before = writer.num_sequences
    position = 0
    for start in range(0, len(index.sizes), _BLOCK_ENTRIES):
        block = slice(start, start + _BLOCK_ENTRIES)
        sizes = index.sizes[block].astype(np.int64)
        expected = position + np.cumsum(sizes * index.dtype.itemsize) - sizes * index.dtype.itemsize
        wrong = (sizes < 0) | (index.pointers[block] != expected)
        if wrong.any():
            sequence = start + int(np.argmax(wrong))
            raise DataError(
                f"{idx_path(prefix)}: sequence {sequence} has {index.sizes[sequence]} tokens from byte "
                f"{index.pointers[sequence]}, after sequences that end at byte {expected[sequence - start]}: the "
                f"file is damaged; tools/inspect_dataset.py --validate shows all of it"
            )
        position += int(sizes.sum()) * index.dtype.itemsize
        writer.append_sequences(sizes, None if index.modes is None else index.modes[block])
        index.release()
    last = 0
    for start in range(1, len(index.document_indices), _BLOCK_ENTRIES):
        ends = index.document_indices[start : start + _BLOCK_ENTRIES].astype(np.int64)
        wrong = (np.diff(ends, prepend=last) < 0) | (ends > len(index.sizes))
        if wrong.any():
            at = int(np.argmax(wrong))
            raise DataError(
                f"{idx_path(prefix)}: document {start + at - 1} ends before sequence {ends[at]}, which is "
                f"before its start or beyond the last of {len(index.sizes)}: the file is damaged"
            )
        last = int(ends[-1])
        writer.append_document_ends(before + ends)
        index.release()


def _tokens(dataset: IndexedDataset) -> Iterator[npt.NDArray[Any]]:
    """All tokens in pieces."""
    path, left = bin_path(dataset.prefix), dataset.num_tokens * dataset.dtype.itemsize
    try:
        with path.open("rb") as file:
            while left:
                part = file.read(min(_COPY_BYTES, left))
                if len(part) % dataset.dtype.itemsize or not part:
                    raise DataError(f"{path}: ends {left - len(part)} bytes early: it was truncated while being merged")
                left -= len(part)
                yield np.frombuffer(part, dataset.dtype)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
