"""How parameters come into being: the same global weights on any layout and any device.

A global tensor is drawn in blocks along its tensor-parallel dimension; each block has a generator of its own, seeded by
(seed, name, block). A rank draws only the blocks that its shard touches, on the CPU, in fp32: torch's generator of the
CPU and its logarithms and cosines have no equal on a device. Several threads draw, and what is drawn travels to the
device while the next blocks are drawn.
"""
from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megatron.parallel.random import mix, name_key
from megatron.parallel.sharding import Sharding, attach, shard

BLOCK = 64
_PIECE = 1 << 20
"""Elements that a thread draws at a time, at least: some milliseconds, and all threads end together."""
Fill = Callable[[torch.Tensor, torch.Generator, tuple[int, ...]], object]
"""Fills a block of a parameter: (block, generator, the parameter's global shape). Several threads call it at once."""


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


def draw(
    sharding: Sharding, local_shape: Sequence[int], fill: Fill, seed: int, device: torch.device | None = None
) -> torch.Tensor:
    """The values of one shard, fp32 on `device`, or on the CPU; padding is zero.

    Beside them there are at most two pieces of _PIECE elements, or of a block where that is more, for each thread, on
    the host and on the device.
    """
    dim = 0 if sharding.dim is None else sharding.dim
    device = device or torch.device("cpu")
    rest = [n for d, n in enumerate(sharding.global_shape) if d != dim]
    total, start, extent = sharding.global_shape[dim], sharding.offset[dim], sharding.extent[dim]
    out = torch.zeros(tuple(local_shape), device=device)
    target = out.movedim(dim, 0)
    rows = BLOCK * max(1, _PIECE // (BLOCK * max(1, math.prod(rest))))  # of a piece

    def values(piece: torch.Tensor, first: int) -> torch.Tensor:
        """Fills `piece` with the rows from `first`, a block's first, on."""
        for i, block in enumerate(piece.split(BLOCK), first // BLOCK):
            fill(block, torch.Generator().manual_seed(mix(seed, name_key(sharding.name), i)), sharding.global_shape)
        return piece

    def pieces() -> Iterator[tuple[torch.Tensor, int]]:
        """Host memory and the first row of each piece; pinned memory, which torch keeps until a copy has been made."""
        for first in range(start // BLOCK * BLOCK, start + extent, rows):
            count = min(rows, -(-(start + extent) // BLOCK) * BLOCK - first, total - first)
            yield torch.empty(count, *rest, pin_memory=device.type != "cpu"), first

    def put(piece: torch.Tensor, first: int) -> None:
        low, high = max(first, start), min(first + len(piece), start + extent)
        # The rows may be columns of the shard: they get there on the device.
        target[low - start : high - start] = piece[low - first : high - first].to(device, non_blocking=True)

    threads = min(torch.get_num_threads(), -(-extent // rows))
    if threads < 2:
        for piece, first in pieces():
            put(values(piece, first), first)
        return out
    with ThreadPoolExecutor(threads) as pool:
        waiting: deque[tuple[Future[torch.Tensor], int]] = deque()
        todo = pieces()
        while True:
            waiting.extend(
                (pool.submit(values, piece, first), first)
                for piece, first in itertools.islice(todo, 2 * threads - len(waiting))
            )
            if not waiting:
                return out
            drawn, first = waiting.popleft()
            put(drawn.result(), first)


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
            values = draw(sharding, local_shape, fill, self.seed, self.device)
        return attach(torch.nn.Parameter(values), sharding, self.size)
