"""What all trials of a layout tell together, how much single ones scatter, and which layouts are measured again.

The best of many noisy measurements is rarely as good as it looks, and the layout that truly is the best may have had a
bad moment. So nothing is called better that lies within the noise, and when a search has ended those that may be the
best are measured again; all measurements of a layout count together.
"""
from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from megatron.jobs.candidates import Candidate
from megatron.jobs.endings import LOST_RANK, OUT_OF_MEMORY
from megatron.jobs.result import DONE, Result

OBJECTIVES = ("tokens_per_s", "node_hours")
CONFIRM = "confirm"
"""What proposes a trial that measures a layout again."""
# Standard deviation of log(cost) of a single trial before any was repeated, beside what the steps of the trials show:
# the speed of machines and networks differs from one trial to the next by more than within one. That belief is worth
# as much as so many repetitions.
_SCATTER, _WORTH = 0.02, 3.0
_DEVIATIONS = 2.0  # of the difference of two layouts, by which one may be worse and yet the best
_FURTHEST = math.log(1.25)  # whatever the noise: what is further behind is no rival


@dataclass(frozen=True)
class Trial:
    """One candidate that was run, or is to be run (result None); by: what proposed it (planner, optuna, ..., confirm).

    number  from 1 on, in the order in which they were proposed; hosts, started, ended: of the last attempt
    """

    number: int
    candidate: Candidate
    by: str
    result: Result | None = None
    hosts: tuple[str, ...] = ()
    started: float | None = None
    ended: float | None = None

    @property
    def step_s(self) -> float | None:
        """None without valid figures."""
        return self.result.step_s if self.result is not None and self.result.status == DONE else None


@dataclass(frozen=True)
class Layout:
    """A candidate and its trials that have ended, by their numbers; at least one.

    A layout that fails now and then is no layout to build on. It has figures only while more of its trials gave valid
    ones than failed, and none ran out of memory: the steps of a trial are all alike, what once ran out is at the edge.
    A lost rank does not count, it says nothing about a layout.

    runs, failures  its trials with valid figures, and those that say something against it
    step_s          median of the runs; None: the layout has no figures
    """

    candidate: Candidate
    trials: tuple[Trial, ...]
    runs: tuple[Trial, ...]
    failures: tuple[Trial, ...]
    step_s: float | None

    @property
    def apart(self) -> float | None:
        """(slowest - fastest run) / median of the runs, of their step times; None of a single run."""
        steps = [t.step_s for t in self.runs if t.step_s is not None]
        return (max(steps) - min(steps)) / statistics.median(steps) if len(steps) > 1 else None

    @property
    def numbers(self) -> str:
        """Numbers of the trials that its figures rest on: trial 6, or: trials 6, 14, 15."""
        numbers = [str(trial.number) for trial in (self.runs if self.step_s else self.trials)]
        return f"trial{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"

    def cost(self, objective: str) -> float:
        """What a search makes small; the layout has figures."""
        assert self.step_s is not None, "only what has valid figures has a cost"
        return cost(self.step_s, self.candidate, objective)


def cost(step_s: float, candidate: Candidate, objective: str) -> float:
    """Seconds for each token, or node-seconds for each token."""
    return step_s * (candidate.nodes if objective == "node_hours" else 1) / candidate.tokens


def written(cost: float, objective: str) -> str:
    """Write a cost as users read it: tokens a second, or node-hours for 10^9 tokens."""
    value = cost * 1e9 / 3600 if objective == "node_hours" else 1 / cost
    unit = "node-hours for a billion tokens" if objective == "node_hours" else "tokens/s"
    return f"{value:,.0f} {unit}" if value >= 1000 else f"{value:.4g} {unit}"


def layouts_of(trials: Iterable[Trial]) -> list[Layout]:
    """Group all trials that have ended: each layout once, in the order of their first ones."""
    by_key: dict[str, list[Trial]] = {}
    for trial in sorted(trials, key=lambda trial: trial.number):
        if trial.result is not None:
            by_key.setdefault(trial.candidate.key, []).append(trial)
    return [_layout(tuple(own)) for own in by_key.values()]


