"""Random numbers that depend on what they are for, not on what was drawn before.

Whether an element is dropped depends on (seed, layer, site) and on its place in the tensor of the
whole job: sample, head, position, column. So masks are the same on any layout, for any size of the
micro-batch, with and without recomputation and after a resume, and no generator state needs to be
stored. A rank that holds a part of the tensor has that part of the mask.
"""

from __future__ import annotations

import contextlib
import enum
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """Return a well-spread 63-bit number: SplitMix64 (Steele et al., OOPSLA 2014) chained over the
    values.
    """
    state = 0
    for value in values:
        state = (state + 0x9E3779B97F4A7C15 + (value & _MASK)) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def name_key(name: str) -> int:
    """Return a number for a name; the same in every process and Python version."""
    return zlib.crc32(name.encode())


class Site(enum.IntEnum):
    """The places in a layer where a mask is used."""

    EMBEDDING = 0
    ATTENTION = 1
    ATTENTION_OUTPUT = 2
    MLP_OUTPUT = 3


class Place(NamedTuple):
    """The place of a tensor's rows among the rows [samples, heads, positions] of the whole job.

    Row r is number start + r // period * outer + r % period * inner of them; `positions` are those
    of a head. By default the tensor is the whole, and one piece.
    """

    start: int = 0
    period: int = 1
    outer: int = 1
    inner: int = 0
    positions: int = 0


WHOLE = Place()


@dataclass(frozen=True)
class DropoutKey:
    """The source of the masks of one micro-batch: the run's seed and the number of its first
    sample.
    """

    seed: int
    sample: int

    def at(self, layer: int, site: Site) -> int:
        """Return the seed of the masks of one site."""
        return mix(self.seed, layer, int(site))

    def hidden(self, x: torch.Tensor, rank: int = 0, ranks: int = 1) -> Place:
        """Return the place of x [s, b, h], part `rank` of `ranks` along the sequence; it counts as
        one head.
        """
        rows, samples = x.shape[:2]
        positions = rows * ranks
        return Place(self.sample * positions + rank * rows, samples, 1, positions, positions)

    def weights(self, positions: int, heads: int, rank: int = 0, ranks: int = 1) -> Place:
        """Return the place of attention weights [b, heads, positions, keys], part `rank` of `ranks`
        of the heads.
        """
        start = (self.sample * ranks + rank) * heads * positions
        return Place(start, heads * positions, ranks * heads * positions, 1, positions)


def dropout_mask(
    like: torch.Tensor, probability: float, seed: int, place: Place = WHOLE
) -> torch.Tensor:
    """Return a boolean mask of `like`'s shape, True with 1 - probability.

    In each head of each sample it is a part of a mask of its own.
    """
    keep = torch.empty(like.shape, dtype=torch.bool, device=like.device)
    if like.is_meta:  # without data there is nothing to draw
        return keep
    generator = torch.Generator(device=like.device)
    if not place.positions:
        return keep.bernoulli_(1.0 - probability, generator=generator.manual_seed(seed))
    start, period, outer, inner, positions = place
    rows = keep.view(-1, keep.shape[-1])
    # The rows of a head are neighbours, or, where samples are, `period` apart.
    heads = (
        rows.split(positions) if inner == 1 else [rows[sample::period] for sample in range(period)]
    )
    whole = rows.new_empty(positions, keep.shape[-1])
    for i, part in enumerate(heads):
        row = i * positions if inner == 1 else i
        head, first = divmod(start + row // period * outer + row % period * inner, positions)
        whole.bernoulli_(1.0 - probability, generator=generator.manual_seed(mix(seed, head)))
        part.copy_(whole[first : first + len(part)])
    return keep


@contextlib.contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the device's default generator inside the block and restore it after: for operations
    that draw from it.
    """
    if device.type == "meta":  # without data there is nothing to draw
        yield
        return
    # the CPU's state is always restored
    devices: list[torch.device] = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        (torch.get_device_module(device) if devices else torch).manual_seed(seed)
        yield
