"""Exchanges between replicas, against the engine's own buckets, and their hidden part."""

import dataclasses
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.pipeline.clock import Pipeline, StageTimes, run_pipeline
from megatron.planner.cluster import load_cluster
from megatron.planner.rates import rates_of
from megatron.planner.stage import parameters_of, plan_in_passes, stages_of
from megatron.planner.timing.estimate import exchange
from megatron.planner.timing.passes import PassSeconds, StageSeconds, stage_seconds
from megatron.planner.trace import trace
from tests.planner.timing.configs import run, undisturbed

FRONTIER = undisturbed(load_cluster("frontier"))


def of(config):
    return trace(config, "cuda")


class Links:
    """Channels on which a message takes as many seconds as it has bytes, times a rate."""

    def __init__(self, per_byte):
        self.per_byte = per_byte
        self.lanes = {"data": SimpleNamespace(ranks=4)}

    def seconds(self, kind, n_bytes, group):
        return n_bytes * self.per_byte * (2 if kind == "all_reduce" else 1)


def passes(config, forward=1.0):
    size = config.parallel.pipeline_model_parallel_size
    return run_pipeline(
        Pipeline(
            config.parallel.schedule,
            size,
            config.parallel.num_chunks,
            config.num_micro_batches(),
            StageTimes(
                (forward,) * config.parallel.num_stages, (2 * forward,) * config.parallel.num_stages
            ),
        )
    )


def exchanged(config, links, *, hides=True, last=0.0):
    """Return what data parallelism adds to passes whose own messages only delay the last sums."""
    none = PassSeconds(0.0, 0.0, 0.0)
    stage = StageSeconds(none, none, none, (0.0, 0.0, 0.0), last=last)
    stages = [stage] * config.parallel.num_stages
    return exchange(config, of(config), links, passes(config), stages, hides=hides)


def of_equal_layers(*flags):
    """Return a run of four layers, beside which nothing weighs but the vocabulary."""
    return run(
        "--disable-bias-linear --num-layers 4 --vocab-size 1 --make-vocab-size-divisible-by 1",
        "--position-embedding-type none --normalization rmsnorm --num-key-value-heads 8",
        *flags,
    )


@given(st.floats(0.01, 100.0))
def test_gradients_behind_the_last_pass_in_closed_form(seconds):
    """Gradients behind the last pass have a closed form.

    Four equal layers have theirs after each quarter of the last pass of two seconds. Links slower
    than that are busy from the end of the first quarter on.
    """
    config = of_equal_layers(
        "--world-size 2 --global-batch-size 4 --zero-reduce-bucket-size 262144"
    )
    links = Links(seconds / (4 * parameters_of(of(config), *stages_of(config))))
    result = exchanged(config, links)
    assert 0 < result.reduced <= seconds
    if seconds > 10:
        assert result.reduced == pytest.approx(seconds - 2.0 * (1 - 1 / 4), rel=1e-6)
    off = dataclasses.replace(
        config, engine=dataclasses.replace(config.engine, overlap_grad_reduce=False)
    )
    assert exchanged(off, links).reduced == pytest.approx(seconds)
    assert exchanged(config, links, hides=False).reduced == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("fields", "hidden"),
    [
        ("--zero-stage 2 --zero-reduce-bucket-size 262144", 1.5),
        ("--zero-stage 3", 0.5),
        ("--zero-stage 3 --zero-state-shard-size 2", 0.5),
        ("--zero-stage 3 --no-overlap-grad-reduce", 0.0),
    ],
)
def test_sums_beyond_the_inner_ranks_begin_two_buckets_later(fields, hidden):
    """Sums beyond two inner ranks take half of the bytes, from the third complete bucket on.

    Four equal layers have their gradients after each quarter of the last pass of two seconds. A
    bucket is a layer with stage 3, and less than a third of one with stage 2.
    """
    config = of_equal_layers("--world-size 4 --global-batch-size 8 --zero-shard-size 2", fields)
    links = Links(1e-4)
    seconds = 1e-4 * 4 * parameters_of(of(config), *stages_of(config)) / 2
    if "zero-state-shard-size" in fields:
        seconds *= 2  # an all-reduce among the copies
    result = exchanged(config, links)
    assert result.reduced == pytest.approx(seconds - hidden)
    shown = exchanged(config, links, hides=False)
    assert shown.reduced == pytest.approx(seconds)
    # sums over the inner ranks that arrive after the last pass delay only what begins after them
    delayed = exchanged(config, links, last=0.5)
    assert delayed.reduced == pytest.approx(seconds - hidden if hidden else seconds + 0.5)
    assert exchanged(config, Links(0.0), last=0.5).reduced == pytest.approx(0.5)