def _layout(trials: tuple[Trial, ...]) -> Layout:
    runs = tuple(trial for trial in trials if trial.step_s is not None)
    bad = tuple(t for t in trials if t.step_s is None and t.result is not None and t.result.kind != LOST_RANK)
    full = any(t.result is not None and t.result.kind == OUT_OF_MEMORY for t in bad)
    steps = [t.step_s for t in runs if t.step_s is not None]
    step_s = statistics.median(steps) if len(runs) > len(bad) and not full else None
    return Layout(trials[0].candidate, trials, runs, bad, step_s)


def ranked(trials: Iterable[Trial], objective: str) -> list[Layout]:
    """Layouts with figures, the best first; of equal ones the first."""
    return sorted((one for one in layouts_of(trials) if one.step_s is not None), key=lambda one: one.cost(objective))


def noise_of(layouts: Iterable[Layout]) -> float:
    """Standard deviation of log(cost) of one trial, by the runs of layouts that were measured several times and by the
    spread of steady steps."""
    errors, squares, free = list[float](), 0.0, 0
    for one in layouts:
        logs = [math.log(trial.step_s) for trial in one.runs if trial.step_s]
        if len(logs) > 1:
            squares += statistics.variance(logs) * (len(logs) - 1)
            free += len(logs) - 1
        for result in (trial.result for trial in one.runs):
            if result is not None and result.spread is not None and (n := result.steady) > 1:
                # Blom 1958: the largest of n normal ones is expected there; a range is twice that. And of their median
                # the error is sqrt(pi / 2) times that of their mean.
                extreme = statistics.NormalDist().inv_cdf((n - 0.375) / (n + 0.25))
                errors.append(result.spread / (2 * extreme) * math.sqrt(math.pi / 2 / n))
    believed = _SCATTER**2 + (statistics.median(errors) if errors else 0.0) ** 2
    return math.sqrt((_WORTH * believed + squares) / (_WORTH + free))


def within_noise(one: Layout, best: Layout, noise: float, objective: str) -> bool:
    """Whether a layout may be as good as one that looks better."""
    reach = min(_DEVIATIONS * noise * math.sqrt(1 / len(one.runs) + 1 / len(best.runs)), _FURTHEST)
    return math.log(one.cost(objective) / best.cost(objective)) <= reach


def in_turn(trials: Sequence[Trial], objective: str, keys: Collection[str]) -> list[str]:
    """Keys of the layouts whose measurement is worth most now, the best first; none where there is no doubt about the
    best.

    trials  in any state; what has not ended counts as a measurement, so that the next one goes elsewhere
    keys    of the layouts of this search

    Of the best and its rivals, those within the noise, they are the ones with the fewest measurements: so the one that
    will be named was measured no less often than what it is compared with. One that failed when it was run again is
    left alone.
    """
    noise, known = noise_of(layouts_of(trials)), [one for one in ranked(trials, objective) if not one.failures]
    rivals = [one for one in known if within_noise(one, known[0], noise, objective)]
    if len(rivals) < 2:
        return []
    under_way = Counter(trial.candidate.key for trial in trials if trial.result is None and trial.by == CONFIRM)
    counts = {key: len(one.runs) + under_way[key] for one in rivals if (key := one.candidate.key) in keys}
    return [key for key, count in counts.items() if count == min(counts.values())]


def ruled_out(candidates: Sequence[Candidate], trials: Iterable[Trial]) -> set[int]:
    """Indices of candidates that need, by the planner, no less memory than one that ran out of it.

    The planner's figures are not exact: a trial that ran out is no argument where another one fitted that should need
    as much or more. On a CPU node all processes share its memory, so that a trial is compared only with candidates of
    as many processes a node or more.
    """

    def covers(more: Candidate, less: Candidate) -> bool:
        return (more.memory_bytes or 0.0) >= (less.memory_bytes or math.inf) and (
            more.processes * less.nodes >= less.processes * more.nodes)  # fmt: skip

    ended = [(trial.result, trial.candidate) for trial in trials if trial.result is not None]
    fitted = [candidate for result, candidate in ended if result.step_s is not None]
    limits = [candidate for result, candidate in ended
              if result.kind == OUT_OF_MEMORY and not any(covers(fits, candidate) for fits in fitted)]  # fmt: skip
    return {c.index for c in candidates if any(covers(c, limit) for limit in limits)}
