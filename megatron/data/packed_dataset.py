"""Samples packed from whole documents.

A document is here a sequence of the data files. A bin is a sample of seq_length + 1 tokens. A
document that fits is one piece; a longer one is cut into pieces of seq_length + 1 tokens (the last
may be shorter) that overlap by one, so that each of its predictions (of a token from the preceding
ones) is in exactly one piece. Pieces are assigned to bins by best fit, the longest first
(indexed_dataset.best_fit_pack); unused space is padding. Every epoch reads every bin once, in a
different order, so every prediction within a document counts exactly once per epoch.
`make_micro_batch` excludes predictions across pieces, using the lengths that `segments` returns. A
document of one token is dropped, because it has no prediction.

The share of padding depends on the lengths. With enough documents to fill the last bins, most of
them much shorter than a sample (web text, mean 300 to 700 tokens, sequence length 2048), it is
under 0.1 %. It stays high if no short pieces are left to fill the bins: if all documents are longer
than half a sample (with 1,100 tokens each: 46 %), if all have a length that does not divide the
sample (900: 12 %), or if there are so few that the last bin matters.
"""

from __future__ import annotations

import zlib

import numpy as np

from megatron.data.arrays import Int32Array, Int64Array, IntArray
from megatron.data.gpt_dataset import (
    BLOCK,
    FileDataset,
    IndexFiles,
    IndexRequest,
    Spans,
    spread,
    within,
)
from megatron.data.index_cache import Arrays
from megatron.data.indexed_dataset import SequenceSlices, best_fit_pack, group_by_bin, shuffle
from megatron.errors import DataError

BIN_PARTS = ("pieces", "bin_starts", "counts")
_PROBES = 256


def build_packing(request: IndexRequest) -> Arrays:
    """Return the three arrays of `BIN_PARTS`.

    pieces int32 [pieces, 2], (sequence, first token) of each piece, grouped by bin; the length of a
    piece follows from the length of its sequence. bin_starts int64 [bins + 1], where the pieces of
    each bin start. counts int64 [3]: tokens of the split, predictions (which an epoch trains on),
    and a checksum of the sizes of some sequences.

    Building takes 24 bytes per piece, 8 bytes per bin and about 40 MB; the arrays themselves take
    8 bytes per piece and per bin. Raises DataError if no sequence has two tokens.
    """
    pieces, lengths = _cut(request)
    if not len(pieces):
        raise DataError(
            f"{request.prefix}: none of the sequences {request.start}..{request.stop} has two "
            "tokens, and a document of one token has no prediction: there is nothing to pack"
        )
    predictions = int(lengths.sum(dtype=np.int64)) - len(lengths)
    bins, num_bins = best_fit_pack(lengths, request.sample_tokens)
    del lengths
    starts, order = group_by_bin(bins, num_bins)
    del bins
    # Gathering each row as one number of 8 bytes is several times faster than as two numbers.
    rows = pieces.view(np.int64)[:, 0]
    grouped = np.empty(len(pieces), np.int64)
    for at in range(0, len(order), BLOCK):
        np.take(rows, order[at : at + BLOCK], out=grouped[at : at + BLOCK])
    counts = np.array([request.tokens_per_epoch, predictions, _probe(request)], np.int64)
    return {"pieces": grouped.view(np.int32).reshape(-1, 2), "bin_starts": starts, "counts": counts}


def build_order(num_bins: int, epochs: int, seed: int) -> IntArray:
    """Return the bin of each sample, [epochs * bins], uint32, or int64 for more than 2^32 bins.

    One RandomState(seed) shuffles the bins of each epoch in turn, so more epochs only append to the
    result.
    """
    dtype = np.uint32 if num_bins <= 2**32 else np.int64
    bins: IntArray = np.arange(num_bins, dtype=dtype)
    order = np.tile(bins, (epochs, 1))
    random = np.random.RandomState(seed)
    for row in order:
        shuffle(row, random)
    return order.reshape(-1)


def _cut(request: IndexRequest) -> tuple[Int32Array, Int32Array]:
    """Cut the sequences of the split into pieces.

    Return int32 [pieces, 2] of (sequence, first token) in text order, and int32 [pieces], each
    piece's number of tokens.
    """
    pieces = list[Int32Array]()
    lengths = list[Int32Array]()
    for first in range(request.start, request.stop, BLOCK):
        sizes = request.sizes[first : min(first + BLOCK, request.stop)]
        sequences, offsets, filled = cut_pieces(sizes, request.seq_length)
        pieces.append(np.stack([sequences + first, offsets], axis=1).astype(np.int32))
        lengths.append(filled)
    return np.concatenate(pieces), np.concatenate(lengths)


