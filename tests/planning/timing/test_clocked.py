"""Seconds of passes: what hides messages, against closed forms."""
from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.planning.cluster import load_cluster
from megatron.planning.clocked import pass_seconds, rates_of, seconds_of
from megatron.planning.timing.linear import gathered_product, summed_product
from megatron.planning.timing.operations import Memory, Message, Post, Product, Steps, Wait
from megatron.planning.timing.shape import shape_of
from megatron.planning.stage import Stage, stage_seconds
from tests.planning.timing.configs import run

RATES = rates_of(load_cluster("frontier"), "bfloat16")
WORK = Product(512, 512, 512)
ONE = seconds_of(WORK, RATES)


@given(st.floats(0, 3), st.floats(0, 3))
def test_a_message_behind_a_computation(first, second):
    """Two messages that are posted at once follow each other; the device waits for what its work does not cover."""
    steps = (Post(Message("a", first), 1), Post(Message("b", second), 2), WORK, Wait(1), WORK, Wait(2))

    def seconds(_: str, size: float) -> float:
        return size * ONE

    found = pass_seconds(steps, RATES, seconds)
    one = max(1.0, first)
    assert found.total == pytest.approx(ONE * max(one + 1, first + second))
    assert found.compute == pytest.approx(2 * ONE) and found.left == 0.0
    assert found.waited == pytest.approx(found.total - 2 * ONE, abs=1e-12)
    shown = pass_seconds(steps, RATES, seconds, hides=False)
    assert shown.total == pytest.approx(ONE * (2 + first + second))
    assert pass_seconds(steps, RATES, None).total == pytest.approx(2 * ONE)


@pytest.mark.parametrize("message", [0.2, 0.9, 1.0, 3.0])
def test_products_in_chunks_in_closed_form(message):
    """n chunks whose message takes M and whose product takes C: M + (n - 1) max(M, C) + C, whichever comes first."""
    fields = dict(tensor_model_parallel_size=2, sequence_parallel=True, seq_length=2048, tp_comm_overlap=True)
    shape = shape_of(run(**fields), "cuda")
    gathered, summed = Steps(), Steps()
    gathered_product(gathered, shape, 1024, 512, keep=False)
    summed.wait(*summed_product(summed, shape, 1024, 512))
    c = RATES.product_s(512, 1024, 512)
    m = message * c
    for steps in (gathered.done(), summed.done()):
        only = tuple(step for step in steps if not isinstance(step, Memory))
        assert pass_seconds(only, RATES, lambda *_: m).total == pytest.approx(m + 3 * max(m, c) + c)


def test_halves_of_a_backward_pass_make_the_whole():
    """Without messages, and without the output layer, which a split pass does not cut into chunks."""
    shape = shape_of(run(tensor_model_parallel_size=2), "cuda")
    whole, halves = (stage_seconds(shape, Stage(3, True, False, split=split), RATES, None) for split in (False, True))
    assert halves.backward_s + halves.weight_s == pytest.approx(whole.backward_s)
    assert halves.weight_s > 0.15 * whole.backward_s and whole.weight_s == 0.0


def test_the_host_adds_to_each_layer():
    import dataclasses

    cluster = load_cluster("frontier")
    figure = dataclasses.replace(cluster.compute.figures["layer_overhead_s"], points=((1e-3,),))
    slower = rates_of(dataclasses.replace(cluster, compute=cluster.compute.with_figures([figure])), "bfloat16")
    shape, stage = shape_of(run(), "cuda"), Stage(8, True, True, groups_again=3, layers_again=8)
    plain, with_host = (stage_seconds(shape, stage, rates, None) for rates in (RATES, slower))
    assert with_host.forward_s - plain.forward_s == pytest.approx(8e-3)
    assert with_host.backward_s - plain.backward_s == pytest.approx(16e-3)
