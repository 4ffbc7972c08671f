"""The index loops: in C++ where the extension was built, otherwise in numpy, with the same result to the byte."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

compiled: ModuleType | None
try:
    from megatron.data import _index_helpers as compiled  # type: ignore[attr-defined,no-redef,unused-ignore]
except ImportError:  # a checkout that was not built: slower, and no different
    compiled = None
if getattr(compiled, "interface", None) != 2:  # built from an older csrc/index_helpers.cpp
    compiled = None

INT32_MAX = 2**31 - 1
# Codes of the .idx format whose tokens are integers.
TOKEN_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FEW = 4096  # a shorter array is shuffled sooner than the state of the generator is handed over
_BLOCK = 1 << 20  # so many entries the numpy loops take at once, which keeps their memory flat


class OutOfBounds(ValueError):
    """A run of tokens that does not lie within the bytes; `run` is its number, `byte` where it would start."""

    def __init__(self, run: int, byte: int, num_tokens: int, num_bytes: int) -> None:
        super().__init__(f"{num_tokens} tokens from byte {byte} (run {run}) are not within the {num_bytes} bytes")
        self.run, self.byte = run, byte


def shuffle(array: npt.NDArray[Any], random: np.random.RandomState) -> None:
    """`random.shuffle(array)` for one dimension: the same order and the same state of the generator after it.

    In C++ for aligned integers of 4 and 8 bytes, several times faster for arrays larger than the caches, without
    temporary memory. Releases the GIL. Raises ValueError for an array that cannot be written.
    """
    plain = array.ndim == 1 and array.flags.c_contiguous and array.flags.aligned
    plain = plain and array.dtype.kind in "iu" and array.dtype.itemsize in (4, 8)
    before: Any = random.get_state()
    name, state, position, has_gauss, gauss = before
    if compiled is None or len(array) < _FEW or not plain or name != "MT19937":
        random.shuffle(array)
        return
    state, position = compiled.shuffle(array.view(f"u{array.dtype.itemsize}"), state, position)
    random.set_state((name, state, position, has_gauss, gauss))


def build_sample_index(
    sizes: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    seq_length: int,
    num_samples: int,
    *,
    int32_limit: int = INT32_MAX,
) -> npt.NDArray[Any]:
    """Where each sample starts: [num_samples + 1, 2] of (position in document_index, token offset).

    Sample i starts at token i * seq_length of the documents `sizes[document_index]` joined in this order; it ends at
    the first token of sample i+1, which both contain. int32, or int64 when document_index has more entries than
    `int32_limit`. `sizes` need not be aligned, and nothing is copied: the memory is that of the result. Raises
    ValueError when the documents hold fewer than num_samples * seq_length + 1 tokens.
    """
    sizes = np.ascontiguousarray(sizes, np.int32)  # no copy for the unaligned ones of an index file
    document_index = np.require(document_index, np.int32, ["C", "A"])
    small = len(document_index) <= int32_limit
    if compiled is None:
        return sample_index_numpy(sizes, document_index, seq_length, num_samples, np.int32 if small else np.int64)
    function = compiled.build_sample_index_int32 if small else compiled.build_sample_index_int64
    result: npt.NDArray[Any] = function(sizes.view(np.uint8), document_index, seq_length, num_samples)
    return result


def sample_index_numpy(
    sizes: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    seq_length: int,
    num_samples: int,
    dtype: npt.DTypeLike = np.int64,
) -> npt.NDArray[Any]:
    """`build_sample_index` in closed form: look up token i * seq_length in the running sum of the sizes."""
    rows = np.zeros((num_samples + 1, 2), dtype)  # row 0 is (0, 0) even when the first document is empty
    sample, before = 1, 0  # the next row; tokens of the documents before the block
    for position in range(0, len(document_index), _BLOCK):
        if sample > num_samples:
            break
        lengths = sizes[document_index[position : position + _BLOCK]]
        ends = before + np.cumsum(lengths, dtype=np.int64)
        stop = min(num_samples + 1, -(-int(ends[-1]) // seq_length))
        if stop > sample:
            tokens = np.arange(sample, stop, dtype=np.int64) * seq_length
            found = np.searchsorted(ends, tokens, side="right")
            rows[sample:stop, 0] = position + found
            rows[sample:stop, 1] = tokens - (ends - lengths)[found]
            sample = stop
        before = int(ends[-1])
    if sample <= num_samples:
        raise ValueError("the documents hold too few tokens for num_samples")
    return rows


def build_blend_index(weights: npt.NDArray[np.float64], size: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """For `size` samples of a blend: which data set each comes from, and the how-manieth of that data set it is.

    Sample k comes from the data set with the largest weight * max(k, 1) - (samples it has given so far), the lowest
    numbered where several are equal. Returns (uint8 [size], or int32 for more than 255 data sets; int64 [size]).

    Of n data sets with weights w that add up to 1, every prefix of K samples holds `taken` of data set i with
    taken - w_i K <= 1 - w_i and w_i K - taken <= 1 + 1/2 + ... + 1/(n - 1), up to the rounding of w_i K. (The
    differences add up to 0, so the one that is drawn from is not negative, which is the first. For the second, let A_m
    be the largest mean of m differences: if the m largest after a draw are without the data set just drawn from, their
    mean was at most A_{m+1} and has grown by at most 1/m; with it, their mean has not grown. So A_m <= A_{m+1} + 1/m,
    and A_n is 0.) One count more than the rounded-up share is never taken.

    Time is size * n, and the memory that of the result. In C++ a sample takes about 25 ns + 0.15 ns * n: 10^9 samples
    of 100 data sets take 40 seconds.
    """
    weights = np.ascontiguousarray(weights, np.float64)
    small = len(weights) <= 255
    if compiled is None:
        which, sample = blend_index_numpy(weights, size)
        return which.astype(np.uint8) if small else which.astype(np.int32), sample
    function = compiled.build_blend_index_uint8 if small else compiled.build_blend_index_int32
    result: tuple[npt.NDArray[Any], npt.NDArray[np.int64]] = function(weights, size)
    return result


def blend_index_numpy(
    weights: npt.NDArray[np.float64], size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`build_blend_index`, one numpy step per sample."""
    taken = np.zeros(len(weights))
    which = np.empty(size, np.int64)
    sample = np.empty(size, np.int64)
    for k in range(size):
        chosen = int(np.argmax(weights * float(max(k, 1)) - taken))
        which[k], sample[k] = chosen, taken[chosen]
        taken[chosen] += 1
    return which, sample


