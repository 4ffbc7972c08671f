"""The parts of parameters that this rank's optimizer holds.

ZeRO lays the parameters of a group end to end and gives each data-parallel rank one stretch of the
line. A stretch of a row-major tensor is a few boxes of its index space; a box has a place in the
global tensor, whatever the layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron.parallel.sharding import Sharding, sharding_of
from megatron.parallel.topology import Topology

Index = tuple[int, ...]


def boxes(start: int, stop: int, shape: Sequence[int]) -> list[tuple[Index, Index]]:
    """Elements [start, stop) of a row-major array as boxes (offsets, sizes), in order; at most 2 *
    dimensions - 1.

    >>> boxes(2, 9, (3, 4))
    [((0, 2), (1, 2)), ((1, 0), (1, 4)), ((2, 0), (1, 1))]
    """
    if start >= stop:
        return []
    if len(shape) == 1:
        return [((start,), (stop - start,))]
    inner = tuple(shape[1:])
    row = math.prod(inner)
    (first, low), (last, high) = divmod(start, row), divmod(stop, row)

    def part(index: int, a: int, b: int) -> list[tuple[Index, Index]]:
        return [((index, *o), (1, *n)) for o, n in boxes(a, b, inner)]

    if first == last:
        return part(first, low, high)
    out: list[tuple[Index, Index]] = []
    if low:
        out += part(first, low, row)
        first += 1
    if last > first:
        out.append(((first, *(0 for _ in inner)), (last - first, *inner)))
    return out + part(last, 0, high)


def real_boxes(
    flat: torch.Tensor, start: int, local_shape: Sequence[int], sharding: Sharding
) -> Iterator[tuple[Index, torch.Tensor]]:
    """(global offset, view) of the real elements of `flat`: elements [start, start + len) of a
    local tensor.

    Padding, outside `sharding.extent`, is left out. Views share memory with `flat`.
    """
    at = 0
    for offset, sizes in boxes(start, start + flat.numel(), local_shape):
        count = math.prod(sizes)
        view = flat.narrow(0, at, count).view(sizes)
        at += count
        for dim, extent in enumerate(sharding.extent):
            length = min(sizes[dim], extent - offset[dim])
            if length <= 0:
                break
            view = view.narrow(dim, 0, length)
        else:
            yield tuple(o + s for o, s in zip(offset, sharding.offset, strict=True)), view


@dataclass(frozen=True)
class Fragment:
    """The stretch [start, start + numel) of one local parameter whose optimizer state this rank
    holds.

    master   fp32 weights, a flat view into the optimizer's partition  # [numel]
    moments  the optimizer's state by name, flat views like `master`
    """

    parameter: torch.nn.Parameter
    sharding: Sharding
    start: int
    numel: int
    master: torch.Tensor
    moments: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def real(self, flat: torch.Tensor) -> Iterator[tuple[Index, torch.Tensor]]:
        """(global offset, view) of the real elements of a flat tensor [numel] that is laid out like
        this fragment.
        """
        return real_boxes(flat, self.start, self.parameter.shape, self.sharding)


def is_copy(parameter: torch.nn.Parameter, topology: Topology) -> bool:
    """Return whether another rank of the model group holds the same values and counts them.

    True for the last stage's tied embedding, and on tensor ranks above 0 for whatever is not
    sharded.
    """
    sharding = sharding_of(parameter)
    if sharding.tied and topology.embedding is not None and topology.pipeline.is_last:
        return True
    return sharding.dim is None and not topology.tensor.is_first
