"""Samples that are packed from whole documents, instead of cut out of one long text.

A bin is a sample of seq_length + 1 tokens. A document that fits is one piece; a longer one is cut into pieces of
seq_length + 1 tokens that overlap by one, so that each of its predictions (a token from those before it) is in exactly
one piece. Pieces go into bins by best fit, the longest first (index_helpers.best_fit_pack); what no piece fits is
padding. Every epoch gives every bin once, in an order of its own, so every prediction within a document counts exactly
once per epoch. Predictions across pieces are for the batch to leave out, by the lengths that `segments` gives.

A document of one token is dropped: nothing predicts it and it predicts nothing, so it would only take up room.

How much is padding depends on the lengths. Where most documents are much shorter than a sample (web text, mean 300 to
700 tokens, sequence length 2048) it is under 0.1 %, as long as there are enough documents to fill the last bins. It
stays high where nothing short is left to fill up with: documents all of more than half a sample (of 1,100 tokens each:
46 %), all of one length that does not divide the sample (of 900: 12 %), or so few that the last bin counts.
"""

from __future__ import annotations

import contextlib
import logging
import os
import zlib
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from megatron.data.gpt_index import IndexRequest, cache_directories, tokens_of_split
from megatron.data.index_cache import Arrays, load_or_build
from megatron.data.index_helpers import best_fit_pack, group_by_bin, shuffle
from megatron.data.indexed_dataset import IndexedDataset, bin_path
from megatron.errors import DataError

PARTS = ("pieces", "bin_starts", "counts")
_BLOCK = 1 << 20  # so many sequences or pieces are worked on at once, which keeps temporary memory flat
_PROBES = 256
_SPOT_CHECKS = 16
Pieces = tuple[npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]
log = logging.getLogger(__name__)


