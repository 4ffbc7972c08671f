"""Elementwise kernels: activations with the preceding layer's bias, and bias-dropout-add.

The activations are GELU in its tanh and its exact form, the gated units SwiGLU and GeGLU, and
squared ReLU; bias-dropout-add is residual + dropout(x + bias).

Activations: bytes moved for results of N elements of e bytes, with a bias of n elements: forward N
e in (gated 2 N e) and N e out; backward 2 N e in and N e out (gated 3 and 2). The bias is read
once per row, from a cache; its gradient is summed in the pass that makes dx, which adds 8 bytes a
column for each part of the rows, below 6 % (library.partial_sums).

Dropout: the mask is computed from a seed wherever it is needed and never stored. Element i is kept
where word i % 4 of Philox4x32-10 (Salmon et al., SC 2011), with key `seed` and counter i // 4, is
below floor((1 - p) 2^32): p is exact to 2^-32. i counts the elements of the whole job, of which the
tensor holds some rows (a Place). So the mask depends on seed, place and p alone, not on the layout,
the device, its wave size, the type, or the number of threads. Bytes moved for N elements of e
bytes: forward N e in for each of x and residual, N e out; backward N e in, N e out (the residual's
gradient is dy itself), and the bias as above.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron.kernels.library import (
    Function,
    check,
    check_all,
    check_beside,
    check_shape,
    empty_like_first,
    fits,
    narrow,
    operator,
    partial_sums,
)
from megatron.parallel.sharding import WHOLE, Place, dropout_mask, left_to_autograd

KINDS = {
    "gelu": 0,
    "openai_gelu": 0,
    "swiglu": 1,
    "squared_relu": 2,
    "exact_gelu": 3,
    "geglu": 4,
    "exact_geglu": 5,
}
"""The kinds of activation, and their numbers in the C interface."""

_FORWARD = Function("mk_bias_activation", "ipppll")
_BACKWARD = Function("mk_bias_activation_backward", "ipppppplll")


def wider(x: Tensor) -> Tensor:
    """Return x in fp32; fp64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap tanh(x / cap)."""
    return (x / cap).tanh() * cap


def _inputs(kind: str) -> int:
    """Return how many columns of the input make one of the result."""
    return 2 if kind.endswith("glu") else 1


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
    wide = wider(x)
    if bias is not None:
        wide = wide + bias.to(wide.dtype)
    return activate(wide, kind).to(x.dtype)


def activate(x: Tensor, kind: str) -> Tensor:
    """Apply the activation in the type of x, by torch: see bias_activation."""
    assert kind in KINDS, f"unknown activation {kind}"
    if kind == "squared_relu":
        return F.relu(x).square()
    gate, *value = x.chunk(2, dim=-1) if _inputs(kind) == 2 else (x,)
    y = F.silu(gate) if kind == "swiglu" else F.gelu(gate, approximate=_approximation(kind))
    return y * value[0] if value else y


def _approximation(kind: str) -> str:
    """Return torch's name for the form of GELU."""
    return "none" if kind.startswith("exact") else "tanh"


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
    if kind == "squared_relu":
        dx = 2.0 * g * F.relu(wide)
    else:
        gate, *value = wide.chunk(_inputs(kind), dim=-1)
        silu, form = kind == "swiglu", _approximation(kind)
        up = g * value[0] if value else g
        dx = (
            torch.ops.aten.silu_backward(up, gate)
            if silu
            else torch.ops.aten.gelu_backward(up, gate, approximate=form)
        )
        if value:
            y = F.silu(gate) if silu else F.gelu(gate, approximate=form)
            dx = torch.cat((dx, g * y), dim=-1)
    dbias = x.new_empty(0) if bias is None else dx.sum_to_size(bias.shape).to(x.dtype)
    return dx.to(x.dtype), dbias


