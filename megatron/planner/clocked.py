"""Simulated time of a pass: a clock for computations on the device, one for its messages."""

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
"""Function from a tensor-parallel collective's kind and whole tensor's bytes to its seconds."""


@functools.lru_cache(maxsize=64)
def rates_of(cluster: Cluster, dtype_name: str) -> Rates:
    """Return the rates of a machine and dtype; one object for each, which caches its results."""
    return Rates(cluster, dtype_name)


@functools.lru_cache(maxsize=1 << 16)
def seconds_of(operation: Computation, rates: Rates) -> float:
    if isinstance(operation, Product):
        moved = rates.memory_s(operation.moved, 0) if operation.moved else 0.0
        return max(rates.product_s(*operation[:4]), moved)
    if isinstance(operation, Attention):
        return rates.attention_s(*operation)
    return rates.memory_s(*operation)


def crowding(config: Config, cluster: Cluster) -> float:
    """Count the ranks that share a core while a whole node computes; 1 for GPUs."""
    if cluster.shared_cores is None:
        return 1.0
    return max(
        1.0, min(config.parallel.world_size, cluster.devices_per_node) / cluster.shared_cores
    )


class PassSeconds(NamedTuple):
    """Seconds of one pass: computation, recomputation, and waiting for messages."""

    compute: float
    again: float
    waited: float

    @property
    def total(self) -> float:
        return self.compute + self.again + self.waited


@functools.lru_cache(maxsize=1 << 14)
def _timed(of: Pass, rates: Rates) -> tuple[list[float | Post | Wait], float, float]:
    """Return a pass's messages and the seconds between them, then its compute and recompute time."""
    found: list[float | Post | Wait] = []
    sums = {False: 0.0, True: 0.0}
    since = 0.0
    for step in of.steps:
        if isinstance(step, Post | Wait):
            found += [since, step]
            since = 0.0
        elif not isinstance(step, Take | Give):
            seconds = seconds_of(step.operation if isinstance(step, Again) else step, rates)
            sums[isinstance(step, Again)] += seconds
            since += seconds
    return [*found, since], sums[False], sums[True]


def pass_seconds(
    of: Pass, rates: Rates, message_s: MessageSeconds | None, *, hides: bool = True
) -> PassSeconds:
    """Simulate a pass. A message without a wait in it overlaps with the next pass.

    message_s  None: messages take no time
    hides      messages overlap with computation; otherwise each is waited for when it is posted
    """
    timed, compute, again = _timed(of, rates)
    if message_s is None:
        return PassSeconds(compute, again, 0.0)
    clock = waited = free = 0.0
    arrives: dict[int, float] = {}
    for step in timed:
        if isinstance(step, float):
            clock += step
            continue
        if isinstance(step, Post):
            free = arrives[step.number] = max(clock, free) + message_s(*step.message)
            if hides:
                continue
        there = max(clock, arrives.get(step.number, 0.0))
        waited, clock = waited + there - clock, there
    return PassSeconds(compute, again, waited)
