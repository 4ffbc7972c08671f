"""Which layout is measured again when a search has ended: one trial tells too little of those that lie close together.

The best of many noisy measurements is rarely as good as it looks, and the layout that truly is the best may have had a
bad moment. So those that may be the best, by the noise that was seen, are measured again, and all measurements of a
layout count together. A choice depends on the trials alone: a tuner that was killed goes on as if it had not been.
"""
from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Sequence

from megatron.tuning.layouts import Layout, layouts_of
from megatron.tuning.types import Trial, cost_of

# Standard deviation of log(cost) of a single trial before any was repeated, beside what the steps of the trials show:
# the speed of machines and networks differs from one trial to the next by more than within one. That belief is worth
# as much as so many repetitions.
_SCATTER, _WORTH = 0.02, 3.0
_DEVIATIONS = 2.0
"""Of the difference of two layouts, by which one may be worse and yet the best."""
_FURTHEST = math.log(1.25)
"""Whatever the noise: what is further behind is no rival."""


def noise_of(layouts: Sequence[Layout]) -> float:
    """Standard deviation of log(cost) of one trial, by the runs of layouts that were measured several times and by the
    spread of steady steps."""
    errors = [error for one in layouts for trial in one.runs if (error := _error_of_median(trial)) is not None]
    believed = _SCATTER**2 + (statistics.median(errors) if errors else 0.0) ** 2
    squares, free = 0.0, 0
    for one in layouts:
        logs = [math.log(t.result.step_s) for t in one.runs if t.result is not None and t.result.step_s]
        if len(logs) > 1:
            squares += statistics.variance(logs) * (len(logs) - 1)
            free += len(logs) - 1
    return math.sqrt((_WORTH * believed + squares) / (_WORTH + free))


def _error_of_median(trial: Trial) -> float | None:
    """Standard error of the median of a trial's steady steps, as a part of it, if they are normal and independent."""
    result = trial.result
    if result is None or result.spread is None or result.steady < 2:
        return None
    # Blom 1958: the largest of n normal ones is expected there; a range is twice that. And of their median the error
    # is sqrt(pi / 2) times that of their mean.
    n = result.steady
    extreme = statistics.NormalDist().inv_cdf((n - 0.375) / (n + 0.25))
    return result.spread / (2 * extreme) * math.sqrt(math.pi / 2 / n)


def reach(noise: float, runs: int, of_best: int) -> float:
    """By how much log(cost) may be above the least and the layout yet be the best, of so many runs of both."""
    return min(_DEVIATIONS * noise * math.sqrt(1 / runs + 1 / of_best), _FURTHEST)


def in_turn(trials: Sequence[Trial], objective: str, keys: Collection[str]) -> list[str]:
    """Keys of the layouts whose measurement is worth most now, the best first; none where there is no doubt about the
    best.

    trials  in any state; what runs counts as a measurement, so that the next one goes elsewhere
    keys    of the layouts of this search

    Of the best and its rivals, those within reach, they are the ones with the fewest measurements: so the one that will
    be named was measured no less often than what it is compared with. One that failed when it was run again is left
    alone.
    """
    layouts = layouts_of(trials)
    known = sorted((math.log(cost), one.number, one) for one in layouts
                   if (cost := cost_of(one, objective)) is not None and not one.failures)  # fmt: skip
    if not known:
        return []
    noise, (least, _, best) = noise_of(layouts), known[0]
    rivals = [one for cost, _, one in known if cost - least <= reach(noise, len(one.runs), len(best.runs))]
    if len(rivals) < 2:
        return []
    under_way = Counter(trial.candidate.key for trial in trials if trial.result is None and trial.confirms)
    counts = {one.candidate.key: len(one.runs) + under_way[one.candidate.key] for one in rivals}
    listed = [key for key in counts if key in keys]
    fewest = min((counts[key] for key in listed), default=0)
    return [key for key in listed if counts[key] == fewest]


def places(trials: Sequence[Trial]) -> dict[int, int]:
    """Which of the confirming trials since the last one of the search each of them is, from 1 on, by its number.

    A search that goes on with more trials has another best to confirm.
    """
    found, place = dict[int, int](), 0
    for trial in sorted(trials, key=lambda trial: trial.number):
        place = place + 1 if trial.confirms else 0
        if trial.confirms:
            found[trial.number] = place
    return found


def made(trials: Sequence[Trial]) -> int:
    """Confirming trials since the last one of the search."""
    found = places(trials)
    return found.get(max((trial.number for trial in trials), default=0), 0)
