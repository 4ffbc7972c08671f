"""Spaces whose costs are known, for searches to be tried on."""
from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from megatron.tuning.search.optimizer import Optimizer, Proposal
from megatron.tuning.types import OUT_OF_MEMORY, Candidate, History, Parameter, Value

PARAMETERS = (
    Parameter("tp", (1, 2, 4, 8)),
    Parameter("pp", (1, 2, 4, 8, 16)),
    Parameter("mbs", (1, 2, 4, 8)),
    Parameter("recompute", ("none", "selective", "full"), ordered=False),
    Parameter("sp", (False, True)),
)


class Table(NamedTuple):
    """costs: log(cost) of each candidate; prior: of a planner; fails: indices."""

    candidates: tuple[Candidate, ...]
    costs: tuple[float, ...]
    prior: tuple[float, ...]
    fails: frozenset[int] = frozenset()

    @property
    def best(self) -> float:
        return min(cost for index, cost in enumerate(self.costs) if index not in self.fails)

    def good(self, index: int) -> bool:
        """Within 3 % of the best."""
        return index not in self.fails and self.costs[index] <= self.best + math.log(1.03)


Values = Mapping[str, Value]


def candidates_of(parameters: Sequence[Parameter], keep: Callable[[Values], bool]) -> tuple[Candidate, ...]:
    found: list[Candidate] = []
    for values in itertools.product(*(p.values for p in parameters)):
        named = dict(zip((p.name for p in parameters), values, strict=True))
        if keep(named):
            key = ",".join(f"{name}={value}" for name, value in named.items())
            found.append(Candidate(len(found), key, named, (), 16, 2, 2048))
    return tuple(found)


def _seconds(v: Mapping[str, Value], bubble: float, slow_tp: float, recompute: float) -> float:
    """A step in the manner of the real ones: work, messages of tensor parallelism, a bubble, a better use of devices by
    larger micro-batches."""
    tp, pp, mbs = (int(v[name] or 0) for name in ("tp", "pp", "mbs"))
    again = {"none": 1.0, "selective": 1 + recompute / 4, "full": 1 + recompute}[str(v["recompute"])]
    micro_batches = 64 / mbs
    work = again * (1 + 0.3 / mbs) * (1 + bubble * (pp - 1) / micro_batches)
    return work + slow_tp * math.log2(tp) * (0.8 if v["sp"] else 1.0) + 0.4 / (tp * pp)


def table(fails: Callable[[Mapping[str, Value]], bool] = lambda values: False) -> Table:
    """456 candidates; the planner takes messages for cheaper, bubbles for dearer and recomputation for free."""
    candidates = candidates_of(PARAMETERS, lambda v: int(v["tp"] or 0) * int(v["pp"] or 0) <= 64)
    return Table(
        candidates,
        tuple(math.log(_seconds(c.values, 1.0, 0.09, 0.33)) for c in candidates),
        tuple(math.log(_seconds(c.values, 1.5, 0.03, 0.05)) for c in candidates),
        frozenset(c.index for c in candidates if fails(c.values)),
    )


def play(
    search: Optimizer, known: Table, trials: int, prior: Sequence[float] | None = None,
    parameters: Sequence[Parameter] = PARAMETERS, until: Callable[[int], bool] = lambda index: False,
) -> list[Proposal]:
    """What a search proposes, one trial after the other, until there are so many, or `until`, or nothing is left."""
    seen: dict[int, float | None] = {}
    proposals: list[Proposal] = []
    for count in range(trials):
        proposal = search.propose(history_of(known, seen, prior, parameters), count)
        if proposal is None:
            break
        assert proposal.index not in seen
        seen[proposal.index] = None if proposal.index in known.fails else known.costs[proposal.index]
        proposals.append(proposal)
        if until(proposal.index):
            break
    return proposals


def history_of(
    known: Table, seen: Mapping[int, float | None], prior: Sequence[float] | None = None,
    parameters: Sequence[Parameter] = PARAMETERS, pending: frozenset[int] = frozenset(),
) -> History:
    failures = {index: OUT_OF_MEMORY for index, cost in seen.items() if cost is None}
    return History(known.candidates, parameters, dict(seen), failures, frozenset(seen) | pending, pending, prior)


def trials_to_good(search: Optimizer, known: Table, trials: int, prior: Sequence[float] | None = None) -> int:
    """Trials until one within 3 % of the best; one more than `trials` if there is none."""
    proposals = play(search, known, trials, prior, until=known.good)
    return len(proposals) if known.good(proposals[-1].index) else trials + 1
