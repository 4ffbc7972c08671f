"""Buckets: parameters whose gradients are reduced, whose weights are updated and gathered in one
message.

A bucket is a parameter group of the optimizer. DeepSpeed lays the parameters of a group end to end
and gives each data-parallel rank an equal part of the line, so that every rank owns a part of every
bucket: messages load all ranks alike, and neither the sum of a bucket nor its new weights wait for
another bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.collectives import gather_first, reduce_scatter_first, start
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Group, Topology


@dataclass(eq=False)
class Bucket:
    """One parameter group as flat tensors, all laid out alike; only the end is padding, and zero.

    gradients  sums, in fp32 or bf16  # [n]
    weights    the weights of forward and backward, which the parameters are views of  # [n]
    rank       this rank's place among those that share the bucket, of `ranks`
    """

    parameters: Sequence[torch.nn.Parameter]
    gradients: torch.Tensor
    weights: torch.Tensor
    rank: int
    ranks: int
    starts: dict[torch.nn.Parameter, int] = field(init=False)

    def __post_init__(self) -> None:
        assert self.gradients.shape == self.weights.shape, (
            "gradients and weights are laid out alike"
        )
        assert len(self.weights) % self.ranks == 0, "ranks own equal parts"
        self.starts, at = {}, 0
        for p in self.parameters:
            self.starts[p] = at
            at += p.numel()

    def own(self, flat: torch.Tensor) -> torch.Tensor:
        """The part [n / ranks] of a flat tensor that this rank owns."""
        size = len(flat) // self.ranks
        return flat.narrow(0, self.rank * size, size)

    def gradient(self, p: torch.nn.Parameter) -> torch.Tensor:
        """The whole gradient sum of a parameter, in its shape."""
        return self.gradients.narrow(0, self.starts[p], p.numel()).view(p.shape)

    def held(self, p: torch.nn.Parameter) -> tuple[int, int]:
        """[start, stop) of a parameter within what this rank owns; empty where another rank owns
        all of it.
        """
        size = len(self.weights) // self.ranks
        start = self.starts[p] - self.rank * size
        return min(max(start, 0), size), min(max(start + p.numel(), 0), size)

    def owned(self) -> Iterator[tuple[torch.nn.Parameter, int, slice]]:
        """Yield each parameter of which this rank owns elements, the first of them, and where they
        are in its part.
        """
        for p in self.parameters:
            start, stop = self.held(p)
            if start < stop:
                yield (
                    p,
                    max(0, self.rank * (len(self.weights) // self.ranks) - self.starts[p]),
                    slice(start, stop),
                )

    def reduced(self, parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
        """Return this rank's part of the gradients of some parameters; those of neighbours as one
        flat tensor.
        """
        wanted, runs = set(parameters), list[tuple[int, int]]()
        for p in self.parameters:
            start, stop = self.held(p)
            if p not in wanted or start == stop:
                continue
            if runs and runs[-1][1] == start:
                start = runs.pop()[0]
            runs.append((start, stop))
        own = self.own(self.gradients)
        return [own[start:stop] for start, stop in runs]


def reduce_to_owners(bucket: Bucket, group: Group) -> list[Any]:
    """Start to sum the gradients over `group`: every rank gets the part that it owns. Returns what
    to wait for.

    Of the other parts nothing is promised. Where each rank owns the whole bucket (ZeRO stage 0) all
    get the whole sum.
    """
    flat = bucket.gradients
    if bucket.ranks == 1:
        return [start(b"all_reduce", group, flat.nbytes, dist.all_reduce, flat)]
    if flat.device.type == "cpu":
        # gloo copies the input of a reduce-scatter and sums all of it on all ranks; a reduction to
        # one rank it does in place. Measured for 40 MB on two ranks: 52 ms against 12.5 ms.
        parts = zip(flat.chunk(bucket.ranks), group.ranks, strict=True)
        return [
            start(b"reduce", group, part.nbytes, dist.reduce, part, dst=rank)
            for part, rank in parts
        ]
    scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return [start(b"reduce_scatter", group, flat.nbytes, scatter, bucket.own(flat), flat)]


def gather_from_owners(bucket: Bucket, group: Group) -> list[Any]:
    """Start to collect the weights of all owners on every rank of `group`. Returns what to wait
    for.
    """
    if bucket.ranks == 1:
        return []
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return [
        start(
            b"all_gather",
            group,
            bucket.weights.nbytes,
            gather,
            bucket.weights,
            bucket.own(bucket.weights),
        )
    ]


_BLOCK = 1 << 16


def sum_of_squares(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of squares of flat tensors, by torch; fp32, a scalar.

    Squares of blocks are added up in fp32 and the blocks in fp64: all in fp64 takes torch eighteen
    times as long.
    """
    norms = []
    for t in tensors:
        whole = len(t) // _BLOCK * _BLOCK
        norms.append(
            torch.linalg.vector_norm(t[:whole].view(-1, _BLOCK), dim=1, dtype=torch.float32)
        )
        norms.append(torch.linalg.vector_norm(t[whole:], dtype=torch.float32).view(1))
    return torch.cat(norms).double().square().sum().float()


