"""The search against an estimate of every layout: with the real models on small spaces, and with made-up ones."""
from __future__ import annotations

import dataclasses
import os
import random
import signal
from types import SimpleNamespace

import pytest

from megatron.config.parallel import RANK_ORDERS
from megatron.errors import ConfigError, MegatronError
from megatron.planning.cluster import load_cluster
from megatron.planning.memory import memory_of_ranks
from megatron.planning.placement import place_with
from megatron.planning.search import tree
from megatron.planning.search.base import make_base
from megatron.planning.search.choices import Choices
from megatron.planning.search.judging import GIB, Bounded, Judge, Judged, Models, Refused, TooBig
from megatron.planning.search.places import worthwhile_placements
from megatron.planning.search.space import Rejections, Space
from megatron.planning.search.tree import Found, Value, search, values_of
from megatron.planning.timing import estimate

FRONTIER = load_cluster("frontier")
MODEL = "--num-layers 4 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --vocab-size 50257 --bf16".split()


def judge(
    gib: float = 57.6, devices: tuple[int, ...] = (8,), batches: tuple[int, ...] = (8,), **wanted: tuple
) -> Judge:
    base = make_base(None, MODEL, batches)
    return Judge(Space(base, FRONTIER, devices, batches, {**base.wanted, **wanted}), gib * GIB)


def every_layout(given: Judge) -> list[Judged]:
    """Estimates of all layouts that are valid and fit, on each of all placements; in order, without any bound."""
    found = []
    for shape in given.space.shapes(Rejections()):
        for choices in given.space.variants(shape):
            try:
                config = given.space.config(choices)
            except ConfigError:
                continue
            full = max(given.models.memory(config, FRONTIER, None), key=lambda rank: (rank.total, -rank.rank))
            if full.total > given.capacity:
                continue
            for placement in given.models.placements(config, FRONTIER, given.space.wanted):
                time = given.models.time(config, FRONTIER, placement)
                placed = choices._replace(rank_order=placement.layout.order, device_order=placement.device_order)
                score = given.score(time.seconds, shape)
                found.append(Judged(placed, time.seconds, score, dict(time.parts), time.mfu, time.hfu,
                                    time.tokens_per_s, full.total, full.rank))  # fmt: skip
    return sorted(found, key=lambda j: j.key)


def check(given: Judge, found: Found, everything: list[Judged]) -> None:
    """The best of the best shapes, the best with each value, and the front, all of every layout."""
    shapes: dict[object, Judged] = {}
    values: dict[Value, Judged] = {}
    for judged in everything:
        shapes.setdefault(judged.choices.shape, judged)
        for value in values_of(given, judged.choices):
            values.setdefault(value, judged)
    assert found.best[: found.top] == list(shapes.values())[: found.top]
    assert found.by_value == values
    front, lowest = [], float("inf")
    for memory, score, choices in sorted((j.memory, j.score, j.choices) for j in everything):
        if score < lowest:
            front.append((memory, score, choices))
            lowest = score
    assert [(j.memory, j.score, j.choices) for j in found.front] == front


MORE = pytest.mark.campaign("search")


@pytest.mark.slow
@pytest.mark.parametrize(("gib", "wanted"), [
    (8.0, dict(tp=(1, 4), mbs=(1,))), pytest.param(57.6, dict(tp=(1, 2), mbs=(1, 2)), marks=MORE),
    pytest.param(5.0, dict(tp=(2, 8), zero=(1,), mbs=(2,)), marks=MORE),
])  # fmt: skip
def test_the_search_finds_what_estimating_everything_finds(gib, wanted):
    given = judge(gib, **wanted)
    found, everything = search(given, top=5), every_layout(given)
    check(given, found, everything)
    assert found.counts["estimated"] < len({j.choices[:5] for j in everything}), "nothing was left out"
    done = sum(found.counts[name] for name in ("estimated", "too big", "bounded", "refused"))
    assert done == found.counts["layouts"]


@pytest.mark.slow
def test_two_processes_find_what_one_finds():
    given = judge(8.0, batches=(8, 16), tp=(2,), pp=(1, 2), mbs=(1,))
    one, two = search(given, top=4), search(given, top=4, processes=2)
    for name in ("best", "by_value", "front", "counts", "seen", "rejections"):
        assert getattr(one, name) == getattr(two, name), name


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_search():
    given, here = judge(), os.getpid()

    def memory(config, cluster, ranks):
        assert os.getpid() != here
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(MegatronError, match="--processes"):
        search(dataclasses.replace(given, models=dataclasses.replace(given.models, memory=memory)), processes=2)


@pytest.mark.slow
def test_node_hours_choose_fewer_nodes():
    given = judge(devices=(8, 16), batches=(16,), tp=(2,), pp=(1, 2), mbs=(1,), zero=(1,), recompute=("none",))
    assert search(given).best[0].choices.shape.devices == 16
    assert search(dataclasses.replace(given, per_node=True)).best[0].choices.shape.devices == 8


# -- made-up models: no structure that a search could profit from but bound <= time ------------------------------------


