"""Spaces with known costs, for testing searches."""

import itertools
import math
from typing import NamedTuple

from megatron.jobs.candidate_layouts import Candidate
from megatron.jobs.search import History, propose
from megatron.jobs.space import Parameter

PARAMETERS = (
    Parameter("tp", (1, 2, 4, 8)),
    Parameter("pp", (1, 2, 4, 8, 16)),
    Parameter("mbs", (1, 2, 4, 8)),
    Parameter("recompute", ("none", "selective", "full"), ordered=False),
    Parameter("sp", (False, True)),
)


class FrontierTable(NamedTuple):
    """Candidates with `costs` (log(cost) of each), `prior` (a planner's) and `fails` (indices)."""

    candidates: tuple[Candidate, ...]
    costs: tuple[float, ...]
    prior: tuple[float, ...]
    fails: frozenset[int] = frozenset()

    @property
    def best(self):
        return min(cost for index, cost in enumerate(self.costs) if index not in self.fails)

    def good(self, index):
        """Return whether a candidate is within 3 % of the best."""
        return index not in self.fails and self.costs[index] <= self.best + math.log(1.03)


def candidates_of(keep):
    candidates = []
    for values in itertools.product(*(p.values for p in PARAMETERS)):
        named = dict(zip((p.name for p in PARAMETERS), values, strict=True))
        if keep(named):
            key = ",".join(f"{name}={value}" for name, value in named.items())
            candidates.append(Candidate(len(candidates), key, named, 16, (), 2, 2048))
    return tuple(candidates)


def _seconds(v, bubble, slow_tp, recompute):
    """Return the seconds of a realistic step.

    It has work, messages of tensor parallelism, a bubble, and better use of devices by larger
    micro-batches.
    """
    tp = v["tp"]
    pp = v["pp"]
    mbs = v["mbs"]
    recomputation = 1 + recompute * {"none": 0, "selective": 0.25, "full": 1}[v["recompute"]]
    micro_batches = 64 / mbs
    work = recomputation * (1 + 0.3 / mbs) * (1 + bubble * (pp - 1) / micro_batches)
    return work + slow_tp * math.log2(tp) * (0.8 if v["sp"] else 1.0) + 0.4 / (tp * pp)


def table(
    fails=lambda values: False,
    keep=lambda values: True,
):
    """Return a table of 456 candidates, or of those to keep.

    The planner underestimates messages, overestimates bubbles and takes recomputation for free.
    """
    candidates = candidates_of(lambda v: v["tp"] * v["pp"] <= 64 and keep(v))
    return FrontierTable(
        candidates,
        tuple(math.log(_seconds(c.values, 1.0, 0.09, 0.33)) for c in candidates),
        tuple(math.log(_seconds(c.values, 1.5, 0.03, 0.05)) for c in candidates),
        frozenset(c.index for c in candidates if fails(c.values)),
    )


def play(search, known, trials, prior=None, seed=0, until=lambda index: False):
    """Return a search's proposals, one trial after another.

    It ends after `trials` trials, when `until` returns true, or when nothing is left.
    """
    seen = {}
    proposals = []
    for count in range(min(trials, len(known.candidates))):
        open_ = [index for index in range(len(known.candidates)) if index not in seen]
        history = History(known.candidates, PARAMETERS, seen, open_, prior=prior)
        index, by = propose(search, seed, history, count)
        assert index in open_
        seen[index] = None if index in known.fails else known.costs[index]
        proposals.append((index, by))
        if until(index):
            break
    return proposals


def trials_to_good(search, known, trials, prior, seed):
    """Return the trials until one within 3 % of the best, or one more than `trials`."""
    proposals = play(search, known, trials, prior, seed, until=known.good)
    return len(proposals) if known.good(proposals[-1][0]) else trials + 1


def trials_by_chance(known):
    """Return the mean of the same number for draws without a search and without repetition."""
    good = sum(map(known.good, range(len(known.costs))))
    return (len(known.costs) + 1) / (good + 1)
