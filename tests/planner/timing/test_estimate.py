"""Estimates of whole steps: parts, bounds, and closed forms of the machine's figures."""

import dataclasses
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.model.gpt import model_sizes
from megatron.planner.channels import Channels
from megatron.planner.cluster import load_cluster
from megatron.planner.compute import is_rate, is_time
from megatron.planner.rates import rates_of
from megatron.planner.timing import COMPONENTS, estimate, explain, folded_seconds
from megatron.planner.timing.estimate import busiest_rank
from tests.helpers.examples import examples
from tests.planner.layouts import planned
from tests.planner.timing.configs import configs, run, undisturbed, with_figures

FRONTIER = load_cluster("frontier")
# The same node as if its devices were processes that share four cores.
CROWDED = dataclasses.replace(FRONTIER, shared_cores=4, device_type="cpu")
MACHINES = {"frontier": FRONTIER, "crowded": CROWDED}


MACHINES["busy host"] = with_figures(FRONTIER, layer_overhead_s=1e-4)


def folded(estimated):
    """Return the seconds that a search folds a configuration's costs to."""
    config = estimated.config
    placement = estimated.placement
    channels = Channels(config, placement.cluster, placement)
    return folded_seconds(config, placement.cluster, channels)


# -- of any configuration --------------------------------------------------------------------------


def slowed(factor):
    """Return Frontier with all rates divided, and all latencies multiplied; shares stay."""
    rates = {
        name: {key: rate / factor for key, rate in getattr(FRONTIER, name).items()}
        for name in ("links", "collective_gb_per_s", "peak_tflops")
    }
    compute = {
        name: figure.scaled(factor if is_time(name) else 1 / factor if is_rate(name) else 1)
        for name, figure in FRONTIER.figures.items()
    }
    nic = FRONTIER.nic_gb_per_s / factor
    return dataclasses.replace(FRONTIER, compute=compute, nic_gb_per_s=nic, **rates)


@pytest.mark.slow
@pytest.mark.timeout(50 * examples(6).max_examples)  # it records the traces of each example
@examples(6)
@given(config=configs(), factor=st.sampled_from([0.25, 2.0, 8.0]))
def test_parts_add_up(config, factor):
    """Parts add up on every machine, near the folded cost, and to n times on one n times as slow.

    The terms that the folded cost leaves out weigh most in small steps with few micro-batches.
    Nothing is left that is not a time of the machine.
    """
    for name, machine in MACHINES.items():
        result = estimate(config, machine)
        assert tuple(result.breakdown) == COMPONENTS
        assert all(seconds >= 0 for seconds in result.breakdown.values())
        after = sum(
            result.breakdown[component]
            for component in ("data-parallel", "optimizer", "stragglers")
        )
        overhead_s = rates_of(machine, config.precision.dtype_name).step_overhead_s
        if name == "busy host":
            rank = busiest_rank(result.run)
            rank_stages = result.stage_seconds[rank :: config.parallel.pipeline_model_parallel_size]
            of_passes = config.num_micro_batches() * sum(
                sum(stage.overhead) for stage in rank_stages
            )
            assert (
                result.breakdown["host"] == pytest.approx(of_passes + overhead_s) and of_passes > 0
            )
        assert result.run.makespan + after + overhead_s == pytest.approx(result.seconds)
        assert 0 < result.mfu <= result.hfu < 1
        tokens = config.batch.global_batch_size * config.model.seq_length
        assert result.tokens_per_s == pytest.approx(tokens / result.seconds)
        assert 0.6 < folded(result) / result.seconds < 1.5
    fast = estimate(config, FRONTIER)
    slower = slowed(factor)
    slow = estimate(config, slower, dataclasses.replace(fast.placement, cluster=slower))
    assert slow.seconds == pytest.approx(factor * fast.seconds, rel=1e-6)
    assert slow.mfu == pytest.approx(fast.mfu, rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "off"),
    [
        ("--pipeline-model-parallel-size 8", 0.01),
        ("--num-layers-per-virtual-pipeline-stage 2", 0.02),
        ("--pipeline-model-parallel-size 8 --enable-zbh1-pipeline", 0.02),
        # with fewer micro-batches than ranks, a rank waits between its stages, and for messages
        ("--num-layers-per-virtual-pipeline-stage 2 --global-batch-size 32", 0.16),
        ("--pipeline-schedule zb-v --global-batch-size 32", 0.12),
        ("--zero-stage 0", 0.02),
        ("--zero-stage 2 --zero-shard-size 4", 0.02),
        ("--sequence-parallel --tp-comm-overlap --micro-batch-size 2", 0.02),
    ],
)
def test_layouts_are_ranked_by_about_their_time(flags, off):
    config = planned(
        "--preset gpt-22b --world-size 128 --global-batch-size 640 --recompute-granularity none",
        "--pipeline-model-parallel-size 4 --tensor-model-parallel-size 2",
        flags,
    )
    result = estimate(config, FRONTIER)
    assert folded(result) == pytest.approx(result.seconds, rel=off)


