"""Rank numbers and groups, against grids of numpy. Groups of real processes: test_lost_ranks.py."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron.config.parallel import RANK_ORDERS
from megatron.errors import ConfigError
from megatron.parallel.layout import Layout, LayoutSizes
from megatron.parallel.topology import Topology

LAYOUTS = st.builds(Layout, *[st.integers(1, 4)] * 3, st.sampled_from(RANK_ORDERS))


@st.composite
def expert_layouts(draw):
    """Draw layouts with experts over tensor, context and data ranks."""
    t, p, repeats, context, nodes, each, of_tensor = (draw(st.integers(1, 3)) for _ in range(7))
    per_expert = draw(st.sampled_from([1, t, t * of_tensor]))
    expert = nodes * each
    data = math.lcm(context, per_expert * expert // math.gcd(per_expert * expert, t)) * repeats
    order = draw(st.sampled_from(RANK_ORDERS))
    sizes = LayoutSizes(t, p, context, expert, per_expert, each, rank_order=order)
    try:
        return Layout.for_world(t * p * data, sizes)
    except ConfigError:  # partial tensor-parallel groups need the default order
        partial = max(t, per_expert * expert) % min(t, per_expert * expert)
        assert (partial and order != "tp-dp-pp") or order.index("dp") < order.index("tp")
        return Layout.for_world(t * p * data, replace(sizes, rank_order=None))


EXPERT_LAYOUTS = expert_layouts()


def grid(layout):
    """Return global ranks as an array [pipeline, data, tensor], in the layout's memory order."""
    sizes = {"tp": layout.tensor, "dp": layout.data, "pp": layout.pipeline}
    slowest_first = layout.order.split("-")[::-1]
    ranks = np.arange(layout.world_size).reshape([sizes[direction] for direction in slowest_first])
    return ranks.transpose([slowest_first.index(direction) for direction in ("pp", "dp", "tp")])


@given(LAYOUTS)
def test_groups_are_the_lines_of_a_grid(layout):
    """The embedding group joins both ends of a pipeline."""
    ranks = grid(layout)
    for (p, d, t), rank in np.ndenumerate(ranks):
        ends = Topology.from_layout(layout, int(rank)).embedding
        if layout.pipeline == 1 or p not in (0, layout.pipeline - 1):
            assert ends is None
        else:
            assert tuple(ends.ranks) == (ranks[0, d, t], ranks[-1, d, t])
        assert layout.rank(tensor=t, data=d, pipeline=p) == rank
        assert layout.coordinates(int(rank)) == (t, d, p)
        assert tuple(layout.ranks("tensor", int(rank))) == tuple(ranks[p, d, :])
        assert tuple(layout.ranks("data", int(rank))) == tuple(ranks[p, :, t])
        assert tuple(layout.ranks("pipeline", int(rank))) == tuple(ranks[:, d, t])
        assert layout.ranks("model", int(rank)) == tuple(sorted(ranks[:, d, :].ravel()))


def test_orders_and_what_is_left_is_data_parallel():
    assert sorted(RANK_ORDERS) == sorted(
        "-".join(order) for order in itertools.permutations(("tp", "dp", "pp"))
    )
    assert Layout.for_world(24, LayoutSizes(2, 3, 2, 4)) == Layout(
        tensor=2, pipeline=3, data=4, context=2, expert=4
    )
    assert Layout.for_world(24, LayoutSizes(2, 3)) == Layout(
        tensor=2, pipeline=3, data=4, order="tp-dp-pp"
    )
    with pytest.raises(ConfigError, match="'tp-pp'"):
        Layout(order="tp-pp")


@pytest.mark.parametrize(
    ("world", "sizes", "named"),
    [
        (6, (4, 1), "6.* 4 "),
        (12, (2, 3, 4), "4"),
        (12, (2, 3, 1, 3), "3"),
    ],
)
def test_worlds_and_data_lines_that_do_not_divide(world, sizes, named):
    with pytest.raises(ConfigError, match=named):
        Layout.for_world(world, LayoutSizes(*sizes))


