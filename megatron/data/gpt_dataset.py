"""Samples of seq_length + 1 tokens: from one data set, a blend, a user's data set, or generated.

All data sets have a length and return int64 arrays, so a training loop accepts any of them.

GPTDataset cuts samples out of the concatenated documents. Three arrays determine them: document,
sample and shuffle index. The order of random draws is Megatron's, so the same data, seed and counts
give the same samples: one RandomState(seed) shuffles the documents of all epochs together, then the
samples. If the last epoch gives fewer than 80% of an epoch's samples, its documents and samples are
shuffled separately, so that the earlier epochs are used up first.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megatron.data.arrays import Int32Array, Int64Array, IntArray, StrPath
from megatron.data.index_cache import Arrays, load_or_build
from megatron.data.indexed_dataset import (
    INT32_MAX,
    IndexedDataset,
    SequenceSlices,
    bin_path,
    build_blend_index,
    build_sample_index,
    shuffle,
)
from megatron.errors import DataError

if TYPE_CHECKING:
    from megatron.protocols import Dataset

# For each span, the position of its first token and its number of tokens; token n of sequence s has
# position s * 2^32 + n.
Spans = tuple[Int64Array, Int64Array]
BySource = Iterator[tuple["SourceDataset", Int64Array]]
MOCK = "mock data"
ARRAYS = ("doc_idx", "sample_idx", "shuffle_idx")
_UINT32_LIMIT = 2**32 - 2
BLOCK = 1 << 20  # sequences or pieces processed at once, to limit temporary memory
_SPOT_CHECKS = 16


class TokenDataset(ABC):
    """A data set that a stream of micro-batches reads."""

    @property
    @abstractmethod
    def sources(self) -> tuple[SourceDataset, ...]:
        """Return the data sets of a blend, or the data set itself."""

    @abstractmethod
    def by_source(self, indices: Int64Array) -> BySource:
        """Yield each source that provides some of these samples, and their numbers within it.

        Samples beyond the end are ignored: a checkpoint without a ledger record may count more
        samples than the data set has, in a run with nothing left to do.
        """

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @property
    def first(self) -> int:
        """Return the first sample of this run, which may have been resumed."""
        return 0

    @property
    def readable_from(self) -> int:
        """Return the first sample that this run can read again: later ones are like those to come."""
        return 0

    @property
    def available(self) -> int:
        """Return the number of samples before the end of the data."""
        return len(self)

    @abstractmethod
    def __getitem__(self, index: int, /) -> Int64Array:
        """Return sample `index`, int64 [seq_length + 1]."""

    def segments(self, index: int, /) -> Int64Array | None:
        """Return the lengths of the pieces of sample `index`, from its first token on.

        The rest is padding. None if pieces are not separated: as in Megatron, a sample is one text,
        and the end-of-document id marks where documents end.
        """
        return None

    def loss_tokens(self, index: int, /) -> Int64Array | None:
        """Return 1 for each token of sample `index` that counts in the loss as a label, else 0.

        int64 [seq_length + 1]; None if all of them count.
        """
        return None

    @abstractmethod
    def where(self, index: int, token: int = 0, /) -> str:
        """Return where a token of sample `index` is, for messages.

        For data files these are file, document and byte.
        """


class SourceDataset(TokenDataset):
    """A data set whose samples come from one source: a pair of files, the user or a generator.

    It may be part of a blend, and it is the unit whose consumption is counted. `name` is the prefix
    of its files, or another name if it has no files. `description` identifies the index in the
    cache. `tokens_per_epoch` counts the tokens that are trained on in an epoch. `waste` is the share
    of padding in packed samples; None if they are not packed.
    """

    name: str
    description: str
    seq_length: int
    tokens_per_epoch: int
    waste: float | None = None

    @property
    def sources(self) -> tuple[SourceDataset, ...]:
        return (self,)

    def by_source(self, indices: Int64Array) -> BySource:
        yield self, indices[indices < len(self)]

    @property
    def masked(self) -> bool:
        """Return whether the data have a loss mask that is in use."""
        return "loss_tokens" in vars(self)

    def tokens_in(self, indices: Int64Array, /) -> int:
        """Return the number of tokens trained on in these samples, without padding."""
        return len(indices) * self.seq_length

    def spans(self, indices: Int64Array, /) -> Spans:
        """Return the spans of tokens that these samples train on, each token once.

        By default, each sample is one span, as if it were a separate sequence.
        """
        return indices << 32, np.full(len(indices), self.seq_length)


@dataclass(frozen=True)
class IndexRequest:
    """Parameters that determine an index.

    `start` and `stop` bound the sequences of the split, and `tokens_per_epoch` counts the tokens in
    them. `num_samples` is the least number of samples. `prefix`, `name` (train, valid or test) and
    `split` (the value of --split, or datasets.UNSPLIT) are part of the description. `sizes` has the
    number of tokens of each sequence of the whole data.
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
    sizes: Int32Array

    @property
    def sample_tokens(self) -> int:
        """Return the number of tokens in a sample."""
        return self.seq_length + 1

    @property
    def num_epochs(self) -> int:
        """Return the smallest number of epochs that gives num_samples.

        This is the smallest e >= 1 with (e * tokens_per_epoch - 1) // seq_length >= num_samples.
        """
        return max(1, -(-(self.num_samples * self.seq_length + 1) // self.tokens_per_epoch))

    def covers(self, sequences: IntArray) -> bool:
        """Return whether these sequences, at least one, are all in the split."""
        return bool(self.start <= sequences.min() and sequences.max() < self.stop)

    def piece_lengths(self, sequences: IntArray, offsets: Int64Array) -> Int64Array:
        """Return each piece's number of tokens: up to the end of its sequence, or a whole bin."""
        left: Int64Array = self.sizes[sequences].astype(np.int64) - offsets
        return np.minimum(left, self.sample_tokens)

    def samples_in(self, epochs: int) -> int:
        """Return the number of whole samples in `epochs` epochs.

        A sample begins with the last token of the previous one.
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
        """Return the text whose md5 names the cache files.

        The text is the same as in Megatron-DeepSpeed, so that caches written by it are found.
        """
        return (
            f"GPT Dataset\n\nData prefix {self.prefix}\nDataset name {self.name}\nNumber of "
            f"samples {self.num_samples}\nNumber of epochs {self.num_epochs}\nSequence length "
            f"{self.seq_length}\nRandom seed {self.seed}\nSplit {self.split}\n"
        )

    @property
    def bins_description(self) -> str:
        """Return the text whose md5 names the files of the bins.

        Seed and number of samples do not change it.
        """
        return (
            f"Packed GPT Dataset, best fit\n\nData prefix {self.prefix}\nSequences {self.start} "
            f"to {self.stop}\nNumber of tokens {self.tokens_per_epoch}\nSequence length "
            f"{self.seq_length}\n"
        )


def build_index(request: IndexRequest) -> Arrays:
    """Return the three arrays of `ARRAYS`.

    doc_idx int32 [epochs * sequences], sequence numbers in shuffled order; sample_idx [n + 1, 2],
    see build_sample_index; shuffle_idx uint32 [n] (int64 for 2^32 - 2 samples or more), whose entry
    i is the row in sample_idx of sample i.

    The arrays need 4 bytes per sequence and epoch, and 12 per sample (8 more if doc_idx has 2^31
    entries or more, 4 more if shuffle_idx is int64). At first, 4 more bytes per sequence are needed
    temporarily.
    """
    random = np.random.RandomState(request.seed)
    epochs = request.num_epochs
    total = request.samples_in(epochs)
    documents = np.tile(np.arange(request.start, request.stop, dtype=np.int32), epochs)
    order: IntArray = np.arange(total, dtype=np.int64 if total >= _UINT32_LIMIT else np.uint32)
    first_documents = len(documents)
    first_samples = total
    if request.separate_last_epoch:
        first_documents -= request.stop - request.start
        first_samples = request.samples_in(epochs - 1)
    # an empty slice draws no random numbers
    shuffle(documents[:first_documents], random)
    shuffle(documents[first_documents:], random)
    shuffle(order[:first_samples], random)
    shuffle(order[first_samples:], random)
    rows = build_sample_index(request.sizes, documents, request.seq_length, total)
    return {"doc_idx": documents, "sample_idx": rows, "shuffle_idx": order}


@dataclass(frozen=True)
class IndexFiles:
    """Index files of a data set: in `index-cache` next to it, or in `data_cache_path`.

    An index is looked up in the former, then in the latter, and built in the latter, if it is given,
    or else in the former. With `verify` an existing index is compared with its digests.
    """

    indexed: IndexedDataset
    data_cache_path: StrPath | None = None
    verify: bool = False

    def load(
        self,
        description: str,
        names: Sequence[str],
        build: Callable[[], Arrays],
        take: Callable[[Arrays], bool],
        sequences: tuple[int, int],
    ) -> None:
        """Pass arrays from the cache to `take`, or build them from sizes that are checked before.

        `take` keeps arrays for reading and returns whether they belong to this data. The description
        does not cover the content of the data files, so a cache may be older than data that were
        preprocessed again under the same name. Raises the errors of load_or_build.
        """

        def build_checked() -> Arrays:
            self.indexed.check(*sequences)
            return build()

        directories = [Path(self.indexed.prefix).parent / "index-cache"]
        if self.data_cache_path:
            directories.append(Path(self.data_cache_path))
        load_or_build(description, names, directories, build_checked, fits=take, verify=self.verify)


class DocumentPiece(NamedTuple):
    """A piece of a document in a sample: a document may have several sequences.

    token   its first token in the sequence
    tokens  number of tokens
    """

    document: int
    sequence: int
    token: int
    tokens: int


class SlicedDataset(SourceDataset):
    """Samples concatenated from pieces of the sequences of data files.

    `pad_id` fills the rest of a sample whose pieces are too short.
    """

    _indexed: IndexedDataset
    _pad_id: int

    @abstractmethod
    def _slices(self, index: int) -> SequenceSlices:
        """Return the pieces of a sample. Raises DataError if the index is damaged."""

    def _length(self, index: int) -> int:
        """Return the number of tokens of a sample that are inputs."""
        return self.seq_length

    def __getitem__(self, index: int, /) -> Int64Array:
        slices = self._slices(index)
        filled = int(slices.lengths.sum())
        tokens = np.empty(self._length(index) + 1, np.int64)
        tokens[filled:] = self._pad_id
        self._indexed.gather(slices, tokens[:filled])
        return tokens

    @property
    def masked(self) -> bool:
        return self._indexed.mask is not None

    def loss_tokens(self, index: int, /) -> Int64Array | None:
        """Return which tokens the loss mask marks; padding is not marked."""
        if self._indexed.mask is None:
            return None
        slices = self._slices(index)
        marks = np.zeros(self._length(index) + 1, np.int64)
        self._indexed.gather_mask(slices, marks[: int(slices.lengths.sum())])
        return marks

    def pieces(self, index: int, /) -> list[DocumentPiece]:
        """Return what sample `index` has, its last label included, without padding."""
        rows = zip(*(array.tolist() for array in self._slices(index)), strict=True)
        return [
            DocumentPiece(self._indexed.document_of(sequence), sequence, *rest)
            for sequence, *rest in rows
        ]

    def where(self, index: int, token: int = 0, /) -> str:
        """Return file, document and byte of a token of sample `index`, for messages."""
        slices = self._slices(index)
        if token >= slices.lengths.sum():
            return f"{bin_path(self._indexed.location)}, padding of sample {index}"
        return self._indexed.where(slices, token)


def check_count(prefix: str, sequences: int) -> None:
    """Raise DataError for too many sequences to number."""
    if sequences > INT32_MAX:
        raise DataError(
            f"{prefix}: more than {INT32_MAX} sequences: preprocess it in parts and blend them"
        )


class FileDataset(SlicedDataset):
    """Samples of the sequences in `request`.

    `description` identifies the index in the cache. Raises DataError for an .idx file with
    impossible sizes or too many sequences, and the errors of load_or_build.
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        request: IndexRequest,
        *,
        pad_id: int = 0,
        data_cache_path: StrPath | None = None,
        verify: bool = False,
    ) -> None:
        check_count(request.prefix, request.stop)
        self.name = request.prefix
        self.seq_length = request.seq_length
        self.tokens_per_epoch = request.tokens_per_epoch
        self._indexed = indexed
        self._request = request
        self._pad_id = pad_id
        self._files = IndexFiles(indexed, data_cache_path, verify)
        self._load()

    def _cached(
        self,
        description: str,
        names: Sequence[str],
        build: Callable[[], Arrays],
        take: Callable[[Arrays], bool],
    ) -> None:
        self.description = description
        request = self._request
        self._files.load(description, names, build, take, (request.start, request.stop))

    @abstractmethod
    def _load(self) -> None:
        """Load the index from the cache, or build it."""

    @abstractmethod
    def _find(self, index: int) -> SequenceSlices | None:
        """Return the pieces of a sample; None if the index is damaged."""

    def _slices(self, index: int) -> SequenceSlices:
        slices = self._find(index)
        if slices is None:
            # reports the data instead if they are damaged
            self._indexed.check(self._request.start, self._request.stop)
            raise damaged_index(self.name, index)
        return slices


def damaged_index(name: str, index: int) -> DataError:
    """Return the error for an index that gives no sample `index`."""
    return DataError(
        f"{name}: entry {index} of the cached index does not give a sample: the index is damaged or "
        "was built from other data; delete its folder, index-cache next to the data or "
        "--data-cache-path, to have it built again"
    )


class GPTDataset(FileDataset):
    """Samples cut from the concatenated documents, overlapping by one token, in shuffled order."""

    def _load(self) -> None:
        request = self._request
        self._cached(request.description, ARRAYS, lambda: build_index(request), self._take)

    def _take(self, arrays: Arrays) -> bool:
        """Keep the arrays; return whether their shapes and a few samples match this data."""
        self._documents, self._rows, self._shuffle = (arrays[name] for name in ARRAYS)
        request = self._request
        samples = request.samples_in(request.num_epochs)
        shapes = [
            (request.num_epochs * (request.stop - request.start),),
            (samples + 1, 2),
            (samples,),
        ]
        return (
            [arrays[name].shape for name in ARRAYS] == shapes
            and samples > 0
            and all(self._find(i) is not None for i in spread(samples))
        )

    def __len__(self) -> int:
        return len(self._shuffle)

    def spans(self, indices: Int64Array, /) -> Spans:
        """Return the pieces of these samples, without the label that ends each sample."""
        rows = self._shuffle[indices].astype(np.int64)
        first, offset = self._rows[rows].astype(np.int64).T
        last, end = self._rows[rows + 1].astype(np.int64).T
        count = last - first + 1
        positions = within(count)
        sequences = self._documents[np.repeat(first, count) + positions].astype(np.int64)
        begins = np.where(positions == 0, np.repeat(offset, count), 0)
        ends = self._request.sizes[sequences].astype(np.int64)
        ends[np.cumsum(count) - 1] = end
        return (sequences << 32) + begins, ends - begins

    def _find(self, index: int) -> SequenceSlices | None:
        row = int(self._shuffle[index])
        rows = self._rows[row : row + 2]
        if len(rows) != 2:
            return None
        (first, offset), (last, last_offset) = rows.tolist()
        sequences = self._documents[first : last + 1]
        request = self._request
        if not 0 <= first <= last < len(self._documents) or not request.covers(sequences):
            return None
        lengths = request.sizes[sequences].astype(np.int64)
        offsets = np.zeros_like(lengths)
        inside = 0 <= offset <= lengths[0] and 0 <= last_offset < lengths[-1]
        offsets[0] = offset
        lengths[-1] = last_offset + 1
        lengths -= offsets
        fits = inside and lengths.sum() == request.sample_tokens
        return SequenceSlices(sequences, offsets, lengths) if fits else None


def within(counts: Int64Array) -> Int64Array:
    """Return 0 .. n-1 for each n in `counts`, one after another."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)


def spread(count: int) -> list[int]:
    """Return some evenly spaced indices from 0..count-1, for checks."""
    some: list[int] = np.linspace(0, count - 1, _SPOT_CHECKS).astype(np.int64).tolist()
    return some


class SourcesDataset(TokenDataset):
    """A data set whose samples come from several sources."""

    @abstractmethod
    def find(self, index: int, /) -> tuple[SourceDataset, int]:
        """Return the source of sample `index`, and the sample's number in it."""

    def __getitem__(self, index: int, /) -> Int64Array:
        source, number = self.find(index)
        return source[number]

    def segments(self, index: int, /) -> Int64Array | None:
        source, number = self.find(index)
        return source.segments(number)

    def loss_tokens(self, index: int, /) -> Int64Array | None:
        source, number = self.find(index)
        return source.loss_tokens(number)

    def where(self, index: int, token: int = 0, /) -> str:
        source, number = self.find(index)
        return source.where(number, token)


class BlendedDataset(SourcesDataset):
    """A blend of several data sets, with `size` samples.

    The order of the samples keeps the share of every data set close to its weight throughout
    (build_blend_index). Each data set must have as many samples as it gives to the blend. The index
    is kept in memory, or in `data_cache_path` if that is given, where all processes on a machine
    share it.
    """

    def __init__(
        self,
        datasets: Sequence[SourceDataset],
        weights: Sequence[float],
        size: int,
        *,
        data_cache_path: StrPath | None = None,
        verify: bool = False,
    ) -> None:
        assert len(datasets) == len(weights) > 0, "one weight for each data set"
        total = sum(weights)
        shares = [weight / total for weight in weights]
        self._sources = tuple(datasets)
        weighted = zip(shares, datasets, strict=True)
        named = "".join(f"Weight {share!r}\n{dataset.description}\n" for share, dataset in weighted)
        self.description = f"GPT blend\n\n{named}Size {size}\n"

        def build() -> Arrays:
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
                fits=lambda loaded: len(loaded["index"]) == len(loaded["sample_index"]) == size,
                verify=verify,
            )
        self._which = arrays["index"]
        self._sample = arrays["sample_index"]

    def __len__(self) -> int:
        return len(self._which)

    @property
    def sources(self) -> tuple[SourceDataset, ...]:
        return self._sources

    def by_source(self, indices: Int64Array) -> BySource:
        indices = indices[indices < len(self)]
        which = self._which[indices]
        samples = self._sample[indices].astype(np.int64, copy=False)
        for number in np.unique(which).tolist():
            yield self._sources[number], samples[which == number]

    def find(self, index: int, /) -> tuple[SourceDataset, int]:
        return self._sources[int(self._which[index])], int(self._sample[index])


