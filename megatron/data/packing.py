"""Samples packed from whole documents instead of cut out of one long text.

A bin is a sample of seq_length + 1 tokens. A document that fits is one piece; a longer one is cut
into pieces of seq_length + 1 tokens that overlap by one, so that each of its predictions (a token
from those before it) is in exactly one piece. Pieces go into bins by best fit, the longest first
(index_helpers.best_fit_pack); unused room is padding. Every epoch reads every bin once, in an order
of its own, so every prediction within a document counts exactly once per epoch. The batch leaves
out predictions across pieces, by the lengths that `segments` returns.

A document of one token is dropped: it takes part in no prediction.

The share of padding depends on the lengths. With enough documents to fill the last bins, most of
them much shorter than a sample (web text, mean 300 to 700 tokens, sequence length 2048), it is
under 0.1 %. It stays high if nothing short is left to fill up with: all documents over half a
sample (of 1,100 tokens each: 46 %), all of one length that does not divide the sample (of 900: 12
%), or so few that the last bin counts.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from megatron.data.gpt_dataset import FileDataset, IndexRequest, Pieces
from megatron.data.index_cache import Arrays
from megatron.data.indexed_dataset import best_fit_pack, group_by_bin, shuffle
from megatron.errors import DataError

PARTS = ("pieces", "bin_starts", "counts")
_BLOCK = 1 << 20  # sequences or pieces processed at once: keeps temporary memory flat
_PROBES = 256
_SPOT_CHECKS = 16
log = logging.getLogger(__name__)


class PackedRequest(IndexRequest):
    """The values that determine the bins and their order."""

    @property
    def capacity(self) -> int:
        """Return the tokens of a bin."""
        return self.seq_length + 1

    @property
    def description(self) -> str:
        """Return the text whose md5 names the files of the bins; seed and number of samples do not
        change it.
        """
        return (
            f"Packed GPT Dataset, best fit\n\nData prefix {self.prefix}\nSequences {self.start} "
            f"to {self.stop}\nNumber of tokens {self.tokens_per_epoch}\nSequence length "
            f"{self.seq_length}\n"
        )

    def epochs_of(self, num_bins: int) -> int:
        """Return the smallest number of epochs, at least 1, with `num_samples` samples."""
        return max(1, -(-self.num_samples // num_bins))

    def order_description(self, num_bins: int) -> str:
        """Return the text whose md5 names the file of the order."""
        return (
            f"{self.description}Number of epochs {self.epochs_of(num_bins)}\nRandom seed "
            f"{self.seed}\n"
        )


def build_packing(request: PackedRequest, sizes: npt.NDArray[np.int32]) -> Arrays:
    """Return the three arrays of `PARTS`.

    pieces int32 [pieces, 2], (sequence, first token) of each piece, those of a bin together; its
    length follows from the sequence's. bin_starts int64 [bins + 1], where the pieces of each bin
    start. counts int64 [3]: tokens of the split, predictions (which an epoch trains on), and a
    checksum of some sizes.

    Uses 20 bytes per piece and 8 per bin, of which 8 each are the arrays. Raises DataError if no
    sequence has two tokens.
    """
    pieces, lengths = _cut(request, sizes)
    if not len(pieces):
        raise DataError(
            f"{request.prefix}: none of the sequences {request.start}..{request.stop} has two "
            "tokens, and a document of one takes part in no prediction: there is nothing to pack"
        )
    predictions = int(lengths.sum(dtype=np.int64)) - len(lengths)
    bins, num_bins = best_fit_pack(lengths, request.capacity)
    del lengths
    starts, order = group_by_bin(bins, num_bins)
    del bins
    # One number of 8 bytes for each row is gathered several times faster than rows of two.
    rows, grouped = pieces.view(np.int64)[:, 0], np.empty(len(pieces), np.int64)
    for at in range(0, len(order), _BLOCK):
        np.take(rows, order[at : at + _BLOCK], out=grouped[at : at + _BLOCK])
    counts = np.array([request.tokens_per_epoch, predictions, _probe(request, sizes)], np.int64)
    waste = waste_of(num_bins, len(pieces), predictions, request.capacity)
    log.info(
        "packed %d pieces of %s into %d samples, %.3f%% padding",
        len(pieces),
        request.prefix,
        num_bins,
        100 * waste,
    )
    return {"pieces": grouped.view(np.int32).reshape(-1, 2), "bin_starts": starts, "counts": counts}


def build_order(num_bins: int, epochs: int, seed: int) -> npt.NDArray[np.uint32 | np.int64]:
    """Return the bin of each sample, [epochs * bins], uint32, or int64 for 2^32 bins.

    One RandomState(seed) shuffles the bins of each epoch, so that more epochs only add to the end.
    """
    order = np.empty((epochs, num_bins), np.uint32 if num_bins <= 2**32 else np.int64)
    random = np.random.RandomState(seed)
    for row in order:
        row[:] = np.arange(num_bins, dtype=order.dtype)
        shuffle(row, random)
    return order.reshape(-1)


def waste_of(num_bins: int, num_pieces: int, predictions: int, capacity: int) -> float:
    """Return the share of the bins' tokens that is padding. A piece has one token more than
    predictions.
    """
    return 1 - (predictions + num_pieces) / (num_bins * capacity)


def _blocks(
    request: PackedRequest, sizes: npt.NDArray[np.int32]
) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
    """Yield (first sequence, sizes) of the split, a block at a time."""
    for first in range(request.start, request.stop, _BLOCK):
        yield first, sizes[first : min(first + _BLOCK, request.stop)]


def _pieces_of(sizes: npt.NDArray[np.int32], seq_length: int) -> npt.NDArray[np.int32]:
    """Return the number of pieces of each sequence: its predictions divided by seq_length, rounded
    up.
    """
    pieces: npt.NDArray[np.int32] = np.maximum(-((1 - sizes) // np.int32(seq_length)), 0)
    return pieces


def _cut(
    request: PackedRequest, sizes: npt.NDArray[np.int32]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return int32 [pieces, 2] of (sequence, first token) in text order, and int32 [pieces], the
    tokens of each.
    """
    seq_length = request.seq_length
    total = sum(
        int(_pieces_of(part, seq_length).sum(dtype=np.int64)) for _, part in _blocks(request, sizes)
    )
    pieces, lengths = np.empty((total, 2), np.int32), np.empty(total, np.int32)
    at = 0
    for first, part in _blocks(request, sizes):
        counts = _pieces_of(part, seq_length)
        stops = np.cumsum(counts, dtype=np.int64)
        stop = at + int(stops[-1])
        sequences = np.repeat(np.arange(len(part), dtype=np.int32), counts)
        offsets = (np.arange(len(sequences)) - (stops - counts)[sequences]) * seq_length
        pieces[at:stop, 0] = sequences + np.int32(first)
        pieces[at:stop, 1] = offsets
        lengths[at:stop] = np.minimum(part[sequences] - offsets, request.capacity)
        at = stop
    return pieces, lengths


