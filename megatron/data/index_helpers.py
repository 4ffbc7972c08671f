"""The loops over indices and tokens that csrc/index_helpers.cpp does in C++."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.errors import DataError

compiled: ModuleType | None
try:
    from megatron.data import _index_helpers as compiled  # type: ignore[attr-defined,no-redef,unused-ignore]
except ImportError:  # a checkout that was not built: enough for planning and for --mock-data
    compiled = None
if getattr(compiled, "interface", None) != 2:  # built from an older csrc/index_helpers.cpp
    compiled = None

INT32_MAX = 2**31 - 1
# The integer types of the .idx format, by their codes.
TOKEN_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FEW = 4096  # shuffling a shorter array is faster than passing the state of the generator


def _loops() -> ModuleType:
    """Return the C++ extension. Raises DataError if it was not built."""
    if compiled is None:
        raise DataError(
            "megatron/data/_index_helpers, which reads data files, is not built or is from an "
            "older source: run "
            "pip install -e . with a C++ compiler"
        )
    return compiled


def shuffle(array: npt.NDArray[Any], random: np.random.RandomState) -> None:
    """Do `random.shuffle(array)` for one dimension, with the same order and the same generator
    state afterwards.

    Aligned integers of 4 and 8 bytes are shuffled in C++: several times faster for arrays larger
    than the caches, without temporary memory or the GIL. Raises ValueError for a read-only array.
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
    """Return where each sample starts: [num_samples + 1, 2] of (position in document_index, token
    offset).

    Sample i starts at token i * seq_length of the documents `sizes[document_index]` joined in this
    order; it ends with the first token of sample i+1, which belongs to both. int32, or int64 if
    document_index has more entries than `int32_limit`. `sizes` need not be aligned, and nothing is
    copied: only the result takes memory. Raises ValueError if the documents have fewer than
    num_samples * seq_length + 1 tokens.
    """
    sizes = np.ascontiguousarray(sizes, np.int32)  # no copy for the unaligned ones of an index file
    document_index = np.require(document_index, np.int32, ["C", "A"])
    small = len(document_index) <= int32_limit
    function = _loops().build_sample_index_int32 if small else _loops().build_sample_index_int64
    result: npt.NDArray[Any] = function(
        sizes.view(np.uint8), document_index, seq_length, num_samples
    )
    return result


def build_blend_index(
    weights: npt.NDArray[np.float64], size: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Return the data set of each of `size` samples of a blend, and the number of the sample in its
    data set.

    Sample k comes from the data set with the largest weight * max(k, 1) - (samples taken from it so
    far), the lowest number among equal ones. Returns (uint8 [size], or int32 for more than 255 data
    sets; int64 [size]).

    Of n data sets with weights w that add up to 1, every prefix of K samples has `taken` of data
    set i with taken - w_i K <= 1 - w_i and w_i K - taken <= 1 + 1/2 + ... + 1/(n - 1), up to the
    rounding of w_i K. Proof: the differences w_i K - taken add up to 0, so the data set drawn from
    has one that is not negative: the first bound. For the second, let A_m be the largest mean of m
    differences. If the m largest after a draw exclude the data set just drawn from, their mean was
    at most A_{m+1} and has grown by at most 1/m; otherwise it has not grown. So A_m <= A_{m+1} +
    1/m, and A_n is 0. No more samples than the rounded-up share plus one are ever taken.

    Takes time for size * n and memory for the result. A sample takes about 25 ns + 0.15 ns * n:
    10^9 samples of 100 data sets take 40 seconds.
    """
    weights = np.ascontiguousarray(weights, np.float64)
    function = (
        _loops().build_blend_index_uint8
        if len(weights) <= 255
        else _loops().build_blend_index_int32
    )
    result: tuple[npt.NDArray[Any], npt.NDArray[np.int64]] = function(weights, size)
    return result


def gather_tokens(
    data: npt.NDArray[np.uint8],
    dtype_code: int,
    byte_starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    out: npt.NDArray[np.int64],
) -> None:
    """Copy runs of tokens into `out`, joined: lengths[i] tokens from byte byte_starts[i] of `data`,
    for each i.

    `dtype_code` is the code of an integer type in the .idx format; starts need no alignment.
    Releases the GIL. Raises ValueError for the first run beyond `data`, if `out` does not have
    exactly the length of all runs, or if the code is not of an integer type; then `out` is
    unchanged.
    """
    if dtype_code not in TOKEN_TYPES:
        raise ValueError(
            f"type code {dtype_code} is not of an integer type: {sorted(TOKEN_TYPES)} are"
        )
    byte_starts = np.ascontiguousarray(byte_starts, np.int64)
    lengths = np.ascontiguousarray(lengths, np.int64)
    outside = _loops().gather_tokens(data, dtype_code, byte_starts, lengths, out)
    if outside >= 0:
        raise ValueError(
            f"{lengths[outside]} tokens from byte {byte_starts[outside]} (run {outside}) are not "
            "within the "
            f"{len(data)} bytes"
        )


def best_fit_pack(
    lengths: npt.NDArray[np.integer[Any]], capacity: int, *, int32_limit: int = INT32_MAX
) -> tuple[npt.NDArray[Any], int]:
    """Return the bin of each piece, for bins of `capacity` tokens, and the number of bins.

    Best fit, decreasing (Ding et al., "Fewer Truncations Improve Language Modeling", ICML 2024,
    section 3): the longest piece first, equal ones in order, each into the bin where it leaves the
    least room; of bins with equal room the one that has had it for the shortest time; a new bin if
    none has room. Bins are numbered in the order they are opened: int32, or int64 for more pieces
    than `int32_limit`. Raises ValueError for a length outside of 1..capacity.

    O(n) for n pieces (a counting sort, and a bitmap of the room left in bins), with 8 bytes per
    piece (result and order) and 4 per bin besides the lengths.
    """
    if not 1 <= capacity <= INT32_MAX:
        raise ValueError(f"bins of {capacity} tokens: from 1 to {INT32_MAX} are possible")
    if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= capacity:
        piece = int(np.argmax((lengths < 1) | (lengths > capacity)))
        raise ValueError(f"piece {piece} has {lengths[piece]} tokens, expected 1..{capacity}")
    narrow: npt.NDArray[np.int32] = np.require(lengths, np.int32, ["C", "A"])
    small = len(narrow) <= int32_limit
    function = _loops().best_fit_pack_int32 if small else _loops().best_fit_pack_int64
    result: tuple[npt.NDArray[Any], int] = function(narrow, capacity)
    return result


def group_by_bin(
    bins: npt.NDArray[np.signedinteger[Any]], num_bins: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Return (starts int64 [num_bins + 1], order [pieces] in the type of `bins`).

    The pieces of bin b are order[starts[b]..starts[b + 1]-1], in order. Raises ValueError for a bin
    from `num_bins` on.
    """
    result: tuple[npt.NDArray[np.int64], npt.NDArray[Any]] = _loops().group_by_bin(bins, num_bins)
    return result
