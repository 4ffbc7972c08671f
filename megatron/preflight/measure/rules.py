"""When a measurement is too slow: against the machine's published band, or against all others.

A value is compared with those of all ranks, and with the lower end of the band that the machine's description has for
it; the stricter of both decides. A CPU or an unknown device has no band.

    reference  m = q75 - 0.674 s    the median, if values are normal, from the faster ones alone: up to half of all
                                    ranks may be slow, and the others still are the measure
    spread     s = (q90 - q60) / 1.028, at least 2 % of m; 1.028 is these quantiles' distance in the standard normal
    slow       x < min(ratio * m, m - 6 s)

Normal noise falls below m - 6 s with probability 1.0e-9: with 75,264 ranks (9,408 nodes) once in 13,500 measurements of
a whole machine, before the second measurement that every suspect gets. Noise is not normal in its tails; that is what
the ratio and the second measurement are for. Of few values s itself is uncertain: of 20,000 simulated measurements of 8
ranks with 5 % of noise none had a suspect at a ratio of 0.6 and 1 at 0.75; with 10 % of noise 5 and 400.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

RATIOS = {"host_gflops": 0.6, "host_copy_gb_per_s": 0.4, "gemm_tflops": 0.75, "copy_gb_per_s": 0.75,
          "allreduce_gb_per_s": 0.5, "p2p_gb_per_s": 0.5, "pair_gb_per_s": 0.5}  # fmt: skip
"""Share of the reference from which on a value is slow."""

CPU_LINK_RATIO = 0.0
"""The same for messages between processes of a CPU: only those that fail count. Their speed tells who got a core when,
and differed by a factor of 20 between equal pairs."""

STOPPED = 0.4
"""Share of a busy loop's time, without waits for a core and above that of most ranks, in which a process did not run. A
thread that only computes is not put aside by the system: 0 but for page faults and what a virtual machine's host takes,
which all ranks have alike. 8 processes on two cores measured 0 to 0.16; one stopped 70 % of the time, 0.6 and more."""

_SPREAD_FLOOR = 0.02
_Z = 6.0
_ANY = 1e-12  # GB/s: a pair that failed is slow whatever the limit


@dataclass(frozen=True)
class Limit:
    """Below `slow` a value is too slow. `reference`: what is expected; `basis` says where that is from; `general`: what
    is wrong with all values together, or ""."""

    slow: float
    reference: float
    basis: str
    general: str = ""


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between the values of a sorted, non-empty sequence."""
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def limit_of(values: Collection[float], ratio: float, low: float | None = None, source: str = "") -> Limit | None:
    """The limit for values of all ranks (see the module); None without values.

    low, source  the lower end of the machine's band, if any, and where it is from. When most values lie below it, the
                 fault is no single rank's: then they are compared with each other, and `general` says so.
    """
    ordered = sorted(values)
    if not ordered:
        return None
    q75, spread = quantile(ordered, 0.75), (quantile(ordered, 0.9) - quantile(ordered, 0.6)) / 1.028
    reference = q75 - 0.674 * spread
    spread = max(spread, _SPREAD_FLOOR * reference)
    slow = max(min(ratio * reference, reference - _Z * spread), 0.0)
    basis = f"among {len(ordered)} measured"
    if low is None:
        return Limit(slow, reference, basis)
    half = quantile(ordered, 0.5)
    if half < low:
        return Limit(slow, reference, basis, f"half of all measured at most {half:.3g}, below {low:g} ({source})")
    return Limit(low, reference, source) if low > slow else Limit(slow, reference, basis)


@dataclass(frozen=True)
class Verdict:
    """Whose links are at fault.

    accused  ranks that were slow with at least two others, one of them proven good, and fast with nobody
    unclear  ranks that were fast with nobody, without enough partners to tell who is at fault
    links    pairs that are slow although both ends are fast with others
    """

    accused: frozenset[int] = frozenset()
    unclear: frozenset[int] = frozenset()
    links: tuple[tuple[int, int], ...] = ()
    proven: frozenset[int] = field(default=frozenset())


def attribute(pairs: Mapping[tuple[int, int], float], slow: float) -> Verdict:
    """Which ends of slow pairs are at fault. `pairs`: GB/s of tested pairs, 0 for one that failed.

    A rank that was fast with anybody is good: its own card and cable are. One that is slow with two or more, of which
    one is good, is bad. The rest is unclear: another round with good partners decides (see `partners`).
    """
    fast_with: dict[int, set[int]] = {}
    slow_with: dict[int, set[int]] = {}
    for (a, b), bandwidth in pairs.items():
        for one, other in ((a, b), (b, a)):
            (fast_with if bandwidth >= max(slow, _ANY) else slow_with).setdefault(one, set()).add(other)
    proven = frozenset(fast_with)
    suspects = frozenset(slow_with) - proven
    accused = frozenset(r for r in suspects if len(slow_with[r]) >= 2 and slow_with[r] & proven)
    links = tuple((a, b) for (a, b), bandwidth in pairs.items() if bandwidth < max(slow, _ANY) and {a, b} <= proven)
    return Verdict(accused, suspects - accused, links, proven)


def ring_pairs(hosts: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Rounds in which each host meets its neighbours in the ring of hosts, at most one of them in each round.

    An odd ring needs three rounds; two hosts meet once.
    """
    count = len(hosts)
    if count < 2:
        return []
    if count == 2:
        return [[(hosts[0], hosts[1])]]
    edges = [(hosts[i], hosts[(i + 1) % count]) for i in range(count)]
    if count % 2 == 0:
        return [edges[::2], edges[1::2]]
    return [edges[:-1:2], edges[1:-1:2], edges[-1:]]


def partners(
    suspects: Sequence[str], good: Sequence[str], tested: Collection[frozenset[str]]
) -> list[tuple[str, str]]:
    """Pairs for one more round: each suspect with a good host that it has not met; where no host is good, suspects with
    each other."""
    free = list(good)
    pairs: list[tuple[str, str]] = []
    if free:
        for suspect in suspects:
            partner = next((host for host in free if frozenset((suspect, host)) not in tested), None)
            if partner is not None:
                free.remove(partner)
                pairs.append((suspect, partner))
        return pairs
    waiting = list(suspects)
    while waiting:
        one = waiting.pop(0)
        other = next((host for host in waiting if frozenset((one, host)) not in tested), None)
        if other is not None:
            waiting.remove(other)
            pairs.append((one, other))
    return pairs
