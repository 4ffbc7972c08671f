"""Writes the pair of files that indexed_dataset.py describes.

While it is written a data set is four part files: the tokens, int32 sizes, int64 document ends, and int8 modes where it
has them. They grow at their ends only, so memory does not grow with the data, and a run that was killed can cut them
back to a known length and go on. `seal` joins the three small ones to the .idx; `publish` gives both files their names.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from megatron.data.file_lock import flush_directory, flush_to_disk, process_start
from megatron.data.indexed_dataset import HEADER, MAGIC, TYPE_CODES, VERSION, Integers, bin_path, idx_path
from megatron.errors import DataError

MAX_SEQUENCE_TOKENS = 2**31 - 1
_BUFFER_BYTES = 1 << 20
_BLOCK_ENTRIES = 1 << 18  # of sizes or document ends that are in memory at once


@dataclass(frozen=True)
class WriterPosition:
    """How much of a data set is safely on disk; `dataclasses.asdict` gives what JSON can hold."""

    tokens: int
    sequences: int
    documents: int


@dataclass(frozen=True)
class _Parts:
    """Names of the part files; `index` is the .idx while `seal` writes it, `sealed` the finished one."""

    bin: Path
    sizes: Path
    documents: Path
    modes: Path
    index: Path
    sealed: Path

    @classmethod
    def named(cls, folder: Path, name: str, ending: str) -> _Parts:
        parts = ("bin", "sizes", "documents", "modes", "index", "idx")
        return cls(*(folder / f"{name}.{part}.{ending}" for part in parts))

    def remove(self) -> None:
        for path in vars(self).values():
            path.unlink(missing_ok=True)

    def publish(self, prefix: str) -> None:
        target_bin, target_idx = bin_path(prefix), idx_path(prefix)
        if self.sealed.exists():
            if self.bin.exists():
                # Without its index a new .bin would look like the data of an old one, so the old index goes first.
                target_idx.unlink(missing_ok=True)
                flush_directory(target_idx.parent)
                os.replace(self.bin, target_bin)
                flush_directory(target_bin.parent)
            os.replace(self.sealed, target_idx)
            flush_directory(target_idx.parent)
        elif self.bin.exists() or not (target_bin.exists() and target_idx.exists()):
            raise DataError(f"{self.sealed}: no such file: the data set {prefix} was not written to its end")
        self.remove()


class IndexedDatasetWriter:
    """Writes a pair of files under other names; `close` gives them their own, .idx last.

    Part files lie beside the prefix under names of this host and process; those of dead processes of this host are
    removed. Use it as a context manager: after an exception nothing is left behind, and files that were there before
    stay. With `directory`, the part files lie there under fixed names and stay after an exception, so that a later
    writer can `resume` from a `position()` that was kept; `directory` has to be in the file system of the prefix.

    Raises DataError for what cannot be written, and for parts that are shorter than `resume` says. `with_modes`: every
    sequence has a mode (multimodal data).

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
        prefix: str | os.PathLike[str],
        dtype: npt.DTypeLike,
        *,
        directory: str | os.PathLike[str] | None = None,
        resume: WriterPosition | None = None,
        with_modes: bool = False,
    ) -> None:
        assert resume is None or directory is not None, "only parts with fixed names can be found again"
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in TYPE_CODES:
            raise DataError(
                f"tokens of type {self.dtype} cannot be written: choose one of {[str(d) for d in TYPE_CODES]}"
            )
        self._keep_parts = directory is not None
        self._tokens, self._sequences, self._documents, self._ended = 0, 0, 0, 0
        self._files: dict[str, BinaryIO] = {}
        folder = bin_path(prefix).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if directory is None:
                remove_stale_parts(prefix)
                self._parts = _Parts.named(folder, Path(self.prefix).name, f"{socket.gethostname()}.{os.getpid()}.tmp")
            else:
                Path(directory).mkdir(parents=True, exist_ok=True)
                _check_same_file_system(Path(directory), folder)
                self._parts = _Parts.named(Path(directory), Path(self.prefix).name, "part")
            if resume is None:
                self._parts.remove()
            else:  # an index that was made already lacks what comes now
                self._parts.index.unlink(missing_ok=True)
                self._parts.sealed.unlink(missing_ok=True)
            self._open(resume, with_modes)
        except OSError as error:
            self._close_files()
            raise self._cannot_write(error) from error

    def _open(self, resume: WriterPosition | None, with_modes: bool) -> None:
        widths = {"bin": self.dtype.itemsize, "sizes": 4, "documents": 8, "modes": 1}
        counts = {"bin": 0, "sizes": 0, "documents": 0, "modes": 0}
        if resume is not None:
            counts = {"bin": resume.tokens, "documents": resume.documents}
            counts |= dict.fromkeys(("sizes", "modes"), resume.sequences)
            self._tokens, self._sequences, self._documents = resume.tokens, resume.sequences, resume.documents
            self._ended = resume.sequences
        for name in widths if with_modes else ("bin", "sizes", "documents"):
            path: Path = getattr(self._parts, name)
            length = counts[name] * widths[name]
            actual = path.stat().st_size if path.exists() else 0
            if actual < length:
                raise DataError(f"{path}: {actual} bytes, but {length} were written: cannot continue; start again")
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            os.ftruncate(descriptor, length)
            os.lseek(descriptor, length, os.SEEK_SET)
            self._files[name] = os.fdopen(descriptor, "wb", buffering=_BUFFER_BYTES)

    @property
    def num_tokens(self) -> int:
        return self._tokens

    @property
    def num_sequences(self) -> int:
        return self._sequences

    @property
    def num_documents(self) -> int:
        return self._documents

    def add_batch(
        self,
        tokens: npt.NDArray[Any],
        sequence_sizes: Integers,
        document_sequences: Integers,
        modes: Integers | None = None,
    ) -> None:
        """Append whole documents: the tokens of all their sequences joined, the tokens of each sequence, and the
        sequences of each document. Raises DataError for ids that the type cannot hold."""
        assert self._ended == self._sequences, "the document before is not ended"
        sizes, sequences = np.asarray(sequence_sizes, np.int64), np.asarray(document_sequences, np.int64)
        assert int(sizes.sum()) == len(tokens), f"{len(tokens)} tokens in sequences of {int(sizes.sum())}"
        assert int(sequences.sum()) == len(sizes), f"{len(sizes)} sequences in documents of {int(sequences.sum())}"
        self.append_tokens(tokens)
        self.append_sequences(sizes, modes)
        self.append_document_ends(self._ended + np.cumsum(sequences))

    def add_sequence(self, tokens: Sequence[int] | npt.NDArray[Any], mode: int | None = None) -> None:
        """Append a sequence to the current document. Raises DataError for ids that the type cannot hold."""
        values = np.asarray(tokens) if len(tokens) else np.empty(0, self.dtype)
        self.append_tokens(values)
        self.append_sequences([len(values)], None if mode is None else [mode])

    def end_document(self) -> None:
        self.append_document_ends([self._sequences])

    def add_document(self, tokens: Sequence[int] | npt.NDArray[Any]) -> None:
        """Append a document that is one sequence."""
        self.add_sequence(tokens)
        self.end_document()

    def append_tokens(self, tokens: npt.NDArray[Any]) -> None:
        """Append to .bin alone. With the next two it is what the others are made of, for data that comes in pieces
        which do not end where sequences do; `seal` checks that they agree."""
        self._write("bin", self._converted(tokens))
        self._tokens += len(tokens)

    def append_sequences(self, sizes: Integers, modes: Integers | None = None) -> None:
        """Append sequences of these sizes, whose tokens are appended before or after."""
        values = np.asarray(sizes, np.int64)
        if len(values) and not 0 <= values.min() <= values.max() <= MAX_SEQUENCE_TOKENS:
            raise DataError(
                f"{self.prefix}: sequences of {values.min()}..{values.max()} tokens: the format holds 0 to "
                f"{MAX_SEQUENCE_TOKENS}"
            )
        assert (modes is None) == ("modes" not in self._files), "modes are for data sets that were opened with them"
        self._write("sizes", values.astype("<i4"))
        if modes is not None:
            self._write("modes", np.asarray(modes, np.int8))
        self._sequences += len(values)

    def append_document_ends(self, ends: Integers) -> None:
        """Append documents that end before these sequence numbers, which count from the start of the data set."""
        values = np.asarray(ends, np.int64)
        if len(values):
            assert self._ended <= values[0] and values[-1] <= self._sequences, "documents end after their sequences"
            self._write("documents", values.astype("<i8"))
            self._documents, self._ended = self._documents + len(values), int(values[-1])

    def _converted(self, tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The tokens in the type of the file, if it holds them all."""
        if tokens.dtype == self.dtype or not len(tokens):
            return np.ascontiguousarray(tokens, self.dtype)
        if self.dtype.kind in "iu" and tokens.dtype.kind in "iu":
            limits = np.iinfo(self.dtype)
            low, high = int(tokens.min()), int(tokens.max())
            fits = limits.min <= low and high <= limits.max
            written = tokens.astype(self.dtype) if fits else tokens
        else:
            with np.errstate(invalid="ignore"):
                written = tokens.astype(self.dtype)
            fits = np.array_equal(written, tokens)
        if not fits:
            raise DataError(
                f"{self.prefix}: token ids {tokens.min()}..{tokens.max()} do not fit into {self.dtype}, after token "
                f"{self._tokens} of the data set"
            )
        return written

    def _write(self, name: str, values: npt.NDArray[Any]) -> None:
        try:
            self._files[name].write(values.data.cast("B") if len(values) else b"")
        except OSError as error:
            raise self._cannot_write(error) from error

    def position(self) -> WriterPosition:
        """What a later writer can `resume` from: everything so far, now on disk."""
        assert self._ended == self._sequences, "a document is not ended"
        try:
            for file in self._files.values():
                flush_to_disk(file)
        except OSError as error:
            raise self._cannot_write(error) from error
        return WriterPosition(self._tokens, self._sequences, self._documents)

    def seal(self) -> None:
        """Bring the parts to disk in their final form. Nothing can be added after it; `publish` is what is left."""
        assert self._ended == self._sequences, "sequences were added after the last end_document"
        self.position()
        self._close_files()
        expected = self._tokens * self.dtype.itemsize
        try:
            actual = self._parts.bin.stat().st_size
            with open(self._parts.index, "wb", buffering=_BUFFER_BYTES) as file:
                header = HEADER.pack(MAGIC, VERSION, TYPE_CODES[self.dtype], self._sequences, self._documents + 1)
                file.write(header)
                _copy(self._parts.sizes, file)
                described = self._write_pointers(file)
                file.write(bytes(8))  # the first document starts at sequence 0
                _copy(self._parts.documents, file)
                if self._parts.modes.exists():
                    _copy(self._parts.modes, file)
                flush_to_disk(file)
            if not actual == expected == described:
                raise DataError(
                    f"{self._parts.bin}: {actual} bytes, {expected} were written and the sequences have {described}: "
                    f"another process writes to it, or the disk is failing; start again"
                )
            os.replace(self._parts.index, self._parts.sealed)
            flush_directory(self._parts.sealed.parent)
        except OSError as error:
            raise self._cannot_write(error) from error

    def _write_pointers(self, file: BinaryIO) -> int:
        """Write where each sequence starts; returns where the last one ends."""
        end = 0
        for sizes in _blocks(self._parts.sizes, np.dtype("<i4")):
            ends = np.cumsum(sizes, dtype=np.int64) * self.dtype.itemsize + end
            file.write((ends - sizes.astype(np.int64) * self.dtype.itemsize).astype("<i8").data.cast("B"))
            end = int(ends[-1])
        return end

    def close(self) -> None:
        """Seal and publish. Sequences after the last `end_document` are an error."""
        self.seal()
        try:
            self._parts.publish(self.prefix)
        except OSError as error:
            raise self._cannot_write(error) from error

    @staticmethod
    def publish(prefix: str | os.PathLike[str], directory: str | os.PathLike[str]) -> None:
        """Give the files that were sealed in `directory` their names. May be called again after it was killed.

        Raises DataError when there is nothing to publish or the names cannot be given.
        """
        name = os.fspath(prefix)
        try:
            _Parts.named(Path(directory), Path(name).name, "part").publish(name)
        except OSError as error:
            raise DataError(f"{name}: cannot be written: {error.strerror}") from error

    @staticmethod
    def is_sealed(prefix: str | os.PathLike[str], directory: str | os.PathLike[str]) -> bool:
        """Whether `directory` has the data set complete, so that `publish` is all that is left."""
        return _Parts.named(Path(directory), Path(os.fspath(prefix)).name, "part").sealed.exists()

    def discard(self) -> None:
        """Give up: remove what was written."""
        self._close_files()
        self._parts.remove()

    def leave(self) -> None:
        """Stop writing and leave the parts as they are; only what a `position()` counted is sure to be there."""
        self._close_files()

    def _close_files(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a full disk refuses what is still buffered; it was reported before
                file.close()

    def _cannot_write(self, error: OSError) -> DataError:
        return DataError(f"{error.filename or self.prefix}: cannot be written: {error.strerror}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.close()
                return
        except BaseException:
            self._give_up()
            raise
        self._give_up()

    def _give_up(self) -> None:
        if self._keep_parts:
            self.leave()
        else:
            self.discard()


def remove_stale_parts(prefix: str | os.PathLike[str]) -> None:
    """Remove the part files beside `prefix` that dead processes of this host have left."""
    path = Path(os.fspath(prefix))
    host = re.escape(socket.gethostname())
    pattern = re.compile(rf"{re.escape(path.name)}\.(bin|sizes|documents|modes|index|idx)\.{host}\.(\d+)\.tmp")
    for entry in path.parent.iterdir():
        found = pattern.fullmatch(entry.name)
        if found and process_start(int(found[2])) is None:
            entry.unlink(missing_ok=True)


def _check_same_file_system(directory: Path, folder: Path) -> None:
    if directory.stat().st_dev != folder.stat().st_dev:
        raise DataError(
            f"{directory}: not in the file system of {folder}, so that finished files cannot be moved there at once: "
            f"choose a folder beside the output"
        )


def _blocks(path: Path, dtype: np.dtype[Any]) -> Iterator[npt.NDArray[Any]]:
    with path.open("rb") as file:
        while block := file.read(_BLOCK_ENTRIES * dtype.itemsize):
            yield np.frombuffer(block, dtype)


def _copy(path: Path, file: BinaryIO) -> None:
    for block in _blocks(path, np.dtype(np.uint8)):
        file.write(block.data)
