"""Read and check the TOML description of a machine (cluster.py)."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from megatron.errors import ConfigError
from megatron.planner.cluster import Band, Cluster, Queue, WallLimit
from megatron.planner.compute import BASES, COLUMNS, DTYPES, SCALARS, Compute, Figure, Points
from megatron.untrusted import read_toml

T = TypeVar("T")
_MOST_BYTES = 1 << 22  # of a file: measured ones have some ten thousand
_MOST_COUNTED, _MOST = 10**7, 1e30  # nodes, devices, cores; seconds, TFLOP/s, GB/s

_BANDS = (
    "gemm_tflops", "copy_gb_per_s", "allreduce_node_gb_per_s", "p2p_node_gb_per_s", "neighbour_gb_per_s",
    "tcp_gb_per_s", "clock_skew_s", "nvme_free_gib",
)  # fmt: skip


class _Facts:
    """A parsed file, from which facts are taken by name; what is left over at the end was misspelt."""

    def __init__(self, path: Path, tables: dict[str, Any]) -> None:
        self._path, self._left = path, {**tables}

    def error(self, key: str, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}: {key}: {problem}")

    def take(self, key: str, make: Callable[[Any], T], expected: str, default: Any = ...) -> T:
        """The fact `key` ('table.name' or 'name') made into what is wanted; `expected` says what that is."""
        table: Any = self._left
        *tables, name = key.split(".")
        for part in tables:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise self.error(part, "expected a table")
        if name not in table and default is ...:
            raise self.error(key, f"missing: expected {expected}")
        value = table.pop(name, default)
        try:
            return make(value)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise self.error(key, f"expected {expected}, got {value!r}") from error

    def rest(self, key: str) -> dict[str, Any]:
        """All that is left of a table."""
        return self.take(key, lambda v: dict(v), "a table", {})

    def check_empty(self) -> None:
        def left(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
            for name, value in table.items():
                if not isinstance(value, dict):
                    yield prefix + name
                yield from left(value, f"{prefix}{name}.") if isinstance(value, dict) else ()

        names = list(left(self._left, ""))
        if names:
            raise self.error(names[0], "is no fact that is known here: see the files of known machines for all of them")


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST_COUNTED:
        raise ValueError
    return value


def _count(value: Any) -> int:
    if _whole(value) < 1:
        raise ValueError
    return int(value)


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= _MOST:
        raise ValueError
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError
    return value


def _wholes(value: Any) -> tuple[int, ...]:
    return tuple(_whole(item) for item in value)


def _triples(value: Any) -> tuple[tuple[int, int, float], ...]:
    return tuple((_whole(a), _whole(b), _positive(w)) for a, b, w in value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST:
        raise ValueError
    return float(value)


def _basis(value: Any) -> str:
    if value not in BASES:
        raise ValueError
    return str(value)


def _device_type(value: Any) -> str:
    if value not in ("cuda", "cpu"):
        raise ValueError
    return str(value)


def _range(value: Any) -> tuple[float, float]:
    low, high = (_positive(side) for side in value)
    if not low <= 1.0 <= high:
        raise ValueError
    return low, high


def _queues(value: Any) -> tuple[Queue, ...]:
    kinds: dict[str, Callable[[Any], Any]] = {
        "name": _text, "max_nodes": _count, "max_hours": _positive, "max_jobs": _count
    }
    found = tuple(Queue(**{key: kinds[key](item) for key, item in entry.items()}) for entry in value)
    if not found:
        raise ValueError
    return found


def _band(value: Any) -> Band:
    low, high = (None if side == "-" else _positive(side) for side in value)
    if low is not None and high is not None and low > high:
        raise ValueError
    return Band(low, high)


def read_cluster(path: Path) -> Cluster:
    """The machine that a file describes. Raises ConfigError with the file and the fact that is wrong."""
    tables = read_toml(path, _MOST_BYTES, error=ConfigError)
    facts = _Facts(path, tables)
    take = facts.take
    devices = take("device.per_node", _count, "the number of devices of a node")
    text, numbers = "a text", f"{devices} whole numbers"
    rows = "rows of [device, device, GB/s]"
    local_order = take("cores.local_order", _wholes, numbers, list(range(devices)))
    sources = {name: str(value) for name, value in facts.rest("sources").items()}
    cluster = Cluster(
        name=take("name", _text, text),
        title=take("title", _text, text, ""),
        nodes=take("nodes", _count, "the number of nodes"),
        group_nodes=take("group_nodes", _count, "nodes of a group of the network", 1),
        device=take("device.name", _text, text),
        devices_per_node=devices,
        memory_gib=take("device.memory_gib", _positive, "GiB of a device"),
        peak_tflops={
            dtype: take(f"device.peak_tflops.{dtype}", _positive, "TFLOP/s")
            for dtype in DTYPES
            if _has(tables, "device", "peak_tflops", dtype)
        },
        links={(min(a, b), max(a, b)): w for a, b, w in take("links.gb_per_s", _triples, rows)},
        nics=take("nics.names", lambda v: tuple(_text(name) for name in v), "names of network cards"),
        nic_gb_per_s=take("nics.gb_per_s", _positive, "GB/s of a network card"),
        nic_on_device=take("nics.on_device", _wholes, "a device for each network card"),
        nic_of_device=take("nics.of_device", _wholes, numbers),
        cores_of_device=take(
            "cores.of_device", lambda v: tuple((_whole(a), _whole(b)) for a, b in v),
            f"{devices} pairs of first and last core",
        ),
        numa_of_device=take("cores.numa_of_device", _wholes, numbers),
        reserved_cores=take("cores.reserved", _wholes, "numbers of cores", []),
        cpus_per_task=take("cores.per_task", _count, "cores of a task"),
        local_order=local_order,
        device_orders=take(
            "placement.device_orders", lambda v: tuple(_wholes(order) for order in v), "rows of devices",
            [list(range(devices)), list(local_order)],
        ),
        collective_gb_per_s={
            (inner, size): w
            for inner, size, w in take("collectives.gb_per_s", _triples, "rows of [inner, size, GB/s]", [])
        },
        bands={
            name: take(f"bands.{name}", _band, 'a low and a high value, "-" for none')
            for name in _BANDS
            if _has(tables, "bands", name)
        },
        wall_limits=take(
            "slurm.wall_limits", lambda v: tuple(WallLimit(_count(a), _count(b), _positive(h)) for a, b, h in v),
            "rows of [from nodes, to nodes, hours]", [],
        ),
        partitions=take("slurm.partitions", _queues, "tables with name, max_nodes, max_hours, max_jobs"),
        qos=take("slurm.qos", _queues, "tables with name, max_nodes, max_hours, max_jobs", [{"name": "normal"}]),
        nvme_path=take("nvme.path", _text, text, ""),
        nvme_constraint=take("nvme.constraint", _text, text, ""),
        startup_s=take("startup_s", lambda v: {name: _number(s) for name, s in v.items()}, "a table of seconds", {}),
        sources=sources,
        device_type=take("device.type", _device_type, "cuda or cpu", "cuda"),
        compute=_compute(facts, tables.get("compute", {}), sources),
        shared_cores=take("shared_cores", lambda v: None if v is None else _count(v), "a number of cores", None),
        path=str(path),
    )
    facts.check_empty()
    for key, problem in _contradictions(cluster):
        raise facts.error(key, problem)
    return cluster


def _compute(facts: _Facts, tables: Any, sources: Mapping[str, str]) -> Compute:
    """The figures of [compute], each with its source from [sources]."""
    return Compute({
        name: _figure(facts, name, columns, name in SCALARS or _has(tables, *name.split("."), "value"), sources)
        for name, columns in COLUMNS.items()
        if _has(tables, *name.split("."))
    })  # fmt: skip


def _has(tables: Any, *parts: str) -> bool:
    for part in parts:
        if not isinstance(tables, dict) or part not in tables:
            return False
        tables = tables[part]
    return True


def _figure(facts: _Facts, name: str, columns: int, scalar: bool, sources: Mapping[str, str]) -> Figure:
    """One figure: a number where `scalar`, else rows of so many columns."""

    def rows(value: Any) -> Points:
        found = tuple(tuple(_positive(item) for item in row) for row in value)
        if not found or any(len(row) != columns for row in found):
            raise ValueError
        return found

    key, take = f"compute.{name}", facts.take
    if scalar:
        make, wanted = (_positive, "a number above 0") if "gb_per_s" in name or columns > 1 else (_number, "seconds")
        points: Points = ((*(1.0,) * (columns - 1), take(f"{key}.value", make, wanted)),)
    else:
        points = take(f"{key}.points", rows, f"rows of {columns} positive numbers")
    basis = take(f"{key}.basis", _basis, f"one of {', '.join(BASES)}")
    low, high = take(f"{key}.range", _range, "a factor of at most 1 and one of at least 1", [1.0, 1.0])
    source = source_of(sources, name)
    if not source:
        missing = f"sources.{key.replace('.', '_')}"
        raise facts.error(missing, f"missing: expected a text that says where {key} is from")
    return Figure(name, points, basis, source, low, high)


def source_of(sources: Mapping[str, str], figure: str) -> str:
    """The text of [sources] for a figure of [compute]: under its name or the longest beginning of it; "" for none."""
    parts = f"compute.{figure}".replace(".", "_").split("_")
    names = ["_".join(parts[:count]) for count in range(len(parts), 0, -1)]
    return next((sources[known] for known in names if known in sources), "")


def _contradictions(c: Cluster) -> Iterator[tuple[str, str]]:
    """(fact, what is wrong with it)."""
    devices = range(c.devices_per_node)
    for a, b in c.links:
        if a == b or b not in devices:
            yield "links.gb_per_s", f"[{a}, {b}] is no pair of the devices 0 to {c.devices_per_node - 1}"
    if not _connected(c):
        yield "links.gb_per_s", "some devices of a node cannot reach each other"
    for key, values, count in (
        ("nics.of_device", c.nic_of_device, len(devices)), ("cores.of_device", c.cores_of_device, len(devices)),
        ("cores.numa_of_device", c.numa_of_device, len(devices)), ("nics.on_device", c.nic_on_device, len(c.nics)),
    ):  # fmt: skip
        if len(values) != count:
            yield key, f"has {len(values)} entries, expected {count}"
    if not c.nics or any(nic not in range(len(c.nics)) for nic in c.nic_of_device):
        yield "nics.of_device", f"names a network card that is none of the {len(c.nics)} of nics.names"
    if any(device not in devices for device in c.nic_on_device):
        yield "nics.on_device", f"names a device that is none of 0 to {c.devices_per_node - 1}"
    orders: Sequence[tuple[str, tuple[int, ...]]] = [
        ("cores.local_order", c.local_order), *(("placement.device_orders", order) for order in c.device_orders)
    ]
    for key, order in orders:
        if sorted(order) != list(devices):
            yield key, f"{list(order)} does not name each of the devices 0 to {c.devices_per_node - 1} once"


def _connected(c: Cluster) -> bool:
    reached, waiting = {0}, [0]
    while waiting:
        device = waiting.pop()
        found = {b if a == device else a for a, b in c.links if device in (a, b)} - reached
        reached |= found
        waiting += found
    return reached >= set(range(c.devices_per_node))
