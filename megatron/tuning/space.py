"""What a tuner varies: parameters with their values, what follows from them, and what must hold."""
from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.planning.cluster import Cluster
from megatron.tuning.expressions import Expression
from megatron.tuning.types import Parameter, Value


@dataclass(frozen=True)
class Space:
    """A space file, read and checked; load_space (space_file.py) makes one.

    parameters   all that varies, with the variables, in the order of the file; combinations are numbered along them,
                 the last one fastest
    variables    names of those that are no flags and stand in expressions only
    flags        of pretrain_gpt.py that all layouts have
    derived      name -> what it is
    constraints  reason that is shown -> what must hold
    cluster      name of the machine that it is meant for, or None
    iterations   of a trial that are measured, after `warm_up` that are not
    """

    name: str
    title: str
    source: str
    path: str
    parameters: tuple[Parameter, ...]
    variables: frozenset[str]
    flags: tuple[str, ...]
    cluster: str | None
    derived: Mapping[str, Expression]
    constraints: Mapping[str, Expression]
    iterations: int
    warm_up: int

    @property
    def combinations(self) -> int:
        """Of all values, whether they make a layout or not."""
        return math.prod(len(parameter.values) for parameter in self.parameters)

    def combination(self, number: int) -> dict[str, Value]:
        """The values of one combination, by parameter. Raises IndexError for a number that there is not."""
        if not 0 <= number < self.combinations:
            raise IndexError(number)
        found: dict[str, Value] = {}
        for parameter in reversed(self.parameters):
            number, place = divmod(number, len(parameter.values))
            found[parameter.name] = parameter.values[place]
        return {parameter.name: found[parameter.name] for parameter in self.parameters}

    def digest(self) -> str:
        """The same for spaces that mean the same layouts in the same order, whatever their titles and reasons are."""
        meaning = [
            [[p.name, [[type(v).__name__, v] for v in p.values]] for p in self.parameters], sorted(self.variables),
            self.flags, sorted((name, e.text) for name, e in self.derived.items()),
            sorted(e.text for e in self.constraints.values()),
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Machine:
    """Where trials run.

    cluster             its description; None: not known, so that neither memory nor time is predicted
    processes_per_node  of a job that fills its nodes
    max_nodes           that one trial may have
    capacity_bytes      of a device that a layout may use; None: memory is not asked
    """

    cluster: Cluster | None
    processes_per_node: int
    max_nodes: int
    capacity_bytes: float | None = None

    @property
    def processes(self) -> int:
        return self.processes_per_node * self.max_nodes


def write_key(values: Mapping[str, Value]) -> str:
    """The name of a combination: tp=2,pp=4,sp=on."""
    return ",".join(f"{name}={_written(value)}" for name, value in values.items())


def _written(value: Value) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def ordered(values: Sequence[Value]) -> bool:
    """Whether their order means anything: numbers, and not giving one."""
    return all(value is None or isinstance(value, (bool, int, float)) for value in values)
