"""How many micro-batches of each chunk a pipeline rank holds while its passes run, counted from its order."""
from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron.pipeline.instructions import Op
from megatron.pipeline.orders import AnyOrder, group_sizes, passes_of_rank

Numbers = npt.NDArray[np.int64]


class Moments(NamedTuple):
    """Passes of a step, one row each, among them the one during which most is held.

    forward  1 for a forward pass, 0 for a backward pass (where it is split, its first half)
    chunk    of this rank, from 0
    held     micro-batches of each chunk whose forward pass is over and whose backward pass has not begun, without the
             pass's own  # [moments, chunks]
    waiting  micro-batches whose weight gradients wait, of all chunks
    """

    forward: Numbers
    chunk: Numbers
    held: Numbers
    waiting: Numbers


_GROUPS = 3
"""Groups of micro-batches of one size after which what a rank holds in any order of ORDERS repeats: the warm-up is
shorter than two, and each pass of a group then has the same ones before it as that of the group before."""


@lru_cache(maxsize=1 << 13)
def moments_of_rank(schedule: AnyOrder, pipeline_size: int, chunks: int, micro_batches: int, rank: int) -> Moments:
    """The passes of `rank` in a step of so many micro-batches, without repetitions."""
    if isinstance(schedule, str):
        sizes = group_sizes(pipeline_size, micro_batches)
        larger = sizes.count(sizes[0])
        # That many micro-batches have these groups: together they are less than a group longer than the pipeline each.
        micro_batches = sum(sizes[:larger][:_GROUPS] + sizes[larger:][:_GROUPS])
    op, stage, _ = passes_of_rank(schedule, pipeline_size, chunks, micro_batches, rank).T
    chunk = stage // pipeline_size
    begins = (op == Op.BACKWARD) | (op == Op.BACKWARD_INPUT)
    own = chunk[:, None] == np.arange(chunks)
    forward, backward = own & (op == Op.FORWARD)[:, None], own & begins[:, None]
    held = np.cumsum(forward, axis=0) - forward - np.cumsum(backward, axis=0)
    waiting = np.cumsum(op == Op.BACKWARD_INPUT) - (op == Op.BACKWARD_INPUT) - np.cumsum(op == Op.BACKWARD_WEIGHT)
    rows = np.flatnonzero(op != Op.BACKWARD_WEIGHT)
    if chunks == 1:  # else what a rank holds differs from pass to pass
        seen = (2 * held[rows, 0] + (op[rows] == Op.FORWARD)) * micro_batches + waiting[rows]
        rows = rows[np.unique(seen, return_index=True)[1]]
    return Moments((op[rows] == Op.FORWARD).astype(np.int64), chunk[rows], held[rows], waiting[rows])
