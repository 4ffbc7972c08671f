"""Samples of seq_length + 1 tokens: from one data set, from a blend of several, or made up.

All have a length and give int64 arrays, so a training loop can take any of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron.data.gpt_index import IndexRequest, load_index, tokens_of_split
from megatron.data.index_cache import load_or_build
from megatron.data.index_helpers import build_blend_index
from megatron.data.indexed_dataset import IndexedDataset
from megatron.errors import DataError

Tokens = npt.NDArray[np.int64]


class TokenDataset(Protocol):
    """What a micro-batch stream reads from."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Tokens:
        """Sample `index`: int64 [seq_length + 1]."""
        ...

    def segments(self, index: int, /) -> npt.NDArray[np.int64] | None:
        """Tokens of each of the pieces that stand in sample `index`, from its first token; what is beyond their sum is
        padding. None where the pieces are not kept apart: there the id that ends a document tells them."""
        ...

    def where(self, index: int, token: int = 0, /) -> str:
        """File, document and byte of a token of sample `index`, for messages."""
        ...

    def prefetch(self, index: int, /) -> None:
        """Have the file system fetch sample `index`, which will be read soon. Never fails."""
        ...


class Source(TokenDataset, Protocol):
    """A data set whose samples all come from one pair of files. A blend is made of them, and their use is counted.

    `name` is the prefix of the files, `description` names the index in the cache, `tokens_per_epoch` counts all tokens
    of the split.
    """

    name: str
    description: str
    tokens_per_epoch: int

    def tokens_in(self, indices: npt.NDArray[np.int64], /) -> int:
        """Tokens that are trained on in these samples, without padding."""
        ...


class _OneText:
    """What is so of samples that are one text each."""

    seq_length: int

    def segments(self, index: int, /) -> npt.NDArray[np.int64] | None:
        """None: as in Megatron, a sample is one text in which documents end where their last id says so."""
        return None

    def prefetch(self, index: int, /) -> None:
        """Nothing is to be fetched."""

    def tokens_in(self, indices: npt.NDArray[np.int64], /) -> int:
        """Every token of a sample is trained on."""
        return len(indices) * self.seq_length


class GPTDataset(_OneText):
    """The sequences start..stop-1 of an indexed data set, cut into samples that overlap by one token and shuffled.

    Has at least `num_samples` samples. `description` names the index in the cache. Raises DataError when the sequences
    hold no token, and as load_index does.
    """

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
        data_cache_path: str | os.PathLike[str] | None = None,
        verify: bool = False,
    ) -> None:
        tokens = tokens_of_split(indexed, name, split, bounds)
        # A split without a whole sample is repeated until it has one.
        request = IndexRequest(indexed.prefix, name, split, *bounds, tokens, max(num_samples, 1), seq_length, seed)
        arrays = load_index(indexed, request, data_cache_path=data_cache_path, verify=verify)
        self.description = request.description
        self.name, self.tokens_per_epoch = indexed.prefix, tokens
        self.seq_length = seq_length
        self._indexed = indexed
        self._documents = arrays["doc_idx"]
        self._rows = arrays["sample_idx"]
        self._shuffle = arrays["shuffle_idx"]

    def __len__(self) -> int:
        return len(self._shuffle)

    def __getitem__(self, index: int, /) -> Tokens:
        tokens = np.empty(self.seq_length + 1, np.int64)
        self._indexed.gather(*self._pieces(index), tokens)
        return tokens

    def where(self, index: int, token: int = 0, /) -> str:
        return self._indexed.where(*self._pieces(index), token)

    def prefetch(self, index: int, /) -> None:
        with contextlib.suppress(DataError):
            self._indexed.prefetch(*self._pieces(index))

    def _pieces(self, index: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(sequence, first token, number of tokens) of what is joined to sample `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self.name}, which has {len(self)}")
        (first, offset), (last, last_offset) = self._rows[(row := int(self._shuffle[index])) : row + 2].tolist()
        sequences = self._documents[first : last + 1]
        try:
            lengths = self._indexed.sizes[sequences].astype(np.int64)
            offsets = np.zeros(len(lengths), np.int64)
            offsets[0] = offset
            lengths[-1] = last_offset + 1
        except IndexError:
            lengths = offsets = np.empty(0, np.int64)
        lengths -= offsets
        if lengths.sum() != self.seq_length + 1 or lengths.min() < 0:
            for sequence in sequences.tolist():
                if 0 <= sequence < len(self._indexed):
                    self._indexed.read(sequence)  # where it is the data that is damaged, this says so
            raise DataError(
                f"{self.name}: entry {index} of the cached index does not lead to a sample of {self.seq_length + 1} "
                f"tokens: the index is damaged or was made from other data: delete its folder, index-cache beside the "
                f"data or --data-cache-path, to have it built anew"
            )
        return sequences, offsets, lengths


class BlendedDataset:
    """`size` samples from several data sets, in the order that keeps every share closest to its weight.

    Each data set must have samples_of_part(size, weight) samples or more, which is always enough. The index is kept in
    memory, or in `data_cache_path` when given, where all processes of a machine share it.
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

    def prefetch(self, index: int, /) -> None:
        dataset, sample = self._find(index)
        dataset.prefetch(sample)

    def locate(self, indices: npt.NDArray[np.int64]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """Which of `datasets` each of these samples comes from, and which of its samples each is."""
        return self._which[indices], self._sample[indices]

    def _find(self, index: int) -> tuple[Source, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a blend of {len(self)}")
        return self.datasets[int(self._which[index])], int(self._sample[index])


class OwnDataset(_OneText):
    """A data set of one's own, which has a length and samples by number, with all else that a run asks for.

    What it has itself of the members of Source is used; without, a sample is one text, and an epoch all samples. Raises
    DataError for a sample of another form.
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
                f"{self.name} gives sample {index} as {tokens.dtype} {list(tokens.shape)}: a sample is "
                f"{self.seq_length + 1} token ids, --seq-length and the label of the last"
            )
        return tokens.astype(np.int64, copy=False)

    def segments(self, index: int, /) -> npt.NDArray[np.int64] | None:
        own = getattr(self._dataset, "segments", super().segments)
        return own(index)

    def where(self, index: int, token: int = 0, /) -> str:
        own = getattr(self._dataset, "where", None)
        return f"token {token} of sample {index} of {self.name}" if own is None else str(own(index, token))

    def prefetch(self, index: int, /) -> None:
        getattr(self._dataset, "prefetch", super().prefetch)(index)

    def tokens_in(self, indices: npt.NDArray[np.int64], /) -> int:
        return int(getattr(self._dataset, "tokens_in", super().tokens_in)(indices))


class MockDataset(_OneText):
    """Made-up samples for trials without data: the same for the same arguments, and learnable.

    A sample is a row of short documents, each a run of ids with a fixed step, closed by the id vocab_size - 1.
    """

    def __init__(self, name: str, num_samples: int, seq_length: int, vocab_size: int, seed: int) -> None:
        if vocab_size < 2:
            raise DataError(f"--mock-data needs a vocabulary of 2 or more, --vocab-size is {vocab_size}")
        self.num_samples, self.seq_length, self.vocab_size = num_samples, seq_length, vocab_size
        self.name = self.description = "mock data"
        self.tokens_per_epoch = num_samples * seq_length
        self._key = int.from_bytes(hashlib.sha256(f"{name} {seed}".encode()).digest()[:8], "little")

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int, /) -> Tokens:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} made-up samples")
        random = np.random.RandomState(np.array([self._key & 0xFFFFFFFF, self._key >> 32, index & 0xFFFFFFFF]))
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
