"""Samples that are packed from whole documents.

A bin is a sample of seq_length + 1 tokens. A
document that fits is one piece; a longer one is cut into pieces of seq_length + 1 tokens that
overlap by one, so that each of its predictions (of a token from those before it) is in exactly one
piece. Pieces are assigned to bins by best fit, the longest first (indexed_dataset.best_fit_pack);
unused room is padding. Every epoch reads every bin once, in a different order, so every prediction
within a document counts exactly once per epoch. The batch excludes predictions across pieces, by
the lengths that `segments` returns. A document of one token is dropped, because it has no
prediction.

The share of padding depends on the lengths. With enough documents to fill the last bins, most of
them much shorter than a sample (web text, mean 300 to 700 tokens, sequence length 2048), it is
under 0.1 %. It stays high if no short pieces are left to fill the bins: all documents over half a
sample (of 1,100 tokens each: 46 %), all of one length that does not divide the sample (of 900: 12
%), or so few that the last bin counts.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.gpt_dataset import (
    BLOCK,
    SPOT_CHECKS,
    FileDataset,
    IndexRequest,
    Pieces,
    Spans,
    spread,
    within,
)
from megatron.data.index_cache import Arrays
from megatron.data.indexed_dataset import best_fit_pack, group_by_bin, shuffle
from megatron.errors import DataError

BIN_PARTS = ("pieces", "bin_starts", "counts")
_PROBES = 256


def build_packing(request: IndexRequest) -> Arrays:
    """Return the three arrays of `BIN_PARTS`.

    pieces int32 [pieces, 2], (sequence, first token) of each piece, those of a bin together; its
    length follows from the sequence's. bin_starts int64 [bins + 1], where the pieces of each bin
    start. counts int64 [3]: tokens of the split, predictions (which an epoch trains on), and a
    checksum of some sizes.

    Uses 24 bytes per piece and 8 per bin, of which 8 each are the arrays, and some 40 MB. Raises
    DataError if no sequence has two tokens.
    """
    pieces, lengths = _cut(request)
    if not len(pieces):
        raise DataError(
            f"{request.prefix}: none of the sequences {request.start}..{request.stop} has two "
            "tokens, and a document of one takes part in no prediction: there is nothing to pack"
        )
    predictions = int(lengths.sum(dtype=np.int64)) - len(lengths)
    bins, num_bins = best_fit_pack(lengths, request.sample_tokens)
    del lengths
    starts, order = group_by_bin(bins, num_bins)
    del bins
    # One number of 8 bytes for each row is gathered several times faster than rows of two.
    rows = pieces.view(np.int64)[:, 0]
    grouped = np.empty(len(pieces), np.int64)
    for at in range(0, len(order), BLOCK):
        np.take(rows, order[at : at + BLOCK], out=grouped[at : at + BLOCK])
    counts = np.array([request.tokens_per_epoch, predictions, _probe(request)], np.int64)
    return {"pieces": grouped.view(np.int32).reshape(-1, 2), "bin_starts": starts, "counts": counts}


def build_order(num_bins: int, epochs: int, seed: int) -> npt.NDArray[np.uint32 | np.int64]:
    """Return the bin of each sample, [epochs * bins], uint32, or int64 for 2^32 bins.

    One RandomState(seed) shuffles the bins of each epoch in turn, so more epochs only append to the
    result.
    """
    dtype = np.uint32 if num_bins <= 2**32 else np.int64
    bins: npt.NDArray[Any] = np.arange(num_bins, dtype=dtype)
    order = np.tile(bins, (epochs, 1))
    random = np.random.RandomState(seed)
    for row in order:
        shuffle(row, random)
    return order.reshape(-1)


def waste_of(num_bins: int, num_pieces: int, predictions: int, capacity: int) -> float:
    """Return the share of the bins' tokens that is padding.

    A piece has one token more than predictions.
    """
    return 1 - (predictions + num_pieces) / (num_bins * capacity)


def _cut(request: IndexRequest) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Cut the sequences of the split into pieces.

    Return int32 [pieces, 2] of (sequence, first token) in text order, and int32 [pieces], the
    tokens of each piece. A sequence has as many pieces as its predictions divided by seq_length,
    rounded up.
    """
    seq_length = np.int32(request.seq_length)
    pieces = list[npt.NDArray[np.int32]]()
    lengths = list[npt.NDArray[np.int32]]()
    for first in range(request.start, request.stop, BLOCK):
        part = request.sizes[first : min(first + BLOCK, request.stop)]
        counts = np.maximum(-((1 - part) // seq_length), 0)
        sequences = np.repeat(np.arange(len(part), dtype=np.int32), counts)
        starts = np.cumsum(counts, dtype=np.int64) - counts
        offsets = (np.arange(len(sequences)) - starts[sequences]) * request.seq_length
        pieces.append(np.stack([sequences + first, offsets], axis=1).astype(np.int32))
        filled = np.minimum(part[sequences] - offsets, request.sample_tokens)
        lengths.append(filled.astype(np.int32))
    return np.concatenate(pieces), np.concatenate(lengths)


def _probe(request: IndexRequest) -> int:
    """Return a checksum of the sizes of some sequences.

    It detects other data under the same name.
    """
    where = np.linspace(request.start, request.stop - 1, _PROBES).astype(np.int64)
    return zlib.crc32(request.sizes[where].astype("<i4").tobytes())


def pieces_of_bin(
    pieces: npt.NDArray[np.int32],
    starts: npt.NDArray[np.int64],
    number: int,
    request: IndexRequest,
) -> Pieces | None:
    """Return the pieces of a bin.

    None if there are none or they are not within the split and the bin.
    """
    if not 0 <= number < len(starts) - 1:
        return None
    first, stop = starts[number : number + 2].tolist()
    if not 0 <= first < stop <= len(pieces):
        return None
    sequences = pieces[first:stop, 0]
    offsets = pieces[first:stop, 1].astype(np.int64)
    if not request.covers(sequences) or offsets.min() < 0:
        return None
    lengths = request.piece_lengths(sequences, offsets)
    fits = lengths.min() >= 2 and lengths.sum() <= request.sample_tokens
    return (sequences, offsets, lengths) if fits else None


def packing_fits(arrays: Arrays, request: IndexRequest) -> bool:
    """Return whether cached arrays belong to this data.

    Shapes, a checksum of sizes and a few bins are compared.
    """
    pieces, starts, counts = (arrays[part] for part in BIN_PARTS)
    if counts.shape != (3,) or pieces.shape[1:] != (2,) or starts.ndim != 1 or len(starts) < 2:
        return False
    return bool(
        counts[0] == request.tokens_per_epoch
        and counts[2] == _probe(request)
        and starts[-1] == len(pieces)
        and all(
            pieces_of_bin(pieces, starts, number, request) is not None
            for number in spread(len(starts) - 1, SPOT_CHECKS).tolist()
        )
    )


class PackedDataset(FileDataset):
    """Samples that are packed from documents and shuffled, in whole epochs.

    `waste` is the share of padding in all tokens. `tokens_per_epoch` counts the tokens that an
    epoch trains on: a document of n tokens has n - 1 predictions. Raises DataError if no sequence
    has two tokens.
    """

    def _load(self) -> None:
        request = self._request
        self._table, self._starts, counts = self._cached(
            request.bins_description,
            BIN_PARTS,
            build=lambda: build_packing(request),
            fits=lambda found: packing_fits(found, request),
        )
        self.num_bins = len(self._starts) - 1
        self.tokens_per_epoch = int(counts[1])
        epochs = -(-request.num_samples // self.num_bins)
        (self._order,) = self._cached(
            f"{request.bins_description}Number of epochs {epochs}\nRandom seed {request.seed}\n",
            ["order"],
            build=lambda: {"order": build_order(self.num_bins, epochs, request.seed)},
            fits=lambda found: found["order"].shape == (self.num_bins * epochs,),
        )
        pieces = len(self._table)
        predictions = self.tokens_per_epoch
        self.waste = waste_of(self.num_bins, pieces, predictions, request.sample_tokens)

    def __len__(self) -> int:
        return len(self._order)

    def segments(self, index: int, /) -> npt.NDArray[np.int64]:
        """Return the tokens of each piece of sample `index`; the rest of the sample is padding."""
        return self._pieces(index)[2]

    def tokens_in(self, indices: npt.NDArray[np.int64], /) -> int:
        """Return the number of predictions within documents in these samples."""
        return int(self.spans(indices)[1].sum())

    def spans(self, indices: npt.NDArray[np.int64], /) -> Spans:
        """Return the pieces of these samples, without the last token of each, which is a label."""
        bins = self._order[indices].astype(np.int64)
        first = self._starts[bins]
        count = self._starts[bins + 1] - self._starts[bins]
        sequences, offsets = self._table[np.repeat(first, count) + within(count)].T
        lengths = self._request.piece_lengths(sequences, offsets.astype(np.int64))
        return (sequences.astype(np.int64) << 32) + offsets, lengths - 1

    def _find(self, index: int) -> Pieces | None:
        return pieces_of_bin(self._table, self._starts, int(self._order[index]), self._request)
