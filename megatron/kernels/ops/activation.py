"""Activations with the bias of the preceding layer: GELU, SwiGLU, squared ReLU.

Bytes moved for results of N elements of e bytes, with a bias of n elements: forward N e in (SwiGLU
2 N e) and N e out; backward 2 N e in and N e out (SwiGLU 3 and 2). The bias is read once per row,
from a cache; its gradient is summed in the pass that makes dx, which adds 8 bytes a column for each
part of the rows, below 6 % (operators.partial_sums).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.kernels.library import Function
from megatron.kernels.operators import check, check_all, check_shape, operator, partial_sums

KINDS = {"gelu": 0, "openai_gelu": 0, "swiglu": 1, "squared_relu": 2}
"""The kinds of activation, and their numbers in the C interface."""

_FORWARD = Function("mk_bias_activation", "ipppll")
_BACKWARD = Function("mk_bias_activation_backward", "ipppppplll")


def _inputs(kind: str) -> int:
    """Return how many columns of the input make one of the result."""
    return 2 if kind == "swiglu" else 1


def _check(name: str, x: Tensor, bias: Tensor | None, kind: str) -> None:
    check(name, kind in KINDS, f"kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    check_all(name, x=x, bias=bias)
    width = x.shape[-1]
    check(
        name,
        width % _inputs(kind) == 0,
        f"x has {width} columns; {kind} needs an even number, gate before value",
    )
    check_shape(name, (width,), bias=bias)


def _like_result(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // _inputs(kind))


def reference(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """Compute the activation with torch's operators, in fp32 (fp64 for fp64 x)."""
    wide = x if x.dtype == torch.float64 else x.float()
    if bias is not None:
        wide = wide + bias.to(wide.dtype)
    if kind == "swiglu":
        gate, value = wide.chunk(2, dim=-1)
        return (F.silu(gate) * value).to(x.dtype)
    if kind == "squared_relu":
        return F.relu(wide).square().to(x.dtype)
    return F.gelu(wide, approximate="tanh").to(x.dtype)


def _forward(out: Tensor, x: Tensor, bias: Tensor | None, kind: str) -> None:
    n = out.shape[-1]
    _FORWARD(x, KINDS[kind], out, x, bias, out.numel() // n, n)


def _backward(
    results: tuple[Tensor, Tensor], gradient: Tensor, x: Tensor, bias: Tensor | None, kind: str
) -> None:
    """Write dx and the gradient of the bias, which is empty if there is no bias."""
    n = gradient.shape[-1]
    parts, partial = partial_sums(gradient, bias is not None, _inputs(kind))
    rows = gradient.numel() // n
    _BACKWARD(x, KINDS[kind], *results, partial, gradient, x, bias, rows, n, parts)


def _reference_backward(
    gradient: Tensor, x: Tensor, bias: Tensor | None, kind: str
) -> tuple[Tensor, Tensor]:
    wide, g = x.float(), gradient.float()
    if bias is not None:
        wide = wide + bias.float()
    if kind == "swiglu":
        gate, value = wide.chunk(2, dim=-1)
        dx = torch.cat((torch.ops.aten.silu_backward(g * value, gate), g * F.silu(gate)), dim=-1)
    elif kind == "squared_relu":
        dx = 2.0 * g * F.relu(wide)
    else:
        dx = torch.ops.aten.gelu_backward(g, wide, approximate="tanh")
    dbias = x.new_empty(0) if bias is None else dx.sum_to_size(bias.shape).to(x.dtype)
    return dx.to(x.dtype), dbias


def _like_gradients(
    gradient: Tensor, x: Tensor, bias: Tensor | None, kind: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(0) if bias is None else torch.empty_like(bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.kind = inputs
    ctx.save_for_backward(x, bias)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
    x, bias = ctx.saved_tensors
    dx, dbias = _bias_activation_backward(gradient.contiguous(), x, bias, ctx.kind)
    return dx, None if bias is None else dbias, None


_bias_activation_backward = operator(
    "bias_activation_backward(Tensor gradient, Tensor x, Tensor? bias, str kind) -> (Tensor, "
    "Tensor)",
    _backward,
    _reference_backward,
    _like_gradients,
    work="activation",
)
_bias_activation = operator(
    "bias_activation(Tensor x, Tensor? bias, str kind) -> Tensor",
    _forward,
    reference,
    _like_result,
    check=_check,
    save=_save,
    backward=_gradients,
    work="activation",
)


def bias_activation(x: Tensor, bias: Tensor | None, kind: str) -> Tensor:
    """Return activation(x + bias), computed in fp32 and rounded once.

    x [.., n], copied unless contiguous; bias [n] or None; -> [.., n]. kind "gelu", also called
    "openai_gelu": the tanh form (Hendrycks and Gimpel, arXiv 1606.08415, section 2).
    "squared_relu": So et al., arXiv 2109.08668. "swiglu": Shazeer, arXiv 2002.05202; x [.., 2n],
    gate before value, bias [2n]. The gradient of the bias is summed in fp32. Raises KernelError for
    other kinds and shapes, and for types other than fp32, fp16 and bf16.
    """
    result: Tensor = _bias_activation(
        x.contiguous(), None if bias is None else bias.contiguous(), kind
    )
    return result