class PackedRequest(IndexRequest):
    """What decides the bins and their order."""

    @property
    def capacity(self) -> int:
        """Tokens of a bin."""
        return self.seq_length + 1

    @property
    def description(self) -> str:
        """The text whose md5 names the files of the bins, which no seed and no number of samples changes."""
        return (
            "Packed GPT Dataset, best fit\n\n"
            f"Data prefix {self.prefix}\n"
            f"Sequences {self.start} to {self.stop}\n"
            f"Number of tokens {self.tokens_per_epoch}\n"
            f"Sequence length {self.seq_length}\n"
        )

    def epochs_of(self, num_bins: int) -> int:
        """The smallest number of epochs, 1 or more, that gives `num_samples` samples."""
        return max(1, -(-self.num_samples // num_bins))

    def order_description(self, num_bins: int) -> str:
        return f"{self.description}Number of epochs {self.epochs_of(num_bins)}\nRandom seed {self.seed}\n"


def load_packed_index(
    indexed: IndexedDataset,
    request: PackedRequest,
    *,
    data_cache_path: str | os.PathLike[str] | None = None,
    verify: bool = False,
) -> Arrays:
    """The arrays of build_packing and build_order from the cache, built first if need be: `PARTS` and "order".

    Looked up in `index-cache` beside the data, then in `data_cache_path`; written to `data_cache_path` if given. Raises
    DataError as load_or_build does, when no sequence has two tokens, and before it builds for sizes in the .idx file
    that cannot be right.
    """

    def build() -> Arrays:
        indexed.check(request.start, request.stop)
        return build_packing(request, indexed.sizes)

    directories = cache_directories(request.prefix, data_cache_path)
    arrays = load_or_build(
        request.description,
        PARTS,
        directories,
        build,
        fits=lambda found: packing_fits(found, request, indexed.sizes),
        verify=verify,
    )
    num_bins = len(arrays["bin_starts"]) - 1
    order = load_or_build(
        request.order_description(num_bins),
        ("order",),
        directories,
        lambda: {"order": build_order(num_bins, request.epochs_of(num_bins), request.seed)},
        fits=lambda found: found["order"].shape == (num_bins * request.epochs_of(num_bins),),
        verify=verify,
    )
    return arrays | order


def build_packing(request: PackedRequest, sizes: npt.NDArray[np.int32]) -> Arrays:
    """The three arrays of `PARTS`.

    pieces int32 [pieces, 2], (sequence, first token) of each piece, those of a bin together; its length follows from
    the sequence's. bin_starts int64 [bins + 1], where the pieces of each bin start. counts int64 [3]: tokens of the
    split, predictions (which is what an epoch trains on), and a checksum of some sizes.

    Memory is 20 bytes per piece and 8 per bin, of which 8 each are the arrays. Raises DataError when no
    sequence has two tokens.
    """
    pieces, lengths = _cut(request, sizes)
    if not len(pieces):
        raise DataError(
            f"{request.prefix}: none of the sequences {request.start}..{request.stop} has two tokens, and a document "
            f"of one predicts nothing: there is nothing to pack"
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
        "packed %d pieces of %s into %d samples, %.3f%% padding", len(pieces), request.prefix, num_bins, 100 * waste
    )
    return {"pieces": grouped.view(np.int32).reshape(-1, 2), "bin_starts": starts, "counts": counts}


def build_order(num_bins: int, epochs: int, seed: int) -> npt.NDArray[np.uint32 | np.int64]:
    """The bin that each sample is, [epochs * bins]: the bins of each epoch shuffled by one RandomState(seed), so that
    more epochs only add to the end. uint32, or int64 for 2^32 bins."""
    order = np.empty((epochs, num_bins), np.uint32 if num_bins <= 2**32 else np.int64)
    random = np.random.RandomState(seed)
    for row in order:
        row[:] = np.arange(num_bins, dtype=order.dtype)
        shuffle(row, random)
    return order.reshape(-1)


def waste_of(num_bins: int, num_pieces: int, predictions: int, capacity: int) -> float:
    """Share of the bins' tokens that is padding. A piece has one token more than predictions."""
    return 1 - (predictions + num_pieces) / (num_bins * capacity)


def _blocks(request: PackedRequest, sizes: npt.NDArray[np.int32]) -> Iterator[tuple[int, npt.NDArray[np.int32]]]:
    """(first sequence, sizes) of the split, a block at a time."""
    for first in range(request.start, request.stop, _BLOCK):
        yield first, sizes[first : min(first + _BLOCK, request.stop)]


def _pieces_of(sizes: npt.NDArray[np.int32], seq_length: int) -> npt.NDArray[np.int32]:
    """Pieces of each sequence: as many as seq_length goes into its predictions, rounded up."""
    pieces: npt.NDArray[np.int32] = np.maximum(-((1 - sizes) // np.int32(seq_length)), 0)
    return pieces


def _cut(request: PackedRequest, sizes: npt.NDArray[np.int32]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """int32 [pieces, 2] of (sequence, first token) in order of the text, and int32 [pieces] tokens of each."""
    seq_length = request.seq_length
    total = sum(int(_pieces_of(part, seq_length).sum(dtype=np.int64)) for _, part in _blocks(request, sizes))
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
    """A checksum of the sizes of some sequences, by which other data under the same name is noticed."""
    where = np.linspace(request.start, request.stop - 1, _PROBES).astype(np.int64)
    return zlib.crc32(sizes[where].astype("<i4").tobytes())


def packing_fits(arrays: Arrays, request: PackedRequest, sizes: npt.NDArray[np.int32]) -> bool:
    """Whether cached arrays belong to this data: by their shapes, by sizes that are compared, and by a few bins whose
    pieces must be there and fit."""
    pieces, starts, counts = (arrays[part] for part in PARTS)
    if counts.shape != (3,) or pieces.ndim != 2 or pieces.shape[1] != 2 or starts.ndim != 1 or len(starts) < 2:
        return False
    if counts[0] != request.tokens_per_epoch or counts[2] != _probe(request, sizes) or starts[-1] != len(pieces):
        return False
    for chosen in np.unique(np.linspace(0, len(starts) - 2, _SPOT_CHECKS).astype(np.int64)).tolist():
        first, stop = starts[chosen : chosen + 2].tolist()
        if not 0 <= first < stop <= len(pieces):
            return False
        sequences = pieces[first:stop, 0]
        if sequences.min() < request.start or sequences.max() >= request.stop:
            return False
        if not _lengths_fit(_lengths(pieces[first:stop], sizes, request.capacity), request.capacity):
            return False
    return True


def _lengths(pieces: npt.NDArray[np.int32], sizes: npt.NDArray[np.int32], capacity: int) -> npt.NDArray[np.int64]:
    """Tokens of each piece: to the end of its sequence, or a whole bin."""
    return np.minimum(sizes[pieces[:, 0]].astype(np.int64) - pieces[:, 1], capacity)


def _lengths_fit(lengths: npt.NDArray[np.int64], capacity: int) -> bool:
    return len(lengths) > 0 and int(lengths.min()) >= 2 and int(lengths.sum()) <= capacity


class PackedDataset:
    """The sequences start..stop-1 of an indexed data set, packed into samples of seq_length + 1 tokens and shuffled.

    Has at least `num_samples` samples, in whole epochs. What no piece fills is `pad_id`. `description` names the index
    in the cache; `waste` is the share of padding in all tokens. `tokens_per_epoch` counts what an epoch trains on: a
    document of n tokens has n - 1 predictions. Raises DataError when no sequence has two tokens, and as load_or_build
    does.
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
        pad_id: int,
        data_cache_path: str | os.PathLike[str] | None = None,
        verify: bool = False,
    ) -> None:
        tokens = tokens_of_split(indexed, name, split, bounds)
        request = PackedRequest(indexed.prefix, name, split, *bounds, tokens, num_samples, seq_length, seed)
        arrays = load_packed_index(indexed, request, data_cache_path=data_cache_path, verify=verify)
        self._indexed, self._request = indexed, request
        self._table, self._starts, self._order = arrays["pieces"], arrays["bin_starts"], arrays["order"]
        self.name, self.seq_length, self.pad_id = indexed.prefix, seq_length, pad_id
        self.num_bins = len(self._starts) - 1
        self.description = request.order_description(self.num_bins)
        self.tokens_per_epoch = int(arrays["counts"][1])
        self.waste = waste_of(self.num_bins, len(self._table), self.tokens_per_epoch, request.capacity)

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, index: int, /) -> npt.NDArray[np.int64]:
        sequences, offsets, lengths = self._pieces(index)
        filled = int(lengths.sum())
        tokens = np.empty(self._request.capacity, np.int64)
        tokens[filled:] = self.pad_id
        self._indexed.gather(sequences, offsets, lengths, tokens[:filled])
        return tokens

    def segments(self, index: int, /) -> npt.NDArray[np.int64]:
        """Tokens of each piece of sample `index`; what is beyond their sum is padding."""
        return self._pieces(index)[2]

    def where(self, index: int, token: int = 0, /) -> str:
        sequences, offsets, lengths = self._pieces(index)
        if token >= lengths.sum():
            return f"{bin_path(self._indexed.location)}, padding of sample {index}"
        return self._indexed.where(sequences, offsets, lengths, token)

    def prefetch(self, index: int, /) -> None:
        with contextlib.suppress(DataError):
            self._indexed.prefetch(*self._pieces(index))

    def tokens_in(self, indices: npt.NDArray[np.int64], /) -> int:
        """Predictions within documents in these samples."""
        bins = self._order[indices].astype(np.int64)
        first, count = self._starts[bins], self._starts[bins + 1] - self._starts[bins]
        within = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        pieces = self._table[np.repeat(first, count) + within]
        return int((_lengths(pieces, self._indexed.sizes, self._request.capacity) - 1).sum())

    def _pieces(self, index: int) -> Pieces:
        """(sequence, first token, number of tokens) of each piece of sample `index`."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {self.name}, which has {len(self)}")
        lengths = np.empty(0, np.int64)
        with contextlib.suppress(IndexError):  # numbers of a damaged index; there are then no lengths that fit
            chosen = int(self._order[index])
            first, stop = self._starts[chosen : chosen + 2].tolist() if chosen < self.num_bins else (0, 0)
            pieces = self._table[first:stop]
            lengths = _lengths(pieces, self._indexed.sizes, self._request.capacity)
        if not _lengths_fit(lengths, self._request.capacity) or pieces.min() < 0:
            raise DataError(
                f"{self.name}: entry {index} of the cached packing does not lead to a sample of "
                f"{self._request.capacity} tokens: the index is damaged or was made from other data: delete its "
                f"folder, index-cache beside the data or --data-cache-path, to have it built anew"
            )
        return pieces[:, 0], pieces[:, 1].astype(np.int64), lengths
