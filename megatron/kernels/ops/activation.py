"""Activations with the bias of the layer before: GELU, SwiGLU, squared ReLU.

Bytes moved for results of N elements of e bytes, with a bias of n elements: forward N e in (SwiGLU 2 N e) and N e out;
backward 2 N e in and N e out (SwiGLU 3 and 2). The bias is read once a row, from a cache; its gradient is summed in the
pass that makes dx, which adds 8 bytes a column for each part of the rows, below 6 % (column_sums.py).
"""
from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from megatron.kernels.checks import check, check_columns, check_device, check_shape, check_type
from megatron.kernels.library import Function, available
from megatron.kernels.ops.column_sums import partial_sums
from megatron.kernels.register import operator

KINDS = {"gelu": 0, "openai_gelu": 0, "swiglu": 1, "squared_relu": 2}
"""The kinds of activation, and their numbers in the C interface."""

_FORWARD = Function("mk_bias_activation", "ipppll")
_BACKWARD = Function("mk_bias_activation_backward", "ipppppplll")


def _inputs(kind: str) -> int:
    """How many columns go into one of the result."""
    return 2 if kind == "swiglu" else 1


def _check(name: str, x: torch.Tensor, bias: torch.Tensor | None, kind: str) -> None:
    check(name, kind in KINDS, f"kind is {kind!r}; it must be one of {', '.join(KINDS)}")
    check_type(name, x=x, bias=bias)
    check_device(name, x=x, bias=bias)
    check_columns(name, "x", x)
    width = x.shape[-1]
    check(name, width % _inputs(kind) == 0, f"x has {width} columns; {kind} needs an even number, gate before value")
    check(name, x.is_contiguous(), f"x of strides {x.stride()} is not contiguous")
    check_shape(name, "bias", bias, (width,))
    check(name, bias is None or bias.is_contiguous(), "bias is not contiguous")


def _like_result(x: torch.Tensor, kind: str) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // _inputs(kind))


def reference(x: torch.Tensor, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """The same in torch's operators, in fp32 (fp64 for fp64 x): what serves where there is no kernel."""
    wide = x if x.dtype == torch.float64 else x.float()
    if bias is not None:
        wide = wide + bias.to(wide.dtype)
    if kind == "swiglu":
        gate, value = wide.chunk(2, dim=-1)
        return (F.silu(gate) * value).to(x.dtype)
    if kind == "squared_relu":
        return F.relu(wide).square().to(x.dtype)
    return F.gelu(wide, approximate="tanh").to(x.dtype)


def _forward(x: torch.Tensor, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    _check("bias_activation", x, bias, kind)
    if not available(x.device):
        return reference(x, bias, kind)
    out = _like_result(x, kind)
    if out.numel():
        n = out.shape[-1]
        _FORWARD(x, KINDS[kind], out, x, bias, out.numel() // n, n)
    return out


def _backward(
    gradient: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, gradient of the bias); the second is empty where there is no bias."""
    name = "bias_activation_backward"
    _check(name, x, bias, kind)
    check_type(name, gradient=gradient, x=x)
    check_device(name, gradient=gradient, x=x)
    check_shape(name, "gradient", gradient, (*x.shape[:-1], x.shape[-1] // _inputs(kind)))
    check(name, gradient.is_contiguous(), f"gradient of strides {gradient.stride()} is not contiguous")
    if not available(x.device):
        return _reference_backward(gradient, x, bias, kind)
    dx, dbias = _like_gradients(gradient, x, bias, kind)
    if not x.numel():
        return dx, dbias.zero_()
    n, partial, parts = gradient.shape[-1], None, 0
    rows = gradient.numel() // n
    if bias is not None:
        parts, partial = partial_sums(rows, n, x, sums=_inputs(kind))
    _BACKWARD(x, KINDS[kind], dx, dbias if bias is not None else None, partial, gradient, x, bias, rows, n, parts)
    return dx, dbias


def _reference_backward(
    gradient: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
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
    dbias = x.new_empty(0) if bias is None else dx.reshape(-1, dx.shape[-1]).sum(0).to(x.dtype)
    return dx.to(x.dtype), dbias


def _like_gradients(
    gradient: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(0) if bias is None else torch.empty_like(bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, bias, ctx.kind = inputs
    ctx.save_for_backward(x, bias)


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
    x, bias = ctx.saved_tensors
    dx, dbias = _bias_activation_backward(gradient.contiguous(), x, bias, ctx.kind)
    return dx, None if bias is None else dbias, None


_bias_activation_backward = operator(
    "bias_activation_backward(Tensor gradient, Tensor x, Tensor? bias, str kind) -> (Tensor, Tensor)",
    _backward, _like_gradients, work="activation",
)
_bias_activation = operator(
    "bias_activation(Tensor x, Tensor? bias, str kind) -> Tensor",
    _forward, lambda x, bias, kind: _like_result(x, kind), save=_save, backward=_gradients, work="activation",
)


def bias_activation(x: torch.Tensor, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
    """activation(x + bias), in fp32, rounded once.

    x [.., n], contiguous or copied; bias [n] or None; -> [.., n]. kind "gelu", also called "openai_gelu": the tanh form
    (Hendrycks and Gimpel, arXiv 1606.08415, section 2). "squared_relu": So et al., arXiv 2109.08668. "swiglu": Shazeer,
    arXiv 2002.05202; x [.., 2n], gate before value, bias [2n]. The gradient of the bias is summed in fp32. Raises
    KernelError for other kinds, shapes, and types than fp32, fp16 and bf16.
    """
    return _bias_activation(x.contiguous(), None if bias is None else bias.contiguous(), kind)
