"""What a report is made of, and how its figures are written."""
from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.errors import ConfigError
from megatron.planning.cluster import Cluster
from megatron.planning.search.space import Rejections
from megatron.tuning.types import (
    DONE,
    FAILED,
    Candidate,
    Parameter,
    Trial,
    Value,
    best_trial,
    cost_of,
    objective_value,
    seconds_cost,
)

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

    @property
    def best(self) -> Trial | None:
        return best_trial(self.trials, self.objective)

    @property
    def valid(self) -> list[Trial]:
        """Trials with figures, in order."""
        return [trial for trial in self.trials if cost_of(trial, self.objective) is not None]

    def cost(self, trial: Trial) -> float:
        """Of a valid trial."""
        cost = cost_of(trial, self.objective)
        assert cost is not None, "only valid trials have a cost"
        return cost

    def value(self, trial: Trial) -> float:
        """Of a valid trial, as users read it."""
        return objective_value(self.cost(trial), self.objective)

    def predicted(self, candidate: Candidate) -> float | None:
        """The objective's value by the planner."""
        if candidate.step_s is None:
            return None
        return objective_value(seconds_cost(candidate.step_s, candidate, self.objective), self.objective)

    def loss(self, trial: Trial) -> float:
        """The part of the best layout's throughput (by node, for node_hours) that a valid trial's layout lacks."""
        best = self.best
        assert best is not None, "there is a valid trial"
        return 1 - self.cost(best) / self.cost(trial)

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


def state_of(trial: Trial) -> str:
    """done, out of memory, invalid, ...: in the fewest words."""
    if trial.result is None:
        return "running" if trial.ended is None else "interrupted"
    if trial.result.status == FAILED:
        return trial.result.kind or FAILED
    return trial.result.status


def kinds(trials: Iterable[Trial]) -> Counter[str]:
    """How many ended without valid figures, by how they ended; the most frequent first."""
    counted = Counter(state_of(t) for t in trials if t.result is not None and t.result.status != DONE)
    return Counter(dict(counted.most_common()))


def save_text(path: Path, text: str) -> Path:
    """Raises ConfigError where it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}: choose another --out folder") from error
    return path
