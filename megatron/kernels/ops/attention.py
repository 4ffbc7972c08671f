"""Softmax of attention scores: of all at once, causal or masked, or of one block, in place.

The matrix products around it are torch's (megatron/layers/attention_{unfused,blocked}.py).

Bytes moved for N scores of e bytes, all at once: forward N e in and N e out, and the mask, one byte
per element, in each of three passes (heads share the part that is in a cache); backward 2 N e in
and N e out. A causal row is read up to its last visible key: half of the input on average. Rows
that do not consist of full, aligned packs of 16 bytes are processed element by element and read up
to three times. Rows with more than 65,536 elements (fp32: 32,768; in the backward pass half as many
on CUDA), which do not fit in registers, are also read up to three times, in packs.

For causal attention in blocks, the forward pass keeps for each row the logarithm of the sum of
exponentials, as in Dao et al., arXiv 2205.14135, and the backward pass recomputes the weights from
it.

Rows are [sample and group][position][query of the group]: the queries of a group share their keys
and are rows of one matrix. Dropout masks come from Philox (see elementwise.py), as a function of
the seed and of sample, head, query and key within the whole job, so that they do not depend on the
division into ranks, micro-batches and blocks.

Bytes moved for the N unmasked scores of a block: attention_weights_ 2 N e,
attention_gradient_ 4 N e. Masked scores are written as zeros; those of later keys are not read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.config.parallel import TILE
from megatron.kernels.cost import Memory
from megatron.kernels.library import Function
from megatron.kernels.operators import (
    Gradient,
    check,
    check_all,
    check_beside,
    check_shape,
    empty_like_first,
    operator,
)
from megatron.kernels.ops.elementwise import check_key, soft_cap, threshold, wider
from megatron.parallel.autograd import Context
from megatron.parallel.hashing import mix
from megatron.parallel.keyed_random import dropout_mask

_CAUSAL = Function("mk_causal_softmax", "ppllllf")
_MASKED = Function("mk_masked_softmax", "ppplllllf")
_SOFTMAX_BACKWARD = Function("mk_softmax_backward", "ppplllf")
_WEIGHTS = Function("mk_attention_weights", "pppp" + "l" * 11 + "ffuwf")
_GRADIENT = Function("mk_attention_gradient", "pppppp" + "l" * 11 + "ffuwf")
_DOTS = Function("mk_row_dots", "pppll")

NO_WINDOW = 1 << 30
"""A window that masks nothing, since it is longer than any sequence."""


class AttentionParameters(NamedTuple):
    """Attention parameters: how scores become weights, the same in all blocks.

    share    number of query heads in a group, which see the same keys
    scale    factor of the scores
    probability, seed, origins, positions  dropout, see attention_weights_
    cap      scores x become cap tanh(x / cap); 0: no cap
    window   number of keys before a query's own position that it sees
    """

    share: int
    scale: float
    probability: float = 0.0
    seed: int = 0
    origins: Tensor | None = None
    positions: int = 0
    cap: float = 0.0
    window: int = NO_WINDOW


def first_key(first: int, window: int) -> int:
    """Return the position of the first key that queries from `first` on see.

    It is rounded down to a multiple of TILE.
    """
    return max(0, (first - window) // TILE * TILE)


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """The inputs of attention_weights_; attention_gradient_ takes two more (GradientBlock)."""

    scores: Tensor
    logarithms: Tensor
    slopes: Tensor | None
    sample: int
    first: int
    key: int | None
    params: AttentionParameters

    @property
    def start(self) -> int:
        """Position of the first key; without `key`, the last key is that of the last query."""
        if self.key is not None:
            return self.key
        return self.first + self.scores.shape[1] // self.params.share - self.scores.shape[2]

    @property
    def rows(self) -> tuple[slice, slice]:
        """The block's samples and rows, as slices of all samples and all rows."""
        row = self.first * self.params.share
        samples, rows = self.scores.shape[:2]
        return slice(self.sample, self.sample + samples), slice(row, row + rows)


