"""Description of a machine: devices and links of a node, network, queues and figures.

Each known machine has a TOML file in `clusters/`; a file of the same form describes any other.
This module does not need torch, so it works on a login node.

>>> load_cluster("frontier").link_gb_per_s(0, 1)
200.0
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_type_hints

from pydantic import Field, Strict

from megatron.config.settings import did_you_mean
from megatron.config.settings_file import written
from megatron.errors import ConfigError
from megatron.planner.compute import BASES, COLUMNS, Figure, columns_of, is_cost, is_rate
from megatron.planner.facts import Facts, quoted, source_key, source_of
from megatron.untrusted import write_text

CLUSTERS = Path(__file__).with_name("clusters")

# -- dataclasses as TOML files ---------------------------------------------------------------------
#
# `at` gives each field its key; pydantic reads and checks the value against the annotation. A
# NamedTuple with defaults is a table in the file. Any other NamedTuple is a row, and so is each
# entry of a mapping whose keys are tuples.

GIB = 2**30
_ROUNDED = 1.02  # bandwidths in a file are rounded
_MOST_COUNT = 10**7  # nodes, devices, cores
_MOST = 1e30  # seconds, TFLOP/s, GB/s

NonNegative = Annotated[int, Strict(), Field(ge=0, le=_MOST_COUNT)]
Count = Annotated[int, Strict(), Field(gt=0, le=_MOST_COUNT)]
Number = Annotated[float, Strict(), Field(ge=0, le=_MOST)]
Positive = Annotated[float, Strict(), Field(gt=0, le=_MOST)]


def at(key: str, default: Any = MISSING) -> Any:
    """Declare a field stored in the file under `key` ("name" or "table.name").

    A field without a default is required.
    """
    metadata = {"key": key, "default": default}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


# -- machines --------------------------------------------------------------------------------------


class WallLimit(NamedTuple):
    """Limit on wall time: jobs on `nodes_from` to `nodes_to` nodes may run for up to `hours`."""

    nodes_from: Count
    nodes_to: Count
    hours: Positive


class Queue(NamedTuple):
    """Slurm partition; None: it has no limit of its own."""

    name: str
    max_nodes: Count | None = None
    max_hours: Positive | None = None


class QualityOfService(NamedTuple):
    """Slurm quality of service; None: it has no limit of its own.

    over_partition  whether its limits replace those of the partition, as with Slurm's flags
                    PartitionMaxNodes and PartitionTimeLimit; otherwise both apply
    """

    name: str
    max_nodes: Count | None = None
    max_hours: Positive | None = None
    over_partition: Annotated[bool, Strict()] = False


Q = TypeVar("Q", Queue, QualityOfService)


class Host(NamedTuple):
    """Host memory of a node and its bandwidths, as in Cluster."""

    memory_gib: float
    memory_gb_per_s: float
    link_gb_per_s: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Cluster:
    """Description of one machine. Bandwidths are in GB/s (1e9 bytes/s) in each direction.

    memory_gib           memory of each device; peak_tflops: peak TFLOP/s by dtype
    links                (a, b) with a < b -> GB/s, for devices of a node with a direct link
    nics, nic_gb_per_s   names of a node's network cards, and the bandwidth of each
    nic_of_device        index in `nics` of the card that each device uses; nic_on_device: the
                         device to which each card is attached
    cores_of_device      first and last core next to each device; cpus_per_task: cores per process
    local_order          device closest to the cores of each local rank of a full node
    device_orders        orders of a node's devices that are worth trying
    collective_gb_per_s  (stride of the group in devices, size of the group) -> published GB/s of
                         one group's collectives while all groups of a node run them, with devices
                         in order; size 0: groups over several nodes
    bands                lower bounds for the figures measured on a healthy node
    wall_limits          longest jobs by number of nodes; partitions[0] and qos[0] are the defaults
    host_memory_gib      host memory of a node; host_memory_gb_per_s: its bandwidth, reads and
                         writes together; host_link_gb_per_s: bandwidth between it and each device.
                         None: unknown
    nvme_path            path of the node-local disk; "" for none
    sources              text on the source of each table and figure, by key
    device_type          "cuda" for a GPU of any make, as in torch, or "cpu"
    compute              figures for the speed of devices and links, by name (compute.py)
    shared_cores         number of cores that all processes of a node share, on a CPU machine; None
                         if each device computes by itself
    path                 file that describes the machine; "" for none
    """

    name: str = at("name")
    title: str = at("title", "")
    nodes: Count = at("nodes")
    shared_cores: Count | None = at("shared_cores", None)
    device: str = at("device.name")
    device_type: Literal["cuda", "cpu"] = at("device.type", "cuda")
    devices_per_node: Count = at("device.per_node")
    memory_gib: Positive = at("device.memory_gib")
    peak_tflops: Mapping[str, Positive] = at("device.peak_tflops", {})
    links: Mapping[tuple[NonNegative, NonNegative], Positive] = at("links.gb_per_s", {})
    nics: tuple[str, ...] = at("nics.names")
    nic_gb_per_s: Positive = at("nics.gb_per_s")
    nic_on_device: tuple[NonNegative, ...] = at("nics.on_device")
    nic_of_device: tuple[NonNegative, ...] = at("nics.of_device")
    cores_of_device: tuple[tuple[NonNegative, NonNegative], ...] = at("cores.of_device")
    cpus_per_task: Count = at("cores.per_task")
    local_order: tuple[NonNegative, ...] = at("cores.local_order", ())
    device_orders: tuple[tuple[NonNegative, ...], ...] = at("placement.device_orders", ())
    collective_gb_per_s: Mapping[tuple[Count, NonNegative], Positive] = at(
        "collectives.gb_per_s", {}
    )
    bands: Mapping[str, Positive] = at("bands", {})
    host_memory_gib: Positive | None = at("host.memory_gib", None)
    host_memory_gb_per_s: Positive | None = at("host.memory_gb_per_s", None)
    host_link_gb_per_s: Positive | None = at("host.link_gb_per_s", None)
    wall_limits: tuple[WallLimit, ...] = at("slurm.wall_limits", ())
    partitions: tuple[Queue, ...] = at("slurm.partitions")
    qos: tuple[QualityOfService, ...] = at("slurm.qos", (QualityOfService("normal"),))
    nvme_path: str = at("nvme.path", "")
    sources: Mapping[str, str] = at("sources", {})
    compute: Mapping[str, Figure] = field(default_factory=dict)
    path: str = field(default="", repr=False)

    @functools.cached_property
    def figures(self) -> Mapping[str, Figure]:
        """Figures in `compute`, and assumed figures under other names (assumed_figures)."""
        return {**assumed_figures(self.peak_tflops), **self.compute}

    def with_figures(self, figures: Iterable[Figure]) -> Cluster:
        """Return a copy of the machine with these figures in place of any with the same names."""
        compute = {**self.compute, **{figure.name: figure for figure in figures}}
        return replace(self, compute=compute)

    def with_bandwidths(self, factor: float) -> Cluster:
        """Return a copy of the machine with all bandwidths times `factor`.

        These are the bandwidths of links, network cards, collectives and the host, not the figures.
        """
        names = "host_memory_gb_per_s", "host_link_gb_per_s", "nic_gb_per_s"
        known = {name: getattr(self, name) for name in names}
        return replace(
            self,
            links={pair: factor * width for pair, width in self.links.items()},
            collective_gb_per_s={
                groups: factor * rate for groups, rate in self.collective_gb_per_s.items()
            },
            **{name: factor * value for name, value in known.items() if value},
        )

    @property
    def host(self) -> Host:
        """Memory and bandwidths of a node's host. Raises ConfigError if any of them is unknown."""
        facts = {name: getattr(self, f"host_{name}") for name in Host._fields}
        missing = [name for name, value in facts.items() if value is None]
        if missing:
            raise ConfigError(
                f"--cpu-offload: the file of cluster {self.name} lacks {', '.join(missing)} in "
                "[host]: see the files of known machines for their meaning"
            )
        return Host(**facts)

    def link_gb_per_s(self, a: int, b: int) -> float:
        """Return the bandwidth of the direct link between two devices of a node; 0 for none."""
        return self.links.get((min(a, b), max(a, b)), 0.0)

    def reached(
        self, group: Collection[int], least: float = 0.0, through: Collection[int] = ()
    ) -> bool:
        """Return whether links of `least` GB/s or more connect a group of devices.

        Paths may pass through its members and through the devices in `through`.
        """
        reached = {min(group)}
        before = 0
        while len(reached) > before:
            before = len(reached)
            for (a, b), width in self.links.items():
                if width >= least and (a in reached or b in reached):
                    reached |= {a, b} & {*group, *through}
        return reached >= set(group)

    def wall_limit_hours(
        self, nodes: int, partition: str | None = None, qos: str | None = None
    ) -> float:
        """Return the longest wall time of a job of this many nodes, in hours.

        The partition's limit replaces the machine's. That of the qos can only lower it, unless the
        qos is `over_partition`: then it holds. Raises ConfigError for an unknown partition or qos,
        and for more nodes than these or the machine allow.
        """
        where = self._queue("partition", self.partitions, partition)
        how = self._queue("qos", self.qos, qos)
        for text, allowed in self._most_nodes(where, how):
            if nodes > allowed:
                choices = ["use fewer", *self._queues_for(nodes)]
                raise ConfigError(
                    f"{nodes} nodes are more than the {allowed} that {text} allows: "
                    f"{', or '.join(choices)}"
                )
        by_size = [
            limit.hours for limit in self.wall_limits if limit.nodes_from <= nodes <= limit.nodes_to
        ]
        hours = where.max_hours or min(by_size, default=float("inf"))
        if how.over_partition and how.max_hours is not None:
            return how.max_hours
        return min(hours, how.max_hours or hours)

    def _most_nodes(self, partition: Queue, qos: QualityOfService) -> list[tuple[str, int]]:
        """List what limits the nodes of a job in a queue, each with the most nodes."""
        most = max((limit.nodes_to for limit in self.wall_limits), default=self.nodes)
        replaced = qos.over_partition and qos.max_nodes is not None
        limits = (
            (f"cluster {self.name}", min(most, self.nodes)),
            (f"partition {partition.name}", None if replaced else partition.max_nodes),
            (f"qos {qos.name}", qos.max_nodes),
        )
        return [(text, allowed) for text, allowed in limits if allowed is not None]

    def _queues_for(self, nodes: int) -> list[str]:
        """List the partitions, each with a qos, that allow a job of this many nodes."""
        return [
            f"partition {partition.name} with qos {qos.name}"
            for partition, qos in itertools.product(self.partitions, self.qos)
            if all(nodes <= most for _, most in self._most_nodes(partition, qos))
        ]

    def check_nodes(self, nodes: int) -> None:
        """Raise ConfigError if no partition with any qos allows a job of this many nodes."""
        if not self._queues_for(nodes):
            self.wall_limit_hours(nodes)  # whose error names the limit of the defaults

    def _queue(self, kind: str, known: tuple[Q, ...], name: str | None) -> Q:
        for queue in known:
            if name in (None, queue.name):
                return queue
        raise ConfigError(
            f"cluster {self.name} has no {kind} '{name}': choose one of "
            f"{', '.join(q.name for q in known)}"
        )

    def contradictions(self) -> Iterator[tuple[str, str]]:
        """Yield the key and the problem of each list that is empty or contradicts another fact."""
        n = self.devices_per_node
        devices = set(range(n))
        if any(a == b or not {a, b} <= devices for a, b in self.links):
            yield "links.gb_per_s", f"has a row without two different devices from 0 to {n - 1}"
        elif not self.reached(devices):
            yield "links.gb_per_s", "some devices of a node cannot reach each other"
        cards = len(self.nics) * self.nic_gb_per_s
        for (stride, size), rate in self.collective_gb_per_s.items():
            if not size and stride * rate > _ROUNDED * cards:
                yield (
                    "collectives.gb_per_s",
                    f"[{stride}, 0, {rate:g}]: {stride} groups at {rate:g} GB/s exceed the {cards:g} "
                    "GB/s of a node's network cards: correct the row, or [nics] if gigabits are meant; "
                    "a file that includes another one's cards or rates has to replace both",
                )
        if len(self.cores_of_device) != n:
            yield "cores.of_device", f"has {len(self.cores_of_device)} entries, expected {n}"
        for key, values, count, known in (
            ("nics.of_device", self.nic_of_device, n, len(self.nics)),
            ("nics.on_device", self.nic_on_device, len(self.nics), n),
        ):
            if len(values) != count or not set(values) <= set(range(known)):
                yield key, f"{list(values)} are not {count} numbers from 0 to {known - 1}"
        for key, orders in (
            ("cores.local_order", [self.local_order]),
            ("placement.device_orders", self.device_orders),
        ):
            for order in orders:
                if sorted(order) != sorted(devices):
                    yield key, f"{list(order)} does not name each of the devices 0 to {n - 1} once"
        for key, queues in (("slurm.partitions", self.partitions), ("slurm.qos", self.qos)):
            if not queues:
                yield key, 'is empty: name at least one, such as { name = "batch" }'


