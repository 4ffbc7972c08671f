"""The groups of a layout as a training has it, for ranks of any number of nodes, to see whether each connects."""
from __future__ import annotations

from collections.abc import Sequence

from megatron.parallel.topology import Layout

KINDS = ("tensor", "data", "model", "embedding", "pipeline", "even neighbours", "odd neighbours", "world")


def trial_layout(sizes: Sequence[int]) -> Layout:
    """Pairs of a node as tensor-parallel ranks, and four stages; fewer where nodes of these sizes do not give them."""
    tensor = 2 if all(size % 2 == 0 for size in sizes) else 1
    rest = sum(sizes) // tensor
    pipeline = next(stages for stages in (4, 2, 1) if stages == 1 or (rest % stages == 0 and rest > stages))
    return Layout(tensor, pipeline, rest // pipeline)


def group_of(layout: Layout, kind: str, place: int) -> Sequence[int]:
    """The group of this kind in which a rank of the layout is; itself alone where it is in none."""
    t, d, p = layout.coordinates(place)
    stages = layout.pipeline_ranks(tensor=t, data=d)
    if kind == "world":
        return range(layout.world_size)
    if kind == "tensor":
        return layout.tensor_ranks(data=d, pipeline=p)
    if kind == "data":
        return layout.data_ranks(tensor=t, pipeline=p)
    if kind == "model":
        return layout.model_ranks(data=d)
    if kind == "pipeline":
        return stages
    if kind == "embedding":
        return tuple(dict.fromkeys((stages[0], stages[-1]))) if p in (0, layout.pipeline - 1) else (place,)
    first = p - (p + (kind == "odd neighbours")) % 2  # of the two stages; of the last one the other is the first
    pair = {stages[first % len(stages)], stages[(first + 1) % len(stages)]}
    return tuple(sorted(pair)) if len(stages) > 2 or kind == "even neighbours" else (place,)
