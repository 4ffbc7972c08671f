"""Placement of ranks on devices, and the cost of a step's messages on it.

A node's ranks are numbered along `device_order`; the layout's order defines which parallel
dimension varies fastest over the ranks. Together they give every rank its node, device and position
in the layout. Both are chosen to minimize the seconds of the layers' messages and then of all
messages of a step (PlacementCost.order), without any overlap: an upper bound (channels.py).
Candidates are the six orders of dimensions, the device orders in the machine's description, and,
for experts on several nodes, messages over the nodes or directly to ranks (DISPATCHES), which
also differ in computation.
Frontier's device orders are the best of all 40,320 for the layouts in tests/planner.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.config import Config
from megatron.config.parallel import RANK_ORDERS
from megatron.errors import ConfigError
from megatron.model.formulas import ring_bytes
from megatron.model.stages import stage_owners
from megatron.parallel.launch import Launch
from megatron.parallel.layout import DEFAULT_ORDER, Layout, LayoutSizes
from megatron.parallel.rank_mapping import RankMapping, RankPlan
from megatron.planner.channels import OF_PASSES, Channels
from megatron.planner.channels import Placement as Placement
from megatron.planner.cluster import Cluster, load_cluster
from megatron.planner.compute import PUBLISHED
from megatron.planner.events import GroupMessage, Pass, Trace
from megatron.planner.node_links import ESTIMATED
from megatron.planner.rates import rates_of, seconds_of
from megatron.planner.stage import (
    StageWork,
    messages_in_passes,
    plan_in_passes,
    plan_of_rank,
    stage_passes,
    stages_on,
    tied_elements,
)
from megatron.planner.table import Table
from megatron.planner.trace import trace
from megatron.planner.zero import messages_at_end

# -- what a step sends -----------------------------------------------------------------------------


class StepMessages(NamedTuple):
    """Messages of the busiest rank in a step.

    Bytes count the full tensor of one collective, or one message.

    collectives    collectives in its groups, with their counts
    message_bytes  bytes per message between stages; messages: count per boundary and direction
    tied_bytes     bytes of the all-reduce of a tied embedding's gradients; 0 for none
    """

    collectives: Counter[GroupMessage]
    message_bytes: int
    messages: int
    tied_bytes: float


def step_messages(config: Config, device: str) -> StepMessages:
    """Count the messages of a step on a "cuda" or "cpu" device, from the model's trace."""
    parallel = config.parallel
    traced = trace(config, device)
    size = parallel.pipeline_model_parallel_size
    micro_batches = config.num_micro_batches()
    busiest = max(
        (_sent(config, traced, rank) for rank in range(size)),
        key=lambda sent: sum(count * each.bytes for each, count in sent.items()),
    )
    return StepMessages(
        busiest,
        traced.layer.hands_on,
        parallel.num_chunks * micro_batches if size > 1 else 0,
        4 * tied_elements(config, traced),
    )


def _sent(config: Config, traced: Trace, rank: int) -> Counter[GroupMessage]:
    """Count the collectives of a pipeline rank in a step.

    ZeRO's collectives outside the passes are merged into one for each kind and group.
    """
    sent = Counter[GroupMessage]()
    for stage in stages_on(config, rank):
        runs = itertools.chain.from_iterable(stage_passes(traced, stage).values())
        of_passes = [(message, run.times) for run in runs for message in run.of.messages()]
        if (plan := plan_in_passes(config, traced, stage)) is not None:
            of_passes += [(message, 1) for message in messages_in_passes(traced, stage, plan)]
        for message, times in of_passes:
            sent[message] += times * config.num_micro_batches()
    ends: dict[tuple[str, str], float] = {}
    for messages in messages_at_end(plan_of_rank(config, traced, rank).plan):
        for kind, n_bytes, group in messages:
            ends[kind, group] = ends.get((kind, group), 0.0) + n_bytes
    sent.update(GroupMessage(kind, n_bytes, group) for (kind, group), n_bytes in ends.items())
    return sent