class UserDataset(SourceDataset):
    """A user's data set, with defaults for the members of SourceDataset that it lacks.

    `dataset` needs a length and numbered samples. If it defines name, description,
    tokens_per_epoch, segments, loss_tokens, where, tokens_in or spans, they are used; by default, a
    sample is one text, and an epoch is all samples. Raises DataError for a sample of the wrong
    shape or type.
    """

    def __init__(self, dataset: Dataset, name: str, seq_length: int) -> None:
        self._dataset = dataset
        self.seq_length = seq_length
        self.name: str = getattr(dataset, "name", f"{type(dataset).__name__} ({name})")
        self.description = self.name
        self.tokens_per_epoch = len(dataset) * seq_length
        members = ("description", "tokens_per_epoch", "segments", "loss_tokens", "where")
        for member in (*members, "tokens_in", "spans"):
            if hasattr(dataset, member):
                setattr(self, member, getattr(dataset, member))

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int, /) -> Int64Array:
        tokens = np.asarray(self._dataset[index])
        if tokens.shape != (self.seq_length + 1,) or not np.issubdtype(tokens.dtype, np.integer):
            raise DataError(
                f"{self.name} returns sample {index} as {tokens.dtype} {list(tokens.shape)}: a "
                f"sample is {self.seq_length + 1} token ids, --seq-length plus the last label"
            )
        return tokens.astype(np.int64, copy=False)

    def where(self, index: int, token: int = 0, /) -> str:
        return f"token {token} of sample {index} of {self.name}"


class MockDataset(SourceDataset):
    """Generated samples for runs without data: the same for the same arguments, and learnable.

    A sample is a sequence of short documents. In each, ids rise by a fixed step, modulo
    vocab_size - 1, and the id vocab_size - 1 is the last.
    """

    def __init__(
        self, name: str, num_samples: int, seq_length: int, vocab_size: int, seed: int
    ) -> None:
        if vocab_size < 2:
            raise DataError(
                f"--mock-data needs a vocabulary of 2 or more, but --vocab-size is {vocab_size}"
            )
        self.num_samples = num_samples
        self.seq_length = seq_length
        self.vocab_size = vocab_size
        self.name = self.description = MOCK
        self.tokens_per_epoch = num_samples * seq_length
        self._key = int.from_bytes(hashlib.sha256(f"{name} {seed}".encode()).digest()[:8], "little")

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int, /) -> Int64Array:
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
            ids = run[: len(tokens) - filled]
            tokens[filled : filled + len(ids)] = ids
            filled += len(ids)
        return tokens

    def where(self, index: int, token: int = 0, /) -> str:
        return f"{self.name}, token {token} of sample {index}"
