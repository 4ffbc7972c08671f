"""Collectives over a `Group` without gradients: nothing happens in a group of one."""
from __future__ import annotations

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


def all_reduce_async(x: torch.Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Any:
    """Sum `x` over the group in place; call wait() on the result before reading `x`."""
    if group.size == 1:
        return DONE
    return dist.all_reduce(x, op=op, group=group.handle, async_op=True)


def all_reduce(x: torch.Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """Sum (or `op`) `x` over the group in place and return it."""
    if group.size > 1:
        dist.all_reduce(x, op=op, group=group.handle)
    return x


def gather_first_async(x: torch.Tensor, group: Group) -> tuple[torch.Tensor, Any]:
    """Concatenate the shards [n, ...] of all ranks along dimension 0: ([n * size, ...], work handle)."""
    if group.size == 1:
        return x, DONE
    whole = x.new_empty((x.shape[0] * group.size, *x.shape[1:]))
    return whole, _all_gather(whole, x.contiguous(), group=group.handle, async_op=True)


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
    return _reduce_scatter(part, x.contiguous(), group=group.handle, async_op=True)


def reduce_scatter_first(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum [n, ...] over the ranks and keep this rank's part of dimension 0: [n / size, ...]."""
    part, work = reduce_scatter_first_async(x, group)
    work.wait()
    return part


def split_first(x: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's part of dimension 0: [n / size, ...], a view."""
    return x if group.size == 1 else x.chunk(group.size, dim=0)[group.rank]
