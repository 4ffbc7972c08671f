"""Search, against an estimate of every layout of small spaces."""

import dataclasses
import functools

import pytest

from megatron.config.parallel import RANK_ORDERS
from megatron.errors import ConfigError
from megatron.planner.cluster import load_cluster
from megatron.planner.layout import CandidateLayout
from megatron.planner.memory import memory_of_ranks
from megatron.planner.placement import placement_of
from megatron.planner.progress import STAGES
from megatron.planner.search import find
from megatron.planner.search.find import search, values_of, worthwhile_placements
from megatron.planner.search.space import Rejections
from megatron.planner.timing import estimate
from tests.planner.layouts import layout_search, made

FRONTIER = load_cluster("frontier")
MORE = pytest.mark.campaign("search")
search_for = functools.partial(layout_search, FRONTIER)


def every_layout(problem):
    """Return (score, layout) of all valid layouts that fit, the best first.

    Each is on the best of a few placements.
    """
    scored = []
    for size in problem.space.sizes(Rejections()):
        for layout in problem.space.variants(size):
            try:
                config = problem.space.config(layout)
            except ConfigError:
                continue
            if max(rank.total for rank in memory_of_ranks(config)) <= problem.capacity:
                placements = worthwhile_placements(config, FRONTIER, {})
                seconds = min(
                    estimate(config, FRONTIER, placement).seconds for placement in placements
                )
                scored.append((seconds / layout.batch, layout))
    return sorted(scored)


@pytest.mark.parametrize(
    ("tp", "pp", "world", "zero", "number"),
    [
        (2, 1, 16, 3, 4),
        (4, 4, 64, 2, 2),  # with pipeline before data parallelism no node has neighbours
        (1, 4, 8, 2, 2),  # there are fewer than the node has room for
    ],
)
def test_shards_of_a_node_are_its_ranks_beside_tensor_parallel_ones(tp, pp, world, zero, number):
    switches = dict(mbs=(1,), overlap=(False,), recompute=("none",), schedule=("1f1b",))
    choices = dict(tp=(tp,), pp=(pp,), zero=(zero,), **switches)
    of_node, of_number = (
        search(search_for(worlds=(world,), batches=(16,), shard=(shard,), **choices)).estimated[0]
        for shard in (-1, number)
    )
    assert (of_node.layout.tp, of_node.layout.shard) == (tp, -1)
    assert of_node.score == of_number.score


