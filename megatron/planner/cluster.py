"""A machine: devices and links of a node, its network, the limits of its queue, and what was published about it.

The facts are in TOML files beside this module (`clusters/`), one for each known machine; a file of the same form
describes another one. Needs no torch, so that a login node can read it.

>>> load_cluster("frontier").path_gb_per_s(0, 1)
200.0
"""
from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from megatron.errors import ConfigError
from megatron.planner.compute import Compute

CLUSTERS = Path(__file__).with_name("clusters")


class WallLimit(NamedTuple):
    """Jobs of `nodes_from` to `nodes_to` nodes may run for `hours`."""

    nodes_from: int
    nodes_to: int
    hours: float


class Queue(NamedTuple):
    """A partition or a quality of service; None where the machine's own limit holds."""

    name: str
    max_nodes: int | None = None
    max_hours: float | None = None
    max_jobs: int | None = None


class Band(NamedTuple):
    """What a healthy node measures; None: no limit on that side."""

    low: float | None
    high: float | None


@dataclass(frozen=True, eq=False)
class Cluster:
    """One machine. Bandwidths are GB/s (1e9 bytes) in each direction.

    links                (a, b) with a < b -> GB/s, for devices of a node with a direct link
    nics, nic_gb_per_s   names of a node's network cards, and the bandwidth of each
    nic_of_device        the card, by its place in `nics`, that each device uses; nic_on_device: the devices with a card
    cores_of_device      first and last core next to each device
    reserved_cores       cores that no task gets
    local_order          local rank i of a full node runs next to device local_order[i]
    device_orders        orders of a node's devices worth a try
    collective_gb_per_s  (devices of faster directions inside, size of the group) -> published GB/s of one group's
                         collectives while all groups of a node run them, devices in order; size 0: on several nodes
    bands                what a healthy node measures
    wall_limits          longest jobs by number of nodes; partitions[0] and qos[0] are the default ones
    nvme_path            node-local disk ("" where there is none), and nvme_constraint what to ask Slurm for
    startup_s            published seconds to start a Python environment
    sources              where each figure is from: published, computed or assumed
    device_type          "cuda" for a GPU of any make, as torch calls it, or "cpu"
    compute              what its devices and links do in how much time (compute.py)
    shared_cores         cores that all processes of a node compute on together, where devices are no more than that
                         (a CPU machine); None: every device computes by itself
    """

    name: str
    title: str
    nodes: int
    group_nodes: int
    device: str
    devices_per_node: int
    memory_gib: float
    peak_tflops: Mapping[str, float]
    links: Mapping[tuple[int, int], float]
    nics: tuple[str, ...]
    nic_gb_per_s: float
    nic_on_device: tuple[int, ...]
    nic_of_device: tuple[int, ...]
    cores_of_device: tuple[tuple[int, int], ...]
    numa_of_device: tuple[int, ...]
    reserved_cores: tuple[int, ...]
    cpus_per_task: int
    local_order: tuple[int, ...]
    device_orders: tuple[tuple[int, ...], ...]
    collective_gb_per_s: Mapping[tuple[int, int], float]
    bands: Mapping[str, Band]
    wall_limits: tuple[WallLimit, ...]
    partitions: tuple[Queue, ...]
    qos: tuple[Queue, ...]
    nvme_path: str
    nvme_constraint: str
    startup_s: Mapping[str, float]
    sources: Mapping[str, str]
    device_type: str = "cuda"
    compute: Compute = field(default_factory=Compute)
    shared_cores: int | None = None
    path: str = field(default="", repr=False)

    def link_gb_per_s(self, a: int, b: int) -> float:
        """Of the direct link between two devices of a node; 0 where there is none."""
        return self.links.get((min(a, b), max(a, b)), 0.0)

    def path_gb_per_s(self, a: int, b: int) -> float:
        """Of the way between two devices of a node: its direct link, or the widest of the ways with the fewest links.

        Raises ConfigError for a device that a node does not have.
        """
        from megatron.planner.links import node_links

        for device in (a, b):
            if not 0 <= device < self.devices_per_node:
                raise ConfigError(
                    f"cluster {self.name} has no device {device}: a node's are 0 to {self.devices_per_node - 1}"
                )
        way = node_links(self).ways(a, b)[0]
        return min((self.link_gb_per_s(*step) for step in way), default=float("inf"))

    def wall_limit_hours(self, nodes: int, partition: str | None = None, qos: str | None = None) -> float:
        """The longest job of so many nodes, in hours.

        Raises ConfigError for a partition or qos that is not known, and for more nodes than it or the machine gives.
        """
        where = self._queue("partition", self.partitions, partition)
        how = self._queue("qos", self.qos, qos)
        most = max((limit.nodes_to for limit in self.wall_limits), default=self.nodes)
        for text, allowed in (
            (f"cluster {self.name}", min(most, self.nodes)),
            (f"partition {where.name}", where.max_nodes),
            (f"qos {how.name}", how.max_nodes),
        ):
            if allowed is not None and nodes > allowed:
                raise ConfigError(f"{nodes} nodes are more than the {allowed} that {text} gives a job: use fewer")
        if nodes < 1:
            raise ConfigError(f"a job has at least one node, got {nodes}")
        by_size = [limit.hours for limit in self.wall_limits if limit.nodes_from <= nodes <= limit.nodes_to]
        hours = where.max_hours if where.max_hours is not None else min(by_size, default=float("inf"))
        return hours if how.max_hours is None else min(hours, how.max_hours)

    def _queue(self, kind: str, known: tuple[Queue, ...], name: str | None) -> Queue:
        if name is None:
            return known[0]
        for queue in known:
            if queue.name == name:
                return queue
        raise ConfigError(f"cluster {self.name} has no {kind} '{name}': known are {', '.join(q.name for q in known)}")


def known_clusters() -> tuple[str, ...]:
    """Names of the machines whose description comes with this package."""
    return tuple(sorted(path.stem for path in CLUSTERS.glob("*.toml")))


def load_cluster(name_or_path: str | Path) -> Cluster:
    """The machine of this name, or described by this TOML file.

    Raises ConfigError for an unknown name, a file that cannot be read, and facts that are missing or contradict each
    other.
    """
    text = str(name_or_path)
    if text.lower() in known_clusters():
        return _load(str(CLUSTERS / f"{text.lower()}.toml"))
    if Path(text).is_file():
        return _load(str(Path(text).resolve()))
    raise ConfigError(
        f"--cluster {text} is neither a known machine ({', '.join(known_clusters())}) nor a file: "
        f"copy {CLUSTERS / 'frontier.toml'} to describe another one"
    )


@functools.cache
def _load(path: str) -> Cluster:
    from megatron.planner.cluster_file import read_cluster

    return read_cluster(Path(path))
