"""The index loops, in C++: csrc/ has what Python is too slow for."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.errors import DataError

compiled: ModuleType | None
try:
    from megatron.data import _index_helpers as compiled  # type: ignore[attr-defined,no-redef,unused-ignore]
except ImportError:  # a checkout that was not built: enough for planning and for made-up data
    compiled = None
if getattr(compiled, "interface", None) != 2:  # built from an older csrc/index_helpers.cpp
    compiled = None

INT32_MAX = 2**31 - 1
# Codes of the .idx format whose tokens are integers.
TOKEN_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FEW = 4096  # a shorter array is shuffled sooner than the state of the generator is handed over


class OutOfBounds(ValueError):
    """A run of tokens that does not lie within the bytes; `run` is its number, `byte` where it would start."""

    def __init__(self, run: int, byte: int, num_tokens: int, num_bytes: int) -> None:
        super().__init__(f"{num_tokens} tokens from byte {byte} (run {run}) are not within the {num_bytes} bytes")
        self.run, self.byte = run, byte


def _loops() -> ModuleType:
    """The extension. Raises DataError where it was not built."""
    if compiled is None:
        raise DataError(
            "megatron/data/_index_helpers is not built, or from an older source, and data files are read by it: run "
            "pip install -e . where there is a C++ compiler"
        )
    return compiled


def shuffle(array: npt.NDArray[Any], random: np.random.RandomState) -> None:
    """`random.shuffle(array)` for one dimension: the same order and the same state of the generator after it.

    In C++ for aligned integers of 4 and 8 bytes, several times faster for arrays larger than the caches, without
    temporary memory. Releases the GIL. Raises ValueError for an array that cannot be written.
    """
    plain = array.ndim == 1 and array.flags.c_contiguous and array.flags.aligned
    plain = plain and array.dtype.kind in "iu" and array.dtype.itemsize in (4, 8)
    before: Any = random.get_state()
    name, state, position, has_gauss, gauss = before
    if len(array) < _FEW or not plain or name != "MT19937":
        random.shuffle(array)
        return
    state, position = _loops().shuffle(array.view(f"u{array.dtype.itemsize}"), state, position)
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
    function = _loops().build_sample_index_int32 if small else _loops().build_sample_index_int64
    result: npt.NDArray[Any] = function(sizes.view(np.uint8), document_index, seq_length, num_samples)
    return result


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

    Time is size * n, and the memory that of the result. A sample takes about 25 ns + 0.15 ns * n: 10^9 samples
    of 100 data sets take 40 seconds.
    """
    weights = np.ascontiguousarray(weights, np.float64)
    function = _loops().build_blend_index_uint8 if len(weights) <= 255 else _loops().build_blend_index_int32
    result: tuple[npt.NDArray[Any], npt.NDArray[np.int64]] = function(weights, size)
    return result


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
    outside = _loops().gather_tokens(data, dtype_code, byte_starts, lengths, out)
    if outside >= 0:
        raise OutOfBounds(outside, int(byte_starts[outside]), int(lengths[outside]), len(data))


def best_fit_pack(
    lengths: npt.NDArray[np.integer[Any]], capacity: int, *, int32_limit: int = INT32_MAX
) -> tuple[npt.NDArray[Any], int]:
    """The bin of each piece when bins hold `capacity` tokens, and how many bins there are.

    Best fit, decreasing (Ding et al., "Fewer Truncations Improve Language Modeling", ICML 2024, section 3): the longest
    piece first, equal ones in their order, each into the bin where it leaves the least room; of bins with equal room
    the one that came to have it last; a new bin where none has room. Bins are numbered in the order of being opened:
    int32, or int64 for more pieces than `int32_limit`. Raises ValueError for a length out of 1..capacity.

    O(n) for n pieces (a counting sort, and a bitmap of the rooms that bins have left), with 8 bytes per piece
    (the result and the order) and 4 per bin beside the lengths.
    """
    if not 1 <= capacity <= INT32_MAX:
        raise ValueError(f"bins of {capacity} tokens: from 1 to {INT32_MAX} are possible")
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= capacity:
        piece = int(np.argmax((lengths < 1) | (lengths > capacity)))
        raise ValueError(f"piece {piece} has {lengths[piece]} tokens, which is not within 1..{capacity}")
    narrow: npt.NDArray[np.int32] = np.require(lengths, np.int32, ["C", "A"])
    small = len(narrow) <= int32_limit
    function = _loops().best_fit_pack_int32 if small else _loops().best_fit_pack_int64
    result: tuple[npt.NDArray[Any], int] = function(narrow, capacity)
    return result


def group_by_bin(
    bins: npt.NDArray[np.signedinteger[Any]], num_bins: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """(starts int64 [num_bins + 1], order [pieces] of the type of `bins`): the pieces of bin b are
    order[starts[b]..starts[b + 1]-1], in their order. Raises ValueError for a bin that is not below `num_bins`."""
    result: tuple[npt.NDArray[np.int64], npt.NDArray[Any]] = _loops().group_by_bin(bins, num_bins)
    return result
