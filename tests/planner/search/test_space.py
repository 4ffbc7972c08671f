"""The space holds exactly the layouts that a configuration accepts."""
from __future__ import annotations

import itertools

import pytest

from megatron.config.layout import Layout
from megatron.errors import ConfigError
from megatron.planner.cluster import load_cluster
from megatron.planner.search.base import make_base
from megatron.planner.search.space import Rejections, Space

FRONTIER = load_cluster("frontier")
FLAGS = "--num-layers 12 --hidden-size 96 --num-attention-heads 12 --seq-length 40 --vocab-size 512 --bf16".split()


def space(devices: int = 16, batches: tuple[int, ...] = (24, 32), flags: str = "", **wanted: tuple) -> Space:
    base = make_base(None, [*FLAGS, *flags.split()], batches)
    return Space(base, FRONTIER, (devices,), batches, {**base.wanted, **wanted})


def is_valid(where: Space, layout: Layout) -> bool:
    try:
        config = where.config(layout)
    except ConfigError:
        return False
    return config.parallel.num_chunks == layout.chunks and config.parallel.schedule == layout.schedule


@pytest.mark.slow
@pytest.mark.parametrize("flags", [
    "--num-query-groups 4", pytest.param("", marks=pytest.mark.campaign("search")),
    pytest.param("--pipeline-layout 1,1,2,2", marks=pytest.mark.campaign("search")),
])  # fmt: skip
def test_no_size_is_missing_that_validation_accepts(flags):
    where = space(devices=8, batches=(12, 16), flags=f"{flags} --num-layers 6")
    found = set(where.sizes(Rejections()))
    sizes = itertools.product((1, 2, 3, 4, 8), range(1, 7), range(1, 7), ("1f1b", "interleaved", "zb-h1"), (12, 16))
    expected = set()
    for tp, pp, chunks, schedule, batch in sizes:
        for micro in (1, 2, 4, 8, 16):
            size = Layout(8, batch, tp, pp, chunks, schedule, micro)
            if batch % (8 // (tp * pp) or 1) == 0 and is_valid(where, size):
                expected.add(size)
    assert {size for size in found if is_valid(where, size)} == expected and len(expected) > 5


@pytest.mark.slow
def test_variants_are_those_that_validation_accepts():
    where = space()
    for shape in [*where.sizes(Rejections())][::6]:
        variants = list(where.variants(shape))
        assert len(set(variants)) == len(variants)
        assert {c.recompute for c in variants} >= {"none", "selective:mlp_act+layernorm", "full:uniform:1"}
        for layout in variants:
            # 40 tokens are no multiple of 12 and 16 heads: the only thing that a variant alone can be refused for.
            assert is_valid(where, layout) == (not layout.sp or 40 % shape.tp == 0), layout


def test_a_machine_gives_no_job_all_of_its_nodes():
    rejections, given = Rejections(), space(devices=8 * 1025, batches=(8 * 1025,))
    lumi = Space(given.base, load_cluster("lumi"), (*given.worlds, 8 * 1024), given.batches, given.wanted)
    assert {size.world for size in lumi.sizes(rejections)} <= {8 * 1024}
    assert any("1024" in reason for _, reason in rejections.counts)


def test_recomputation_of_stages_of_several_sizes():
    where = space(devices=80, batches=(80,))
    uneven = Layout(80, 80, 1, 5, 1, "1f1b", 1)  # 2, 2, 3, 3, 2 layers
    assert list(where.recomputations(uneven)) == [
        "none", "selective:mlp_act", "selective:layernorm", "selective:mlp_act+layernorm", "full:uniform:1",
        "full:uniform:3", "full:block:1", "full:block:2",
    ]  # fmt: skip
    even = Layout(80, 80, 1, 4, 1, "1f1b", 1)
    assert [r for r in where.recomputations(even) if "full" in r] == [
        "full:uniform:1", "full:uniform:3", "full:block:1", "full:block:2",
    ]  # fmt: skip
    plain = space(flags="--attention-backend unfused")
    assert "selective:core_attn" in list(plain.recomputations(even))


def test_what_was_asked_for_counts():
    def sizes(where: Space) -> set[tuple[int, int]]:
        return {(s.tp, s.pp) for s in where.sizes(Rejections())}

    assert {tp for tp, _ in sizes(space(tp=(2, 4)))} == {2, 4}
    assert {s.micro for s in space(mbs=(3,)).sizes(Rejections())} == {3}
    assert {s.schedule for s in space(schedule=("zb-h1",), pp=(4,)).sizes(Rejections())} == {"zb-h1"}
    shape = Layout(16, 32, 2, 2, 1, "1f1b", 1)
    chosen = list(space(sp=(True,), zero=(1,), overlap=(False,), recompute=("full",)).variants(shape))
    assert all(c.sp and not c.overlap and c.zero == 1 and c.recompute.startswith("full") for c in chosen) and chosen
    assert [c.recompute for c in space(recompute=("full:block:5",), sp=(True,), zero=(0,)).variants(shape)] == [
        "full:block:5", "full:block:5",
    ]  # fmt: skip
    more = Space(space().base, FRONTIER, (16,), (24, 32), {"gbs": (24, 32)}, {"tp": (12,), "mbs": (3,)})
    assert {s.micro for s in more.sizes(Rejections())} >= {1, 2, 3, 4}


@pytest.mark.parametrize(("devices", "wanted", "unit"), [
    (16, dict(tp=(3,)), "TP x PP"), (16, dict(tp=(32,)), "tensor sizes"), (16, dict(chunks=(5,)), "PP x chunks"),
    (8 * 9999, {}, "sizes of the job"), (16, dict(mbs=(7,)), "TP x PP x batch x micro-batch"),
])  # fmt: skip
def test_reasons_are_counted(devices, wanted, unit):
    rejections = Rejections()
    assert list(space(devices, **wanted).sizes(rejections)) == []
    found = [each for each in rejections.counts if each[0] == unit]
    assert found and all(rejections.examples[each] for each in found)
