"""Which samples a data-parallel rank reads, and the stream of micro-batches made of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from megatron.data.batch import MicroBatch, make_micro_batch
from megatron.data.gpt_dataset import TokenDataset
from megatron.errors import ConfigError, DataError

DATALOADER_TYPES = ("single", "cyclic")


class Sampler(Protocol):
    """Chooses samples; pure arithmetic on the count of samples that the job has consumed."""

    def indices(self, consumed: int) -> npt.NDArray[np.int64]:
        """This rank's samples of the chunk of micro_batch_size * data_size that starts at `consumed`."""
        ...


@dataclass(frozen=True)
class SequentialSampler:
    """'single': the data set in its own order, once. Rank r takes items r*mbs .. (r+1)*mbs of each chunk of mbs*dp."""

    total: int
    micro_batch_size: int
    data_rank: int
    data_size: int

    def indices(self, consumed: int) -> npt.NDArray[np.int64]:
        """See Sampler. Raises DataError past the end of the data set."""
        end = consumed + self.micro_batch_size * self.data_size
        if end > self.total:
            raise DataError(
                f"the data set has {self.total} samples and sample {end - 1} was asked for: train for fewer samples, "
                f"or start anew with the number that is wanted"
            )
        return np.arange(self.micro_batch_size, dtype=np.int64) + (consumed + self.data_rank * self.micro_batch_size)


@dataclass(frozen=True)
class CyclicSampler:
    """'cyclic': the data set over and over, drawn anew in each epoch by torch.randperm with the epoch as its seed.

    With `sharding` each rank draws from its own contiguous part of the data set; without, the ranks take turns in one
    permutation of all of it. An epoch leaves out the samples that do not fill a chunk.
    """

    total: int
    micro_batch_size: int
    data_rank: int
    data_size: int
    sharding: bool = True

    def __post_init__(self) -> None:
        chunk = self.micro_batch_size * self.data_size
        if self.total < chunk:
            raise DataError(
                f"the data set has {self.total} samples, less than one micro-batch of {self.micro_batch_size} on each "
                f"of {self.data_size} data-parallel ranks: use a smaller micro-batch or more data"
            )

    def indices(self, consumed: int) -> npt.NDArray[np.int64]:
        """See Sampler."""
        chunk = self.micro_batch_size * self.data_size
        per_epoch = self.total // chunk * chunk
        epoch, within = divmod(consumed, per_epoch)
        if self.sharding:
            part = self.total // chunk * self.micro_batch_size
            start = within // self.data_size
            drawn = _permutation(epoch, part)[start : start + self.micro_batch_size]
            return drawn + self.data_rank * part
        whole = self.total // self.micro_batch_size * self.micro_batch_size
        return _permutation(epoch, whole)[within : within + chunk][self.data_rank :: self.data_size]


@lru_cache(maxsize=4)  # training and evaluation, and threads that are on both sides of an epoch's end
def _permutation(epoch: int, size: int) -> npt.NDArray[np.int64]:
    order: npt.NDArray[np.int64] = torch.randperm(size, generator=torch.Generator().manual_seed(epoch)).numpy()
    return order


def build_sampler(
    dataloader_type: str | None,
    total: int,
    micro_batch_size: int,
    data_rank: int,
    data_size: int,
    sharding: bool = True,
) -> Sampler:
    """The sampler of --dataloader-type; None means 'single'. Raises ConfigError for an unknown one."""
    if dataloader_type in (None, "single"):
        return SequentialSampler(total, micro_batch_size, data_rank, data_size)
    if dataloader_type == "cyclic":
        return CyclicSampler(total, micro_batch_size, data_rank, data_size, sharding)
    raise ConfigError(f"--dataloader-type {dataloader_type!r}: choose one of {', '.join(DATALOADER_TYPES)}")


class MicroBatchStream:
    """This rank's micro-batches, from `consumed_samples` on, without end or until the data set's.

    Reading ahead happens in threads: forked processes hang once an OFI network is open. `num_workers=0` reads when
    asked. With workers, as many micro-batches are read ahead as the last `take` gave, at least two per worker. The
    order and content are the same in any case. `take` is for one thread.

    consumed_samples counts the samples that all ranks together have taken. The options of make_micro_batch pass
    through.
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
        data_sharding: bool = True,
        num_workers: int = 0,
        eod: int | None = None,
        reset_position_ids: bool = False,
        reset_attention_mask: bool = False,
        eod_mask_loss: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        self.consumed_samples = consumed_samples
        self._dataset = dataset
        self._device = torch.device(device)
        self._chunk = micro_batch_size * data_size
        self._rank_offset = micro_batch_size * data_rank
        self._sampler = build_sampler(
            dataloader_type, len(dataset), micro_batch_size, data_rank, data_size, data_sharding
        )
        self._make: Callable[..., MicroBatch] = partial(
            make_micro_batch,
            eod=eod,
            reset_position_ids=reset_position_ids,
            reset_attention_mask=reset_attention_mask,
            eod_mask_loss=eod_mask_loss,
            vocab_size=vocab_size,
        )
        self._num_workers = num_workers
        self._threads = ThreadPoolExecutor(num_workers, "megatron-data") if num_workers > 0 else None
        self._ahead: deque[Future[MicroBatch]] = deque()
        self._next_read = consumed_samples  # where the next micro-batch to be read ahead starts

    def take(self, n: int) -> list[MicroBatch]:
        """The next n micro-batches of this rank, on the device; counts n * micro_batch_size * data_size samples.

        Raises DataError past the end of the data set (dataloader type 'single') and for unreadable data.
        """
        batches = []
        for _ in range(n):
            self._read_ahead(until=1)
            batch = self._ahead.popleft().result() if self._threads is not None else self._read(self.consumed_samples)
            batches.append(batch.to(self._device))
            self.consumed_samples += self._chunk
            self._read_ahead(until=max(2 * self._num_workers, n))
        return batches

    def close(self) -> None:
        """Stop reading ahead. A stream that is closed gives no more micro-batches."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def _read_ahead(self, until: int) -> None:
        while self._threads is not None and len(self._ahead) < until:
            self._ahead.append(self._threads.submit(self._read, self._next_read))
            self._next_read += self._chunk

    def _read(self, start: int) -> MicroBatch:
        """The micro-batch of the chunk at `start`, in host memory; pinned when it goes to an accelerator."""
        tokens = np.stack([self._dataset[int(i)] for i in self._sampler.indices(start)])
        batch = self._make(tokens, first_sample=start + self._rank_offset)
        return batch if self._device.type == "cpu" else batch.pin_memory()
