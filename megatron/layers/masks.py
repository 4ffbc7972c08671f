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

    They depend on the distance alone, so the top left corner serves a shorter sequence. Beside the result a few
    matrices [length, length] are needed, not one for each head.
    """
    index = torch.arange(length, device=slopes.device, dtype=torch.promote_types(dtype, torch.float32))
    behind = index - index.unsqueeze(1)
    behind.masked_fill_(behind > 0, float("-inf"))
    bias = torch.empty(1, len(slopes), length, length, dtype=dtype, device=slopes.device)
    for head, slope in zip(bias[0], slopes, strict=True):
        torch.mul(behind, slope, out=head)
    return bias


class Alibi:
    """The slopes of this rank's heads, fp32 [heads], and the one bias that all layers of the rank share.

    No module and no buffer, like RotaryEmbedding: no checkpoint has it and no cast of the model touches it.
    """

    def __init__(self, slopes: torch.Tensor) -> None:
        self.slopes = slopes
        self._table: torch.Tensor | None = None
        self._scale = 1.0

    def bias(self, length: int, longest: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        """alibi_bias(slopes / scale, length, dtype), not to be written to.

        It is a corner of a table that is made anew when a longer one, or another kind, is asked for: for the powers of
        two up to `longest`, the positions of a sequence. A row of the table is a multiple of 16 entries long, so that
        a kernel loads many at once.
        """
        table = self._table
        if table is None or table.shape[-1] < length or table.dtype != dtype or self._scale != scale:
            self._table = None  # not two of them at once
            rows = max(length, min(1 << (length - 1).bit_length(), longest))
            self._table = table = alibi_bias(self.slopes / scale, -(-rows // 16) * 16, dtype)
            self._scale = scale
        return table[:, :, :length, :length]
