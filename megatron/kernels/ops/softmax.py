"""Softmax of attention scores, causal or masked, with the scale inside.

Bytes moved for scores of N elements of e bytes: forward N e in and N e out, and the mask, one byte an element, in each
of three passes, of which the heads share what a cache holds; backward 2 N e in and N e out. A causal row is read as far
as it sees: half of what goes in. Rows that are not made of full, aligned packs of 16 bytes go one element at a time and
are read up to three times. So are, by packs, rows of more than 65,536 elements (fp32: 32,768; in the backward pass half
of that on CUDA), which do not fit into registers.
"""
from __future__ import annotations

from typing import Any

import torch

from megatron.kernels.checks import check, check_columns, check_device, check_shape, check_type
from megatron.kernels.library import Function, available
from megatron.kernels.register import operator
from megatron.kernels.work import Memory

_CAUSAL = Function("mk_causal_softmax", "pplllf")
_MASKED = Function("mk_masked_softmax", "pppllllf")
_BACKWARD = Function("mk_softmax_backward", "ppplllf")


def _check(name: str, scores: torch.Tensor, mask: torch.Tensor | None = None) -> None:
    check_type(name, scores=scores)
    check_device(name, scores=scores, mask=mask)
    check(name, scores.is_contiguous(), f"scores of strides {scores.stride()} are not contiguous")
    check_columns(name, "scores", scores)
    check(name, scores.dim() >= 2, f"scores have {scores.dim()} dimension(s); [.., queries, keys] is needed")
    if mask is None:
        return
    check(name, scores.dim() == 4, f"scores have {scores.dim()} dimensions; [batch, heads, queries, keys] is needed")
    check(name, mask.dtype == torch.bool, f"mask is {mask.dtype}; it must be bool, True where hidden")
    check(name, mask.is_contiguous(), f"mask of strides {mask.stride()} is not contiguous")
    batch = mask.shape[0] if mask.dim() == 4 and mask.shape[0] == 1 else scores.shape[0]
    check_shape(name, "mask", mask, (batch, 1, *scores.shape[2:]))


def _hidden(scores: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    if mask is not None:
        return mask
    queries, keys = scores.shape[-2:]
    return torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu_(keys - queries + 1)


def reference(scores: torch.Tensor, mask: torch.Tensor | None, scale: float) -> torch.Tensor:
    """The same in torch's operators, in fp32 (fp64 for fp64 scores): what serves where there is no kernel."""
    wide = scores if scores.dtype == torch.float64 else scores.float()
    hidden = _hidden(scores, mask)
    out = (wide * scale).masked_fill(hidden, float("-inf")).softmax(-1)
    # A row that sees nothing above -infinity is all zero, rather than all NaN.
    nothing = (hidden | (wide == float("-inf"))).all(-1, keepdim=True)
    return out.masked_fill(nothing, 0.0).to(scores.dtype)


def _causal(scores: torch.Tensor, scale: float) -> torch.Tensor:
    _check("causal_softmax", scores)
    if not available(scores.device):
        return reference(scores, None, scale)
    queries, keys = scores.shape[-2:]
    out = torch.empty_like(scores)
    if out.numel():
        _CAUSAL(scores, out, scores, scores.numel() // keys, queries, keys, scale)
    return out


def _masked(scores: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    _check("masked_softmax", scores, mask)
    if not available(scores.device):
        return reference(scores, mask, scale)
    batch, heads, queries, keys = scores.shape
    out = torch.empty_like(scores)
    rows_per_sample = heads * queries * (batch if mask.shape[0] == 1 else 1)
    if out.numel():
        _MASKED(scores, out, scores, mask, batch * heads * queries, queries, rows_per_sample, keys, scale)
    return out


def _backward(gradient: torch.Tensor, probabilities: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    name = "softmax_backward"
    check_type(name, gradient=gradient, probabilities=probabilities)
    check_device(name, gradient=gradient, probabilities=probabilities)
    check_shape(name, "gradient", gradient, tuple(probabilities.shape))
    check_columns(name, "gradient", gradient)
    check(name, gradient.is_contiguous() and probabilities.is_contiguous(), "arguments must be contiguous")
    if not available(gradient.device):
        g, y = gradient.float(), probabilities.float()
        return (scale * y * (g - (g * y).sum(-1, keepdim=True))).to(gradient.dtype)
    queries, keys = probabilities.shape[-2:]
    out = torch.empty_like(gradient)
    if out.numel():
        rows = out.numel() // keys
        _BACKWARD(out, out, gradient, probabilities, rows, queries if causal else 0, keys, scale)
    return out


def _save_causal(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.scale = inputs[-1]


def _causal_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    (probabilities,) = ctx.saved_tensors
    return _softmax_backward(gradient.contiguous(), probabilities, ctx.scale, True), None


def _masked_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    (probabilities,) = ctx.saved_tensors
    return _softmax_backward(gradient.contiguous(), probabilities, ctx.scale, False), None, None


_softmax_backward = operator(
    "softmax_backward(Tensor gradient, Tensor probabilities, float scale, bool causal) -> Tensor",
    _backward, lambda gradient, probabilities, scale, causal: torch.empty_like(gradient),
)
_causal_softmax = operator(
    "causal_softmax(Tensor scores, float scale) -> Tensor",
    _causal, lambda scores, scale: torch.empty_like(scores), save=_save_causal, backward=_causal_gradient,
    work=lambda scores, scale: Memory(3 * scores.nbytes // 2),  # of a row only what it sees is read
)
_masked_softmax = operator(
    "masked_softmax(Tensor scores, Tensor mask, float scale) -> Tensor",
    _masked, lambda scores, mask, scale: torch.empty_like(scores), save=_save_causal, backward=_masked_gradient,
)


def causal_softmax(scores: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """softmax(scale * scores) over the keys that a query may see; the others get exactly 0.

    scores [.., queries, keys], contiguous or copied; query q sees keys 0 ... keys - queries + q. A query that
    sees nothing, or nothing above -infinity, gets all zeros. Raises KernelError for
    other types than fp32, fp16 and bf16.
    """
    return _causal_softmax(scores.contiguous(), scale)


def masked_softmax(scores: torch.Tensor, mask: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """softmax(scale * scores) over the keys where `mask` is False; the others get exactly 0.

    scores [b, heads, queries, keys], mask bool [b or 1, 1, queries, keys]. A query that sees nothing, or
    nothing above -infinity, gets all zeros and no gradient. Raises KernelError for other types or shapes.
    """
    return _masked_softmax(scores.contiguous(), mask.contiguous(), scale)
