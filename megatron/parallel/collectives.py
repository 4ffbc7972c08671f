"""Collectives over a `Group`; in a group of one they send nothing.

`start` and `reduce_scatter_into_async` need a group of several ranks. Only
`reduce_from_tensor_region` supports gradients. Collectives, and waits for asynchronous ones, are
written to the group's flight recorder; the caller of `post` does this itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.errors import LaunchError
from megatron.parallel.autograd import Context, Node
from megatron.parallel.flight import FlightRecorder
from megatron.parallel.topology import Group, Topology, compress_ranks, neighbours

T = TypeVar("T")

# torch 2.13 renamed these two calls and warns about the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(slots=True)
class Started:
    """A work handle of a collective in progress, which records the wait for it.

    Without `work` it is the handle of a collective that had nothing to do. `enter` begins the
    record of the wait.
    """

    work: dist.Work | None = None
    flight: FlightRecorder | None = None
    enter: Callable[[], object] = bool

    def wait(self) -> None:
        if self.work is not None and self.flight is not None:
            self.enter()
            self.work.wait()
            self.flight.leave()


DONE = Started()


def start(
    call: bytes,
    group: Group,
    size_bytes: int,
    function: Callable[..., Any],
    x: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Started:
    """Start the collective `call` over `group` with torch's `function`; return the work handle.

    The group has more than one rank.
    """
    flight = group.flight
    enter = partial(flight.enter, call, group.kind, size_bytes, x.is_cpu)
    sequence = enter()
    work = function(x, *args, group=group.handle, async_op=True, **kwargs)
    flight.leave()
    return Started(work, flight, partial(enter, sequence=sequence))


def all_reduce_async(
    x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
) -> Started:
    """Start reducing `x` over the group in place with `op`; return the work handle.

    Call its wait() before reading `x`.
    """
    if group.size == 1:
        return DONE
    return start(b"all_reduce", group, x.nbytes, dist.all_reduce, x, op=op)


def all_reduce(x: Tensor, group: Group, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """Reduce `x` over the group in place with `op`, and return it."""
    if group.size > 1:
        group.flight.enter(b"all_reduce", group.kind, x.nbytes, x.is_cpu)
        dist.all_reduce(x, op=op, group=group.handle)
        group.flight.leave()
    return x


def gather_first_async(x: Tensor, group: Group) -> tuple[Tensor, Started]:
    """Concatenate all ranks' shards [n, ...] along dimension 0.

    Returns [n * size, ...] and the work handle.
    """
    if group.size == 1:
        return x, DONE
    full = x.new_empty((x.shape[0] * group.size, *x.shape[1:]))
    return full, start(b"all_gather", group, full.nbytes, _all_gather, full, x.contiguous())


def gather_first(x: Tensor, group: Group) -> Tensor:
    """Concatenate all ranks' shards [n, ...] along dimension 0: [n * size, ...]."""
    full, work = gather_first_async(x, group)
    work.wait()
    return full


