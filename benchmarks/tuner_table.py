"""What a sweep measured of every layout of a space: the table in which searches are replayed.

Each pass measures every layout once. A layout's truth is the median of its steady steps in all passes; what a search
is told of it is the median of one pass alone, so that the noise of a single trial stays in. The truth is not
independent of what is told: that pass is a part of it.
"""
from __future__ import annotations

import dataclasses
import json
import math
import os
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.planning.metrics_file import read_records
from megatron.tuning.types import DONE, OBJECTIVES, Candidate, Parameter, Trial, prior_of, seconds_cost

OBJECTIVE = OBJECTIVES[0]
NEAR = 0.03
"""How much dearer than the best a layout may be that counts as found: the issue's 3 %."""


@dataclass(frozen=True)
class Measured:
    """One layout in one pass: seconds of its steady steps; none if it failed, and then how (types.py)."""

    steps_s: tuple[float, ...] = ()
    kind: str | None = None

    @property
    def step_s(self) -> float | None:
        return statistics.median(self.steps_s) if self.steps_s else None


@dataclass(frozen=True)
class Noise:
    """Between two passes, as parts of the step time: how far apart a layout's two medians lie when the passes' common
    shift (that of the machine's speed) is taken out, median and 95th percentile over the layouts; the shift itself."""

    median: float
    high: float
    shift: float


@dataclass(frozen=True)
class Table:
    """A space with its measurements: one mapping from a candidate's key for each pass."""

    title: str
    parameters: tuple[Parameter, ...]
    candidates: tuple[Candidate, ...]
    passes: tuple[Mapping[str, Measured], ...]

    @cached_property
    def truth(self) -> tuple[float, ...]:
        """log(cost) by candidate over the steady steps of all passes; infinite where it failed in every one."""
        found = []
        for candidate in self.candidates:
            steps = [s for measured in self.passes for s in measured.get(candidate.key, Measured()).steps_s]
            cost = seconds_cost(statistics.median(steps), candidate, OBJECTIVE) if steps else math.inf
            found.append(math.log(cost) if steps else math.inf)
        return tuple(found)

    @property
    def best(self) -> int:
        """The candidate of least true cost."""
        return min(range(len(self.truth)), key=self.truth.__getitem__)

    def regret(self, index: int) -> float:
        """How much dearer than the best a candidate truly is: 0.03 for 3 %."""
        return math.exp(self.truth[index] - self.truth[self.best]) - 1

    def near(self) -> frozenset[int]:
        """Candidates within 3 % of the best, itself among them."""
        return frozenset(c.index for c in self.candidates if self.regret(c.index) <= NEAR)

    def prior(self) -> list[float]:
        """log(cost) by the planner."""
        found = prior_of(self.candidates, OBJECTIVE)
        if found is None:
            raise ValueError(f"{self.title}: a layout has no prediction")
        return found

    def again(self, index: int, turn: int, seed: int) -> tuple[float | None, str | None]:
        """What a further trial of a candidate tells, as `answers` has it: its truth with the error that some layout had
        in some pass, or the failure of a pass in which it failed. turn: 1 for the second trial."""
        draw = random.Random(f"again {seed} {index} {turn}")
        measured = self.passes[draw.randrange(len(self.passes))].get(self.candidates[index].key, Measured(kind="crash"))
        if measured.step_s is None:
            return None, measured.kind or "crash"
        return self.truth[index] + draw.choice(self.errors), None

    @cached_property
    def errors(self) -> tuple[float, ...]:
        """log(what one pass says / the truth) of all layouts in all passes."""
        return tuple(
            math.log(seconds_cost(step_s, candidate, OBJECTIVE)) - self.truth[candidate.index]
            for measured in self.passes for candidate in self.candidates
            if (step_s := measured.get(candidate.key, Measured()).step_s)
        )  # fmt: skip

    def answers(self, seed: int) -> list[tuple[float | None, str | None]]:
        """What a trial of each candidate tells a search: log(cost) and no kind, or None and the kind of its failure.
        Of which pass, is drawn for each candidate; equal seeds are told the same, whatever they search with."""
        draw = random.Random(f"answers {seed}")
        found: list[tuple[float | None, str | None]] = []
        for candidate in self.candidates:
            measured = self.passes[draw.randrange(len(self.passes))].get(candidate.key, Measured(kind="crash"))
            step_s = measured.step_s
            told = math.log(seconds_cost(step_s, candidate, OBJECTIVE)) if step_s else None
            found.append((told, None if step_s else measured.kind or "crash"))
        return found

    def noise(self) -> Noise | None:
        """Between the first two passes; None with one."""
        if len(self.passes) < 2:
            return None
        first, second = self.passes[:2]
        both = [(first[key].step_s, second[key].step_s) for key in first.keys() & second.keys()]
        ratios = [math.log(b / a) for a, b in both if a and b]
        shift = statistics.median(ratios)
        apart = sorted(abs(ratio - shift) for ratio in ratios)
        high = apart[math.ceil(0.95 * len(apart)) - 1]
        return Noise(math.expm1(statistics.median(apart)), math.expm1(high), math.expm1(shift))

    # -- files -------------------------------------------------------------------------------------------------------

    def write(self, path: Path) -> None:
        """As JSON, from which `read` makes the same table."""
        record = dataclasses.asdict(self)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(record, indent=1) + "\n")
        os.replace(partial, path)

    @staticmethod
    def read(path: Path) -> Table:
        record = json.loads(path.read_text())
        return Table(
            record["title"],
            tuple(Parameter(**{**p, "values": tuple(p["values"])}) for p in record["parameters"]),
            tuple(Candidate(**{**c, "flags": tuple(c["flags"])}) for c in record["candidates"]),
            tuple({key: _measured(value) for key, value in found.items()} for found in record["passes"]),
        )


def _measured(record: Mapping[str, Any]) -> Measured:
    return Measured(tuple(record["steps_s"]), record["kind"])


def measured_in(folder: Path, trials: Sequence[Trial], warm_up: int) -> dict[str, Measured]:
    """What the trials of one pass measured, by key; `folder`: the tuner's. Trials that did not end are left out."""
    found = {}
    for trial in trials:
        if trial.result is None:
            continue
        if trial.result.status == DONE:
            records = read_records(folder / trial.folder / "metrics.jsonl")
            steps = [r["step_time_s"] for r in records if r["event"] == "iteration"]
            found[trial.candidate.key] = Measured(tuple(steps[warm_up:]))
        else:
            found[trial.candidate.key] = Measured((), trial.result.kind or trial.result.status)
    return found
