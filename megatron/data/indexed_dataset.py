"""Token sequences in a pair of files, `<prefix>.bin` and `<prefix>.idx`: Megatron's format, byte for byte.

The .bin file is the token ids of all sequences, one after the other. The .idx file, little-endian and without padding:

    9 bytes      magic "MMIDIDX", two zero bytes
    8 bytes      uint64 version, 1
    1 byte       data type of a token, see DTYPE_CODES
    8 bytes      uint64 number of sequences N
    8 bytes      uint64 number of document boundaries D, which is documents + 1
    4 N bytes    int32 tokens of each sequence
    8 N bytes    int64 byte offset of each sequence in .bin
    8 D bytes    int64 sequence at which each document starts; the first is 0, the last is N
    N bytes      int8 mode of each sequence (only multimodal data has it)
"""

from __future__ import annotations

import os
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
OLD_MAGIC = b"TNTIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPE_CODES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_CODES = {dtype: code for code, dtype in DTYPE_CODES.items()}
MAX_SEQUENCE_TOKENS = 2**31 - 1


def bin_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.bin")


def idx_path(prefix: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(prefix)}.idx")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest type that Megatron writes: uint16 for a vocabulary under 65,500 entries, int32 from there on."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedDataset:
    """Reads token sequences; threads may share one.

    `mmap=False` reads .bin by position instead of mapping it, for file systems where mapped reads are slow; .idx is
    always mapped. Raises DataError, naming the file, when a file is missing, truncated, of another format, or when the
    two do not belong together.

    sizes: int32 [N], tokens of each sequence.
    pointers: int64 [N], byte offset of each sequence.
    document_indices: int64 [D], sequence at which each document starts, and N.
    modes: int8 [N], or None.
    """

    def __init__(self, prefix: str | os.PathLike[str], *, mmap: bool = True) -> None:
        self.prefix = os.fspath(prefix)
        for path in (idx_path(prefix), bin_path(prefix)):
            if not path.is_file():
                raise DataError(
                    f"{path}: no such file: a data path is the common part of a .bin and an .idx file, as "
                    f"tools/preprocess_data.py writes them, without the suffix"
                )
        self.dtype, self.sizes, self.pointers, self.document_indices, self.modes = _read_index(idx_path(prefix))
        self._check_bin()
        self._map: npt.NDArray[Any] | None = None
        self._descriptor: int | None = None
        if not mmap:
            self._descriptor = os.open(bin_path(prefix), os.O_RDONLY)
            weakref.finalize(self, os.close, self._descriptor)
        elif self.num_tokens:
            self._map = np.memmap(bin_path(prefix), dtype=self.dtype, mode="r")

    def _check_bin(self) -> None:
        path, itemsize = bin_path(self.prefix), self.dtype.itemsize
        expected = int(self.pointers[-1]) + int(self.sizes[-1]) * itemsize if len(self) else 0
        actual = path.stat().st_size
        if actual != expected:
            what = "is truncated or still being written" if actual < expected else "belongs to another .idx"
            raise DataError(
                f"{path}: {actual} bytes, but {idx_path(self.prefix)} describes {expected}: the file {what}; copy or "
                f"preprocess both again"
            )

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sizes)

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        return self.tokens_between(0, len(self))

    def tokens_between(self, start: int, stop: int) -> int:
        """Tokens of the sequences start..stop-1, without reading all sizes: sequences lie one after the other."""
        if start >= stop:
            return 0
        end_bytes = int(self.pointers[stop - 1]) + int(self.sizes[stop - 1]) * self.dtype.itemsize
        return (end_bytes - int(self.pointers[start])) // self.dtype.itemsize

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> npt.NDArray[Any]:
        """Tokens offset..offset+length-1 of a sequence (to its end when `length` is None), in the file's type.

        Raises IndexError outside of the data set and DataError when .bin ends early.
        """
        if not 0 <= sequence < len(self):
            raise IndexError(f"sequence {sequence} of {self.prefix}, which has {len(self)}")
        size = int(self.sizes[sequence])
        length = size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > size:
            raise IndexError(
                f"tokens {offset}..{offset + length} of sequence {sequence} of {self.prefix}: it has {size}"
            )
        if length == 0:
            return np.empty(0, self.dtype)
        first_byte = int(self.pointers[sequence]) + offset * self.dtype.itemsize
        if self._map is not None:
            first = first_byte // self.dtype.itemsize
            return self._map[first : first + length]
        return np.frombuffer(self._read_bytes(first_byte, length * self.dtype.itemsize), self.dtype)

    def _read_bytes(self, position: int, count: int) -> bytes:
        assert self._descriptor is not None, "neither mapped nor open"
        parts = []
        while count:
            part = os.pread(self._descriptor, count, position)  # one read returns 2 GiB at most
            if not part:
                raise DataError(
                    f"{bin_path(self.prefix)}: ends at byte {position}: it was truncated after it was opened"
                )
            parts.append(part)
            position, count = position + len(part), count - len(part)
        return b"".join(parts)

    def __getitem__(self, sequence: int) -> npt.NDArray[Any]:
        return self.read(sequence)


def _read_index(
    path: Path,
) -> tuple[
    np.dtype[Any], npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int8] | None
]:
    with open(path, "rb") as file:
        header = file.read(HEADER.size)
    if header.startswith(OLD_MAGIC):
        raise DataError(
            f"{path}: the old cached/lazy format: preprocess the text again, the mmap format is the one read"
        )
    if not header.startswith(MAGIC):
        raise DataError(f"{path}: starts with {header[:9]!r} instead of {MAGIC!r}: not the index of a token file")
    if len(header) < HEADER.size:
        raise DataError(f"{path}: {len(header)} bytes, shorter than its own header: the file is truncated")
    _, version, code, num_sequences, num_boundaries = HEADER.unpack(header)
    if version != VERSION:
        raise DataError(f"{path}: format version {version}: only version {VERSION} is known")
    if code not in DTYPE_CODES:
        raise DataError(f"{path}: token type code {code}: known codes are {sorted(DTYPE_CODES)}")
    without_modes = HEADER.size + 12 * num_sequences + 8 * num_boundaries
    actual = path.stat().st_size
    if actual not in (without_modes, without_modes + num_sequences):
        raise DataError(
            f"{path}: {actual} bytes, but its header of {num_sequences} sequences and {num_boundaries} document "
            f"boundaries needs {without_modes}: the file is truncated or damaged"
        )
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    at_pointers = HEADER.size + 4 * num_sequences
    at_documents = at_pointers + 8 * num_sequences
    sizes = raw[HEADER.size : at_pointers].view("<i4")
    pointers = raw[at_pointers:at_documents].view("<i8")
    documents = raw[at_documents:without_modes].view("<i8")
    modes = raw[without_modes:].view(np.int8) if num_sequences and actual > without_modes else None
    if num_boundaries < 1 or documents[0] != 0 or documents[-1] != num_sequences:
        raise DataError(f"{path}: the document boundaries do not run from 0 to {num_sequences}: the file is damaged")
    return DTYPE_CODES[code], sizes, pointers, documents, modes
