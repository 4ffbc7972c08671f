"""Uncertainty of a prediction, from the ranges of the figures that it uses.

Every figure in a machine's file may have a range of factors (`compute.py`). Link bandwidths have
none; they are varied together over `LINK_RANGE`, roughly the spread of published bandwidths of
similar groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron.planner.cluster import Cluster
from megatron.planner.compute import is_cost

LINK_RANGE = (0.8, 1.25)
LINKS = "bandwidth of links"


@dataclass(frozen=True)
class Effect:
    """Predicted values with one figure at the slow and at the fast end of its range.

    basis    how the figure is known, such as "measured" (compute.BASES)
    factors  factors on the figure at the slow and at the fast end
    """

    figure: str
    basis: str
    slow: float
    fast: float
    factors: tuple[float, float]


@dataclass(frozen=True)
class Spread:
    """Predicted value and its uncertainty.

    low, high   smallest and largest of three values: this one, and those with all figures at the
                slow or at the fast ends of their ranges
    likely      half width for independent errors: root sum of squares of half the effects
    effects     effects of varying one figure at a time, strongest first
    """

    value: float
    low: float
    high: float
    likely: float
    effects: tuple[Effect, ...]


def spread(value: Callable[[Cluster], float], cluster: Cluster, dtype: str) -> Spread:
    """Evaluate `value` on the machine, and with each figure varied over its range.

    Besides the links' bandwidths, only figures that have a range and that a prediction in this
    dtype may use are varied.
    """
    ends = {LINKS: ("published or estimated", LINK_RANGE)}
    for name, figure in cluster.figures.items():
        other = name.startswith(("products.", "attention.")) and name.split(".")[1] != dtype
        if not other and (figure.low, figure.high) != (1.0, 1.0):
            ends[name] = (
                figure.basis,
                (figure.high, figure.low) if is_cost(name) else (figure.low, figure.high),
            )

    def moved(factors: Mapping[str, float]) -> float:
        return value(with_factors(cluster, factors))

    effects = [
        Effect(n, basis, moved({n: by[0]}), moved({n: by[1]}), by)
        for n, (basis, by) in ends.items()
    ]
    effects.sort(key=lambda effect: -abs(effect.fast - effect.slow))
    here = moved({})
    extremes = [moved({name: by[end] for name, (_, by) in ends.items()}) for end in (0, 1)]
    likely = math.hypot(*((effect.fast - effect.slow) / 2 for effect in effects))
    return Spread(here, min(here, *extremes), max(here, *extremes), likely, tuple(effects))


def with_factors(cluster: Cluster, factors: Mapping[str, float]) -> Cluster:
    """Return the machine with scaled figures; the factor under `LINKS` scales all bandwidths."""
    figures = (f.scaled(factors.get(name, 1.0)) for name, f in cluster.figures.items())
    return cluster.with_figures(figures).with_bandwidths(factors.get(LINKS, 1.0))