@given(EXPERT_LAYOUTS)
def test_context_and_expert_ranks_divide_the_ranks_of_a_stage(layout):
    """Experts are divided over the stage's ranks, with tensor-parallel neighbours side by side."""
    ranks = grid(layout)
    for (p, d, t), number in np.ndenumerate(ranks):
        topology = Topology.from_layout(layout, int(number))
        context = ranks[p, :, t].reshape(-1, layout.context)[d // layout.context]
        assert tuple(topology.context.ranks) == tuple(context)
        assert topology.replica == d // layout.context < layout.replicas
        nodes = 1 if layout.expert_node == 1 else layout.expert // layout.expert_node
        mesh = ranks[p].reshape(-1, nodes, layout.expert // nodes, layout.expert_tensor_size)
        copy, node, on_node, part = (int(at[0]) for at in np.nonzero(mesh == number))
        for group, line in (
            (topology.expert_tensor, mesh[copy, node, on_node]),
            (topology.expert, mesh[copy, :, :, part].flatten()),
            (topology.expert_data, mesh[:, node, on_node, part]),
            *zip(
                topology.expert_hops if nodes > 1 else (),
                (mesh[copy, :, on_node, part], mesh[copy, node, :, part]),
                strict=nodes > 1,
            ),
        ):
            assert tuple(group.ranks) == tuple(line)
            assert group.ranks[group.rank] == number
        same_tensor = set(ranks[p, :, t].tolist())
        inputs = [rank for rank in topology.expert_tensor.ranks if rank in same_tensor]
        assert list(topology.expert_inputs.ranks) == inputs


@given(EXPERT_LAYOUTS, st.integers(1, 12))
def test_neighbours_of_an_expert_group_on_a_node(layout, on_node):
    assume(layout.world_size % on_node == 0)
    counts = set()
    for rank in range(layout.world_size):
        nodes = [member // on_node for member in layout.ranks("expert", rank)]
        runs = [len([*run]) for _, run in itertools.groupby(nodes)]
        counts.update(runs if len(runs) == len(set(nodes)) else [0])
    assert layout.experts_on_node(on_node) == (counts.pop() if len(counts) == 1 else 0)


@given(EXPERT_LAYOUTS)
def test_every_member_makes_the_same_groups_in_the_same_order(layout):
    """Every member creates the same groups in the same order.

    Creation involves only the members, so two ranks that share two groups must create them in one
    order. Their names have the number of groups before, so all ranks create as many.
    """
    made = []
    for rank in range(layout.world_size):
        calls = []
        topology = Topology.from_layout(
            layout, rank, new_group=lambda ranks, calls=calls: calls.append(tuple(ranks)) or [ranks]
        )
        made.append(calls)
        for group in (
            topology.tensor,
            topology.data,
            topology.pipeline,
            topology.model,
            topology.world,
            topology.context,
            topology.expert,
            topology.expert_data,
            topology.expert_tensor,
            topology.expert_inputs,
            topology.expert_span,
            *topology.expert_hops,
        ):
            assert group.ranks[group.rank] == rank
        assert all(rank in ranks for ranks in calls)
        # Groups of dense layers with the same ranks are one group; messages of context and expert
        # groups and of pairs of stages overlap with others, and have groups of their own.
        dense = topology.tensor, topology.data, topology.pipeline, topology.model
        handles = {}
        for group in (*dense, *vars(topology.shards).values()):
            assert group.handle is handles.setdefault(tuple(group.ranks), group.handle)
    assert len(set(map(len, made))) == 1
    for one in range(layout.world_size):
        for other in range(one):
            shared = [ranks for ranks in made[one] if other in ranks]
            assert shared == [ranks for ranks in made[other] if one in ranks]


def test_a_rank_of_a_large_job_holds_no_list_of_all_ranks():
    layout = Layout(tensor=8, pipeline=64, data=147)
    topology = Topology.from_layout(layout, 40_000)
    assert topology.world.ranks == range(75_264)
    longest = max(
        len(g.ranks) for g in (topology.tensor, topology.data, topology.pipeline, topology.model)
    )
    assert longest == 8 * 64, "a replica of the model is the largest group beside the world"
    assert isinstance(Topology.from_layout(Layout(data=75_264), 5).data.ranks, range)