# -- one by one ------------------------------------------------------------------------------------


def test_bf16_moments_and_an_average_count_in_the_update():
    """Bytes of the gradient norm (4), AdamW (4 + 24) and the bf16 weights (2; torch reads fp32: 6).

    An average has 8 in the kernel's pass, else 12; a bf16 moment 4 less in it, else 96 - 4 more, and
    8 for scaled gradients.
    """

    def update_s(flags=""):
        return estimate(run(flags), FRONTIER).breakdown["optimizer"]

    plain = update_s()
    narrow = "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
    for fields, n_bytes in (
        (narrow, 34 - 8),
        ("--exp-avg-sq-dtype bf16", 34 - 4),
        ("--ema-decay 0.9", 34 + 8),
        ("--ema-decay 0.9 --ema-interval 4", 34 + 2),
        ("--ema-decay 0.9 --qk-clip", 34 + 12),
        ("--ema-decay 0.9 --optimizer-implementation torch", 38 + 12),
        (f"{narrow} --optimizer-implementation torch", 38 - 8 + 2 * 96 + 8),
    ):
        assert update_s(fields) == pytest.approx(plain * n_bytes / 34), fields


def test_the_update_is_divided_over_replicas_by_zero_alone():
    def update_s(replicas, stage):
        config = run(f"--world-size {replicas} --global-batch-size {replicas} --zero-stage {stage}")
        return estimate(config, FRONTIER).breakdown["optimizer"]

    assert update_s(8, 0) == update_s(2, 0)
    assert update_s(8, 1) == pytest.approx(update_s(2, 1) / 4, rel=0.02)


