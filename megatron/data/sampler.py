"""Which samples a data-parallel rank reads, and the stream of micro-batches made of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import AsyncResult, ThreadPool
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from megatron.data.batch import MicroBatch, make_micro_batch
from megatron.data.gpt_dataset import TokenDataset
from megatron.data.left_out import Range, around, merged
from megatron.data.permutation import permute
from megatron.errors import DataError

Indices = npt.NDArray[np.int64]


class SampleOrder(Protocol):
    """The order in which a job consumes a data set: a function of how many samples it has consumed, and of nothing
    else, so that every layout, micro-batch size and number of workers goes through the same samples."""

    def check(self, stop: int) -> None:
        """Raise DataError when the order ends before position `stop`."""
        ...

    def indices(self, positions: Indices) -> Indices:
        """The samples at these positions of the order; position n is consumed after n others."""
        ...


@dataclass(frozen=True)
class SequentialOrder:
    """'single': the data set in its own order, once."""

    total: int

    def check(self, stop: int) -> None:
        if stop > self.total:
            raise DataError(
                f"the data set has {self.total} samples and sample {stop - 1} was asked for: train for fewer samples, "
                f"or start anew with the number that is wanted"
            )

    def indices(self, positions: Indices) -> Indices:
        return positions


@dataclass(frozen=True)
class CyclicOrder:
    """'cyclic': the data set over and over. Each epoch has every sample once, drawn anew with the epoch as its key."""

    total: int

    def check(self, stop: int) -> None:
        if not self.total:
            raise DataError("the data set has no samples: give more data, or a shorter --seq-length")

    def indices(self, positions: Indices) -> Indices:
        found = np.empty_like(positions)
        epochs = positions // self.total
        for epoch in np.unique(epochs).tolist():
            inside = epochs == epoch
            found[inside] = permute(positions[inside] - epoch * self.total, self.total, epoch)
        return found


@dataclass(frozen=True)
class OrderAround:
    """An order that goes around some of its positions; still a function of how many samples were consumed.

    left_out  ranges of positions of `order`, ascending and apart (megatron.data.left_out.merged)
    total     samples of an order that ends. The run needs as many as before, so those that were left out are replaced,
              at the end, by the first ones of the order. None for an order without end.
    """

    order: SampleOrder
    left_out: tuple[Range, ...]
    total: int | None = None

    def check(self, stop: int) -> None:
        if self.total is not None and stop and self.left_out[0][0] == 0 and self.left_out[0][1] >= self.total:
            raise DataError(f"all {self.total} samples of the data set are left out: begin anew, with other data")
        self.order.check(stop)

    def original(self, positions: Indices) -> Indices:
        """The positions of `order` at these positions; one from `total` on is a replacement."""
        return around(positions, self.left_out)

    def indices(self, positions: Indices) -> Indices:
        found = self.original(positions)
        while self.total is not None and (beyond := found >= self.total).any():
            found[beyond] = self.original(found[beyond] - self.total)
        return self.order.indices(found)


def sample_order(
    dataloader_type: str | None, total: int, left_out: Iterable[Sequence[int]] = ()
) -> SampleOrder:
    """The order of --dataloader-type, None meaning single, for `total` samples, around what is `left_out`."""
    ranges, cyclic = merged(left_out), dataloader_type == "cyclic"
    order: SampleOrder = CyclicOrder(total) if cyclic else SequentialOrder(total)
    return OrderAround(order, ranges, None if cyclic else total) if ranges else order


class MicroBatchStream:
    """This rank's micro-batches, from `consumed_samples` on, without end or until the data set's.

    Each chunk of micro_batch_size * data_size positions of the order is one micro-batch for every rank: rank r takes
    positions r*mbs .. (r+1)*mbs of it.

    Reading ahead happens in threads: forked processes hang once an OFI network is open. `num_workers=0` reads when
    asked. With workers, as many micro-batches are read ahead as the last `take` gave, at least two per worker. With
    `prefetch` the file system is told of the samples beyond those. The order and content are the same in any case.
    `take` is for one thread.

    consumed_samples counts the samples that all ranks together have taken; what is `left_out`, ranges of positions, is
    not taken and not counted. The options of make_micro_batch pass
    through; those about documents hold where the data set does not keep pieces apart itself.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        micro_batch_size: int,
        data_rank: int = 0,
        data_size: int = 1,
        consumed_samples: int = 0,
        device: Any = "cpu",
        *,
        dataloader_type: str | None = "single",
        num_workers: int = 0,
        prefetch: bool = False,
        eod: int | None = None,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        eod_mask_loss: bool = False,
        vocab_size: int | None = None,
        left_out: Iterable[Sequence[int]] = (),
    ) -> None:
        self.consumed_samples = consumed_samples
        self._dataset = dataset
        self._order = sample_order(dataloader_type, len(dataset), left_out)
        self._device = torch.device(device)
        self._chunk = micro_batch_size * data_size
        self._own = np.arange(micro_batch_size, dtype=np.int64) + micro_batch_size * data_rank
        self._vocab_size = vocab_size
        self._make: Callable[..., MicroBatch] = partial(
            make_micro_batch,
            eod=eod,
            reset_position_ids=reset_position_ids,
            reset_attention_mask=reset_attention_mask,
            eod_mask_loss=eod_mask_loss,
        )
        self._num_workers, self._prefetch = num_workers, prefetch
        # Its threads end with the process even in the middle of a read that a dead file system never answers; those of
        # concurrent.futures would keep the process from ending.
        self._threads = ThreadPool(num_workers) if num_workers > 0 else None
        self._ahead: deque[AsyncResult[MicroBatch]] = deque()
        self._next_read = consumed_samples  # where the next micro-batch to be read ahead starts

    def take(self, n: int) -> list[MicroBatch]:
        """The next n micro-batches of this rank, on the device; counts n * micro_batch_size * data_size samples.

        Raises DataError past the end of the data set (dataloader type 'single') and for unreadable data.
        """
        batches = []
        for _ in range(n):
            self._read_ahead(until=1)
            batch = self._ahead.popleft().get() if self._threads is not None else self._read(self.consumed_samples)
            batches.append(batch.to(self._device))
            self.consumed_samples += self._chunk
            self._read_ahead(until=max(2 * self._num_workers, n))
        return batches

    def close(self) -> None:
        """Stop reading ahead, without waiting for a read. A stream that is closed gives no more micro-batches."""
        self._ahead.clear()
        if self._threads is not None:
            self._threads.terminate()

    def _read_ahead(self, until: int) -> None:
        while self._threads is not None and len(self._ahead) < until:
            self._ahead.append(self._threads.apply_async(self._read, (self._next_read,)))
            self._next_read += self._chunk

    def _read(self, start: int) -> MicroBatch:
        """The micro-batch of the chunk at `start`, in host memory; pinned when it goes to an accelerator."""
        self._order.check(start + self._chunk)
        positions = self._own + start
        if self._prefetch:
            self._announce(start + max(2 * self._num_workers, 1) * self._chunk)
        samples = [self._sample(*pair) for pair in zip(positions.tolist(), self._indices(positions), strict=True)]
        segments = [pieces for _, pieces in samples if pieces is not None]
        assert len(segments) in (0, len(samples)), "a data set keeps the pieces of all samples apart, or of none"
        batch = self._make(
            np.stack([tokens for tokens, _ in samples]), segments=segments or None, first_sample=int(positions[0])
        )
        return batch if self._device.type == "cpu" else batch.pin_memory()

    def _sample(self, position: int, index: int) -> tuple[Indices, Indices | None]:
        """Tokens and pieces of a sample. Raises DataError that names the sample, what is wrong with it, and where."""
        try:
            tokens, segments = self._dataset[index], self._dataset.segments(index)
        except (DataError, IndexError, OSError) as error:
            raise DataError(f"sample {position}{self._place(index)}: {error}") from error
        limit = self._vocab_size
        if limit is not None and (tokens.min() < 0 or tokens.max() >= limit):
            bad = int(np.argmax((tokens < 0) | (tokens >= limit)))
            raise DataError(
                f"sample {position}: token id {tokens[bad]}, but the vocabulary has {limit}: the data was written with "
                f"another tokenizer ({self._dataset.where(index, bad)})"
            )
        return tokens, segments

    def _place(self, index: int) -> str:
        try:
            return f", which starts at {self._dataset.where(index)}"
        except (DataError, IndexError):  # what is wrong with the sample is wrong with its place, too
            return ""

    def _announce(self, start: int) -> None:
        """Tell the file system of a micro-batch after those that are being read ahead."""
        with suppress(DataError):  # whoever reads it will say what is wrong with it
            self._order.check(start + self._chunk)
            for index in self._indices(self._own + start):
                self._dataset.prefetch(index)

    def _indices(self, positions: Indices) -> list[int]:
        found: list[int] = self._order.indices(positions).tolist()
        return found
