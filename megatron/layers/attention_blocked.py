"""Attention in blocks of queries whose scores fit in cache; the largest products for QK-clip."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.config.parallel import TILE
from megatron.kernels import choose
from megatron.kernels.cost import Attention, counts_as
from megatron.kernels.ops import attention as kernel
from megatron.layers.attention_unfused import PLAIN, Scoring
from megatron.parallel.autograd import Context, Node

# Approximate number of scores stored at once, however many heads and samples there are: a buffer of
# 8 MiB in 16 bits. More are stored if all threads would otherwise not have work (cut_heads).
_SCORES = 1 << 22
_FEWER_KERNELS = 512


class Weigher(NamedTuple):
    """Operators that turn a block's scores into weights, and their arguments.

    slopes  of ALiBi, fp32 [heads], or None
    """

    operators: kernel.AttentionOperators
    slopes: Tensor | None
    params: kernel.AttentionParameters


def weigher(scoring: Scoring, q: Tensor, starts: Tensor, positions: int) -> Weigher:
    """Return the weigher of queries q [n, b, groups, share, d]; see Scoring.params."""
    fused = scoring.fusions.attention_block and q.dtype != torch.float64
    slopes = None if scoring.alibi is None else scoring.alibi.slopes
    operators = kernel.KERNELS if fused else kernel.REFERENCES
    return Weigher(operators, slopes, scoring.params(q, starts, positions))


def block_length(length: int, dtype: torch.dtype) -> int:
    """Return the number of positions in a block: a multiple of the kernel's tile."""
    return choose.block_length(str(dtype).removeprefix("torch."), length)


def query_rows(x: Tensor) -> Tensor:
    """Reshape [s, b, groups, share, d] to [b groups, s share, d].

    The result is a view if the strides allow it, which they seldom do unless share is 1.
    """
    return x.permute(1, 2, 0, 3, 4).reshape(x.shape[1] * x.shape[2], -1, x.shape[4])


def key_rows(x: Tensor) -> Tensor:
    """Reshape [s, b, groups, d] to [b groups, s, d]: a view if the strides allow it."""
    return x.permute(1, 2, 0, 3).flatten(0, 1)


def transposed(x: Tensor) -> Tensor:
    """Transpose [n, keys, d] to [n, d, keys], as the second matrix of a product.

    x is made contiguous first if copies_keys says so for its dtype. That is a rule for CPUs, but it
    applies on a GPU, too.
    """
    copied = choose.copies_keys(str(x.dtype).removeprefix("torch."))
    return (x.contiguous() if copied else x).transpose(1, 2)


def queries_at_once(x: Tensor) -> int:
    """Return the number of queries in a block of x [s, ..].

    On a GPU smaller matrix products would take no less time than a kernel launch.
    """
    return block_length(len(x), x.dtype) if x.device.type == "cpu" else _FEWER_KERNELS


def _most_scores(block: int, length: int, share: int, window: int) -> int:
    """Return the maximum number of scores in a block, per sample and group."""
    return min(block, length) * share * min(length, block + window + TILE)