def test_tensor_messages_are_hidden_only_where_they_may_be():
    """Tensor messages are hidden only where possible.

    Layers without sequence parallelism wait for two all-reduces forward; backward each hides behind
    a weight gradient.
    """
    machine = undisturbed(FRONTIER)
    fields = "--tensor-model-parallel-size 8 --hidden-size 8192 --seq-length 2048"
    shown = run(f"{fields} --no-async-tensor-model-parallel-allreduce")
    hidden = run(fields)
    one = Channels(hidden, machine, estimate(hidden, machine).placement).seconds(
        "all_reduce", 2048 * 8192 * 2
    )
    stages = [estimate(config, machine).stage_seconds[0] for config in (hidden, shown)]
    behind = rates_of(machine, "bfloat16").product_s(8192 // 8 * 3, 8192, 2048)
    assert one < behind, "a message shorter than the product, so that all of it can hide"
    ends = 1  # the embedding's sum, and forward nothing of the output layer
    assert stages[0].forward.waited == pytest.approx((2 * 8 + ends) * one)
    assert stages[1].backward.waited - stages[0].backward.waited >= 2 * 8 * one
    chunks = run(f"{fields} --tp-comm-overlap")
    waited = estimate(chunks, machine).stage_seconds[0].forward.waited
    assert waited < 0.6 * stages[0].forward.waited


def test_ranks_that_share_cores_take_turns():
    """Ranks that share cores take turns.

    With four replicas on two cores passes, gradients and optimizer take twice as long; the host's
    part does not.
    """
    config = run("--world-size 4 --global-batch-size 8")
    alone = dataclasses.replace(FRONTIER, device_type="cpu")
    shared = dataclasses.replace(alone, shared_cores=2)
    one = estimate(config, alone)
    two = estimate(config, shared)
    assert two.run.makespan == pytest.approx(2 * one.run.makespan)
    for component, times in (("forward", 2), ("optimizer", 2), ("host", 1)):
        assert two.breakdown[component] == pytest.approx(times * one.breakdown[component])
    assert two.breakdown["bubble"] == pytest.approx(0, abs=1e-9)
    assert folded(two) - folded(one) == pytest.approx(two.seconds - one.seconds, rel=0.05)


DISTURBED = dict(
    launch_s=1e-3, speed_beside_messages=0.5, device_variation=0.02, pass_variation=0.03
)


def test_a_step_waits_for_its_slowest_device():
    """Of 16 devices the slowest is 1.766 standard deviations behind (tables of order statistics).

    Passes vary from one micro-batch to the next: over four of them half as much. A step waits with
    its computations, their recomputation, the bubble and the update, not with messages.
    """
    config = run(
        "--world-size 16 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2",
        "--global-batch-size 16 --recompute-granularity full",
    )
    assert config.num_micro_batches() == 4
    varied = with_figures(undisturbed(FRONTIER), device_variation=0.02, pass_variation=0.03)
    plain = estimate(config, undisturbed(FRONTIER))
    slow = estimate(config, varied)
    of_devices = sum(
        plain.breakdown[name]
        for name in ("forward", "backward", "recompute", "bubble", "optimizer")
    )
    waited = slow.breakdown["stragglers"]
    assert waited == pytest.approx(1.766 * math.hypot(0.02, 0.03 / 2) * of_devices, rel=0.01)
    assert slow.seconds - plain.seconds == pytest.approx(waited)
    assert folded(slow) - folded(plain) == pytest.approx(waited, rel=0.25)


def test_neither_a_cpu_nor_a_graph_waits_for_kernels_to_start():
    """Processes that share cores have no clock of their own that a slow one could be behind."""
    config = run("--world-size 4 --tensor-model-parallel-size 2 --global-batch-size 8")
    cpu = dataclasses.replace(FRONTIER, device_type="cpu")
    slow = estimate(config, with_figures(cpu, **DISTURBED))
    assert slow.breakdown == estimate(config, undisturbed(cpu)).breakdown
    eager = "--attention-dropout 0 --hidden-dropout 0"
    graphs = f"{eager} --cuda-graph-impl local"
    one = with_figures(undisturbed(FRONTIER), launch_s=1e-3)
    recorded = estimate(run(graphs), one)
    assert recorded.seconds == pytest.approx(estimate(run(eager), undisturbed(FRONTIER)).seconds)
    assert estimate(run(eager), one).seconds > 2 * recorded.seconds
    names = {used.figure for used in recorded.confidence.used}
    assert not names & {"launch_s", "speed_beside_messages", "device_variation"}


def test_the_use_of_the_peak():
    result = estimate(run("--world-size 16 --global-batch-size 32"), FRONTIER)
    expected = model_sizes(result.config).flops_per_token() * 32 * 512
    assert result.model_flops == expected == result.hardware_flops
    assert result.mfu == pytest.approx(expected / (result.seconds * 16 * 191.5e12))
    assert result.confidence.worst == "assumed"


# -- the arithmetic --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [
        "--global-batch-size 8 --recompute-granularity full --recompute-num-layers 2",
        "--recompute-granularity selective --recompute-modules mlp_act layernorm "
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --enable-zbh1-pipeline "
        "--world-size 16 --global-batch-size 32",
    ],
)
def test_the_explanation_adds_up(more):
    """The explanation adds up: printed terms give the printed sums of the estimate."""
    result = estimate(run(more), FRONTIER)
    tables = {table.title: table for table in explain(result)}
    for title, table in tables.items():
        if title.endswith("on one GCD"):
            *terms, total = [row for row in table.rows if not row[0].startswith("message")]
            assert sum(_seconds(row[2]) for row in terms) == pytest.approx(
                _seconds(total[2]), rel=2e-3
            ), title
    step = {row[0]: row[-1] for row in tables["one step"].rows}
    printed = {
        component: _seconds(step[component]) for component in COMPONENTS if component in step
    }
    assert sum(printed.values()) == pytest.approx(_seconds(step["step"]), rel=2e-3)
    assert printed == pytest.approx(
        {component: value for component, value in result.breakdown.items() if value}, rel=2e-3
    )
    assert step["MFU"] == f"{100 * result.mfu:.1f} %"


