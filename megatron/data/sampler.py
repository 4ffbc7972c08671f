"""Streams of micro-batches.

A data-parallel rank reads its micro-batches in the order of the samples.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron.data.arrays import BoolArray, Int64Array
from megatron.data.gpt_dataset import TokenDataset
from megatron.data.order import SampleOrder
from megatron.data.stream import StreamDataset
from megatron.errors import DataError, reading_error
from megatron.parallel.hashing import GOLDEN, scramble

if TYPE_CHECKING:
    from megatron.config.io import DataConfig
    from megatron.data.fill_in_the_middle import FillInTheMiddle
    from megatron.data.tokenizer_adapters import Tokenizer

_READ_ENDS_S = 1.0
"""Longest time to wait for the threads of a closed stream."""
_NOTHING = torch.empty(0)


@dataclass(frozen=True)
class Separation:
    """Separation of the documents of a sample, each of which ends with `eod`.

    Packed samples use only eod_mask_loss, since their documents are separated anyway.

    eod_mask_loss         exclude positions whose input is eod from the loss: their label begins
                          another document
    reset_position_ids    positions start at 0 after eod
    reset_attention_mask  attention treats the tokens after eod as another document
    goldfish              k and h of `forgotten`, whose tokens are not in the loss; None: all are
    """

    eod: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False
    goldfish: tuple[int, int] | None = None

    @classmethod
    def of(
        cls, data: DataConfig, tokenizer: Tokenizer | None, training: bool = False
    ) -> Separation:
        """Return the separation that the flags request, with the tokenizer's end-of-document id."""
        eod = None if tokenizer is None else tokenizer.eod
        goldfish = (data.goldfish_k, data.goldfish_h) if training and data.goldfish_loss else None
        resets = data.reset_position_ids, data.reset_attention_mask
        return cls(eod, *resets, data.eod_mask_loss, goldfish)


@dataclass(frozen=True)
class Share:
    """Positions r*mbs .. (r+1)*mbs - 1 of each block of mbs * `size`: a micro-batch of rank r."""

    micro_batch_size: int
    rank: int = 0
    size: int = 1


