"""Samples of seq_length + 1 tokens: of one data set, of a blend, of a data set of one's own, or
generated.

All have a length and return int64 arrays, so a training loop takes any of them.

The samples of one data set follow from three arrays: document, sample and shuffle index. The order
of the draws is Megatron's, so that the same data, seed and counts give the same samples: one
RandomState(seed) shuffles the documents of all epochs together, then the samples. When the last
epoch gives less than 80% of an epoch's samples, its documents and samples are shuffled separately,
so that the earlier epochs are used up first.
"""

from __future__ import annotations

import hashlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron.data.index_cache import Arrays, load_or_build
from megatron.data.indexed_dataset import (
    INT32_MAX,
    IndexedDataset,
    bin_path,
    build_blend_index,
    build_sample_index,
    shuffle,
)
from megatron.errors import DataError

Tokens = npt.NDArray[np.int64]
# Sequence, first token and number of tokens of the pieces that are joined to a sample.
Pieces = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]
PARTS = ("doc_idx", "sample_idx", "shuffle_idx")
_UINT32_LIMIT = 2**32 - 2
_BLOCK = 1 << 20
_SPOT_CHECKS = 16


class TokenDataset(Protocol):
    """The data set that a stream of micro-batches reads."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Tokens:
        """Return sample `index`, int64 [seq_length + 1]."""
        ...

    def segments(self, index: int, /) -> npt.NDArray[np.int64] | None:
        """Return the lengths of the pieces of sample `index`, from its first token on; the rest is
        padding.

        None if pieces are not separated: then the id that ends a document tells where documents
        end.
        """
        ...

    def where(self, index: int, token: int = 0, /) -> str:
        """Return file, document and byte of a token of sample `index`, for messages."""
        ...


class Source(TokenDataset, Protocol):
    """A data set whose samples come from one pair of files: a part of a blend, and the unit whose
    use is counted.

    `name` is the prefix of the files, `description` names the index in the cache,
    `tokens_per_epoch` counts all tokens of the split.
    """

    name: str
    description: str
    tokens_per_epoch: int

    def tokens_in(self, indices: npt.NDArray[np.int64], /) -> int:
        """Return the number of tokens trained on in these samples, without padding."""
        ...


class _Unpacked:
    """The members that all data sets share whose samples are not packed."""

    seq_length: int

    def segments(self, index: int, /) -> npt.NDArray[np.int64] | None:
        """Return None: as in Megatron, a sample is one text, in which the end-of-document id ends
        documents.
        """
        return None

    def tokens_in(self, indices: npt.NDArray[np.int64], /) -> int:
        """Return the number of all tokens: every one is trained on."""
        return len(indices) * self.seq_length


@dataclass(frozen=True)
class IndexRequest:
    """The values that determine an index.

    `start` and `stop` bound the sequences of the split, `tokens_per_epoch` counts their tokens.
    `prefix`, `name` and `split` are part of the description as the user gave them.
    """

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
        """Return the smallest e >= 1 with (e * tokens_per_epoch - 1) // seq_length >=
        num_samples.
        """
        return max(1, -(-(self.num_samples * self.seq_length + 1) // self.tokens_per_epoch))

    def samples_in(self, epochs: int) -> int:
        """Return the whole samples in that many epochs; a sample begins with the last token of the
        one before.
        """
        return (epochs * self.tokens_per_epoch - 1) // self.seq_length

    @property
    def separate_last_epoch(self) -> bool:
        if self.num_epochs == 1:
            return False
        from_last_epoch = self.num_samples - self.samples_in(self.num_epochs - 1)
        return from_last_epoch < int(0.80 * self.samples_in(1))

    @property
    def description(self) -> str:
        """Return the text whose md5 names the cache files: Megatron-DeepSpeed's, so that its caches
        are found.
        """
        return (
            f"GPT Dataset\n\nData prefix {self.prefix}\nDataset name {self.name}\nNumber of "
            f"samples {self.num_samples}\nNumber of epochs {self.num_epochs}\nSequence length "
            f"{self.seq_length}\nRandom seed {self.seed}\nSplit {self.split}\n"
        )


def build_index(
    request: IndexRequest, sizes: npt.NDArray[np.int32], *, uint32_limit: int = _UINT32_LIMIT
) -> Arrays:
    """Return the three arrays of `PARTS`.

    doc_idx int32 [epochs * documents], sequence numbers in drawn order; sample_idx [n + 1, 2], see
    build_sample_index; shuffle_idx uint32 [n] (int64 from `uint32_limit` samples on), the sample
    that the i-th read returns.

    Uses the memory of the arrays and a few MB: 4 bytes per document and epoch, and 12 per sample (8
    more if doc_idx has 2^31 entries, 4 more from 2^32 samples on). 100 million documents of 300
    tokens in samples of 2,048 take 0.6 GB.
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


