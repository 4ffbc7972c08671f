"""What a query may attend to beyond plain causality: documents and ALiBi distances."""
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


def document_mask(document_ids: torch.Tensor) -> torch.Tensor:
    """Boolean [b, 1, s, s], True where query i may see key j: j <= i in the same document. document_ids [b, s]."""
    same = document_ids.unsqueeze(2) == document_ids.unsqueeze(1)
    length = document_ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=document_ids.device).tril()
    return (same & causal).unsqueeze(1)


def alibi_bias(slopes: torch.Tensor, length: int, documents: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Additive scores [1 or b, heads, s, s]: -slope * (i - j) for visible keys, -infinity for the others."""
    index = torch.arange(length, device=slopes.device)
    distance = (index.unsqueeze(1) - index.unsqueeze(0)).float()
    bias = -slopes.view(1, -1, 1, 1) * distance
    visible = documents if documents is not None else (distance >= 0).view(1, 1, length, length)
    return bias.masked_fill(~visible, float("-inf")).to(dtype)
