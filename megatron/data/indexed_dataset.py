"""Token sequences in a pair of files, `<prefix>.bin` and `<prefix>.idx`.

The format is Megatron's, byte for byte. The .bin file has the token ids of all sequences, one after
another. The .idx file, little-endian and without padding:

    9 bytes      magic "MMIDIDX", two zero bytes
    8 bytes      uint64 version, 1
    1 byte       data type of a token, see DTYPE_CODES
    8 bytes      uint64 number of sequences N
    8 bytes      uint64 number of document boundaries D, the number of documents + 1
    4 N bytes    int32 tokens of each sequence
    8 N bytes    int64 byte offset of each sequence in .bin
    8 D bytes    int64 sequence at which each document starts; the first is 0, the last is N
    N bytes      int8 mode of each sequence (only multimodal data has it)

gpt-neox swaps the type codes 6 and 7, float64 and float32. Token ids are integers, so training data
are unaffected.

A loss mask is a second pair of files in the same format, `<prefix>_mask.bin` and `.idx`, of type
uint8: 1 for each token that counts in the loss as a label, 0 for the others, in sequences and
documents of the same lengths. The pair with the tokens does not change, so that every program in
Megatron's family can read it.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from mmap import ACCESS_READ
from mmap import mmap as Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from megatron.data.arrays import BoolArray, Int32Array, Int64Array, IntArray, StrPath
from megatron.errors import BUILD, DataError, reading_error

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DType = np.dtype[np.generic]
DTYPE_CODES: dict[int, DType] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
TYPE_CODES = {dtype: code for code, dtype in DTYPE_CODES.items()}
_BLOCK = 1 << 20  # sequences checked at once
_PROBES = 256  # lengths compared when a mask is opened

Integers = Sequence[int] | IntArray


def bin_path(prefix: StrPath) -> Path:
    """Return the name of the token file."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: StrPath) -> Path:
    """Return the name of the index file."""
    return Path(f"{prefix}.idx")


def record_path(prefix: StrPath) -> Path:
    """Return the name of the file that identifies the tokenizer of a data set."""
    return Path(f"{prefix}.tokenizer.json")


MASK_DTYPE = np.dtype("u1")


def mask_prefix(prefix: StrPath) -> str:
    """Return the prefix of the loss mask of a data set."""
    return f"{prefix}_mask"


def bin_bytes(prefixes: Iterable[str | os.PathLike[str]]) -> int:
    """Return the bytes of the .bin files of data sets; missing files count as empty."""
    return sum(path.stat().st_size for path in map(bin_path, prefixes) if path.is_file())


def data_files(prefix: StrPath) -> list[Path]:
    """Return the names of the two files of a data set, and of the existing files of its mask."""
    mask = mask_prefix(prefix)
    return [bin_path(prefix), idx_path(prefix)] + [
        path for path in (bin_path(mask), idx_path(mask)) if path.exists()
    ]


def token_dtype(vocab_size: int) -> DType:
    """Return the type that Megatron writes.

    It is uint16 for a vocabulary of fewer than 65,500 entries, otherwise int32.
    """
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class SequenceSlices(NamedTuple):
    """Slices of sequences: slice i is lengths[i] tokens of sequences[i], starting at offsets[i]."""

    sequences: IntArray
    offsets: Int64Array
    lengths: Int64Array

    @classmethod
    def joined(cls, *some: SequenceSlices) -> SequenceSlices:
        return cls(*map(np.concatenate, zip(NO_SLICES, *some, strict=True)))

    def at(self, chosen: IntArray | BoolArray) -> SequenceSlices:
        return SequenceSlices(self.sequences[chosen], self.offsets[chosen], self.lengths[chosen])

    def ends_inside(self, sizes: Int32Array) -> BoolArray:
        """Return which of the pieces end before their sequences do."""
        return self.offsets + self.lengths < sizes[self.sequences]

    def merged(self) -> SequenceSlices:
        """Return the pieces in the order of the data, those that adjoin each other as one."""
        sequences, offsets, lengths = self.at(np.lexsort((self.offsets, self.sequences)))
        new = np.ones(len(lengths), bool)
        new[1:] = (np.diff(sequences) != 0) | (offsets[1:] != (offsets + lengths)[:-1])
        first = np.flatnonzero(new)
        sums = np.add.reduceat(lengths, first) if len(first) else lengths
        return SequenceSlices(sequences[first], offsets[first], sums)

    def within(self, first: int, stop: int) -> SequenceSlices:
        """Return the pieces of sequences first .. stop - 1."""
        return self.at((first <= self.sequences) & (self.sequences < stop))


