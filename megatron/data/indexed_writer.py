"""Writes the pair of files that indexed_dataset.py describes."""

from __future__ import annotations

import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np
import numpy.typing as npt

from megatron.data.indexed_dataset import DTYPE_CODES, HEADER, MAGIC, VERSION, bin_path, idx_path
from megatron.errors import DataError

_CODES = {dtype: code for code, dtype in DTYPE_CODES.items()}
MAX_SEQUENCE_TOKENS = 2**31 - 1


class IndexedDatasetWriter:
    """Writes a pair of files under temporary names; `close` gives them their own, .idx last.

    Use it as a context manager: after an exception nothing is left behind, and files that were there before stay.

    >>> import tempfile
    >>> prefix = tempfile.mkdtemp() + "/corpus"
    >>> with IndexedDatasetWriter(prefix, np.uint16) as writer:
    ...     writer.add_document([3, 1, 4])
    >>> IndexedDataset(prefix)[0].tolist()
    [3, 1, 4]
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: npt.DTypeLike) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in _CODES:
            raise DataError(f"tokens of type {self.dtype} cannot be written: choose one of {[str(d) for d in _CODES]}")
        self._sizes = array("i")
        self._documents = array("q", [0])
        self._tokens = 0
        self._bin_temporary = _temporary(bin_path(prefix))
        self._idx_temporary = _temporary(idx_path(prefix))
        try:
            bin_path(prefix).parent.mkdir(parents=True, exist_ok=True)
            self._bin: BinaryIO = self._bin_temporary.open("wb")
        except OSError as error:
            raise DataError(f"{self._bin_temporary}: cannot be written: {error.strerror}") from error

    @property
    def num_tokens(self) -> int:
        return self._tokens

    @property
    def num_documents(self) -> int:
        return len(self._documents) - 1

    def add_sequence(self, tokens: Sequence[int] | npt.NDArray[Any]) -> None:
        """Append a sequence to the current document. Raises DataError for ids that the type cannot hold."""
        values = np.asarray(tokens) if len(tokens) else np.empty(0, self.dtype)
        if values.size > MAX_SEQUENCE_TOKENS:
            raise DataError(
                f"{self.prefix}: a sequence of {values.size} tokens: the format holds {MAX_SEQUENCE_TOKENS}"
            )
        written = values.astype(self.dtype)
        if values.dtype != self.dtype and not np.array_equal(written, values):
            raise DataError(f"{self.prefix}: token ids {values.min()}..{values.max()} do not fit into {self.dtype}")
        self._bin.write(written.tobytes())
        self._sizes.append(values.size)
        self._tokens += values.size

    def end_document(self) -> None:
        self._documents.append(len(self._sizes))

    def add_document(self, tokens: Sequence[int] | npt.NDArray[Any]) -> None:
        """Append a document that is one sequence."""
        self.add_sequence(tokens)
        self.end_document()

    def close(self) -> None:
        """Write the index and give both files their names. Sequences after the last `end_document` are an error."""
        assert self._documents[-1] == len(self._sizes), "sequences were added after the last end_document"
        sizes = np.frombuffer(self._sizes, np.int32) if self._sizes else np.empty(0, np.int32)
        pointers = np.zeros(len(sizes), "<i8")
        np.cumsum(sizes[:-1], dtype=np.int64, out=pointers[1:])
        pointers *= self.dtype.itemsize
        _flush_to_disk(self._bin)
        self._bin.close()
        with open(self._idx_temporary, "wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, _CODES[self.dtype], len(sizes), len(self._documents)))
            file.write(sizes.astype("<i4").tobytes())
            file.write(pointers.tobytes())
            file.write(np.frombuffer(self._documents, np.int64).astype("<i8").tobytes())
            _flush_to_disk(file)
        # Without its index a new .bin would look like the data of an old one, so the old index goes first.
        idx_path(self.prefix).unlink(missing_ok=True)
        os.replace(self._bin_temporary, bin_path(self.prefix))
        os.replace(self._idx_temporary, idx_path(self.prefix))

    def discard(self) -> None:
        """Give up: remove what was written."""
        self._bin.close()
        self._bin_temporary.unlink(missing_ok=True)
        self._idx_temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
            return
        try:
            self.close()
        except OSError as failure:
            self.discard()
            raise DataError(f"{self.prefix}: cannot be written: {failure.strerror}") from failure


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


def _flush_to_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
