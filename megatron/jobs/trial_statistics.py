"""Statistics of trials: results for each layout, noise, and layouts to measure again.

The best of many noisy measurements is rarely as good as it looks, and the truly best layout may
have been measured at a bad moment. Therefore differences within the noise do not count, and at the
end of a search the layouts that may be the best are measured again. All measurements of a layout
are combined.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron.jobs.candidate_layouts import LOSS, Candidate
from megatron.jobs.result import LOST_RANK, OUT_OF_MEMORY, RUNNING, Result

OBJECTIVES = ("tokens_per_s", "node_hours", LOSS)
CONFIRM = "confirm"
"""Name of the proposer of trials that measure a layout again."""
# Prior standard deviation of log(cost) between trials of a layout, in addition to the scatter of
# steps within a trial: machines and networks vary more from one trial to the next. _WORTH is the
# weight of the prior, as a number of repeated trials.
_SCATTER = 0.02
_WORTH = 3.0
_LOSS_SCATTER = 0.003  # of log(validation loss) between seeds of a small model: an assumption
_DEVIATIONS = 2.0  # standard deviations by which a rival may look worse than the best
_FURTHEST = math.log(1.25)  # a layout further behind is not a rival, whatever the noise


@dataclass(frozen=True)
class Trial:
    """A trial of a candidate: finished, running, or to be repeated.

    number  counted from 1, in order of proposal; by: the proposer (planner, optuna, ..., confirm)
    """

    number: int
    candidate: Candidate
    by: str
    result: Result = RUNNING

    @property
    def name(self) -> str:
        """Return the name of the trial's folder."""
        return f"{self.number:04}"


@dataclass(frozen=True)
class MeasuredCandidate:
    """A candidate with its finished trials (at least one), ordered by number.

    A layout that fails now and then is unreliable. It has a cost only as long as more of its trials
    gave valid figures than failed, and none ran out of memory: all steps in a trial are similar, so
    a layout that once ran out of memory is at its limit. Lost ranks do not count, because they are
    not caused by the layout.

    steps     seconds per step in its valid trials, or their validation losses
    failures  trials that count against the layout
    cost      what is minimized (Candidate.cost), from the median of `steps`; infinite if the layout
              has none, see above
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
        """Describe the number of measurements, and the range of `steps` over their median."""
        if len(self.steps) < 2:
            return "measured once"
        apart = (max(self.steps) - min(self.steps)) / self.step_s
        return f"measured {len(self.steps)} times, {100 * apart:.1f} % apart"

    @property
    def numbers(self) -> str:
        """Format the trial numbers: 'trial 6' or 'trials 6, 14, 15'."""
        return (
            f"trial{'s' * (len(self.trials) > 1)} "
            f"{', '.join(str(trial.number) for trial in self.trials)}"
        )


def measured(trials: Iterable[Trial], objective: str) -> list[MeasuredCandidate]:
    """Group finished trials by layout, in the order of the layouts' first trials."""
    by_key: dict[str, list[Trial]] = {}
    for trial in sorted(trials, key=lambda trial: trial.number):
        if trial.result.status:
            by_key.setdefault(trial.candidate.key, []).append(trial)
    candidates = list[MeasuredCandidate]()
    for layout_trials in by_key.values():
        steps = tuple(trial.result.figure for trial in layout_trials if trial.result.figure)
        bad = tuple(
            trial
            for trial in layout_trials
            if not trial.result.figure and trial.result.kind != LOST_RANK
        )
        full = any(trial.result.kind == OUT_OF_MEMORY for trial in bad)
        good = len(steps) > len(bad) and not full
        cost = (
            layout_trials[0].candidate.cost(statistics.median(steps), objective)
            if good
            else math.inf
        )
        candidates.append(
            MeasuredCandidate(layout_trials[0].candidate, tuple(layout_trials), steps, bad, cost)
        )
    return candidates