class MessageCost(NamedTuple):
    """Cost of one kind of message in a step of the busiest rank, with basis and bottleneck.

    direction  name of the group in Channels.lanes, or "pipeline"
    name       kind of message
    """

    direction: str
    name: str
    bytes: float
    seconds: float
    basis: str
    limit: str


@dataclass(frozen=True)
class PlacementCost:
    """Seconds of a step's messages on a placement, without any overlap."""

    messages: tuple[MessageCost, ...]

    @property
    def seconds(self) -> float:
        return sum(message.seconds for message in self.messages)

    def seconds_of(self, direction: str) -> float:
        return sum(message.seconds for message in self.messages if message.direction == direction)

    @property
    def order(self) -> tuple[float, float]:
        """Sort key for placements: time of the layers' messages, then time of all messages.

        Every layer waits for messages of its tensor, context and expert groups, whereas other
        messages can overlap with computation. Times are rounded so that equal costs compare equal.
        """
        layers = sum(map(self.seconds_of, OF_PASSES))
        return float(f"{layers:.9g}"), float(f"{self.seconds:.9g}")


def placement_cost(config: Config, placement: Placement) -> PlacementCost:
    """Return the cost of a step's messages on a placement."""
    config = over_nodes(config, placement.layout)
    return _cost(config, placement, step_messages(config, placement.cluster.device_type))


def _cost(config: Config, placement: Placement, sent: StepMessages) -> PlacementCost:
    channels = Channels(config, placement.cluster, placement)
    costs = list[MessageCost]()
    for name in (*OF_PASSES, *(name for name in channels.lanes if name not in OF_PASSES)):
        group = channels.lanes[name]
        if group.rate is None:
            continue
        for kind in sorted({m.kind for m in sent.collectives if m.group == name}):
            same = (m for m in sent.collectives if (m.kind, m.group) == (kind, name))
            counts = {m: sent.collectives[m] for m in same}
            n_bytes = sum(m.bytes * count for m, count in counts.items())
            if kind != "ring":
                n_bytes = ring_bytes(n_bytes, group.ranks, kind)
            seconds = sum(count * channels.seconds(*m) for m, count in counts.items())
            rate = group.exchange if kind == "all_to_all" else group.rate
            assert rate is not None, "groups that exchange have a rate"
            what = kind.replace("_", "-")
            costs.append(MessageCost(name, what, n_bytes, seconds, rate.basis, rate.limit))
    if sent.messages:
        pairs = [pair for pair in itertools.pairwise(stage_owners(config)) if pair[0] != pair[1]]
        boundary_times = [channels.boundary(*pair, sent.message_bytes) for pair in pairs]
        once = 2 * sum(map(sum, boundary_times))
        n_bytes = 2.0 * sent.message_bytes
        every = 2 * sent.messages * max(occupied for occupied, _ in boundary_times)
        tied = channels.seconds("all_reduce", sent.tied_bytes, "ends")
        for name, size, seconds, limit in (
            ("stage to stage", sent.messages * n_bytes, every, "slowest boundary"),
            ("first in, last out", len(pairs) * n_bytes, once, "boundaries in turn"),
            ("tied embedding", sent.tied_bytes, tied, "first, last stage"),
        ):
            if size:
                costs.append(MessageCost("pipeline", name, size, seconds, ESTIMATED, limit))
    return PlacementCost(tuple(costs))


# -- which placement -------------------------------------------------------------------------------


DISPATCHES = (0, 1)
"""Values to try for --expert-ranks-per-node; 0: the number of ranks on a node."""


