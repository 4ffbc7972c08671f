"""ALiBi: scores that fall with the distance between query and key."""
from __future__ import annotations

import math

import torch


def alibi_slopes(heads: int) -> torch.Tensor:
    """The slope of each head, fp32 [heads] (Press et al., arXiv 2108.12409, section 3).

    A power of two gives 2^(-8/heads), 2^(-16/heads), ...; another count takes those of the power below and fills up
    with every second one of the power above, as the authors' code does.
    """

    def geometric(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    power = 2 ** math.floor(math.log2(heads))
    return torch.tensor(geometric(power) + geometric(2 * power)[0::2][: heads - power])


def alibi_bias(slopes: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Additive scores [1, heads, length, length]: -slope * (i - j) for keys j <= i, -infinity for the others.

    They depend on the distance alone, so the top left corner serves a shorter sequence.
    """
    index = torch.arange(length, device=slopes.device)
    distance = (index.unsqueeze(1) - index.unsqueeze(0)).float()
    bias = -slopes.view(1, -1, 1, 1) * distance
    return bias.masked_fill(distance < 0, float("-inf")).to(dtype)
