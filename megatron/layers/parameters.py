"""How parameters come into being: the same global weights on any layout and any device.

A global tensor is drawn in blocks along its tensor-parallel dimension; each block has a generator of its own, seeded by
(seed, name, block). A rank draws only the blocks that its shard touches, on the CPU, in fp32.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from megatron.parallel.random import mix, name_key
from megatron.parallel.sharding import Sharding, attach, shard

BLOCK = 64
Fill = Callable[[torch.Tensor, torch.Generator, tuple[int, ...]], object]
"""Fills a block of a parameter: (block, generator, the parameter's global shape)."""


def normal(std: float) -> Fill:
    """N(0, std^2)."""
    return lambda block, generator, shape: block.normal_(0.0, std, generator=generator)


def xavier_uniform() -> Fill:
    """U(-a, a), a = sqrt(6 / (fan in + fan out)) of the global matrix (Glorot and Bengio, 2010, eq. 16)."""

    def fill(block: torch.Tensor, generator: torch.Generator, shape: tuple[int, ...]) -> None:
        bound = math.sqrt(6.0 / (shape[-1] + shape[-2]))
        block.uniform_(-bound, bound, generator=generator)

    return fill


def constant(value: float) -> Fill:
    return lambda block, generator, shape: block.fill_(value)


def draw(sharding: Sharding, local_shape: Sequence[int], fill: Fill, seed: int) -> torch.Tensor:
    """The values of one shard, fp32 on the CPU; padding is zero."""
    dim = 0 if sharding.dim is None else sharding.dim
    rest = [n for d, n in enumerate(sharding.global_shape) if d != dim]
    total, start, extent = sharding.global_shape[dim], sharding.offset[dim], sharding.extent[dim]
    out = torch.zeros(tuple(local_shape))
    target = out.movedim(dim, 0)
    for block in range(start // BLOCK, -(-(start + extent) // BLOCK)):
        first = block * BLOCK
        values = torch.empty(min(BLOCK, total - first), *rest)
        generator = torch.Generator().manual_seed(mix(seed, name_key(sharding.name), block))
        fill(values, generator, sharding.global_shape)
        low, high = max(first, start), min(first + len(values), start + extent)
        target[low - start : high - start] = values[low - first : high - first]
    return out


class ParameterFactory:
    """Creates fp32 parameters on a device, with their Sharding attached.

    `perform_initialization=False` leaves zeros: for a model that is loaded from a checkpoint at once.
    """

    def __init__(
        self, seed: int, tensor_rank: int, tensor_size: int, device: torch.device, perform_initialization: bool = True
    ) -> None:
        self.seed, self.rank, self.size, self.device = seed, tensor_rank, tensor_size, device
        self.perform_initialization = perform_initialization

    def create(
        self,
        name: str,
        global_shape: Sequence[int],
        dim: int | None,
        fill: Fill,
        *,
        padded: int | None = None,
        **properties: bool,
    ) -> torch.nn.Parameter:
        """One parameter. `dim` is cut over the tensor ranks after padding it to `padded` entries."""
        sharding = shard(name, global_shape, dim, self.rank, self.size, padded=padded, **properties)
        local_shape = list(global_shape)
        if dim is not None:
            local_shape[dim] = (padded or global_shape[dim]) // self.size
        if self.device.type == "meta" or not self.perform_initialization:
            values = torch.zeros(local_shape, device=self.device)
        else:
            values = draw(sharding, local_shape, fill, self.seed).to(self.device)
        return attach(torch.nn.Parameter(values), sharding, self.size)