def gather_tokens(
    data: npt.NDArray[np.uint8],
    dtype_code: int,
    byte_starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    out: npt.NDArray[np.int64],
) -> None:
    """Copy many runs of tokens into `out`, joined: lengths[i] tokens from byte byte_starts[i] of `data`, for each i.

    `dtype_code` is that of the .idx format, for an integer type; starts need no alignment. Releases the GIL. Raises
    OutOfBounds (a ValueError) for the first run that is not within `data`, and ValueError when `out` is not exactly as
    long as the runs together or the code is not of an integer type; `out` is then as it was.
    """
    if dtype_code not in TOKEN_TYPES:
        raise ValueError(f"type code {dtype_code} is not that of an integer type: {sorted(TOKEN_TYPES)} are")
    byte_starts = np.ascontiguousarray(byte_starts, np.int64)
    lengths = np.ascontiguousarray(lengths, np.int64)
    gather = _gather_numpy if compiled is None else compiled.gather_tokens
    outside = gather(data, dtype_code, byte_starts, lengths, out)
    if outside >= 0:
        raise OutOfBounds(outside, int(byte_starts[outside]), int(lengths[outside]), len(data))


def _gather_numpy(
    data: npt.NDArray[np.uint8],
    dtype_code: int,
    byte_starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    out: npt.NDArray[np.int64],
) -> int:
    """Number of the first run outside of `data`; -1 when all were copied."""
    dtype = np.dtype(TOKEN_TYPES[dtype_code])
    if len(byte_starts) != len(lengths):
        raise ValueError("expected one length for each start")
    outside = (byte_starts < 0) | (byte_starts > len(data)) | (lengths < 0)
    outside |= lengths > (len(data) - np.where(outside, 0, byte_starts)) // dtype.itemsize
    if outside.any():
        return int(np.argmax(outside))
    if len(out) != int(lengths.sum()):
        raise ValueError("out has another size than the runs together")
    at = 0
    for start, length in zip(byte_starts.tolist(), lengths.tolist(), strict=True):
        out[at : at + length] = data[start : start + length * dtype.itemsize].view(dtype)
        at += length
    return -1


