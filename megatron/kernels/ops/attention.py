"""Softmax of one block of causal attention scores, forward and backward, in the place of the scores.

The matrix products around it are torch's (megatron/layers/blocked_attention.py). What the backward pass keeps of a row
is the logarithm of its sum of exponentials, as in Dao et al., arXiv 2205.14135: the weights are made again from it.

Rows are [sample and group][position][query of the group]: the queries of a group share their keys and are rows of one
matrix. Dropout masks come from Philox (see dropout.py), by seed and by sample, head, query and key among those of
the whole job, so that they do not depend on how it is cut into ranks, micro-batches and blocks.

Bytes moved for N scores of e bytes that are seen: attention_weights_ 2 N e, attention_gradient_ 4 N e. What is not seen
is written, as zeros, but not read.
"""
from __future__ import annotations

import itertools

import torch

from megatron.kernels.checks import check, check_columns, check_device, check_shape, check_type
from megatron.kernels.library import Function, available
from megatron.kernels.ops.dropout import law
from megatron.kernels.register import operator
from megatron.parallel.random import dropout_mask, mix

_WEIGHTS = Function("mk_attention_weights", "pppp" + "lllllllll" + "fuwf")
_GRADIENT = Function("mk_attention_gradient", "pppppp" + "llllllllll" + "fuwf")
_DOTS = Function("mk_row_dots", "pppll")

TILE = 32
"""Blocks of queries and of keys start at multiples of this many positions."""


def _check(
    name: str, scores: torch.Tensor, rows: dict[str, torch.Tensor], slopes: torch.Tensor | None, sample: int,
    first: int, key: int, share: int, probability: float, seed: int, origins: torch.Tensor | None,
) -> None:
    check_type(name, scores=scores)
    check_device(name, scores=scores, slopes=slopes, origins=origins, **rows)
    check_columns(name, "scores", scores)
    check(name, scores.dim() == 3, f"scores have {scores.dim()} dimension(s); [samples, rows, keys] is needed")
    check(name, scores.is_contiguous(), f"scores of strides {scores.stride()} are not contiguous")
    check(name, share > 0 and scores.shape[1] % share == 0, f"{scores.shape[1]} rows are not for {share} queries each")
    check(name, 0.0 <= probability < 1.0, f"probability is {probability}; it must be at least 0 and less than 1")
    check(name, 0 <= seed < 2**63, f"seed is {seed}; it must be at least 0 and less than 2^63")
    for what, start in (("first", first), ("key", key)):
        check(name, start >= 0 and start % TILE == 0, f"{what} is {start}; blocks start at multiples of {TILE}")
    for what, x in rows.items():
        check(name, x.dtype == torch.float32, f"{what} is {x.dtype}; it must be float32")
        check(name, x.is_contiguous(), f"{what} of strides {x.stride()} is not contiguous")
        check(name, x.dim() == 2, f"{what} has {x.dim()} dimension(s); [all samples, all rows] is needed")
        enough = x.shape[1] % share == 0 and x.shape[1] >= first * share + scores.shape[1]
        check(name, enough, f"{what} has {x.shape[1]} rows; the block has {scores.shape[1]} from {first * share} on")
        some = 0 <= sample <= x.shape[0] - scores.shape[0]
        check(name, some, f"{what} has {x.shape[0]} samples; the block has {scores.shape[0]} from {sample} on")
    if slopes is not None:
        fits = slopes.dtype == torch.float32 and slopes.is_contiguous() and slopes.dim() == 1
        fits = fits and slopes.shape[0] > 0 and slopes.shape[0] % share == 0
        found = f"{slopes.dtype} {list(slopes.shape)}"
        check(name, fits, f"slopes are {found}; they must be fp32 [groups * {share}], contiguous")
    check(name, origins is not None or not probability, f"probability is {probability}, but there are no origins")
    if origins is not None:
        samples = len(rows["logarithms"])
        fits = origins.dtype == torch.int64 and origins.is_contiguous() and origins.dim() == 1 and len(origins) > 0
        fits = fits and samples % len(origins) == 0
        fits = fits and (slopes is None or len(slopes) * len(origins) == samples * share)
        found = f"{origins.dtype} {list(origins.shape)}"
        check(name, fits, f"origins are {found}; they must be int64, contiguous, one for the groups of each sample")


