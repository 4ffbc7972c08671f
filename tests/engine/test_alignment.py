"""Alignment of the parts of buckets that data-parallel ranks own."""

import unittest.mock

import pytest
import torch.distributed as dist

from megatron.engine.engine import Engine
from megatron.planner.dryrun.rank import member
from tests.engine import toy
from tests.helpers.tiny import tiny


def alone(gathered, local, group=None):
    """Replace all_gather_object: every rank is taken to contribute this rank's object."""
    gathered[:] = [local] * len(gathered)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "bf16sums", "fp32", "fp16"])
def test_every_part_begins_on_16_bytes(precision):
    """Every shard begins on 16 bytes, in all formats and for any number of ranks.

    Vector loads (AdamW's among them) and NCCL's wide path need it.
    """
    odd = 0
    for ranks in range(1, 49) if precision == "bf16" else (1, 3, 6, 12, 24, 40):
        with (
            unittest.mock.patch.object(dist, "all_gather_object", alone),
            member(tiny(global_batch_size=ranks, world_size=ranks), ranks - 1, "cpu") as topology,
        ):
            engine = Engine(toy.config(precision), topology, toy.build(topology))
            assert len(engine._update.buckets) > 2
            for bucket, master in zip(engine._update.buckets, engine._update.masters, strict=True):
                used = sum(p.numel() for p in bucket.parameters)
                odd += used % (8 * ranks) != 0
                assert used <= len(bucket.weights) < used + 8 * ranks and bucket.ranks == ranks
                for flat in (bucket.weights, bucket.gradients):
                    assert [shard.data_ptr() % 16 for shard in flat.chunk(ranks)] == [0] * ranks
                    assert not flat[used:].any()
                state = [
                    master,
                    *(x for x in engine._basic.state[master].values() if x.dim()),
                ]
                assert all(
                    t.data_ptr() % 16 == 0 and t.shape == bucket.owned_weights.shape for t in state
                )
    assert odd > 2, "padding is needed"
