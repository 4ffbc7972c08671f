"""Writer of the pair of files that indexed_dataset.py describes.

An unfinished data set consists of three part files: tokens, int32 sizes and int64 document ends.
Data is only appended to them, so memory does not grow with the data, and after a run is killed, the
next one can truncate them to a known length and resume. `seal` joins the two small ones into the
.idx; `publish` gives .bin and .idx their final names.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np
import numpy.typing as npt

from megatron.data.arrays import IntArray, StrPath
from megatron.data.file_lock import FileLock, flush_directory, flush_to_disk
from megatron.data.indexed_dataset import (
    HEADER,
    INT32_MAX,
    MAGIC,
    TYPE_CODES,
    VERSION,
    Integers,
    bin_path,
    idx_path,
    record_path,
)
from megatron.errors import DataError

_BUFFER_BYTES = 1 << 20
_BLOCK_ENTRIES = 1 << 18  # sizes or document ends in memory at once
_SMALL_PARTS = ("sizes", "documents")
_JOINED_PARTS = ("index", "idx")  # the unfinished .idx and the finished one
_PARTS = ("bin", *_SMALL_PARTS, *_JOINED_PARTS)


@dataclass(frozen=True)
class WriterPosition:
    """Size of the part of a data set that is synced to disk."""

    tokens: int
    sequences: int
    documents: int


class IndexedDatasetWriter:
    """Writer of a pair of files under temporary names; `close` renames them, .idx last.

    Part files are in the folder PREFIX_parts, which belongs to this writer: leftovers of a killed
    writer are removed. As a context manager the writer leaves no part files after an exception, and
    an existing data set of this prefix is unchanged. With `directory`, part files are in that
    folder and stay after an exception, so that a later writer can `resume` from a saved
    `position()`; `directory` must be on the file system of the data set.

    Raises DataError for a type that the format does not have, for files that cannot be written, for
    parts shorter than `resume`, and, without `directory`, while another process writes the same
    data set.

    >>> import tempfile
    >>> from megatron.data.indexed_dataset import IndexedDataset
    >>> prefix = tempfile.mkdtemp() + "/corpus"
    >>> with IndexedDatasetWriter(prefix, np.uint16) as writer:
    ...     writer.add_document([3, 1, 4])
    >>> IndexedDataset(prefix)[0].tolist()
    [3, 1, 4]
    """

    def __init__(
        self,
        prefix: StrPath,
        dtype: npt.DTypeLike,
        *,
        directory: StrPath | None = None,
        resume: WriterPosition | None = None,
    ) -> None:
        assert resume is None or directory is not None, "only parts in a given directory stay"
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in TYPE_CODES:
            raise DataError(
                f"tokens of type {self.dtype} cannot be written: choose one of "
                f"{[str(d) for d in TYPE_CODES]}"
            )
        at = resume or WriterPosition(0, 0, 0)
        self.num_tokens = at.tokens
        self.num_sequences = at.sequences
        self.num_documents = at.documents
        self._ended = at.sequences
        self._files: dict[str, BinaryIO] = {}
        self._folder = Path(f"{self.prefix}_parts" if directory is None else directory)
        self._paths = {name: _part_path(self._folder, self.prefix, name) for name in _PARTS}
        self._lock = FileLock(Path(f"{self._folder}.lock")) if directory is None else None
        lengths = {
            "bin": self.num_tokens * self.dtype.itemsize,
            "sizes": 4 * self.num_sequences,
            "documents": 8 * self.num_documents,
        }
        try:
            with self._explained():
                bin_path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
                if self._lock is not None and not self._lock.acquire():
                    raise DataError(
                        f"{self.prefix}: {self._lock.describe()} is writing this data set"
                    )
                self._folder.mkdir(parents=True, exist_ok=True)
                # an index from an earlier `seal` lacks the new data
                for name in _PARTS if resume is None else _JOINED_PARTS:
                    self._paths[name].unlink(missing_ok=True)
                for name, length in lengths.items():
                    self._files[name] = open_at(self._paths[name], length, buffering=_BUFFER_BYTES)
        except BaseException:
            self.leave()
            raise

    def add_batch(
        self, tokens: IntArray, sequence_sizes: Integers, document_sequences: Integers
    ) -> None:
        """Append whole documents.

        They are given as concatenated tokens, tokens per sequence, and sequences per document.
        Raises DataError for ids that the type cannot represent, for a sequence of 2^31 tokens or
        more, and if a file cannot be written.
        """
        assert self._ended == self.num_sequences, "the previous document was not ended"
        self.append_tokens(tokens)
        self.append_sequences(sequence_sizes)
        self.append_document_ends(self._ended + np.cumsum(document_sequences, dtype=np.int64))

    def add_document(self, tokens: Sequence[int] | IntArray) -> None:
        """Append a document of one sequence; raises the errors of `add_batch`."""
        self.add_batch(np.asarray(tokens, None if len(tokens) else self.dtype), [len(tokens)], [1])

    def append_tokens(self, tokens: IntArray) -> None:
        """Append to .bin only.

        Use it with append_sequences and append_document_ends for pieces of data that do not end
        where a sequence ends; `seal` checks that the numbers of tokens agree.
        """
        written = np.ascontiguousarray(tokens)
        if tokens.dtype != self.dtype:
            with np.errstate(invalid="ignore"):
                written = tokens.astype(self.dtype)
            if not np.array_equal(written, tokens):
                raise DataError(
                    f"{self.prefix}: token ids {tokens.min()}..{tokens.max()} do not fit into "
                    f"{self.dtype}, after token {self.num_tokens} of the data set"
                )
        self._write("bin", written)
        self.num_tokens += len(tokens)

    def append_sequences(self, sizes: Integers) -> None:
        """Append sequences of these sizes; append_tokens adds their tokens before or after."""
        values = np.asarray(sizes, np.int64)
        if len(values) and not 0 <= values.min() <= values.max() <= INT32_MAX:
            raise DataError(
                f"{self.prefix}: sequences of {values.min()}..{values.max()} tokens: the format "
                f"holds 0 to {INT32_MAX}"
            )
        self._write("sizes", values.astype("<i4"))
        self.num_sequences += len(values)

    def append_document_ends(self, ends: Integers) -> None:
        """Append documents.

        ends   for each, the number of sequences from the start of the data to the document's end
        """
        values = np.asarray(ends, np.int64)
        if len(values):
            assert self._ended <= values[0] and values[-1] <= self.num_sequences, (
                "documents end at sequence ends"
            )
            self._write("documents", values.astype("<i8"))
            self.num_documents = self.num_documents + len(values)
            self._ended = int(values[-1])

    def _write(self, name: str, values: IntArray) -> None:
        with self._explained():
            self._files[name].write(values.data.cast("B") if len(values) else b"")

    def position(self) -> WriterPosition:
        """Sync everything written so far.

        Return the position from which a later writer can `resume`.
        """
        assert self._ended == self.num_sequences, "the last document was not ended"
        with self._explained():
            for file in self._files.values():
                flush_to_disk(file)
        return WriterPosition(self.num_tokens, self.num_sequences, self.num_documents)

    def seal(self) -> None:
        """Join the small parts into the .idx part, and sync all. Afterwards nothing can be added.

        Raises DataError if .bin does not have the tokens of the sequences.
        """
        self.position()
        self._close_files()
        expected = self.num_tokens * self.dtype.itemsize
        with self._explained():
            actual = self._paths["bin"].stat().st_size
            with open(self._paths["index"], "wb", buffering=_BUFFER_BYTES) as file:
                code = TYPE_CODES[self.dtype]
                file.write(
                    HEADER.pack(MAGIC, VERSION, code, self.num_sequences, self.num_documents + 1)
                )
                for sizes in _blocks(self._paths["sizes"], "<i4"):
                    file.write(sizes.data)
                described = 0
                for sizes in _blocks(self._paths["sizes"], "<i4"):
                    num_bytes = sizes.astype("<i8") * self.dtype.itemsize
                    ends = described + np.cumsum(num_bytes)
                    file.write((ends - num_bytes).data)
                    described = int(ends[-1])
                file.write(bytes(8))  # the first document starts at sequence 0
                for ends in _blocks(self._paths["documents"], "<i8"):
                    file.write(ends.data)
                flush_to_disk(file)
            if not actual == expected == described:
                raise DataError(
                    f"{self._paths['bin']}: {actual} bytes, but {expected} were written and "
                    f"sequences have {described}: another process writes to it, or the disk is "
                    "failing; start again"
                )
            os.replace(self._paths["index"], self._paths["idx"])
            flush_directory(self._folder)

    def close(self) -> None:
        """Seal and publish the data set. The last document must have ended."""
        self.seal()
        self.publish(self.prefix, self._folder)
        self.discard()

    @staticmethod
    def publish(prefix: StrPath, directory: StrPath) -> None:
        """Rename the files sealed in `directory`. Can be repeated after an interruption.

        Raises DataError if the data set was neither sealed nor published before, or if the files
        cannot be renamed.
        """
        part_bin, part_idx = (_part_path(Path(directory), prefix, name) for name in ("bin", "idx"))
        target_bin = bin_path(prefix)
        target_idx = idx_path(prefix)
        try:
            if part_idx.exists():
                if part_bin.exists():
                    # The old index is removed first: it must never appear to describe the new .bin.
                    target_idx.unlink(missing_ok=True)
                    record_path(prefix).unlink(missing_ok=True)
                    flush_directory(target_idx.parent)
                    os.replace(part_bin, target_bin)
                    flush_directory(target_bin.parent)
                os.replace(part_idx, target_idx)
                flush_directory(target_idx.parent)
            elif part_bin.exists() or not (target_bin.exists() and target_idx.exists()):
                raise DataError(
                    f"{part_idx}: no such file: the data set {prefix} was not completed"
                )
            for name in _SMALL_PARTS:
                _part_path(Path(directory), prefix, name).unlink(missing_ok=True)
        except OSError as error:
            raise DataError(f"{prefix}: cannot be written: {error.strerror}") from error

    def discard(self) -> None:
        """Stop writing and remove the part files."""
        self._close_files()
        for path in self._paths.values():
            path.unlink(missing_ok=True)
        if self._lock is not None:
            self._folder.rmdir()
            self._lock.release()

    def leave(self) -> None:
        """Stop writing and leave the part files.

        Only what the last `position()` counted is certain to be on disk.
        """
        self._close_files()
        if self._lock is not None:
            self._lock.release()

    def _close_files(self) -> None:
        for file in self._files.values():
            # a full disk rejects the rest of the buffer; this was reported before
            with contextlib.suppress(OSError):
                file.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Convert errors of the file system to DataErrors."""
        try:
            yield
        except OSError as error:
            raise DataError(
                f"{error.filename or self.prefix}: cannot be written: {error.strerror}"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        complete = False
        try:
            if kind is None:
                self.close()
                complete = True
        finally:
            if complete or self._lock is None:
                self.leave()
            else:
                self.discard()


def open_at(path: Path, length: int, buffering: int = -1) -> BinaryIO:
    """Open a file for appending, after it is truncated to `length` bytes.

    Raises DataError if the file is shorter, and OSError if it cannot be opened.
    """
    file = open(path, "ab", buffering=buffering)  # noqa: SIM115 (the caller closes it)
    actual = os.fstat(file.fileno()).st_size
    if actual < length:
        file.close()
        raise DataError(
            f"{path}: {actual} bytes, but {length} were written: cannot resume; start again"
        )
    file.truncate(length)
    return file


def _part_path(folder: Path, prefix: StrPath, name: str) -> Path:
    return folder / f"{Path(prefix).name}.{name}.part"


def _blocks(path: Path, dtype: npt.DTypeLike) -> Iterator[IntArray]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK_ENTRIES * np.dtype(dtype).itemsize):
            yield np.frombuffer(block, dtype)
