"""Full parameters for an optimizer whose update needs the whole matrix, such as Muon.

ZeRO gives each data-parallel rank a range of every bucket, and tensor parallelism gives each rank a
shard of a matrix. Here every matrix has one owner: a tensor-parallel rank on one of the
data-parallel ranks that together hold the optimizer state once (ShardGroups.states). Each expert
has matrices of its own; expert-tensor-parallel ranks take the place of tensor-parallel ones. Two
all-to-alls carry a matrix to its owner: one over `states` for the ranges of a shard, one over the
tensor group for the shards. Two more carry the result back. In each, a rank sends about as many
elements as it owns in the buckets, 1/(size of `states`) of those whose gradients it reduces.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.engine.gradients import Bucket
from megatron.engine.optimizer_state import ROUND
from megatron.parallel.collectives import gather_objects, start
from megatron.parallel.sharding import Sharding, sharding_of
from megatron.parallel.topology import Group, ShardGroups, Topology

Change = Callable[[str, Tensor], Tensor]
Views = list[list[Tensor]]
"""Tensors that are sent or received, by the group rank at the other end."""


def work_of(shape: Sequence[int]) -> float:
    """Return the number of multiplications in x x^T or x^T x, whichever is smaller, for a shape."""
    return float(math.prod(shape) * min(shape[-2:], default=1))


@dataclass(frozen=True)
class _Shards:
    """Shardings of a tensor rank's parameters; the repr, for dry runs, is the same on all ranks."""

    of: tuple[Sharding, ...] = field(repr=False)


def _matrices(p: torch.nn.Parameter) -> Iterator[tuple[int, Sharding]]:
    """Yield each matrix of a parameter: the index of its first element, and its sharding.

    Experts are matrices of their own; any other parameter is one.
    """
    s = sharding_of(p)
    if not s.experts:
        yield 0, s
        return
    for i in range(len(p)):
        one = replace(
            s,
            name=f"{s.name}.{s.offset[0] + i}",
            global_shape=s.global_shape[1:],
            shape=s.shape[1:],
            offset=s.offset[1:],
            extent=s.extent[1:],
        )
        yield i * one.elements, one


class _LocalMatrix(NamedTuple):
    """This rank's shard of a matrix.

    bucket    index of its bucket
    elements  its elements in the bucket
    number    its index in _Shards
    """

    bucket: int
    elements: slice
    number: int

    def slice_of(self, rank: int, size: int) -> slice:
        """Return the elements in the range of `rank`, if each rank's range has `size` elements."""
        low = max(self.elements.start, rank * size)
        return slice(low, max(low, min(self.elements.stop, (rank + 1) * size)))


class _Matrix(NamedTuple):
    """A matrix, of which a rank may have several shards.

    name    its global name
    shape   its global shape
    shards  this rank's shards
    owner   the owner's tensor rank, and its rank in `states`
    """

    name: str
    shape: tuple[int, ...]
    shards: list[_LocalMatrix]
    owner: tuple[int, int]