def test_orders_that_keep_no_shards_within_a_node_are_left_out():
    config = made(2, 8, 4, more="--zero-stage 2 --zero-shard-size node")
    orders = {p.layout.order for p in worthwhile_placements(config, FRONTIER, {})}
    assert orders and "tp-pp-dp" not in orders
    with pytest.raises(ConfigError, match="tp-pp-dp"):
        worthwhile_placements(config, FRONTIER, {"order": ("tp-pp-dp",)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gib", "choices"),
    [
        (8.0, dict(tp=(1, 4), mbs=(1,), zero=(1, 2))),
        pytest.param(8.0, dict(tp=(1, 4), mbs=(1,)), marks=MORE),
        pytest.param(57.6, dict(tp=(1, 2), mbs=(1, 2)), marks=MORE),
        pytest.param(5.0, dict(tp=(2, 8), zero=(1,), mbs=(2,)), marks=MORE),
    ],
)
def test_the_search_finds_what_estimating_everything_finds(gib, choices, monkeypatch):
    """The search finds the best layout, and the best with each value within 0.6 %.

    It makes few estimates, so that most layouts are left out.
    """
    monkeypatch.setattr(find, "ESTIMATED", 8)
    problem = search_for(gib, **choices)
    result = search(problem, top=5)
    everything = every_layout(problem)
    assert len(result.estimated) < len(everything)
    assert result.estimated[0].score == pytest.approx(everything[0][0], rel=1e-9)
    best = {}
    for score, layout in everything:
        for value in values_of(layout, 8):
            best.setdefault(value, score)
    by_value = result.by_value(8)
    assert by_value.keys() == best.keys()
    for value, score in best.items():
        assert by_value[value].score == pytest.approx(score, rel=6e-3), value
    assert all(judged.memory <= problem.capacity for judged in result.estimated)


@pytest.mark.slow
def test_a_search_tells_its_progress(monkeypatch):
    """The share done of each activity never falls, and ends at the whole."""
    monkeypatch.setattr(find, "ESTIMATED", 5)
    monkeypatch.setattr(find, "OF_EACH_VALUE", 2)
    shares = {}
    problem = search_for(8.0, tp=(2, 4), pp=(1, 2), mbs=(1, 2), zero=(1,))
    result = search(
        problem,
        top=4,
        progress=lambda what, unit, done, total: shares.setdefault(what, []).append(done / total),
    )
    assert [*shares] == [*STAGES] and any("slower" in reason for reason in result.rejections.counts)
    for share in shares.values():
        assert share == sorted(share) and share[-1] == 1


@pytest.mark.slow
def test_two_processes_find_what_one_finds():
    of = search_for(8.0, batches=(8, 16), tp=(2,), pp=(1, 2), mbs=(1,), zero=(1,))
    one, two = (search(dataclasses.replace(of, _known={}), top=4, processes=n) for n in (1, 2))
    for name in ("estimated", "sizes", "rejections"):
        assert getattr(one, name) == getattr(two, name), name


@pytest.mark.slow
def test_no_layer_more_is_recomputed_than_must_be():
    """Recompute the fewest whole layers that fit; skip micro-batches that are too large."""
    switches = dict(zero=(1,), sp=(True,), overlap=(False,))
    problem = search_for(
        3.5, tp=(4,), pp=(1,), mbs=(1, 2, 4, 8), recompute=("full:block",), **switches
    )
    result = search(problem)
    fewest = {}
    for _, layout in sorted(every_layout(problem), key=lambda pair: pair[1].recompute):
        fewest.setdefault(layout.sizes, layout)
    chosen = {judged.layout._replace(rank_order="", device_order=()) for judged in result.estimated}
    assert chosen == set(fewest.values()) and len({layout.recompute for layout in chosen}) > 1


def test_placements_that_are_wanted():
    devices = (0, 1, 2, 3, 4, 5, 6, 7)
    of = search_for(
        tp=(2,), pp=(2,), mbs=(1,), recompute=("none",), order=("pp-tp-dp",), devices=(devices,)
    )
    assert {(j.layout.rank_order, j.layout.device_order) for j in search(of).estimated} == {
        ("pp-tp-dp", devices)
    }
    config = of.space.config(CandidateLayout(8, 8, 2, 2))
    with pytest.raises(ConfigError, match="0-1-2-3-4-5-6-6"):
        worthwhile_placements(config, FRONTIER, {"devices": ((0, 1, 2, 3, 4, 5, 6, 6),)})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tp", "pp", "chunks", "micro"),
    [
        (2, 2, 2, 1),
        *(pytest.param(*row, marks=MORE) for row in ((1, 4, 1, 1), (4, 2, 1, 1), (8, 1, 1, 2))),
    ],
)
def test_no_placement_is_faster_than_the_worthwhile_ones(tp, pp, chunks, micro):
    schedule = "interleaved" if chunks > 1 else "1f1b"
    problem = search_for(gib=1e9, worlds=(16,), batches=(32,))
    for overlap in {False, tp > 1}:
        config = problem.space.config(
            CandidateLayout(16, 32, tp, pp, chunks, schedule, micro, sp=tp > 1, overlap=overlap)
        )
        worthwhile = worthwhile_placements(config, FRONTIER, {})
        best = min(estimate(config, FRONTIER, placement).seconds for placement in worthwhile)
        everything = min(
            estimate(config, FRONTIER, placement_of(config, FRONTIER, order, devices)).seconds
            for order in RANK_ORDERS
            for devices in FRONTIER.device_orders
        )
        assert best == pytest.approx(everything, rel=1e-3) and len(worthwhile) < 24