def known_clusters() -> tuple[str, ...]:
    """List the machines that this package describes."""
    return tuple(sorted(path.stem for path in CLUSTERS.glob("*.toml")))


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Load the known machine of this name, or the machine that this TOML file describes.

    Raises ConfigError for an unknown name, a file that cannot be read, and facts that are missing,
    invalid or contradict each other.
    """
    text = str(name_or_path)
    if text.lower() in known_clusters():
        return read_cluster(CLUSTERS / f"{text.lower()}.toml")
    if Path(text).is_file():
        return read_cluster(Path(text).resolve())
    raise ConfigError(
        f"cluster '{text}' is neither a known machine ({', '.join(known_clusters())}) nor a file"
        f"{did_you_mean(text.lower(), known_clusters()) or '.'} "
        f"To describe another one, copy {CLUSTERS / 'frontier.toml'}"
    )


@functools.cache
def read_cluster(path: Path) -> Cluster:
    """Load the machine that a file describes; each path is read only once.

    Raises ConfigError that names the file and, if it can be read, the key that is wrong.
    """
    facts = Facts(path)
    hints = get_type_hints(Cluster, include_extras=True)
    values = {
        each.name: facts.take(each.metadata["key"], hints[each.name], each.metadata["default"])
        for each in fields(Cluster)
        if each.metadata
    }
    plain = tuple(range(values["devices_per_node"]))
    values["links"] = {(min(pair), max(pair)): width for pair, width in values["links"].items()}
    values["local_order"] = values["local_order"] or plain
    values["device_orders"] = values["device_orders"] or (plain, values["local_order"])
    facts.know(f"compute.{name}.{entry}" for name in COLUMNS for entry in _FIGURE_KEYS)
    facts.check_known()
    figures = _figures(facts, values["sources"])
    cluster = Cluster(**values, compute=figures, path=str(path))
    for key, problem in cluster.contradictions():
        raise facts.error(key, problem)
    return cluster


@functools.cache
def _for_a_peak_of_one() -> dict[str, Figure]:
    facts = Facts(CLUSTERS.with_name("assumed.toml"))
    return _figures(facts, facts.take("sources", Mapping[str, str]))


def assumed_figures(peak_tflops: Mapping[str, float]) -> dict[str, Figure]:
    """Return assumed figures for a machine of which only the peak TFLOP/s by dtype is known.

    Rates of matrix products and attention are left out for a dtype without a peak.
    """
    largest = max(peak_tflops.values(), default=100.0)
    figures = {}
    for name, figure in _for_a_peak_of_one().items():
        peak = largest if is_rate(name) else 1.0
        if name.startswith(("products", "attention")):
            peak = peak_tflops.get(name.split(".")[1], 0.0)
        if peak:
            figures[name] = figure.scaled(peak)
    return figures


_FIGURE_KEYS = ("value", "points", "basis", "range")
"""Keys of a figure's table."""
_BASIS = " or ".join(f'"{basis}"' for basis in BASES)