def _probe(request: PackedRequest, sizes: npt.NDArray[np.int32]) -> int:
    """Return a checksum of the sizes of some sequences, which detects other data under the same
    name.
    """
    where = np.linspace(request.start, request.stop - 1, _PROBES).astype(np.int64)
    return zlib.crc32(sizes[where].astype("<i4").tobytes())


def pieces_of_bin(
    pieces: npt.NDArray[np.int32],
    starts: npt.NDArray[np.int64],
    number: int,
    request: PackedRequest,
    sizes: npt.NDArray[np.int32],
) -> Pieces | None:
    """Return the pieces of a bin; None if there are none or they are not within the split and the
    bin.
    """
    if not 0 <= number < len(starts) - 1:
        return None
    first, stop = starts[number : number + 2].tolist()
    if not 0 <= first < stop <= len(pieces):
        return None
    sequences, offsets = pieces[first:stop, 0], pieces[first:stop, 1].astype(np.int64)
    if sequences.min() < request.start or sequences.max() >= request.stop or offsets.min() < 0:
        return None
    lengths = _lengths(sequences, offsets, sizes, request.capacity)
    return (
        (sequences, offsets, lengths)
        if lengths.min() >= 2 and lengths.sum() <= request.capacity
        else None
    )


def _lengths(
    sequences: npt.NDArray[np.int32],
    offsets: npt.NDArray[np.int64],
    sizes: npt.NDArray[np.int32],
    capacity: int,
) -> npt.NDArray[np.int64]:
    """Return the tokens of each piece: to the end of its sequence, or a whole bin."""
    result: npt.NDArray[np.int64] = np.minimum(
        sizes[sequences].astype(np.int64) - offsets, capacity
    )
    return result


