"""Which device each rank runs on, and what the messages of a step cost there.

A node's ranks are numbered along `device_order`; which direction varies fastest over the ranks is the layout's order.
So both together give every rank its node, device and place in the model. They are chosen by the cost model (cost.py),
whose bandwidths are those of links.py, among the six orders of directions and the device orders that a machine's
description names. For Frontier's those are the best of all 40,320 for the layouts in tests/planner.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron.config import Config
from megatron.config.parallel import RANK_ORDERS
from megatron.errors import ConfigError
from megatron.model.stages import assign_layers
from megatron.parallel.launch import Launch
from megatron.parallel.placing import Placing, RankPlan
from megatron.parallel.topology import DEFAULT_ORDER, Layout
from megatron.planner.cluster import Cluster, load_cluster
from megatron.planner.cost import CostModel, PlacementCost
from megatron.planner.render import render_placement
from megatron.planner.traffic import Traffic, traffic_of


@dataclass(frozen=True)
class Placement:
    """A layout on the nodes of a machine: position i of every node is device device_order[i]."""

    cluster: Cluster
    layout: Layout
    device_order: tuple[int, ...]
    cost: PlacementCost
    notes: tuple[str, ...] = ()

    def place(self, rank: int) -> tuple[int, int]:
        """(node, device) of a rank."""
        node, position = divmod(rank, len(self.device_order))
        return node, self.device_order[position]


class RankRow(NamedTuple):
    """One rank. `chunks` are the layers of each of its chunks, in the order of the model."""

    rank: int
    node: int
    device: int
    nic: str
    tp: int
    dp: int
    pp: int
    chunks: tuple[range, ...]


def plan_ranks(config: Config, launch: Launch) -> RankPlan:
    """Devices and order of the ranks of this job on the machine --cluster; every process finds the same.

    Raises ConfigError for a cluster that is not known, and orders that do not fit it.
    """
    parallel = config.parallel
    assert parallel.cluster is not None
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


def choose_placement(config: Config, cluster: Cluster) -> Placement:
    """The cheapest placement (PlacementCost.cheaper_than); --rank-order and --device-order, where given, are kept.

    Among equals the default order of directions and the plain order of devices win. Takes milliseconds at any size.

    Raises ConfigError for a world size that is neither a part of a node nor whole nodes, for more nodes than the
    machine has, and for a device order that does not name each device of a node once.
    """
    devices = _devices_used(config, cluster)
    orders = [config.parallel.rank_order] if config.parallel.rank_order else list(RANK_ORDERS)
    traffic = traffic_of(config, cluster.device_type)
    best: Placement | None = None
    for order in _different(config, orders):
        least = float("inf") if best is None else best.cost.seconds_of("tp")
        for placement in _on_devices(config, cluster, order, _device_orders(config, cluster, devices), traffic, least):
            if best is None or placement.cost.cheaper_than(best.cost):
                best = placement
    assert best is not None, "there is at least one order"
    return best


def naive_placement(config: Config, cluster: Cluster) -> Placement:
    """Megatron's order of directions, and device i for local rank i."""
    devices = _devices_used(config, cluster)
    return place_with(config, cluster, DEFAULT_ORDER, tuple(range(devices)))


def place_with(config: Config, cluster: Cluster, rank_order: str, device_order: tuple[int, ...]) -> Placement:
    """The placement with these orders. Raises ConfigError as choose_placement does."""
    devices = _devices_used(config, cluster)
    if len(device_order) != devices:
        _check_device_order(device_order, cluster)
    (placement,) = _on_devices(config, cluster, rank_order, [device_order], traffic_of(config, cluster.device_type))
    return placement


def rank_table(config: Config, cluster: Cluster) -> Iterator[RankRow]:
    """Node, device, network card, coordinates and layers of every rank of the chosen placement, one at a time."""
    return rank_rows(config, choose_placement(config, cluster))


def rank_rows(config: Config, placement: Placement) -> Iterator[RankRow]:
    """The rows of a placement, one at a time."""
    parallel, cluster = config.parallel, placement.cluster
    layers = assign_layers(config.model.num_layers, parallel.num_stages, parallel.pipeline_layout)
    chunks = [tuple(layers[stage :: parallel.pipeline_model_parallel_size]) for stage in range(len(layers))]
    for rank in range(parallel.world_size):
        node, device = placement.place(rank)
        tp, dp, pp = placement.layout.coordinates(rank)
        yield RankRow(rank, node, device, cluster.nics[cluster.nic_of_device[device]], tp, dp, pp, chunks[pp])


def _on_devices(
    config: Config, cluster: Cluster, order: str, device_orders: list[tuple[int, ...]], traffic: Traffic,
    least: float = float("inf"),
) -> Iterator[Placement]:
    """The placements whose tensor-parallel collectives take no longer than `least` seconds."""
    parallel = config.parallel
    layout = Layout.for_world(
        parallel.world_size, parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, order
    )
    model = CostModel(cluster, layout, traffic, len(device_orders[0]))
    notes = traffic.notes
    if len(device_orders[0]) < cluster.devices_per_node:
        notes += ("a node that is not full keeps the ranks of the launcher, next to whose cores these devices are",)
    for device_order in device_orders:
        if model.tensor_seconds(device_order) > least * (1 + 1e-9):
            continue
        yield Placement(cluster, layout, device_order, model.cost(device_order), notes)


def _different(config: Config, orders: list[str]) -> list[str]:
    """Without those that number the ranks as one before them: directions of one rank may stand anywhere."""
    parallel = config.parallel
    sizes = {
        "tp": parallel.tensor_model_parallel_size, "pp": parallel.pipeline_model_parallel_size,
        "dp": parallel.data_parallel_size,
    }  # fmt: skip
    found: dict[tuple[str, ...], str] = {}
    for order in orders:
        found.setdefault(tuple(d for d in order.split("-") if sizes[d] > 1), order)
    return list(found.values())


def _device_orders(config: Config, cluster: Cluster, devices: int) -> list[tuple[int, ...]]:
    if devices < cluster.devices_per_node:
        return [cluster.local_order[:devices]]
    given = config.parallel.device_order
    if given is None:
        return list(cluster.device_orders)
    _check_device_order(given, cluster)
    return [given]


def _check_device_order(order: tuple[int, ...], cluster: Cluster) -> None:
    if sorted(order) != list(range(cluster.devices_per_node)):
        raise ConfigError(
            f"--device-order {','.join(map(str, order))} does not name each device of a node of {cluster.name} once: "
            f"they are 0 to {cluster.devices_per_node - 1}, as in {','.join(map(str, cluster.local_order))}"
        )


def _devices_used(config: Config, cluster: Cluster) -> int:
    """Devices of each node that have a rank."""
    world, each = config.parallel.world_size, cluster.devices_per_node
    if world <= each:
        return world
    if world % each:
        raise ConfigError(
            f"world size {world} is neither a part of one node of {cluster.name} nor whole nodes of {each} devices: "
            f"start {world // each * each} or {-(-world // each) * each} processes, or leave ranks as launched with "
            f"--cluster none"
        )
    if world // each > cluster.nodes:
        raise ConfigError(
            f"world size {world} needs {world // each} nodes, but {cluster.name} has {cluster.nodes}: start fewer "
            f"processes"
        )
    return each
