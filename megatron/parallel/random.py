"""Random numbers that are a function of what they are for, not of what was drawn before.

A dropout mask is drawn from a generator that is seeded by (seed, first sample of the micro-batch, layer, site). So the
mask is the same on any pipeline layout, with and without recomputation, after a resume, and on any number of
data-parallel ranks, and no generator state needs to be stored. Where tensor parallelism shards the tensor, the tensor
rank enters the key too, so that shards are independent; where it replicates the tensor, it does not, so that replicas
stay equal.
"""
from __future__ import annotations

import contextlib
import enum
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """A well-spread 63-bit number from whole numbers: SplitMix64 (Steele et al., OOPSLA 2014) chained over them."""
    state = 0
    for value in values:
        state = (state + 0x9E3779B97F4A7C15 + (value & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def name_key(name: str) -> int:
    """A number that stands for a name; the same in every process and Python version."""
    return zlib.crc32(name.encode())


class Site(enum.IntEnum):
    """Where in a layer a mask is used."""

    EMBEDDING = 0
    ATTENTION = 1
    ATTENTION_OUTPUT = 2
    MLP_OUTPUT = 3


@dataclass(frozen=True)
class DropoutKey:
    """What the masks of one micro-batch on one rank depend on."""

    seed: int
    sample: int
    tensor_rank: int = 0

    def at(self, layer: int, site: Site, sharded: bool) -> int:
        """The seed of one mask. `sharded`: the tensor ranks hold different parts of the tensor."""
        return mix(self.seed, self.sample, layer, int(site), self.tensor_rank + 1 if sharded else 0)


def dropout_mask(like: torch.Tensor, probability: float, seed: int) -> torch.Tensor:
    """Boolean mask of `like`'s shape, True with 1 - probability."""
    if like.is_meta:  # without data there is nothing to draw
        return torch.empty_like(like, dtype=torch.bool)
    generator = torch.Generator(device=like.device)
    generator.manual_seed(seed)
    keep = torch.empty(like.shape, dtype=torch.bool, device=like.device)
    return keep.bernoulli_(1.0 - probability, generator=generator)


@contextlib.contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the device's default generator inside the block and restore it after: for operations that draw from it."""
    if device.type == "meta":  # without data there is nothing to draw
        yield
    elif device.type == "cpu":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            yield
    else:
        with torch.random.fork_rng(devices=[device], device_type=device.type):
            torch.get_device_module(device).manual_seed(seed)
            yield
