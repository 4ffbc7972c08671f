"""residual + dropout(x + bias), with a mask that is computed from a seed wherever it is needed and never stored.

Element i is kept where word i % 4 of Philox4x32-10 (Salmon et al., SC 2011), of key `seed` and counter i // 4, is below
floor((1 - p) 2^32): p is exact to 2^-32. i counts the elements of the whole job, of which the tensor holds some rows (a
Place). So the mask depends on seed, place and p alone: not on how the whole is cut, the device, its waves, the type, or
the number of threads.

Bytes moved for N elements of e bytes: forward N e in for each of x and residual, N e out; backward N e in, N e out (the
residual's gradient is dy itself). The bias is read once a row, from a cache; its gradient is summed in the pass that
makes dx, which adds 8 bytes a column for each part of the rows, below 6 % at 4 bytes an element (column_sums.py).
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.kernels.checks import check, check_columns, check_device, check_shape, check_type
from megatron.kernels.library import Function, available
from megatron.kernels.ops.column_sums import partial_sums
from megatron.kernels.register import operator
from megatron.parallel.random import WHOLE, Place, dropout_mask

_FORWARD = Function("mk_bias_dropout_add", "pppplluwfiuwuu")
_BACKWARD = Function("mk_bias_dropout_add_backward", "ppppllluwfiuwuu")


def _check(name: str, probability: float, seed: int, place: Sequence[int], **tensors: torch.Tensor | None) -> None:
    check(name, 0.0 <= probability < 1.0, f"probability is {probability}; it must be at least 0 and less than 1")
    check(name, 0 <= seed < 2**63, f"seed is {seed}; it must be at least 0 and less than 2^63")
    check_type(name, **tensors)
    check_device(name, **tensors)
    for argument, tensor in tensors.items():
        if tensor is None:
            continue
        check(name, tensor.is_contiguous(), f"{argument} of strides {tensor.stride()} is not contiguous")
        check_columns(name, argument, tensor)
        rows = tensor.numel() // max(tensor.shape[-1], 1)
        check(name, place[1] == 1 or rows < 2**32, f"{argument} has {rows} rows; fewer than 2^32 are needed")


def law(probability: float) -> tuple[int, float, int]:
    """(bound of the words that are kept, scale, whether any is drawn), as the C interface takes them."""
    keep = min(int((1.0 - probability) * 2**32), 2**32 - 1)
    return keep, 1.0 / (1.0 - probability), int(probability > 0.0)


def _drop(wide: torch.Tensor, probability: float, seed: int, place: Sequence[int]) -> torch.Tensor:
    """Where there is no kernel: masks of torch's generator, another stream of the same law."""
    if probability == 0.0:
        return wide
    return wide * (dropout_mask(wide, probability, seed, Place(*place)) * (1.0 / (1.0 - probability)))


def reference(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, probability: float, seed: int,
    place: Sequence[int],
) -> torch.Tensor:
    """What serves where there is no kernel: torch's operators, in fp32, with another mask of the same law."""
    wide = x.float() if bias is None else x.float() + bias.float()
    wide = _drop(wide, probability, seed, place)
    if residual is not None:
        wide = residual.float() + wide
    return wide.to(x.dtype, copy=True)  # never x itself


def _forward(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, probability: float, seed: int,
    place: Sequence[int],
) -> torch.Tensor:
    name = "bias_dropout_add"
    if bias is not None and bias.dtype == torch.float32:
        bias = bias.to(x.dtype)
    _check(name, probability, seed, place, x=x, bias=bias, residual=residual)
    check_shape(name, "bias", bias, (x.shape[-1],))
    check_shape(name, "residual", residual, tuple(x.shape))
    if not available(x.device):
        return reference(x, bias, residual, probability, seed, place)
    out = torch.empty_like(x)
    if out.numel():
        n = x.shape[-1]
        _FORWARD(x, out, x, bias, residual, x.numel() // n, n, seed, *law(probability), *place[:4])
    return out


def _backward(
    gradient: torch.Tensor, biased: bool, probability: float, seed: int, place: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, gradient of the bias, fp32); the second is empty where there is no bias."""
    _check("bias_dropout_add_backward", probability, seed, place, gradient=gradient)
    dx, dbias = _like_gradients(gradient, biased, probability, seed, place)
    if not available(gradient.device):
        wide = _drop(gradient.float(), probability, seed, place)
        return dx.copy_(wide), wide.reshape(-1, wide.shape[-1]).sum(0) if biased else dbias
    if not gradient.numel():
        return dx, dbias.zero_()
    n, partial, parts = gradient.shape[-1], None, 0
    rows = gradient.numel() // n
    if biased:
        parts, partial = partial_sums(rows, n, gradient)
    _BACKWARD(
        gradient, dx, dbias if biased else None, partial, gradient, rows, n, parts, seed, *law(probability), *place[:4]
    )
    return dx, dbias


def _like_gradients(
    gradient: torch.Tensor, biased: bool, probability: float, seed: int, place: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    dbias = gradient.new_empty(gradient.shape[-1] if biased else 0, dtype=torch.float32)
    return torch.empty_like(gradient), dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, bias, residual, ctx.probability, ctx.seed, ctx.place = inputs
    ctx.biased, ctx.added = bias is not None, residual is not None


def _gradients(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    dx, dbias = _bias_dropout_add_backward(gradient.contiguous(), ctx.biased, ctx.probability, ctx.seed, ctx.place)
    return dx, dbias if ctx.biased else None, gradient if ctx.added else None, None, None, None


# Seed and place are SymInts, so that torch.compile does not compile once for each.
_bias_dropout_add_backward = operator(
    "bias_dropout_add_backward(Tensor gradient, bool biased, float probability, SymInt seed, SymInt[] place)"
    " -> (Tensor, Tensor)",
    _backward, _like_gradients, work="residual",
)
_bias_dropout_add = operator(
    "bias_dropout_add(Tensor x, Tensor? bias, Tensor? residual, float probability, SymInt seed, SymInt[] place)"
    " -> Tensor",
    _forward, lambda x, *_: torch.empty_like(x), save=_save, backward=_gradients, work="residual",
)


def bias_dropout_add(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, probability: float, seed: int,
    place: Place = WHOLE,
) -> torch.Tensor:
    """residual + dropout(x + bias), in fp32, rounded once.

    x [.., n], contiguous or copied; bias [n] or None; residual like x or None; -> [.., n]. Each entry is zeroed with
    `probability` (0 <= p < 1) and scaled by 1 / (1 - p) otherwise, as a function of seed (0 <= seed < 2^63) and place
    in the whole, so that the backward pass and recomputation make the same mask again. The gradient of the bias is
    summed in fp32, and not rounded where the bias is given in fp32 beside x in 16 bits. An element that is not finite
    is not hidden by being dropped: it gives NaN. Raises KernelError for other probabilities, seeds, shapes, and types
    than fp32, fp16 and bf16.
    """
    bias = None if bias is None else bias.contiguous()
    residual = None if residual is None else residual.contiguous()
    return _bias_dropout_add(x.contiguous(), bias, residual, probability, seed, list(place))
