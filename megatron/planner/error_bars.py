"""Uncertainty of a prediction when the figures it rests on vary within the ranges that their
sources leave.

Every figure of a machine's file may have a range of factors (`compute.py`). Bandwidths of links
have none there; they are varied together by `LINK_RANGE`, which is about as far as the published
ones of like groups lie apart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron.planner.cluster import Cluster
from megatron.planner.compute import Compute, is_time

LINK_RANGE = (0.8, 1.25)
LINKS = "bandwidth of links"


@dataclass(frozen=True)
class Effect:
    """Effect of one figure on a value, and its factors: `slow` where it makes steps longer, `fast`
    the other way.
    """

    figure: str
    basis: str
    slow: float
    fast: float
    factors: tuple[float, float]


@dataclass(frozen=True)
class Spread:
    """Predicted value and its uncertainty.

    low, high   all figures at their slow, and all at their fast ends at once
    likely      half width if the figures are off independently: root of the sum of squares of half
                of each effect
    effects     one figure at a time, the strongest first
    """

    value: float
    low: float
    high: float
    likely: float
    effects: tuple[Effect, ...]


def spread(value: Callable[[Cluster], float], cluster: Cluster, dtype: str) -> Spread:
    """Evaluate `value` on the machine as it is described, and with each figure varied whose source
    leaves a range and that a prediction in this dtype may use."""
    ends = {LINKS: ("published or estimated", LINK_RANGE)}
    for name, figure in cluster.figures.items():
        other = name.startswith(("products.", "attention.")) and name.split(".")[1] != dtype
        if not other and (figure.low, figure.high) != (1.0, 1.0):
            ends[name] = (
                figure.basis,
                (figure.high, figure.low) if is_time(name) else (figure.low, figure.high),
            )

    def moved(factors: Mapping[str, float]) -> float:
        return value(with_factors(cluster, factors))

    effects = [
        Effect(n, basis, moved({n: by[0]}), moved({n: by[1]}), by)
        for n, (basis, by) in ends.items()
    ]
    effects.sort(key=lambda effect: -abs(effect.fast - effect.slow))
    here, *extremes = (
        moved({}),
        *(moved({name: by[end] for name, (_, by) in ends.items()}) for end in (0, 1)),
    )
    likely = math.hypot(*((effect.fast - effect.slow) / 2 for effect in effects))
    return Spread(here, min(here, *extremes), max(here, *extremes), likely, tuple(effects))


def with_factors(cluster: Cluster, factors: Mapping[str, float]) -> Cluster:
    """Return the machine with figures, and under `LINKS` all bandwidths, multiplied."""
    varied = dataclasses.replace(cluster, compute=Compute(cluster.figures).varied(factors))
    return varied.with_bandwidths(factors.get(LINKS, 1.0))
