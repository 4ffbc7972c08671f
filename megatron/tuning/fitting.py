"""What the planner says of a configuration before a trial is paid for: its memory, its best placement, its time."""
from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from megatron.config import Config
from megatron.errors import ConfigError
from megatron.planning.cluster import CLUSTERS, Cluster
from megatron.planning.placement import Placement
from megatron.planning.search.judging import GIB, Models
from megatron.tuning.combination import Rejected
from megatron.tuning.space import Machine

_MODELS = Models()


@dataclass(frozen=True)
class Fit:
    """memory_bytes   on a device of the fullest pipeline rank; None: not asked
    step_s         of a step on the best placement; None: not asked
    flags          that place the ranks
    """

    memory_bytes: float | None = None
    step_s: float | None = None
    flags: tuple[str, ...] = ()


def fit(config: Config, machine: Machine, key: str, *, predict: bool) -> Fit:
    """Raises Rejected for a configuration that does not fit, or that the planner refuses; the example names
    `key`."""
    cluster = machine.cluster
    if cluster is None:
        return Fit()
    try:
        memory = _memory(config, cluster, machine.capacity_bytes, key)
        placement, seconds = _fastest(config, cluster) if predict else (None, None)
    except ConfigError as error:
        raise Rejected("the planner refuses it", f"{key}: {' '.join(str(error).split())}") from None
    return Fit(memory, seconds, _flags(config, cluster, placement))


def _memory(config: Config, cluster: Cluster, capacity: float | None, key: str) -> float:
    most = _MODELS.fullest(config, cluster, math.inf if capacity is None else capacity).total
    if capacity is not None and most > capacity:
        raise Rejected("more memory than a device has, by the planner",
                       f"{key}: {most / GIB:.1f} GiB, {capacity / GIB:.1f} may be used", most - capacity)  # fmt: skip
    return most


def _fastest(config: Config, cluster: Cluster) -> tuple[Placement, float]:
    """Of the placements that are worth an estimate, with its seconds; what flags fix is kept."""
    parallel, wanted = config.parallel, dict[str, tuple[object, ...]]()
    if parallel.rank_order is not None:
        wanted["order"] = (parallel.rank_order,)
    if parallel.device_order is not None and len(parallel.device_order) == cluster.devices_per_node:
        wanted["devices"] = (parallel.device_order,)
    best = _MODELS.fastest(config, cluster, wanted)
    assert best is not None, "there is at least one placement"
    placement, found = best
    return placement, found.seconds


def _flags(config: Config, cluster: Cluster, placement: Placement | None) -> tuple[str, ...]:
    """What a run needs to be told of a placement, beside its own flags; without one it finds it by --cluster."""
    parallel, words = config.parallel, list[str]()
    # Where a node's devices are not all alike, and all of them are used.
    ordered = len(cluster.device_orders) > 1 and parallel.world_size % cluster.devices_per_node == 0
    if placement is not None and parallel.rank_order is None and parallel.world_size > 1:
        words += ["--rank-order", placement.layout.order]
    if placement is not None and parallel.device_order is None and ordered:
        words += ["--device-order", ",".join(map(str, placement.device_order))]
    return (*words, "--cluster", cluster_name(cluster)) if ordered else tuple(words)


def cluster_name(cluster: Cluster) -> str:
    """What --cluster calls it: its name where it comes with the package, else its file, from whatever folder."""
    path = Path(cluster.path)
    return path.stem if path.parent == CLUSTERS else str(path.absolute())