class MicroBatchStream:
    """Micro-batches of this rank from `consumed_samples` on, to the end of the order if it has one.

    Threads read ahead, not processes: forked processes hang once an OFI network is open.
    `num_workers=0` reads on demand. With workers, as many micro-batches are read ahead as the last
    `take` returned, at least two per worker. This changes neither order nor content. Call `take`
    from one thread only.

    dataset           None on ranks that read no data: their micro-batches have no content except
                      the number of the first sample
    share             which of the samples this rank reads
    order             by default each sample once, in the original order
    consumed_samples  counts the samples that all ranks together have taken, without those that the
                      order leaves out
    separation        its resets have no effect if the data set separates pieces itself
    device            where `take` puts the micro-batches
    vocab_size        number of valid ids; `take` raises DataError for others. None: no check
    rearrange         what is done with the documents of each sample
    length_at         length to which the samples after n consumed ones are cut; None: not cut
    """

    def __init__(
        self,
        dataset: TokenDataset | None,
        share: Share,
        consumed_samples: int = 0,
        *,
        order: SampleOrder | None = None,
        separation: Separation = Separation(),
        device: torch.device | str = "cpu",
        num_workers: int = 0,
        vocab_size: int | None = None,
        rearrange: FillInTheMiddle | None = None,
        length_at: Callable[[int], int] | None = None,
    ) -> None:
        self.consumed_samples = consumed_samples
        self._dataset = dataset
        self._share = share
        self._chunk = share.micro_batch_size * share.size
        self._order = order or SampleOrder(0 if dataset is None else len(dataset))
        self._separation = separation
        self._device = torch.device(device)
        self._vocab_size = vocab_size
        self._rearrange = rearrange
        self._length_at = length_at
        self._num_workers = num_workers if dataset is not None else 0
        # These threads end with the process, even during a read that a dead file system never
        # answers; threads of concurrent.futures would block its exit.
        self._threads = ThreadPool(self._num_workers) if self._num_workers else None
        self._ahead: deque[AsyncResult[MicroBatch]] = deque()
        self._next_read = consumed_samples  # start of the next micro-batch to read ahead

    def take(self, n: int) -> list[MicroBatch]:
        """Return the next n micro-batches of this rank, on the device.

        All ranks together take n * share.micro_batch_size * share.size samples. Raises DataError
        past the end of the data set (--dataloader-type single), for data that cannot be read, and
        for ids outside of the vocabulary; NodeError if the reason is the node.
        """
        batches = []
        for _ in range(n):
            self._read_ahead(until=1)
            batch = (
                self._ahead.popleft().get() if self._ahead else self._read(self.consumed_samples)
            )
            batches.append(batch.to(self._device))
            self.consumed_samples += self._chunk
            self._read_ahead(until=max(2 * self._num_workers, n))
        return batches

    def skip(self, samples: int) -> None:
        """Move on by `samples` samples, those of all ranks together, without reading them."""
        self.consumed_samples += samples
        self._ahead.clear()
        self._next_read = self.consumed_samples

    def close(self) -> None:
        """Stop reading ahead, and wait a moment for reads in progress.

        Do not call `take` afterwards. A thread that returns from C++ while the interpreter ends
        would abort the process; a thread whose file system is dead never returns.
        """
        self._ahead.clear()
        if self._threads is not None:
            self._threads.terminate()
            end = time.monotonic() + _READ_ENDS_S  # for all threads together
            for thread in vars(self._threads)["_pool"]:
                thread.join(max(end - time.monotonic(), 0.0))

    def _read_ahead(self, until: int) -> None:
        while self._threads is not None and len(self._ahead) < until:
            self._ahead.append(self._threads.apply_async(self._read, (self._next_read,)))
            self._next_read += self._chunk

    def _read(self, start: int) -> MicroBatch:
        """Return this rank's micro-batch of the block of samples that begins at `start`.

        It is in host memory, which is pinned if the micro-batch is for an accelerator.
        """
        first = start + self._share.rank * self._share.micro_batch_size
        length = None if self._length_at is None else self._length_at(start)
        if self._dataset is None:
            nothing = _NOTHING if length is None else torch.empty(0, length)
            return MicroBatch(nothing, _NOTHING, _NOTHING, _NOTHING, None, first)
        self._order.check(start + self._chunk)
        positions = range(first, first + self._share.micro_batch_size)
        indices = self._order.indices(np.array(positions)).tolist()
        samples = map(partial(self._sample, self._dataset), positions, indices)
        tokens, segments, marks = zip(*samples, strict=True)
        packed = {lengths is not None for lengths in segments}
        assert len(packed) == 1, "a data set separates the pieces of all samples or of none"
        shown = None if length is None else length + 1
        batch = make_micro_batch(
            np.stack(tokens)[:, :shown],
            segments=segments if True in packed else None,
            loss_tokens=[None if one is None else one[:shown] for one in marks],
            separation=self._separation,
            first_sample=first,
        )
        return batch if self._device.type == "cpu" else batch.pin_memory()

    def _sample(
        self, dataset: TokenDataset, position: int, index: int
    ) -> tuple[Int64Array, Int64Array | None, Int64Array | None]:
        """Return the tokens and pieces of a sample, and which tokens count in the loss.

        Raises DataError or NodeError with the sample, the fault and its location.
        """
        try:
            tokens = dataset[index]
            segments = dataset.segments(index)
            marked = dataset.loss_tokens(index)
        except (DataError, IndexError, OSError) as error:
            location = ""
            with suppress(DataError, IndexError):  # the location may be damaged as well
                location = f", which starts at {dataset.where(index)}"
            message = f"sample {position}{location}: {error}"
            raise reading_error(error, message, DataError) from error
        limit = self._vocab_size
        if limit is not None and (tokens.min() < 0 or tokens.max() >= limit):
            bad = int(np.argmax((tokens < 0) | (tokens >= limit)))
            raise DataError(
                f"sample {position}: token id {tokens[bad]}, but the vocabulary has {limit} "
                "entries: the data were written with another tokenizer "
                f"({dataset.where(index, bad)})"
            )
        if self._rearrange is None:
            return tokens, segments, marked
        # A stream has no loss mask beside --fim-rate: it marks what does not follow its input.
        stream = isinstance(dataset, StreamDataset)
        if segments is not None or (marked is not None and not stream):
            raise DataError(
                f"sample {position} has separate pieces or a loss mask, so that its documents cannot "
                "be rearranged: leave out --fim-rate"
            )
        joined = np.zeros(0, np.int64) if marked is None else np.flatnonzero(marked == 0)
        rearranged, counted = self._rearrange(position, tokens, joined)
        return rearranged, None, counted