def _figures(facts: Facts, sources: Mapping[str, str]) -> dict[str, Figure]:
    """Read the figures of [compute], with their sources from [sources]."""
    figures = {}
    for name, columns in COLUMNS.items():
        key = f"compute.{name}"
        table = facts.find(key)
        if table is None:
            continue
        least = columns == 1 and is_cost(name)
        unit = columns_of(name)
        number = f"a number {'of at least' if least else 'greater than'} 0 ({unit.split(', ')[-1]})"
        rows = f"rows of {columns} numbers ({unit})"
        form = f"value = {number}" if columns == 1 else f"points = {rows}"
        if not isinstance(table, dict):
            text = (
                f"is not a table, but {quoted(table)}: write a table with {form}, basis = {_BASIS}"
            )
            raise facts.error(key, text)
        if "value" in table and "points" in table:
            raise facts.error(key, "has both value and points: leave out one of them")
        if not {"value", "points"} & {*table}:
            raise facts.error(key, f"has neither value nor points: write {form}")
        if "value" in table:
            value = facts.take(f"{key}.value", Number if least else Positive, write=number)
            points = ((*(1.0,) * (columns - 1), value),)
        else:
            points = facts.take(f"{key}.points", tuple[tuple[Positive, ...], ...], write=rows)
        for row in points or ((),):
            if len(row) != columns:
                raise facts.error(f"{key}.points", f"has the row {quoted([*row])}: write {rows}")
        basis = facts.take(
            f"{key}.basis", Literal["measured", "published", "assumed"], write=_BASIS
        )
        factors = "a factor of at most 1 and one of at least 1, such as [0.9, 1.2]"
        low, high = facts.take(f"{key}.range", tuple[Positive, Positive], (1.0, 1.0), write=factors)
        if not low <= 1.0 <= high:
            raise facts.error(f"{key}.range", f"is {[low, high]}: write {factors}")
        source = source_of(sources, name)
        if not source:
            raise facts.error(
                f"sources.{source_key(name)}",
                f"is missing: write a text that names the source of {key}",
                of=key,
            )
        figures[name] = Figure(name, points, basis, source, low, high)
    return figures