def best_fit_pack(
    lengths: npt.NDArray[np.integer[Any]], capacity: int, *, int32_limit: int = INT32_MAX
) -> tuple[npt.NDArray[Any], int]:
    """The bin of each piece when bins hold `capacity` tokens, and how many bins there are.

    Best fit, decreasing (Ding et al., "Fewer Truncations Improve Language Modeling", ICML 2024, section 3): the longest
    piece first, equal ones in their order, each into the bin where it leaves the least room; of bins with equal room
    the one that came to have it last; a new bin where none has room. Bins are numbered in the order of being opened:
    int32, or int64 for more pieces than `int32_limit`. Raises ValueError for a length out of 1..capacity.

    O(n) for n pieces in C++ (a counting sort, and a bitmap of the rooms that bins have left), with 8 bytes per piece
    (the result and the order) and 4 per bin beside the lengths.
    """
    if not 1 <= capacity <= INT32_MAX:
        raise ValueError(f"bins of {capacity} tokens: from 1 to {INT32_MAX} are possible")
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= capacity:
        piece = int(np.argmax((lengths < 1) | (lengths > capacity)))
        raise ValueError(f"piece {piece} has {lengths[piece]} tokens, which is not within 1..{capacity}")
    narrow: npt.NDArray[np.int32] = np.require(lengths, np.int32, ["C", "A"])
    small = len(narrow) <= int32_limit
    if compiled is None:
        bins, num_bins = _best_fit_numpy(narrow, capacity)
        return bins.astype(np.int32) if small else bins, num_bins
    function = compiled.best_fit_pack_int32 if small else compiled.best_fit_pack_int64
    result: tuple[npt.NDArray[Any], int] = function(narrow, capacity)
    return result


def _best_fit_numpy(lengths: npt.NDArray[np.int32], capacity: int) -> tuple[npt.NDArray[np.int64], int]:
    """`best_fit_pack`, one step of Python per piece."""
    order = np.argsort(-lengths, kind="stable")
    bins = np.empty(len(lengths), np.int64)
    with_room: dict[int, list[int]] = {}  # room left -> bins, the last one on top
    rooms, num_bins = 0, 0  # rooms: bit r is set while some bin has room r
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        enough = rooms >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            chosen = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, chosen, num_bins = capacity, num_bins, num_bins + 1
        if room > length:
            with_room.setdefault(room - length, []).append(chosen)
            rooms |= 1 << (room - length)
        bins[piece] = chosen
    return bins, num_bins


def group_by_bin(
    bins: npt.NDArray[np.signedinteger[Any]], num_bins: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """(starts int64 [num_bins + 1], order [pieces] of the type of `bins`): the pieces of bin b are
    order[starts[b]..starts[b + 1]-1], in their order. Raises ValueError for a bin that is not below `num_bins`."""
    if compiled is not None:
        result: tuple[npt.NDArray[np.int64], npt.NDArray[Any]] = compiled.group_by_bin(bins, num_bins)
        return result
    if len(bins) and not 0 <= bins.min() <= bins.max() < num_bins:
        raise ValueError("a bin is not below num_bins")
    starts = np.zeros(num_bins + 1, np.int64)
    np.cumsum(np.bincount(bins, minlength=num_bins), out=starts[1:])
    return starts, np.argsort(bins, kind="stable").astype(bins.dtype)
