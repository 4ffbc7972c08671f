"""Seconds of messages and collectives: by hand, and replica by replica."""

import dataclasses
import itertools
import math
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.config.parallel import RANK_ORDERS
from megatron.parallel.layout import Layout
from megatron.planner.channels import Channels, groups_on_nodes
from megatron.planner.cluster import load_cluster
from megatron.planner.compute import ASSUMED, MEASURED, PUBLISHED, Figure
from megatron.planner.node_links import node_links, shortest_routes
from megatron.planner.placement import choose_placement, naive_placement, placement_of
from tests.planner.layouts import made

FRONTIER = load_cluster("frontier")
DGX = load_cluster("dgx-h100")

# -- groups and messages on nodes, against all ranks of all nodes ----------------------------------


SIZES = st.integers(1, 17)
DIVISORS = st.sampled_from([1, 2, 4])


@given(
    SIZES,
    SIZES,
    SIZES,
    DIVISORS,
    DIVISORS,
    st.sampled_from(RANK_ORDERS),
    st.sampled_from([2, 4, 8]),
)
@example(2, 2, 4, 1, 2, "tp-pp-dp", 8)
def test_groups_on_nodes(tensor, pipeline, data, context, expert, order, devices):
    data += -(tensor * pipeline * data) % devices and devices - data % devices  # whole nodes
    subgroups = dict(context=math.gcd(context, data), expert=math.gcd(expert, data))
    if tensor % 2 == 0 and order.index("tp") < order.index("dp"):
        each = max(1, math.gcd(expert, tensor) // 2)
        subgroups |= dict(expert_tensor=each, expert=tensor // each * subgroups["expert"])
    layout = Layout(tensor, pipeline, data, order, **subgroups)
    for name in ("tensor", "data", "context", "expert", "expert_data", "expert_tensor"):
        nodes = {}
        for ranks in {layout.ranks(name, rank) for rank in range(layout.world_size)}:
            for node in {rank // devices for rank in ranks}:
                group = tuple(rank % devices for rank in ranks if rank // devices == node)
                nodes.setdefault(node, set()).add(group)
        actual = groups_on_nodes(layout.world_size, devices, layout.lines[name])
        assert actual == {frozenset(groups) for groups in nodes.values()}, name


def links_between(node, source, target):
    return {(node, *step) for route in shortest_routes(FRONTIER, source, target) for step in route}


def seconds_of_all(layout, order, wraps):
    """Return (boundary, whether on one node) -> most seconds of a byte.

    Every message is counted on all links that it may take, each with the bandwidth left by that
    many messages.
    """
    devices = len(order)
    paths = []
    users = Counter()
    weights = Counter()
    for tensor, data in itertools.product(range(layout.tensor), range(layout.data)):
        ranks = layout.ranks("pipeline", layout.rank(tensor=tensor, data=data, pipeline=0))
        receivers = [*ranks[1:], *[ranks[0]] * wraps]
        for i, (a, b) in enumerate(zip(ranks, receivers, strict=False)):
            (node, source), (other, target) = ((r // devices, order[r % devices]) for r in (a, b))
            weight = 1.0
            if node == other:
                links = links_between(node, source, target)
                weight = 1.0 if FRONTIER.link_gb_per_s(source, target) else 1 / 0.72
            else:
                out = FRONTIER.nic_of_device[source]
                into = FRONTIER.nic_of_device[target]
                links = {(node, -1, out), (other, -2, into)}
                links |= links_between(node, source, 2 * out + 1)
                links |= links_between(other, 2 * into + 1, target)
            paths.append(((i, node == other), links))
            users.update(links)
            weights |= Counter(dict.fromkeys(links, weight))
    seconds = Counter()
    for boundary, links in paths:
        for resource in links:
            width = FRONTIER.link_gb_per_s(*resource[1:]) if resource[1] >= 0 else 0.0
            rate = 1e9 * (node_links(FRONTIER).rate_of_link(width) if width else 0.4 * 25)
            seconds |= {boundary: users[resource] * weights[resource] / rate}
    return seconds


@given(
    sizes=st.tuples(
        st.sampled_from([1, 2, 3, 4, 8]),
        st.sampled_from([2, 3, 4, 8]),
        st.sampled_from([1, 2, 3, 4, 8]),
    ),
    order=st.sampled_from(RANK_ORDERS),
    chunks=st.sampled_from([1, 2]),
    devices=st.sampled_from(FRONTIER.device_orders),
)
def test_a_boundary_is_that_of_its_slowest_replica(sizes, order, chunks, devices):
    tensor, pipeline, data = sizes
    world = tensor * pipeline * data
    if world % 8 and world > 8:
        return
    narrow = "--num-attention-heads 24 --hidden-size 1536 --no-sequence-parallel"
    config = made(tensor, pipeline, data, chunks, narrow)
    used = devices if world >= 8 else FRONTIER.local_order[:world]
    placement = placement_of(config, FRONTIER, order, used)
    channels = Channels(config, FRONTIER, placement)
    expected = seconds_of_all(placement.layout, used, chunks > 1)
    for rank in range(pipeline - (chunks == 1)):
        worst = max(
            1e6 * expected[rank, inside] + latency
            for inside, latency in ((True, 10e-6), (False, 25e-6))
            if (rank, inside) in expected
        )
        assert sum(channels.boundary(rank, (rank + 1) % pipeline, 1e6)) == pytest.approx(worst)


def channels_of(config, cluster=FRONTIER):
    """Return the channels on the chosen placement."""
    return Channels(config, cluster, choose_placement(config, cluster))


# -- by hand ---------------------------------------------------------------------------------------


def test_latency_of_rings_and_trees():
    """Latency is the time at zero bytes: the start and the steps, as NCCL counts them.

    A ring's steps between nodes have a latency of their own.
    """
    channels = channels_of(made(8, 1, 4))  # data-parallel groups: 4 ranks on 4 nodes
    start = 10e-6
    within = 3.6e-6
    between = 19.8e-6
    ring = 100e-6
    assert channels.seconds("all_gather", 0) == pytest.approx(start + 7 * within)
    assert channels.seconds("all_reduce", 0) == pytest.approx(start + 14 * within)
    assert channels.seconds("reduce_scatter", 0, "data") == pytest.approx(start + 3 * ring)
    # A tree of 4 nodes is 2 deep.
    assert channels.seconds("all_reduce", 0, "data") == pytest.approx(start + 4 * between)
    # Two replicas on each of 8 nodes.
    channels = Channels(made(4, 16, 16), FRONTIER, naive_placement(made(4, 16, 16), FRONTIER))
    assert channels.seconds("all_gather", 0, "data") == pytest.approx(start + 8 * within + 7 * ring)
    assert channels.seconds("all_reduce", 0, "data") == pytest.approx(
        start + 2 * (within + 3 * between)
    )


def test_a_ring_without_a_latency_of_its_own_has_that_of_a_tree():
    figures = {k: v for k, v in FRONTIER.compute.items() if k != "ring_hop_between_s"}
    machine = dataclasses.replace(FRONTIER, compute=figures)
    channels = channels_of(made(8, 1, 4), machine)
    assert channels.seconds("all_gather", 0, "data") == pytest.approx(10e-6 + 3 * 19.8e-6)


def of_bytes(config, figure, kind, group):
    """Return the seconds of the bytes of a collective on Frontier with a curve of shares."""
    cluster = FRONTIER.with_figures([figure])
    channels = Channels(config, cluster, naive_placement(config, FRONTIER))
    return channels.seconds(kind, 1e9, group) - channels.seconds(kind, 0, group)


@pytest.mark.parametrize(("nodes", "share"), [(4, 0.8), (8, 0.6), (16, 0.4), (32, 0.4)])
def test_groups_over_many_nodes_keep_a_share_of_their_bandwidth(nodes, share):
    """Shares are linear over the logarithm of the nodes, and constant beyond the points.

    They hold for the bytes, and not within nodes. All-to-alls have their own.
    """
    config = made(8, 1, nodes)
    whole = Figure("bandwidth_by_nodes", ((2.0, 1.0),), MEASURED, "a test")
    curve = Figure("bandwidth_by_nodes", ((16.0, 0.4), (4.0, 0.8)), MEASURED, "a test")
    for kind in ("all_reduce", "reduce_scatter"):
        expected = of_bytes(config, whole, kind, "data") / share
        assert of_bytes(config, curve, kind, "data") == pytest.approx(expected)
        within = of_bytes(config, whole, kind, "tensor")
        assert of_bytes(config, curve, kind, "tensor") == within
    experts = "--num-experts 64 --expert-model-parallel-size"
    config = made(1, 1, 8 * nodes, more=f"{experts} {min(64, 8 * nodes)}")
    over = min(8, nodes)
    assert channels_of(config).lanes["expert"].nodes == over
    exchange = of_bytes(config, whole, "all_to_all", "expert")
    assert of_bytes(config, curve, "all_to_all", "expert") == exchange
    # the range of a share may reach beyond the whole bandwidth
    for value, factor in ((0.25, 4.0), (1.5, 1.0)):
        figure = Figure("exchange_by_nodes", ((over, value),), MEASURED, "a test")
        expected = pytest.approx(factor * exchange)
        assert of_bytes(config, figure, "all_to_all", "expert") == expected


def test_a_group_of_one_sends_nothing():
    channels = channels_of(made(1, 1, 1))
    assert channels.seconds("all_reduce", 1e9) == channels.seconds("all_gather", 1e9, "data") == 0.0
    assert channels.seconds("all_reduce", 1, "ends") == 0.0
    assert channels.used == set()


# -- measured figures ------------------------------------------------------------------------------


def measured(name, *rows):
    return FRONTIER.with_figures([Figure(name, rows, MEASURED, "measured here")])


def test_measured_collectives_come_before_links():
    near = (1.0, 4.0, 1.0)
    far = (1.0, 4.0, 4.0)
    rows = ((*near, 1e3, 1e-5), (*near, 1e6, 1e-3), (2.0, 4.0, 1.0, 1e6, 5.0), (*far, 1e6, 7.0))
    cluster = measured("collectives.all_gather", *rows)
    config = made(4, 2, 1)
    naive = naive_placement(config, FRONTIER)
    channels, plain = (Channels(config, machine, naive) for machine in (cluster, FRONTIER))
    assert channels.seconds("all_gather", 10) == channels.seconds("all_gather", 1e3) == 1e-5
    middle = channels.seconds("all_gather", (1e3 + 1e6) / 2)
    assert middle == pytest.approx((1e-5 + 1e-3) / 2)
    assert channels.seconds("all_gather", 1e7) == pytest.approx(
        1e-3 + 9e6 * (1e-3 - 1e-5) / (1e6 - 1e3)
    )
    assert "collectives.all_gather" in {used.figure for used in channels.used}
    assert channels.seconds("all_reduce", 1e6) == plain.seconds("all_reduce", 1e6)
    # Groups of other sizes were not measured; those over several nodes were, with their own rows.
    pair = made(2, 4, 1)
    assert channels_of(pair, cluster).seconds("all_gather", 1e6) == channels_of(pair).seconds(
        "all_gather", 1e6
    )
    across = made(8, 1, 4)
    assert channels_of(across, cluster).seconds("all_gather", 1e6, "data") == 7.0
    elsewhere = Channels(config, measured("collectives.all_gather", (*far, 1e6, 7.0)), naive)
    assert elsewhere.seconds("all_gather", 1e6) == plain.seconds("all_gather", 1e6)


def test_measured_seconds_that_fall_are_no_way_down():
    """Measured seconds that fall with size are noise: time still grows with the bytes there."""
    rows = (1.0, 4.0, 1.0, 1e3, 2e-4), (1.0, 4.0, 1.0, 1e6, 1e-4)
    channels = channels_of(made(4, 2, 1), measured("collectives.all_gather", *rows))
    for n_bytes in (1e6, 3e6, 1e9):
        assert channels.seconds("all_gather", n_bytes) == pytest.approx(1e-4 * n_bytes / 1e6)


def test_measured_messages_come_before_links():
    cluster = measured("messages", (1.0, 1e3, 2e-5), (1.0, 1e6, 1e-3), (2.0, 1e3, 1e-4))
    channels = channels_of(made(4, 2, 1), cluster)
    assert channels.boundary(0, 1, 1e6) == pytest.approx((1e-3 - 2e-5, 2e-5))
    assert channels.boundary(1, 0, 1) == pytest.approx((0.0, 2e-5))
    across = channels_of(made(8, 2, 1), cluster)
    # One point: in proportion beyond it.
    assert across.boundary(0, 1, 1e4) == pytest.approx((1e-3 - 1e-4, 1e-4))


# -- confidence ------------------------------------------------------------------------------------


def test_confidence_tells_published_from_estimated():
    config = made(4, 2, 4)
    # On LUMI the same figures are taken from Frontier.
    for cluster, basis in ((FRONTIER, PUBLISHED), (load_cluster("lumi"), ASSUMED)):
        channels = Channels(config, cluster, naive_placement(config, cluster))
        channels.seconds("all_gather", 1e6)
        channels.boundary(0, 1, 1e6)
        used = {u.figure.split()[0]: u for u in channels.used}
        assert used["tensor-parallel"].basis == basis and "52 " in used["tensor-parallel"].value
        assert used["stage"].basis == ASSUMED and "data-parallel" not in used


def test_all_reduces_of_a_whole_dgx_node_as_published():
    """All-reduces of a whole DGX node have Azure's published bus bandwidths.

    They count 2 (n - 1) / n of the bytes each second: 361.78 GB/s at 64 MiB, 0.07 at 1 KiB on H100.
    """
    channels = channels_of(made(8, 1, 1), DGX)
    for size, bus in ((1 << 26, 361.78), (1 << 20, 43.70), (1 << 10, 0.07), (1 << 33, 478.87)):
        assert 2 * 7 / 8 * size / channels.seconds("all_reduce", size) / 1e9 == pytest.approx(
            bus, rel=2e-3
        )
    assert channels.seconds("all_gather", 1 << 26) == pytest.approx(
        8.4e-6 + 7 * 3.4e-6 + 7 / 8 * (1 << 26) / 365e9
    )
