"""How groups lie on nodes: found from a few nodes, compared with all ranks of all nodes."""
from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.config.parallel import RANK_ORDERS
from megatron.parallel.topology import Layout
from megatron.planner import patterns
from megatron.planner.patterns import Edge, Groups, edges_on_nodes, groups_on_nodes


def all_groups(layout: Layout, devices: int, direction: str) -> set[Groups]:
    """By the layout's own lists of ranks."""
    lines = {
        "tp": [layout.tensor_ranks(data=d, pipeline=p) for d in range(layout.data) for p in range(layout.pipeline)],
        "dp": [layout.data_ranks(tensor=t, pipeline=p) for t in range(layout.tensor) for p in range(layout.pipeline)],
        "pp": [layout.pipeline_ranks(tensor=t, data=d) for t in range(layout.tensor) for d in range(layout.data)],
    }[direction]
    nodes: dict[int, tuple[set[tuple[int, ...]], set[tuple[int, ...]]]] = {}
    for ranks in lines:
        for node in {r // devices for r in ranks}:
            members = tuple(r % devices for r in ranks if r // devices == node)
            nodes.setdefault(node, (set(), set()))[len(members) < len(ranks)].add(members)
    return {Groups(frozenset(within), frozenset(crossing)) for within, crossing in nodes.values()}


def all_edges(layout: Layout, devices: int, wraps: bool) -> set[frozenset[Edge]]:
    nodes: dict[int, set[Edge]] = {n: set() for n in range(-(-layout.world_size // devices))}
    for t in range(layout.tensor):
        for d in range(layout.data):
            ranks = list(layout.pipeline_ranks(tensor=t, data=d))
            for i, (a, b) in enumerate(zip(ranks, ranks[1:] + ranks[:1], strict=True)):
                last = i == len(ranks) - 1
                if last and not wraps:
                    continue
                if a // devices == b // devices:
                    nodes[a // devices].add(Edge(a % devices, b % devices, last))
                else:
                    nodes[a // devices].add(Edge(a % devices, None, last))
                    nodes[b // devices].add(Edge(None, b % devices, last))
    return {frozenset(edges) for edges in nodes.values()}


SIZES = st.integers(1, 17)


@pytest.mark.slow
@given(SIZES, SIZES, SIZES, st.sampled_from(RANK_ORDERS), st.sampled_from([2, 4, 8]), st.booleans())
@example(2, 4, 16, "tp-dp-pp", 8, True)
@example(1, 17, 16, "dp-pp-tp", 8, True)
@example(3, 5, 16, "tp-pp-dp", 8, False)
def test_against_all_ranks(tensor: int, pipeline: int, data: int, order: str, devices: int, wraps: bool) -> None:
    data += -(tensor * pipeline * data) % devices and devices - data % devices  # whole nodes
    layout = Layout(tensor, pipeline, data, order)
    few, patterns._ALL_NODES = patterns._ALL_NODES, 0  # the short cut, at any size
    try:
        for direction, size in (("tp", tensor), ("dp", data), ("pp", pipeline)):
            expected = all_groups(layout, devices, direction) if size > 1 else set()
            assert groups_on_nodes(layout, devices, direction) == expected, direction
        assert edges_on_nodes(layout, devices, wraps) == (all_edges(layout, devices, wraps) if pipeline > 1 else set())
    finally:
        patterns._ALL_NODES = few