def write_cluster(cluster: Cluster, path: Path, heading: str = "") -> None:
    """Write a file that `read_cluster` reads back as the same machine.

    `heading` becomes comments at its top. Raises ConfigError if the file cannot be written.
    """
    lines = [f"# {line}".rstrip() for line in heading.splitlines()]
    tables: dict[str, dict[str, object]] = {"": {}}
    for each in fields(cluster):
        table, _, name = each.metadata.get("key", "").rpartition(".")
        value = getattr(cluster, each.name)
        if not name or value in (None, {}):
            continue
        if not table and isinstance(value, Mapping):
            tables[name] = dict(value)
        else:
            tables.setdefault(table, {})[name] = value
    sources = dict(cluster.sources)
    for name, figure in cluster.compute.items():
        of_all = len(figure.points) == 1 and set(figure.points[0][:-1]) <= {1.0}
        facts: dict[str, object] = {"value": figure.value} if of_all else {"points": figure.points}
        facts["basis"] = figure.basis
        if (figure.low, figure.high) != (1.0, 1.0):
            facts["range"] = figure.low, figure.high
        tables[f"compute.{name}"] = facts
        if source_of(sources, name) != figure.source:
            sources[source_key(name)] = figure.source
    tables["sources"] = {**sources}
    for name, values in tables.items():
        lines += ["", f"[{name}]"] if name else []
        lines += [f"{_key(key)} = {_value(value)}" for key, value in values.items()]
    write_text(path, "\n".join([*lines, ""]), choose="a writable path")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else written(name)


def _value(value: Any) -> str:
    """Return a value as TOML.

    A mapping with tuples as keys becomes a list of rows. Any other mapping and a NamedTuple with
    defaults become inline tables.
    """
    if getattr(value, "_field_defaults", None):
        value = {name: item for name, item in value._asdict().items() if item is not None}
    if isinstance(value, Mapping):
        if any(isinstance(key, tuple) for key in value):
            return _value([(*key, item) for key, item in value.items()])
        return f"{{ {', '.join(f'{_key(key)} = {_value(item)}' for key, item in value.items())} }}"
    if not isinstance(value, (list, tuple)):
        return written(value)
    items = [_value(item) for item in value]
    text = f"[{', '.join(items)}]"
    return text if len(text) < 100 else "[\n" + "".join(f"    {item},\n" for item in items) + "]"