@dataclass(frozen=True, slots=True)
class GradientBlock(AttentionBlock):
    gradients: Tensor
    dots: Tensor


def _block(
    scores: Tensor, logarithms: Tensor, slopes: Tensor | None, sample: int, first: int, *params: Any
) -> AttentionBlock:
    """Return the inputs of attention_weights_; torch omits trailing defaults."""
    end = len(AttentionParameters._fields)
    key = params[end] if len(params) > end else None
    return AttentionBlock(
        scores, logarithms, slopes, sample, first, key, AttentionParameters(*params[:end])
    )


def _gradient_block(scores: Tensor, gradients: Tensor, *rest: Any) -> GradientBlock:
    logarithms, dots, slopes, sample, first, key, *params = rest
    fields = logarithms, slopes, sample, first, key
    return GradientBlock(scores, *fields, AttentionParameters(*params), gradients, dots)


def _check(name: str, block: AttentionBlock, **rows: Tensor) -> None:
    """Check the arguments of both operators.

    `rows`: the tensors [all samples, all rows] by name.
    """
    scores = block.scores
    slopes = block.slopes
    params = block.params
    share = params.share
    origins = params.origins
    check_all(name, scores=scores)
    check_beside(name, scores, [torch.float32], slopes=slopes, **rows)
    check_beside(name, scores, [torch.int64], origins=origins)
    check_key(name, params.probability, params.seed)
    check(name, params.cap >= 0.0, f"cap is {params.cap}; it must be at least 0")
    _check_window(name, params.window)
    check(
        name,
        scores.dim() == 3,
        f"scores have {scores.dim()} dimension(s); [samples, rows, keys] is needed",
    )
    count, row_count = scores.shape[:2]
    check(
        name,
        share > 0 and row_count % share == 0,
        f"{row_count} rows are not a multiple of {share} queries",
    )
    for what, start in (("first", block.first), ("key", block.key or 0)):
        check(
            name,
            params.probability == 0.0 or (start >= 0 and start % TILE == 0),
            f"{what} is {start}; with dropout, blocks start at multiples of {TILE}",
        )
    row = block.first * share
    for what, x in rows.items():
        fits = x.dim() == 2 and x.shape[1] % share == 0 and x.shape[1] >= row + row_count
        check(
            name,
            fits and 0 <= block.sample <= x.shape[0] - count,
            f"{what} has shape {list(x.shape)}; the block has {count} samples from "
            f"{block.sample} on and {row_count} rows from {row} on",
        )
    if slopes is not None:
        fits = slopes.dim() == 1 and len(slopes) > 0 and len(slopes) % share == 0
        shape = list(slopes.shape)
        check(name, fits, f"slopes have shape {shape}; [groups * {share}] is needed")
    if origins is None:
        missing = params.probability > 0.0
        check(name, not missing, f"probability is {params.probability}, but there are no origins")
        return
    samples = len(block.logarithms)
    fits = origins.dim() == 1 and len(origins) > 0 and samples % len(origins) == 0
    check(
        name,
        fits and (slopes is None or len(slopes) * len(origins) == samples * share),
        f"origins have shape {list(origins.shape)}; there must be one for each sample, which all of "
        "its groups share",
    )


def _check_window(name: str, window: int) -> None:
    fits = 0 <= window <= NO_WINDOW
    check(name, fits, f"window is {window}; it must be from 0 to {NO_WINDOW}")


def _check_weights(name: str, block: AttentionBlock) -> None:
    _check(name, block, logarithms=block.logarithms)
    if block.key is not None:
        return
    keys = block.scores.shape[-1]
    key = block.start
    most = first_key(block.first, block.params.window)
    check(
        name,
        key % TILE == 0,
        f"there are {keys} keys up to {key + keys}; the first of them, {key}, must be a multiple of "
        f"{TILE}",
    )
    check(
        name,
        0 <= key <= most,
        f"there are {keys} keys; for queries from {block.first} to {key + keys} the minimum, to "
        f"which whole tiles of earlier keys may be added, is {key + keys - most}",
    )


