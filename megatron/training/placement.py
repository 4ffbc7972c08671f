"""Which ranks the processes take, and in which order the layout's directions run over them, on this machine."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron.config import Config
from megatron.parallel.launch import Launch
from megatron.parallel.placing import Placing
from megatron.parallel.topology import DEFAULT_ORDER


@dataclass(frozen=True)
class RankPlan:
    """placing   for connect(); its rank_order is for Topology
    describe  what it costs, in lines for the log; takes a moment
    """

    placing: Placing
    describe: Callable[[], list[str]]


def plan_ranks(config: Config, launch: Launch) -> RankPlan:
    """What --cluster, --rank-order and --device-order mean for this job; every process finds the same.

    Without a cluster (and for one process) only what is given changes anything. Raises ConfigError for a cluster that
    is not known.
    """
    parallel = config.parallel
    if parallel.cluster is None or launch.world_size == 1:
        order = parallel.rank_order or DEFAULT_ORDER
        return RankPlan(Placing(parallel.device_order or (), rank_order=order), list)
    from megatron.planning.cluster import load_cluster
    from megatron.planning.placement import choose_placement, naive_placement, render_placement

    cluster = load_cluster(parallel.cluster)
    if launch.world_size > cluster.devices_per_node and launch.world_size % cluster.devices_per_node:
        order = parallel.rank_order or DEFAULT_ORDER
        placing = Placing(parallel.device_order or (), cluster.local_order, cluster.cores_of_device, order)
        return RankPlan(placing, lambda: [
            f" placement: rank order {order}; nothing is chosen for {launch.world_size} processes, which fill no whole "
            f"number of nodes of {cluster.devices_per_node} devices ({cluster.name})"
        ])  # fmt: skip
    chosen = choose_placement(config, cluster)
    whole = len(chosen.device_order) == cluster.devices_per_node  # else there are no devices to choose from
    device_order = chosen.device_order if whole else ()
    placing = Placing(device_order, cluster.local_order, cluster.cores_of_device, chosen.layout.order)
    return RankPlan(placing, lambda: render_placement(chosen, naive_placement(config, cluster)).splitlines())
