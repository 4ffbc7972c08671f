"""Choice of a placement: known results, the best of all device orders, rank tables, errors."""

import contextlib
import itertools

import pytest

from megatron.config.parallel import RANK_ORDERS
from megatron.errors import ConfigError
from megatron.parallel.layout import Layout
from megatron.planner.cluster import load_cluster
from megatron.planner.node_links import node_links
from megatron.planner.placement import (
    choose_placement,
    naive_placement,
    placement_cost,
    placement_of,
)
from tests.planner.layouts import made

FRONTIER = load_cluster("frontier")
LINKS = node_links(FRONTIER)


def groups(placement, direction):
    """Return (node, device) of the members of a direction's groups, by the layout's own lists."""
    layout = placement.layout
    lines = dict.fromkeys(layout.ranks(direction, rank) for rank in range(layout.world_size))
    return [[placement.location(rank) for rank in ranks] for ranks in lines]


def devices_of_tensor_groups(placement):
    for group in groups(placement, "tensor"):
        assert len({node for node, _ in group}) == 1, "a tensor-parallel group has left its node"
    return {frozenset(device for _, device in group) for group in groups(placement, "tensor")}


@pytest.mark.parametrize(
    ("pipeline", "data", "chunks"), [(1, 1, 1), (2, 1, 3), (1, 4, 1), (16, 1, 1), (8, 16, 3)]
)
def test_tensor_parallel_groups(pipeline, data, chunks):
    """Tensor-parallel groups get the widest links.

    Pairs are on 200 GB/s, fours on 200 and 100 GB/s links, never {0..3}; eight are the node.
    """
    if data * pipeline % 4 == 0:
        pairs = devices_of_tensor_groups(
            choose_placement(made(2, pipeline, data, chunks), FRONTIER)
        )
        assert all(FRONTIER.link_gb_per_s(*pair) == 200 for pair in pairs)
    if data * pipeline % 2 == 0:
        fours = devices_of_tensor_groups(
            choose_placement(made(4, pipeline, data, chunks), FRONTIER)
        )
        assert fours == {frozenset({0, 1, 6, 7}), frozenset({2, 3, 4, 5})}
    (eight,) = devices_of_tensor_groups(choose_placement(made(8, pipeline, data, chunks), FRONTIER))
    assert eight == set(range(8))


@pytest.mark.parametrize(
    "layout",
    [(1, 8, 1), (1, 8, 1, 2), (4, 2, 1)],
)
def test_stages_next_to_each_other_on_a_node_have_direct_links(layout):
    """Stages next to each other on a node have direct links.

    A pipeline of eight goes round a cycle; with TP 4, position k of one group is next to position k
    of the other. The plain order has neighbours without a link: 1 and 2, 5 and 6, and 3 and 4.
    """
    for line in groups(choose_placement(made(*layout), FRONTIER), "pipeline"):
        devices = [device for _, device in line]
        assert all(
            FRONTIER.link_gb_per_s(a, b)
            for a, b in zip(devices, devices[1:] + devices[:1], strict=True)
        )
    assert [FRONTIER.link_gb_per_s(a, a + 1) for a in range(7)].count(0.0) == 3


def test_messages_leave_a_node_from_devices_with_cards():
    """Messages leave a node from devices with cards.

    A pipeline over two nodes ends on odd devices, and every message on a node has a direct link.
    """
    chosen = choose_placement(made(1, 16, 1, more="--rank-order tp-pp-dp"), FRONTIER)
    (line,) = groups(chosen, "pipeline")
    for (n, a), (m, b) in itertools.pairwise(line):
        if n == m:
            assert FRONTIER.link_gb_per_s(a, b) > 0
        else:
            assert a in FRONTIER.nic_on_device and b in FRONTIER.nic_on_device


# -- the best of all orders of devices -------------------------------------------------------------