@pytest.mark.parametrize("early", ["--overlap-grad-reduce", "--no-overlap-grad-reduce"])
def test_a_step_of_stage_3_waits_for_its_first_weights_and_its_last_sums(early):
    """The embedding is gathered for a step's first pass, and reduced after its last, beside nothing.

    In between it is gathered beside the first layer. The sum of the vectors, sent before it, is
    hidden by its backward pass, unless all sums begin after that.
    """
    sizes = "--vocab-size 4096 --world-size 4 --global-batch-size 8"
    config = of_equal_layers(sizes, "--zero-stage 3", early)
    traced, (stage,) = of(config), stages_of(config)
    rates = rates_of(FRONTIER, "bfloat16")
    plan = plan_in_passes(config, traced, stage)
    links = Links(1e-9 * stage_seconds(traced, stage, rates, None).forward_s)
    timing = stage_seconds(traced, stage, rates, links.seconds, plan=plan)
    hidden = config.model.hidden_size
    table = 4096 * hidden
    vectors = ("--no" in early) * (4 * 2 + 1) * hidden
    assert timing.first == pytest.approx(2 * table * links.per_byte)
    assert timing.last == pytest.approx(4 * (table + vectors) * links.per_byte)


def test_sums_of_stage_2_begin_within_a_layer():
    """Buckets of a layer are sent as its backward pass completes them, one beside the next.

    On links that need half of the time of the passes only the last one is waited for.
    """
    buckets = "--zero-stage 2 --zero-reduce-bucket-size 262144"
    config = of_equal_layers("--world-size 4 --global-batch-size 8", buckets)
    traced, (stage,) = of(config), stages_of(config)
    rates = rates_of(FRONTIER, "bfloat16")
    plan = plan_in_passes(config, traced, stage)
    alone = stage_seconds(traced, stage, rates, None).backward_s
    links = Links(alone / 2 / (4 * parameters_of(traced, stage)))
    timing = stage_seconds(traced, stage, rates, links.seconds, plan=plan)
    largest = max(bucket.elements for bucket in plan.buckets)
    assert len(plan.buckets) > 3 * stage.layers
    assert 0 <= timing.backward.shared < 1.1 * 4 * largest * links.per_byte


def test_experts_are_sent_after_the_other_weights_of_their_layer():
    """Links that are fast enough are free again before the last layer's sums."""
    config = run(
        "--world-size 4 --global-batch-size 8 --num-layers 4 --num-experts 4 --vocab-size 1",
        "--zero-reduce-bucket-size 300000 --make-vocab-size-divisible-by 1",
        "--position-embedding-type none",
    )
    traced = of(config)
    layer = sum(p.elements for p in traced.layer.parameters)
    links = Links(0.4 / (4 * layer))
    result = exchanged(config, links)
    assert 0 < result.reduced < 0.45


def test_new_weights_are_waited_for_by_the_layers_that_need_them():
    """New weights are awaited by the layers that need them.

    The last stage begins p - 1 passes later, so that much of its gather is hidden anyway.
    """
    config = run(
        "--world-size 8 --pipeline-model-parallel-size 4 --global-batch-size 16",
        "--no-overlap-param-gather --untie-embeddings-and-output-weights",
        "--zero-reduce-bucket-size 100000",
    )
    elements = [parameters_of(of(config), stage) for stage in stages_of(config)]
    links = Links(1e-6)
    result = exchanged(config, links)
    assert result.gathered == pytest.approx(max(2e-6 * n - i for i, n in enumerate(elements)))
    late = dataclasses.replace(
        config, engine=dataclasses.replace(config.engine, overlap_param_gather=True)
    )
    overlapped = exchanged(late, links)
    assert 0 < overlapped.gathered < result.gathered


def test_stage_0_sums_everywhere_and_gathers_nothing():
    config = run("--world-size 4 --global-batch-size 8")
    zero = run("--world-size 4 --global-batch-size 8 --zero-stage 0")
    links = Links(1e-9)
    one, all_of_it = (exchanged(c, links, hides=False) for c in (config, zero))
    assert all_of_it.reduced == pytest.approx(2 * one.reduced) and all_of_it.gathered == 0
    assert one.gathered == pytest.approx(0.5 * one.reduced)
    alone = run("--global-batch-size 8")
    assert exchanged(alone, links) == (0.0, 0.0)
