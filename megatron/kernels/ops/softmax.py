"""Softmax of attention scores, causal or masked, including the scale.

Bytes moved for scores of N elements of e bytes: forward N e in and N e out, and the mask, one byte
an element, in each of three passes, of which the heads share what a cache holds; backward 2 N e in
and N e out. A causal row is read up to its last visible key: half of what goes in. Rows that are
not made of full, aligned packs of 16 bytes go one element at a time and are read up to three times.
So are, by packs, rows of more than 65,536 elements (fp32: 32,768; in the backward pass half of that
on CUDA), which do not fit into registers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.kernels.library import Function
from megatron.kernels.operators import (
    check,
    check_all,
    check_contiguous,
    check_device,
    check_shape,
    check_type,
    operator,
)
from megatron.kernels.work import Memory

_CAUSAL = Function("mk_causal_softmax", "pplllf")
_MASKED = Function("mk_masked_softmax", "pppllllf")
_BACKWARD = Function("mk_softmax_backward", "ppplllf")


def _check_causal(name: str, scores: Tensor, scale: float) -> None:
    check_all(name, scores=scores)
    check(
        name,
        scores.dim() >= 2,
        f"scores have {scores.dim()} dimension(s); [.., queries, keys] is needed",
    )


def _check_masked(name: str, scores: Tensor, mask: Tensor, scale: float) -> None:
    check_all(name, scores=scores)
    check(
        name,
        scores.dim() == 4,
        f"scores have {scores.dim()} dimensions; [batch, heads, queries, keys] is needed",
    )
    check_type(name, [torch.bool], mask=mask)
    check_device(name, scores=scores, mask=mask)
    check_contiguous(name, mask=mask)
    batch = mask.shape[0] if mask.dim() == 4 and mask.shape[0] == 1 else scores.shape[0]
    check_shape(name, (batch, 1, *scores.shape[2:]), mask=mask)


def _check_backward(
    name: str, gradient: Tensor, probabilities: Tensor, scale: float, causal: bool
) -> None:
    check_all(name, gradient=gradient, probabilities=probabilities)
    check_shape(name, probabilities.shape, gradient=gradient)


def _hidden_later(scores: Tensor) -> Tensor:
    queries, keys = scores.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu_(
        keys - queries + 1
    )


def reference(scores: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """Compute masked_softmax with torch's operators, in fp32 (fp64 for fp64 scores)."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    out = (wide * scale).masked_fill(hidden, float("-inf")).softmax(-1)
    # A row that sees nothing above -infinity is all zero, rather than all NaN.
    nothing = (hidden | (wide == float("-inf"))).all(-1, keepdim=True)
    return out.masked_fill(nothing, 0.0).to(scores.dtype)


def _reference_backward(
    gradient: Tensor, probabilities: Tensor, scale: float, causal: bool
) -> Tensor:
    g, y = gradient.float(), probabilities.float()
    return (scale * y * (g - (g * y).sum(-1, keepdim=True))).to(gradient.dtype)


def _causal(scores: Tensor, scale: float) -> Tensor:
    out, (queries, keys) = torch.empty_like(scores), scores.shape[-2:]
    _CAUSAL(scores, out, scores, scores.numel() // keys, queries, keys, scale)
    return out


def _masked(scores: Tensor, mask: Tensor, scale: float) -> Tensor:
    batch, heads, queries, keys = scores.shape
    out, rows = torch.empty_like(scores), heads * queries
    rows_per_mask = rows * (batch if mask.shape[0] == 1 else 1)
    _MASKED(scores, out, scores, mask, batch * rows, queries, rows_per_mask, keys, scale)
    return out


def _backward(gradient: Tensor, probabilities: Tensor, scale: float, causal: bool) -> Tensor:
    out, (queries, keys) = torch.empty_like(gradient), probabilities.shape[-2:]
    _BACKWARD(
        out,
        out,
        gradient,
        probabilities,
        out.numel() // keys,
        queries if causal else 0,
        keys,
        scale,
    )
    return out


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.scale, ctx.nones, ctx.causal = inputs[-1], [None] * (len(inputs) - 1), len(inputs) == 2


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    (probabilities,) = ctx.saved_tensors
    return _softmax_backward(
        gradient.contiguous(), probabilities, ctx.scale, ctx.causal
    ), *ctx.nones


def _like(first: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(first)


_softmax_backward = operator(
    "softmax_backward(Tensor gradient, Tensor probabilities, float scale, bool causal) -> Tensor",
    _backward,
    _reference_backward,
    _like,
    check=_check_backward,
)
_causal_softmax = operator(
    "causal_softmax(Tensor scores, float scale) -> Tensor",
    _causal,
    lambda scores, scale: reference(scores, _hidden_later(scores), scale),
    _like,
    check=_check_causal,
    save=_save,
    backward=_gradient,
    # of a row only the visible part is read
    work=lambda scores, scale: Memory(3 * scores.nbytes // 2),
)
_masked_softmax = operator(
    "masked_softmax(Tensor scores, Tensor mask, float scale) -> Tensor",
    _masked,
    reference,
    _like,
    check=_check_masked,
    save=_save,
    backward=_gradient,
)


def causal_softmax(scores: Tensor, scale: float = 1.0) -> Tensor:
    """Return softmax(scale * scores) over the keys that a query may see; the others get exactly 0.

    scores [.., queries, keys], copied unless contiguous; query q sees keys 0 ... keys - queries +
    q. A query that sees nothing, or nothing above -infinity, gets all zeros. Raises KernelError for
    types other than fp32, fp16 and bf16.
    """
    result: Tensor = _causal_softmax(scores.contiguous(), scale)
    return result


def masked_softmax(scores: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
    """Return softmax(scale * scores) over the keys where `mask` is False; the others get exactly 0.

    scores [b, heads, queries, keys], mask bool [b or 1, 1, queries, keys]. A query that sees
    nothing, or nothing above -infinity, gets all zeros and no gradient. Raises KernelError for
    other types or shapes.
    """
    result: Tensor = _masked_softmax(scores.contiguous(), mask.contiguous(), scale)
    return result
