"""Rates of faults of large runs, from published counts (faults.toml).

A kind of fault is one that a run here detects and survives in a particular way:

    process      a training process dies, and runs again on the same device
    device       a device fails: its process dies, and again after a restart on the same node
    node         a node is lost with all its processes and its memory
    network      a link, switch or cable fails: collectives fail, and a node is replaced
    hang         a process makes no progress
    slow         a rank computes more slowly than the others
    corruption   bits of weights or gradients are wrong, without an error
    storage      a file system is full or does not answer
    maintenance  the job is preempted, or its nodes are taken for maintenance
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError

KINDS = (
    "process",
    "device",
    "node",
    "network",
    "hang",
    "slow",
    "corruption",
    "storage",
    "maintenance",
)
NO_FAULT = "none"
"""Kind of causes that end a run on purpose."""
_PLATFORM = "byterobust-platform"  # has causes that the tables of single runs lack
_UNLISTED = ("slow", "storage")
_MIX = "llama3"  # the run whose causes are known in most detail
FILE = Path(__file__).with_suffix(".toml")


@dataclass(frozen=True)
class Cause:
    """A cause of faults, how often it occurred, and its kind."""

    cause: str
    count: int
    kind: str


@dataclass(frozen=True)
class FaultRecord:
    """Published faults of one run or machine; faults.toml describes the fields."""

    name: str
    title: str
    source: str
    basis: str
    nodes: int | None = None
    devices_per_node: int | None = None
    days: float | None = None
    failures_per_1000_node_days: float | None = None
    effective: str = ""
    statements: str = ""
    causes: tuple[Cause, ...] = ()

    def counts(self) -> Counter[str]:
        """Return the number of faults of each kind."""
        counts = Counter[str]()
        for cause in self.causes:
            if cause.kind != NO_FAULT:
                counts[cause.kind] += cause.count
        return counts

    def per_node_day(self) -> float | None:
        """Return the faults of all kinds per node and day; None if the source does not tell."""
        if self.failures_per_1000_node_days is not None:
            return self.failures_per_1000_node_days / 1000
        if self.nodes is None or self.days is None or not self.causes:
            return None
        return self.counts().total() / (self.nodes * self.days)


def fault_records() -> dict[str, FaultRecord]:
    """Return the published faults by name."""
    tables: dict[str, Any] = tomllib.loads(FILE.read_text(encoding="utf-8"))
    return {
        name: FaultRecord(
            name, **table | {"causes": tuple(Cause(**cause) for cause in table.get("causes", ()))}
        )
        for name, table in tables.items()
    }


def fault_rates(name: str) -> dict[str, float]:
    """Return the faults of each kind per node and day, as the named source has them.

    If the source has only a total, it is divided among the kinds as in the table of Llama 3. Kinds
    that the tables of single runs lack are added, in the proportion to all other faults that they
    have in the table of ByteRobust's platform.

    Raises ConfigError if the source gives no rate.
    """
    records = fault_records()
    total = records[name].per_node_day() if name in records else None
    if total is None:
        known = ", ".join(n for n, record in records.items() if record.per_node_day() is not None)
        raise ConfigError(f"there are no fault rates of {name!r}: choose from {known}")
    counts = records[name].counts() or records[_MIX].counts()
    rates = {kind: total * counts[kind] / counts.total() for kind in KINDS}
    platform = records[_PLATFORM].counts()
    listed = platform.total() - sum(platform[kind] for kind in _UNLISTED)
    for kind in _UNLISTED:
        rates[kind] = rates[kind] or total * platform[kind] / listed
    return rates


def origins_of_rates(name: str) -> dict[str, str]:
    """Return, for each kind of fault with a rate, the records from which `fault_rates` takes it.

    >>> origins_of_rates("rsc-1")["node"]
    'rsc-1, mix of llama3'
    """
    records = fault_records()
    own = records[name].counts()
    listed = name if own else f"{name}, mix of {_MIX}"
    counts = own or records[_MIX].counts()
    return {kind: listed for kind in KINDS if counts[kind]} | {
        kind: _PLATFORM for kind in _UNLISTED if not counts[kind]
    }


def scaled(rates: Mapping[str, float], total: float) -> dict[str, float]:
    """Return rates in the same proportions with this total.

    >>> scaled({"node": 1.0, "hang": 3.0}, 2.0)
    {'node': 0.5, 'hang': 1.5}
    """
    factor = total / sum(rates.values())
    return {kind: rate * factor for kind, rate in rates.items()}
