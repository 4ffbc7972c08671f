"""Dropout by key: see megatron.parallel.random.

With `fused` the mask comes out of the kernel's counter-based generator, without it out of torch's: other masks of the
same law, each a function of the seed and the place alone.
"""
from __future__ import annotations

import torch

from megatron.kernels.ops import dropout as kernel
from megatron.parallel.random import WHOLE, Place, dropout_mask
from megatron.parallel.sink import wide


def keyed_dropout(
    x: torch.Tensor, probability: float, seed: int | None, fused: bool = False, place: Place = WHOLE
) -> torch.Tensor:
    """Zero entries of x with `probability` and scale the others by 1 / (1 - probability); no seed: x itself."""
    if probability == 0.0 or seed is None:
        return x
    if probability >= 1.0:
        return x * 0.0
    if fused:
        return kernel.bias_dropout_add(x, None, None, probability, seed, place)
    return x * dropout_mask(x, probability, seed, place) * (1.0 / (1.0 - probability))


def bias_dropout_add(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, probability: float, seed: int | None,
    fused: bool = False, place: Place = WHOLE,
) -> torch.Tensor:
    """residual + dropout(x + bias), in the residual's dtype. A residual of another dtype than x takes torch's way."""
    if seed is None:
        probability = 0.0
    if bias is not None:
        bias = wide(bias)
    if fused and x.dtype == residual.dtype and probability < 1.0 and (bias is not None or probability > 0.0):
        return kernel.bias_dropout_add(x, bias, residual, probability, seed or 0, place)
    if bias is not None:
        x = x + bias
    return (residual + keyed_dropout(x, probability, seed, place=place)).to(residual.dtype)
