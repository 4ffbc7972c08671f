"""Attention in which keys and values rotate around the ranks of a ring (context_parallel.py).

Ring attention (Liu et al., arXiv 2310.01889) in the zig-zag order of chunks: at each step a rank
sends its current keys and values to the next rank, and computes with them while the previous rank's
arrive. Partial softmaxes are merged in fp32 by their log-sum-exps. In the backward pass keys and
values rotate once more. Their gradients, in fp32, follow one step behind and end up on the ranks
that own the keys.

A step consists of a few rectangles of queries and keys, without keys that no query sees: keys in
later chunks, outside a window or in other documents. A flash kernel computes a rectangle
(ring_flash.py); if no such kernel can, it is computed in blocks.

With n local rows of b samples, and g key-value heads of d entries of e bytes, a rank in a ring of r
ranks sends (r - 1) 2 n b g d e bytes in the forward pass, and (r - 1) 2 n b g d (e + 4) in the
backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.kernels.cost import Attention, counts_as
from megatron.kernels.ops import attention as kernel
from megatron.layers.attention import CoreAttention, padded
from megatron.layers.attention_blocked import (
    Weigher,
    add_product,
    add_sink,
    cut_heads,
    key_rows,
    put_rows,
    queries_at_once,
    query_rows,
    sink_gradient,
    transposed,
    weigher,
)
from megatron.layers.context import CallContext
from megatron.layers.context_parallel import ContextParallel
from megatron.layers.positions import Documents
from megatron.layers.ring_flash import Flash, Mask
from megatron.parallel.autograd import Context, Node
from megatron.parallel.topology import Group

_KEYS = 2048
"""Maximum number of keys in a block: its scores are the largest tensor of a step."""


class Rectangle(NamedTuple):
    """Queries and keys; only causality and the window hide any of these keys from a query.

    samples          range of the micro-batch's samples
    rows, keys       ranges of the local queries and of the step's keys
    query, key       positions of the first query and the first key in the sequence
    """

    samples: slice
    rows: slice
    keys: slice
    query: int
    key: int

    def mask(self, window: int) -> Mask:
        """Return the mask for queries that see `window` keys before their own position."""
        stop = self.query + self.rows.stop - self.rows.start
        high = self.key + self.keys.stop - self.keys.start
        cut = stop - 1 - self.key > window
        return self.query < high - 1, window - (stop - high) if cut else -1


@dataclass(frozen=True)
class Ring:
    """One attention over the ring.

    group, ring_size, stride  the context-parallel ranks, the ring's size, and the distance between
                              neighbours
    weigher                   turns the scores of all rectangles into weights
    flash                     kernels that compute a rectangle; None: it is computed in blocks
    documents                 documents within which tokens see each other; None: each sequence is
                              one document
    """

    group: Group
    ring_size: int
    stride: int
    weigher: Weigher
    documents: Documents | None
    flash: Flash | None = None

    @property
    def ring_rank(self) -> int:
        return self.group.rank // self.stride

    @property
    def params(self) -> kernel.AttentionParameters:
        return self.weigher.params

    def source(self, step: int) -> int:
        """Return the ring rank that owns the keys this rank has at a step."""
        return (self.ring_rank - step) % self.ring_size

    def rectangles(self, step: int, rows: int, samples: int) -> list[Rectangle]:
        """Return the rectangles of a step with `rows` local queries."""
        half = rows // 2
        last = 2 * self.ring_size - 1
        pairs = (
            (at, chunk, k_at, k_chunk)
            for at, chunk in ((0, self.ring_rank), (half, last - self.ring_rank))
            for k_at, k_chunk in ((0, self.source(step)), (half, last - self.source(step)))
            if k_chunk <= chunk
        )
        return [seen for pair in pairs for seen in self._seen(*pair, half, samples)]

    def _seen(
        self, row: int, chunk: int, column: int, key_chunk: int, half: int, samples: int
    ) -> Iterator[Rectangle]:
        """Yield the rectangles of a chunk of queries and a chunk of keys, each of `half` positions.

        The chunks start at local row `row` and at key `column` of the step.
        """
        query = chunk * half
        key = key_chunk * half
        window = self.params.window
        documents = [(slice(0, samples), 0, query + half)]
        if self.documents is not None:
            documents = self._documents(query, query + half)
        for which, start, end in documents:
            first = max(query, start)
            stop = min(query + half, end, key + half + window)
            low = max(key, start, kernel.first_key(first, window))
            high = min(key + half, stop)
            if low < high and first < stop:
                rows = slice(row + first - query, row + stop - query)
                keys = slice(column + low - key, column + high - key)
                yield Rectangle(which, rows, keys, first, low)

    def _documents(self, first: int, stop: int) -> list[tuple[slice, int, int]]:
        """Return sample, start and end of each document that has positions in [first, stop)."""
        intervals = []
        for sample, ends in enumerate(self._ends):
            begin, final = np.searchsorted(ends, (first, stop - 1), side="right").tolist()
            start = int(ends[begin - 1]) if begin else 0
            for end in ends[begin : final + 1].tolist():
                intervals.append((slice(sample, sample + 1), start, end))
                start = end
        return intervals

    @cached_property
    def _ends(self) -> list[npt.NDArray[np.int64]]:
        """Return the ends of the documents of each sample, as positions in the sample."""
        assert self.documents is not None, "there are no documents"
        ends = self.documents.lengths.cumsum()
        samples = self.documents.samples
        length = int(ends[-1]) // samples
        bounds = np.searchsorted(ends, length * np.arange(1, samples), side="right")
        return [of - i * length for i, of in enumerate(np.split(ends, bounds))]

    def blocks(self, step: int, q: Tensor) -> Iterator[RingBlock]:
        """Yield the blocks of a step's rectangles, for queries [n, b, groups, share, d]."""
        n, samples, groups, share, _ = q.shape
        size = queries_at_once(q)
        for of in self.rectangles(step, n, samples):
            for first in range(of.rows.start, of.rows.stop, size):
                rows = slice(first, min(first + size, of.rows.stop))
                query = of.query + first - of.rows.start
                last = query + rows.stop - rows.start
                low = max(of.key, kernel.first_key(query, self.params.window))
                high = min(of.key + of.keys.stop - of.keys.start, last)
                for key in range(low, high, _KEYS):
                    at = of.keys.start + key - of.key
                    keys = slice(at, at + min(_KEYS, high - key))
                    scores = (rows.stop - rows.start) * share * (keys.stop - keys.start)
                    for heads in cut_heads((of.samples.stop - of.samples.start) * groups, scores):
                        skipped = of.samples.start * groups
                        which = slice(skipped + heads.start, skipped + heads.stop)
                        of_rows = slice(rows.start * share, rows.stop * share)
                        yield RingBlock(
                            which, of_rows, keys, *self._numbers(rows.start, query, key)
                        )

    def products(self, step: int, q: Tensor) -> Iterator[tuple[slice, slice, slice, Mask]]:
        """Yield a step's rectangles: batch, rows and keys as in RingBlock, and the mask."""
        n, samples, groups, share, _ = q.shape
        for of in self.rectangles(step, n, samples):
            batch = slice(of.samples.start * groups, of.samples.stop * groups)
            rows = slice(of.rows.start * share, of.rows.stop * share)
            yield batch, rows, of.keys, of.mask(self.params.window)

    def _numbers(self, row: int, query: int, key: int) -> tuple[int, int]:
        """Return the positions of a block's first query and key for the kernels.

        Only their difference matters, so queries are numbered by local row, which keeps the tensors
        of `by_number` small. With dropout, however, the masks depend on the positions.
        """
        return (query, key) if self.params.probability else (row, key - (query - row))

    def by_number(self, x: Tensor) -> Tensor:
        """Return x [b groups, local rows * share], its rows numbered as in RingBlock."""
        if not self.params.probability:
            return x
        numbered = x.new_zeros(len(x), x.shape[1] * self.ring_size)
        for i, half in enumerate(x.chunk(2, dim=1)):
            chunk = self.ring_rank if i == 0 else 2 * self.ring_size - 1 - self.ring_rank
            numbered[:, chunk * half.shape[1] :][:, : half.shape[1]] = half
        return numbered

    def keys_of_step(self, rows: int) -> int:
        """Return the average number of keys per local query and step, for cost.Attention."""
        return min(rows, -(-(self.params.window + 1) // self.ring_size))

    def rotate(self, x: Tensor) -> Rotation:
        """Start sending x to the next ring rank and receiving the previous rank's."""
        ranks = self.group.ranks
        size = self.group.size
        stride = self.stride
        to, source = ((self.group.rank + step) % size for step in (stride, -stride))
        return Rotation(self.group, x, ranks[to], ranks[source])


class RingBlock(NamedTuple):
    """Queries and keys of one matrix product.

    batch        range of samples times groups
    rows, keys   ranges of the queries [.., rows * share, d] and of the keys [.., n, d]
    first, key   positions of the first query and the first key, as passed to the kernels
    """

    batch: slice
    rows: slice
    keys: slice
    first: int
    key: int

    def of_rows(self, share: int) -> tuple[slice, slice]:
        """Return the range of the block's rows in a tensor from `by_number`."""
        return self.batch, slice(
            self.first * share, self.first * share + self.rows.stop - self.rows.start
        )


class Rotation:
    """Messages in progress: one to the next ring rank, and one from the previous rank."""

    def __init__(self, group: Group, x: Tensor, to: int, source: int) -> None:
        self._group = group
        self._sent = x
        self._source = source
        self._received = torch.empty_like(x)
        self._enter()
        self._works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, to, group=group.handle),
                dist.P2POp(dist.irecv, self._received, source, group=group.handle),
            ]
        )
        group.flight.leave()

    def _enter(self) -> None:
        x = self._sent
        group = self._group
        group.flight.enter(b"exchange", group.kind, x.nbytes, x.is_cpu, peer=self._source)

    def wait(self) -> Tensor:
        """Return the tensor that the previous rank sent."""
        self._enter()
        for work in self._works:
            work.wait()
        self._group.flight.leave()
        return self._received