def reduce_scatter_first_async(x: Tensor, group: Group) -> tuple[Tensor, Started]:
    """Sum [n, ...] over the ranks and keep this rank's shard of dimension 0.

    Returns [n / size, ...] and the work handle.
    """
    if group.size == 1:
        return x, DONE
    shard = x.new_empty((x.shape[0] // group.size, *x.shape[1:]))
    return shard, reduce_scatter_into_async(shard, x, group)


def reduce_scatter_into_async(shard: Tensor, x: Tensor, group: Group) -> Started:
    """Sum `x` [n, ...] over the ranks into `shard` [n / size, ...], this rank's rows.

    The group has more than one rank; `shard` is contiguous. Returns the work handle.
    """
    return start(b"reduce_scatter", group, x.nbytes, _reduce_scatter, shard, x.contiguous())


def reduce_scatter_first(x: Tensor, group: Group) -> Tensor:
    """Sum [n, ...] over the ranks and keep this rank's shard of dimension 0: [n / size, ...]."""
    shard, work = reduce_scatter_first_async(x, group)
    work.wait()
    return shard


def all_to_all_async(
    x: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]
) -> tuple[Tensor, Started]:
    """Send the next `sent[r]` rows of x [n, ...] to each rank r of the group, in order.

    Returns the `received[r]` rows from each rank r, and the work handle. Nothing is padded.
    """
    if group.size == 1:
        return x, DONE
    result = x.new_empty((sum(received), *x.shape[1:]))
    size = (len(x) - sent[group.rank]) * x[:1].nbytes
    counts = list(received), list(sent)
    send = dist.all_to_all_single
    return result, start(b"all_to_all", group, size, send, result, x.contiguous(), *counts)


def all_to_all(x: Tensor, group: Group, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Send rows of x to each rank of the group; return the received rows; see all_to_all_async."""
    result, work = all_to_all_async(x, group, sent, received)
    work.wait()
    return result


def split_first(x: Tensor, group: Group) -> Tensor:
    """Return this rank's shard of dimension 0: [n / size, ...], a view."""
    return x if group.size == 1 else x.chunk(group.size, dim=0)[group.rank]


# -- Python objects, for rare messages -----------------------------------------------------------


def gather_objects(value: T, group: Group, *, everywhere: bool = True) -> list[T]:
    """Return the values from all ranks of the group in order.

    If `everywhere` is False, return [] on all ranks but the first.
    """
    if group.size == 1:
        return [value]
    values: list[Any] = [None] * group.size if everywhere or group.is_first else []
    group.flight.enter(b"all_gather_obj" if everywhere else b"gather_object", group.kind, 0, True)
    if everywhere:
        dist.all_gather_object(values, value, group=group.handle)
    else:
        dist.gather_object(value, values or None, dst=group.ranks[0], group=group.handle)
    group.flight.leave()
    return values


def broadcast_object(value: T, group: Group, source: int = 0) -> T:
    """Return the value from one rank of the group, by default the first."""
    if group.size == 1:
        return value
    carried = [value]
    group.flight.enter(b"broadcast_object", group.kind, 0, True)
    dist.broadcast_object_list(carried, src=group.ranks[source], group=group.handle)
    group.flight.leave()
    return carried[0]


# -- messages ------------------------------------------------------------------------------------


def post(call: bytes, x: Tensor, group: Group, peer: int) -> dist.Work:
    """Post a message of x: b"send" to the global rank `peer`, or b"receive" from it.

    Returns torch's work handle. The caller records the message, and posts the messages of a pair in
    the same order on both ranks.
    """
    operation = dist.isend if call == b"send" else dist.irecv
    handle = group.pairs.get(peer, group).handle
    if not x.is_cuda:
        posted = operation(x, peer, group=handle)
        assert posted is not None, "this rank is in the group"
        return posted
    # A batch uses the communicator of the pair's group. Without a batch, torch would create a
    # separate communicator in the middle of a step, with a warning.
    (work,) = dist.batch_isend_irecv([dist.P2POp(operation, x, peer, handle)])
    return work


# -- the first use of every group ----------------------------------------------------------------


def use_groups(topology: Topology) -> int:
    """Use the groups of this rank, and its pairs of pipeline neighbours, before training does.

    Returns the number of groups and pairs that were used.

    NCCL and RCCL connect a group at its first collective and two pipeline neighbours at their first
    message. They may hang without an error at that point, on the host or on the device; the host
    therefore waits for the device. Each rank sums one number over every group (over the pipeline
    group only if that is also its model or embedding group), sends one to each rank of the groups
    over which tokens go to experts, and exchanges one with each neighbour. The order is the same on
    all ranks, so that groups do not wait for each other in a cycle. The world comes last: no rank
    continues before all groups work. All ranks call this. Raises LaunchError if a result is wrong.
    """
    device = topology.device
    world = topology.world
    pipeline = topology.pipeline
    if device.type == "cuda":
        torch.cuda.set_device(device)  # the current device is per thread
    groups = [group for group in topology.groups if group.handle is not world.handle]
    if pipeline is not topology.model and pipeline is not topology.embedding:
        groups = [group for group in groups if group is not pipeline]

    def add(group: Group) -> None:
        x = torch.ones(1, device=device)
        call = partial(dist.all_reduce, x, group=group.handle)
        _use(b"all_reduce", group, x, call, [group.size])
        if any(hop.handle is group.handle for hop in topology.expert_hops):
            x = torch.zeros(group.size, device=device)
            call = partial(dist.all_to_all_single, x, x + group.rank, group=group.handle)
            _use(b"all_to_all", group, x, call, range(group.size))

    for group in groups:
        sys.audit("megatron.parallel.group", group.kind)
        add(group)
    pairs = [
        pair
        for alongside in neighbours(pipeline.size, topology.owners)
        for pair in alongside
        if pipeline.rank in pair
    ]

    def exchange(name: bytes, peer: int) -> None:
        x = torch.full((1,), float(topology.rank if name == b"send" else -1), device=device)
        right = [topology.rank if name == b"send" else peer]
        _use(name, pipeline, x, lambda: post(name, x, pipeline, peer).wait(), right, peer)

    for first, second in pairs:
        peer = pipeline.ranks[second if pipeline.rank == first else first]
        for name in (b"send", b"receive") if pipeline.rank == first else (b"receive", b"send"):
            exchange(name, peer)
    if world.handle is not None:
        add(world)
    return len(groups) + len(pairs) + (world.size > 1)


def _use(
    name: bytes,
    group: Group,
    x: Tensor,
    call: Callable[[], object],
    right: Sequence[int],
    peer: int = -1,
) -> None:
    """Make a call and read its result `x` on the host, as one entry of the flight record.

    right  the correct result
    peer   the rank at the other end of a message; -1: a collective

    Raises LaunchError if the result is wrong.
    """
    group.flight.enter(name, group.kind, x.nbytes, x.is_cpu, peer=peer)
    call()
    read = [int(number.item()) for number in x]
    group.flight.leave()
    if read != list(right):
        ranks = f"over its {group.kind} group, ranks {compress_ranks(group.ranks)}"
        raise LaunchError(
            f"the first {name.decode()} of rank {group.ranks[group.rank]} "
            f"{ranks if peer < 0 else f'with rank {peer} {ranks}'}, gave {read} instead of "
            f"{list(right)}: NCCL, RCCL or a network plugin moved wrong data between these "
            "ranks; try other nodes, or other versions of these libraries"
        )


# -- with a gradient -----------------------------------------------------------------------------


class _SumOverRanks(Node):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
        ctx.group = group if sequence_parallel else None
        # For engine/gradients.py: the ranks' inputs differ, so that the gradients which `backward`
        # returns belong to different terms of a sum.
        ctx.partial_gradient = True
        if sequence_parallel:
            return reduce_scatter_first(x, group)
        return all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient if ctx.group is None else gather_first(gradient, ctx.group), None, None


class _CopyToRanks(Node):
    @staticmethod
    def forward(ctx: Context, x: Tensor, group: Group, sequence_parallel: bool) -> Tensor:
        ctx.group = group
        ctx.sequence_parallel = ctx.partial_gradient = sequence_parallel
        return gather_first(x, group) if sequence_parallel else x.view_as(x)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        if ctx.sequence_parallel:
            return reduce_scatter_first(gradient, ctx.group), None, None
        return all_reduce(gradient.contiguous().clone(), ctx.group), None, None


def copy_to_tensor_region(x: Tensor, group: Group, sequence_parallel: bool = False) -> Tensor:
    """Return x as an input [s, b, ..] of all tensor ranks; the gradient is the sum of theirs.

    x is [s, b, ..], or with sequence parallelism this rank's [s/tp, b, ..]. See
    reduce_from_tensor_region, its reverse.
    """
    return x if group.size == 1 else _CopyToRanks.apply(x, group, sequence_parallel)


def reduce_from_tensor_region(x: Tensor, group: Group, sequence_parallel: bool = False) -> Tensor:
    """Sum the partial results [s, b, h] of the tensor ranks; autograd can differentiate the sum.

    Returns [s, b, h] on every rank, or with sequence parallelism this rank's [s/tp, b, h]. The
    backward passes follow Shoeybi et al. (arXiv 1909.08053, section 3, g) and Korthikanti et al.
    (arXiv 2205.05198, section 4.2.2).
    """
    return x if group.size == 1 else _SumOverRanks.apply(x, group, sequence_parallel)
