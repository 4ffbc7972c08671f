"""A copy of the state in host memory, from which a thread writes while training goes on."""
from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megatron.checkpoint.planner import Shards

_ALIGNED = 64  # bytes: every tensor begins on a cache line, and at an address good for any dtype


class Snapshot:
    """Memory for a copy of what a rank writes, kept from one save to the next.

    It is as large as this rank's part of the state. Where the state is on a GPU the memory is pinned: the copy runs at
    the speed of the bus, and the time to pin is paid once.
    """

    def __init__(self) -> None:
        self._memory: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        """Size of the memory held."""
        return 0 if self._memory is None else self._memory.numel()

    def take(self, tensors: Mapping[str, Shards]) -> dict[str, Shards]:
        """A copy of {name: Shards}, valid until the next one is taken. The tensors may change as soon as it returns.

        Raises RuntimeError where there is no memory for it.
        """
        views = [view for shards in tensors.values() for view in shards.pieces.values()]
        memory, at = self._room(views), 0
        copies: dict[str, Shards] = {}
        for name, shards in tensors.items():
            pieces = {}
            for offset, view in shards.pieces.items():
                part = memory[at : at + view.nbytes].view(view.dtype).view(view.shape)
                pieces[offset] = part.copy_(view.detach(), non_blocking=True)
                at += _aligned(view.nbytes)
            copies[name] = Shards(shards.shape, pieces)
        for device in {view.device for view in views if view.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        return copies

    def _room(self, views: Iterable[torch.Tensor]) -> torch.Tensor:
        views = list(views)
        needed = sum(_aligned(view.nbytes) for view in views)
        pinned = any(view.device.type == "cuda" for view in views)
        if self._memory is None or self._memory.numel() < needed:
            self._memory = None  # let go of the old before the new is there
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=pinned)
        return self._memory


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