# --- batch


@dataclass(frozen=True)
class MicroBatch:
    """`b` samples of `s` tokens.

    Tensors are on one device; `document_lengths` stays in host memory.

    tokens, labels: int64 [b, s]; label j is the token after token j.
    loss_mask: float32 [b, s]; 0 for positions that are not part of the loss.
    position_ids: int64 [b, s].
    cu_seqlens: int32 [documents + 1], or None. Bounds of documents in the b * s positions, sample
        after sample; the first is 0, the last b * s, and every sample starts a document. Positions
        of different documents do not attend to each other. None: each sample is one document.
    first_sample: number of the first sample in the order in which the whole job consumes them; it
        keys dropout. Recorded passes (pipeline/captured.py) get it as int64 [1].
    document_lengths: int64 [documents], the differences of cu_seqlens; None together with it.
        Attention needs them on the host, and reading them from a device would synchronise with it.
    padding: bool [b, s], positions that only pad a sample and count nowhere; None: there are none.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor | None
    first_sample: int
    document_lengths: Int64Array | None = None
    padding: torch.Tensor | None = None

    def __post_init__(self) -> None:
        both = (self.cu_seqlens is None) == (self.document_lengths is None)
        assert both, "cu_seqlens and document_lengths are given together"

    def without_last(self, samples: int, shape: tuple[int, int]) -> MicroBatch:
        """Return a copy whose last `samples` samples are padding.

        shape  (b, s), needed for a micro-batch without content: its stage may have routers, for
               which the padding counts
        """
        padding = torch.zeros(shape, dtype=torch.bool, device=self.loss_mask.device)
        if self.padding is not None:
            padding |= self.padding
        padding[-samples:] = True
        loss_mask = self.loss_mask.clone()
        loss_mask[-samples:] = 0.0
        return dataclasses.replace(self, loss_mask=loss_mask, padding=padding)

    def to(self, device: torch.device | str) -> MicroBatch:
        """Return a copy on `device`; from pinned memory the copy is asynchronous."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> MicroBatch:
        """Return a copy in page-locked memory."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> MicroBatch:
        tensors: dict[str, Any] = {
            name: function(value)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return dataclasses.replace(self, **tensors)


def make_micro_batch(
    tokens: Int64Array,
    *,
    segments: Sequence[Int64Array] | None = None,
    lengths: Sequence[int] | None = None,
    loss_tokens: Sequence[Int64Array | None] | None = None,
    separation: Separation = Separation(),
    first_sample: int = 0,
) -> MicroBatch:
    """Make a micro-batch from samples of s + 1 tokens, int64 [b, s + 1].

    segments: for packed samples, the lengths of each sample's pieces, from its first token on; the
    rest is padding. The pieces are the documents: positions start at 0 in each, attention stays
    within a piece, and a position whose label is in another piece or in the padding is excluded
    from the loss. The two resets of `separation` have no effect.

    lengths: for samples padded at the end, the number of positions of each that are not padding,
    with their labels; the rest is excluded from the loss.

    loss_tokens: for each sample, which of its s + 1 tokens count in the loss as labels, 0 or 1;
    None: all of them.

    Raises DataError for pieces that do not fit their sample, and if an option of `separation` needs
    eod and it is unknown.
    """
    apart = segments is not None
    resets = not apart and (separation.reset_position_ids or separation.reset_attention_mask)
    if separation.eod is None and (separation.eod_mask_loss or resets):
        raise DataError(
            "--reset-position-ids, --reset-attention-mask and --eod-mask-loss need the "
            "end-of-document id: give a tokenizer with --tokenizer-type"
        )
    inputs = tokens[:, :-1].copy()  # [b, s]
    labels = tokens[:, 1:].copy()
    ends = inputs == (-1 if separation.eod is None else separation.eod)
    in_loss = ~ends if separation.eod_mask_loss else np.ones(inputs.shape, bool)
    opens = np.ones(tokens.shape, bool)  # the first token of each document, labels included
    padding = np.zeros(inputs.shape, bool)
    if segments is None:
        opens[:, 1:] = ends
    else:
        opens[:, 1:], real = _piece_starts(segments, tokens.shape, first_sample)
        in_loss &= ~opens[:, 1:] & real[:, 1:]
        padding = ~real[:, :-1]
    if lengths is not None:
        padding |= np.arange(inputs.shape[1]) >= np.asarray(lengths)[:, None]
        in_loss &= ~padding
    for row, marked in enumerate(loss_tokens or ()):
        if marked is not None:
            in_loss[row] &= marked[1:] != 0
    if separation.goldfish is not None:
        in_loss &= ~forgotten(inputs, *separation.goldfish)
    starts = np.flatnonzero(opens[:, :-1])
    of_documents = np.diff(starts, append=inputs.size)
    positions = np.arange(inputs.size)
    if separation.reset_position_ids or apart:
        positions -= np.repeat(starts, of_documents)
    else:
        positions %= inputs.shape[1]
    apart = apart or separation.reset_attention_mask
    return MicroBatch(
        tokens=torch.from_numpy(inputs),
        labels=torch.from_numpy(labels),
        loss_mask=torch.from_numpy(in_loss.astype(np.float32)),
        position_ids=torch.from_numpy(positions.reshape(inputs.shape)),
        cu_seqlens=torch.from_numpy(np.append(starts, inputs.size).astype(np.int32))
        if apart
        else None,
        first_sample=first_sample,
        document_lengths=of_documents if apart else None,
        padding=torch.from_numpy(padding) if padding.any() else None,
    )


def forgotten(tokens: Int64Array, k: int, h: int) -> BoolArray:
    """Return which labels the goldfish loss leaves out, those after each of the tokens [b, s].

    The label after position j is left out if a hash of tokens j - h + 1 to j is among the lowest
    1/k of its values (Hans et al., arXiv 2406.10209, section 3.1): the same passage always loses
    the same tokens. The first h - 1 labels stay. The hash is a polynomial modulo 2^64, scrambled.
    """
    out = np.zeros(tokens.shape, bool)
    if (last := tokens.shape[1] - h) < 0:
        return out
    numbers = scramble(tokens.astype(np.uint64))
    total = np.zeros((len(tokens), last + 1), np.uint64)
    for first in range(h):
        total = total * np.uint64(GOLDEN) + numbers[:, first : first + last + 1]
    out[:, h - 1 :] = scramble(total) < np.uint64(2**64 // k)
    return out


def _piece_starts(
    segments: Sequence[Int64Array], shape: tuple[int, ...], first_sample: int
) -> tuple[BoolArray, BoolArray]:
    """Return which of tokens 1..s start a piece or the padding, and which tokens are not padding.

    They are bool [b, s] and bool [b, s + 1]; `shape` is [b, s + 1]. Raises DataError for pieces
    that do not fit their sample.
    """
    samples, size = shape
    assert len(segments) == samples, f"{len(segments)} lists of pieces for {samples} samples"
    opens = np.zeros((samples, size + 1), bool)  # one more, for the end of a full sample
    filled = np.zeros((samples, 1), np.int64)
    for row, lengths in enumerate(segments):
        ends = np.cumsum(lengths, dtype=np.int64)
        if len(ends) and (np.min(lengths) < 1 or ends[-1] > size):
            raise DataError(
                f"sample {first_sample + row}: its pieces of {np.asarray(lengths).tolist()[:8]} "
                f"tokens do not fit a packed sample of {size}: the index of the packing is "
                "damaged; remove its files to have it built again"
            )
        opens[row, ends] = True
        filled[row] = ends[-1] if len(ends) else 0
    return opens[:, 1:-1], np.arange(size) < filled
