"""How many micro-batches of each chunk a pipeline rank holds while its passes run.

From the orders of computation themselves (megatron.pipeline.orders): what a rank holds depends on its own order alone.
"""
from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.config.pieces import Order
from megatron.pipeline import orders
from megatron.pipeline.instructions import Op

Numbers = npt.NDArray[np.int64]


class Moments(NamedTuple):
    """Passes of a step, one row each, among them the one during which most is held.

    forward  1 for a forward pass, 0 for a backward pass (with zb-h1 its first half)
    chunk    of this rank, from 0
    held     micro-batches of each chunk whose forward pass is over and whose backward pass has not begun, without the
             pass's own  # [moments, chunks]
    waiting  micro-batches whose weight gradients wait (zb-h1, one chunk)
    """

    forward: Numbers
    chunk: Numbers
    held: Numbers
    waiting: Numbers


_GROUPS = 3
"""Groups of micro-batches of one size after which what interleaved 1F1B holds repeats: the warm-up is shorter than two,
and each pass of a group then has the same ones before it as that of the group before."""


def moments_of_rank(schedule: str | Order, pipeline_size: int, chunks: int, micro_batches: int, rank: int) -> Moments:
    """The passes of `rank` in a step of so many micro-batches, without repetitions."""
    p, v, m = pipeline_size, chunks, micro_batches
    if p == 1:
        return _one_rank(v)
    if callable(schedule):
        return _of_list(schedule, p, v, m, rank)
    if v > 1:
        sizes = orders.group_sizes(p, m)
        larger = sizes.count(sizes[0])
        return _interleaved(rank, p, v, (*sizes[: min(larger, _GROUPS)], *sizes[larger:][:_GROUPS]))
    if schedule == "zb-h1":
        return _zero_bubble(rank, p, min(m, 3 * p))
    held = min(m, p - rank) - 1
    return Moments(np.array([1, 0]), np.zeros(2, np.int64), np.full((2, 1), held), np.zeros(2, np.int64))


@lru_cache(maxsize=1 << 6)
def _of_list(order: Order, p: int, v: int, m: int, rank: int) -> Moments:
    """Counted in what an order of one's own gives."""
    held, waiting, rows = [0] * v, 0, []
    for op, stage, _ in order(p, v, m, rank):
        chunk = stage // p
        if op is Op.BACKWARD_WEIGHT:
            waiting -= 1
            continue
        held[chunk] -= op is not Op.FORWARD
        rows.append((int(op is Op.FORWARD), chunk, waiting, *held))
        held[chunk] += op is Op.FORWARD
        waiting += op is Op.BACKWARD_INPUT
    forward, chunks, waits, *counts = np.unique(np.array(rows, np.int64), axis=0).T
    return Moments(forward, chunks, np.stack(counts, axis=1), waits)


@lru_cache(maxsize=1 << 6)
def _one_rank(v: int) -> Moments:
    chunk = np.tile(np.arange(v), 2)
    return Moments(np.repeat([1, 0], v), chunk, (np.arange(v) < chunk[:, None]).astype(np.int64), 0 * chunk)


@lru_cache(maxsize=1 << 13)
def _zero_bubble(rank: int, p: int, m: int) -> Moments:
    """1F1B in which the weight gradients of `rank` micro-batches wait, as soon as there are so many."""
    warm_up = min(m, p - rank - 1)
    i = np.arange(m)
    steady = i[: m - warm_up]
    held = np.concatenate([i[:warm_up], np.full(len(steady), warm_up), np.minimum(warm_up, m - i - 1)])
    waiting = np.concatenate([np.zeros(warm_up, np.int64), np.minimum(steady, rank), np.minimum(i, rank)])
    forward = np.repeat([1, 0], [m, m])
    return Moments(forward, 0 * forward, held[:, None], waiting)


@lru_cache(maxsize=1 << 13)
def _interleaved(rank: int, p: int, v: int, sizes: tuple[int, ...]) -> Moments:
    """Counted over all groups of `sizes` micro-batches at once: passes of each chunk that are over."""
    forward = np.repeat(np.tile(np.arange(v), len(sizes)), np.repeat(sizes, v))
    backward = v - 1 - forward
    total, warm_up = len(forward), min(v * sum(sizes), 2 * (p - rank - 1) + (v - 1) * sizes[0])
    each, none = np.arange(v), np.zeros((1, v), np.int64)
    made = np.concatenate([none, np.cumsum(forward[:, None] == each, axis=0)])  # [passes before, chunk]
    freed = np.concatenate([none, np.cumsum(backward[:, None] == each, axis=0)])
    # Forward pass f comes behind f others and the backward passes before it, of which there are none in the warm-up.
    places = np.arange(total)
    before_forward = made[:-1] - freed[np.maximum(places - warm_up, 0)]
    before_backward = made[np.minimum(places + warm_up + 1, total)] - freed[:-1] - (backward[:, None] == each)
    chunk = np.concatenate([forward, backward])
    return Moments(
        np.repeat([1, 0], total), chunk, np.concatenate([before_forward, before_backward]), np.zeros_like(chunk)
    )
