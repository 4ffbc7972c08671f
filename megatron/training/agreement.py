"""What the ranks must know of each other between two steps, in one small reduction."""
from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from megatron.parallel import collectives
from megatron.parallel.topology import Topology


class Agreement:
    """Numbers of which every rank needs the largest: a signal that one rank received, a decision that rank 0 takes.

    Each user of it adds its numbers once, in the same order on every rank. Where none is on, `take` communicates
    nothing; in a world of one rank it never does.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._own: dict[str, tuple[Callable[[], int], Callable[[], bool]]] = {}

    def add(self, name: str, own: Callable[[], int], on: Callable[[], bool] = lambda: True) -> None:
        """Agree on `name` from now on. `own` gives this rank's number, 0 or more; `on`, whether it is asked for now,
        must say the same on every rank."""
        assert name not in self._own, f"{name} is agreed on already"
        self._own[name] = (own, on)

    def add_first(self, name: str, decide: Callable[[], bool], on: Callable[[], bool] = lambda: True) -> None:
        """Like `add`, for a yes (1) or no (0) that rank 0 alone decides: clocks and files may differ elsewhere."""
        first = self._topology.world.is_first
        self.add(name, lambda: int(first and decide()), on)

    def take(self) -> Mapping[str, int]:
        """The largest number of any rank, for each name; 0 for what is off. All ranks call it."""
        agreed = dict.fromkeys(self._own, 0)
        names = [name for name, (_, on) in self._own.items() if on()]
        if not names:
            return agreed
        own = [self._own[name][0]() for name in names]
        if self._topology.world.size > 1:
            numbers = torch.tensor(own, dtype=torch.int32, device=self._topology.device)
            own = collectives.all_reduce(numbers, self._topology.world, dist.ReduceOp.MAX).tolist()
        return agreed | dict(zip(names, own, strict=True))
