"""Causal attention in blocks: matrix products of many heads at once, with one pass over the scores
between them.

Scores exist for one block only: of queries with all keys that they see in the forward pass, of keys
with all queries that see them in the backward pass, which recomputes them from the logarithms that
were kept (Dao et al., arXiv 2205.14135; the order of loops of algorithm 4). Nothing above the
blocks of the diagonal is computed. So memory grows with the sequence, not with its square, and on a
CPU the products are as fast as large ones.

Queries, keys and values are read in the projection, and their gradients are written in its layout.
Products accumulate in fp32; in 16 bits the scores are rounded to the format, as in the explicit
softmax, and the gradient of the queries, the only one with a term from each block, is accumulated
in fp32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kernels.ops import attention as kernel
from megatron.kernels.work import Attention, Scope, counts_as
from megatron.layers.positions import Documents
from megatron.parallel.random import DropoutKey, Place

# Measured on a CPU, sequences of 512 to 2048, heads of 64 and 128: smaller blocks skip more above
# the diagonal, larger ones make faster products, which matters more in 16 bits.
_LEAST = {torch.float32: 64}
_LEAST_16_BIT, _MOST_TIMES, _BLOCKS = 128, 2, 8
# Scores of this many elements at once: a buffer of some MiB however many heads and samples there
# are.
_SCORES = 1 << 22


Settings = tuple[Tensor | None, bool, kernel.Law]
"""Slopes of ALiBi, fp32 [heads] or None; whether the kernels compute; scale and dropout, as the
kernels take them.
"""


def block_length(length: int, dtype: torch.dtype) -> int:
    """Return the positions of a block: a whole number of the kernel's tiles, at most twice the
    least.
    """
    least = _LEAST.get(dtype, _LEAST_16_BIT)
    wished = -(-length // (_BLOCKS * kernel.TILE)) * kernel.TILE
    return max(least, min(wished, _MOST_TIMES * least))


def _rows(x: Tensor) -> Tensor:
    """Reshape [s, b, groups, share, d] to [b groups, s share, d]: a view if share is 1, else a
    copy.
    """
    return x.permute(1, 2, 0, 3, 4).reshape(x.shape[1] * x.shape[2], -1, x.shape[4])


def _heads(x: Tensor) -> Tensor:
    """Reshape [s, b, groups, d] to [b groups, s, d]: a view if their strides allow."""
    return x.permute(1, 2, 0, 3).flatten(0, 1)


def _transposed(x: Tensor) -> Tensor:
    """Transpose [n, keys, d] to [n, d, keys], as the second matrix of a product.

    In 16 bits torch's product is at full speed with a transposed matrix only where it is the whole
    of a tensor.
    """
    return (x if x.dtype == torch.float32 else x.contiguous()).transpose(1, 2)


def _parts(count: int, scores: int) -> list[slice]:
    """Divide samples and groups into parts of about _SCORES scores, but with work for every
    thread.
    """
    size = min(count, max(_SCORES // scores, torch.get_num_threads()))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


class _Rows:
    """A tensor [s, b, groups, share, d] to be written as rows: in place if its strides allow, else
    in a copy.
    """

    def __init__(self, place: Tensor) -> None:
        s, b, groups, share, d = place.shape
        merge = share == 1 and (1 in (b, groups) or place.stride(1) == groups * place.stride(2))
        self.place, self.apart = place, not merge
        self.rows = _rows(place) if merge else place.new_empty(b * groups, s * share, d)

    def put(self) -> None:
        """Copy the rows to their place."""
        if self.apart:
            s, b, groups, share, d = self.place.shape
            self.place.copy_(self.rows.view(b, groups, s, share, d).permute(2, 0, 1, 3, 4))


def _forward(q: Tensor, k: Tensor, v: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Map q [s, b, groups, share, d], k and v [s, b, groups, d] to (out like q, logarithms [b
    groups, s share]).
    """
    slopes, fused, law = settings
    s, b, groups, share, _ = q.shape
    out = q.new_empty(q.shape)
    queries, keys, values, result = _rows(q), _heads(k), _heads(v), _Rows(out)
    logarithms = q.new_empty(
        b * groups, s * share, dtype=torch.promote_types(q.dtype, torch.float32)
    )
    weights = kernel.attention_weights_ if fused else kernel.weights_reference
    block = block_length(s, q.dtype)
    parts = _parts(b * groups, min(block, s) * share * s)
    buffer = q.new_empty(parts[0].stop * min(block, s) * share * s)
    for part in parts:
        for first in range(0, s, block):
            last = min(first + block, s)
            rows, shape = (
                slice(first * share, last * share),
                (part.stop - part.start, (last - first) * share, last),
            )
            scores = buffer[: math.prod(shape)].view(shape)
            torch.bmm(queries[part, rows], _transposed(keys[part, :last]), out=scores)
            weights(scores, logarithms, slopes, part.start, first, *law)
            torch.bmm(scores, values[part, :last], out=result.rows[part, rows])
    result.put()
    return out, logarithms


