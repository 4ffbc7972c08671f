"""Seconds of a pass: its computations on the device, its messages on the links, one clock for each."""
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from megatron.kernels.work import Attention, Computation, Product
from megatron.planner.events import Again, Give, Pass, Post, Take, Wait
from megatron.planner.rates import Rates

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.planner.cluster import Cluster

MessageSeconds = Callable[[str, float], float]
"""Seconds of a collective of the tensor-parallel group, by kind and bytes of the whole tensor."""


@functools.lru_cache(maxsize=64)
def rates_of(cluster: Cluster, dtype_name: str) -> Rates:
    """One for each machine and format: what it has computed once is kept."""
    return Rates(cluster, dtype_name)


@functools.lru_cache(maxsize=1 << 16)
def seconds_of(operation: Computation, rates: Rates) -> float:
    if isinstance(operation, Product):
        moved = rates.memory_s(operation.moved, 0) if operation.moved else 0.0
        return max(rates.product_s(*operation[:4]), moved)
    if isinstance(operation, Attention):
        return rates.attention_s(
            operation.batch, operation.heads, operation.seq, operation.head_dim, backward=operation.backward
        )
    return rates.memory_s(operation.bytes, operation.kernels, operation.kind)


def crowding(config: Config, cluster: Cluster) -> float:
    """How many ranks share a core while all of a node compute; 1 where devices compute by themselves."""
    if cluster.shared_cores is None:
        return 1.0
    return max(1.0, min(config.parallel.world_size, cluster.devices_per_node) / cluster.shared_cores)


class PassSeconds(NamedTuple):
    """Of one pass: computations, those of recomputation, and waiting for messages. `left`: for how long after its end a
    message that nobody has waited for keeps the links."""

    compute: float
    again: float
    waited: float
    left: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.again + self.waited

    def __add__(self, other: PassSeconds) -> PassSeconds:  # type: ignore[override]
        return PassSeconds(
            self.compute + other.compute, self.again + other.again, self.waited + other.waited, other.left
        )

    def times(self, count: float) -> PassSeconds:
        return PassSeconds(count * self.compute, count * self.again, count * self.waited, self.left)

    def repeated(self) -> PassSeconds:
        """The same as recomputation."""
        return PassSeconds(0.0, self.compute + self.again, self.waited, self.left)


NOTHING = PassSeconds(0.0, 0.0, 0.0)

# Seconds of computations until the next message; whether they are recomputation is summed up apart.
_Timed = tuple[float | Post | Wait, ...]


@functools.lru_cache(maxsize=1 << 14)
def _timed(of: Pass, rates: Rates) -> tuple[_Timed, float, float]:
    """(seconds between messages, seconds of computations, of those that recomputation adds)."""
    found: list[float | Post | Wait] = []
    compute = again = since = 0.0
    for step in of.steps:
        if isinstance(step, Take | Give):
            continue
        if isinstance(step, Post | Wait):
            if since:
                found.append(since)
                since = 0.0
            found.append(step)
        elif isinstance(step, Again):
            seconds = seconds_of(step.operation, rates)
            again, since = again + seconds, since + seconds
        else:
            seconds = seconds_of(step, rates)
            compute, since = compute + seconds, since + seconds
    return (*found, since), compute, again


def pass_seconds(
    of: Pass, rates: Rates, message_s: MessageSeconds | None, *, hides: bool = True, busy: float = 0.0
) -> PassSeconds:
    """Run a pass on a clock.

    message_s  None: messages take no time
    hides      the device computes while a message travels; without, who posts a message waits for it at once
    busy       for how long after the start a message of the pass before keeps the links
    """
    timed, compute, again = _timed(of, rates)
    if message_s is None:
        return PassSeconds(compute, again, 0.0)
    clock = waited = 0.0
    free = busy
    arrives: dict[int, float] = {}
    for step in timed:
        if isinstance(step, float):
            clock += step
        elif isinstance(step, Post):
            free = max(clock, free) + message_s(*step.message)
            arrives[step.number] = free
            if not hides:
                waited, clock = waited + free - clock, free
        else:
            there = arrives.get(step.number, 0.0)
            if there > clock:
                waited, clock = waited + there - clock, there
    return PassSeconds(compute, again, waited, max(0.0, free - clock))