def cut_heads(count: int, scores: int) -> list[slice]:
    """Divide `count` pairs of sample and group into batches of about _SCORES scores.

    `scores` is the number of scores of one pair. Every batch but the last has at least one pair for
    each thread, even if that makes more scores.
    """
    size = min(count, max(_SCORES // scores, torch.get_num_threads()))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def put_rows(out: Tensor, rows: Tensor) -> Tensor:
    """Copy rows [b groups, s share, d] into out [s, b, groups, share, d]."""
    s, b, groups, share, d = out.shape
    return out.copy_(rows.view(b, groups, s, share, d).permute(2, 0, 1, 3, 4))


class _RowView:
    """A tensor [s, b, groups, share, d] to be written as rows.

    The rows are a view of it if share is 1 and its strides allow one, otherwise a buffer that `put`
    copies back.
    """

    def __init__(self, target: Tensor) -> None:
        s, b, groups, share, d = target.shape
        merge = share == 1 and (1 in (b, groups) or target.stride(1) == groups * target.stride(2))
        self.target = target
        self.apart = not merge
        self.rows = query_rows(target) if merge else target.new_empty(b * groups, s * share, d)

    def put(self) -> None:
        """Copy the rows into the tensor, unless they are a view of it."""
        if self.apart:
            put_rows(self.target, self.rows)


def _put_product(out: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute out = a b.

    MKL's batched matrix product in fp32 needs contiguous results: for strided results torch
    multiplies one matrix at a time, at two thirds of the speed, which costs more than a copy.
    """
    if out.is_contiguous() or out.dtype != torch.float32 or out.device.type != "cpu":
        torch.bmm(a, b, out=out)
    else:
        out.copy_(torch.bmm(a, b))


def _rows_of_sink(sink: Tensor, like: Tensor, samples: int) -> Tensor:
    """Return sink [heads] for each row of `like` [b groups, s share], b samples."""
    by_group = sink.view(len(like) // samples, 1, -1)
    rows = like.shape[1] // by_group.shape[-1]
    return by_group.to(like.dtype).repeat(samples, rows, 1).flatten(1)


def add_sink(out: Tensor, logarithms: Tensor, sink: Tensor | None, samples: int) -> None:
    """Add a key with the value 0 and the logits `sink` [heads] to attention, in place.

    out         [b groups, s share, d]
    logarithms  logarithms of the softmax's denominators, [b groups, s share]
    """
    if sink is None:
        return
    total = torch.logaddexp(logarithms, _rows_of_sink(sink, logarithms, samples))
    out.mul_((logarithms - total).exp_().unsqueeze(-1))
    logarithms.copy_(total)


def sink_gradient(sink: Tensor, logarithms: Tensor, dots: Tensor, samples: int) -> Tensor:
    """Return the gradient of sink [heads]: minus the sum of its weight times dots.

    logarithms, dots  of all denominators, and of products of output and its gradient, both
                      [b groups, s share]
    """
    weights = (_rows_of_sink(sink, logarithms, samples) - logarithms).exp_()
    share = len(sink) * samples // len(dots)
    by_head = (weights * dots).view(samples, -1, dots.shape[1] // share, share)
    return by_head.sum((0, 2)).neg_().flatten().to(sink.dtype)


def add_product(total: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
    """Compute total = a b if `fresh`, otherwise total += a b.

    With 16-bit factors, total is fp32 and the product is rounded to 16 bits before it is added.
    """
    if total.dtype == a.dtype and total.device.type != "cpu":
        torch.baddbmm(total, a, b, beta=0.0 if fresh else 1.0, out=total)
    elif fresh:
        total.copy_(torch.bmm(a, b))
    else:
        total.add_(torch.bmm(a, b))


def _split(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [.., groups, share, d], k and v [.., groups, d] from one or three tensors.

    A single tensor is the fused projection (blocked_attention).
    """
    if len(tensors) == 1:
        (mixed,) = tensors
        return mixed[..., :-2, :], mixed[..., -2, :], mixed[..., -1, :]
    q, k, v = tensors
    return q.unflatten(2, (k.shape[2], -1)), k, v


class _Attention(Node):
    """Attention [s, b, groups, share, d] for q, k and v from _split(tensors), with a sink [heads].

    v, and then the result, may have another d. The gradients have the shapes of the tensors.
    """

    @staticmethod
    def forward(ctx: Context, weigher: Weigher, sink: Tensor | None, *tensors: Tensor) -> Tensor:
        q, k, v = _split(tensors)
        operators, slopes, params = weigher
        s, b, groups, share, d = q.shape
        # All blocks count as one attention pass, and their rate is measured together.
        keys_seen = min(s, params.window + 1)
        mean = (d + v.shape[-1]) // 2
        with counts_as(Attention(b, groups * share, s, mean, keys=keys_seen)):
            out = q.new_empty(*q.shape[:-1], v.shape[-1])
            queries = query_rows(q)
            keys = key_rows(k)
            values = key_rows(v)
            result = _RowView(out)
            logarithms = q.new_empty(
                b * groups, s * share, dtype=torch.promote_types(q.dtype, torch.float32)
            )
            block = block_length(s, q.dtype)
            most = _most_scores(block, s, share, params.window)
            batches = cut_heads(b * groups, most)
            buffer = q.new_empty(batches[0].stop * most)
            for batch in batches:
                for first in range(0, s, block):
                    last = min(first + block, s)
                    key = kernel.first_key(first, params.window)
                    rows = slice(first * share, last * share)
                    shape = batch.stop - batch.start, (last - first) * share, last - key
                    scores = buffer[: math.prod(shape)].view(shape)
                    torch.bmm(queries[batch, rows], transposed(keys[batch, key:last]), out=scores)
                    operators.weights(
                        kernel.AttentionBlock(
                            scores, logarithms, slopes, batch.start, first, None, params
                        )
                    )
                    _put_product(result.rows[batch, rows], scores, values[batch, key:last])
            add_sink(result.rows, logarithms, sink, b)
            result.put()
        ctx.save_for_backward(out, logarithms, sink, *tensors)
        ctx.weigher = weigher
        return out

    @staticmethod
    def backward(ctx: Context, dout: Tensor) -> tuple[Tensor | None, ...]:
        out, logarithms, sink, *tensors = ctx.saved_tensors
        gradients = tuple(torch.empty_like(x) for x in tensors)
        q, k, v = _split(tuple(tensors))
        dq, dk, dv = _split(gradients)
        operators, slopes, params = ctx.weigher
        s, b, groups, share, d = q.shape
        keys_seen = min(s, params.window + 1)
        mean = (d + v.shape[-1]) // 2
        dsink: Tensor | None = None
        with counts_as(Attention(b, groups * share, s, mean, True, keys_seen)):
            dout = dout.contiguous()
            dots = query_rows(operators.dots(dout, out).unsqueeze(-1)).squeeze(-1).contiguous()
            if sink is not None:
                dsink = sink_gradient(sink, logarithms, dots, b)
            queries = query_rows(q)
            keys = key_rows(k)
            values = key_rows(v)
            douts = query_rows(dout)
            to_queries, to_keys, to_values = (
                _RowView(x) for x in (dq, dk.unsqueeze(3), dv.unsqueeze(3))
            )
            block = block_length(s, q.dtype)
            most = _most_scores(block, s, share, params.window)
            batches = cut_heads(b * groups, most)
            buffers = q.new_empty(2, batches[0].stop * most)
            narrow = q.dtype in (torch.float16, torch.bfloat16)
            sums = (
                q.new_empty(batches[0].stop, s * share, d, dtype=torch.float32) if narrow else None
            )
            # Each block of queries, of their output gradients and of keys is used in two matrix
            # products, and oneDNN would copy a non-contiguous input for each of them.
            packs = narrow and q.device.type == "cpu"
            for batch in batches:
                n = batch.stop - batch.start
                total = to_queries.rows[batch] if sums is None else sums[:n]
                written = 0  # rows of `total` written so far
                for first in range(0, s, block):
                    last = min(first + block, s)
                    row = first * share
                    end = min(last + params.window, s) * share
                    keys_here = (batch, slice(first, last))
                    rows = (batch, slice(row, end))
                    shape = n, end - row, last - first
                    scores, dscores = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
                    block_of = queries[rows], douts[rows], keys[keys_here]
                    some_queries, some_douts, some_keys = (
                        x.contiguous() if packs else x for x in block_of
                    )
                    torch.bmm(some_queries, transposed(some_keys), out=scores)
                    torch.bmm(some_douts, transposed(values[keys_here]), out=dscores)
                    fields = logarithms, slopes, batch.start, first, first
                    operators.gradient(kernel.GradientBlock(scores, *fields, params, dscores, dots))
                    _put_product(to_values.rows[keys_here], scores.transpose(1, 2), some_douts)
                    _put_product(to_keys.rows[keys_here], dscores.transpose(1, 2), some_queries)
                    for at, stop, fresh in ((row, written, False), (max(row, written), end, True)):
                        if at < stop:
                            some = dscores[:, at - row : stop - row]
                            add_product(total[:, at:stop], some, some_keys, fresh)
                    written = end
                if sums is not None:
                    to_queries.rows[batch] = total
            for result in (to_queries, to_keys, to_values):
                result.put()
        return None, dsink, *gradients


def blocked_attention(tensors: tuple[Tensor, ...], scoring: Scoring = PLAIN) -> Tensor:
    """Return attention [s, b, heads, d], causal and within documents, as `scoring` specifies.

    tensors    the projection [s, b, groups, queries + 2, d] alone, in which a group's queries come
               before its key and its value; or q [s, b, heads, d], k and v [s, b, groups, d]
    """
    q, k, v = _split(tensors)
    positions, samples = q.shape[:2]
    if scoring.dropout >= 1.0:
        return (q * 0.0 + k.unsqueeze(3) * 0.0).flatten(2, 3)[..., : v.shape[-1]]
    documents = scoring.documents
    if documents is None:
        starts = torch.arange(samples, device=q.device)
        of_all = weigher(scoring, q, starts, positions)
        return _Attention.apply(of_all, scoring.sink, *tensors).flatten(2, 3)
    outs = []
    for starts, *batch in zip(
        documents.starts, *(documents.batches(x) for x in tensors), strict=True
    ):
        of_batch = weigher(scoring, q, starts, positions)
        out = _Attention.apply(of_batch, scoring.sink, *(x.transpose(0, 1) for x in batch))
        outs.append(out.transpose(0, 1).flatten(0, 1))
    rows = torch.cat(outs).index_select(0, documents.groups.scatter)
    return rows.view(positions, samples, -1, rows.shape[-1])


@torch.no_grad()
def update_largest(
    largest: Tensor,
    tensors: tuple[Tensor, ...],
    scoring: Scoring,
    padding: Tensor | None = None,
) -> None:
    """Raise `largest` [heads] to the largest scaled product of a query and a key it sees.

    tensors  as in blocked_attention
    padding  bool [b, s]: True for queries that do not count; None: all count

    The products are taken before soft cap and ALiBi, block by block: no scores [s, s] are stored,
    whichever implementation computes attention. The cost is half that of attention's forward pass.
    """
    q, k, _ = _split(tensors)
    s, b, groups, share, _ = q.shape
    queries = query_rows(q)
    keys = key_rows(k)
    window = scoring.window
    positions = torch.arange(s, device=q.device)
    document = None
    if (documents := scoring.documents) is not None:
        rows = torch.arange(s * b, device=q.device)
        document = torch.searchsorted(documents.cu_seqlens, rows, right=True).view(b, s)
        document = document.repeat_interleave(groups, dim=0)
    if padding is not None:
        padding = padding.repeat_interleave(groups, dim=0)
    block = queries_at_once(q)
    maxima = largest.new_empty(b * groups, share).fill_(float("-inf"))
    for batch in cut_heads(b * groups, _most_scores(block, s, share, window)):
        for first in range(0, s, block):
            last = min(first + block, s)
            key = kernel.first_key(first, window)
            products = torch.bmm(
                queries[batch, first * share : last * share], transposed(keys[batch, key:last])
            ).unflatten(1, (last - first, share))
            # All keys before the block are visible, unless there are windows or documents.
            start = first if document is None and window >= s else key
            behind = positions[first:last].unsqueeze(1) - positions[start:last]
            hidden = ((behind < 0) | (behind > window)).unsqueeze(0)
            if document is not None:
                queried = document[batch, first:last]
                seen = document[batch, start:last]
                hidden = hidden | (queried.unsqueeze(2) != seen.unsqueeze(1))
            products[..., start - key :].masked_fill_(hidden.unsqueeze(2), float("-inf"))
            if padding is not None:
                rows = padding[batch, first:last, None, None]
                products.masked_fill_(rows, float("-inf"))
            torch.maximum(maxima[batch], products.amax(dim=(1, 3)).float(), out=maxima[batch])
    of_heads = maxima.view(b, groups * share).amax(0) * scoring.factor(q.shape[-1])
    torch.maximum(largest, of_heads, out=largest)
