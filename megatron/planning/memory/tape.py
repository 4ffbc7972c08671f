"""What is held while a pass runs: blocks are taken and given back in the code's order, and the fullest moment stays.

Bytes are of three kinds here: activations (made by a forward pass), logits (of a chunk of tokens) and temporary (made
by a backward pass). What else a rank holds does not change during a pass.
"""
from __future__ import annotations

from typing import NamedTuple

ACTIVATIONS, LOGITS, TEMPORARY = range(3)

GPU_BLOCK, CPU_BLOCK = 512, 64
"""What a block's size is rounded up to: by the caching allocator of CUDA and ROCm (kMinBlockSize in
CUDACachingAllocator), and by torch's allocator of host memory."""


class Block(NamedTuple):
    """A tensor's memory."""

    kind: int
    n_bytes: float


class Held(NamedTuple):
    """Bytes of each kind."""

    activations: float = 0.0
    logits: float = 0.0
    temporary: float = 0.0

    @property
    def total(self) -> float:
        return self.activations + self.logits + self.temporary


class Tape:
    """The memory of one pass; 0 where it begins.

    kind     of blocks that are taken from now on
    now      bytes held, by kind
    fullest  the same at the moment of the largest sum
    """

    __slots__ = ("_block", "_most", "_now", "_peak", "_total", "kind")

    def __init__(self, block_bytes: int, kind: int = ACTIVATIONS) -> None:
        self.kind, self._block = kind, block_bytes
        self._now = [0.0, 0.0, 0.0]
        self._total = self._most = 0.0
        self._peak = (0.0, 0.0, 0.0)

    def take(self, n_bytes: float, kind: int | None = None) -> Block:
        """A block of `n_bytes`, rounded up."""
        size = -(-n_bytes // self._block) * self._block
        block = Block(self.kind if kind is None else kind, size)
        self._now[block.kind] += size
        self._total += size
        if self._total > self._most:
            self._note()
        return block

    def give(self, *blocks: Block | None) -> None:
        """Give blocks back."""
        for block in blocks:
            if block is not None:
                self._now[block.kind] -= block.n_bytes
                self._total -= block.n_bytes

    def add(self, held: Held, times: float = 1.0) -> None:
        """What other passes hold beside this one: it is not given back as blocks."""
        for kind, n_bytes in enumerate(held):
            self._now[kind] += times * n_bytes
            self._total += times * n_bytes
        self._note()

    def _note(self) -> None:
        if self._total > self._most:
            self._most = self._total
            self._peak = (self._now[0], self._now[1], self._now[2])

    def for_a_moment(self, *n_bytes: float) -> None:
        """Blocks that are given back at once."""
        self.give(*[self.take(size) for size in n_bytes])

    def begin_again(self) -> None:
        """Forget the fullest moment so far."""
        self._most = float("-inf")
        self._note()

    @property
    def now(self) -> Held:
        return Held(*self._now)

    @property
    def fullest(self) -> Held:
        return Held(*self._peak)
