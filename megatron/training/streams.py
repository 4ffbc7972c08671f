"""The micro-batches of this rank: from a data set where the stage reads it, empty ones where it does not."""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from megatron.config import Config
from megatron.data.batch import MicroBatch
from megatron.data.gpt_dataset import TokenDataset
from megatron.data.sampler import MicroBatchStream
from megatron.parallel.topology import Topology


class Stream(Protocol):
    """Micro-batches in order; see megatron.data.sampler.MicroBatchStream."""

    consumed_samples: int

    def take(self, n: int) -> list[MicroBatch]: ...

    def close(self) -> None: ...


class PlaceholderStream:
    """Micro-batches without content, for stages between the first and the last: only the numbers of their samples."""

    def __init__(self, micro_batch_size: int, data_rank: int, data_size: int, consumed_samples: int = 0) -> None:
        self.consumed_samples = consumed_samples
        self._chunk, self._offset = micro_batch_size * data_size, micro_batch_size * data_rank
        self._empty = torch.empty(0)

    def take(self, n: int) -> list[MicroBatch]:
        """The next n placeholders; their first_sample is that of the real ones."""
        e, start = self._empty, self.consumed_samples + self._offset
        self.consumed_samples += n * self._chunk
        return [MicroBatch(e, e, e, e, None, start + i * self._chunk) for i in range(n)]

    def close(self) -> None:
        return None


def reads_data(config: Config, topology: Topology) -> bool:
    """Whether this rank's stages look into micro-batches: the first for tokens, the last for labels, and every one
    when positions or attention depend on where documents end."""
    ends = topology.pipeline.is_first or topology.pipeline.is_last
    return ends or config.data.reset_position_ids or config.data.reset_attention_mask


def open_stream(
    config: Config, topology: Topology, dataset: TokenDataset, consumed_samples: int, eod: int | None,
    left_out: Iterable[Sequence[int]] = (),
) -> Stream:
    """This rank's micro-batches of `dataset` after the first `consumed_samples`, around the positions that are
    `left_out`. Close it when done."""
    data, size = config.data, config.batch.micro_batch_size
    group = topology.data
    if not reads_data(config, topology):
        return PlaceholderStream(size, group.rank, group.size, consumed_samples)
    return MicroBatchStream(
        dataset, size, group.rank, group.size, consumed_samples, topology.device,
        dataloader_type=data.dataloader_type, num_workers=data.num_workers, eod=eod,
        reset_position_ids=data.reset_position_ids, reset_attention_mask=data.reset_attention_mask,
        eod_mask_loss=data.eod_mask_loss, vocab_size=config.model.vocab_size, left_out=left_out,
    )  # fmt: skip