def placements_of(
    config: Config,
    cluster: Cluster,
    rank_order: str,
    device_order: tuple[int, ...],
    dispatches: Sequence[int] = DISPATCHES,
) -> list[Placement]:
    """Return the placements with these orders that differ in where tokens are sent.

    --expert-ranks-per-node leaves one. Raises ConfigError like placement_of.
    """
    if dispatch_given(config):
        return [placement_of(config, cluster, rank_order, device_order)]
    placements = (
        placement_of(with_dispatch(config, each), cluster, rank_order, device_order)
        for each in dispatches
    )
    return list(dict.fromkeys(placements))


def dispatch_given(config: Config) -> bool:
    """Return whether --expert-ranks-per-node is given, or has no effect."""
    parallel = config.parallel
    return parallel.expert_ranks_per_node is not None or parallel.expert_model_parallel_size == 1


def with_dispatch(config: Config, each: int) -> Config:
    """Return the configuration with --expert-ranks-per-node `each`; 0: auto."""
    return replace(config, parallel=replace(config.parallel, expert_ranks_per_node=each or None))


def chosen_dispatch(config: Config, placement: Placement) -> int | None:
    """Return the --expert-ranks-per-node of a placement; None if it is given or nodes decide it."""
    orders = placement.layout.order, placement.device_order
    if dispatch_given(config) or len(placements_of(config, placement.cluster, *orders)) == 1:
        return None
    return placement.layout.expert_node


def other_dispatch(config: Config, placement: Placement) -> Placement | None:
    """Return the cheapest placement with tokens sent the other way, over nodes or directly to ranks.

    None if nodes leave one way. Whether --expert-ranks-per-node is given does not matter.
    """
    directly = placement.layout.expert_node == 1
    tried = (0,) if directly else (1,)
    other = choose_placement(with_dispatch(config, 0), placement.cluster, tried)
    return None if directly == (other.layout.expert_node == 1) else other


def choose_placement(
    config: Config, cluster: Cluster, dispatches: Sequence[int] = DISPATCHES
) -> Placement:
    """Find the cheapest placement (PlacementCost.order) that --rank-order and --device-order allow.

    Tokens are sent to the nodes of their experts or directly to ranks, whichever makes messages and
    computations of a step faster, unless --expert-ranks-per-node is given. Ties go to nodes, to the
    default rank order, and to the device order that the machine's description lists first. On part
    of a node --device-order is ignored: ranks are assumed to be on the devices closest to their
    cores.

    Raises the errors of `allowed_placements`.
    """
    placements = allowed_placements(config, cluster, dispatches)
    ways = {placement.layout.expert_node for placement in placements}
    # By the sizes within a node, which depend on the rank order.
    known: dict[tuple[int, int, int], tuple[StepMessages, float]] = {}

    def cost(placement: Placement) -> tuple[float, float]:
        layout = placement.layout
        key = layout.expert_node, layout.shard, layout.states
        if key not in known:
            sized = over_nodes(config, layout)
            computed = _computing_seconds(sized, cluster) if len(ways) > 1 else 0.0
            known[key] = step_messages(sized, cluster.device_type), computed
        sent, computed = known[key]
        layers, total = _cost(config, placement, sent).order
        return layers + computed, total + computed

    return min(placements, key=cost)


def allowed_placements(
    config: Config, cluster: Cluster, dispatches: Sequence[int] = DISPATCHES
) -> list[Placement]:
    """List the placements that --rank-order and --device-order allow.

    Raises ConfigError for a world size that neither fits on one node nor fills whole nodes, for
    more nodes than the machine has, and for a device order that is not a permutation of a node's
    devices.
    """
    parallel = config.parallel
    devices = _devices_used(config, cluster)
    device_orders = cluster.device_orders
    if devices < cluster.devices_per_node:
        device_orders = (cluster.local_order[:devices],)
    elif parallel.device_order is not None:
        check_device_order(parallel.device_order, cluster)
        device_orders = (parallel.device_order,)
    rank_orders = [parallel.rank_order] if parallel.rank_order else RANK_ORDERS
    placements = list[Placement]()
    problems = list[ConfigError]()
    for order in rank_orders:
        try:
            for each in device_orders:
                placements += placements_of(config, cluster, order, each, dispatches)
        except ConfigError as error:  # --zero-shard-size node needs an order with groups in a node
            problems.append(error)
    if not placements:
        raise problems[0]
    return placements