def _like_gradients(
    gradient: Tensor, x: Tensor, bias: Tensor | None, kind: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(0) if bias is None else torch.empty_like(bias)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, bias, ctx.kind = inputs
    ctx.save_for_backward(x, bias)
    ctx.bias = bias  # itself: a saved tensor may be a copy, without a sink


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
    x, bias = ctx.saved_tensors
    dx, dbias = _bias_activation_backward(gradient.contiguous(), x, bias, ctx.kind)
    return dx, left_to_autograd(ctx.bias, dbias), None


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
    "exact_gelu": the form with erf. "squared_relu": So et al., arXiv 2109.08668. "swiglu", "geglu",
    "exact_geglu": Shazeer, arXiv 2002.05202; x [.., 2n], gate before value, bias [2n]. The gradient
    of the bias is summed in fp32. Raises KernelError for other kinds and shapes, and for types
    other than fp32, fp16 and bf16.
    """
    result: Tensor = _bias_activation(
        x.contiguous(), None if bias is None else bias.contiguous(), kind
    )
    return result


_SUM = Function("mk_bias_dropout_add", "pppplluwfiuwuu")
_SUM_BACKWARD = Function("mk_bias_dropout_add_backward", "ppppllluwfiuwuu")


def check_key(name: str, probability: float, seed: int) -> None:
    """Check the arguments that determine a mask."""
    check(
        name,
        0.0 <= probability < 1.0,
        f"probability is {probability}; it must be at least 0 and less than 1",
    )
    check(name, 0 <= seed < 2**63, f"seed is {seed}; it must be at least 0 and less than 2^63")


def threshold(probability: float) -> tuple[int, float]:
    """Return what the kernels take for `probability`.

    The bound below which a random word means "keep", and the factor of what is kept.
    """
    return min(int((1.0 - probability) * 2**32), 2**32 - 1), 1.0 / (1.0 - probability)


def _check_sum(
    name: str, x: Tensor, bias: Tensor | None, residual: Tensor | None, *law: Any
) -> None:
    check_key(name, *law[:2])
    if fits(x, bias, residual=residual):
        return
    check_all(name, x=x, residual=residual)
    check_beside(name, x, (torch.float32, x.dtype), bias=bias)
    check_shape(name, x.shape[-1:], bias=bias)
    check_shape(name, x.shape, residual=residual)


def _drop(wide: Tensor, probability: float, seed: int, place: Sequence[int]) -> Tensor:
    """Drop entries without a kernel: the mask has the same distribution, from torch's generator."""
    if probability == 0.0:
        return wide
    return wide * (
        dropout_mask(wide, probability, seed, Place(*place)) * (1.0 / (1.0 - probability))
    )


def _reference_sum(x: Tensor, bias: Tensor | None, residual: Tensor | None, *law: Any) -> Tensor:
    wide = x.float() if bias is None else x.float() + narrow(bias, x).float()
    wide = _drop(wide, *law)
    if residual is not None:
        wide = residual.float() + wide
    return wide.to(x.dtype, copy=True)  # never x itself


def _in_c(probability: float, seed: int, place: Sequence[int]) -> tuple[float, ...]:
    """Return the arguments that determine a mask as the kernels take them."""
    return seed, *threshold(probability), int(probability > 0.0), *place[:4]


def _sum(out: Tensor, x: Tensor, bias: Tensor | None, residual: Tensor | None, *law: Any) -> None:
    n = x.shape[-1]
    bias = None if bias is None else narrow(bias, x)
    _SUM(x, out, x, bias, residual, x.numel() // n, n, *_in_c(*law))


def _sum_backward(
    results: tuple[Tensor, Tensor], gradient: Tensor, biased: bool, *law: Any
) -> None:
    """Write dx and the gradient of the bias in fp32, which is empty if there is no bias."""
    n, (parts, partial) = gradient.shape[-1], partial_sums(gradient, biased)
    rows = gradient.numel() // n
    _SUM_BACKWARD(gradient, *results, partial, gradient, rows, n, parts, *_in_c(*law))


def _reference_sum_backward(gradient: Tensor, biased: bool, *law: Any) -> tuple[Tensor, Tensor]:
    dx, dbias = _like_sum_gradients(gradient, biased)
    wide = _drop(gradient.float(), *law)
    return dx.copy_(wide), wide.sum_to_size(dbias.shape) if biased else dbias


def _like_sum_gradients(gradient: Tensor, biased: bool, *_: Any) -> tuple[Tensor, Tensor]:
    dbias = gradient.new_empty(gradient.shape[-1] if biased else 0, dtype=torch.float32)
    return torch.empty_like(gradient), dbias


def _save_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.bias, residual, ctx.probability, ctx.seed, ctx.place = inputs
    ctx.added = residual is not None


def _sum_gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    dx, dbias = _bias_dropout_add_backward(
        gradient.contiguous(), ctx.bias is not None, ctx.probability, ctx.seed, ctx.place
    )
    dbias = left_to_autograd(ctx.bias, dbias)
    return dx, dbias, gradient if ctx.added else None, None, None, None


# Seed and place are SymInts, so that torch.compile does not compile once for each.
_bias_dropout_add_backward = operator(
    "bias_dropout_add_backward(Tensor gradient, bool biased, float probability, SymInt seed, "
    "SymInt[] place) -> (Tensor, Tensor)",
    _sum_backward,
    _reference_sum_backward,
    _like_sum_gradients,
    work="residual",
)
_bias_dropout_add = operator(
    "bias_dropout_add(Tensor x, Tensor? bias, Tensor? residual, float probability, SymInt seed, "
    "SymInt[] place) -> Tensor",
    _sum,
    _reference_sum,
    empty_like_first,
    check=_check_sum,
    save=_save_sum,
    backward=_sum_gradients,
    work="residual",
)


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    probability: float,
    seed: int,
    place: Place = WHOLE,
) -> Tensor:
    """Return residual + dropout(x + bias), computed in fp32 and rounded once.

    x [.., n], copied unless contiguous; bias [n] or None; residual like x or None; -> [.., n]. Each
    entry is zeroed with `probability` (0 <= p < 1) and scaled by 1 / (1 - p) otherwise, as a
    function of seed (0 <= seed < 2^63) and place in the whole, so that the backward pass and
    recomputation get the same mask. The gradient of the bias is summed in fp32, and not rounded if
    the bias is in fp32 and x in 16 bits. Dropping does not hide an element that is not finite: it
    gives NaN. Raises KernelError for other probabilities, seeds and shapes, and for types other
    than fp32, fp16 and bf16.
    """
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    result: Tensor = _bias_dropout_add(
        x.contiguous(), bias, residual, probability, seed, list(place)
    )
    return result


def keyed_dropout(
    x: Tensor,
    probability: float,
    seed: int | None,
    fused: bool = False,
    place: Place | list[Place] = WHOLE,
) -> Tensor:
    """Zero entries of x with `probability` and scale the others by 1 / (1 - probability).

    Without a seed, x itself. `place`: of the mask; a list has those of equal parts of x.
    """
    if probability == 0.0 or seed is None:
        return x
    if isinstance(place, list):
        parts = zip(x.chunk(len(place)), place, strict=True)
        return torch.cat([keyed_dropout(part, probability, seed, fused, at) for part, at in parts])
    if probability >= 1.0:
        return x * 0.0
    if fused:
        return bias_dropout_add(x, None, None, probability, seed, place)
    return x * dropout_mask(x, probability, seed, place) * (1.0 / (1.0 - probability))
