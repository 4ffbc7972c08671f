"""What a report is made of, and how its figures are written."""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from megatron.planning.cluster import Cluster
from megatron.planning.search.space import Rejections
from megatron.tuning.confirming import noise_of
from megatron.tuning.layouts import Layout, best_layout, layouts_of
from megatron.tuning.types import (
    DONE,
    FAILED,
    Candidate,
    Measured,
    Parameter,
    Trial,
    Value,
    cost_of,
    objective_value,
    seconds_cost,
)
from megatron.untrusted import write_text

GIB = 2**30


@dataclass(frozen=True)
class ReportContext:
    """A search as far as it went.

    name, title     of the space; parameters: all that varies in it
    trials          in any state, in the order of their numbers; candidates: all of the space
    objective       tokens_per_s or node_hours; search: what proposed, in words
    combinations    size of the product of all values; rejections: those that are no candidates, and why
    sampled         how many combinations were looked at, where they were too many for all
    capacity_bytes  of a device that a layout may use; None: not asked
    launcher        local or slurm; tasks_per_node: processes on a full node
    flags           that all trials have in common, as they were given
    """

    name: str
    title: str
    parameters: Sequence[Parameter]
    trials: Sequence[Trial]
    candidates: Sequence[Candidate]
    objective: str
    search: str
    combinations: int = 0
    rejections: Rejections | None = None
    sampled: int | None = None
    cluster: Cluster | None = None
    capacity_bytes: float | None = None
    launcher: str = "local"
    tasks_per_node: int = 1
    flags: Sequence[str] = ()

    @cached_property
    def layouts(self) -> list[Layout]:
        """What was tried, each with all its trials, in the order of their first ones."""
        return layouts_of(self.trials)

    @cached_property
    def valid(self) -> list[Layout]:
        """Layouts with figures, in the order of their first trials."""
        return [layout for layout in self.layouts if cost_of(layout, self.objective) is not None]

    @cached_property
    def best(self) -> Layout | None:
        return best_layout(self.trials, self.objective)

    @cached_property
    def noise(self) -> float:
        """Standard deviation of log(cost) of one trial."""
        return noise_of(self.layouts)

    def cost(self, measured: Measured) -> float:
        """Of a valid layout or trial."""
        cost = cost_of(measured, self.objective)
        assert cost is not None, "only what has valid figures has a cost"
        return cost

    def value(self, measured: Measured) -> float:
        """Of a valid layout or trial, as users read it."""
        return objective_value(self.cost(measured), self.objective)

    def predicted(self, candidate: Candidate) -> float | None:
        """The objective's value by the planner."""
        if candidate.step_s is None:
            return None
        return objective_value(seconds_cost(candidate.step_s, candidate, self.objective), self.objective)

    def loss(self, layout: Layout) -> float:
        """The part of the best layout's throughput (by node, for node_hours) that a valid one lacks."""
        best = self.best
        assert best is not None, "there is a valid one"
        return 1 - self.cost(best) / self.cost(layout)

    def against_best(self, loss: float) -> str:
        """A `loss` as the objective counts it: -20.0 % of the throughput, or +25.0 % of the node-hours."""
        if self.objective != "node_hours":
            return f"-{percent(loss)}"
        return f"+{percent(1 / (1 - loss) - 1 if loss < 1 else math.inf)}"

    @property
    def label(self) -> str:
        """Of an axis."""
        return "tokens per second" if self.objective == "tokens_per_s" else "node-hours for a billion tokens"

    def written(self, value: float) -> str:
        """A value of the objective with its unit."""
        unit = "tokens/s" if self.objective == "tokens_per_s" else "node-hours for a billion tokens"
        return f"{amount(value)} {unit}"

    def varied(self) -> list[Parameter]:
        """Parameters of which candidates have more than one value, each with the values that candidates have."""
        found = []
        for parameter in self.parameters:
            present = {value_key(c.values.get(parameter.name)) for c in self.candidates}
            values = tuple(v for v in parameter.values if value_key(v) in present)
            if len(values) > 1:
                found.append(Parameter(parameter.name, values, parameter.ordered))
        return found


def value_key(value: Value) -> tuple[str, Value]:
    """Tells True from 1 and 1.0 from 1, which are equal and have one hash."""
    return type(value).__name__, value


def value_text(value: Value) -> str:
    """As a user reads it.

    >>> [value_text(value) for value in (None, True, 4, 0.1, "selective")]
    ['none', 'on', '4', '0.1', 'selective']
    """
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def amount(value: float) -> str:
    """Four digits at least, thousands apart.

    >>> amount(12345.6), amount(1.23456)
    ('12,346', '1.235')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def state_of(trial: Trial | Layout) -> str:
    """done, out of memory, invalid, ...: in the fewest words."""
    result = trial.result
    if result is None:
        assert isinstance(trial, Trial), "a layout has a trial that has ended"
        return "running" if trial.ended is None else "interrupted"
    if result.status == FAILED:
        return result.kind or FAILED
    return result.status


def kinds(trials: Iterable[Trial | Layout]) -> Counter[str]:
    """How many ended without valid figures, by how they ended; the most frequent first."""
    counted = Counter(state_of(t) for t in trials if t.result is not None and t.result.status != DONE)
    return Counter(dict(counted.most_common()))


def save_text(path: Path, text: str) -> Path:
    """Raises ConfigError where it cannot be written."""
    return write_text(path, text, choose="another --out folder")
