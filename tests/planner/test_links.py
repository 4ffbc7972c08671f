"""Bandwidths of groups and messages on a node: published figures, and estimates from the links."""

import dataclasses
import itertools

import networkx
import pytest

from megatron.planner.cluster import CLUSTERS, load_cluster
from megatron.planner.node_links import NodeLinks, node_links

FRONTIER = load_cluster("frontier")
LINKS = node_links(FRONTIER)


@pytest.mark.parametrize(
    ("family", "rate"),
    [
        ([(0, 1), (2, 3), (4, 5), (6, 7)], 129),
        ([(2, 3)], 129),
        ([(0, 1, 2, 3), (4, 5, 6, 7)], 52),
        ([(3, 1, 2, 0)], 52),
        ([range(8)], 135),
        ([(0, 2), (1, 3), (4, 6), (5, 7)], 50),
        ([(0, 2, 4, 6), (1, 3, 5, 7)], 72),
        ([(0, 4), (1, 5), (2, 6), (3, 7)], 36),
    ],
)
def test_published_groups(family, rate):
    rates = LINKS.collective(family).values()
    assert {(each.gb_per_s, each.basis) for each in rates} == {(rate, "published")}


def test_four_devices():
    """A ring on {0, 1, 6, 7} is as wide as its link of 100 GB/s.

    The published rate of {0, 1, 2, 3} is 52.
    """
    rates = LINKS.collective([(0, 1, 6, 7), (2, 3, 4, 5)])
    for group in (frozenset({0, 1, 6, 7}), frozenset({2, 3, 4, 5})):
        rate = rates[group]
        assert rate.gb_per_s == LINKS.rate_of_link(100) > 72 > 52
        assert rate.basis == "estimated"
    # With the published parts of a cut it would be 52 to 72: in any case no less than {0, 1, 2, 3}.
    assert LINKS.cut * LINKS.narrowest_cut((0, 1, 6, 7)) == 52


def test_cuts_and_rings_are_those_of_the_graph_of_links():
    """A ring goes along a tree: the spanning tree whose narrowest link is widest."""
    node = networkx.Graph()
    node.add_weighted_edges_from((a, b, width) for (a, b), width in FRONTIER.links.items())
    for size in range(2, 9):
        for group in itertools.combinations(range(8), size):
            inner = node.subgraph(group)
            cut = widest = 0.0
            if networkx.is_connected(inner):
                cut, _ = networkx.stoer_wagner(inner)
                tree = networkx.maximum_spanning_tree(inner)
                widest = min(width for _, _, width in tree.edges.data("weight"))
            assert (LINKS.narrowest_cut(group), LINKS.widest_ring(group)) == (cut, widest), group


def test_the_cut_of_a_node_with_many_devices():
    """A calibrated CPU node of 32 processes has a link between any two: its splits are 2^31."""
    widths = {pair: float(sum(pair) % 7 + 1) for pair in itertools.combinations(range(32), 2)}
    node = networkx.Graph()
    node.add_weighted_edges_from((a, b, width) for (a, b), width in widths.items())
    links = NodeLinks(dataclasses.replace(FRONTIER, links=widths, devices_per_node=32))
    assert links.narrowest_cut(range(32)) == networkx.stoer_wagner(node)[0]


@pytest.mark.parametrize(("groups", "rate"), [(1, 40), (2, 20), (4, 10), (8, 5)])
def test_cards_give_the_published_rates(groups, rate):
    """Members a stride of `groups` apart, with devices in plain order, get the published rates."""
    crossing = [tuple(range(first, 8, groups)) for first in range(groups)]
    for share in LINKS.card_shares(crossing):
        assert share.gb_per_s == pytest.approx(rate) and share.basis == "published"


def test_groups_without_links_of_their_own_take_detours():
    (rate,) = LINKS.collective([(0, 3)]).values()
    assert rate.gb_per_s == pytest.approx(36)
    shared = LINKS.collective([(0, 3), (1, 2)])
    assert {r.gb_per_s for r in shared.values()} == {18.0}


def test_a_machine_without_published_figures(tmp_path):
    text = (CLUSTERS / "frontier.toml").read_text()
    start = text.index("[collectives]")
    end = text.index("[bands]")
    path = tmp_path / "machine.toml"
    path.write_text(text[:start] + text[end:])
    links = NodeLinks(load_cluster(path))
    assert links.rate_of_link(200) == pytest.approx(129) and links.cut == 0.52 and links.card == 0.4
    (rate,) = links.collective([range(8)]).values()
    assert rate.basis == "estimated" and rate.gb_per_s == pytest.approx(130)
