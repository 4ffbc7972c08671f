"""Rotary position embedding (Su et al., arXiv 2104.09864), in halves as GPT-NeoX and Llama do."""
from __future__ import annotations

import torch


class RotaryEmbedding:
    """Angles for the first `dimension` entries of each head; shared by the layers of a stage.

    No module and no buffer: a cast of the model to bf16 must not touch the angles.
    """

    def __init__(self, dimension: int, base: float) -> None:
        assert dimension % 2 == 0, f"rotary dimension {dimension} is odd"
        self.dimension, self.base = dimension, base
        self._table: tuple[torch.Tensor, torch.Tensor] | None = None

    def _grown(self, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        table = self._table
        if table is None or table[0].shape[0] < length or table[0].device != device:
            exponent = torch.arange(0, self.dimension, 2, dtype=torch.float64) / self.dimension
            angles = torch.outer(torch.arange(length, dtype=torch.float64), self.base**-exponent)
            self._table = table = (angles.cos().float().to(device), angles.sin().float().to(device))
        return table

    def angles(
        self, length: int, position_ids: torch.Tensor | None, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), fp32 [s, 1 or b, 1, dimension/2]; positions 0 ... length-1 where no ids [b, s] are given."""
        cos, sin = self._grown(length, device)
        if position_ids is None:
            return cos[:length, None, None, :], sin[:length, None, None, :]
        ids = position_ids.t()
        return cos[ids].unsqueeze(2), sin[ids].unsqueeze(2)

    def rotate(self, x: torch.Tensor, angles: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Rotate x [s, b, heads, d]; entries past `dimension` stay as they are. Arithmetic in fp32."""
        cos, sin = angles
        turned, rest = x[..., : self.dimension].float(), x[..., self.dimension :]
        low, high = turned.chunk(2, dim=-1)
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned
