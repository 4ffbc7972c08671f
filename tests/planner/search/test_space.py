"""Space of layouts: exactly those that a configuration accepts; its fixed part is a model alone."""

import dataclasses
import itertools

import pytest

from megatron.config import PRESETS
from megatron.config.parallel import SCHEDULES
from megatron.errors import ConfigError
from megatron.planner.cluster import load_cluster
from megatron.planner.layout import CandidateLayout
from megatron.planner.search.space import LayoutSpace, Rejections, make_config

FRONTIER = load_cluster("frontier")
FLAGS = (
    "--num-layers 12 --hidden-size 96 --num-attention-heads 12 --seq-length 40 --vocab-size 512 "
    "--bf16"
).split()


def space(devices=16, batches=(24, 32), flags="", **choices):
    base = make_config(None, [*FLAGS, *flags.split()], max(batches))
    return LayoutSpace(base, "a model", FRONTIER, (devices,), {"gbs": batches, **choices})


def is_valid(where, layout):
    try:
        parallel = where.config(layout).parallel
    except ConfigError:
        return False
    return (parallel.num_chunks, parallel.schedule) == (layout.chunks, layout.schedule)


MORE = pytest.mark.campaign("search")


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--num-query-groups 4",
        pytest.param("", marks=MORE),
        pytest.param("--pipeline-layout 1,1,2,2", marks=MORE),
    ],
)
def test_no_size_is_missing_that_validation_accepts(flags):
    where = space(devices=8, batches=(12,), flags=f"{flags} --num-layers 6")
    tried = [schedule for schedule in SCHEDULES if schedule != "dualpipev"]  # only if asked for
    expected = {
        size
        for tp, pp, *rest in itertools.product(
            (1, 2, 3, 4, 8), range(1, 7), range(1, 7), tried, (1, 2, 4, 8, 16)
        )
        if 12 % (8 // (tp * pp) or 1) == 0
        and is_valid(where, size := CandidateLayout(8, 12, tp, pp, *rest))
    }
    sizes = set(where.sizes(Rejections()))
    assert {size for size in sizes if is_valid(where, size)} == expected and len(expected) > 5


@pytest.mark.slow
def test_variants_are_those_that_validation_accepts():
    where = space()
    for shape in [*where.sizes(Rejections())][::12]:
        variants = list(where.variants(shape))
        assert len(set(variants)) == len(variants)
        assert {c.recompute for c in variants} >= {
            "none",
            "selective:mlp_act+layernorm",
            "full:uniform:1",
        }
        for layout in variants:
            # 40 tokens are no multiple of 12 and 16 heads: the only reason to refuse a variant
            # alone.
            assert is_valid(where, layout) == (not layout.sp or 40 % shape.tp == 0), layout


def test_recomputation_of_stages_of_several_sizes():
    where = space(devices=80, batches=(80,))
    partly = "none selective:mlp_act selective:layernorm selective:mlp_act+layernorm".split()
    uneven = CandidateLayout(80, 80, 1, 5, 1, "1f1b", 1)  # 2, 2, 3, 3, 2 layers
    full = "full:uniform:1 full:uniform:3 full:block:1 full:block:2".split()
    assert list(where.recomputations(uneven)) == partly + full
    even = CandidateLayout(80, 80, 1, 4, 1, "1f1b", 1)
    assert [r for r in where.recomputations(even) if "full" in r] == full
    plain = space(flags="--attention-backend unfused")
    assert "selective:core_attn" in list(plain.recomputations(even))


def test_what_was_asked_for_counts():
    def values(name, where):
        return {getattr(size, name) for size in where.sizes(Rejections())}

    assert values("tp", space(tp=(2, 4))) == {2, 4}
    assert values("micro", space(mbs=(3,))) == {3}
    assert values("schedule", space(schedule=("zb-h1",), pp=(4,))) == {"zb-h1"}
    more = dataclasses.replace(space(), more={"tp": (12,), "mbs": (3,)})
    assert values("micro", more) >= {1, 2, 3, 4}
    shape = CandidateLayout(16, 32, 2, 2, 1, "1f1b", 1)
    choices = dict(sp=(True,), zero=(1,), overlap=(False,), recompute=("full",))
    chosen = list(space(**choices).variants(shape))
    assert {(c.sp, c.zero, c.overlap, c.recompute[:4]) for c in chosen} == {
        (True, 1, False, "full")
    }
    block = space(recompute=("full:block:5",), sp=(True,), zero=(0,))
    assert [c.recompute for c in block.variants(shape)] == ["full:block:5"] * 2


@pytest.mark.parametrize(
    "choices",
    [
        dict(tp=(3,)),
        dict(tp=(32,)),
        dict(chunks=(5,)),
        dict(mbs=(7,)),
        dict(pp=(3,)),
        dict(cp=(3,)),
        dict(pp=(4,), chunks=(3,), recompute=("full:block",)),
    ],
)
def test_what_is_rejected_has_a_reason_and_an_example(choices):
    rejections = Rejections()
    assert list(space(**choices).sizes(rejections)) == []
    assert rejections.counts and all(rejections.nearest[reason][1] for reason in rejections.counts)


# -- the fixed part --------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_of_a_preset_the_model_alone_counts(preset):
    config = make_config(preset, [], 64)
    sizes = "tensor_model_parallel_size pipeline_model_parallel_size micro_batch_size"
    assert [config.get(name) for name in sizes.split()] == [1, 1, 1]
    assert config.parallel.num_chunks == 1 and config.recompute.recompute_granularity is None
    for name in "num_layers hidden_size num_attention_heads seq_length vocab_size bf16".split():
        assert config.get(name) == PRESETS[preset].get(name, config.get(name))


def test_flags_change_the_model_of_a_preset():
    flags = "--fp16 --pp-partition-method type:transformer --rampup-batch-size 8 8 100".split()
    assert make_config("gpt-22b", flags, 64).precision.dtype_name == "float16"


@pytest.mark.parametrize(
    ("preset", "flags", "words"),
    [
        ("gpt-23b", "", "'gpt-23b' gpt-22b"),
        (None, "--seq-length 8", "--num-layers"),
        ("gpt-22b", "--tp 2", "--tp"),
        ("gpt-22b", "--preset tiny", "--preset"),
        ("gpt-22b", "--world-size 8", "--world-size --nodes"),
        ("gpt-22b", "--cluster lumi", "--cluster"),
        ("gpt-22b", "--global-batch-size 8", "--global-batch-size --global-batch"),
        ("gpt-22b", "--micro-batch-size 2 --zero-stage 0", "--micro-batch-size --zero-stage --fix"),
        ("gpt-22b", "--micro-batch-size two", "'two'"),
        ("gpt-22b", "--recompute-method block", "--recompute-method --fix"),
        ("gpt-22b", "--deepspeed_config x.json", "--deepspeed"),
    ],
)
def test_mistakes_in_the_fixed_part(preset, flags, words):
    with pytest.raises(ConfigError) as error:
        make_config(preset, flags.split(), 64)
    for word in words.split():
        assert word in str(error.value)
