"""Collectives over a `Group` without gradients: nothing happens in a group of one.

Each is entered in the group's flight recorder, and so is the wait for one that was started.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron.parallel.topology import Group

# torch 2.13 gave these two calls new names and warns about the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class _Done:
    """The work handle of a collective that had nothing to do."""

    def wait(self) -> None:
        return None


DONE = _Done()


class Started:
    """The work handle of a collective on its way, whose wait is recorded."""

    __slots__ = ("_by_host", "_call", "_group", "_sequence", "_size", "_work")

    def __init__(self, work: Any, call: bytes, group: Group, size_bytes: int, sequence: int, by_host: bool) -> None:
        self._work, self._call, self._group = work, call, group
        self._size, self._sequence, self._by_host = size_bytes, sequence, by_host

    def wait(self) -> None:
        flight = self._group.flight
        flight.enter_wait(self._call, self._group.kind, self._size, self._sequence, self._by_host)
        self._work.wait()
        flight.leave()


def start(
    call: bytes, group: Group, size_bytes: int, function: Callable[..., Any], x: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Call torch's `function`, which starts the collective `call` over `group` and returns its work handle."""
    flight, by_host = group.flight, x.is_cpu
    sequence = flight.enter(call, group.kind, size_bytes, by_host)
    work = function(x, *args, group=group.handle, async_op=True, **kwargs)
    flight.leave()
    return Started(work, call, group, size_bytes, sequence, by_host)


def all_reduce_async(x: torch.Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Any:
    """Sum `x` over the group in place; call wait() on the result before reading `x`."""
    if group.size == 1:
        return DONE
    return start(b"all_reduce", group, x.nbytes, dist.all_reduce, x, op=op)


def all_reduce(x: torch.Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """Sum (or `op`) `x` over the group in place and return it."""
    if group.size > 1:
        flight = group.flight
        flight.enter(b"all_reduce", group.kind, x.nbytes, x.is_cpu)
        dist.all_reduce(x, op=op, group=group.handle)
        flight.leave()
    return x


def gather_first_async(x: torch.Tensor, group: Group) -> tuple[torch.Tensor, Any]:
    """Concatenate the shards [n, ...] of all ranks along dimension 0: ([n * size, ...], work handle)."""
    if group.size == 1:
        return x, DONE
    whole = x.new_empty((x.shape[0] * group.size, *x.shape[1:]))
    return whole, start(b"all_gather", group, whole.nbytes, _all_gather, whole, x.contiguous())


def gather_first(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Concatenate the shards [n, ...] of all ranks along dimension 0: [n * size, ...]."""
    whole, work = gather_first_async(x, group)
    work.wait()
    return whole


def reduce_scatter_first_async(x: torch.Tensor, group: Group) -> tuple[torch.Tensor, Any]:
    """Sum [n, ...] over the ranks and keep this rank's part of dimension 0: ([n / size, ...], work handle)."""
    if group.size == 1:
        return x, DONE
    part = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    return part, reduce_scatter_into_async(part, x, group)


def reduce_scatter_into_async(part: torch.Tensor, x: torch.Tensor, group: Group) -> Any:
    """Sum `x` [n, ...] over the ranks and put this rank's part of dimension 0 into `part` [n / size, ...].

    For a group of more than one; `part` is contiguous. Returns the work handle.
    """
    return start(b"reduce_scatter", group, x.nbytes, _reduce_scatter, part, x.contiguous())


def reduce_scatter_first(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum [n, ...] over the ranks and keep this rank's part of dimension 0: [n / size, ...]."""
    part, work = reduce_scatter_first_async(x, group)
    work.wait()
    return part


def split_first(x: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's part of dimension 0: [n / size, ...], a view."""
    return x if group.size == 1 else x.chunk(group.size, dim=0)[group.rank]


# -- Python objects, for what is rare ----------------------------------------------------------------------------------


def gather_objects(value: Any, group: Group, *, everywhere: bool = True) -> list[Any]:
    """The values of all ranks of the group in their order; `everywhere` False: [] on all but the first."""
    if group.size == 1:
        return [value]
    wanted = everywhere or group.is_first
    found: list[Any] = [None] * group.size if wanted else []
    group.flight.enter(b"all_gather_obj" if everywhere else b"gather_object", group.kind, 0, True)
    if everywhere:
        dist.all_gather_object(found, value, group=group.handle)
    else:
        dist.gather_object(value, found if wanted else None, dst=group.ranks[0], group=group.handle)
    group.flight.leave()
    return found


def broadcast_object(value: Any, group: Group, source: int = 0) -> Any:
    """The value of one rank of the group, by default its first."""
    if group.size == 1:
        return value
    carried = [value]
    group.flight.enter(b"broadcast_object", group.kind, 0, True)
    dist.broadcast_object_list(carried, src=group.ranks[source], group=group.handle)
    group.flight.leave()
    return carried[0]
