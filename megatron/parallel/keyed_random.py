"""Random numbers by global position.

They depend on their purpose, not on earlier draws. Whether an element is dropped depends on (seed,
layer, site) and on its position in the job's full tensor: sample, head, position, column. Thus
masks are the same on any layout, for any micro-batch size, with and without recomputation and after
a resume, and no generator state needs to be stored. A rank that holds a shard of the tensor has
that shard of the mask.
"""

from __future__ import annotations

import contextlib
import enum
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.parallel.hashing import mix


def name_key(name: str) -> int:
    """Return a number for a name; the same in every process and Python version."""
    return zlib.crc32(name.encode())


class Site(enum.IntEnum):
    """The points of the model at which a mask is drawn, or noise: for ROUTER, on a router's input;
    for CHOICE, in place of its scores.
    """

    EMBEDDING = 0
    ATTENTION = 1
    ATTENTION_OUTPUT = 2
    MLP_OUTPUT = 3
    ROUTER = 4
    CHOICE = 5


class RowLayout(NamedTuple):
    """The position of a tensor's rows among the job's rows [samples, heads, positions].

    Row r has the number start + r // period * outer + r % period * inner in the job; a head has
    `positions` rows. By default the tensor is the job's full tensor and is drawn as a whole.

    of_sample  number of rows in a sample
    samples    number of samples by which `start` is advanced, int64 [1] on the device, so that a
               replayed pass reads its current value; None: 0
    """

    start: int = 0
    period: int = 1
    outer: int = 1
    inner: int = 0
    positions: int = 0
    of_sample: int = 0
    samples: Tensor | None = None

    def after(self, rows: Tensor) -> Tensor:
        """Return the numbers of the rows at these distances from the first row."""
        numbers = rows + self.start
        return numbers if self.samples is None else numbers + self.samples * self.of_sample

    def first(self) -> int:
        """Return the number of the first row; with `samples`, the host waits for the device."""
        return self.start + (0 if self.samples is None else int(self.samples) * self.of_sample)


ALL_ROWS = RowLayout()


@dataclass(frozen=True)
class DropoutKey:
    """The source of a micro-batch's masks.

    seed     the run's seed
    sample   the index of the micro-batch's first sample
    samples  added to that index on the device; see RowLayout
    """

    seed: int
    sample: int
    samples: Tensor | None = None

    def at(self, layer: int, site: Site) -> int:
        """Return the seed of a layer's masks at one site."""
        return mix(self.seed, layer, int(site))

    def hidden(self, x: Tensor, rank: int = 0, ranks: int = 1) -> RowLayout:
        """Return the layout of x [s, b, h], shard `rank` of `ranks` of a sequence, as one head."""
        rows, samples = x.shape[:2]
        positions = rows * ranks
        start = self.sample * positions + rank * rows
        return RowLayout(start, samples, 1, positions, positions, positions, self.samples)

    def weights(self, positions: int, heads: int, rank: int = 0, ranks: int = 1) -> RowLayout:
        """Return the layout of attention weights [b, heads, positions, keys].

        The tensor is shard `rank` of `ranks` of the heads.
        """
        start = (self.sample * ranks + rank) * heads * positions
        of_sample = ranks * heads * positions
        return RowLayout(start, heads * positions, of_sample, 1, positions, of_sample, self.samples)


def dropout_mask(
    like: Tensor, probability: float, seed: int, layout: RowLayout = ALL_ROWS
) -> Tensor:
    """Return a boolean mask of `like`'s shape, True with probability 1 - `probability`.

    Each head of each sample is drawn separately and in full; the result has the rows that `layout`
    gives. With ALL_ROWS the mask is drawn as a whole.
    """
    keep = torch.empty(like.shape, dtype=torch.bool, device=like.device)
    return _draw(
        keep,
        seed,
        layout,
        lambda x, generator: x.bernoulli_(1.0 - probability, generator=generator),
    )


def placed_noise(like: Tensor, most: float, seed: int, layout: RowLayout) -> Tensor:
    """Return samples from U(1 - most, 1 + most) in `like`'s shape and dtype; see dropout_mask."""
    noise = torch.empty_like(like, memory_format=torch.contiguous_format)
    return _draw(
        noise,
        seed,
        layout,
        lambda x, generator: x.uniform_(1.0 - most, 1.0 + most, generator=generator),
    )


def _draw(
    out: Tensor,
    seed: int,
    layout: RowLayout,
    fill: Callable[[Tensor, torch.Generator], object],
) -> Tensor:
    """Fill `out` and return it; each head of each sample has a generator of its own.

    Without `layout.positions` there is one generator for all.
    """
    if out.is_meta:  # no data, nothing to draw
        return out
    generator = torch.Generator(device=out.device)
    if not layout.positions:
        fill(out, generator.manual_seed(seed))
        return out
    _, period, outer, inner, positions, *_ = layout
    start = layout.first()
    rows = out.view(-1, out.shape[-1])
    # The rows of a head are adjacent or, if samples are adjacent, `period` apart.
    heads = (
        rows.split(positions) if inner == 1 else [rows[sample::period] for sample in range(period)]
    )
    full = rows.new_empty(positions, out.shape[-1])
    for i, head_rows in enumerate(heads):
        row = i * positions if inner == 1 else i
        head, first = divmod(start + row // period * outer + row % period * inner, positions)
        fill(full, generator.manual_seed(mix(seed, head)))
        head_rows.copy_(full[first : first + len(head_rows)])
    return out


@contextlib.contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Seed the device's default generator inside the block and restore it afterwards.

    For operations that draw from it.
    """
    if device.type == "meta":  # without data nothing is drawn
        yield
        return
    # the CPU's state is always restored
    devices: list[torch.device] = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        (torch.get_device_module(device) if devices else torch).manual_seed(seed)
        yield
