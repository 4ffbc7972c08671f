"""What the ranks must know of each other between two steps, in one small reduction."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from megatron.parallel import collectives
from megatron.parallel.topology import Topology


class Agreement:
    """Numbers of which every rank needs the largest: a signal that one rank received, a decision that rank 0 takes.

    Each user of it adds its numbers once, in the same order on every rank. They go through host memory, behind the back
    of the device, and no step waits for them: `post` asks after one step, `read` gives the answer after the next, the
    same on every rank. `own` is asked when a question is posted, so that what it says must still be good a step later.
    Where nothing is on, nothing is communicated. A world of one rank has its answers at once.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._own: dict[str, tuple[Callable[[], int], Callable[[], bool]]] = {}
        self._numbers: tuple[npt.NDArray[np.int32], list[str], Any] | None = None  # on their way

    def add(self, name: str, own: Callable[[], int], on: Callable[[], bool] = lambda: True) -> None:
        """Agree on `name` from now on. `own` gives this rank's number, 0 or more; `on`, whether it is asked for now,
        must say the same on every rank."""
        assert name not in self._own, f"{name} is agreed on already"
        self._own[name] = (own, on)

    def add_first(self, name: str, decide: Callable[[], bool], on: Callable[[], bool] = lambda: True) -> None:
        """Like `add`, for a yes (1) or no (0) that rank 0 alone decides: clocks and files may differ elsewhere."""
        first = self._topology.world.is_first
        self.add(name, lambda: int(first and decide()), on)

    def post(self) -> None:
        """Ask; what was asked before must have been read or dropped. All ranks call it."""
        assert self._numbers is None, "one question at a time"
        if self._topology.world.size > 1 and (own := self._asked()):
            numbers = np.array(list(own.values()), np.int32)
            work = collectives.all_reduce_async(torch.from_numpy(numbers), self._topology.world, dist.ReduceOp.MAX)
            self._numbers = numbers, list(own), work

    def read(self) -> Mapping[str, int]:
        """The largest number of any rank, for each name that was on when the question was posted; empty where none was.
        All ranks call it."""
        if self._topology.world.size == 1:
            return self._asked()
        if self._numbers is None:
            return {}
        (numbers, names, work), self._numbers = self._numbers, None
        work.wait()
        return dict(zip(names, numbers.tolist(), strict=True))

    def now(self) -> Mapping[str, int]:
        """The answer to a question of this moment, for which all ranks wait; what was asked before is dropped."""
        self.drop()
        self.post()
        return self.read()

    def drop(self) -> None:
        """Forget what was asked, on all ranks: at the end of the steps, or where they begin anew."""
        self.read()

    def _asked(self) -> dict[str, int]:
        return {name: own() for name, (own, on) in self._own.items() if on()}