def _computing_seconds(config: Config, cluster: Cluster) -> float:
    """Return the seconds of a step's computations on the busiest rank, which dispatches affect.

    0 if the machine's file has no rates for the dtype: then messages alone decide.
    """
    try:
        rates = rates_of(cluster, config.precision.dtype_name)
    except ConfigError:
        return 0.0
    traced = trace(config, cluster.device_type)

    @functools.cache
    def seconds(of: Pass) -> float:
        return sum(seconds_of(operation, rates) for operation in of.computations())

    def work_of(stage: StageWork) -> float:
        runs = itertools.chain(*stage_passes(traced, stage).values())
        return sum(run.times * seconds(run.of) for run in runs)

    ranks = range(config.parallel.pipeline_model_parallel_size)
    busiest = max(sum(map(work_of, stages_on(config, rank))) for rank in ranks)
    return float(f"{config.num_micro_batches() * busiest:.9g}")


def naive_placement(config: Config, cluster: Cluster) -> Placement:
    """Return the placement with Megatron's rank order, and device i for local rank i."""
    devices = range(_devices_used(config, cluster))
    return placement_of(config, cluster, DEFAULT_ORDER, tuple(devices))


def placement_of(
    config: Config, cluster: Cluster, rank_order: str, device_order: tuple[int, ...]
) -> Placement:
    """Return the placement with these orders.

    Raises ConfigError for a world size, like choose_placement. The caller has checked the device
    order (check_device_order).
    """
    devices = _devices_used(config, cluster)
    if len(device_order) != devices:
        check_device_order(device_order, cluster)
    return Placement(cluster, layout_of(config, rank_order, devices), device_order)


def over_nodes(config: Config, layout: Layout) -> Config:
    """Return the configuration, with the sizes that depend on ranks per node set as in `layout`."""
    each = layout.expert_node
    engine = config.engine
    if -1 in (engine.zero_shard_size, engine.zero_state_shard_size):
        engine = replace(engine, zero_shard_size=layout.shard, zero_state_shard_size=layout.states)
        config = replace(config, engine=engine)
    if each == 1:
        return config
    return replace(config, parallel=replace(config.parallel, expert_ranks_per_node=each))


def with_shards_of_node(config: Config, cluster: Cluster) -> Config:
    """Return the configuration, with numbers for ZeRO shards per node (-1) on the chosen placement.

    Raises ConfigError like choose_placement if there are such shards.
    """
    if -1 not in (config.engine.zero_shard_size, config.engine.zero_state_shard_size):
        return config
    return over_nodes(config, choose_placement(config, cluster).layout)


def layout_of(config: Config, order: str | None = None, devices: int = 1) -> Layout:
    """Return the job's layout, with this rank order or the job's own.

    devices  number of devices used on each node
    """
    return Layout.for_world(config.parallel.world_size, LayoutSizes.of(config, order, devices))


def check_device_order(order: tuple[int, ...], cluster: Cluster, subject: str = "") -> None:
    """Raise ConfigError for an order that is not a permutation of a node's devices.

    The message begins with `subject`, by default --device-order and the order.
    """
    if sorted(order) != list(range(cluster.devices_per_node)):
        raise ConfigError(
            f"{subject or f'--device-order {plain(order)}'} does not name each device of a node of "
            f"{cluster.name} exactly once: expected 0 to {cluster.devices_per_node - 1}, as in "
            f"{plain(cluster.local_order)}"
        )


def plain(order: tuple[int, ...]) -> str:
    return ",".join(map(str, order))


