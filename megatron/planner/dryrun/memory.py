"""Counts the memory of tensors without data, as an allocator would have to give it.

Storages are followed from the operator that makes them until nothing refers to them. Each has a category, by what the
rank did when it was made; peaks are kept in all and by category.
"""
from __future__ import annotations

import heapq
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.planner.dryrun.memory_kinds import CATEGORIES, Held

_LARGEST = 12
_NAMED_BYTES = 1 << 12  # smaller tensors do not get to know who asked for them
_size = operator.attrgetter("n_bytes")
_PACKAGE = str(Path(__file__).resolve().parents[2])
_FOLLOWERS = f"{_PACKAGE}/planner/"


@dataclass
class _Block:
    n_bytes: int
    category: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    when: str
    where: str
    name: str = ""
    watch: Any = None

    def held(self) -> Held:
        shape = f"{list(self.shape)} {str(self.dtype).removeprefix('torch.')}"
        if self.name:
            return Held(self.n_bytes, self.category, f"{self.name}, {shape}", "", "")
        return Held(self.n_bytes, self.category, shape, self.when, self.where)


class Memory:
    """The storages of one rank.

    block_bytes   every storage takes a multiple of it
    limit_bytes   the first tensor that does not fit into so many is noted as `broken_by`

    `category` and `when` are those of the storages that are made next.
    """

    def __init__(self, block_bytes: int, limit_bytes: float = float("inf")) -> None:
        self.block_bytes, self.limit_bytes = block_bytes, limit_bytes
        self.category, self.when = "temporary", ""
        self.now = dict.fromkeys(CATEGORIES, 0)
        self.total = 0
        self.peak_total = 0
        self.peak: Mapping[str, int] = dict(self.now)
        self.peak_of = dict(self.now)
        self.largest: tuple[Held, ...] = ()
        self.broken_by: Held | None = None
        self._blocks: dict[int, _Block] = {}
        self._rising = False

    def begin_peak(self) -> None:
        """Forget the peaks so far."""
        self.peak_total, self.peak_of, self._rising = self.total, dict(self.now), True

    def settle(self) -> None:
        """Note what is held, if it is the most so far: to be called before something goes or changes its category."""
        if self._rising:
            self._rising = False
            self.peak = dict(self.now)
            blocks = heapq.nlargest(_LARGEST, self._blocks.values(), key=_size)
            self.largest = tuple(block.held() for block in blocks)

    # -- storages ------------------------------------------------------------------------------------------------------

    def see(self, tensor: torch.Tensor) -> None:
        """Count the storage of a tensor that an operator returned, unless it is known."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._blocks:
            return
        n_bytes = -(-storage.nbytes() // self.block_bytes) * self.block_bytes
        where = _line() if n_bytes >= _NAMED_BYTES else ""
        block = _Block(n_bytes, self.category, tuple(tensor.shape), tensor.dtype, self.when, where)
        block.watch = weakref.ref(storage, self._forgets(key))
        self._blocks[key] = block
        self._grow(block)

    def knows(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._blocks

    def move(self, tensors: Iterable[torch.Tensor], category: str, name: str = "") -> None:
        """Give the storages of these tensors another category, and a name."""
        for tensor in tensors:
            block = self._blocks.get(tensor.untyped_storage()._cdata)
            if block is None:
                continue
            if block.category != category:
                self.settle()
                self.now[block.category] -= block.n_bytes
                self.now[category] += block.n_bytes
                self.peak_of[category] = max(self.peak_of[category], self.now[category])
                block.category = category
            block.name = name or block.name

    def _grow(self, block: _Block) -> None:
        now, category = self.now, block.category
        now[category] += block.n_bytes
        self.total += block.n_bytes
        if now[category] > self.peak_of[category]:
            self.peak_of[category] = now[category]
        if self.total > self.peak_total:
            self.peak_total, self._rising = self.total, True
            if self.total > self.limit_bytes and self.broken_by is None:
                self.broken_by = block.held()

    def _forgets(self, key: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            block = self._blocks.get(key)
            if block is not None:
                self.settle()
                del self._blocks[key]
                self.now[block.category] -= block.n_bytes
                self.total -= block.n_bytes

        return gone


def _line() -> str:
    """The innermost line of this package, without those that follow it, that is running."""
    frame = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE) and not path.startswith(_FOLLOWERS):
            return f"megatron{path[len(_PACKAGE):]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
