"""Which placements of a layout are worth an estimate: those whose messages no other placement sends faster.

Nothing but messages depends on where ranks are, and a step never gets shorter when one of its messages gets longer. So
a placement is left out when another one is as fast in every collective and on every boundary of stages, at all sizes.
"""
from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.config import Config
from megatron.config.parallel import RANK_ORDERS
from megatron.errors import ConfigError
from megatron.parallel.topology import Layout
from megatron.planning.channels import Channels
from megatron.planning.cluster import Cluster
from megatron.planning.compute import KINDS
from megatron.planning.cost import PlacementCost
from megatron.planning.placement import Placement
from megatron.planning.search.choices import allowed

# Times are straight lines over bytes between what was measured, so that these decide for all sizes.
_SIZES = (1.0, *(4.0**k for k in range(3, 17)))
_ENDS = (_SIZES[0], _SIZES[-1])

Orders = tuple[str, tuple[int, ...]]


def worthwhile_placements(config: Config, cluster: Cluster, wanted: Mapping[str, Sequence[Any]]) -> list[Placement]:
    """The placements among which the fastest is, with the rank orders and device orders that are wanted.

    They are shared by all configurations of a layout and carry no cost. Raises ConfigError for an order of devices that
    does not name each device of a node once.
    """
    rank_orders, device_orders = tuple(wanted.get("order", ())), tuple(wanted.get("devices", ()))
    parallel = config.parallel
    key = (
        parallel.world_size, parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size,
        parallel.num_chunks > 1,
    )  # fmt: skip
    known = _known(cluster, rank_orders, device_orders)
    if key not in known:
        known[key] = _undominated(config, cluster, list(_orders(config, cluster, rank_orders, device_orders)))
    return known[key]


@functools.lru_cache(maxsize=16)
def _known(
    cluster: Cluster, rank_orders: tuple[str, ...], device_orders: tuple[Any, ...]
) -> dict[Any, list[Placement]]:
    """What was found, by layout."""
    return {}


def _orders(
    config: Config, cluster: Cluster, rank_orders: tuple[str, ...], device_orders: tuple[tuple[int, ...], ...]
) -> Iterator[Orders]:
    """Every pair, without rank orders that number the ranks as one before them."""
    parallel = config.parallel
    sizes = {
        "tp": parallel.tensor_model_parallel_size, "pp": parallel.pipeline_model_parallel_size,
        "dp": parallel.data_parallel_size,
    }  # fmt: skip
    wanted = {"order": rank_orders} if rank_orders else {}
    different: dict[tuple[str, ...], str] = {}
    for order in RANK_ORDERS:
        if allowed(order, "order", wanted):
            different.setdefault(tuple(d for d in order.split("-") if sizes[d] > 1), order)
    devices = min(parallel.world_size, cluster.devices_per_node)
    if devices < cluster.devices_per_node:
        known: Sequence[tuple[int, ...]] = [cluster.local_order[:devices]]
    else:
        known = device_orders or cluster.device_orders
        for given in device_orders:
            if sorted(given) != list(range(devices)):
                raise ConfigError(f"devices={'-'.join(map(str, given))} does not name each device of a node of "
                                  f"{cluster.name} once: they are 0 to {devices - 1}")  # fmt: skip
    for order in different.values():
        for device_order in known:
            yield order, device_order


def _undominated(config: Config, cluster: Cluster, orders: list[Orders]) -> list[Placement]:
    """In the order given; of equal ones the first."""
    sizes = _SIZES if any(name in cluster.compute.figures for name in ("messages", *_MEASURED)) else _ENDS
    times: dict[tuple[float, ...], Placement] = {}
    for order, devices in orders:
        placement = _placement(config, cluster, order, devices)
        times.setdefault(_times(config, cluster, placement, sizes), placement)
    return [
        placement for own, placement in times.items()
        if not any(other != own and all(a <= b for a, b in zip(other, own, strict=True)) for other in times)
    ]  # fmt: skip


def _placement(config: Config, cluster: Cluster, order: str, devices: tuple[int, ...]) -> Placement:
    parallel = config.parallel
    layout = Layout.for_world(
        parallel.world_size, parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, order
    )
    return Placement(cluster, layout, devices, PlacementCost((), 0))


_MEASURED = tuple(f"collectives.{kind}" for kind in KINDS)


def _times(config: Config, cluster: Cluster, placement: Placement, sizes: Sequence[float]) -> tuple[float, ...]:
    """Seconds of everything that is sent, in one fixed order."""
    pipeline, wraps = placement.layout.pipeline, config.parallel.num_chunks > 1
    channels = Channels(config, cluster, placement)
    ranks = range(pipeline if pipeline > 1 else 0)
    ways = [(rank, True) for rank in ranks if wraps or rank < pipeline - 1]
    ways += [(rank, False) for rank in ranks if wraps or rank > 0]
    found: list[float] = []
    for size in sizes:
        for kind in KINDS:
            found += (channels.tensor_s(kind, size), channels.data_s(kind, size))
        found += (channels.tied_s(size), channels.model_s(size), channels.world_s(size))
        for rank, forward in ways:
            found += channels.boundary(rank, forward, size)
    return tuple(round(seconds, 12) for seconds in found)