def _devices_used(config: Config, cluster: Cluster) -> int:
    """Count the devices used per node.

    Raises ConfigError for several nodes that are not all full, or more than the machine has.
    """
    world = config.parallel.world_size
    each = cluster.devices_per_node
    if world <= each:
        return world
    if world % each:
        raise ConfigError(
            f"world size {world} does not fill whole nodes of {cluster.name} ({each} devices): "
            f"start {world // each * each} or {-(-world // each) * each} processes, or keep the "
            "launcher's ranks with --cluster none"
        )
    if world // each > cluster.nodes:
        raise ConfigError(
            f"world size {world} needs {world // each} nodes, but {cluster.name} has "
            f"{cluster.nodes}: start fewer processes"
        )
    return each


def plan_ranks(config: Config, launch: Launch) -> RankPlan:
    """Choose the order and devices of this job's ranks on --cluster, the same in every process.

    For several nodes that the processes do not fill, nothing is chosen: --rank-order and
    --device-order apply as given. Raises ConfigError for an unknown cluster, more nodes than it
    has, and orders that do not fit it.
    """
    parallel = config.parallel
    assert parallel.cluster is not None
    cluster = load_cluster(parallel.cluster)
    each = cluster.devices_per_node
    known = cluster.local_order, cluster.cores_of_device
    if launch.world_size > each and launch.world_size % each:
        order = parallel.rank_order or DEFAULT_ORDER
        devices = "devices as launched"
        if parallel.device_order is not None:
            check_device_order(parallel.device_order, cluster)
            devices = f"device order {plain(parallel.device_order)} on full nodes"
        notice = (
            f" placement: rank order {order}; {devices}, since {launch.world_size} "
            f"processes do not fill whole nodes of {each} devices ({cluster.name})"
        )
        return RankPlan(RankMapping(parallel.device_order or (), *known, order), lambda: [notice])
    chosen = choose_placement(config, cluster)
    dispatch = chosen_dispatch(config, chosen)
    mapping = RankMapping(chosen.chosen_devices, *known, chosen.layout.order, dispatch)
    return RankPlan(mapping, lambda: render_placement(config, chosen).splitlines())


# -- tables ----------------------------------------------------------------------------------------


def render_placement(config: Config, placement: Placement, width: int = 100) -> str:
    """Render rank order, device order, and the times of messages next to the naive placement's."""
    layout = placement.layout
    naive = naive_placement(config, placement.cluster)
    cost = placement_cost(config, placement)
    other = placement_cost(config, naive)
    naive_seconds = {message[:2]: f"{message.seconds:.3g}" for message in other.messages}
    rows = [
        (
            message.direction.replace("_", " "),
            message.name,
            f"{message.bytes / 1e9:.3g}",
            f"{'' if message.basis == PUBLISHED else '~'}"
            f"{message.bytes / message.seconds / 1e9:.3g}",
            f"{message.seconds:.3g}",
            naive_seconds.get(message[:2], ""),  # experts' hops may differ
            message.limit,
        )
        for message in cost.messages
    ]
    rows.append(
        ("all", "nothing hidden", "", "", f"{cost.seconds:.3g}", f"{other.seconds:.3g}", "")
    )
    directly = chosen_dispatch(config, placement) == 1
    table = Table("", ("direction", "messages", "GB", "GB/s", "s", "naive s", "limited by"), rows)
    nodes = -(-layout.world_size // len(placement.device_order))
    return "\n".join(
        [
            f"placement on {placement.cluster.name}: {layout.world_size} ranks on {nodes} "
            f"node{'s' * (nodes > 1)} = {layout}",
            f"{_orders(placement)} (naive: {_orders(naive)})",
            *["tokens are sent directly to the ranks of their experts: over nodes costs more"]
            * directly,
            table.text(width),
        ]
    )


def _orders(placement: Placement) -> str:
    return f"rank order {placement.layout.order}, device order {plain(placement.device_order)}"