def test_context_parallel_ranks_are_not_counted_as_replicas():
    """The formulas of devices and micro-batches have the values beside them."""
    config = run("--context-parallel-size 2 --world-size 8 --global-batch-size 16")
    (table,) = (t for t in explain(estimate(config, FRONTIER)) if t.title == "one step")
    for name, formula, value in (
        row for row in table.rows if row[0] in ("devices", "micro-batches")
    ):
        first, *factors = map(int, re.findall(r"\d+", formula))
        product = math.prod(factors)
        assert int(value) == (first * product if name == "devices" else first / product)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_listed_messages_of_zero_are_all_that_a_step_waits_for(stage):
    """On a CPU nothing is hidden: the messages that are listed are the data-parallel part."""
    zero = f"--zero-stage {stage} --zero-shard-size {4 if stage > 1 else 0}"
    config = run("--world-size 16 --global-batch-size 32 --zero-reduce-bucket-size 300000", zero)
    result = estimate(config, dataclasses.replace(FRONTIER, device_type="cpu"))
    tables = {table.title: table.rows for table in explain(result)}
    listed = {
        title: sum(_seconds(row[2]) for row in rows if row[0].startswith("message: data"))
        for title, rows in tables.items()
    }
    passes = sum(s for title, s in listed.items() if title.startswith("messages of ZeRO in one"))
    ends = listed["messages at the end of a step, pipeline rank 0"]
    assert (passes > 0) == (stage > 1) and ends > 0
    assert result.breakdown["data-parallel"] == pytest.approx(2 * passes + ends, rel=1e-3)
    row = next(row for row in tables["one step"] if row[0] == "ZeRO")
    divided = {1: "", 2: "gradients over 4 ranks, ", 3: "weights and gradients over 4 ranks, "}
    assert row[1:] == (f"{divided[stage]}states over 16", f"stage {stage}")


def _seconds(text):
    number, unit = text.split()
    return float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]


def test_an_estimate_rests_on_its_own_figures_only():
    """An estimate uses only its own figures.

    Whatever was asked of the machine before, explicit attention uses no rate of attention kernels.
    """
    estimate(run("--pipeline-model-parallel-size 2"), FRONTIER)
    result = estimate(run("--attention-backend unfused"), FRONTIER)
    names = {used.figure for used in result.confidence.used}
    assert "products.bfloat16" in names and not any(name.startswith("attention") for name in names)
    assert not any("message" in name or "hop" in name for name in names)
    pipeline = estimate(run("--pipeline-model-parallel-size 2"), FRONTIER)
    assert {"attention.bfloat16.backward", "message_within_s"} <= {
        used.figure for used in pipeline.confidence.used
    }
