"""Dropout by key: see megatron.parallel.random."""
from __future__ import annotations

import torch

from megatron.parallel.random import dropout_mask


def keyed_dropout(x: torch.Tensor, probability: float, seed: int | None) -> torch.Tensor:
    """Zero entries of x with `probability` and scale the others by 1 / (1 - probability); no seed: x itself."""
    if probability == 0.0 or seed is None:
        return x
    if probability >= 1.0:
        return x * 0.0
    return x * dropout_mask(x, probability, seed) * (1.0 / (1.0 - probability))


def bias_dropout_add(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, probability: float, seed: int | None
) -> torch.Tensor:
    """residual + dropout(x + bias), in the residual's dtype."""
    if bias is not None:
        x = x + bias
    return residual + keyed_dropout(x, probability, seed)