def cut_pieces(sizes: IntArray, seq_length: int) -> tuple[Int64Array, Int64Array, Int32Array]:
    """Cut texts of these numbers of tokens into pieces of up to seq_length + 1.

    Return for each piece the number of its text, its first token and its number of tokens. A text
    has as many pieces as its number of predictions divided by seq_length, rounded up.
    """
    counts = np.maximum(-((1 - sizes.astype(np.int64)) // seq_length), 0)
    texts = np.repeat(np.arange(len(sizes)), counts)
    offsets = within(counts) * seq_length
    filled = np.minimum(sizes[texts] - offsets, seq_length + 1)
    return texts, offsets, filled.astype(np.int32)


def _probe(request: IndexRequest) -> int:
    """Return a checksum of the sizes of some sequences, to detect other data of the same name."""
    where = np.linspace(request.start, request.stop - 1, _PROBES).astype(np.int64)
    return zlib.crc32(request.sizes[where].astype("<i4").tobytes())


class Packing:
    """Pieces of sequences in bins of `request.sample_tokens` tokens.

    table   int32 [pieces, 2], (sequence, first token) of each piece, grouped by bin
    starts  int64 [bins + 1], where the pieces of each bin start
    tokens  number of tokens of each piece; None: up to the end of its sequence, or a full bin
    """

    def __init__(
        self,
        request: IndexRequest,
        table: IntArray,
        starts: IntArray,
        tokens: Int32Array | None = None,
    ) -> None:
        self._request = request
        self._table = table
        self._starts = starts
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._starts) - 1

    @property
    def pieces(self) -> int:
        """Return the number of pieces in all bins."""
        return len(self._table)

    def _lengths(self, pieces: Int64Array | slice) -> Int64Array:
        if self._tokens is not None:
            return self._tokens[pieces].astype(np.int64)
        sequences, offsets = self._table[pieces].T
        return self._request.piece_lengths(sequences, offsets.astype(np.int64))

    def of(self, bins: Int64Array) -> SequenceSlices:
        """Return the pieces of these bins, without checks."""
        first = self._starts[bins]
        count = self._starts[bins + 1] - first
        pieces = np.repeat(first, count) + within(count)
        sequences, offsets = self._table[pieces].T
        return SequenceSlices(sequences, offsets.astype(np.int64), self._lengths(pieces))

    def bin(self, number: int) -> SequenceSlices | None:
        """Return the pieces of a bin.

        None if there are none, if they are too long for a bin, or if one is outside of the split or
        has fewer than two tokens.
        """
        if not 0 <= number < len(self):
            return None
        first, stop = self._starts[number : number + 2].tolist()
        if not 0 <= first < stop <= len(self._table):
            return None
        sequences, offsets = self._table[first:stop].T
        request = self._request
        if not request.covers(sequences) or offsets.min() < 0:
            return None
        lengths = self._lengths(slice(first, stop))
        fits = lengths.min() >= 2 and lengths.sum() <= request.sample_tokens
        return SequenceSlices(sequences, offsets, lengths) if fits else None


class EpochPacking(Packing):
    """The bins of all sequences in `request`, from the index files, or built.

    `predictions` counts those that an epoch trains on: a document of n tokens has n - 1. `waste` is
    the share of padding in all tokens.
    """

    predictions: int

    def __init__(self, request: IndexRequest, files: IndexFiles) -> None:
        self._request = request
        self._tokens = None
        files.load(
            request.bins_description,
            BIN_PARTS,
            lambda: build_packing(request),
            self._take,
            (request.start, request.stop),
        )
        # a piece has one more token than predictions
        filled = self.predictions + self.pieces
        self.waste = 1 - filled / (len(self) * request.sample_tokens)

    def _take(self, arrays: Arrays) -> bool:
        """Keep the arrays; return whether shapes, checksum and some of the bins match this data."""
        table, starts, counts = (arrays[name] for name in BIN_PARTS)
        self._table = table
        self._starts = starts
        if counts.shape != (3,) or table.shape[1:] != (2,) or starts.ndim != 1:
            return False
        tokens, self.predictions, checksum = counts.tolist()
        return (
            len(self) > 0
            and tokens == self._request.tokens_per_epoch
            and checksum == _probe(self._request)
            and starts[-1] == len(table)
            and all(self.bin(number) is not None for number in spread(len(self)))
        )


class PackedDataset(FileDataset):
    """Samples that are packed from documents and shuffled, in whole epochs, in Megatron's way.

    `tokens_per_epoch` counts the tokens that an epoch trains on. Raises DataError if no sequence has
    two tokens.
    """

    def _load(self) -> None:
        request = self._request
        self._packing = EpochPacking(request, self._files)
        self.num_bins = len(self._packing)
        self.waste = self._packing.waste
        self.tokens_per_epoch = self._packing.predictions
        epochs = -(-request.num_samples // self.num_bins)
        self._cached(
            f"{request.bins_description}Number of epochs {epochs}\nRandom seed {request.seed}\n",
            ["order"],
            lambda: {"order": build_order(self.num_bins, epochs, request.seed)},
            self._take_order,
        )

    def _take_order(self, arrays: Arrays) -> bool:
        self._order = arrays["order"]
        epochs = -(-self._request.num_samples // self.num_bins)
        return self._order.shape == (self.num_bins * epochs,)

    def __len__(self) -> int:
        return len(self._order)

    def segments(self, index: int, /) -> Int64Array:
        """Return the length of each piece of sample `index`; the rest of the sample is padding."""
        return self._slices(index).lengths

    def tokens_in(self, indices: Int64Array, /) -> int:
        """Return the number of predictions within documents in these samples."""
        return int(self.spans(indices)[1].sum())

    def spans(self, indices: Int64Array, /) -> Spans:
        """Return the pieces of these samples, without the label that ends each piece."""
        sequences, offsets, lengths = self._packing.of(self._order[indices].astype(np.int64))
        return (sequences.astype(np.int64) << 32) + offsets, lengths - 1

    def _find(self, index: int) -> SequenceSlices | None:
        return self._packing.bin(int(self._order[index]))
