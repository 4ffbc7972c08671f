"""Whole parameters for an optimizer that cannot work on ZeRO's flat parts, such as Muon on its matrices."""
from __future__ import annotations

from collections.abc import Callable

import torch

from megatron.engine.buckets import Bucket
from megatron.parallel.collectives import gather_first, reduce_scatter_first
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Topology

Change = Callable[[str, torch.Tensor], torch.Tensor]


class WholeParameters:
    """Key "whole" of a parameter group: called as whole(flat, change) by every rank, in the same order.

    Gathers `flat` [n], laid out as this rank's weights of the group, over the data-parallel and tensor-parallel ranks;
    calls change(name, tensor) with the values of each parameter in its global shape, on one data-parallel rank and all
    tensor-parallel ranks; returns this rank's part of the results, [n]. The groups of data-parallel ranks get their
    parameters so that each computes about as many elements.
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
        """Return the local shard, padding included, of what `change` makes of the whole parameter."""
        tensor, sharding = self._topology.tensor, sharding_of(p)
        dim = sharding.dim
        if dim is None or tensor.size == 1:
            whole = local[tuple(slice(0, n) for n in sharding.extent)]
        else:
            whole = gather_first(local.transpose(0, dim), tensor).transpose(0, dim)
            whole = whole.narrow(dim, 0, sharding.global_shape[dim])  # padding is at the end
        found = change(sharding.name, whole.contiguous())
        if found.shape != whole.shape:
            raise ValueError(f"{sharding.name}: {list(whole.shape)} was changed into {list(found.shape)}")
        shard = torch.zeros_like(local)
        extent = tuple(slice(o, o + n) for o, n in zip(sharding.offset, sharding.extent, strict=True))
        shard[tuple(slice(0, n) for n in sharding.extent)] = found[extent]
        return shard
