from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.batch import MicroBatch
from megatron.data.gpt_dataset import MockDataset
from megatron.data.sampler import CyclicSampler, MicroBatchStream, SequentialSampler, build_sampler
from megatron.errors import ConfigError, DataError


class Counting:
    """Sample i is [i, i + 1, i + 2]."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int, /) -> np.ndarray:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return np.arange(index, index + 3, dtype=np.int64)


def samples(batches: list[MicroBatch]) -> list[int]:
    return [int(token) for batch in batches for token in batch.tokens[:, 0]]


def test_single_by_hand() -> None:
    assert SequentialSampler(100, 2, 1, 3).indices(12).tolist() == [14, 15]


@given(mbs=st.integers(1, 4), dp=st.integers(1, 4), steps=st.integers(1, 5), start=st.integers(0, 20))
def test_ranks_share_every_chunk(mbs: int, dp: int, steps: int, start: int) -> None:
    streams = [MicroBatchStream(Counting(1000), mbs, rank, dp, start) for rank in range(dp)]
    taken = [stream.take(steps) for stream in streams]
    in_order = [s for k in range(steps) for rank in range(dp) for s in samples(taken[rank][k : k + 1])]
    assert in_order == list(range(start, start + steps * mbs * dp))
    assert {stream.consumed_samples for stream in streams} == {start + steps * mbs * dp}
    for batches in taken:
        assert [batch.first_sample for batch in batches] == samples(batches)[::mbs]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_workers_and_resuming_change_nothing(num_workers: int, kind: str) -> None:
    data = MockDataset("train", 30, 16, 40, seed=5)
    options = {"eod": 39, "reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    plain = MicroBatchStream(data, 2, 1, 2, dataloader_type=kind, **options).take(7)
    stream = MicroBatchStream(data, 2, 1, 2, dataloader_type=kind, num_workers=num_workers, **options)
    taken = stream.take(1) + stream.take(4) + stream.take(0) + stream.take(2)  # as the batch ramps up
    resumed = MicroBatchStream(data, 2, 1, 2, 4 * 4, dataloader_type=kind, num_workers=num_workers, **options).take(3)
    for expected, got in zip(plain + plain[4:], taken + resumed, strict=True):
        assert expected.first_sample == got.first_sample
        for name in ("tokens", "labels", "loss_mask", "position_ids", "document_ids"):
            assert torch.equal(getattr(expected, name), getattr(got, name)), name
    stream.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_end_of_data(num_workers: int) -> None:
    stream = MicroBatchStream(Counting(10), 2, 0, 2, num_workers=num_workers)
    assert samples(stream.take(2)) == [0, 1, 4, 5]  # reading ahead past the end is no error
    with pytest.raises(DataError, match="has 10 samples and sample 11 was asked for"):
        stream.take(1)
    assert stream.consumed_samples == 8


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_data_is_reported_when_it_is_taken(num_workers: int) -> None:
    stream = MicroBatchStream(Counting(10), 1, num_workers=num_workers, vocab_size=5)
    assert samples(stream.take(3)) == [0, 1, 2]
    with pytest.raises(DataError, match=r"sample 3 .*vocabulary has 5"):
        stream.take(1)


@given(total=st.integers(12, 60), mbs=st.integers(1, 3), dp=st.integers(1, 4), sharding=st.booleans())
def test_cyclic_epochs(total: int, mbs: int, dp: int, sharding: bool) -> None:
    chunk = mbs * dp
    per_epoch = total // chunk * chunk
    samplers = [CyclicSampler(total, mbs, rank, dp, sharding) for rank in range(dp)]
    epochs = []
    for epoch in range(2):
        drawn = [s.indices(epoch * per_epoch + k).tolist() for k in range(0, per_epoch, chunk) for s in samplers]
        flat = [i for part in drawn for i in part]
        assert len(set(flat)) == len(flat) == per_epoch and 0 <= min(flat) <= max(flat) < total
        epochs.append(flat)
    if per_epoch > 20:  # 20! orders: the same one twice means that the epoch is not in the seed
        assert epochs[0] != epochs[1]


def test_cyclic_draws_of_torch() -> None:
    order = torch.randperm(8, generator=torch.Generator().manual_seed(1)).tolist()
    # 17 samples, chunks of 4: 16 in an epoch, 8 in each rank's part; second micro-batch of epoch 1
    assert CyclicSampler(17, 2, 1, 2).indices(16 + 4).tolist() == [8 + i for i in order[2:4]]
    order = torch.randperm(16, generator=torch.Generator().manual_seed(1)).tolist()
    assert CyclicSampler(17, 2, 1, 2, sharding=False).indices(16 + 4).tolist() == [order[5], order[7]]


def test_refuses() -> None:
    with pytest.raises(ConfigError, match=r"'external': choose one of single, cyclic"):
        build_sampler("external", 10, 1, 0, 1)
    with pytest.raises(DataError, match="3 samples, less than one micro-batch of 2 on each of 2"):
        build_sampler("cyclic", 3, 2, 0, 2)
    assert isinstance(build_sampler(None, 3, 2, 0, 2), SequentialSampler)