class FullMatrices:
    """Value of the key "full_parameters" of an optimizer's groups: one object for all of them.

    All ranks call it together, as matrices(flats, change, dtype). `flats` has a tensor [n] for each
    of these groups, in order, laid out as the range of the weights that this rank owns; or [n, k]
    with k values per weight. change(name, tensor) gets each parameter in its global shape (and k),
    on its owner, and returns a tensor of this shape; it gets experts one by one, without their
    dimension, with their number after the name. Each rank's range of the result replaces the values
    in `flats`. Values are sent and passed to `change` in `dtype`.

    group_of  index of a parameter's group among the groups of full parameters, by the name that
              `change` gets

    All owners have about the same amount of work (work_of). The messages of one round are in flight
    while another round computes.
    """

    def __init__(self, buckets: Sequence[Bucket], topology: Topology) -> None:
        self._buckets = buckets
        shardings = list[Sharding]()
        shards = dict[str, list[_LocalMatrix]]()
        groups: dict[bool, tuple[ShardGroups, Group, dict[str, tuple[int, ...]]]] = {}
        for b, bucket in enumerate(buckets):
            for p, first in bucket.starts.items():
                record = sharding_of(p)
                holders = bucket.shards, topology.tensor_of(record)
                shapes = groups.setdefault(record.experts, (*holders, {}))[2]
                for at, s in _matrices(p):
                    elements = slice(first + at, first + at + s.elements)
                    shards.setdefault(s.name, []).append(_LocalMatrix(b, elements, len(shardings)))
                    shapes[s.name] = s.global_shape
                    shardings.append(s)
        self.group_of = {name: some[0].bucket for name, some in shards.items()}
        local_shards = _Shards(tuple(shardings))
        # by the group that divides matrices
        self._shards: dict[Group, list[tuple[Sharding, ...]]] = {}
        for _, tensor, _ in groups.values():
            if tensor not in self._shards:
                gathered = gather_objects(local_shards, tensor)
                self._shards[tensor] = [each.of for each in gathered]
        self._rounds = [
            (shared, tensor, some)
            for shared, tensor, shapes in groups.values()
            for some in self._in_rounds(shards, shapes, shared.states, tensor)
        ]

    def _in_rounds(
        self,
        shards: dict[str, list[_LocalMatrix]],
        shapes: dict[str, tuple[int, ...]],
        data: Group,
        tensor: Group,
    ) -> Iterator[list[_Matrix]]:
        """Give each matrix, the one with the most work first, to the rank with the least so far.

        Yield rounds. In a round, all ranks process the same number of their next matrices, until
        the largest of them have ROUND elements together.
        """
        ranks = [(t, d) for d in range(data.size) for t in range(tensor.size)]
        work = dict.fromkeys(ranks, 0.0)
        owned = {rank: list[_Matrix]() for rank in ranks}
        for name in sorted(shapes, key=lambda name: -work_of(shapes[name])):
            owner = min(work, key=work.__getitem__)
            work[owner] += work_of(shapes[name])
            owned[owner].append(_Matrix(name, shapes[name], shards[name], owner))
        most = 0
        some = list[_Matrix]()
        for number in range(max(map(len, owned.values()))):
            some += (following := [of[number] for of in owned.values() if number < len(of)])
            most += max(math.prod(m.shape) for m in following)
            if most >= ROUND:
                yield some
                most = 0
                some = []
        if some:
            yield some

    @torch.no_grad()
    def __call__(
        self,
        flats: Sequence[Tensor],
        change: Change,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        waiting = deque(self._round(*some, flats, change, dtype) for some in self._rounds)
        active = list[Iterator[None]]()
        # The newest round goes first: its message and that of the second-newest round are in flight
        # while the third-newest computes.
        while waiting or active:
            if waiting:
                active.insert(0, waiting.popleft())
            active = [each for each in active if next(each, waiting) is None]

    def _round(
        self,
        shared: ShardGroups,
        tensor: Group,
        matrices: list[_Matrix],
        flats: Sequence[Tensor],
        change: Change,
        dtype: torch.dtype,
    ) -> Iterator[None]:
        """Carry out a round; yield after starting each all-to-all."""
        data = shared.states
        t = tensor.rank
        of_ranks = self._shards[tensor]
        d = data.rank
        size = [len(bucket.owned_weights) for bucket in self._buckets]
        column = [m for m in matrices if m.owner[1] == d]
        row = [[m for m in column if m.owner[0] == rank] for rank in range(tensor.size)]
        none = torch.empty(0, dtype=dtype, device=flats[0].device)
        values = flats[0].shape[1:]
        shards = {
            local.number: none.new_empty(of_ranks[t][local.number].elements, *values)
            for m in column
            for local in m.shards
        }
        full_matrices = {m.name: none.new_empty(*m.shape, *values) for m in row[t]}

        def in_flats(local: _LocalMatrix) -> Tensor:
            index = shared.shard_index
            each = size[local.bucket]
            span = local.slice_of(index, each)
            first = index * each
            return flats[local.bucket][span.start - first : span.stop - first]

        def in_shard(local: _LocalMatrix, rank: int) -> Tensor:
            span = local.slice_of(shared.shard_index_of(rank), size[local.bucket])
            first = local.elements.start
            return shards[local.number][span.start - first : span.stop - first]

        def real(local: _LocalMatrix) -> Tensor:
            s = of_ranks[t][local.number]
            return shards[local.number].view(*s.shape, *values)[tuple(slice(n) for n in s.extent)]

        def in_full(m: _Matrix, local: _LocalMatrix, rank: int) -> Tensor:
            s = of_ranks[rank][local.number]
            ends = zip(s.offset, s.extent, strict=True)
            return full_matrices[m.name][tuple(slice(first, first + n) for first, n in ends)]

        of_flats: Views = [[] for _ in range(data.size)]
        for m in matrices:
            of_flats[m.owner[1]] += map(in_flats, m.shards)
        of_shards = [
            [in_shard(local, rank) for m in column for local in m.shards]
            for rank in range(data.size)
        ]
        yield from exchange(of_flats, of_shards, data, none)
        extents = [[real(local) for m in some for local in m.shards] for some in row]
        of_full = [
            [in_full(m, local, rank) for m in row[t] for local in m.shards]
            for rank in range(tensor.size)
        ]
        yield from exchange(extents, of_full, tensor, none)
        for name, full in full_matrices.items():
            changed = change(name, full)
            if changed.shape != full.shape:
                raise ValueError(
                    f"{name}: shape {list(full.shape)} was changed into {list(changed.shape)}"
                )
            full.copy_(changed)
        yield from exchange(of_full, extents, tensor, none)
        yield from exchange(of_shards, of_flats, data, none)


def exchange(sent: Views, received: Views, group: Group, none: Tensor) -> Iterator[None]:
    """Send the tensors `sent` to the ranks of a group, and receive theirs into `received`.

    The generator yields once it has started the collective: an all-to-all, in the dtype and on the
    device of the empty tensor `none`. In a group of one it only copies and does not yield.
    """
    targets = [x for some in received for x in some]
    sources = [x for some in sent for x in some]
    if group.size == 1:
        for target, x in zip(targets, sources, strict=True):
            target.copy_(x)
        return
    outgoing = torch.cat([none, *(x.reshape(-1).to(none.dtype) for x in sources)])
    sizes = [x.numel() for x in targets]
    incoming = none.new_empty(sum(sizes))
    counts = ([sum(x.numel() for x in some) for some in views] for views in (received, sent))
    send = dist.all_to_all_single
    work = start(b"all_to_all", group, outgoing.nbytes, send, incoming, outgoing, *counts)
    yield
    work.wait()
    for target, values in zip(targets, incoming.split(sizes), strict=True):
        target.copy_(values.view(target.shape))