def _backward(
    dout: Tensor,
    out: Tensor,
    logarithms: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    settings: Settings,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Fill dq, dk and dv; dout and out are like q, contiguous."""
    slopes, fused, law = settings
    s, b, groups, share, d = q.shape
    gradient = kernel.attention_gradient_ if fused else kernel.gradient_reference
    row_dots = kernel.row_dots if fused else kernel.dots_reference
    dots = _rows(row_dots(dout, out).unsqueeze(-1)).squeeze(-1).contiguous()
    queries, keys, values, douts = _rows(q), _heads(k), _heads(v), _rows(dout)
    to_queries, to_keys, to_values = _Rows(dq), _Rows(dk.unsqueeze(3)), _Rows(dv.unsqueeze(3))
    block = block_length(s, q.dtype)
    parts = _parts(b * groups, min(block, s) * share * s)
    buffers = q.new_empty(2, parts[0].stop * min(block, s) * share * s)
    narrow = q.dtype in (torch.float16, torch.bfloat16)
    sums = q.new_empty(parts[0].stop, s * share, d, dtype=torch.float32) if narrow else None
    for part in parts:
        n = part.stop - part.start
        total = to_queries.rows[part] if sums is None else sums[:n]
        for first in range(0, s, block):
            last, row = min(first + block, s), first * share
            shape = (n, s * share - row, last - first)
            scores, dscores = (buffer[: math.prod(shape)].view(shape) for buffer in buffers)
            torch.bmm(queries[part, row:], _transposed(keys[part, first:last]), out=scores)
            torch.bmm(douts[part, row:], _transposed(values[part, first:last]), out=dscores)
            gradient(scores, dscores, logarithms, dots, slopes, part.start, first, first, *law)
            torch.bmm(
                scores.transpose(1, 2), douts[part, row:], out=to_values.rows[part, first:last]
            )
            torch.bmm(
                dscores.transpose(1, 2), queries[part, row:], out=to_keys.rows[part, first:last]
            )
            _add_product(total[:, row:], dscores, keys[part, first:last], fresh=first == 0)
        if sums is not None:
            to_queries.rows[part] = total
    for result in (to_queries, to_keys, to_values):
        result.put()


def _add_product(total: Tensor, a: Tensor, b: Tensor, fresh: bool) -> None:
    """Compute total (+)= a b; in 16 bits total is fp32 and a product is rounded before it is
    added.
    """
    if total.dtype == a.dtype:
        torch.baddbmm(total, a, b, beta=0.0 if fresh else 1.0, out=total)
    elif fresh:
        total.copy_(torch.bmm(a, b))
    else:
        total.add_(torch.bmm(a, b))


def _split(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [.., groups, share, d], k and v [.., groups, d] of the projection, or of three
    tensors.
    """
    if len(tensors) == 1:
        (mixed,) = tensors
        return mixed[..., :-2, :], mixed[..., -2, :], mixed[..., -1, :]
    q, k, v = tensors
    return q.unflatten(2, (k.shape[2], -1)), k, v


def _counted(q: Tensor, backward: bool = False) -> Scope:
    """Count all blocks for q [s, b, groups, share, d] as one pass of attention, whose rate is
    measured as such.
    """
    s, b, groups, share, d = q.shape
    return counts_as(Attention(b, groups * share, s, d, backward))


class _Attention(torch.autograd.Function):
    """out [s, b, groups, share, d] of _split(tensors), whose gradients are written in the layout of
    the tensors.
    """

    @staticmethod
    def forward(ctx: Any, settings: Settings, *tensors: Tensor) -> Tensor:
        q, k, v = _split(tensors)
        with _counted(q):
            out, logarithms = _forward(q, k, v, settings)
        ctx.save_for_backward(out, logarithms, *tensors)
        ctx.settings = settings
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        out, logarithms, *tensors = ctx.saved_tensors
        gradients = tuple(torch.empty_like(x) for x in tensors)
        q, k, v = _split(tuple(tensors))
        with _counted(q, backward=True):
            _backward(dout.contiguous(), out, logarithms, q, k, v, ctx.settings, *_split(gradients))
        return None, *gradients


def blocked_attention(
    tensors: tuple[Tensor, ...],
    slopes: Tensor | None,
    documents: Documents | None,
    dropout: float,
    seed: int | None,
    fused: bool,
    place: Place | None = None,
) -> Tensor:
    """Return softmax(q k^T / sqrt(d)) v, causal and inside of documents: [s, b, heads, d].

    tensors    the projection [s, b, groups, queries + 2, d] alone, in which a group's queries come
               before its key and its value; or q [s, b, heads, d], k and v [s, b, groups, d]
    slopes     of ALiBi, fp32 [heads], or None
    dropout    of the weights, with masks by `seed` (megatron.parallel.random); no seed: none
    fused      softmax and its gradient through the kernels, whose masks are their own
    place      of the weights among those of the whole job (DropoutKey.weights); None: they are the
               whole
    """
    q, k, _ = _split(tensors)
    positions, samples, groups, share, d = q.shape
    if dropout >= 1.0 and seed is not None:
        return (q * 0.0 + k.unsqueeze(3) * 0.0).flatten(2, 3)
    fused = fused and q.dtype != torch.float64
    place = place or DropoutKey(0, 0).weights(positions, groups * share)

    def at(rows: Tensor) -> Settings:
        """Return the settings for documents that start at these rows of [s, b]."""
        law = kernel.Law(share, 1.0 / math.sqrt(d), 0.0, 0)
        if seed is not None and dropout > 0.0:
            origins = place.start + rows % samples * place.outer + rows // samples
            law = law._replace(probability=dropout, seed=seed, origins=origins, positions=positions)
        return slopes, fused, law

    if documents is None:
        starts = torch.arange(samples, device=tensors[0].device)
        return _Attention.apply(at(starts), *tensors).flatten(2, 3)
    outs = []
    for starts, *batch in zip(
        documents.starts, *(documents.batches(x) for x in tensors), strict=True
    ):
        out = _Attention.apply(at(starts), *(x.transpose(0, 1) for x in batch))
        outs.append(out.transpose(0, 1).flatten(0, 1))
    rows = torch.cat(outs).index_select(0, documents.groups.scatter)
    return rows.view(positions, samples, -1, d)