def _document_index(
    request: IndexRequest, last_apart: bool, random: np.random.RandomState
) -> npt.NDArray[np.int32]:
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
    """Fill each row with start, start + 1, ... without a second array of this length."""
    for at in range(0, array.shape[-1], _BLOCK):
        part = array[..., at : at + _BLOCK]
        part[...] = np.arange(start + at, start + at + part.shape[-1], dtype=array.dtype)


class FileDataset(ABC):
    """Samples that are joined from pieces of the sequences start..stop-1 of an indexed data set.

    Has at least `num_samples` samples. `description` names the index in the cache, which is looked
    up in `index-cache` beside the data, then in `data_cache_path`, and built if it is missing.
    `pad_id` fills samples. Raises DataError if the split has no tokens or an .idx file with
    impossible sizes, and as load_or_build does.
    """

    description: str
    request_type: type[IndexRequest] = IndexRequest

    def __init__(
        self,
        indexed: IndexedDataset,
        *,
        name: str,
        split: str,
        bounds: tuple[int, int],
        num_samples: int,
        seq_length: int,
        seed: int,
        pad_id: int = 0,
        data_cache_path: str | os.PathLike[str] | None = None,
        verify: bool = False,
    ) -> None:
        prefix = indexed.prefix
        if bounds[1] > INT32_MAX:
            raise DataError(
                f"{prefix}: more than {INT32_MAX} sequences: preprocess it in parts and blend them"
            )
        tokens = indexed.tokens_between(*bounds)
        if tokens == 0:
            raise DataError(
                f"{prefix}: the {name} split {split!r} (sequences {bounds[0]}..{bounds[1]}) has no "
                "tokens"
            )
        # A split without a whole sample is repeated until it has one.
        request = self.request_type(
            prefix, name, split, *bounds, tokens, max(num_samples, 1), seq_length, seed
        )
        directories = [
            Path(prefix).parent / "index-cache",
            *([Path(data_cache_path)] if data_cache_path else []),
        ]
        self.name, self.seq_length, self.pad_id, self.tokens_per_epoch = (
            prefix,
            seq_length,
            pad_id,
            tokens,
        )
        self._indexed, self._request = indexed, request
        self._cached = partial(load_or_build, directories=directories, verify=verify)
        self._load()

    def _index(
        self,
        description: str,
        parts: Sequence[str],
        build: Callable[[Any, npt.NDArray[np.int32]], Arrays],
        fits: Callable[[Arrays, Any, npt.NDArray[np.int32]], bool],
    ) -> tuple[npt.NDArray[Any], ...]:
        """Return the arrays of an index over the sequences, which are checked before it is
        built.
        """
        request, sizes = self._request, self._indexed.sizes

        def build_checked() -> Arrays:
            self._indexed.check(request.start, request.stop)
            return build(request, sizes)

        arrays = self._cached(
            description, parts, build=build_checked, fits=lambda found: fits(found, request, sizes)
        )
        return tuple(arrays[part] for part in parts)

    @abstractmethod
    def _load(self) -> None:
        """Get the index from the cache, or build it."""

    @abstractmethod
    def _find(self, index: int) -> Pieces | None:
        """Return the pieces of a sample; None if the index is damaged."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int, /) -> Tokens:
        pieces = self._pieces(index)
        filled = int(pieces[2].sum())
        tokens = np.empty(self.seq_length + 1, np.int64)
        tokens[filled:] = self.pad_id
        self._indexed.gather(*pieces, tokens[:filled])
        return tokens

    def where(self, index: int, token: int = 0, /) -> str:
        """Return file, document and byte of a token of sample `index`, for messages."""
        pieces = self._pieces(index)
        if token >= pieces[2].sum():
            return f"{bin_path(self._indexed.location)}, padding of sample {index}"
        return self._indexed.where(*pieces, token)

    def _pieces(self, index: int) -> Pieces:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self.name}, which has {len(self)}")
        found = self._find(index)
        if found is None:
            # blames the data where they are damaged
            self._indexed.check(self._request.start, self._request.stop)
            raise DataError(
                f"{self.name}: entry {index} of the cached index does not lead to a sample of "
                f"{self.seq_length + 1} tokens: the index is damaged or was built from other data; "
                "delete its folder, index-cache beside the data or --data-cache-path, to have it "
                "built again"
            )
        return found


class GPTDataset(FileDataset, _Unpacked):
    """Samples that are cut out of the joined documents, overlap by one token and are shuffled."""

    def _load(self) -> None:
        self.description = self._request.description
        self._documents, self._rows, self._shuffle = self._index(
            self.description, PARTS, build_index, index_fits
        )

    def __len__(self) -> int:
        return len(self._shuffle)

    def _find(self, index: int) -> Pieces | None:
        row = int(self._shuffle[index])
        return pieces_of_sample(
            self._documents, self._rows[row : row + 2], self._request, self._indexed.sizes
        )


def pieces_of_sample(
    documents: npt.NDArray[np.int32],
    rows: npt.NDArray[Any],
    request: IndexRequest,
    sizes: npt.NDArray[np.int32],
) -> Pieces | None:
    """Return the pieces between two rows of sample_idx; None unless they are a sample of seq_length
    + 1 tokens.
    """
    if len(rows) != 2:
        return None
    (first, offset), (last, last_offset) = rows.tolist()
    sequences = documents[first : last + 1]
    if (
        not 0 <= first <= last < len(documents)
        or sequences.min() < request.start
        or sequences.max() >= request.stop
    ):
        return None
    lengths, offsets = sizes[sequences].astype(np.int64), np.zeros(len(sequences), np.int64)
    inside = 0 <= offset <= lengths[0] and 0 <= last_offset < lengths[-1]
    offsets[0], lengths[-1] = offset, last_offset + 1
    lengths -= offsets
    return (
        (sequences, offsets, lengths)
        if inside and lengths.sum() == request.seq_length + 1
        else None
    )


def index_fits(arrays: Arrays, request: IndexRequest, sizes: npt.NDArray[np.int32]) -> bool:
    """Return whether cached arrays belong to this data.

    The description does not cover the content of the data files, so a cache may outlive data that
    were preprocessed again under the same name. Shapes are compared, and a few samples are checked
    as they would be read.
    """
    documents, rows, shuffled = (arrays[part] for part in PARTS)
    num_samples = request.samples_in(request.num_epochs)
    shapes = (
        (request.num_epochs * (request.stop - request.start),),
        (num_samples + 1, 2),
        (num_samples,),
    )
    if (documents.shape, rows.shape, shuffled.shape) != shapes or num_samples == 0:
        return False
    checked = np.unique(np.linspace(0, num_samples - 1, _SPOT_CHECKS).astype(np.int64)).tolist()
    return all(
        pieces_of_sample(documents, rows[i : i + 2], request, sizes) is not None for i in checked
    )


class BlendedDataset:
    """`size` samples of several data sets, in the order that keeps every share closest to its
    weight.

    Each data set must have at least samples_of_part(size, weight) samples. The index is kept in
    memory, or in `data_cache_path` if given, where all processes of a machine share it.
    """

    def __init__(
        self,
        datasets: Sequence[Source],
        weights: Sequence[float],
        size: int,
        *,
        data_cache_path: str | os.PathLike[str] | None = None,
        verify: bool = False,
    ) -> None:
        assert len(datasets) == len(weights) > 0, "one weight for each data set"
        shares = np.asarray(weights, np.float64) / sum(weights)
        self.datasets = tuple(datasets)
        parts = zip(shares.tolist(), datasets, strict=True)
        named = "".join(f"Weight {share!r}\n{dataset.description}\n" for share, dataset in parts)
        self.description = f"GPT blend\n\n{named}Size {size}\n"

        def build() -> dict[str, npt.NDArray[Any]]:
            which, sample = build_blend_index(shares, size)
            return {"index": which, "sample_index": sample}

        if data_cache_path is None:
            arrays = build()
        else:
            arrays = load_or_build(
                self.description,
                ("index", "sample_index"),
                [Path(data_cache_path)],
                build,
                fits=lambda found: len(found["index"]) == len(found["sample_index"]) == size,
                verify=verify,
            )
        self._which, self._sample = arrays["index"], arrays["sample_index"]

    def __len__(self) -> int:
        return len(self._which)

    def __getitem__(self, index: int, /) -> Tokens:
        dataset, sample = self._find(index)
        return dataset[sample]

    def segments(self, index: int, /) -> npt.NDArray[np.int64] | None:
        dataset, sample = self._find(index)
        return dataset.segments(sample)

    def where(self, index: int, token: int = 0, /) -> str:
        dataset, sample = self._find(index)
        return dataset.where(sample, token)

    def locate(
        self, indices: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Return which of `datasets` each of these samples comes from, and its number there."""
        return self._which[indices], self._sample[indices]

    def _find(self, index: int) -> tuple[Source, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a blend of {len(self)}")
        return self.datasets[int(self._which[index])], int(self._sample[index])


class OwnDataset(_Unpacked):
    """A user's data set, which has a length and samples by number, completed by the other members
    of Source.

    Members of Source that it has itself are used; without them a sample is one text, and all
    samples are an epoch. Raises DataError for a sample of another form.
    """

    def __init__(self, dataset: Any, name: str, seq_length: int) -> None:
        self._dataset, self.seq_length = dataset, seq_length
        self.name: str = getattr(dataset, "name", f"{type(dataset).__name__} ({name})")
        self.description: str = getattr(dataset, "description", self.name)
        self.tokens_per_epoch: int = getattr(dataset, "tokens_per_epoch", len(dataset) * seq_length)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int, /) -> Tokens:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self.name}, which has {len(self)}")
        tokens = np.asarray(self._dataset[index])
        if tokens.shape != (self.seq_length + 1,) or not np.issubdtype(tokens.dtype, np.integer):
            raise DataError(
                f"{self.name} returns sample {index} as {tokens.dtype} {list(tokens.shape)}: a "
                f"sample is {self.seq_length + 1} token ids, --seq-length and the label of the last"
            )
        return tokens.astype(np.int64, copy=False)

    def segments(self, index: int, /) -> npt.NDArray[np.int64] | None:
        own = getattr(self._dataset, "segments", super().segments)
        return own(index)

    def where(self, index: int, token: int = 0, /) -> str:
        own = getattr(self._dataset, "where", None)
        return (
            f"token {token} of sample {index} of {self.name}"
            if own is None
            else str(own(index, token))
        )

    def tokens_in(self, indices: npt.NDArray[np.int64], /) -> int:
        return int(getattr(self._dataset, "tokens_in", super().tokens_in)(indices))


