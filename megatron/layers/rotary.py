"""Rotary position embedding (Su et al., arXiv 2104.09864), in halves as GPT-NeoX and Llama do."""
from __future__ import annotations

import torch

from megatron.kernels.ops import rotary as kernel

Angles = tuple[torch.Tensor, torch.Tensor]


class RotaryEmbedding:
    """Angles for the first `dimension` entries of each head; shared by the layers of a rank.

    No module and no buffer: a cast of the model to bf16 must not touch the angles.
    """

    def __init__(self, dimension: int, base: float, fused: bool = False) -> None:
        assert dimension % 2 == 0, f"rotary dimension {dimension} is odd"
        self.dimension, self.base, self.fused = dimension, base, fused
        self._table: Angles | None = None

    def _grown(self, length: int, device: torch.device) -> Angles:
        table = self._table
        if table is None or table[0].shape[0] < length or table[0].device != device:
            exponent = torch.arange(0, self.dimension, 2, dtype=torch.float64) / self.dimension
            angles = torch.outer(torch.arange(length, dtype=torch.float64), self.base**-exponent)
            self._table = table = (angles.cos().float().to(device), angles.sin().float().to(device))
        return table

    def angles(self, length: int, position_ids: torch.Tensor | None, device: torch.device) -> Angles:
        """(cos, sin), fp32 [s, 1 or b, 1, dimension/2]; positions 0 ... length-1 where no ids [b, s] are given."""
        cos, sin = self._grown(length, device)
        if position_ids is None:
            return cos[:length, None, None, :], sin[:length, None, None, :]
        ids = position_ids.t()
        return cos[ids].unsqueeze(2), sin[ids].unsqueeze(2)

    def rotate(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Rotate x [s, b, heads, d]; entries past `dimension` stay as they are. Arithmetic in fp32; contiguous result.

        x may be a slice of the fused projection: the kernel reads it where it lies.
        """
        cos, sin = angles
        if self.fused:
            return kernel.rotate(x, cos, sin)
        turned, rest = x[..., : self.dimension].float(), x[..., self.dimension :]
        low, high = turned.chunk(2, dim=-1)
        turned = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned

    def rotate_groups(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        """The same for x [s, b, groups, queries, d] -> [s, b, groups * queries, d].

        In a slice of the fused projection the heads of different groups have no common stride, but groups and samples
        have one, and so have samples and positions: the kernel needs no copy.
        """
        s, b, groups, queries, d = x.shape
        cos, sin = angles
        if not self.fused:
            turned = self.rotate(x, (cos.unsqueeze(3), sin.unsqueeze(3)))
        elif cos.shape[1] == 1:
            turned = self.rotate(x.flatten(1, 2), angles)
        else:
            turned = self.rotate(x.flatten(0, 1), (cos.flatten(0, 1).unsqueeze(1), sin.flatten(0, 1).unsqueeze(1)))
        return turned.view(s, b, groups * queries, d)
