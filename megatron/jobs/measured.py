"""Join all trials of a layout, estimate how much single ones scatter, and choose which layouts are
measured again.

The best of many noisy measurements is rarely as good as it looks, and the layout that truly is the
best may have had a bad moment. So nothing is called better that lies within the noise, and when a
search has ended those that may be the best are measured again; all measurements of a layout count
together.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.jobs.candidates import Candidate
from megatron.jobs.result import LOST_RANK, OUT_OF_MEMORY, RUNNING, Result

OBJECTIVES = ("tokens_per_s", "node_hours")
CONFIRM = "confirm"
"""What proposes a trial that measures a layout again."""
# Standard deviation of log(cost) of a single trial before any was repeated, beside what the steps
# of the trials show: the speed of machines and networks differs from one trial to the next by more
# than within one. That belief is worth as much as so many repetitions.
_SCATTER, _WORTH = 0.02, 3.0
_DEVIATIONS = 2.0  # of the difference of two layouts, by which one may be worse and yet the best
_FURTHEST = math.log(1.25)  # whatever the noise: what is further behind is no rival


@dataclass(frozen=True)
class Trial:
    """One candidate that was run, runs, or is to be run again.

    number  from 1 on, in the order in which they were proposed; by: what proposed it (planner,
            optuna, ..., confirm)
    """

    number: int
    candidate: Candidate
    by: str
    result: Result = RUNNING


@dataclass(frozen=True)
class Measured:
    """A candidate and its trials that have ended, by their numbers; at least one.

    A layout that fails now and then is no layout to build on. It has a cost only while more of its
    trials gave valid figures than failed, and none ran out of memory: the steps of a trial are all
    alike, what once ran out is at the edge. A lost rank does not count, it says nothing about a
    layout.

    steps     seconds of a step in its valid trials
    failures  its trials that say something against it
    cost      what a search makes small, by the median of the steps; infinite: none
    """

    candidate: Candidate
    trials: tuple[Trial, ...]
    steps: tuple[float, ...]
    failures: tuple[Trial, ...]
    cost: float

    @property
    def step_s(self) -> float:
        return statistics.median(self.steps)

    @property
    def spread(self) -> str:
        """Say how often it was measured, and (slowest - fastest run) / median of the runs, of their
        step times.
        """
        if len(self.steps) < 2:
            return "measured once"
        apart = (max(self.steps) - min(self.steps)) / self.step_s
        return f"measured {len(self.steps)} times, {100 * apart:.1f} % apart"

    @property
    def numbers(self) -> str:
        """Write the numbers of the trials: trial 6, or: trials 6, 14, 15."""
        return (
            f"trial{'s' * (len(self.trials) > 1)} "
            f"{', '.join(str(trial.number) for trial in self.trials)}"
        )


def measured(trials: Iterable[Trial], objective: str) -> list[Measured]:
    """Group all trials that have ended: each layout once, in the order of their first ones."""
    by_key: dict[str, list[Trial]] = {}
    for trial in sorted(trials, key=lambda trial: trial.number):
        if trial.result.status:
            by_key.setdefault(trial.candidate.key, []).append(trial)
    found = list[Measured]()
    for own in by_key.values():
        steps = tuple(trial.result.step_s for trial in own if trial.result.step_s)
        bad = tuple(
            trial for trial in own if not trial.result.step_s and trial.result.kind != LOST_RANK
        )
        full = any(trial.result.kind == OUT_OF_MEMORY for trial in bad)
        good = len(steps) > len(bad) and not full
        cost = own[0].candidate.cost(statistics.median(steps), objective) if good else math.inf
        found.append(Measured(own[0].candidate, tuple(own), steps, bad, cost))
    return found


def ranked(layouts: Iterable[Measured]) -> list[Measured]:
    """Return layouts with figures, the best first; of equal ones the first."""
    return sorted((one for one in layouts if one.cost < math.inf), key=lambda one: one.cost)


def value_of(cost: float, objective: str) -> tuple[float, str]:
    """Return a cost as users read it, and its unit: tokens a second, or node-hours for 10^9
    tokens.
    """
    if objective == "node_hours":
        return cost * 1e9 / 3600, "node-hours for a billion tokens"
    return 1 / cost, "tokens/s"


def written(cost: float, objective: str) -> str:
    """Write a cost with its unit."""
    value, unit = value_of(cost, objective)
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}"


def noise_of(layouts: Iterable[Measured]) -> float:
    """Estimate the standard deviation of log(cost) of one trial, by layouts that were measured
    several times and by the spread of steady steps."""
    errors, squares, free = list[float](), 0.0, 0
    for one in layouts:
        if len(one.steps) > 1:
            squares += statistics.variance(map(math.log, one.steps)) * (len(one.steps) - 1)
            free += len(one.steps) - 1
        # The error of the median of n normal steps is, within a tenth for 3 to 10 of them, 1.25 of
        # their range over n.
        errors += [1.25 * t.result.spread / t.result.steady for t in one.trials if t.result.spread]
    believed = _SCATTER**2 + (statistics.median(errors) if errors else 0.0) ** 2
    return math.sqrt((_WORTH * believed + squares) / (_WORTH + free))


def within_noise(one: Measured, best: Measured, noise: float) -> bool:
    """Return whether a layout may be as good as one that looks better."""
    reach = min(
        _DEVIATIONS * noise * math.sqrt(1 / len(one.steps) + 1 / len(best.steps)), _FURTHEST
    )
    return math.log(one.cost / best.cost) <= reach


def rivals(best: Sequence[Measured], noise: float) -> list[Measured]:
    """Return those of layouts, the best first, that may be as good as the best."""
    return [one for one in best[1:] if within_noise(one, best[0], noise)]


def in_turn(trials: Sequence[Trial], objective: str) -> list[Candidate]:
    """Return layouts whose measurement is worth most now, the best first; none where there is no
    doubt about the best.

    trials  in any state; what has not ended counts as a measurement, so that the next one goes
            elsewhere

    Of the best and its rivals they are the ones with the fewest measurements: so the one that will
    be named was measured no less often than what it is compared with. One that failed when it was
    run again is left alone.
    """
    layouts = measured(trials, objective)
    known = [one for one in ranked(layouts) if not one.failures]
    doubt = rivals(known, noise_of(layouts))
    if not doubt:
        return []
    under_way = Counter(
        trial.candidate.key for trial in trials if trial.by == CONFIRM and not trial.result.status
    )
    counts = [
        (len(one.steps) + under_way[one.candidate.key], one.candidate) for one in (known[0], *doubt)
    ]
    least = min(count for count, _ in counts)
    return [candidate for count, candidate in counts if count == least]


def ruled_out(candidates: Sequence[Candidate], trials: Sequence[Trial]) -> set[int]:
    """Return the indices of candidates that need, by the planner, no less memory than one that ran
    out of it.

    The planner's figures are not exact: a trial that ran out is no argument where another one
    fitted that should need as much or more.
    """
    fitted = max((t.candidate.memory_bytes or 0.0 for t in trials if t.result.step_s), default=0.0)
    full = [t.candidate.memory_bytes or math.inf for t in trials if t.result.kind == OUT_OF_MEMORY]
    least = min((need for need in full if need > fitted), default=math.inf)
    return {c.index for c in candidates if c.memory_bytes and c.memory_bytes >= least}
