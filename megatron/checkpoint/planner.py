"""Tensors of which a rank holds some boxes: a ZeRO fragment is a list of boxes, not a slice along a dimension."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron.engine.fragments import Index


@dataclass(frozen=True)
class Shards:
    """A tensor of `shape`, of which this rank holds `pieces`: {global offset: view}."""

    shape: tuple[int, ...]
    pieces: Mapping[Index, torch.Tensor]
