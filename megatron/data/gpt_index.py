"""Which tokens make up sample i: the document, sample and shuffle index of one split of one data set.

The order of the draws is Megatron's, so that the same data, seed and counts give the same samples: one
RandomState(seed) shuffles the documents of all epochs together, then the samples. When the last epoch gives less than
80% of an epoch's samples it is shuffled apart, documents and samples, so that the earlier epochs are used up first.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.index_cache import Arrays, load_or_build
from megatron.data.index_helpers import INT32_MAX, build_sample_index, shuffle
from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import DataError

PARTS = ("doc_idx", "sample_idx", "shuffle_idx")
_UINT32_LIMIT = 2**32 - 2
_BLOCK = 1 << 20
_SPOT_CHECKS = 16


@dataclass(frozen=True)
class IndexRequest:
    """What decides an index. `start` and `stop` bound the sequences of the split; `tokens_per_epoch` is how many
    tokens they have. `prefix`, `name` and `split` enter the description as they were given."""

    prefix: str
    name: str
    split: str
    start: int
    stop: int
    tokens_per_epoch: int
    num_samples: int
    seq_length: int
    seed: int

    @property
    def num_epochs(self) -> int:
        """The smallest e >= 1 with (e * tokens_per_epoch - 1) // seq_length >= num_samples."""
        return max(1, -(-(self.num_samples * self.seq_length + 1) // self.tokens_per_epoch))

    def samples_in(self, epochs: int) -> int:
        """Whole samples in that many epochs; the last token of one sample is the first of the next."""
        return (epochs * self.tokens_per_epoch - 1) // self.seq_length

    @property
    def separate_last_epoch(self) -> bool:
        if self.num_epochs == 1:
            return False
        from_last_epoch = self.num_samples - self.samples_in(self.num_epochs - 1)
        return from_last_epoch < int(0.80 * self.samples_in(1))

    @property
    def description(self) -> str:
        """The text whose md5 names the cache files: Megatron-DeepSpeed's, so that its caches are found."""
        return (
            "GPT Dataset\n\n"
            f"Data prefix {self.prefix}\n"
            f"Dataset name {self.name}\n"
            f"Number of samples {self.num_samples}\n"
            f"Number of epochs {self.num_epochs}\n"
            f"Sequence length {self.seq_length}\n"
            f"Random seed {self.seed}\n"
            f"Split {self.split}\n"
        )


def build_index(request: IndexRequest, sizes: npt.NDArray[np.int32], *, uint32_limit: int = _UINT32_LIMIT) -> Arrays:
    """The three arrays of `PARTS`.

    doc_idx int32 [epochs * documents], sequence numbers in drawn order; sample_idx [n + 1, 2], see build_sample_index;
    shuffle_idx uint32 [n] (int64 from `uint32_limit` samples on), the sample that the i-th read gives.

    Memory is that of the arrays, which is what the format stores, and a few MB: 4 bytes per document and epoch, and 12
    per sample (8 more where doc_idx has 2^31 entries, 4 more from 2^32 samples on). 100 million documents of 300
    tokens in samples of 2,048 take 0.6 GB. Without the C++ extension it is some 30 MB more.
    """
    random = np.random.RandomState(request.seed)
    last_apart = request.separate_last_epoch
    document_index = _document_index(request, last_apart, random)
    num_samples = request.samples_in(request.num_epochs)
    sample_index = build_sample_index(sizes, document_index, request.seq_length, num_samples)
    first = request.samples_in(request.num_epochs - 1) if last_apart else num_samples
    return {
        "doc_idx": document_index,
        "sample_idx": sample_index,
        "shuffle_idx": _shuffle_index(first, num_samples, random, uint32_limit),
    }


def _document_index(request: IndexRequest, last_apart: bool, random: np.random.RandomState) -> npt.NDArray[np.int32]:
    num_documents = request.stop - request.start
    index = np.empty(request.num_epochs * num_documents, np.int32)
    _count_up(index.reshape(request.num_epochs, num_documents), request.start)
    apart = num_documents if last_apart else 0
    shuffle(index[: len(index) - apart], random)
    shuffle(index[len(index) - apart :], random)  # an empty part draws nothing
    return index


def _shuffle_index(
    first: int, total: int, random: np.random.RandomState, uint32_limit: int
) -> npt.NDArray[np.uint32 | np.int64]:
    index: npt.NDArray[Any] = np.empty(total, np.int64 if total >= uint32_limit else np.uint32)
    _count_up(index, 0)
    shuffle(index[:first], random)
    shuffle(index[first:], random)
    return index


def _count_up(array: npt.NDArray[Any], start: int) -> None:
    """Fill each row with start, start + 1, ..., without a second array of this length."""
    for at in range(0, array.shape[-1], _BLOCK):
        part = array[..., at : at + _BLOCK]
        part[...] = np.arange(start + at, start + at + part.shape[-1], dtype=array.dtype)


def tokens_of_split(indexed: IndexedDataset, name: str, split: str, bounds: tuple[int, int]) -> int:
    """Tokens of a split. Raises DataError where it has none, or more sequences than an index can number."""
    if bounds[1] > INT32_MAX:
        raise DataError(f"{indexed.prefix}: more than {INT32_MAX} sequences: preprocess it in parts and blend them")
    tokens = indexed.tokens_between(*bounds)
    if tokens == 0:
        raise DataError(
            f"{indexed.prefix}: the {name} split {split!r} (sequences {bounds[0]}..{bounds[1]}) has no tokens"
        )
    return tokens


def cache_directories(prefix: str, data_cache_path: str | os.PathLike[str] | None) -> list[str | os.PathLike[str]]:
    """Where an index of this data set is looked up; it is written to the last."""
    beside = os.path.join(os.path.dirname(prefix), "index-cache")
    return [beside] if data_cache_path is None else [beside, data_cache_path]


def load_index(
    indexed: IndexedDataset,
    request: IndexRequest,
    *,
    data_cache_path: str | os.PathLike[str] | None = None,
    verify: bool = False,
) -> Arrays:
    """The index from the cache, built first if need be.

    Looked up in `index-cache` beside the data, then in `data_cache_path`; written to `data_cache_path` if given. Raises
    DataError as load_or_build does, and before it builds for sizes in the .idx file that cannot be right.
    """

    def build() -> Arrays:
        indexed.check(request.start, request.stop)
        return build_index(request, indexed.sizes)

    return load_or_build(
        request.description,
        PARTS,
        cache_directories(request.prefix, data_cache_path),
        build,
        fits=lambda arrays: index_fits(arrays, request, indexed.sizes),
        verify=verify,
    )


def index_fits(arrays: Arrays, request: IndexRequest, sizes: npt.NDArray[np.int32]) -> bool:
    """Whether cached arrays belong to this data.

    The description does not say what is in the data files, so a cache outlives data that was preprocessed anew under
    the same name. Shapes are compared, and a few samples are measured: each must span seq_length + 1 tokens.
    """
    documents, rows, shuffle = (arrays[part] for part in PARTS)
    num_samples = request.samples_in(request.num_epochs)
    if documents.shape != (request.num_epochs * (request.stop - request.start),):
        return False
    if rows.shape != (num_samples + 1, 2) or shuffle.shape != (num_samples,) or num_samples == 0:
        return False
    for sample in np.unique(np.linspace(0, num_samples - 1, _SPOT_CHECKS).astype(np.int64)):
        if not _sample_fits(documents, rows[sample : sample + 2].tolist(), request, sizes):
            return False
    return True


def _sample_fits(
    documents: npt.NDArray[np.int32], rows: Sequence[Sequence[int]], request: IndexRequest, sizes: npt.NDArray[np.int32]
) -> bool:
    (first, offset), (last, last_offset) = rows
    if not 0 <= first <= last < len(documents):
        return False
    sequences = documents[first : last + 1]
    if sequences.min() < request.start or sequences.max() >= request.stop:
        return False
    lengths = sizes[sequences]
    inside = 0 <= offset <= lengths[0] and 0 <= last_offset < lengths[-1]
    return inside and int(lengths[:-1].sum(dtype=np.int64)) - offset + last_offset == request.seq_length