class MockDataset(_Unpacked):
    """Generated samples for runs without data: the same for the same arguments, and learnable.

    A sample is a row of short documents, each a run of ids with a fixed step, ended by the id
    vocab_size - 1.
    """

    def __init__(
        self, name: str, num_samples: int, seq_length: int, vocab_size: int, seed: int
    ) -> None:
        if vocab_size < 2:
            raise DataError(
                f"--mock-data needs a vocabulary of 2 or more, --vocab-size is {vocab_size}"
            )
        self.num_samples, self.seq_length, self.vocab_size = num_samples, seq_length, vocab_size
        self.name = self.description = "mock data"
        self.tokens_per_epoch = num_samples * seq_length
        self._key = int.from_bytes(hashlib.sha256(f"{name} {seed}".encode()).digest()[:8], "little")

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int, /) -> Tokens:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} generated samples")
        random = np.random.RandomState(
            np.array([self._key & 0xFFFFFFFF, self._key >> 32, index & 0xFFFFFFFF])
        )
        words = self.vocab_size - 1
        tokens = np.empty(self.seq_length + 1, np.int64)
        filled = 0
        while filled < len(tokens):
            length = int(random.randint(8, 65))
            run = (random.randint(words) + random.randint(1, 8) * np.arange(length)) % words
            run[-1] = words
            part = run[: len(tokens) - filled]
            tokens[filled : filled + len(part)] = part
            filled += len(part)
        return tokens

    def where(self, index: int, token: int = 0, /) -> str:
        return f"{self.name}, token {token} of sample {index}"