def _padded(positions: int) -> int:
    """Length of a row of the mask: rows begin at whole packs, for any number of keys."""
    return -(-positions // TILE) * TILE


def _groups(slopes: torch.Tensor | None, share: int, samples: int, origins: torch.Tensor | None) -> int:
    if origins is not None:
        return samples // origins.shape[0]
    return 1 if slopes is None else slopes.shape[0] // share


def _place(scores: torch.Tensor, sample: int, row: int) -> tuple[slice, slice]:
    """Where the rows of a block are among all."""
    samples, rows, _ = scores.shape
    return slice(sample, sample + samples), slice(row, row + rows)


def _mask(
    scores: torch.Tensor, logarithms: torch.Tensor, sample: int, first: int, key: int, share: int, probability: float,
    seed: int, origins: torch.Tensor | None, positions: int,
) -> torch.Tensor:
    """Where there is no kernel: factors 0 or 1 / (1 - p), by torch's generator, a tile of TILE by TILE at a time."""
    assert origins is not None, "a mask depends on which samples these are"
    count, rows, keys = scores.shape
    groups, queries = len(logarithms) // len(origins), rows // share
    factors = torch.empty(count, _padded(queries), share, _padded(keys), device=scores.device)
    tile = torch.empty(TILE, TILE, device=scores.device)
    starts = [0] * len(origins) if scores.is_meta else origins.tolist()
    for nth, head, i, j in itertools.product(range(count), range(share), range(0, queries, TILE), range(0, keys, TILE)):
        start = starts[(sample + nth) // groups] + ((sample + nth) % groups * share + head) * positions
        drawn = dropout_mask(tile, probability, mix(seed, start, first + i, key + j))
        factors[nth, i : i + TILE, head, j : j + TILE] = drawn
    return factors[:, :queries, :, :keys].reshape(scores.shape).mul_(1.0 / (1.0 - probability))


def _logits(
    scores: torch.Tensor, slopes: torch.Tensor | None, sample: int, first: int, key: int, share: int, scale: float
) -> torch.Tensor:
    """What the scores stand for, in fp32 (fp64 for fp64): -infinity where a key is later than the query."""
    samples, rows, keys = scores.shape
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    row = torch.arange(rows, device=scores.device)
    distance = torch.arange(keys, device=scores.device) + key - (row // share + first).unsqueeze(1)  # 0 or less if seen
    if slopes is not None:
        groups = torch.arange(sample, sample + samples, device=scores.device) % (slopes.shape[0] // share)
        slope = slopes.view(-1, share)[groups.unsqueeze(1), row % share]  # [samples, rows]
        wide += slope.unsqueeze(-1) * distance
    return wide.masked_fill_(distance > 0, float("-inf"))


def weights_reference(
    scores: torch.Tensor, logarithms: torch.Tensor, slopes: torch.Tensor | None, sample: int, first: int, share: int,
    scale: float, probability: float, seed: int, origins: torch.Tensor | None = None, positions: int = 0,
) -> None:
    """The same as attention_weights_ in torch's operators, for any floating type; another mask of the same law."""
    logits = _logits(scores, slopes, sample, first, 0, share, scale)
    sums = logits.logsumexp(-1)
    sums.masked_fill_(sums == float("-inf"), float("inf"))
    logarithms[_place(scores, sample, first * share)] = sums
    weights = logits.sub_(sums.unsqueeze(-1)).exp_()
    if probability:
        weights *= _mask(scores, logarithms, sample, first, 0, share, probability, seed, origins, positions)
    scores.copy_(weights)


def gradient_reference(
    scores: torch.Tensor, gradients: torch.Tensor, logarithms: torch.Tensor, dots: torch.Tensor,
    slopes: torch.Tensor | None, sample: int, first: int, key: int, share: int, scale: float, probability: float,
    seed: int, origins: torch.Tensor | None = None, positions: int = 0,
) -> None:
    """The same as attention_gradient_ in torch's operators, for any floating type; another mask of the same law."""
    place = _place(scores, sample, first * share)
    logits = _logits(scores, slopes, sample, first, key, share, scale)
    weights = logits.sub_(logarithms[place].unsqueeze(-1)).exp_()
    wide = gradients.to(weights.dtype)
    dropped = weights
    if probability:
        factors = _mask(scores, logarithms, sample, first, key, share, probability, seed, origins, positions)
        wide, dropped = wide * factors, weights * factors
    gradients.copy_((wide - dots[place].unsqueeze(-1)) * weights * scale)
    scores.copy_(dropped)


def dots_reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The same as row_dots in torch's operators; fp64 for fp64."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return (a.to(wide) * b.to(wide)).sum(-1)


def _run_weights(
    scores: torch.Tensor, logarithms: torch.Tensor, slopes: torch.Tensor | None, sample: int, first: int, share: int,
    scale: float, probability: float, seed: int, origins: torch.Tensor | None = None, positions: int = 0,
) -> None:
    name = "attention_weights_"
    _check(name, scores, {"logarithms": logarithms}, slopes, sample, first, 0, share, probability, seed, origins)
    keys, seen = scores.shape[-1], first + scores.shape[1] // share
    check(name, keys == seen, f"there are {keys} keys; queries up to {seen} need as many")
    if not available(scores.device):
        weights_reference(
            scores, logarithms, slopes, sample, first, share, scale, probability, seed, origins, positions
        )
        return
    samples, rows, _ = scores.shape
    total = logarithms.shape[1]
    _WEIGHTS(
        scores, scores, logarithms, slopes, origins if probability else None, samples * rows, rows, total, sample,
        first, positions, _groups(slopes, share, len(logarithms), origins), share, keys, scale, seed,
        *law(probability)[:2],
    )


def _run_gradient(
    scores: torch.Tensor, gradients: torch.Tensor, logarithms: torch.Tensor, dots: torch.Tensor,
    slopes: torch.Tensor | None, sample: int, first: int, key: int, share: int, scale: float, probability: float,
    seed: int, origins: torch.Tensor | None = None, positions: int = 0,
) -> None:
    name, all_rows = "attention_gradient_", {"logarithms": logarithms, "dots": dots}
    _check(name, scores, all_rows, slopes, sample, first, key, share, probability, seed, origins)
    check_type(name, scores=scores, gradients=gradients)
    check_device(name, scores=scores, gradients=gradients)
    check_shape(name, "gradients", gradients, tuple(scores.shape))
    check_shape(name, "dots", dots, tuple(logarithms.shape))
    check(name, gradients.is_contiguous(), f"gradients of strides {gradients.stride()} are not contiguous")
    if not available(scores.device):
        gradient_reference(
            scores, gradients, logarithms, dots, slopes, sample, first, key, share, scale, probability, seed, origins,
            positions,
        )
        return
    samples, rows, keys = scores.shape
    total = logarithms.shape[1]
    _GRADIENT(
        scores, scores, gradients, logarithms, dots, slopes, origins if probability else None, samples * rows, rows,
        total, sample, first, key, positions, _groups(slopes, share, len(logarithms), origins), share, keys, scale,
        seed, *law(probability)[:2],
    )


def _run_dots(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    check_type("row_dots", a=a, b=b)
    check_device("row_dots", a=a, b=b)
    check_columns("row_dots", "a", a)
    check_shape("row_dots", "b", b, tuple(a.shape))
    check("row_dots", a.is_contiguous() and b.is_contiguous(), "arguments must be contiguous")
    if not available(a.device):
        return dots_reference(a, b)
    out = a.new_empty(a.shape[:-1], dtype=torch.float32)
    if a.numel():
        _DOTS(a, out, a, b, out.numel(), a.shape[-1])
    else:
        out.zero_()
    return out


attention_weights_ = operator(
    "attention_weights_(Tensor(a!) scores, Tensor(b!) logarithms, Tensor? slopes, SymInt sample, SymInt first, "
    "int share, float scale, float probability, SymInt seed, Tensor? origins=None, SymInt positions=0) -> ()",
    _run_weights, lambda *_: None,
)
"""Scores [samples, queries * share, keys] become softmax weights with dropout; contiguous, fp32, fp16 or bf16.

The queries are those from position `first` on; a query sees the keys up to its own position, and all that they see are
there: keys = first + queries. What is not seen gets exactly 0. A score stands for scale * score, plus
slope * (key - query) where there are `slopes`, fp32 [groups * share]; samples are [.., groups], from `sample` on.
The logarithms of the sums of exponentials go to their rows of `logarithms`, fp32 [all samples, all rows]; infinity for
a row that is all -infinity, whose weights are 0. Weights are dropped with `probability` and scaled by 1 / (1 - p)
otherwise. The rows of the whole job are [samples, heads, positions]: `origins`, int64, one for each sample here, has
the number of the first query of its first head, and the next head is `positions` on. No gradient: that is
attention_gradient_. Raises KernelError for other types, shapes, and probabilities outside of [0, 1).
"""

attention_gradient_ = operator(
    "attention_gradient_(Tensor(a!) scores, Tensor(b!) gradients, Tensor logarithms, Tensor dots, Tensor? slopes, "
    "SymInt sample, SymInt first, SymInt key, int share, float scale, float probability, SymInt seed, "
    "Tensor? origins=None, SymInt positions=0) -> ()",
    _run_gradient, lambda *_: None,
)
"""Scores become weights again, and the weights' gradients, of the same shape, those of the scores.

The block is of the queries from position `first` and of the keys from position `key` on, any rectangle of the whole.
`dots` [all samples, all rows], fp32: of each query, the output times its gradient, summed over the head (row_dots). The
rest is as for attention_weights_, which wrote `logarithms`.
"""

row_dots = operator(
    "row_dots(Tensor a, Tensor b) -> Tensor", _run_dots,
    lambda a, b: a.new_empty(a.shape[:-1], dtype=torch.promote_types(a.dtype, torch.float32)),
)
"""Sum over the last dimension of a * b, fp32: a and b [.., n], contiguous, of one type -> [..]."""
