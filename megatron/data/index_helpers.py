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

INT32_MAX = 2**31 - 1


def build_sample_index(
    sizes: npt.NDArray[np.int32], document_index: npt.NDArray[np.int32], seq_length: int, num_samples: int
) -> npt.NDArray[Any]:
    """Where each sample starts: [num_samples + 1, 2] of (position in document_index, token offset).

    Sample i starts at token i * seq_length of the documents `sizes[document_index]` joined in this order; it ends at
    the first token of sample i+1, which both contain. int32, or int64 when document_index has 2^31 entries or more.
    Raises ValueError when the documents hold fewer than num_samples * seq_length + 1 tokens.
    """
    sizes = np.require(sizes, np.int32, ["C", "A"])  # the index file leaves them unaligned
    document_index = np.require(document_index, np.int32, ["C", "A"])
    small = len(document_index) <= INT32_MAX
    if compiled is None:
        rows = sample_index_numpy(sizes, document_index, seq_length, num_samples)
        return rows.astype(np.int32) if small else rows
    function = compiled.build_sample_index_int32 if small else compiled.build_sample_index_int64
    result: npt.NDArray[Any] = function(sizes, document_index, seq_length, num_samples)
    return result


def sample_index_numpy(
    sizes: npt.NDArray[np.int32], document_index: npt.NDArray[np.int32], seq_length: int, num_samples: int
) -> npt.NDArray[np.int64]:
    """`build_sample_index` in closed form: look up token i * seq_length in the running sum of the sizes."""
    ends = np.cumsum(sizes[document_index], dtype=np.int64)
    tokens = np.arange(num_samples + 1, dtype=np.int64) * seq_length
    rows = np.zeros((num_samples + 1, 2), np.int64)  # row 0 is (0, 0) even when the first document is empty
    if num_samples == 0:
        return rows
    if not len(ends) or tokens[-1] >= ends[-1]:
        raise ValueError("the documents hold too few tokens for num_samples")
    rows[1:, 0] = np.searchsorted(ends, tokens[1:], side="right")
    starts = ends - sizes[document_index]
    rows[1:, 1] = tokens[1:] - starts[rows[1:, 0]]
    return rows


def build_blend_index(weights: npt.NDArray[np.float64], size: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """For `size` samples of a blend: which data set each comes from, and the how-manieth of that data set it is.

    Sample k comes from the data set with the largest weight * max(k, 1) - (samples it has given so far), the lowest
    numbered where several are equal. Returns (uint8 [size], or int32 for more than 255 data sets; int64 [size]).
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
