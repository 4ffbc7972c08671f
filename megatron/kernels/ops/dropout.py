"""residual + dropout(x + bias), with a mask that is computed from a seed wherever it is needed and
never stored.

Element i is kept where word i % 4 of Philox4x32-10 (Salmon et al., SC 2011), with key `seed` and
counter i // 4, is below floor((1 - p) 2^32): p is exact to 2^-32. i counts the elements of the
whole job, of which the tensor holds some rows (a Place). So the mask depends on seed, place and p
alone, not on the layout, the device, its wave size, the type, or the number of threads.

Bytes moved for N elements of e bytes: forward N e in for each of x and residual, N e out; backward
N e in, N e out (the residual's gradient is dy itself). The bias is read once per row, from a cache;
its gradient is summed in the pass that makes dx, which adds 8 bytes a column for each part of the
rows, below 6 % at 4 bytes an element.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    narrow,
    operator,
    partial_sums,
)
from megatron.parallel.random import WHOLE, Place, dropout_mask

_FORWARD = Function("mk_bias_dropout_add", "pppplluwfiuwuu")
_BACKWARD = Function("mk_bias_dropout_add_backward", "ppppllluwfiuwuu")


def check_key(name: str, probability: float, seed: int) -> None:
    """Check what a mask is drawn by."""
    check(
        name,
        0.0 <= probability < 1.0,
        f"probability is {probability}; it must be at least 0 and less than 1",
    )
    check(name, 0 <= seed < 2**63, f"seed is {seed}; it must be at least 0 and less than 2^63")


def threshold(probability: float) -> tuple[int, float]:
    """Return the bound below which a random word means "keep", and the factor of what is kept, as
    the kernels take.
    """
    return min(int((1.0 - probability) * 2**32), 2**32 - 1), 1.0 / (1.0 - probability)


def _check(name: str, x: Tensor, bias: Tensor | None, residual: Tensor | None, *law: Any) -> None:
    check_key(name, *law[:2])
    check_all(name, x=x, residual=residual)
    check_beside(name, x, (torch.float32, x.dtype), bias=bias)
    check_shape(name, x.shape[-1:], bias=bias)
    check_shape(name, x.shape, residual=residual)


def _drop(wide: Tensor, probability: float, seed: int, place: Sequence[int]) -> Tensor:
    """Drop entries without a kernel: the mask comes from torch's generator, with the same
    distribution.
    """
    if probability == 0.0:
        return wide
    return wide * (
        dropout_mask(wide, probability, seed, Place(*place)) * (1.0 / (1.0 - probability))
    )


def _reference(x: Tensor, bias: Tensor | None, residual: Tensor | None, *law: Any) -> Tensor:
    wide = x.float() if bias is None else x.float() + narrow(bias, x).float()
    wide = _drop(wide, *law)
    if residual is not None:
        wide = residual.float() + wide
    return wide.to(x.dtype, copy=True)  # never x itself


def _in_c(probability: float, seed: int, place: Sequence[int]) -> tuple[float, ...]:
    """Return what a mask is drawn by as the kernels take it."""
    return seed, *threshold(probability), int(probability > 0.0), *place[:4]


def _forward(
    out: Tensor, x: Tensor, bias: Tensor | None, residual: Tensor | None, *law: Any
) -> None:
    n = x.shape[-1]
    bias = None if bias is None else narrow(bias, x)
    _FORWARD(x, out, x, bias, residual, x.numel() // n, n, *_in_c(*law))


def _backward(results: tuple[Tensor, Tensor], gradient: Tensor, biased: bool, *law: Any) -> None:
    """Write dx and the gradient of the bias in fp32, which is empty if there is no bias."""
    n, (parts, partial) = gradient.shape[-1], partial_sums(gradient, biased)
    rows = gradient.numel() // n
    _BACKWARD(gradient, *results, partial, gradient, rows, n, parts, *_in_c(*law))


def _reference_backward(gradient: Tensor, biased: bool, *law: Any) -> tuple[Tensor, Tensor]:
    dx, dbias = _like_gradients(gradient, biased)
    wide = _drop(gradient.float(), *law)
    return dx.copy_(wide), wide.sum_to_size(dbias.shape) if biased else dbias


def _like_gradients(gradient: Tensor, biased: bool, *_: Any) -> tuple[Tensor, Tensor]:
    dbias = gradient.new_empty(gradient.shape[-1] if biased else 0, dtype=torch.float32)
    return torch.empty_like(gradient), dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, bias, residual, ctx.probability, ctx.seed, ctx.place = inputs
    ctx.biased, ctx.added = bias is not None, residual is not None


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    dx, dbias = _bias_dropout_add_backward(
        gradient.contiguous(), ctx.biased, ctx.probability, ctx.seed, ctx.place
    )
    return dx, dbias if ctx.biased else None, gradient if ctx.added else None, None, None, None


# Seed and place are SymInts, so that torch.compile does not compile once for each.
_bias_dropout_add_backward = operator(
    "bias_dropout_add_backward(Tensor gradient, bool biased, float probability, SymInt seed, "
    "SymInt[] place) -> (Tensor, Tensor)",
    _backward,
    _reference_backward,
    _like_gradients,
    work="residual",
)
_bias_dropout_add = operator(
    "bias_dropout_add(Tensor x, Tensor? bias, Tensor? residual, float probability, SymInt seed, "
    "SymInt[] place) -> Tensor",
    _forward,
    _reference,
    empty_like_first,
    check=_check,
    save=_save,
    backward=_gradients,
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
    the bias is in fp32 beside x in 16 bits. Dropping does not hide an element that is not finite:
    it gives NaN. Raises KernelError for other probabilities, seeds and shapes, and for types other
    than fp32, fp16 and bf16.
    """
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    result: Tensor = _bias_dropout_add(
        x.contiguous(), bias, residual, probability, seed, list(place)
    )
    return result


def keyed_dropout(
    x: Tensor, probability: float, seed: int | None, fused: bool = False, place: Place = WHOLE
) -> Tensor:
    """Zero entries of x with `probability` and scale the others by 1 / (1 - probability); no seed:
    x itself.
    """
    if probability == 0.0 or seed is None:
        return x
    if probability >= 1.0:
        return x * 0.0
    if fused:
        return bias_dropout_add(x, None, None, probability, seed, place)
    return x * dropout_mask(x, probability, seed, place) * (1.0 / (1.0 - probability))
