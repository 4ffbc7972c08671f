"""Epochs of a source: the documents in the order of a permutation, and pieces of them.

A line of tokens is what a cut of a stream (cuts.py) reads: documents, or pieces of them, one after
another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from megatron.data.arrays import BoolArray, Int32Array, Int64Array, IntArray
from megatron.data.gpt_dataset import IndexFiles, spread, within
from megatron.data.index_cache import Arrays
from megatron.data.indexed_dataset import (
    NO_SLICES,
    IndexedDataset,
    SequenceSlices,
    Shuffled,
    documents_between,
    token_starts,
)
from megatron.data.permutation import permute
from megatron.parallel.hashing import mix

STRIDE = 32  # documents between those whose first token is listed in the index of an epoch
# Epochs of fewer documents are shuffled in memory, whenever they are read: it takes milliseconds.
IN_MEMORY = 1 << 20
EPOCHS_KEPT = 3


class Segments(NamedTuple):
    """Consecutive pieces of sequences.

    starts     int64, where each begins in the line of tokens
    sequences  numbers of the sequences
    offsets    int64, its first token in the sequence
    lengths    int64, its number of tokens
    ends       bool, whether its last token is only a label
    """

    starts: Int64Array
    sequences: IntArray
    offsets: Int64Array
    lengths: Int64Array
    ends: BoolArray

    def between(self, begins: Int64Array, ends: Int64Array) -> Segments:
        """Return the segments of each of the ranges [begin, end) of the line, one after another.

        The ranges are within the line of these segments, none of which is empty.
        """
        stops = self.starts + self.lengths
        first = np.searchsorted(stops, begins, side="right")
        count = np.searchsorted(self.starts, ends) - first
        chosen = np.repeat(first, count) + within(count)
        starts = np.maximum(self.starts[chosen], np.repeat(begins, count))
        until = np.minimum(stops[chosen], np.repeat(ends, count))
        return Segments(
            starts,
            self.sequences[chosen],
            self.offsets[chosen] + starts - self.starts[chosen],
            until - starts,
            self.ends[chosen] & (until == stops[chosen]),
        )

    @property
    def pieces(self) -> SequenceSlices:
        """Return the tokens that are inputs in the loss."""
        pieces = SequenceSlices(self.sequences, self.offsets, self.lengths - self.ends)
        return pieces.at(pieces.lengths > 0)


@dataclass(frozen=True)
class EpochKey:
    """Key of the order of the documents of an epoch: sequences first .. stop - 1."""

    seed: int
    number: int
    first: int
    stop: int


@dataclass(frozen=True)
class Rest:
    """Tokens of an epoch that a cut leaves unread.

    pieces  of the epoch that it was in
    epoch   number of the epoch that follows the pieces
    tail    the order of this epoch if its first `offset` tokens have been read; None: it is whole
    """

    pieces: SequenceSlices = NO_SLICES
    epoch: int = 0
    tail: EpochKey | None = None
    offset: int = 0

    def within(self, source: Source, first: int, stop: int) -> Rest:
        """Return what is left of sequences first .. stop - 1, if these are others than before."""
        if self.tail is None or (self.tail.first, self.tail.stop) == (first, stop):
            return replace(self, pieces=self.pieces.within(first, stop))
        epoch = source.epoch(self.tail)
        more = epoch.segments(self.offset, epoch.tokens, 0).pieces
        pieces = SequenceSlices.joined(self.pieces, more).within(first, stop)
        return Rest(pieces, self.epoch + 1)


class Epoch:
    """The documents of an epoch in their order, a permutation.

    starts  int64 [n / STRIDE rounded up, + 1], tokens before every STRIDE-th of them, and all
    """

    def __init__(self, sizes: Int32Array, documents: Shuffled, starts: IntArray) -> None:
        self._sizes = sizes
        self._documents = documents
        self._starts = np.asarray(starts)  # a part of numpy's memory map is slow to make

    @property
    def tokens(self) -> int:
        return int(self._starts[-1])

    def slices(self, begin: int, end: int) -> SequenceSlices:
        """Return the documents in tokens begin .. end - 1."""
        return documents_between(self._sizes, self._documents, self._starts, STRIDE, begin, end)

    def segments(self, begin: int, end: int, start: int) -> Segments:
        """Return the documents in tokens begin .. end - 1, which begin at `start` of a line."""
        documents, offsets, lengths = self.slices(begin, end)
        starts = np.cumsum(lengths) - lengths + start
        return Segments(starts, documents, offsets, lengths, np.zeros(len(starts), bool))


@dataclass(frozen=True)
class Source:
    """The files of a source, and its index files."""

    indexed: IndexedDataset
    files: IndexFiles
    name: str

    @cached_property
    def epoch(self) -> Callable[[EpochKey], Epoch]:
        """Return a function that loads or builds the order of an epoch; it keeps the last few."""
        return lru_cache(EPOCHS_KEPT)(self._epoch)

    @cached_property
    def _check(self) -> Callable[[int, int], None]:
        """Return IndexedDataset.check, which looks at the same sequences once."""
        return lru_cache(EPOCHS_KEPT)(self.indexed.check)

    def _epoch(self, key: EpochKey) -> Epoch:
        sizes = self.indexed.sizes
        count = key.stop - key.first
        total = self.indexed.tokens_between(key.first, key.stop)
        documents = Shuffled(key.first, count, mix(key.seed, key.number))

        def build() -> Arrays:
            return {"starts": token_starts(sizes, documents, STRIDE)}

        if count < IN_MEMORY:
            self._check(key.first, key.stop)
            return Epoch(sizes, documents, **build())
        made = dict[str, Epoch]()

        def tokens_of(block: int) -> int:
            places = np.arange(block * STRIDE, min((block + 1) * STRIDE, count))
            return int(sizes[key.first + permute(places, count, documents.key)].sum(dtype=np.int64))

        def take(arrays: Arrays) -> bool:
            starts = arrays["starts"]
            made["epoch"] = Epoch(sizes, documents, starts)
            return (
                len(starts) == -(-count // STRIDE) + 1
                and int(starts[-1]) == total
                and all(
                    tokens_of(block) == starts[block + 1] - starts[block]
                    for block in spread(len(starts) - 1)
                )
            )

        description = (
            f"Epoch of a stream\n\nData prefix {self.indexed.prefix}\nSequences {key.first} to "
            f"{key.stop}\nNumber of tokens {total}\nEpoch {key.number}\nRandom seed {key.seed}\n"
        )
        self.files.load(description, ("starts",), build, take, (key.first, key.stop))
        return made["epoch"]
