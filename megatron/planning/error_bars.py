"""How far a prediction moves when the figures it rests on move within the ranges that their sources leave.

Every figure of a machine's file may have a range of factors (`compute.py`). Bandwidths of links have none there; they
are varied together by `LINK_RANGE`, which is about as far as the published ones of like groups lie apart.
"""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron.planning.cluster import Cluster
from megatron.planning.compute import Compute, Figure, assumed_figures

LINK_RANGE = (0.8, 1.25)
LINKS = "bandwidth of links"

_OF_DTYPE = ("products.", "attention.")


@dataclass(frozen=True)
class Effect:
    """What one figure does to a value, and its factors: `slow` where it makes steps longer, `fast` the other way."""

    figure: str
    basis: str
    slow: float
    fast: float
    factors: tuple[float, float]

    @property
    def width(self) -> float:
        return abs(self.fast - self.slow)


@dataclass(frozen=True)
class Spread:
    """A predicted value and how far it moves.

    low, high   all figures at the ends that lower it (raise it), their effects added up; or all at their slow, or all
                at their fast ends at once, if that is further
    likely      half width if the figures are off independently: root of the sum of squares of half of each effect
    effects     one figure at a time, the strongest first
    """

    value: float
    low: float
    high: float
    likely: float
    effects: tuple[Effect, ...]


def spread(value: Callable[[Cluster], float], cluster: Cluster, dtype: str) -> Spread:
    """`value` on the machine as it is described, and with its figures varied."""
    here = value(cluster)
    effects, slowest, fastest = [], {}, {}
    for figure in varied_figures(cluster, dtype):
        slow, fast = _ends(figure)
        slowest[figure.name], fastest[figure.name] = slow, fast
        moved = [value(with_factors(cluster, {figure.name: factor})) for factor in (slow, fast)]
        effects.append(Effect(figure.name, figure.basis, moved[0], moved[1], (slow, fast)))
    slow, fast = LINK_RANGE
    slowest[LINKS], fastest[LINKS] = slow, fast
    moved = [value(with_factors(cluster, {LINKS: factor})) for factor in LINK_RANGE]
    effects.append(Effect(LINKS, "published or estimated", moved[0], moved[1], LINK_RANGE))
    ends = [value(with_factors(cluster, factors)) for factors in (slowest, fastest)]
    low = here - sum(max(0.0, here - effect.slow, here - effect.fast) for effect in effects)
    high = here + sum(max(0.0, effect.slow - here, effect.fast - here) for effect in effects)
    likely = math.sqrt(sum((effect.width / 2) ** 2 for effect in effects))
    effects.sort(key=lambda effect: -effect.width)
    return Spread(here, min(low, *ends), max(high, *ends), likely, tuple(effects))


def varied_figures(cluster: Cluster, dtype: str) -> Iterator[Figure]:
    """The figures that a prediction in this dtype may use and whose sources leave a range."""
    for name, figure in _all_figures(cluster).items():
        other = name.startswith(_OF_DTYPE) and name.split(".")[1] != dtype
        if not other and (figure.low, figure.high) != (1.0, 1.0):
            yield figure


def with_factors(cluster: Cluster, factors: dict[str, float]) -> Cluster:
    """The machine with figures, and under `LINKS` all bandwidths, multiplied."""
    compute = Compute(_all_figures(cluster)).varied(factors)
    by = factors.get(LINKS, 1.0)
    return dataclasses.replace(
        cluster, compute=compute, nic_gb_per_s=by * cluster.nic_gb_per_s,
        links={pair: by * width for pair, width in cluster.links.items()},
        collective_gb_per_s={family: by * rate for family, rate in cluster.collective_gb_per_s.items()},
    )


def _all_figures(cluster: Cluster) -> dict[str, Figure]:
    return {**assumed_figures(cluster.peak_tflops), **cluster.compute.figures}


def _ends(figure: Figure) -> tuple[float, float]:
    """(factor that makes steps longer, factor that makes them shorter): seconds grow where rates fall."""
    in_seconds = figure.name.endswith("_s") and not figure.name.endswith("_per_s")
    if in_seconds or figure.name == "messages" or figure.name.startswith("collectives."):
        return figure.high, figure.low
    return figure.low, figure.high
