"""What all trials of a layout tell together: one that was measured several times has one result."""
from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from megatron.tuning.types import DONE, FAILED, LOST_RANK, OUT_OF_MEMORY, Candidate, Result, Trial, cost_of

_Figure = TypeVar("_Figure", int, float)
_RATES = ("tokens_per_s", "tokens_per_s_per_device", "model_tflops", "hardware_tflops")


@dataclass(frozen=True)
class Layout:
    """A candidate and its trials that have ended, by their numbers; at least one.

    A layout that fails now and then is no layout to build on. It has figures only while more of its trials gave valid
    ones than failed, and none ran out of memory: the steps of a trial are all alike, what once ran out is at the edge.
    A lost rank does not count, it says nothing about a layout.
    """

    candidate: Candidate
    trials: tuple[Trial, ...]

    @cached_property
    def runs(self) -> tuple[Trial, ...]:
        """Its trials with valid figures."""
        return tuple(trial for trial in self.trials if trial.valid)

    @cached_property
    def failures(self) -> tuple[Trial, ...]:
        """Its trials that say something against it."""
        return tuple(t for t in self.trials if not t.valid and t.result is not None and t.result.kind != LOST_RANK)

    @cached_property
    def result(self) -> Result:
        """Of all its trials: the median of the runs' step times, and rates that belong to it; the most memory. Without
        enough runs that of its last failure."""
        kinds = [trial.result.kind for trial in self.failures if trial.result is not None]
        if self.runs and len(self.runs) > len(kinds) and OUT_OF_MEMORY not in kinds:
            return _pooled([trial.result for trial in self.runs if trial.result is not None])
        last = next((t for t in self.failures if t.result and t.result.kind == OUT_OF_MEMORY), None)
        last = last or (self.failures or self.trials)[-1]
        assert last.result is not None, "these trials have ended"
        if not self.runs:
            return last.result
        reason = f"{len(kinds)} of {len(self.runs) + len(kinds)} trials gave no valid figures: {last.result.reason}"
        return Result(FAILED, last.result.kind or last.result.status, reason)

    @property
    def valid(self) -> bool:
        """Whether it has figures."""
        return self.result.status == DONE

    @property
    def number(self) -> int:
        """Of its first trial."""
        return self.trials[0].number

    @property
    def by(self) -> str:
        """What proposed its first trial."""
        return self.trials[0].by

    @property
    def apart(self) -> float | None:
        """(slowest - fastest run) / median of the runs, of their step times; None of a single run."""
        steps = [t.result.step_s for t in self.runs if t.result is not None and t.result.step_s is not None]
        return (max(steps) - min(steps)) / statistics.median(steps) if len(steps) > 1 else None

    @property
    def numbers(self) -> str:
        """Of the trials that its figures rest on, for a sentence.

        trial 6, or: trials 6, 14, 15
        """
        numbers = [str(trial.number) for trial in (self.runs if self.valid else self.trials)]
        return f"trial{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def _pooled(results: Sequence[Result]) -> Result:
    """Of valid results, in order."""
    first = results[0]
    if len(results) == 1:
        return first
    step_s = statistics.median(_known(result.step_s for result in results))
    spreads = _known(result.spread for result in results)
    # Rates of a layout are as 1 to its step time.
    factor = first.step_s / step_s if first.step_s else 1.0
    rates: dict[str, Any] = {name: None if (rate := getattr(first, name)) is None else factor * rate for name in _RATES}
    return dataclasses.replace(
        first, step_s=step_s, spread=statistics.median(spreads) if spreads else None,
        steady=sum(result.steady for result in results), **rates,
        memory_bytes=max(_known(result.memory_bytes for result in results), default=None),
        skipped=sum(result.skipped for result in results), nan=sum(result.nan for result in results),
        notes=tuple(dict.fromkeys(note for result in results for note in result.notes)),
    )  # fmt: skip


def _known(values: Iterable[_Figure | None]) -> list[_Figure]:
    return [value for value in values if value is not None]


def layouts_of(trials: Iterable[Trial]) -> list[Layout]:
    """Of all trials that have ended, each layout once, in the order of their first ones."""
    by_key: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.result is not None:
            by_key.setdefault(trial.candidate.key, []).append(trial)
    ordered = [sorted(own, key=lambda trial: trial.number) for own in by_key.values()]
    return [Layout(own[0].candidate, tuple(own)) for own in ordered]


def best_layout(trials: Iterable[Trial], objective: str) -> Layout | None:
    """The one of least cost by all its trials; of equal ones the first."""
    costs = [(cost, one.number, one) for one in layouts_of(trials) if (cost := cost_of(one, objective)) is not None]
    return min(costs, key=lambda found: found[:2])[2] if costs else None
