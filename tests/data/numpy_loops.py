"""Reference for csrc/*.cpp in numpy and Python: the calls of megatron.data._index_helpers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.indexed_dataset import DTYPE_CODES

_BLOCK = 1 << 20  # entries taken at once, which bounds memory


def shuffle(
    array: npt.NDArray[Any], state: npt.NDArray[Any], position: int
) -> tuple[npt.NDArray[Any], int]:
    random = np.random.RandomState()
    random.set_state(("MT19937", state, position))
    random.shuffle(array)
    _, state, position, *_ = random.get_state()  # type: ignore[misc]
    return state, position


def _sample_index(
    sizes: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    seq_length: int,
    num_samples: int,
    dtype: npt.DTypeLike,
) -> npt.NDArray[Any]:
    """Look up token i * seq_length in the running sum of the sizes (closed form)."""
    # Row 0 is (0, 0) even when the first document is empty.
    rows = np.zeros((num_samples + 1, 2), dtype)
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


def build_sample_index_int32(
    sizes: Any, documents: Any, seq_length: int, num_samples: int
) -> npt.NDArray[Any]:
    return _sample_index(sizes.view(np.int32), documents, seq_length, num_samples, np.int32)


def build_sample_index_int64(
    sizes: Any, documents: Any, seq_length: int, num_samples: int
) -> npt.NDArray[Any]:
    return _sample_index(sizes.view(np.int32), documents, seq_length, num_samples, np.int64)


def _blend_index(
    weights: npt.NDArray[np.float64], size: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Build the blend index with one numpy step per sample."""
    taken = np.zeros(len(weights))
    which = np.empty(size, np.int64)
    sample = np.empty(size, np.int64)
    for k in range(size):
        chosen = int(np.argmax(weights * float(max(k, 1)) - taken))
        which[k], sample[k] = chosen, taken[chosen]
        taken[chosen] += 1
    return which, sample


def build_blend_index_uint8(
    weights: Any, size: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    which, sample = _blend_index(weights, size)
    return which.astype(np.uint8), sample


def build_blend_index_int32(
    weights: Any, size: int
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    which, sample = _blend_index(weights, size)
    return which.astype(np.int32), sample


def gather_tokens(
    data: npt.NDArray[np.uint8],
    dtype_code: int,
    byte_starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64],
    out: npt.NDArray[np.int64],
) -> int:
    """Return the number of the first run outside `data`; -1 when all were copied."""
    dtype = DTYPE_CODES[dtype_code]
    if dtype.kind not in "iu":
        raise ValueError("not the code of an integer type")
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


def best_fit_pack_int64(
    lengths: npt.NDArray[np.int32], capacity: int
) -> tuple[npt.NDArray[np.int64], int]:
    """Pack best-fit with one step of Python per piece."""
    if capacity < 1 or (len(lengths) and not 1 <= lengths.min() <= lengths.max() <= capacity):
        raise ValueError("a length is not within 1..capacity")
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


def best_fit_pack_int32(
    lengths: npt.NDArray[np.int32], capacity: int
) -> tuple[npt.NDArray[np.int32], int]:
    bins, num_bins = best_fit_pack_int64(lengths, capacity)
    return bins.astype(np.int32), num_bins


def group_by_bin(
    bins: npt.NDArray[Any], num_bins: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    if len(bins) and not 0 <= bins.min() <= bins.max() < num_bins:
        raise ValueError("a bin is not below num_bins")
    starts = np.zeros(num_bins + 1, np.int64)
    np.cumsum(np.bincount(bins, minlength=num_bins), out=starts[1:])
    return starts, np.argsort(bins, kind="stable").astype(bins.dtype)
