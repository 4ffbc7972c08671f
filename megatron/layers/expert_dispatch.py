"""Dispatch of tokens to experts: rows sorted by expert, and messages to the experts' ranks.

A token is sent once to each rank that holds experts chosen for it and passes through all of these
experts; the sum of their weighted outputs is sent back. Messages with tokens have a row for each
pair of token and rank. Two small messages, with row counts and with choices, are sent before them.
Across several nodes, a token is sent once to each node, and from there to the ranks; results are
summed on the node (X-MoE, arXiv 2508.13337). In a layer's forward pass, the host waits for the
device once, for the row counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.kernels.host_copy import HostCopy
from megatron.kernels.ops.experts import (
    permute,
    permute_reference,
    unpermute,
    unpermute_reference,
)
from megatron.parallel.autograd import Context, Node
from megatron.parallel.collectives import DONE, all_to_all, all_to_all_async
from megatron.parallel.topology import Group


class DispatchOperators(NamedTuple):
    """Operators that move rows: kernels or torch's."""

    permute: Callable[[Tensor, Tensor, Tensor], Tensor]
    unpermute: Callable[[Tensor, Tensor, Tensor], Tensor]


KERNELS = DispatchOperators(permute, unpermute)
REFERENCES = DispatchOperators(permute_reference, unpermute_reference)