class _Ring(Node):
    """Attention out [n, b, groups, share, d] for q of that shape, and k and v [n, b, groups, d].

    sink  see Scoring
    """

    @staticmethod
    def forward(
        ctx: Context, ring: Ring, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None
    ) -> Tensor:
        n, b, groups, share, d = q.shape
        operators, slopes, params = ring.weigher
        flash = ring.flash
        wide = torch.promote_types(q.dtype, torch.float32)
        queries = query_rows(q)
        pairs = torch.stack([key_rows(k), key_rows(v)])
        total = queries.new_zeros(queries.shape, dtype=wide)
        sums = total.new_full(queries.shape[:2], -math.inf)
        new = ring.by_number(torch.zeros_like(sums))
        work = Attention(b, groups * share, n, d, keys=ring.keys_of_step(n))
        for step in range(ring.ring_size):
            coming = ring.rotate(pairs) if step + 1 < ring.ring_size else None
            with counts_as(work):
                if flash is not None:
                    for batch, rows, keys, mask in ring.products(step, q):
                        some = queries[batch, rows], pairs[:, batch, keys]
                        out, logarithms, ctx.state = flash.forward(*some, mask)
                        _merge(total[batch, rows], sums[batch, rows], out, logarithms)
                else:
                    for block in ring.blocks(step, q):
                        batch, rows, keys, first, key = block
                        scores = torch.bmm(queries[batch, rows], transposed(pairs[0, batch, keys]))
                        operators.weights(
                            kernel.AttentionBlock(
                                scores, new, slopes, batch.start, first, key, params
                            )
                        )
                        out = torch.bmm(scores, pairs[1, batch, keys])
                        _merge(
                            total[batch, rows], sums[batch, rows], out, new[block.of_rows(share)]
                        )
            if coming is not None:
                pairs = coming.wait()
        add_sink(total, sums, sink, b)
        out = _of_rows(total, q)
        ctx.save_for_backward(q, k, v, out, sums, sink)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Context, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums, sink = ctx.saved_tensors
        ring: Ring = ctx.ring
        n, b, groups, share, d = q.shape
        operators, slopes, params = ring.weigher
        flash = ring.flash
        dout = dout.contiguous()
        queries = query_rows(q)
        douts = query_rows(dout)
        pairs = torch.stack([key_rows(k), key_rows(v)])
        dsink: Tensor | None = None
        if flash is None or sink is not None:
            dots = query_rows(operators.dots(dout, out).unsqueeze(-1)).squeeze(-1).contiguous()
        if sink is not None:
            dsink = sink_gradient(sink, sums, dots, b)
        if flash is not None:
            outs = query_rows(out)
        else:
            dots = ring.by_number(dots)
            sums = ring.by_number(sums)
        to_queries = torch.zeros_like(queries, dtype=sums.dtype)
        work = Attention(b, groups * share, n, d, True, ring.keys_of_step(n))
        # gradients of this rank's own pairs, and of those of the previous step; set in the loop
        local = following = sums
        for step in range(ring.ring_size):
            coming = ring.rotate(pairs) if step + 1 < ring.ring_size else None
            behind = ring.rotate(following) if step > 1 else None
            gradients = torch.zeros_like(pairs, dtype=sums.dtype)
            with counts_as(work):
                if flash is not None:
                    for batch, rows, keys, mask in ring.products(step, q):
                        some = douts[batch, rows], queries[batch, rows], pairs[:, batch, keys]
                        of_all = outs[batch, rows], sums[batch, rows]
                        dq, dk, dv = flash.backward(*some, *of_all, mask, ctx.state)
                        gradients[0, batch, keys].add_(dk)
                        gradients[1, batch, keys].add_(dv)
                        to_queries[batch, rows].add_(dq)
                else:
                    for batch, rows, keys, first, key in ring.blocks(step, q):
                        scores = torch.bmm(queries[batch, rows], transposed(pairs[0, batch, keys]))
                        dscores = torch.bmm(douts[batch, rows], transposed(pairs[1, batch, keys]))
                        fields = sums, slopes, batch.start, first, key
                        operators.gradient(
                            kernel.GradientBlock(scores, *fields, params, dscores, dots)
                        )
                        turned = dscores.transpose(1, 2)
                        weights = scores.transpose(1, 2)
                        add_product(gradients[0, batch, keys], turned, queries[batch, rows], False)
                        add_product(gradients[1, batch, keys], weights, douts[batch, rows], False)
                        add_product(to_queries[batch, rows], dscores, pairs[0, batch, keys], False)
            if behind is not None:
                gradients += behind.wait()
            if step:
                following = gradients
            else:
                local = gradients
            if coming is not None:
                pairs = coming.wait()
        local += ring.rotate(following).wait()
        to_keys, to_values = (_of_rows(x, k.unsqueeze(3)).squeeze(3) for x in local.unbind())
        return None, _of_rows(to_queries, q), to_keys, to_values, dsink