NO_SLICES = SequenceSlices(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64))


class IndexedDataset:
    """Reader of token sequences, which threads may share.

    `mmap=False` reads .bin by position instead of mapping it, for file systems where mapped reads
    are slow; .idx is always mapped. `location` is the prefix of a copy to read; `prefix` remains
    the name of the data. Opening takes the same time for any size. Raises DataError, naming the
    file, if one of the two is missing, truncated or in another format, or if they do not belong
    together. Damage that only a full scan would find is reported, with file and byte, when the
    damaged part is read. Raises NodeError, also when data is read, if the file system fails.

    sizes: int32 [N], tokens of each sequence.
    pointers: int64 [N], byte offset of each sequence.
    document_indices: int64 [D], sequence at which each document starts, and N.
    modes: int8 [N], mode of each sequence; None if the .idx file has no modes.
    mask: the loss mask; None unless `open_mask` has opened it.
    """

    mask: IndexedDataset | None = None

    def __init__(
        self,
        prefix: StrPath,
        *,
        mmap: bool = True,
        location: StrPath | None = None,
    ) -> None:
        self.prefix = os.fspath(prefix)
        self.location = self.prefix if location is None else os.fspath(location)
        self._idx_path = idx_path(self.location)
        self._bin_path = bin_path(self.location)
        for path in (self._idx_path, self._bin_path):
            if not path.is_file():
                raise DataError(
                    f"{path}: no such file: a data path is the common part of the names of a .bin and "
                    "an .idx file, which tools/preprocess_data.py writes, without the suffix"
                )
        try:
            index = map_index(self._idx_path)
            with open(self._bin_path, "rb") as file:
                self._bin_bytes = os.fstat(file.fileno()).st_size
                self._map: IntArray | None = None
                if mmap and self._bin_bytes:
                    mapping = Mapping(file.fileno(), self._bin_bytes, access=ACCESS_READ)
                    self._map = np.frombuffer(mapping, np.uint8)
                if not mmap:
                    self._descriptor = os.dup(file.fileno())
                    weakref.finalize(self, os.close, self._descriptor)
        except OSError as error:
            message = f"{error.filename or self._idx_path}: cannot be read: {error.strerror}"
            raise reading_error(error, message, DataError) from error
        self.dtype, self.sizes, self.pointers, self.document_indices, self.modes = index
        first = int(self.document_indices[0])
        last = int(self.document_indices[-1])
        if (first, last) != (0, len(self)):
            raise DataError(
                f"{self._idx_path}: the document boundaries run from {first} to {last}, not from 0 "
                f"to {len(self)}: the file is damaged"
            )
        itemsize = self.dtype.itemsize
        expected = int(self.pointers[-1]) + int(self.sizes[-1]) * itemsize if len(self) else 0
        actual = self._bin_bytes
        if actual != expected:
            what = (
                "is truncated or still being written"
                if actual < expected
                else "belongs to another .idx"
            )
            raise DataError(
                f"{self._bin_path}: {actual} bytes, but {self._idx_path} describes {expected}: the "
                f"file {what}; copy or preprocess both again"
            )

    def open_mask(self) -> None:
        """Open the loss mask next to the data.

        Raises DataError if one of its files is missing or damaged, or if the mask belongs to other
        data: type and numbers of documents and tokens are compared, and the lengths of some
        sequences.
        """
        location = mask_prefix(self.location)
        for path in (idx_path(location), bin_path(location)):
            if not path.is_file():
                raise DataError(
                    f"{path}: no such file: it is a part of the loss mask of {self.prefix}, which "
                    "--loss-mask requires; tools/preprocess_data.py --chat writes it with the data"
                )
        mask = IndexedDataset(
            mask_prefix(self.prefix),
            mmap=self._map is not None or not self._bin_bytes,
            location=location,
        )
        some = np.linspace(0, max(len(self) - 1, 0), _PROBES).astype(np.int64)[: len(self)]
        if (
            mask.dtype != MASK_DTYPE
            or len(mask) != len(self)
            or mask.num_documents != self.num_documents
            or mask.num_tokens != self.num_tokens
            or (mask.sizes[some] != self.sizes[some]).any()
        ):
            raise DataError(
                f"{mask._idx_path}: {mask.num_documents} documents with a total of "
                f"{mask.num_tokens} entries of type {mask.dtype}, not the loss mask of "
                f"{self._idx_path}, which has {self.num_documents} documents with a total of "
                f"{self.num_tokens} tokens: the mask belongs to other data; copy or preprocess "
                "both again"
            )
        self.mask = mask

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.sizes)

    @property
    def num_documents(self) -> int:
        return len(self.document_indices) - 1

    @property
    def num_tokens(self) -> int:
        return self.tokens_between(0, len(self))

    def tokens_between(self, start: int, stop: int) -> int:
        """Return the number of tokens in the sequences start..stop-1.

        The number is computed from the start of the first sequence and the end of the last, since
        sequences are contiguous.
        """
        if start >= stop:
            return 0
        sizes, (first, last) = self._entries(np.array([start, stop - 1]))
        tokens = int(last - first) // self.dtype.itemsize + int(sizes[1])
        if tokens < 0:
            raise self._damaged(start)
        return tokens

    def tokens_at(self, first: int, count: int) -> IntArray:
        """Return `count` tokens of .bin, beginning with token `first`, across sequences."""
        return self._tokens_at(first * self.dtype.itemsize, count)

    def read(self, sequence: int, offset: int = 0, length: int | None = None) -> IntArray:
        """Return tokens offset..offset+length-1 of a sequence, in the file's type.

        A length of None reads to the end of the sequence. Raises IndexError for a sequence or
        tokens that do not exist, and DataError, with file and byte offset, for damaged data.
        """
        if length is None:
            length = (int(self.sizes[sequence]) if 0 <= sequence < len(self) else 0) - offset
        (start,), _ = self._byte_starts(SequenceSlices(*np.array([[sequence], [offset], [length]])))
        return self._tokens_at(int(start), length)

    def __getitem__(self, sequence: int) -> IntArray:
        return self.read(sequence)

    def gather(self, slices: SequenceSlices, out: Int64Array) -> None:
        """Read many slices, one after another, into `out`, which has exactly their total length.

        Raises the errors of `read`, and DataError for tokens that are not integers.
        """
        if self.dtype.kind not in "iu":
            raise DataError(
                f"{self._idx_path}: tokens of type {self.dtype}, but a model reads integers"
            )
        index = TYPE_CODES[self.dtype], self.sizes, self.pointers
        if self._map is not None and _loops().gather_slices(self._map, *index, *slices, out):
            return
        starts, counts = self._byte_starts(slices)  # raises the error of wrong slices
        assert len(out) == int(counts.sum()), f"{int(counts.sum())} tokens for {len(out)} places"
        at = 0
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            out[at : at + count] = self._tokens_at(start, count)
            at += count

    def gather_mask(self, slices: SequenceSlices, out: Int64Array) -> None:
        """Read the mask of slices like `gather`; also raise for values other than 0 and 1."""
        assert self.mask is not None, "open_mask has opened it"
        self.mask.gather(slices, out)
        if len(out) and not 0 <= out.min() <= out.max() <= 1:
            bad = int(np.argmax((out < 0) | (out > 1)))
            raise DataError(
                f"{self.mask.where(slices, bad)}: {out[bad]} in a loss mask, "
                "which has only 0 and 1: the file is damaged; copy or preprocess it again"
            )

    def check(self, start: int, stop: int) -> None:
        """Raise DataError for the first damaged sequence of start..stop-1.

        The error is the same as in `read`. Only 12 bytes per sequence are read.
        """
        for first in range(start, stop, _BLOCK):
            last = min(first + _BLOCK, stop)
            self._entries(np.arange(first, last))

    def where(self, slices: SequenceSlices, token: int) -> str:
        """Return file, document and byte of a token in the slices of `gather`, for messages."""
        sequences, offsets, lengths = slices
        ends = np.cumsum(lengths)
        piece = int(np.searchsorted(ends, token, side="right"))
        sequence = int(sequences[piece])
        offset = int(offsets[piece] + token - (ends[piece] - lengths[piece]))
        document = self.document_of(sequence)
        byte = int(self.pointers[sequence]) + offset * self.dtype.itemsize
        return f"{self._bin_path}, document {document}, byte {byte}"

    def document_of(self, sequence: int) -> int:
        """Return the number of the document that has a sequence."""
        return int(np.searchsorted(self.document_indices, sequence, side="right")) - 1

    def _byte_starts(self, slices: SequenceSlices) -> tuple[Int64Array, Int64Array]:
        """Return the byte of .bin at which each slice starts, and the lengths of the slices.

        Raises IndexError for a slice that is not within its sequence, and the errors of `_entries`.
        """
        sequences, first, count = (np.ascontiguousarray(array, np.int64) for array in slices)
        if not len(sequences):
            return sequences, count
        if not 0 <= sequences.min() <= sequences.max() < len(self):
            raise IndexError(
                f"sequences {sequences.min()}..{sequences.max()} of {self.prefix}, which has {len(self)}"
            )
        sizes, pointers = self._entries(sequences)
        outside = (first < 0) | (count < 0) | (first > sizes - count)
        if outside.any():
            at = int(np.argmax(outside))
            raise IndexError(
                f"tokens {first[at]}..{first[at] + count[at] - 1} of sequence {sequences[at]} of "
                f"{self.prefix}: it has {sizes[at]}"
            )
        return pointers + first * self.dtype.itemsize, count

    def _entries(self, sequences: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return sizes and pointers of sequences.

        Raises DataError for the first sequence whose entry is damaged. Sequences are contiguous, so
        the size and pointer of a sequence and the pointer of the next one have to agree: most
        damage is found when an entry is read.
        """
        itemsize = self.dtype.itemsize
        sizes = self.sizes[sequences].astype(np.int64)
        pointers = self.pointers[sequences]
        ends = self.pointers[np.minimum(sequences + 1, len(self) - 1)]
        ends[sequences == len(self) - 1] = self._bin_bytes
        # The subtraction cannot overflow if both are within the file.
        damaged = (pointers < 0) | (sizes < 0) | (ends > self._bin_bytes) | (ends < 0)
        damaged |= (ends - pointers != sizes * itemsize) | (pointers % itemsize != 0)
        if damaged.any():
            raise self._damaged(int(sequences[np.argmax(damaged)]))
        return sizes, pointers

    def _damaged(self, sequence: int) -> DataError:
        """Return the error for a sequence with an impossible size or pointer."""
        end = self.pointers[sequence + 1] if sequence + 1 < len(self) else self._bin_bytes
        return DataError(
            f"{self._idx_path}: byte {HEADER.size + 4 * sequence}: sequence {sequence} has "
            f"{self.sizes[sequence]} tokens of {self.dtype.itemsize} bytes; byte "
            f"{HEADER.size + 4 * len(self) + 8 * sequence}: it starts at {self.pointers[sequence]} "
            f"in a .bin of {self._bin_bytes} bytes and should end at {end}: the index "
            "is damaged; copy it again, or find further damage with tools/inspect_dataset.py "
            "--validate"
        )

    def _tokens_at(self, start: int, count: int) -> IntArray:
        """Return `count` tokens from byte `start` of .bin, mapped or read by position."""
        num_bytes = count * self.dtype.itemsize
        if self._map is not None:
            return self._map[start : start + num_bytes].view(self.dtype)
        data = b""
        while len(data) < num_bytes:  # one call reads 2 GiB at most
            at = start + len(data)
            try:
                more = os.pread(self._descriptor, num_bytes - len(data), at)
            except OSError as error:
                message = f"{self._bin_path}: byte {at}: cannot be read: {error.strerror}"
                raise reading_error(error, message, DataError) from error
            if not more:
                raise DataError(
                    f"{self._bin_path}: ends at byte {at}, but had {self._bin_bytes} bytes: it "
                    "was truncated after it was opened"
                )
            data += more
        return np.frombuffer(data, self.dtype)


class Index(NamedTuple):
    """Content of an .idx file, mapped; IndexedDataset describes the fields."""

    dtype: DType
    sizes: Int32Array
    pointers: Int64Array
    document_indices: Int64Array
    modes: IntArray | None


def map_index(path: Path) -> Index:
    """Map the arrays of an .idx file.

    Raises DataError if the header is wrong or does not fit the size of the file; nothing else is
    checked. Raises OSError if the file cannot be read.
    """
    with open(path, "rb") as file:
        header = file.read(HEADER.size)
        actual = os.fstat(file.fileno()).st_size
        if not header.startswith(MAGIC):
            raise DataError(
                f"{path}: starts with {header[:9]!r} instead of {MAGIC!r}: not the index of a "
                "token file (TNTIDX is the old cached or lazy format: preprocess the text again)"
            )
        if actual < HEADER.size:
            raise DataError(
                f"{path}: {actual} bytes, shorter than its own header: the file is truncated"
            )
        _, version, code, num_sequences, num_boundaries = HEADER.unpack(header)
        if version != VERSION or code not in DTYPE_CODES:
            raise DataError(
                f"{path}: format version {version} and token type code {code}: only version "
                f"{VERSION} and the codes {sorted(DTYPE_CODES)} are known"
            )
        without_modes = HEADER.size + 12 * num_sequences + 8 * num_boundaries
        if num_boundaries < 1 or actual not in (without_modes, without_modes + num_sequences):
            raise DataError(
                f"{path}: {actual} bytes, but its header of {num_sequences} sequences and "
                f"{num_boundaries} document boundaries (an empty data set has one) needs "
                f"{without_modes}: the file is truncated or damaged"
            )
        mapping = Mapping(file.fileno(), 0, access=ACCESS_READ)
    raw = np.frombuffer(mapping, np.uint8)
    at_pointers = HEADER.size + 4 * num_sequences
    at_documents = at_pointers + 8 * num_sequences
    return Index(
        DTYPE_CODES[code],
        raw[HEADER.size : at_pointers].view("<i4"),
        raw[at_pointers:at_documents].view("<i8"),
        raw[at_documents:without_modes].view("<i8"),
        raw[without_modes:].view(np.int8) if num_sequences and actual > without_modes else None,
    )


# --- index helpers


compiled: ModuleType | None
try:
    from megatron.data import _index_helpers as compiled  # type: ignore[attr-defined,no-redef,unused-ignore]
except ImportError:  # a checkout without built extensions: enough for planning and --mock-data
    compiled = None
if getattr(compiled, "interface", None) != 6:  # built from an older csrc/index_helpers.cpp
    compiled = None

INT32_MAX = 2**31 - 1
_FEW = 4096  # a shorter array is shuffled faster than the generator's state is passed


def _loops() -> ModuleType:
    """Return the C++ extension. Raises DataError if it was not built."""
    if compiled is None:
        raise DataError(
            "megatron.data._index_helpers, which reads data files, is not built or is from other "
            f"sources: {BUILD}"
        )
    return compiled


def shuffle(array: IntArray, random: np.random.RandomState) -> None:
    """Shuffle an array of integers of 4 or 8 bytes as `random.shuffle(array)` would.

    The order, and the generator's state afterwards, are the same. C++ is several times faster for
    arrays larger than the caches, without temporary memory or the GIL.
    """
    if len(array) < _FEW:
        random.shuffle(array)
        return
    before: Any = random.get_state()
    name, state, position, has_gauss, gauss = before
    state, position = _loops().shuffle(array.view(f"u{array.dtype.itemsize}"), state, position)
    random.set_state((name, state, position, has_gauss, gauss))


def build_sample_index(
    sizes: Int32Array,
    document_index: Int32Array,
    seq_length: int,
    num_samples: int,
) -> IntArray:
    """Return the start of each sample: [num_samples + 1, 2] of (document, token offset).

    The document is a position in document_index. Sample i starts at token i * seq_length of the
    concatenated documents, whose sizes are `sizes[document_index]`; it ends with the first token of
    sample i + 1, which belongs to both samples. The type is int32, or int64 if document_index has
    more entries than int32 can count. `sizes` need not be aligned and is not copied: only the
    result takes memory.
    Raises ValueError if the documents have fewer than num_samples * seq_length + 1 tokens.
    """
    sizes = np.ascontiguousarray(sizes, np.int32)  # sizes in an index file are unaligned: no copy
    document_index = np.require(document_index, np.int32, ["C", "A"])
    small = len(document_index) <= INT32_MAX
    build: Callable[..., IntArray] = (
        _loops().build_sample_index_int32 if small else _loops().build_sample_index_int64
    )
    return build(sizes.view(np.uint8), document_index, seq_length, num_samples)


class Shuffled(NamedTuple):
    """`number` documents from `first` on, in the order of permutation number `key`."""

    first: int
    number: int
    key: int


def token_starts(sizes: Int32Array, documents: Shuffled, stride: int) -> Int64Array:
    """Return the number of tokens before every stride-th document of an order, and of all."""
    starts: Int64Array = _loops().token_starts(sizes.view(np.uint8), *documents, stride)
    return starts


def documents_between(
    sizes: Int32Array, documents: Shuffled, starts: IntArray, stride: int, begin: int, end: int
) -> SequenceSlices:
    """Return the slices with tokens begin .. end - 1 of documents, joined in their order.

    `starts` is what token_starts returns.
    """
    return SequenceSlices(
        *_loops().documents_between(sizes.view(np.uint8), *documents, starts, stride, begin, end)
    )


def build_blend_index(weights: Sequence[float], size: int) -> tuple[IntArray, Int64Array]:
    """Return the data set of each of `size` samples of a blend, and the sample's number in it.

    Sample k comes from the data set with the largest weight * max(k, 1) - (samples taken from it so
    far), or, in a tie, from the one with the lowest number. Returns (uint8 [size], or int32 for
    more than 255 data sets; int64 [size]).

    For n data sets with weights w that add up to 1, every prefix of K samples has `taken` samples
    from data set i with taken - w_i K <= 1 - w_i and w_i K - taken <= 1 + 1/2 + ... + 1/(n - 1), up
    to the rounding of w_i K. Proof: the differences w_i K - taken add up to 0, so the data set
    drawn from has a nonnegative difference: the first bound. For the second, let A_m be
    the largest mean of m differences. If the m largest after a draw exclude the data set just drawn
    from, their mean was at most A_{m+1} and has grown by at most 1/m; otherwise it has not grown.
    Hence A_m <= A_{m+1} + 1/m, and A_n is 0. A data set never gives more samples than its share,
    rounded up, plus one.

    The time is proportional to size * n, and memory is needed only for the result. A sample takes
    about 25 ns + 0.15 ns * n: 10^9 samples from 100 data sets take 40 seconds.
    """
    few = len(weights) <= 255
    build: Callable[..., tuple[IntArray, Int64Array]] = (
        _loops().build_blend_index_uint8 if few else _loops().build_blend_index_int32
    )
    return build(np.ascontiguousarray(weights, np.float64), size)


def best_fit_pack(lengths: Int32Array, capacity: int) -> tuple[IntArray, int]:
    """Return the bin of each piece, for bins of `capacity` tokens, and the number of bins.

    Best fit, decreasing (Ding et al., "Fewer Truncations Improve Language Modeling", ICML 2024,
    section 3): the longest piece first, equal ones in order, each into the bin in which it leaves
    the least room; among bins with equal room into the one that has had this room for the shortest
    time; into a new bin if none has room. Bins are numbered in the order they are opened: int32, or
    int64 for more pieces than int32 can count. Raises ValueError for a length outside of
    1..capacity.

    It takes O(n) time for n pieces (a counting sort, and a bitmap of the room left in bins), and 8
    bytes per piece (result and order) and 4 per bin in addition to the lengths.
    """
    small = len(lengths) <= INT32_MAX
    pack: Callable[..., tuple[IntArray, int]] = (
        _loops().best_fit_pack_int32 if small else _loops().best_fit_pack_int64
    )
    return pack(lengths, capacity)


def group_by_bin(bins: IntArray, num_bins: int) -> tuple[Int64Array, IntArray]:
    """Return (starts int64 [num_bins + 1], order [pieces] in the type of `bins`).

    The pieces of bin b are order[starts[b]..starts[b + 1]-1], in order. Raises ValueError for a bin
    number of `num_bins` or more.
    """
    group: Callable[..., tuple[Int64Array, IntArray]] = _loops().group_by_bin
    return group(bins, num_bins)