def sorted_choices(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the token of each row, the row of each choice, and the end of each expert's rows.

    Rows are sorted by expert, then by token; choices without an expert come last. The shapes are
    [t k], [t, k] with -1 for a choice without an expert, and [count] in int32, exclusive.

    experts  the index, below `count`, of each choice's expert; -1: none  # [t, k], int64
    """
    flat = experts.flatten()
    none = flat < 0
    by_row, by_expert = flat.masked_fill(none, count).sort(stable=True)
    every = torch.arange(max(len(flat), count), device=flat.device)
    ends = torch.searchsorted(by_row, every[:count], right=True, out_int32=True)
    positions = torch.empty_like(flat)
    positions[by_expert] = every[: len(flat)]
    positions = positions.masked_fill(none, -1).view_as(experts)
    return by_expert // experts.shape[1], positions, ends


def count_choices(experts: Tensor, none: Tensor) -> Tensor:
    """Return how often each expert is chosen, [E] in fp32.

    Unlike torch.bincount, this does not wait for the device. On a CPU fp32 is faster than integers.

    experts  chosen experts, of any shape; -1: none
    none     zeros, fp32 [E]
    """
    flat = experts.flatten()
    return none.scatter_add(0, flat.clamp(min=0), (flat >= 0).to(none.dtype))


Numbers = Callable[[], list[int]]
"""Returns row counts on the host; the first call waits for them."""


def members_chosen(experts: Tensor, each: int, members: int) -> Tensor:
    """Return which members hold experts chosen for each token, bool [t, members].

    experts  of each token; -1: none  # [t, k]
    each     number of experts of a member
    """
    chosen = torch.zeros(len(experts), members + 1, dtype=torch.bool, device=experts.device)
    return chosen.scatter_(1, experts.div(each, rounding_mode="floor") + 1, True)[:, 1:]


def exchange_numbers(experts: Tensor, hops: Sequence[Group], each: int) -> Tensor:
    """Return all row counts that the host needs for a layer, as a tensor on the device.

    They are, for each hop, the rows sent to each member and the rows received from each; then the
    rows of each of this rank's experts. Each hop takes one all-to-all, in equal parts.

    experts  chosen by this rank's tokens, -1: none  # [t, k]
    hops     groups over which a token is sent, in this order
    each     number of experts on a rank
    """
    count = each * math.prod(hop.size for hop in hops)
    levels = list[Tensor]()  # rows for each member of a hop, and then for each expert
    members = 1
    for hop in hops:
        members *= hop.size
        levels.append(members_chosen(experts, count // members, members).sum(0))
    levels.append(count_choices(experts, torch.zeros(count, device=experts.device)).long())
    counts = list[Tensor]()
    for hop in hops:
        sent = torch.cat([level.view(hop.size, -1) for level in levels], dim=1)
        even = [1] * hop.size
        received = all_to_all(sent, hop, even, even)
        counts += [sent[:, 0], received[:, 0]]
        widths = [len(level) // hop.size for level in levels]
        levels = list(received.sum(0).split(widths)[1:])
    return torch.cat([*counts, *levels])


def read_numbers(
    numbers: HostCopy, choices: Sequence[int], hops: Sequence[Group], each: int
) -> list[int]:
    """Return the numbers of `exchange_numbers`, whose `experts` had `choices` [t, k] to send.

    The planner, which has no data, replaces this.
    """
    return numbers.read()


class Dispatch:
    """Dispatch of tokens to the members of `group` with their experts, and combining of results.

    Across several nodes, one dispatch sends tokens to nodes and the next to ranks: the group of the
    first consists of the ranks with the same local rank on each node.

    experts    chosen by this rank's tokens or, in the second dispatch, by the rows that the first
               one received; -1: none  # [t, k]
    each       number of experts of each member; if members are nodes, of all the node's ranks
    operators  operators that move the rows
    numbers    from index `at` on, the numbers of rows sent to each member, then those of rows
               received from each
    """

    def __init__(
        self,
        experts: Tensor,
        each: int,
        group: Group,
        operators: DispatchOperators,
        numbers: Numbers,
        at: int,
    ) -> None:
        self.group = group
        self.each = each
        self.operators = operators
        size = group.size
        chosen = members_chosen(experts, each, size).t()  # [ranks, t]
        flat = chosen.flatten()
        where = flat.cumsum(0) - 1  # by rank, then by token
        absent = flat.logical_not()
        self.positions = (
            where.masked_fill(absent, -1).view_as(chosen).t().contiguous()
        )  # [t, ranks]
        pairs = where.new_empty(len(flat) + 1)  # the last entry takes pairs that were not chosen
        every = torch.arange(len(flat), device=flat.device)
        pairs.scatter_(0, where.masked_fill(absent, len(flat)), every)
        self.sent = numbers()[at : at + size]
        self.received = numbers()[at + size : at + 2 * size]
        pairs = pairs[: sum(self.sent)]
        self.rank_of = pairs // len(experts)
        self.order = pairs % len(experts)

    def send(self, tokens: Tensor) -> tuple[Tensor, Arrival]:
        """Start sending tokens [t, h]; return received rows, to be read after `Arrival.wait`."""
        arrival = Arrival(self.group, self.received, self.sent)
        rows = self.operators.permute(tokens, self.order, self.positions)
        return _Send.apply(rows, arrival), arrival

    def send_choices(self, weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Send the weights and experts [t, k] of tokens; return those of received rows, [n, k].

        Received experts are numbered from the first one of this member; -1: another member's.
        """
        local = experts[self.order] - (self.rank_of * self.each).unsqueeze(1)
        local = local.masked_fill((local < 0) | (local >= self.each), -1)
        sent, local = _SendChoices.apply(weights[self.order], local, self)
        return sent, local

    def back(self, rows: Tensor) -> Tensor:
        """Send results [n, h] back to their tokens' ranks; return their sums [t, h].

        They are added in fp32, and have the dtype of the results.
        """
        arrival = Arrival(self.group, self.sent, self.received)
        return _Sum.apply(arrival.wait(_Send.apply(rows, arrival)), self)


class Arrival:
    """A message in flight in one direction, and its gradient in the other.

    Its two ends are different nodes of the graph: operations between them overlap with the message,
    in both passes.
    """

    def __init__(self, group: Group, received: list[int], sent: list[int]) -> None:
        self.group = group
        self.received = received
        self.sent = sent
        self.work = DONE
        self.gradient: Tensor | None = None

    def wait(self, rows: Tensor) -> Tensor:
        """Wait for the rows and return them."""
        return _Arrive.apply(rows, self)


class _Send(Node):
    @staticmethod
    def forward(ctx: Context, rows: Tensor, arrival: Arrival) -> Tensor:
        ctx.arrival = arrival
        received, arrival.work = all_to_all_async(
            rows, arrival.group, arrival.sent, arrival.received
        )
        return received

    @staticmethod
    def backward(ctx: Context, _: Tensor) -> tuple[Tensor | None, None]:
        gradient = ctx.arrival.gradient
        ctx.arrival.gradient = None
        ctx.arrival.work.wait()
        return gradient, None


class _Arrive(Node):
    @staticmethod
    def forward(ctx: Context, rows: Tensor, arrival: Arrival) -> Tensor:
        ctx.arrival = arrival
        arrival.work.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        arrival = ctx.arrival
        started = all_to_all_async(
            gradient.contiguous(), arrival.group, arrival.received, arrival.sent
        )
        arrival.gradient, arrival.work = started
        return gradient, None  # a placeholder of the expected shape: _Send returns what arrives


class _Sum(Node):
    """Sum of each token's rows; unlike a weighted sum, its backward pass does not need the rows."""

    @staticmethod
    def forward(ctx: Context, rows: Tensor, dispatch: Dispatch) -> Tensor:
        ctx.dispatch = dispatch
        ones = torch.ones(dispatch.positions.shape, dtype=torch.float32, device=rows.device)
        return dispatch.operators.unpermute(rows, dispatch.positions, ones)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        dispatch = ctx.dispatch
        return dispatch.operators.permute(gradient, dispatch.order, dispatch.positions), None


class _SendChoices(Node):
    """Send the weights and experts [n, k] for the sent rows; receive them for the received rows."""

    @staticmethod
    def forward(
        ctx: Context, weights: Tensor, experts: Tensor, dispatch: Dispatch
    ) -> tuple[Tensor, Tensor]:
        ctx.dispatch = dispatch
        both = torch.cat([weights.float().view(torch.int32), experts.int()], dim=1)
        received = all_to_all(both, dispatch.group, dispatch.sent, dispatch.received)
        weights, experts = received.chunk(2, dim=1)
        experts = experts.long()
        ctx.mark_non_differentiable(experts)
        return weights.contiguous().view(torch.float32), experts

    @staticmethod
    def backward(ctx: Context, gradient: Tensor, _: object) -> tuple[Tensor, None, None]:
        dispatch = ctx.dispatch
        gradient = gradient.contiguous()
        return all_to_all(gradient, dispatch.group, dispatch.received, dispatch.sent), None, None
