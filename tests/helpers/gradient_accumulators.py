"""Gradient accumulators of parameters, as the engine attaches them."""

from __future__ import annotations

from typing import Any

import torch

from megatron.parallel.gradient_accumulator import GradientAccumulator


def attach_accumulator(
    parameter: torch.nn.Parameter, sums: torch.dtype = torch.float32, **options: Any
) -> tuple[GradientAccumulator, list[torch.nn.Parameter]]:
    """Attach an accumulator whose sum, of type `sums`, is NaN, which nothing may read.

    Return it, and a list to which it appends the parameter whenever a gradient has been added.
    """
    done: list[torch.nn.Parameter] = []
    total = torch.full(parameter.shape, torch.nan, dtype=sums, device=parameter.device)
    accumulator = GradientAccumulator(parameter, total, done.append, **options)
    parameter.gradient_accumulator = accumulator  # type: ignore[attr-defined]
    return accumulator, done
