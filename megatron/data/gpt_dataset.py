"""Samples of seq_length + 1 tokens: from one data set, from a blend of several, or made up.

All have a length and give int64 arrays, so a training loop can take any of them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from megatron.data.gpt_index import IndexRequest, load_index
from megatron.data.index_cache import DEFAULT_WAIT_S, load_or_build
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


class GPTDataset:
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
        wait_s: float = DEFAULT_WAIT_S,
    ) -> None:
        tokens = indexed.tokens_between(*bounds)
        if tokens == 0:
            raise DataError(
                f"{indexed.prefix}: the {name} split {split!r} (sequences {bounds[0]}..{bounds[1]}) has no tokens"
            )
        # A split without a whole sample is repeated until it has one.
        request = IndexRequest(indexed.prefix, name, split, *bounds, tokens, max(num_samples, 1), seq_length, seed)
        arrays = load_index(indexed, request, data_cache_path=data_cache_path, wait_s=wait_s)
        self.description = request.description
        self.seq_length = seq_length
        self._indexed = indexed
        self._documents = arrays["doc_idx"]
        self._rows = arrays["sample_idx"]
        self._shuffle = arrays["shuffle_idx"]

    def __len__(self) -> int:
        return len(self._shuffle)

    def __getitem__(self, index: int, /) -> Tokens:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self._indexed.prefix}, which has {len(self)}")
        (first, offset), (last, last_offset) = self._rows[(row := int(self._shuffle[index])) : row + 2].tolist()
        parts: list[npt.NDArray[Any]] = []
        for position in range(first, last + 1):
            start = offset if position == first else 0
            length = last_offset + 1 - start if position == last else None
            parts.append(self._indexed.read(int(self._documents[position]), start, length))
        tokens = np.concatenate(parts).astype(np.int64)
        assert len(tokens) == self.seq_length + 1, f"sample {index} of {self._indexed.prefix} has {len(tokens)} tokens"
        return tokens


class BlendedDataset:
    """`size` samples from several data sets, in the order that keeps every share closest to its weight.

    Each data set must have samples_of_part(size, weight) samples or more, which is always enough. The index is kept in
    memory, or in `data_cache_path` when given, where all processes of a machine share it.
    """

    def __init__(
        self,
        datasets: Sequence[GPTDataset],
        weights: Sequence[float],
        size: int,
        *,
        data_cache_path: str | os.PathLike[str] | None = None,
        wait_s: float = DEFAULT_WAIT_S,
    ) -> None:
        assert len(datasets) == len(weights) > 0, "one weight for each data set"
        shares = np.asarray(weights, np.float64) / sum(weights)
        self._datasets = tuple(datasets)
        self.description = "".join(
            ["GPT blend\n\n"]
            + [
                f"Weight {share!r}\n{dataset.description}\n"
                for share, dataset in zip(shares.tolist(), datasets, strict=True)
            ]
            + [f"Size {size}\n"]
        )

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
                fits=lambda found: all(len(part) == size for part in found.values()),
                wait_s=wait_s,
            )
        self._which, self._sample = arrays["index"], arrays["sample_index"]

    def __len__(self) -> int:
        return len(self._which)

    def __getitem__(self, index: int, /) -> Tokens:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a blend of {len(self)}")
        return self._datasets[int(self._which[index])][int(self._sample[index])]


class MockDataset:
    """Made-up samples for trials without data: the same for the same arguments, and learnable.

    A sample is a row of short documents, each a run of ids with a fixed step, closed by the id vocab_size - 1.
    """

    def __init__(self, name: str, num_samples: int, seq_length: int, vocab_size: int, seed: int) -> None:
        if vocab_size < 2:
            raise DataError(f"--mock-data needs a vocabulary of 2 or more, --vocab-size is {vocab_size}")
        self.num_samples, self.seq_length, self.vocab_size = num_samples, seq_length, vocab_size
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
