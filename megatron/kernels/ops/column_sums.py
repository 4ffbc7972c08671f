"""Sums over all rows, as for a bias's gradient: each part of the rows leaves its own, which are then added.

The number of parts depends on the shape and the kind of device alone, not on how many threads or compute units there
are, so that the same gradient comes out again.
"""
from __future__ import annotations

import torch

_ROWS = 32  # at least, in a part: what it leaves, 8 bytes a column, stays below 6 % of what it reads and writes
_BLOCKS = 2048  # of 256 threads: more than two for each place that 110 (MI250X) or 132 (H100) compute units have
_HOST_PARTS = 64  # more than threads


def partial_sums(rows: int, columns: int, like: torch.Tensor, sums: int = 1) -> tuple[int, torch.Tensor]:
    """The number of parts, and room for their sums: fp32 [parts, sums, columns].

    columns    of the tiles: one lane has 16 bytes of them, in `like`'s type
    sums       how many sums each column has
    """
    if like.device.type == "cpu":
        most = _HOST_PARTS
    else:
        across = -(-columns * like.element_size() // (16 * 64))  # blocks of 64 lanes side by side
        most = max(1, _BLOCKS // across)
    parts = max(1, min(most, -(-rows // _ROWS)))
    return parts, torch.empty(parts, sums, columns, dtype=torch.float32, device=like.device)
