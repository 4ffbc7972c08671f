"""Placements of a layout that are worth an estimate: those whose messages no other placement sends faster."""
from __future__ import annotations

from megatron.config import Config
from megatron.config.layout import Wanted, write_value
from megatron.config.parallel import RANK_ORDERS
from megatron.errors import ConfigError
from megatron.parallel.topology import Layout
from megatron.planner.channels import Channels
from megatron.planner.cluster import Cluster
from megatron.planner.placement import Placement

_SIZES = (1.0, 2.0**24, 2.0**32)


def check_device_orders(wanted: Wanted, cluster: Cluster) -> None:
    """Raise ConfigError for a wanted device order that does not name each device of a node once."""
    each = cluster.devices_per_node
    for order in wanted.get("devices", ()):
        if sorted(order) != list(range(each)):
            raise ConfigError(f"devices={write_value(order)} does not name each device of a node of {cluster.name} "
                              f"once: they are 0 to {each - 1}")  # fmt: skip


def worthwhile_placements(config: Config, cluster: Cluster, wanted: Wanted) -> list[Placement]:
    """List the placements with the rank orders and device orders that are wanted ("order", "devices"), all by default.

    One is left out when another is as fast in every collective and over the boundaries of stages. They carry no cost.
    Raises ConfigError as check_device_orders does.
    """
    check_device_orders(wanted, cluster)
    parallel = config.parallel
    world, devices = parallel.world_size, min(parallel.world_size, cluster.devices_per_node)
    sizes = {"tp": parallel.tensor_model_parallel_size, "pp": parallel.pipeline_model_parallel_size,
             "dp": parallel.data_parallel_size}  # fmt: skip
    different: dict[tuple[str, ...], str] = {}  # orders that number the ranks alike count once
    for order in RANK_ORDERS:
        if order in wanted.get("order", RANK_ORDERS):
            different.setdefault(tuple(d for d in order.split("-") if sizes[d] > 1), order)
    device_orders = wanted.get("devices") or cluster.device_orders
    if devices < cluster.devices_per_node:
        device_orders = (cluster.local_order[:devices],)
    times: dict[tuple[float, ...], Placement] = {}
    for order in different.values():
        layout = Layout.for_world(world, sizes["tp"], sizes["pp"], order)
        for device_order in device_orders:
            placement = Placement(cluster, layout, device_order)
            times.setdefault(_times(config, cluster, placement), placement)
    return [
        placement for own, placement in times.items()
        if not any(other != own and all(a <= b for a, b in zip(other, own, strict=True)) for other in times)
    ]  # fmt: skip


def _times(config: Config, cluster: Cluster, placement: Placement) -> tuple[float, ...]:
    """Seconds of messages of each kind and size, between stages over the slowest boundary and over all in turn."""
    channels, found = Channels(config, cluster, placement), list[float]()
    ranks = range(placement.layout.pipeline - (config.parallel.num_chunks == 1))
    for size in _SIZES:
        for kind in ("all_reduce", "reduce_scatter"):
            found += (channels.tensor_s(kind, size), channels.data_s(kind, size))
        found.append(channels.tied_s(size))
        if placement.layout.pipeline > 1:
            boundaries = [channels.boundary(rank, True, size) for rank in ranks]
            found += (*max(boundaries), sum(map(sum, boundaries)))
    return tuple(round(seconds, 12) for seconds in found)
