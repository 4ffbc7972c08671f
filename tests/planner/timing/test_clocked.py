"""Seconds of passes: work that hides messages or waits for the host, against closed forms."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.engine.zero_plan import BucketInstruction, BucketOp
from megatron.kernels.cost import Product
from megatron.planner.cluster import load_cluster
from megatron.planner.events import GroupMessage, Pass, Post, Wait
from megatron.planner.rates import rates_of, seconds_of
from megatron.planner.stage import StageWork, ZeroStep
from megatron.planner.timing.passes import TimedPass, pass_seconds, stage_seconds, zero_waits
from megatron.planner.trace import trace
from tests.planner.timing.configs import run, undisturbed, with_figures

MACHINE = undisturbed(load_cluster("frontier"))
RATES = rates_of(MACHINE, "bfloat16")
WORK = Product(512, 512, 512)
ONE = seconds_of(WORK, RATES)


@given(st.floats(0, 3), st.floats(0, 3))
def test_a_message_behind_a_computation(first, second):
    """Messages of a group that are posted at once follow each other, those of two do not.

    The device waits for the part that its work does not cover.
    """

    def steps_with(group):
        posts = Post(GroupMessage("a", first), 1), Post(GroupMessage("b", second, group), 2)
        return Pass((*posts, WORK, Wait(1), WORK, Wait(2)), ("",) * 6)

    def seconds(_, size, group):
        return size * ONE

    steps = steps_with("tensor")
    one = max(1.0, first)
    apart = pass_seconds(steps_with("expert"), RATES, seconds)
    assert apart.total == pytest.approx(ONE * max(one + 1, second))
    timing = pass_seconds(steps, RATES, seconds)
    assert timing.total == pytest.approx(ONE * max(one + 1, first + second))
    assert timing.compute == pytest.approx(2 * ONE)
    assert timing.waited == pytest.approx(timing.total - 2 * ONE, abs=1e-12)
    shown = pass_seconds(steps, RATES, seconds, hides=False)
    assert shown.total == pytest.approx(ONE * (2 + first + second))
    assert pass_seconds(steps, RATES, None).total == pytest.approx(2 * ONE)


def slowed(work, message, speed):
    """Return the seconds of work that keeps this share of its speed until a message arrives."""
    if work <= speed * message:
        return work / speed
    return message + (work - speed * message)


@given(st.floats(0, 5), st.floats(0, 5), st.floats(0.1, 1.0))
def test_a_computation_is_slower_while_messages_are_in_flight(first, second, speed):
    """Two messages of different groups are in flight until the later one has arrived."""
    rates = rates_of(with_figures(MACHINE, speed_beside_messages=speed), "bfloat16")
    posts = Post(GroupMessage("a", first), 1), Post(GroupMessage("b", second, "expert"), 2)
    steps = Pass((*posts, WORK, Wait(1), Wait(2), WORK), ("",) * 6)

    def seconds(_, size, group):
        return size * ONE

    longer = max(first, second)
    timing = pass_seconds(steps, rates, seconds)
    expected = max(longer, slowed(1.0, longer, speed)) + 1
    assert timing.total == pytest.approx(ONE * expected)
    assert timing.compute == pytest.approx(2 * ONE)
    shown = pass_seconds(steps, rates, seconds, hides=False)
    assert shown.total == pytest.approx(ONE * (2 + first + second))


@pytest.mark.parametrize("message", [0.0, 0.5, 1.2, 1.9])
def test_a_pass_is_slower_while_messages_of_zero_are_in_flight(message):
    """A pass of one second sends a bucket ahead, which the next pass waits for.

    At half speed the message of 1.9 seconds still arrives before the end of the pass.
    """
    of = Pass((WORK,), ("",))
    gather = BucketInstruction(BucketOp.GATHER, 0)
    sends = ((gather, (GroupMessage("all_gather", 1, "data"),)),)
    step = ZeroStep("forward", of, (), (), sends, ((gather, ()),) * 0)
    passes = {of: TimedPass(1.0, ())}
    waits = zero_waits([step], passes, lambda *_: message, True, 0.5)
    assert waits.by_pass["forward"] == pytest.approx(slowed(1.0, message, 0.5) - 1.0)
    alone = zero_waits([step], passes, lambda *_: message, True)
    assert alone.by_pass["forward"] == 0.0


@pytest.mark.parametrize("message", [0.2, 0.9, 1.0, 3.0])
def test_products_in_chunks_in_closed_form(message):
    """n chunks with messages of M and products of C take M + (n - 1) max(M, C) + C.

    The order does not matter.
    """
    fields = (
        "--tensor-model-parallel-size 2 --sequence-parallel --seq-length 2048 --tp-comm-overlap"
    )
    forward = trace(run(fields), "cuda").layer.forward
    # An input that is gathered, an output that is summed.
    for name in ("query_key_value", "dense_4h_to_h"):
        of_it = [
            step
            for step, label in zip(forward.steps, forward.labels, strict=True)
            if label.endswith(name)
        ]
        only = tuple(step for step in of_it if isinstance(step, Product | Post | Wait))
        product = next(step for step in only if isinstance(step, Product))
        assert product.m == 512 and sum(isinstance(step, Product) for step in only) == 4
        c = RATES.product_s(*product[:3])
        m = message * c
        timing = pass_seconds(Pass(only, ("",) * len(only)), RATES, lambda *_, m=m: m)
        assert timing.total == pytest.approx(m + 3 * max(m, c) + c)


def test_halves_of_a_backward_pass_make_the_whole():
    """Halves of a backward pass make the whole.

    Messages are left out, and so is the output layer, which a split pass does not cut into chunks.
    """
    traced = trace(run("--tensor-model-parallel-size 2 --hidden-size 2048"), "cuda")
    unsplit, halves = (
        stage_seconds(traced, StageWork(3, True, False, split=split), RATES, None)
        for split in (False, True)
    )
    assert halves.backward_s + halves.weight_s == pytest.approx(unsplit.backward_s)
    assert halves.weight_s > 0.15 * unsplit.backward_s and unsplit.weight_s == 0.0


def test_the_host_adds_to_each_layer():
    slower = rates_of(with_figures(MACHINE, layer_overhead_s=1e-3), "bfloat16")
    traced = trace(run("--recompute-granularity full"), "cuda")
    stage = StageWork(8, True, True, recomputed=(3, 3, 2))
    plain, with_host = (stage_seconds(traced, stage, rates, None) for rates in (RATES, slower))
    assert with_host.forward_s - plain.forward_s == pytest.approx(8e-3)
    assert with_host.backward_s - plain.backward_s == pytest.approx(16e-3)


def test_a_pass_takes_at_least_the_time_to_start_its_kernels():
    """A slow host determines the time, a fast one has none; graphs are started in one call."""
    traced = trace(run("--recompute-granularity selective"), "cuda")
    stage = StageWork(3, False, False)
    ahead, back = (
        3 * sum(getattr(work, "kernels", 1) for work in passes.computations())
        for passes in (traced.layer.forward, traced.layer.backward)
    )
    assert ahead > 3 * 8 and back > 3 * 8  # products alone are twelve
    alone = stage_seconds(traced, stage, RATES, None)
    slow = with_figures(MACHINE, launch_s=0.5)
    bound = stage_seconds(traced, stage, rates_of(slow, "bfloat16"), None)
    assert bound.forward_s == pytest.approx(0.5 * ahead)
    assert bound.backward_s == pytest.approx(0.5 * back)
    fast = with_figures(MACHINE, launch_s=0.9 * alone.forward_s / ahead)
    assert stage_seconds(
        traced, stage, rates_of(fast, "bfloat16"), None
    ).forward_s == pytest.approx(alone.forward_s)
    graphs = rates_of(slow, "bfloat16", graphs=True)
    assert stage_seconds(traced, stage, graphs, None).forward_s == pytest.approx(alone.forward_s)
