"""Samples that are cut from the documents of one source, epoch by epoch.

A cut is a stretch of a source's stream in which sequence length, packing, seed and the sequences of
the split stay the same. Its samples are numbered from 0 and have no end. It begins with what the
cut before it left unread of an epoch, and goes on with whole epochs. In each epoch the documents
are shuffled anew, and its samples are read in a random order: every token is read once before the
next epoch begins.

A change of length in the middle of an epoch must not tear documents apart that are yet to come.
Therefore concatenated samples are shuffled within windows of about WINDOW tokens, which are read
one after another: a change leaves gaps only in the window in which it happens. Its unread samples
become pieces of sequences. The last token of a piece is only a label: the one that follows in the
sequence, which is read again, or the end of the sequence. Predictions from one piece to the next
are excluded from the loss.

A sequence that has been read in part when documents are packed is packed by its unread pieces.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from megatron.data.arrays import Int64Array
from megatron.data.epochs import EPOCHS_KEPT, IN_MEMORY, EpochKey, Rest, Segments, Source
from megatron.data.gpt_dataset import IndexRequest
from megatron.data.indexed_dataset import (
    NO_SLICES,
    SequenceSlices,
    best_fit_pack,
    group_by_bin,
)
from megatron.data.packed_dataset import EpochPacking, Packing, cut_pieces
from megatron.data.permutation import permute
from megatron.errors import DataError
from megatron.parallel.hashing import mix

WINDOW = 1 << 28


@dataclass(frozen=True)
class Place:
    """Place in a source up to which it has been read.

    epochs           how often the source has been read
    epoch            number of the epoch that it is in, from 1
    window, windows  number of the window that it is in, from 1, and how many the epoch, or what a
                     change left of it, has; packed samples have one
    read, samples    how many samples of the window have been read, and how many it has
    sequence, token  first token of the next sample: number of the sequence, and token in it
    """

    epochs: float
    epoch: int
    window: int
    windows: int
    read: int
    samples: int
    sequence: int
    token: int


class Window(NamedTuple):
    """Samples first .. stop - 1 of a cut, which are shuffled together.

    key      of their permutation
    epoch    number of the epoch that they are in
    number   which of the windows of a part of the line this is, from 0
    windows  how many there are
    """

    first: int
    stop: int
    key: int
    epoch: int
    number: int = 0
    windows: int = 1


@dataclass(frozen=True)
class Cut(ABC):
    """Samples of `seq_length` inputs, and one more token as the last label.

    key   of the first whole epoch, without its number
    rest  what the cut before left unread
    """

    source: Source
    key: EpochKey
    seq_length: int
    rest: Rest

    @property
    def following(self) -> int:
        """Return the number of the first epoch that this cut reads as a whole."""
        return self.rest.epoch + (self.rest.tail is not None)

    @property
    @abstractmethod
    def tokens_per_epoch(self) -> int:
        """Return the number of tokens that an epoch trains on."""

    @property
    @abstractmethod
    def samples_per_epoch(self) -> int:
        """Return the number of samples that do not reach into another epoch."""

    @abstractmethod
    def slices(self, number: int) -> SequenceSlices:
        """Return the pieces of a sample."""

    def excluded(self, number: int) -> Int64Array | None:
        """Return the tokens of a sample that are no labels, if there are any."""
        return None

    @abstractmethod
    def inputs(self, numbers: Int64Array) -> SequenceSlices:
        """Return the tokens that these samples train on, as inputs."""

    @abstractmethod
    def tokens_in(self, numbers: Int64Array) -> int:
        """Return the number of tokens that these samples train on."""

    @abstractmethod
    def epochs(self, taken: int) -> float:
        """Return how often the source has been read after `taken` samples of this cut."""

    @abstractmethod
    def left(self, taken: int) -> Rest:
        """Return what is unread after `taken` samples of this cut."""

    @abstractmethod
    def place(self, taken: int) -> Place:
        """Return where the reading stands after `taken` samples of this cut."""

    def _place(self, taken: int, window: Window) -> Place:
        """Return the place in a window."""
        slices = self.slices(taken)
        return Place(
            self.epochs(taken),
            window.epoch + 1,
            window.number + 1,
            window.windows,
            taken - window.first,
            window.stop - window.first,
            int(slices.sequences[0]),
            int(slices.offsets[0]),
        )

    @abstractmethod
    def prepare(self, taken: int, stop: int) -> None:
        """Build the index files that samples taken .. stop - 1 need."""


class ConcatCut(Cut):
    """Samples cut from a line of tokens: pieces, the tail of an epoch, and whole epochs."""

    @cached_property
    def _pieces(self) -> Segments:
        pieces = self.rest.pieces
        lengths = pieces.lengths + pieces.ends_inside(self.source.indexed.sizes)
        labels = np.ones(len(lengths), bool)
        starts = np.cumsum(lengths) - lengths
        return Segments(starts, pieces.sequences, pieces.offsets, lengths, labels)

    @cached_property
    def _tail_start(self) -> int:
        return int(self._pieces.lengths.sum())

    @cached_property
    def _epochs_start(self) -> int:
        tail = self.rest.tail
        left = 0 if tail is None else self.source.epoch(tail).tokens - self.rest.offset
        return self._tail_start + left

    @cached_property
    def tokens_per_epoch(self) -> int:
        return self.source.indexed.tokens_between(self.key.first, self.key.stop)

    @property
    def samples_per_epoch(self) -> int:
        return (self.tokens_per_epoch - 1) // self.seq_length

    @cached_property
    def _epoch_key(self) -> Callable[[int], EpochKey]:
        return lru_cache(EPOCHS_KEPT)(lambda number: replace(self.key, number=number))

    def _part(self, at: int) -> tuple[int, int, EpochKey | None, int]:
        """Return the part of the line with token `at`: begin, end, epoch, its first token.

        The epoch of the pieces is None.
        """
        if at < self._tail_start:
            return 0, self._tail_start, None, 0
        if at < self._epochs_start:
            return self._tail_start, self._epochs_start, self.rest.tail, self.rest.offset
        size = self.tokens_per_epoch
        number = (at - self._epochs_start) // size
        begin = self._epochs_start + number * size
        return begin, begin + size, self._epoch_key(self.following + number), 0

    def _segments(self, begin: int, end: int) -> Segments:
        """Return the segments of tokens begin .. end - 1 of the line."""
        listed = list[Segments]()
        while begin < end:
            start, stop, epoch, offset = self._part(begin)
            stop = min(stop, end)
            if epoch is None:
                listed.append(self._pieces.between(np.array([begin]), np.array([stop])))
            else:
                first = offset + begin - start
                one = self.source.epoch(epoch).segments(first, first + stop - begin, begin)
                listed.append(one)
            begin = stop
        if len(listed) == 1:
            return listed[0]
        return Segments(*map(np.concatenate, zip(*listed, strict=True)))

    @cached_property
    def _last_window(self) -> list[Window]:
        return [Window(0, 0, 0, 0)]

    def _window(self, number: int) -> Window:
        """Return the window of a sample.

        The sample that begins in one part of the line and ends in the next is read last.
        """
        window = self._last_window[0]
        if not window.first <= number < window.stop:
            self._last_window[0] = window = self._new_window(number)
        return window

    def _new_window(self, number: int) -> Window:
        length = self.seq_length
        begin, end, key, _ = self._part(number * length)
        epoch = self.following - 1 if key is None else key.number
        first = -(-begin // length)
        count = end // length - first
        if number >= first + count:
            return Window(number, number + 1, 0, epoch)
        windows = max(1, round(count * length / WINDOW))
        window = ((number - first + 1) * windows - 1) // count
        seed, of = (self.key.seed, -1) if key is None else (key.seed, key.number)
        return Window(
            first + window * count // windows,
            first + (window + 1) * count // windows,
            mix(seed, of, window, self.following),
            epoch,
            window,
            windows,
        )

    def _starts(self, numbers: Int64Array) -> Int64Array:
        """Return the first token in the line of each of these samples, which ascend."""
        result = np.empty(len(numbers), np.int64)
        done = 0
        while done < len(numbers):
            low, high, key, *_ = self._window(int(numbers[done]))
            stop = int(np.searchsorted(numbers, high))
            result[done:stop] = permute(numbers[done:stop] - low, high - low, key) + low
            done = stop
        return result * self.seq_length

    def _bounds(self, number: int) -> tuple[int, int]:
        """Return the begin and end of a sample in the line, its last label included."""
        low, high, key, *_ = self._window(number)
        start = low + int(permute(np.array([number - low]), high - low, key)[0])
        return start * self.seq_length, (start + 1) * self.seq_length + 1

    def slices(self, number: int) -> SequenceSlices:
        begin, end = self._bounds(number)
        start, stop, epoch, offset = self._part(begin)
        if epoch is not None and end <= stop:  # almost always: segments take twice as long
            first = offset + begin - start
            return self.source.epoch(epoch).slices(first, first + end - begin)
        line = self._segments(begin, end)
        return SequenceSlices(line.sequences, line.offsets, line.lengths)

    def excluded(self, number: int) -> Int64Array | None:
        if number * self.seq_length >= self._tail_start:  # only pieces end with labels
            return None
        line = self._segments(*self._bounds(number))
        after = np.cumsum(line.lengths)[line.ends]
        return after[after <= self.seq_length]

    def inputs(self, numbers: Int64Array) -> SequenceSlices:
        starts = self._starts(np.sort(numbers)).tolist()
        return SequenceSlices.joined(
            *(self._segments(start, start + self.seq_length).pieces for start in starts)
        )

    def tokens_in(self, numbers: Int64Array) -> int:
        length = self.seq_length
        count = len(numbers) * length
        early = np.sort(numbers[numbers * length < self._tail_start])
        if len(early):
            starts = self._starts(early)
            ends = (self._pieces.starts + self._pieces.lengths)[self._pieces.ends]
            # a label-only token is the last of its piece
            reached = (np.searchsorted(ends, at, side="right") for at in (starts, starts + length))
            before, after = reached
            count -= int((after - before).sum())
        return count

    def epochs(self, taken: int) -> float:
        read = taken * self.seq_length - self._epochs_start
        return self.following + read / self.tokens_per_epoch

    def left(self, taken: int) -> Rest:
        length = self.seq_length
        low, high, key, *_ = self._window(taken)
        tail = low * length
        pieces = NO_SLICES
        if taken > low:
            unread = np.ones(high - low, bool)
            unread[permute(np.arange(taken - low), high - low, key)] = False
            steps = np.flatnonzero(np.diff(unread, prepend=False, append=False))
            begins, ends = ((steps + low) * length).reshape(-1, 2).T
            tail = high * length
            if len(ends) and ends[-1] == tail:  # these samples continue after the window
                tail = int(begins[-1])
                begins, ends = begins[:-1], ends[:-1]
            if len(begins):
                line = self._segments(low * length, tail)
                pieces = line.between(begins, ends).pieces
        if tail < self._tail_start:
            more = self._segments(tail, self._tail_start).pieces
            pieces = SequenceSlices.joined(pieces, more)
            tail = self._tail_start
        begin, _, epoch, offset = self._part(tail)
        assert epoch is not None, "the pieces have been read"
        offset += tail - begin
        return Rest(pieces, epoch.number, epoch if offset else None, offset)

    def place(self, taken: int) -> Place:
        return self._place(taken, self._window(taken))

    def prepare(self, taken: int, stop: int) -> None:
        begin = taken * self.seq_length
        end = stop * self.seq_length
        if self.key.stop - self.key.first < IN_MEMORY:  # no epoch but the tail can have files
            end = min(end, self._epochs_start)
        while begin <= end:
            _, begin, epoch, _ = self._part(begin)
            if epoch is not None and epoch.stop - epoch.first >= IN_MEMORY:
                self.source.epoch(epoch)


class PackedCut(Cut):
    """Samples packed from documents: what is left of an epoch, and then whole epochs."""

    @cached_property
    def _request(self) -> IndexRequest:
        key = self.key
        indexed = self.source.indexed
        tokens = indexed.tokens_between(key.first, key.stop)
        return IndexRequest(
            *(indexed.prefix, "stream", "", key.first, key.stop, tokens, 1, self.seq_length),
            *(key.seed, indexed.sizes),
        )

    @cached_property
    def epoch_packing(self) -> EpochPacking:
        """Return the bins of an epoch."""
        return EpochPacking(self._request, self.source.files)

    @property
    def tokens_per_epoch(self) -> int:
        return self.epoch_packing.predictions

    @property
    def samples_per_epoch(self) -> int:
        return len(self.epoch_packing)

    @cached_property
    def _rest_packing(self) -> Packing:
        """Return the bins of what was left of an epoch."""
        pieces = self.rest.pieces
        if (tail := self.rest.tail) is not None:
            epoch = self.source.epoch(tail)
            line = epoch.segments(self.rest.offset, epoch.tokens, 0)
            pieces = SequenceSlices.joined(pieces, line.pieces)
        pieces = pieces.merged()
        tokens = pieces.lengths + pieces.ends_inside(self.source.indexed.sizes)
        which, begins, lengths = cut_pieces(tokens, self.seq_length)
        table = np.stack(
            [pieces.sequences[which], (pieces.offsets[which] + begins).astype(np.int32)], axis=1
        )
        if not len(table):
            return Packing(self._request, table, np.zeros(1, np.int64), lengths)
        starts, order = group_by_bin(*best_fit_pack(lengths, self.seq_length + 1))
        return Packing(self._request, table[order], starts, lengths[order])

    @cached_property
    def _rest_predictions(self) -> int:
        everything = self._rest_packing.of(np.arange(len(self._rest_packing)))
        return int((everything.lengths - 1).sum())

    def _group(self, number: int) -> tuple[int, Packing, int]:
        """Return the first sample of an epoch or the rest of one, its bins, and the epoch."""
        of_rest = len(self._rest_packing)
        if number < of_rest:
            return 0, self._rest_packing, self.following - 1
        passed = (number - of_rest) // len(self.epoch_packing)
        first = of_rest + passed * len(self.epoch_packing)
        return first, self.epoch_packing, self.following + passed

    def _shuffled(self, numbers: Int64Array, packing: Packing, epoch: int) -> Int64Array:
        """Return the bins of these samples of an epoch or the rest of one, numbered from 0."""
        of_rest = packing is self._rest_packing
        words = (-1, self.following) if of_rest else (epoch,)
        return permute(numbers, len(packing), mix(self.key.seed, *words))

    def _bins(self, numbers: Int64Array) -> list[tuple[Packing, Int64Array]]:
        """Return the bins of these samples, which ascend, in the packings that have them."""
        listed = []
        done = 0
        while done < len(numbers):
            first, packing, epoch = self._group(int(numbers[done]))
            stop = int(np.searchsorted(numbers, first + len(packing)))
            listed.append((packing, self._shuffled(numbers[done:stop] - first, packing, epoch)))
            done = stop
        return listed

    def slices(self, number: int) -> SequenceSlices:
        ((packing, bins),) = self._bins(np.array([number]))
        slices = packing.bin(int(bins[0]))
        if slices is None:
            raise DataError(f"bin {bins[0]} of the index is damaged")
        return slices

    def inputs(self, numbers: Int64Array) -> SequenceSlices:
        some = [packing.of(bins) for packing, bins in self._bins(np.sort(numbers))]
        pieces = SequenceSlices.joined(*some)
        return pieces._replace(lengths=pieces.lengths - 1)

    def tokens_in(self, numbers: Int64Array) -> int:
        return int(self.inputs(numbers).lengths.sum())

    def epochs(self, taken: int) -> float:
        bins = len(self._rest_packing)
        if taken < bins:
            unread = self._rest_predictions * (bins - taken) / bins
            return self.following - unread / self.tokens_per_epoch
        return self.following + (taken - bins) / len(self.epoch_packing)

    def left(self, taken: int) -> Rest:
        first, packing, epoch = self._group(taken)
        if taken == first and packing is self.epoch_packing:
            return Rest(epoch=epoch)
        bins = self._shuffled(np.arange(taken - first, len(packing)), packing, epoch)
        pieces = packing.of(bins)
        pieces = pieces._replace(lengths=pieces.lengths - 1).merged()
        count = len(pieces.lengths)
        order = permute(np.arange(count), count, mix(self.key.seed, epoch + 1, -1))
        return Rest(pieces.at(order), epoch + 1)

    def place(self, taken: int) -> Place:
        first, packing, epoch = self._group(taken)
        return self._place(taken, Window(first, first + len(packing), 0, epoch))

    def prepare(self, taken: int, stop: int) -> None:
        if stop > len(self._rest_packing):
            self._group(stop)
