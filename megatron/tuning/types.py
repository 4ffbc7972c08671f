"""What the parts of the tuner hand to each other. No behaviour beyond reading and writing these as JSON."""
from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megatron.planning.experiments import endings

Value = int | float | str | bool | None
"""Of a parameter. None: the flag is not given."""

DONE, FAILED, INVALID = "done", "failed", "invalid"
"""How a trial ended: with figures; without; with figures that contradict themselves, which are never the best."""

OUT_OF_MEMORY, HANG, TIME_OUT = endings.OUT_OF_MEMORY, endings.HANG, endings.TIME_OUT
LOST_RANK, REFUSED, CRASH = endings.LOST_RANK, endings.REFUSED, endings.CRASH
"""Kinds of failures."""

OBJECTIVES = ("tokens_per_s", "node_hours")
CONFIRM = "confirm"
"""What proposes a trial that measures a layout again (confirming.py)."""


@dataclass(frozen=True)
class Parameter:
    """One thing that varies. `values` in the order in which neighbours are alike; ordered: whether that means anything
    (numbers do, names do not)."""

    name: str
    values: tuple[Value, ...]
    ordered: bool = True


@dataclass(frozen=True)
class Candidate:
    """A layout that may be tried: it is valid and, as far as is known, fits.

    index         its place among the candidates of the space; key: tp=2,pp=4,mbs=1, the same in every run of the tuner
    values        by parameter of the space
    flags         of pretrain_gpt.py, all of them, without what a trial adds (length, metrics file, log intervals)
    processes     of the job; nodes that they are on; tokens of one step
    memory_bytes  on a device of the fullest pipeline rank, by the planner; None: not asked
    step_s        of a step by the planner; None: without a described machine
    """

    index: int
    key: str
    values: Mapping[str, Value]
    flags: tuple[str, ...]
    processes: int
    nodes: int
    tokens: int
    memory_bytes: float | None = None
    step_s: float | None = None


@dataclass(frozen=True)
class Result:
    """What came of a trial. Figures are None where there are none.

    kind, reason   of a failure (the kinds above), or why the figures are invalid
    step_s         median of the steady steps; spread: (slowest - fastest) / median; steady: how many they are
    memory_bytes   most that any rank held
    skipped, nan   steps of the whole trial
    notes          worth knowing of valid figures
    """

    status: str
    kind: str | None = None
    reason: str | None = None
    step_s: float | None = None
    spread: float | None = None
    steady: int = 0
    tokens_per_s: float | None = None
    tokens_per_s_per_device: float | None = None
    model_tflops: float | None = None
    hardware_tflops: float | None = None
    memory_bytes: int | None = None
    skipped: int = 0
    nan: int = 0
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> Result:
        names = {f.name for f in dataclasses.fields(Result)}
        known = {name: value for name, value in record.items() if name in names}
        result: Result = checked(Result(**{**known, "notes": tuple(known.get("notes") or ())}))
        return result


@dataclass(frozen=True)
class Trial:
    """One candidate that was run, is running (result None, ended None), or was interrupted (result None, ended set).

    number   from 1 on, in the order in which they were proposed; by: what proposed it (planner, optuna, ..., confirm)
    folder   of its files, relative to the tuner's; started, ended: seconds since 1970
    """

    number: int
    candidate: Candidate
    by: str
    folder: str
    hosts: tuple[str, ...] = ()
    started: float | None = None
    ended: float | None = None
    result: Result | None = None

    @property
    def valid(self) -> bool:
        return self.result is not None and self.result.status == DONE

    @property
    def confirms(self) -> bool:
        """Whether it measures a layout again, after the search."""
        return self.by == CONFIRM


class Measured(Protocol):
    """A trial, or a layout with all its trials (layouts.py)."""

    @property
    def candidate(self) -> Candidate: ...

    @property
    def result(self) -> Result | None: ...


_KINDS: Mapping[str, tuple[type, ...]] = {
    "int": (int,), "float": (int, float), "str": (str,), "None": (type(None),), "tuple[str, ...]": (tuple,),
    "Mapping[str, Value]": (dict,),
}  # fmt: skip


def checked(made: Any) -> Any:
    """A candidate, result or trial that was read. Raises TypeError for a value that is not of its field's type."""
    for each in dataclasses.fields(made):
        kinds = [kind for name in str(each.type).split(" | ") for kind in _KINDS.get(name, (object,))]
        value = getattr(made, each.name)
        items = value if isinstance(value, tuple) else ()
        sizes = isinstance(value, int | float) and not abs(value) < 1e100
        if not isinstance(value, tuple(kinds)) or isinstance(value, bool) or sizes or set(map(type, items)) - {str}:
            raise TypeError(f"has {value!r} as its {each.name}")
    return made


def seconds_cost(step_s: float, candidate: Candidate, objective: str) -> float:
    """What a search makes small: seconds for each token, or node-seconds for each token."""
    nodes = candidate.nodes if objective == "node_hours" else 1
    return step_s * nodes / candidate.tokens


def objective_value(cost: float, objective: str) -> float:
    """As users read it: tokens a second, or node-hours for 10^9 tokens."""
    return cost * 1e9 / 3600 if objective == "node_hours" else 1 / cost


def cost_of(measured: Measured, objective: str) -> float | None:
    """None without valid figures."""
    result = measured.result
    if result is None or result.status != DONE or result.step_s is None:
        return None
    return seconds_cost(result.step_s, measured.candidate, objective)


@dataclass(frozen=True)
class History:
    """All that a proposal may depend on.

    candidates  of the space, by index
    parameters  of the space, whose values are the features
    seen        log(cost) by candidate, of all its trials, in the order in which their first ones ended; None: it failed
    failures    kind of failure by candidate, of those that failed
    left_out    candidates that are not to be proposed: tried, running, ruled out
    pending     candidates that are running
    prior       log(cost) by the planner, for each candidate; None: without a prior
    """

    candidates: Sequence[Candidate]
    parameters: Sequence[Parameter]
    seen: Mapping[int, float | None] = field(default_factory=dict)
    failures: Mapping[int, str] = field(default_factory=dict)
    left_out: frozenset[int] = frozenset()
    pending: frozenset[int] = frozenset()
    prior: Sequence[float] | None = None

    def open(self) -> list[int]:
        """Candidates that may be proposed, in order."""
        return [c.index for c in self.candidates if c.index not in self.left_out]


def prior_of(candidates: Sequence[Candidate], objective: str) -> list[float] | None:
    """log(cost) of each by the planner; None where one has no estimate."""
    found = []
    for candidate in candidates:
        if candidate.step_s is None:
            return None
        found.append(math.log(seconds_cost(candidate.step_s, candidate, objective)))
    return found
