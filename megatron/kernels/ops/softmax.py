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
    check_beside,
    check_shape,
    empty_like_first,
    operator,
)
from megatron.kernels.work import Memory

_CAUSAL = Function("mk_causal_softmax", "pplllf")
_MASKED = Function("mk_masked_softmax", "pppllllf")
_BACKWARD = Function("mk_softmax_backward", "ppplllf")


def _check(name: str, scores: Tensor, mask: Tensor | None, scale: float) -> None:
    check_all(name, scores=scores)
    least, shape = (2, "[.., queries, keys]") if mask is None else (4, "[b, heads, queries, keys]")
    check(
        name,
        scores.dim() == least or (mask is None and scores.dim() > least),
        f"scores have {scores.dim()} dimension(s); {shape} is needed",
    )
    if mask is not None:
        check_beside(name, scores, [torch.bool], mask=mask)
        batch = mask.shape[0] if mask.dim() == 4 and mask.shape[0] == 1 else scores.shape[0]
        check_shape(name, (batch, 1, *scores.shape[2:]), mask=mask)


def reference(scores: Tensor, hidden: Tensor | None, scale: float) -> Tensor:
    """Compute the softmax with torch's operators, in fp32 (fp64 for fp64 scores)."""
    if hidden is None:
        queries, keys = scores.shape[-2:]
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=scores.device)
        hidden.triu_(keys - queries + 1)
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


def _forward(out: Tensor, scores: Tensor, mask: Tensor | None, scale: float) -> None:
    queries, keys = scores.shape[-2:]
    rows = scores.numel() // keys
    if mask is None:
        _CAUSAL(scores, out, scores, rows, queries, keys, scale)
    else:
        _MASKED(scores, out, scores, mask, rows, queries, rows // len(mask), keys, scale)


def _backward(
    out: Tensor, gradient: Tensor, probabilities: Tensor, scale: float, causal: bool
) -> None:
    queries, keys = probabilities.shape[-2:]
    queries = queries if causal else 0
    _BACKWARD(out, out, gradient, probabilities, out.numel() // keys, queries, keys, scale)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, mask, ctx.scale = inputs
    ctx.causal = mask is None
    ctx.save_for_backward(output)


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    (probabilities,) = ctx.saved_tensors
    dx = _softmax_backward(gradient.contiguous(), probabilities, ctx.scale, ctx.causal)
    return dx, None, None


def _moved(scores: Tensor, mask: Tensor | None, scale: float) -> Memory:
    """Return the bytes of the forward pass, which reads only the visible part of a causal row."""
    return Memory(3 * scores.nbytes // 2 if mask is None else 2 * scores.nbytes + mask.nbytes)


_softmax_backward = operator(
    "softmax_backward(Tensor gradient, Tensor probabilities, float scale, bool causal) -> Tensor",
    _backward,
    _reference_backward,
    empty_like_first,
)
_softmax = operator(
    "softmax(Tensor scores, Tensor? mask, float scale) -> Tensor",
    _forward,
    reference,
    empty_like_first,
    check=_check,
    save=_save,
    backward=_gradient,
    work=_moved,
)


def causal_softmax(scores: Tensor, scale: float = 1.0) -> Tensor:
    """Return softmax(scale * scores) over the keys that a query may see; the others get exactly 0.

    scores [.., queries, keys], copied unless contiguous; query q sees keys 0 ... keys - queries +
    q. A query that sees nothing, or nothing above -infinity, gets all zeros. Raises KernelError for
    types other than fp32, fp16 and bf16.
    """
    result: Tensor = _softmax(scores.contiguous(), None, scale)
    return result


def masked_softmax(scores: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
    """Return softmax(scale * scores) over the keys where `mask` is False; the others get exactly 0.

    scores [b, heads, queries, keys], mask bool [b or 1, 1, queries, keys]. A query that sees
    nothing, or nothing above -infinity, gets all zeros and no gradient. Raises KernelError for
    other types or shapes.
    """
    result: Tensor = _softmax(scores.contiguous(), mask.contiguous(), scale)
    return result