class WeightGather:
    """The weights of forward and backward on all data-parallel ranks.

    buckets  in the order in which forward passes need them: the same on all data-parallel ranks
    chunks   this rank's model: a module that is about to run waits for its weights
    overlap  `start` returns at once

    A chunk says with `weight_users()` which modules it calls, and which parameters must be there
    for each: pairs of a module and its parameters, those of modules within included. Without, all
    of a chunk's weights are waited for before it runs. A state_dict of a chunk or of a module of it
    waits for all. Whoever reads weights in another way calls `wait` before.
    """

    def __init__(
        self,
        buckets: Iterable[Bucket],
        group: Group,
        chunks: Iterable[torch.nn.Module],
        overlap: bool,
    ) -> None:
        self._buckets, self._group, self._overlap = list(buckets), group, overlap
        self._works: dict[Bucket, list[Any]] = {}
        if not overlap or all(bucket.ranks == 1 for bucket in self._buckets):
            return
        of = {p: bucket for bucket in self._buckets for p in bucket.parameters}
        for chunk in chunks:
            users = getattr(chunk, "weight_users", None)
            for module, parameters in users() if users else [(chunk, list(chunk.parameters()))]:
                module.register_forward_pre_hook(self._waits_for(parameters, of))
            for module in chunk.modules():
                module.register_state_dict_pre_hook(self._before_state_dict)

    def _waits_for(
        self, parameters: Sequence[torch.nn.Parameter], of: Mapping[torch.nn.Parameter, Bucket]
    ) -> Callable[..., None]:
        needed = list(dict.fromkeys(of[p] for p in parameters if p in of))

        def before(*_: Any) -> None:
            if self._works:
                self._wait(needed)

        return before

    def _before_state_dict(self, *_: Any) -> None:
        self.wait()

    @torch.no_grad()
    def start(self) -> None:
        """Collect the weights: all ranks of the group call it, after their part has changed."""
        for bucket in self._buckets:
            works = gather_from_owners(bucket, self._group)
            if works:
                self._works[bucket] = works
        if not self._overlap:
            self.wait()

    def wait(self) -> None:
        """Return when all weights are there."""
        self._wait(list(self._works))

    def _wait(self, buckets: Iterable[Bucket]) -> None:
        for bucket in buckets:
            for work in self._works.pop(bucket, ()):
                work.wait()


Change = Callable[[str, torch.Tensor], torch.Tensor]


class WholeParameters:
    """Key "whole" of a parameter group: called as whole(flat, change) by every rank, in the same
    order.

    Gathers `flat` [n], laid out as this rank's weights of the group, over the data-parallel and
    tensor-parallel ranks; calls change(name, tensor) with the values of each parameter in its
    global shape, on one data-parallel rank and all tensor-parallel ranks; returns this rank's part
    of the results, [n]. The groups of data-parallel ranks get their parameters so that each
    computes about as many elements.
    """

    def __init__(self, bucket: Bucket, topology: Topology) -> None:
        self._bucket, self._topology = bucket, topology
        loads = [0] * bucket.ranks
        self._mine = list[torch.nn.Parameter]()
        for p in sorted(bucket.parameters, key=torch.numel, reverse=True):
            rank = loads.index(min(loads))
            loads[rank] += p.numel()
            if rank == bucket.rank:
                self._mine.append(p)

    @torch.no_grad()
    def __call__(self, flat: torch.Tensor, change: Change) -> torch.Tensor:
        bucket, data = self._bucket, self._topology.data
        line = gather_first(flat, data) if bucket.ranks > 1 else flat
        changed = torch.zeros_like(line)
        for p in self._mine:
            place = slice(bucket.starts[p], bucket.starts[p] + p.numel())
            changed[place].view(p.shape).copy_(self._change(p, line[place].view(p.shape), change))
        return reduce_scatter_first(changed, data) if bucket.ranks > 1 else changed

    def _change(self, p: torch.nn.Parameter, local: torch.Tensor, change: Change) -> torch.Tensor:
        """Return the local shard, padding included, of what `change` makes of the whole
        parameter.
        """
        tensor, sharding = self._topology.tensor, sharding_of(p)
        dim = sharding.dim
        if dim is None or tensor.size == 1:
            whole = local[tuple(slice(0, n) for n in sharding.extent)]
        else:
            whole = gather_first(local.transpose(0, dim), tensor).transpose(0, dim)
            whole = whole.narrow(dim, 0, sharding.global_shape[dim])  # padding is at the end
        found = change(sharding.name, whole.contiguous())
        if found.shape != whole.shape:
            raise ValueError(
                f"{sharding.name}: {list(whole.shape)} was changed into {list(found.shape)}"
            )
        shard = torch.zeros_like(local)
        extent = tuple(
            slice(o, o + n) for o, n in zip(sharding.offset, sharding.extent, strict=True)
        )
        shard[tuple(slice(0, n) for n in sharding.extent)] = found[extent]
        return shard