def _of_rows(rows: Tensor, like: Tensor) -> Tensor:
    """Return rows [b groups, n share, d] in shape and dtype of `like` [n, b, groups, share, d]."""
    return put_rows(torch.empty(like.shape, dtype=like.dtype, device=like.device), rows)


def _merge(total: Tensor, sums: Tensor, out: Tensor, new: Tensor) -> None:
    """Merge output and log-sum-exp for more keys into `total` [.., d] and `sums` [..].

    `new` is +infinity for a row that sees none of these keys.
    """
    new = new.masked_fill(new == math.inf, -math.inf)
    both = torch.logaddexp(sums, new)
    shift = both.masked_fill(both == -math.inf, 0.0)
    total.mul_((sums - shift).exp_().unsqueeze(-1))
    total.addcmul_(out.to(total.dtype), (new - shift).exp_().unsqueeze(-1))
    sums.copy_(both)


def attend(
    context_parallel: ContextParallel,
    core: CoreAttention,
    call: CallContext,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Return attention over full sequences; each rank passes its own rows.

    q [s/c, b, heads, d], k and v [s/c, b, kv heads, d] -> [s/c, b, heads, d]. v, and then the
    result, may have a smaller d; in messages it does not.
    """
    width = v.shape[-1]
    v = padded(v, k.shape[-1])
    if context_parallel.heads > 1:
        q, k, v = context_parallel.rows_for_heads(q, k, v)
    if context_parallel.ring_size == 1:
        count = q.shape[2]
        first = context_parallel.head_rank * q.shape[2]
        out = core.within(call, slice(first, first + count), q, k, v)
    else:
        out = _rotating(context_parallel, core, call, q, k, v)
    out = out if context_parallel.heads == 1 else context_parallel.heads_for_rows(out)
    return out[..., :width]


def _rotating(
    context_parallel: ContextParallel,
    core: CoreAttention,
    call: CallContext,
    q: Tensor,
    k: Tensor,
    v: Tensor,
) -> Tensor:
    """Return attention for q, k and v of this ring rank's two chunks, by the ring."""
    q = q.unflatten(2, (k.shape[2], -1))
    length = len(q) * context_parallel.ring_size
    scoring = core.scoring_of(call, length)
    weighs = weigher(scoring, q, torch.arange(q.shape[1], device=q.device), length)
    ring = Ring(
        context_parallel.group,
        context_parallel.ring_size,
        context_parallel.heads,
        weighs,
        call.documents,
    )
    if core.attention != "blocked":
        ring = replace(ring, flash=Flash(core.attention, *weighs.params[:2], weighs.params.cap))
    return core.recomputed(partial(_Ring.apply, ring), q, k, v, scoring.sink).flatten(2, 3)