def _check_gradient(name: str, block: GradientBlock) -> None:
    scores = block.scores
    logarithms = block.logarithms
    _check(name, block, logarithms=logarithms, dots=block.dots)
    check_all(name, scores.shape, scores=scores, gradients=block.gradients)
    check_shape(name, logarithms.shape, dots=block.dots)


# -- a block, with torch's operators ---------------------------------------------------------------


def _mask(block: AttentionBlock) -> Tensor:
    """Return factors 0 or 1 / (1 - p), drawn by torch's generator in tiles of TILE by TILE."""
    scores = block.scores
    sample = block.sample
    params = block.params
    assert params.origins is not None, "a mask depends on the samples' numbers"
    count, rows, keys = scores.shape
    share = params.share
    groups = len(block.logarithms) // len(params.origins)
    queries = rows // share
    padded_queries, padded_keys = (-(-n // TILE) * TILE for n in (queries, keys))
    factors = torch.empty(count, padded_queries, share, padded_keys, device=scores.device)
    tile = torch.empty(TILE, TILE, device=scores.device)
    starts = [0] * len(params.origins) if scores.is_meta else params.origins.tolist()
    for nth, head, i, j in itertools.product(
        range(count), range(share), range(0, queries, TILE), range(0, keys, TILE)
    ):
        start = (
            starts[(sample + nth) // groups]
            + ((sample + nth) % groups * share + head) * params.positions
        )
        key = mix(params.seed, start, block.first + i, block.start + j)
        drawn = dropout_mask(tile, params.probability, key)
        factors[nth, i : i + TILE, head, j : j + TILE] = drawn
    return (
        factors[:, :queries, :, :keys].reshape(scores.shape).mul_(1.0 / (1.0 - params.probability))
    )


def _logits(block: AttentionBlock) -> Tensor:
    """Return the scaled, capped and biased scores in fp32 (fp64 for fp64 scores).

    They are -infinity for keys after the query or before its window.
    """
    scores = block.scores
    slopes = block.slopes
    params = block.params
    samples, rows, keys = scores.shape
    wide = wider(scores) * params.scale
    if params.cap:
        wide = soft_cap(wide, params.cap)
    row = torch.arange(rows, device=scores.device)
    query = (row // params.share + block.first).unsqueeze(1)
    # 0 or less unless the key is after the query
    distance = torch.arange(keys, device=scores.device) + block.start - query
    if slopes is not None:
        of_sample = torch.arange(block.sample, block.sample + samples, device=scores.device)
        groups = of_sample % (len(slopes) // params.share)
        slope = slopes.view(-1, params.share)[
            groups.unsqueeze(1), row % params.share
        ]  # [samples, rows]
        wide += slope.unsqueeze(-1) * distance
    wide.masked_fill_(distance > 0, float("-inf"))
    return (
        wide
        if params.window == NO_WINDOW
        else wide.masked_fill_(distance < -params.window, -torch.inf)
    )


def weights_reference(block: AttentionBlock) -> None:
    """Compute attention_weights_ with torch's operators, for any floating type.

    Its masks differ from the kernel's.
    """
    logits = _logits(block)
    sums = logits.logsumexp(-1)
    sums.masked_fill_(sums == float("-inf"), float("inf"))
    block.logarithms[block.rows] = sums
    weights = logits.sub_(sums.unsqueeze(-1)).exp_()
    if block.params.probability:
        weights *= _mask(block)
    block.scores.copy_(weights)


def gradient_reference(block: GradientBlock) -> None:
    """Compute attention_gradient_ with torch's operators, for any floating type.

    Its masks differ from the kernel's.
    """
    scores = block.scores
    params = block.params
    weights = _logits(block).sub_(block.logarithms[block.rows].unsqueeze(-1)).exp_()
    wide = block.gradients.to(weights.dtype)
    dropped = weights
    if params.probability:
        factors = _mask(block)
        wide = wide * factors
        dropped = weights * factors
    wide = (wide - block.dots[block.rows].unsqueeze(-1)) * weights * params.scale
    if params.cap:
        wide *= 1.0 - (scores.to(wide.dtype) * (params.scale / params.cap)).tanh_().square_()
    block.gradients.copy_(wide)
    scores.copy_(dropped)


def dots_reference(a: Tensor, b: Tensor) -> Tensor:
    """Compute row_dots with torch's operators; fp64 for fp64."""
    return (wider(a) * wider(b)).sum(-1)


# -- a block, with the kernels ---------------------------------------------------------------------


def _launch(function: Function, block: AttentionBlock, *tensors: Tensor) -> None:
    """Call a kernel for a block; the last tensor has all samples and rows."""
    params = block.params
    slopes = block.slopes
    samples, rows, keys = block.scores.shape
    all_samples, all_rows = tensors[-1].shape
    groups = 1 if slopes is None else len(slopes) // params.share  # of one sample
    if params.origins is not None:
        groups = all_samples // len(params.origins)
    function(
        block.scores,
        block.scores,
        *tensors,
        slopes,
        params.origins if params.probability else None,
        samples * rows,
        rows,
        all_rows,
        block.sample,
        block.first,
        block.start,
        params.window,
        params.positions,
        groups,
        params.share,
        keys,
        params.scale,
        params.cap,
        params.seed,
        *threshold(params.probability),
    )


def _weights(block: AttentionBlock) -> None:
    _launch(_WEIGHTS, block, block.logarithms)


def _gradient(block: GradientBlock) -> None:
    _launch(_GRADIENT, block, block.gradients, block.logarithms, block.dots)


def _check_dots(name: str, a: Tensor, b: Tensor) -> None:
    check_all(name, a.shape, a=a, b=b)


def _dots(out: Tensor, a: Tensor, b: Tensor) -> None:
    _DOTS(a, out, a, b, out.numel(), a.shape[-1])


def _like_dots(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[:-1], dtype=torch.promote_types(a.dtype, torch.float32))


_weights_ = operator(
    "attention_weights_(Tensor(a!) scores, Tensor(b!) logarithms, Tensor? slopes, SymInt sample, "
    "SymInt first, int share, float scale, float probability, SymInt seed, Tensor? origins=None, "
    f"SymInt positions=0, float cap=0.0, SymInt window={NO_WINDOW}, SymInt? key=None) -> ()",
    _weights,
    weights_reference,
    record=_block,
    check=_check_weights,
)


def attention_weights_(block: AttentionBlock) -> None:
    """Turn scores [samples, queries * share, keys] into softmax weights with dropout, in place.

    Scores are contiguous, in fp32, fp16 or bf16. Their first dimension is [.., groups], counted
    from `sample`; the queries start at position `first`. A query sees the key at its own position
    and the `window` keys before it; the weights of other keys are exactly 0. Without `key`, all
    keys that a query sees must be present: the last key is at the last query's position, the first
    one at a multiple of TILE up to first_key(first, window). With `key`, the position of the first
    key, the keys may be any: weights and logarithms are then those of a section of each row.

    A score x becomes scale * x, or cap * tanh(scale * x / cap) with a `cap` above 0, plus slope *
    (key - query) if there are `slopes`, fp32 [groups * share]. The logarithm of each row's sum of
    exponentials is written to its row of `logarithms`, fp32 [all samples, all rows]; it is infinity
    for a row that is all -infinity, whose weights are 0.

    Weights are dropped with `probability`, and scaled by 1 / (1 - probability) otherwise. With
    dropout, `first` and `key` must be multiples of TILE. The mask depends on the numbers of the
    rows [samples, heads, positions] in the job: `origins`, int64, has one entry for each sample,
    which all of its groups share: the number of the row of its first head and first query; that of
    the next head is larger by `positions`.

    Has no gradient: see attention_gradient_. Raises KernelError for other types and shapes, and for
    probabilities outside [0, 1).
    """
    _weights_(
        block.scores,
        block.logarithms,
        block.slopes,
        block.sample,
        block.first,
        *block.params,
        block.key,
    )


_gradient_ = operator(
    "attention_gradient_(Tensor(a!) scores, Tensor(b!) gradients, Tensor logarithms, Tensor dots, "
    "Tensor? slopes, SymInt sample, SymInt first, SymInt key, int share, float scale, float "
    "probability, SymInt seed, Tensor? origins=None, SymInt positions=0, float cap=0.0, "
    f"SymInt window={NO_WINDOW}) -> ()",
    _gradient,
    gradient_reference,
    record=_gradient_block,
    check=_check_gradient,
)


def attention_gradient_(block: GradientBlock) -> None:
    """Turn scores into weights again, and the gradients of the weights into those of the scores.

    `scores` and `gradients`, of the same shape, are overwritten; the new weights are those after
    dropout. The block has the queries from position `first` on and the keys from position `key` on;
    it may be any rectangle. `dots` [all samples, all rows], fp32: for each query, the attention's
    output times its gradient, summed over the head (row_dots). The other inputs are the same as for
    attention_weights_, which wrote `logarithms`.
    """
    _gradient_(
        block.scores,
        block.gradients,
        block.logarithms,
        block.dots,
        block.slopes,
        block.sample,
        block.first,
        block.start,
        *block.params,
    )


row_dots = operator(
    "row_dots(Tensor a, Tensor b) -> Tensor", _dots, dots_reference, _like_dots, check=_check_dots
)
"""Sum a * b over the last dimension, fp32: a and b [.., n], contiguous, of one type -> [..]."""


class AttentionOperators(NamedTuple):
    """The operators for attention in blocks: kernels or torch's."""

    weights: Callable[[AttentionBlock], None]
    gradient: Callable[[GradientBlock], None]
    dots: Callable[[Tensor, Tensor], Tensor]


KERNELS = AttentionOperators(attention_weights_, attention_gradient_, row_dots)
REFERENCES = AttentionOperators(weights_reference, gradient_reference, dots_reference)


# -- all scores at once ----------------------------------------------------------------------------


def _check_softmax(
    name: str, scores: Tensor, mask: Tensor | None, scale: float, window: int = NO_WINDOW
) -> None:
    check_all(name, scores=scores)
    least, shape = (2, "[.., queries, keys]") if mask is None else (4, "[b, heads, queries, keys]")
    check(
        name,
        scores.dim() == least or (mask is None and scores.dim() > least),
        f"scores have {scores.dim()} dimension(s); {shape} is needed",
    )
    if mask is not None:
        batch = mask.shape[0] if mask.dim() == 4 and mask.shape[0] == 1 else scores.shape[0]
        check_beside(name, scores, [torch.bool], (batch, 1, *scores.shape[2:]), mask=mask)
    _check_window(name, window)


def hidden_keys(hidden: Tensor | None, scores: Tensor, window: int) -> Tensor:
    """Return the mask of hidden scores [.., queries, keys].

    These are the scores in `hidden` (None: those of later keys) and those of keys before the
    window.
    """
    queries, keys = scores.shape[-2:]
    all_pairs = partial(torch.ones, queries, keys, dtype=torch.bool, device=scores.device)
    if hidden is None:
        hidden = all_pairs().triu_(keys - queries + 1)
    if window < keys:
        hidden = hidden | all_pairs().tril_(keys - queries - window - 1)
    return hidden


def softmax_reference(
    scores: Tensor, hidden: Tensor | None, scale: float, window: int = NO_WINDOW
) -> Tensor:
    """Compute the softmax with torch's operators, in fp32 (fp64 for fp64 scores)."""
    hidden = hidden_keys(hidden, scores, window)
    wide = wider(scores)
    out = (wide * scale).masked_fill(hidden, float("-inf")).softmax(-1)
    # A row that sees nothing above -infinity becomes all zeros, not NaN.
    nothing = (hidden | (wide == float("-inf"))).all(-1, keepdim=True)
    return out.masked_fill(nothing, 0.0).to(scores.dtype)


def _softmax_backward_reference(
    gradient: Tensor, probabilities: Tensor, scale: float, causal: bool
) -> Tensor:
    g = gradient.float()
    y = probabilities.float()
    return (scale * y * (g - (g * y).sum(-1, keepdim=True))).to(gradient.dtype)


def _run_softmax(
    out: Tensor, scores: Tensor, mask: Tensor | None, scale: float, window: int = NO_WINDOW
) -> None:
    queries, keys = scores.shape[-2:]
    rows = scores.numel() // keys
    if mask is None:
        _CAUSAL(scores, out, scores, rows, queries, keys, window, scale)
    else:
        _MASKED(scores, out, scores, mask, rows, queries, rows // len(mask), keys, window, scale)


def _run_softmax_backward(
    out: Tensor, gradient: Tensor, probabilities: Tensor, scale: float, causal: bool
) -> None:
    queries, keys = probabilities.shape[-2:]
    queries = queries if causal else 0
    _SOFTMAX_BACKWARD(out, out, gradient, probabilities, out.numel() // keys, queries, keys, scale)


def _save_softmax(ctx: Context, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, mask, ctx.scale, *_ = inputs
    ctx.causal = mask is None
    ctx.save_for_backward(output)


def _softmax_gradient(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    (probabilities,) = ctx.saved_tensors
    dx = _softmax_backward(gradient.contiguous(), probabilities, ctx.scale, ctx.causal)
    return dx, None, None, None


def _moved(scores: Tensor, mask: Tensor | None, *_: object) -> Memory:
    """Return the bytes of the forward pass, which reads only the visible part of a causal row."""
    return Memory(3 * scores.nbytes // 2 if mask is None else 2 * scores.nbytes + mask.nbytes)


_softmax_backward = operator(
    "softmax_backward(Tensor gradient, Tensor probabilities, float scale, bool causal) -> Tensor",
    _run_softmax_backward,
    _softmax_backward_reference,
    empty_like_first,
)
_softmax = operator(
    f"softmax(Tensor scores, Tensor? mask, float scale, SymInt window={NO_WINDOW}) -> Tensor",
    _run_softmax,
    softmax_reference,
    empty_like_first,
    check=_check_softmax,
    gradient=Gradient(_save_softmax, _softmax_gradient),
    work=_moved,
)


def causal_softmax(scores: Tensor, scale: float = 1.0, window: int = NO_WINDOW) -> Tensor:
    """Return softmax(scale * scores) over the keys that a query may see; the others get exactly 0.

    scores [.., queries, keys], copied unless contiguous; query q sees key keys - queries + q and
    `window` keys before it. A query that sees nothing, or nothing above -infinity, gets all zeros.
    Raises KernelError for types other than fp32, fp16 and bf16, for scores with fewer than two
    dimensions, and for a window outside 0 to NO_WINDOW.
    """
    return _softmax(scores.contiguous(), None, scale, window)


def masked_softmax(
    scores: Tensor, mask: Tensor, scale: float = 1.0, window: int = NO_WINDOW
) -> Tensor:
    """Return softmax(scale * scores) over the keys where `mask` is False; the others get exactly 0.

    scores [b, heads, queries, keys], mask bool [b or 1, 1, queries, keys]. Keys more than `window`
    positions before key keys - queries + q are hidden from query q as well. A query that sees
    nothing, or nothing above -infinity, gets all zeros and no gradient. Raises KernelError for
    other types or shapes.
    """
    return _softmax(scores.contiguous(), mask.contiguous(), scale, window)