def ranked(layouts: Iterable[MeasuredCandidate]) -> list[MeasuredCandidate]:
    """Return layouts with a cost, best first; the sort is stable."""
    return sorted((one for one in layouts if one.cost < math.inf), key=lambda one: one.cost)


def value_of(cost: float, objective: str) -> tuple[float, str]:
    """Return a cost as tokens/s, node-hours per billion tokens or a loss, with its unit."""
    if objective == LOSS:
        return cost, "nats, validation loss"
    if objective == "node_hours":
        return cost * 1e9 / 3600, "node-hours per billion tokens"
    return 1 / cost, "tokens/s"


def written(cost: float, objective: str) -> str:
    """Format a cost with its unit."""
    value, unit = value_of(cost, objective)
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}"


def noise_of(layouts: Iterable[MeasuredCandidate]) -> float:
    """Estimate the standard deviation of log(cost) of one trial.

    The estimate combines a prior, the spread of steady steps, and repeated trials of layouts.
    """
    errors = list[float]()
    squares = 0.0
    free = 0
    scatter = _SCATTER
    for one in layouts:
        if any(t.result.loss is not None for t in one.trials):
            scatter = _LOSS_SCATTER
            continue
        if len(one.steps) > 1:
            squares += statistics.variance(map(math.log, one.steps)) * (len(one.steps) - 1)
            free += len(one.steps) - 1
        # The error of the median of n normally distributed steps is 1.25 times their range over n,
        # to within a tenth for n of 3 to 10.
        errors += [1.25 * t.result.spread / t.result.steady for t in one.trials if t.result.spread]
    believed = scatter**2 + (statistics.median(errors) if errors else 0.0) ** 2
    return math.sqrt((_WORTH * believed + squares) / (_WORTH + free))


def within_noise(one: MeasuredCandidate, best: MeasuredCandidate, noise: float) -> bool:
    """Return whether a layout may be as good as a layout that looks better."""
    reach = min(
        _DEVIATIONS * noise * math.sqrt(1 / len(one.steps) + 1 / len(best.steps)), _FURTHEST
    )
    return math.log(one.cost / best.cost) <= reach


def rivals(best: Sequence[MeasuredCandidate], noise: float) -> list[MeasuredCandidate]:
    """Return the layouts within the noise of the best; `best` is sorted, best first."""
    return [one for one in best[1:] if within_noise(one, best[0], noise)]


def in_turn(trials: Sequence[Trial], objective: str) -> list[Candidate]:
    """Return the layouts to measure next, best first; none if the best is certain.

    trials  in any state; an unfinished CONFIRM trial counts as a measurement, so that the next
            trial goes to another layout

    These are the layouts with the fewest measurements among the best and its rivals. A layout with
    a failure is not measured again.
    """
    layouts = measured(trials, objective)
    known = [one for one in ranked(layouts) if not one.failures]
    doubt = rivals(known, noise_of(layouts))
    if not doubt:
        return []
    in_progress = Counter(
        trial.candidate.key for trial in trials if trial.by == CONFIRM and not trial.result.status
    )
    counts = [
        (len(one.steps) + in_progress[one.candidate.key], one.candidate)
        for one in (known[0], *doubt)
    ]
    least = min(count for count, _ in counts)
    return [candidate for count, candidate in counts if count == least]


def ruled_out(candidates: Sequence[Candidate], trials: Sequence[Trial]) -> set[int]:
    """Return the indices of candidates that probably do not fit.

    They are predicted to need at least as much memory as a candidate that ran out of memory.
    Predictions are not exact: a trial that ran out of memory is ignored if another trial, predicted
    to need as much or more, has fit.
    """
    fitted = max((t.candidate.memory_bytes or 0.0 for t in trials if t.result.step_s), default=0.0)
    full = [t.candidate.memory_bytes or math.inf for t in trials if t.result.kind == OUT_OF_MEMORY]
    least = min((need for need in full if need > fitted), default=math.inf)
    return {c.index for c in candidates if c.memory_bytes and c.memory_bytes >= least}
