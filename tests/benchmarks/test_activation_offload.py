"""Costs of offloading activations, against closed forms."""

import dataclasses

import pytest

from benchmarks.activation_offload import (
    OffloadSearch,
    added_seconds,
    copy_bytes_per_s,
    kept_bytes,
    share_to_move,
)
from megatron.planner.cluster import GIB, Host, load_cluster
from megatron.planner.layout import CandidateLayout
from tests.planner.layouts import layout_search

FRONTIER = load_cluster("frontier")
ONE = CandidateLayout(8, 32, micro=2)
LAYER = 32 * 2 * 2048 * 4096
"""Bytes that a layer keeps for 2 samples of 2,048 tokens at width 4,096: 16 elements for each."""


def offloading(gib, speed=1.0, **facts):
    cluster = dataclasses.replace(FRONTIER, **facts)
    searched = layout_search(cluster, gib, batches=(32,))
    return OffloadSearch(searched.space, searched.capacity, speed=speed)


def test_a_device_copies_at_its_link_or_its_part_of_the_host():
    assert copy_bytes_per_s(Host(512.0, 205.0, 36.0), 8) == 205e9 / 8
    assert copy_bytes_per_s(Host(512.0, 205.0, 36.0), 4) == 36e9


@pytest.mark.parametrize(
    ("pass_s", "copy_s", "speed", "added"),
    [
        (2.0, 1.0, 1.0, 0.0),  # hidden
        (2.0, 1.0, 0.75, 0.25),  # in 1 s, 0.75 s of work is done: 1.25 s are left
        (2.0, 5.0, 0.5, 3.0),  # the copy takes longer than 2 / 0.5 s
        (2.0, 3.0, 0.5, 1.5),  # in 3 s, 1.5 s of work is done: 0.5 s are left
    ],
)
def test_a_pass_beside_a_copy(pass_s, copy_s, speed, added):
    assert added_seconds(pass_s, copy_s, speed) == pytest.approx(added)


def test_a_share_frees_what_it_moves_except_for_the_buffers():
    assert share_to_move(0.0, 10.0, 2.0) == 0.0
    share = share_to_move(4.0, 10.0, 2.0)
    assert 10.0 - share * 10.0 + share * 2.0 == pytest.approx(10.0 - 4.0)
    assert share_to_move(8.0, 10.0, 2.0) == 1.0
    assert share_to_move(8.1, 10.0, 2.0) is None


@pytest.mark.slow
def test_a_step_whose_passes_wait_for_their_copies():
    """Passes take as long as their copies: bytes that are moved, at 0.1 GB/s each way."""
    search = offloading(1e3)
    config = search.space.config(ONE)
    (kept,) = kept_bytes(config, 0, "cuda")
    assert kept == pytest.approx(4 * LAYER, rel=0.05)  # and the embedding's output
    (memory,) = search.offload(ONE).predicted.memory
    excess = 0.5 * GIB
    search = offloading((memory.total - excess) / GIB, host_link_gb_per_s=0.1)
    offload = search.offload(ONE)
    (rank,) = offload.ranks
    assert rank.share == pytest.approx(excess / (memory.activations - 2 * kept / 4))
    assert rank.copied == (pytest.approx(rank.share * kept),)
    (of,) = offload.predicted.stage_seconds
    micro_batches = 32 // (8 * 2)
    longer = 2 * rank.share * kept / 0.1e9 - of.forward_s - of.backward_s
    assert longer > 0.0
    assert offload.seconds == pytest.approx(offload.predicted.seconds + micro_batches * longer)


@pytest.mark.slow
def test_the_host_must_hold_what_is_moved():
    (memory,) = offloading(1e3).offload(ONE).predicted.memory
    gib = memory.total / GIB - 0.5
    moved = offloading(gib).offload(ONE).ranks[0].on_host
    held = 8 * moved / GIB * FRONTIER.memory_gib / gib  # a host keeps the share of a device free
    assert offloading(gib, host_memory_gib=1.01 * held).offload(ONE) is not None
    assert offloading(gib, host_memory_gib=0.99 * held).offload(ONE) is None