def made_up(seed: int, slack: float, tied: bool) -> Models:
    """Times, bounds and memory by chance; the bounds of shapes hold for their variants, as they must."""
    def shape_of(config) -> tuple:
        p, b = config.parallel, config.batch
        return (p.world_size, b.global_batch_size, p.tensor_model_parallel_size, p.pipeline_model_parallel_size,
                p.num_chunks, p.schedule, b.micro_batch_size)  # fmt: skip

    def variant_of(config) -> tuple:
        r = config.recompute
        return (config.parallel.sequence_parallel, config.parallel.tp_comm_overlap, config.engine.zero_stage,
                r.recompute_granularity, r.recompute_modules, r.recompute_method, r.recompute_num_layers)  # fmt: skip

    def least(config) -> float:
        return random.Random(repr((seed, shape_of(config)))).randrange(1, 4 if tied else 1000)

    def seconds(config) -> float:
        more = random.Random(repr((seed, shape_of(config), variant_of(config)))).randrange(0, 3 if tied else 500)
        return least(config) + more

    def bound(config, cluster, placement) -> float:
        # Of a shape by any of its variants; of a layout on a placement a little closer.
        return least(config) * (1 - slack) if placement is None else seconds(config) * (1 - slack)

    def memory(config, cluster, ranks):
        total = random.Random(repr((seed, variant_of(config), shape_of(config)))).randrange(10, 60) * GIB
        if seed > 4:  # no front that would keep everything in the running
            total = 20 * GIB
        return [SimpleNamespace(rank=0, total=float(total))]

    def time(config, cluster, placement):
        return SimpleNamespace(seconds=float(seconds(config)), parts={}, mfu=0.5, hfu=0.5, tokens_per_s=1.0)

    def placements(config, cluster, wanted):
        return [SimpleNamespace(layout=SimpleNamespace(order="tp-dp-pp"), device_order=(0, 1))]

    return Models(memory, bound, time, placements)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "slack", "tied", "top", "gib"), [
    (1, 0.0, False, 3, 58), (2, 0.3, False, 1, 30), (3, 0.0, True, 12, 58), (5, 0.1, False, 1, 58),
    pytest.param(4, 0.3, True, 4, 30, marks=MORE),
    *(pytest.param(seed, 0.1, False, 1, 58, marks=MORE) for seed in range(6, 11)),
])  # fmt: skip
def test_made_up_models(seed, slack, tied, top, gib, monkeypatch):
    monkeypatch.setattr(tree, "_ROUND", 2)  # the running is looked at often
    given = judge(float(gib), tp=(2, 4), mbs=(1,), pp=(1, 2), recompute=("none", "selective"))
    given = dataclasses.replace(given, models=made_up(seed, slack, tied))
    check(given, search(given, top), every_layout(given))


# -- what the pruning rests on -----------------------------------------------------------------------------------------


def test_the_bound_of_a_shape_holds_for_every_variant_on_every_placement():
    given, tried = judge(gib=1e9, tp=(1, 4), batches=(16,)), 0
    chance = random.Random(1)
    for shape in chance.sample(list(given.space.shapes(Rejections())), 10):
        bounded = given.shape(shape)
        assert isinstance(bounded, Bounded)
        for own in chance.sample(given.variants(shape), 6):
            assert not isinstance(own, TooBig | Refused)
            config = given.space.config(own.choices)
            placement = place_with(config, FRONTIER, chance.choice(RANK_ORDERS), chance.choice(FRONTIER.device_orders))
            score = given.score(estimate(config, FRONTIER, placement).seconds, shape)
            assert bounded.bound <= own.bound <= score
            assert given.models.bound(config, FRONTIER, placement) <= score * shape.batch
            assert own.memory <= max(rank.total for rank in memory_of_ranks(config))
            tried += 1
    assert tried > 50


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "pp", "chunks", "micro"), [
    (2, 2, 2, 1), *(pytest.param(*row, marks=MORE) for row in ((1, 4, 1, 1), (4, 2, 1, 1), (8, 1, 1, 2))),
])  # fmt: skip
def test_no_placement_is_faster_than_the_worthwhile_ones(tp, pp, chunks, micro):
    given = judge(gib=1e9, devices=(16,), batches=(32,), tp=(tp,), pp=(pp,), chunks=(chunks,), mbs=(micro,))
    for shape in given.space.shapes(Rejections()):
        for overlap in {False, tp > 1}:
            config = given.space.config(Choices(shape, tp > 1, overlap, 1, "none"))
            kept = worthwhile_placements(config, FRONTIER, {})
            best = min(estimate(config, FRONTIER, placement).seconds for placement in kept)
            everything = min(
                estimate(config, FRONTIER, place_with(config, FRONTIER, order, devices)).seconds
                for order in RANK_ORDERS for devices in FRONTIER.device_orders
            )  # fmt: skip
            assert best == pytest.approx(everything, rel=1e-9) and len(kept) < 72


def test_placements_that_are_wanted():
    given = judge(tp=(2,), pp=(2,))
    config = given.space.config(Choices(next(given.space.shapes(Rejections())), True, False, 1, "none"))
    devices = (0, 1, 2, 3, 4, 5, 6, 7)
    (placement,) = worthwhile_placements(config, FRONTIER, {"order": ("pp-tp-dp",), "devices": (devices,)})
    assert (placement.layout.order, placement.device_order) == ("pp-tp-dp", devices)
    with pytest.raises(ConfigError, match="0-1-2-3-4-5-6-6"):
        worthwhile_placements(config, FRONTIER, {"devices": ((0, 1, 2, 3, 4, 5, 6, 6),)})