def packing_fits(arrays: Arrays, request: PackedRequest, sizes: npt.NDArray[np.int32]) -> bool:
    """Return whether cached arrays belong to this data, by their shapes, a checksum of sizes and a
    few bins.
    """
    pieces, starts, counts = (arrays[part] for part in PARTS)
    if (
        counts.shape != (3,)
        or pieces.ndim != 2
        or pieces.shape[1] != 2
        or starts.ndim != 1
        or len(starts) < 2
    ):
        return False
    if (
        counts[0] != request.tokens_per_epoch
        or counts[2] != _probe(request, sizes)
        or starts[-1] != len(pieces)
    ):
        return False
    checked = np.unique(np.linspace(0, len(starts) - 2, _SPOT_CHECKS).astype(np.int64)).tolist()
    return all(
        pieces_of_bin(pieces, starts, number, request, sizes) is not None for number in checked
    )


class PackedDataset(FileDataset):
    """Samples that are packed from documents and shuffled, in whole epochs.

    `waste` is the share of padding in all tokens. `tokens_per_epoch` counts the tokens that an
    epoch trains on: a document of n tokens has n - 1 predictions. Raises DataError if no sequence
    has two tokens.
    """

    request_type = PackedRequest
    _request: PackedRequest

    def _load(self) -> None:
        request = self._request
        self._table, self._starts, counts = self._index(
            request.description, PARTS, build_packing, packing_fits
        )
        self.num_bins, self.tokens_per_epoch = len(self._starts) - 1, int(counts[1])
        epochs = request.epochs_of(self.num_bins)
        self.description = request.order_description(self.num_bins)
        self._order = self._cached(
            self.description,
            ("order",),
            build=lambda: {"order": build_order(self.num_bins, epochs, request.seed)},
            fits=lambda found: found["order"].shape == (self.num_bins * epochs,),
        )["order"]
        self.waste = waste_of(
            self.num_bins, len(self._table), self.tokens_per_epoch, request.capacity
        )

    def __len__(self) -> int:
        return len(self._order)

    def segments(self, index: int, /) -> npt.NDArray[np.int64]:
        """Return the tokens of each piece of sample `index`; the rest of the sample is padding."""
        return self._pieces(index)[2]

    def tokens_in(self, indices: npt.NDArray[np.int64], /) -> int:
        """Return the number of predictions within documents in these samples."""
        bins = self._order[indices].astype(np.int64)
        first, count = self._starts[bins], self._starts[bins + 1] - self._starts[bins]
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        sequences, offsets = self._table[np.repeat(first, count) + within].T
        lengths = _lengths(
            sequences, offsets.astype(np.int64), self._indexed.sizes, self._request.capacity
        )
        return int((lengths - 1).sum())

    def _find(self, index: int) -> Pieces | None:
        return pieces_of_bin(
            self._table, self._starts, int(self._order[index]), self._request, self._indexed.sizes
        )