def orders_worth_a_look(layout):
    """Yield the orders of eight devices whose tensor-parallel groups are fastest.

    Only some of each set of symmetric orders are kept.
    """
    every = [order for order in itertools.permutations(range(8)) if order[0] in (0, 1)]
    if layout.tensor == 1:
        yield from every
        return
    stride = layout.strides[0]
    firsts = [i for i in range(8) if i // stride % layout.tensor == 0]

    def slowest(order):
        family = [[order[i + k * stride] for k in range(layout.tensor)] for i in firsts]
        return min(rate.gb_per_s for rate in LINKS.collective(family).values())

    rates = {order: slowest(order) for order in every}
    best = max(rates.values())
    yield from (order for order, rate in rates.items() if rate == best)


MORE = pytest.mark.campaign("search")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tensor", "pipeline", "data", "order", "chunks"),
    [
        (4, 16, 16, "tp-pp-dp", 3),
        *(
            pytest.param(*map(int, sizes.split("x")), order, chunks, marks=MORE)
            for order, chunks, rows in (
                ("tp-dp-pp", 1, "2x4x1 1x8x1 4x2x1 4x1x2 2x2x2 2x8x4 1x8x2"),
                ("tp-dp-pp", 3, "2x4x1 1x8x1 4x16x16"),
                ("tp-pp-dp", 1, "1x16x1 1x4x2"),
                ("tp-pp-dp", 3, "2x4x16"),
            )
            for sizes in rows.split()
        ),
    ],
)
def test_no_order_of_devices_is_cheaper(tensor, pipeline, data, order, chunks):
    config = made(tensor, pipeline, data, chunks, f"--rank-order {order}")
    every = orders_worth_a_look(Layout(tensor, pipeline, data, order))
    best = min(
        placement_cost(config, placement_of(config, FRONTIER, order, devices)).order
        for devices in every
    )
    chosen = choose_placement(config, FRONTIER)
    assert placement_cost(config, chosen).order == pytest.approx(best), chosen.device_order


# -- costs -----------------------------------------------------------------------------------------


def test_costs_by_hand():
    """Compute costs of TP 4 x PP 2 on one node in plain order.

    Collectives have the published 52 GB/s, messages go from 0-3 to 4-7.
    """
    config = made(4, 2, 1, more="--no-sequence-parallel")
    cost = placement_cost(config, naive_placement(config, FRONTIER))
    tensor = 2048 * 5120 * 2
    statistics = 0.75 * 4 * 12 * 2048  # of the softmax, fp32 [3, tokens] of each rank, gathered
    # 4 layers x 4 and 1 all-reduces; besides bytes, a start and the steps of a ring, twice around
    # for an all-reduce.
    latency = 17 * (10e-6 + 6 * 3.6e-6) + 10e-6 + 3 * 3.6e-6
    assert cost.seconds_of("tensor") == pytest.approx(
        16 * ((17 * 1.5 * tensor + statistics) / 52e9 + latency)
    )
    # 0 and 4, 2 and 6 have two ways of two links; 0-6 and 2-4 of 100 GB/s are on a way of both. 16
    # messages go in each direction, and one goes through the pipeline and back.
    message = 2 * tensor / 0.72 / ((50 + 79 / 3) * 1e9)
    seconds = {message_cost.name: message_cost.seconds for message_cost in cost.messages}
    assert seconds["stage to stage"] == pytest.approx(2 * 16 * message)
    assert seconds["first in, last out"] == pytest.approx(2 * (message + 10e-6))
    assert cost.seconds_of("data") == 0


@pytest.mark.parametrize(("data", "order"), [(3, "tp-pp-dp"), (16, "tp-dp-pp")])
def test_the_cheapest_order_of_directions(data, order):
    """The cheapest order depends on the number of replicas.

    Few replicas: stages next to each other save more than short rings; many replicas: the reverse.
    """
    config = made(2, 4, data)
    chosen = choose_placement(config, FRONTIER)
    assert chosen.layout.order == order
    for orders in itertools.product(RANK_ORDERS, FRONTIER.device_orders):
        other = placement_cost(config, placement_of(config, FRONTIER, *orders))
        assert other.order >= placement_cost(config, chosen).order


@pytest.mark.parametrize(("tensor", "pipeline", "data"), [(4, 4, 4), (2, 4, 8)])
def test_weights_sharded_within_a_node(tensor, pipeline, data):
    """--zero-shard-size node: orders without a group of replicas in a node are left out.

    The sizes of the shards depend on the order, and so does its cost.
    """
    config = made(tensor, pipeline, data, more="--zero-stage 2 --zero-shard-size node")
    costs = {}
    for orders in itertools.product(RANK_ORDERS, FRONTIER.device_orders):
        with contextlib.suppress(ConfigError):
            costs[orders] = placement_cost(config, placement_of(config, FRONTIER, *orders)).order
    assert costs
    chosen = choose_placement(config, FRONTIER)
    assert placement_cost(config, chosen).order == min(costs.values())


def test_a_part_of_a_node_keeps_the_launchers_devices():
    for world in (1, 2, 4, 7):
        chosen = choose_placement(made(1, 1, world), FRONTIER)
        assert chosen.device_order == FRONTIER.local_order[:world]


@pytest.mark.parametrize(
    ("world", "more", "message"),
    [
        (12, "", "12 .*8 or 16"),
        (9473 * 8, "", "9473 .*9472"),
        (8, f"--device-order {','.join(map(str, range(16)))}", "--device-order .*0 to 7"),
    ],
)
def test_errors(world, more, message):
    config = made(1, 1, world, more=more)
    with pytest.raises(ConfigError, match=message):
        choose_placement(config, FRONTIER)
