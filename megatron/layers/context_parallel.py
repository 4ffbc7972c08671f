"""Context parallelism: each rank holds a slice of every sequence, and attention sees all of it.

The c ranks of a context group form a ring of r ring ranks, each made up of h neighbouring ranks:
c = r h. Ring rank i holds chunks i and 2 r - 1 - i of the 2 r equal chunks of a sequence, so that
causal attention is the same amount of work for all. Its h ranks divide these rows further, in
order. For attention the h ranks exchange parts of the sequence for attention heads (all-to-all;
Jacobs et al., arXiv 2309.14509, section 3), then the keys and values rotate around the r ring ranks
(ring.py). With h = 1 there is only the ring ("p2p"), with h = c only the all-to-all ("a2a").
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel import collectives
from megatron.parallel.autograd import Context, Node
from megatron.parallel.keyed_random import DropoutKey, RowLayout
from megatron.parallel.topology import Group


@dataclass(frozen=True)
class ContextParallel:
    """This rank's slice of each sequence.

    group   the context-parallel ranks
    heads   number of neighbouring ranks that exchange parts of the sequence for attention heads (h
            above); it divides the group's size
    attend  attention within full sequences, which CoreAttention calls: ring.attend
    """

    group: Group
    heads: int = 1
    attend: Callable[..., Tensor] | None = None
    _cached: dict[tuple[int, torch.device], Tensor] = field(default_factory=dict, repr=False)

    @property
    def size(self) -> int:
        """Return the number of ranks that share a sequence."""
        return self.group.size

    @property
    def ring_size(self) -> int:
        """Return the number of ring ranks (r above)."""
        return self.group.size // self.heads

    @property
    def ring_rank(self) -> int:
        """Return this rank's index in the ring."""
        return self.group.rank // self.heads

    @property
    def head_rank(self) -> int:
        """Return this rank's index among the h neighbouring ranks that exchange heads."""
        return self.group.rank % self.heads

    def starts(self, length: int, shard: int = 0, shards: int = 1) -> list[int]:
        """Return the first position of this rank's rows in a sequence of `length` tokens.

        If the rows come from both chunks of this ring rank, return the first position of each
        half. `shard` selects one of `shards` equal shards of the rows, in order.

        >>> ContextParallel(Group(range(4), 1)).starts(16)
        [2, 12]
        >>> ContextParallel(Group(range(4), 3), heads=2).starts(16)
        [8]
        """
        half = length // (2 * self.ring_size)
        rows = 2 * half // (self.heads * shards)
        first = (self.head_rank * shards + shard) * rows
        second = length - (self.ring_rank + 1) * half  # the start of the later chunk
        if first >= half:
            return [second + first - half]
        start = self.ring_rank * half + first
        return [start] if first + rows <= half else [start, second]

    def cut(self, x: Tensor) -> Tensor:
        """Return this rank's slice [b, s/c] of x [b, s]."""
        starts = self.starts(x.shape[1])
        rows = x.shape[1] // self.size // len(starts)
        slices = [x[:, start : start + rows] for start in starts]
        return slices[0] if len(slices) == 1 else torch.cat(slices, dim=1)

    def positions(self, length: int, device: torch.device) -> Tensor:
        """Return the positions of this rank's rows in sequences of `length` tokens, int64 [s/c].

        All layers share one tensor.
        """
        key = length, device
        if key not in self._cached:
            if len(self._cached) > 3:  # evaluations have sequences of many lengths
                self._cached.clear()
            self._cached[key] = self.cut(torch.arange(length, device=device).unsqueeze(0))[0]
        return self._cached[key]

    def gather(self, x: Tensor) -> Tensor:
        """Gather the slices x [b, s/c] of all ranks: [b, s], without gradients."""
        length = x.shape[1] * self.size
        every = collectives.gather_first(x.t().contiguous(), self.group)  # by rank, [s, b]
        order = collectives.gather_first(self.positions(length, x.device), self.group)
        full = torch.empty_like(every)
        full[order] = every
        return full.t()

    def hidden_layouts(
        self, key: DropoutKey, x: Tensor, shard: int, shards: int
    ) -> list[RowLayout]:
        """Return the row layouts of x [s/c(/tp), b, h], one of `shards` shards of this rank's rows.

        x counts as one head.
        """
        rows, samples = x.shape[:2]
        length = rows * shards * self.size
        return [
            RowLayout(key.sample * length + start, samples, 1, length, length, length, key.samples)
            for start in self.starts(length, shard, shards)
        ]

    def rows_for_heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return all rows [h s/c, b, heads/h, d] of this rank's shard of the heads.

        If h does not divide the number of key-value heads, each of them is sent to several ranks.
        """
        n = self.heads
        if (copies := n // math.gcd(n, k.shape[2])) > 1:
            k, v = (x.repeat_interleave(copies, dim=2) for x in (k, v))
        # [h, s/c, b, q, k and v heads/h, d], in one copy
        fused = torch.cat([x.unflatten(2, (n, -1)).movedim(2, 0) for x in (q, k, v)], dim=3)
        received = self._exchanged(fused).flatten(0, 1)
        return tuple(received.split([q.shape[2] // n, k.shape[2] // n, v.shape[2] // n], dim=2))

    def heads_for_rows(self, out: Tensor) -> Tensor:
        """Return this rank's rows, all heads [s/c, b, heads, d], of out [h s/c, b, heads/h, d]."""
        return self._exchanged(out.unflatten(0, (self.heads, -1))).movedim(0, 2).flatten(2, 3)

    def _exchanged(self, x: Tensor) -> Tensor:
        """Send x[i] to the i-th rank that exchanges heads; return what each of them sent."""
        return _AllToAll.apply(x, self)


class _AllToAll(Node):
    """All-to-all: rank i's x[j] becomes rank j's x[i]. The gradient is the same all-to-all."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, context_parallel: ContextParallel) -> Tensor:
        ctx.context_parallel = context_parallel
        return _all_to_all(x, context_parallel)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(gradient, ctx.context_parallel), None


def _all_to_all(x: Tensor, context_parallel: ContextParallel) -> Tensor:
    group = context_parallel.group
    x = x.contiguous()
    received = torch.empty_like(x)
    # The other ranks of the context group send and receive nothing: no further group is needed.
    partners = [
        rank // context_parallel.heads == context_parallel.ring_rank for rank in range(group.size)
    ]
    counts = [] if all(partners) else [[int(is_local) for is_local in partners]] * 2
    send = dist.all_to_all_single
    collectives.start(b"all_to_all", group, x.nbytes, send, received, x, *counts).wait()
    return received
