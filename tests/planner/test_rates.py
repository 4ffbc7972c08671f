"""Seconds of a device's work: published points, interpolation, assumptions, and sources."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import ConfigError
from megatron.kernels.cost import Attention
from megatron.planner.cluster import known_clusters, load_cluster
from megatron.planner.compute import (
    ASSUMED,
    DTYPES,
    MEASURED,
    Figure,
)
from megatron.planner.rates import DeviceRates, size_of

FRONTIER = load_cluster("frontier")


def tflops(rates, m, n, k):
    return 2.0 * m * n * k / rates.product_s(m, n, k) / 1e12


def with_products(points, peak=200.0, kernel_s=0.0, gb_per_s=1e9, **more):
    """Return a machine of which only these products are known; nothing else takes their time."""
    figures = [
        Figure("products.float16", points, MEASURED, "a test"),
        Figure("kernel_s", ((kernel_s,),), MEASURED, "a test"),
        Figure("memory.copy", ((1.0, gb_per_s),), MEASURED, "a test"),
    ]
    machine = replace(FRONTIER, compute={}, peak_tflops={"float16": peak}, **more)
    return DeviceRates(machine.with_figures(figures), "float16")


# -- every figure and where it is from -------------------------------------------------------------


@pytest.mark.parametrize("name", known_clusters())
@pytest.mark.parametrize("dtype", DTYPES)
def test_measured_rates_of_attention_come_out_as_they_were_put_in(name, dtype):
    """Rates that fall as sequences grow, as on A100 by 2 %, are averaged with their neighbours."""
    cluster = load_cluster(name)
    rates = DeviceRates(cluster, dtype)
    for backward in (False, True):
        figure = cluster.compute[f"attention.{dtype}.{'backward' if backward else 'forward'}"]
        for seq, head, rate in figure.points:
            operations = (5.0 if backward else 2.0) * 16 * 8 * seq * seq * head
            seconds = rates.attention_s(Attention(8, 16, int(seq), int(head), backward=backward))
            falls = max(r for s, d, r in figure.points if d == head and s <= seq) / rate - 1
            rises = rate / min(r for s, d, r in figure.points if d == head and s >= seq) - 1
            most = max(falls, rises, 1e-6)
            assert operations / seconds / 1e12 == pytest.approx(rate, rel=most)


# -- products between the points -------------------------------------------------------------------


CUBES = {4096.0: 101.5, 8192.0: 106.5}


def test_between_two_points_time_is_arithmetic_and_traffic():
    """Two points determine the seconds per operation and per element.

    Any shape between them follows, however long its sides.
    """
    system = np.array([[2 * s**3, 3 * s**2] for s in CUBES])
    seconds = np.array([2 * s**3 / (rate * 1e12) for s, rate in CUBES.items()])
    operation, element = np.linalg.solve(system, seconds)
    rates = with_products(tuple((s, s, s, rate) for s, rate in CUBES.items()))
    for m, n, k in (
        (2048, 36864, 12288),
        (4096, 4096, 16384),
        (2048, 9216, 12288),
        (2048, 12288, 3072),
        (700, 90, 99),
    ):
        expected = operation * 2 * m * n * k + element * (m * n + m * k + n * k)
        assert rates.product_s(m, n, k) == pytest.approx(expected)
    # Large products approach the best rate of all shapes, 115.3, which was not used to fit.
    assert 106.5 < tflops(rates, 1 << 17, 1 << 17, 1 << 17) < 115.3


def test_a_product_takes_a_kernel_its_operations_and_at_least_the_time_of_its_bytes():
    """The seconds of points include that of a kernel, which does not grow with the product.

    A product of one row has two operations and two bytes for each weight. On a CPU the rates hold.
    """
    start = 50e-6
    flat = 100.0  # of operations alone

    def seconds(side):
        return start + 2 * side**3 / (flat * 1e12)

    points = [(s, s, s, 2 * s**3 / seconds(s) / 1e12) for s in (512.0, 1024.0, 2048.0, 4096.0)]
    fastest = (32768.0, 32768.0, 32768.0, flat)
    rates = with_products((*points, fastest), kernel_s=start, gb_per_s=1000.0)
    for m, n, k, rate in points:
        assert tflops(rates, int(m), int(n), int(k)) == pytest.approx(rate)
    assert tflops(rates, 32768, 32768, 32768) == pytest.approx(flat, rel=1e-4)
    assert rates.product_s(700, 5000, 3000) == pytest.approx(start + 2 * 700 * 15e6 / 1e14)
    batched = rates.product_s(512, 512, 512, batch=100) - start
    assert batched == pytest.approx(100 * (seconds(512) - start))
    row = rates.product_s(1, 8192, 8192)
    assert row == pytest.approx(start + 2 * (8192**2 + 2 * 8192) / 1e12)
    cpu = with_products((fastest,), gb_per_s=1000.0, device_type="cpu")
    assert cpu.product_s(1, 8192, 8192) == pytest.approx(2 * 8192**2 / 1e14)


@pytest.mark.parametrize(
    ("m", "n", "k", "published", "least"),
    [
        (128, 12288, 5376, 352.6, 0.65),
        (128, 6144, 4096, 307.9, 0.65),
        (256, 6144, 4096, 544.3, 0.65),
        (2048, 2048, 13312, 794.5, 0.8),
        (6144, 2816, 17920, 792.1, 0.8),
    ],
)
def test_published_products_that_the_points_of_a_dgx_do_not_have(m, n, k, published, least):
    """Published rates of H100 products in bf16 that the points of a DGX lack, in short runs.

    The sources are torch's in vLLM's benchmarks (pull requests 49363 and 17126) and the best shapes
    of ml-engineering.

    The points are sustained rates of cubes, 0.88 of those in short runs. The law has flat products
    of a third of the smallest cube's size at two thirds of their rate.
    """
    rate = tflops(DeviceRates(load_cluster("dgx-h100"), "bfloat16"), m, n, k)
    assert least * published < rate < published


@given(
    machine=st.sampled_from(["frontier", "lumi"]),
    dtype=st.sampled_from(DTYPES),
    sides=st.tuples(*[st.integers(64, 60000)] * 3),
    longer=st.integers(0, 2),
    more=st.integers(1, 5000),
)
def test_a_longer_side_takes_longer_at_a_higher_rate(machine, dtype, sides, longer, more):
    rates = DeviceRates(load_cluster(machine), dtype)
    grown = tuple(side + more * (i == longer) for i, side in enumerate(sides))
    a = rates.product_s(*sides)
    b = rates.product_s(*grown)
    assert b >= a * (1 - 1e-12)
    assert tflops(rates, *grown) >= tflops(rates, *sides) * (1 - 1e-12)
    assert all(
        rates.product_s(*order) == pytest.approx(a) for order in itertools.permutations(sides)
    )


points_of_sides = st.lists(
    st.tuples(
        *[st.sampled_from([128.0, 300.0, 512.0, 1000.0, 2048.0, 7000.0])] * 3, st.floats(1.0, 150.0)
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda point: point[:3],
)


@given(points=points_of_sides)
def test_any_points_come_back_and_nothing_beats_the_peak(points):
    """Any points are reproduced, and nothing exceeds the peak by more than the points differ.

    They may contradict each other: of one size at different rates, or slower when larger.
    """
    rates = with_products(tuple(points))
    for m, n, k, rate in points:
        assert tflops(rates, int(m), int(n), int(k)) == pytest.approx(rate)
    given_rates = [rate for *_, rate in points]
    most = 200 * 1.0001 * max(given_rates) / min(given_rates)
    for side in (64, 250, 513, 4000, 1 << 16):
        assert 0 < tflops(rates, side, side, side) <= most


def test_a_point_speaks_for_its_neighbours_only():
    """A point affects only its neighbours.

    A skinny product at half the rate of the line pulls nearby ones, not distant ones.
    """
    line = ((1024.0, 1024.0, 1024.0, 80.0), (4096.0, 4096.0, 4096.0, 100.0))
    skinny = (32768.0, 683.0, 683.0, 45.0)
    assert size_of(*skinny[:3]) == pytest.approx(1014, rel=0.02)
    plain = with_products(line)
    rates = with_products((*line, skinny))
    expected = plain.product_s(32000, 690, 690)
    assert rates.product_s(32000, 690, 690) > 1.6 * expected
    assert rates.product_s(4000, 4000, 4000) == pytest.approx(
        plain.product_s(4000, 4000, 4000), rel=0.06
    )


# -- attention, memory, optimizer ------------------------------------------------------------------


def test_attention_counts_half_of_the_pairs():
    rates = DeviceRates(FRONTIER, "bfloat16")
    causal = rates.attention_s(Attention(2, 24, 2048, 128, backward=False))
    assert causal == pytest.approx(2 * 2 * 24 * 2048**2 * 128 / 55e12)
    assert rates.attention_s(Attention(4, 12, 2048, 128, backward=False)) == pytest.approx(causal)
    assert rates.attention_s(Attention(2, 24, 2048, 128, backward=True)) == pytest.approx(
        2.5 * causal * 55 / 40
    )
    # One rate is known: it holds for all lengths and head sizes.
    assert rates.attention_s(Attention(2, 24, 4096, 64, backward=False)) == pytest.approx(
        2 * causal
    )


@pytest.mark.parametrize("peaks", [{}, {"float32": 100.0}])
def test_attention_of_lengths_far_beyond_the_measured_ones(peaks):
    """Times grow with length, and rates stay within the peak.

    Where rates grow faster than lengths, as small measured ones do, the extrapolated line would end
    at zero time.
    """
    points = ((256.0, 64.0, 2.0), (512.0, 64.0, 10.0))
    figures = [
        Figure("products.float32", ((512.0, 512.0, 512.0, 50.0),), MEASURED, "a test"),
        *(
            Figure(f"attention.float32.{direction}", points, MEASURED, "a test")
            for direction in ("forward", "backward")
        ),
    ]
    cluster = replace(FRONTIER.with_figures(figures), peak_tflops=peaks)
    rates = DeviceRates(cluster, "float32")
    times = [
        rates.attention_s(Attention(8, 8, seq, 64, backward=False))
        for seq in (512, 1024, 8192, 131072)
    ]
    assert times == sorted(times) and times[1] >= (2.0 - 1e-9) * times[0]
    assert 64 * 2.0 * 131072**2 * 64 / times[-1] / 1e12 <= peaks.get(
        "float32", 10.0 * 131072 / 512
    ) * (1 + 1e-9)


def test_memory_by_bytes_and_kind_of_work():
    figures = [
        Figure("memory.copy", ((1e3, 10.0), (1e5, 30.0)), MEASURED, "a test"),
        Figure("memory.norm", ((1.0, 5.0),), MEASURED, "a test"),
        Figure("kernel_s", ((1e-6,),), MEASURED, "a test"),
    ]
    rates = DeviceRates(FRONTIER.with_figures(figures), "float32")
    assert rates.memory_s(1e4) == pytest.approx(1e-6 + 1e4 / 20e9)  # halfway over the logarithm
    assert rates.memory_s(1e2) == pytest.approx(1e-6 + 1e2 / 10e9)
    assert rates.memory_s(1e9) == pytest.approx(1e-6 + 1e9 / 30e9)
    assert rates.memory_s(4e4, kernels=4) == pytest.approx(4 * rates.memory_s(1e4))
    assert rates.memory_s(1e4, kind="norm") == pytest.approx(1e-6 + 1e4 / 5e9)
    assert rates.memory_s(1e4, kind="loss") == rates.memory_s(1e4)


# -- machines of which less is known ---------------------------------------------------------------


def test_a_machine_without_figures_gets_shares_of_its_peak():
    rates = DeviceRates(replace(FRONTIER, compute={}), "bfloat16")
    assert 0.5 * 191.5 < tflops(rates, 8192, 8192, 8192) < 0.65 * 191.5
    assert tflops(rates, 1024, 1024, 1024) < tflops(rates, 2048, 2048, 2048)
    rates.attention_s(Attention(1, 8, 2048, 128, backward=True))
    rates.memory_s(1e9)
    rates.update_s(1e9, 30)
    published = {used.figure for used in rates.used if used.basis != ASSUMED}
    assert published == {"launch_s"}  # of the host, on any machine


# -- the slowest of many devices -------------------------------------------------------------------


@pytest.mark.parametrize(("devices", "micro_batches"), [(32, 1), (64, 4), (512, 2)])
def test_the_slowest_of_many_devices_as_in_a_simulation(devices, micro_batches):
    """Devices that are slower in all passes, or in some of them, as independent normal draws."""
    draws = np.random.default_rng(1).normal(size=(8000, micro_batches, devices))
    lasting = 0.01 * draws[:, 0].max(axis=1).mean()
    passing = 0.01 * draws.mean(axis=1).max(axis=1).mean()

    def slowdown(**figures):
        varied = [Figure(name, ((value,),), MEASURED, "a test") for name, value in figures.items()]
        rates = DeviceRates(FRONTIER.with_figures(varied), "float16")
        assert rates.slowdown_of_slowest(1, micro_batches) == 0.0
        return rates.slowdown_of_slowest(devices, micro_batches)

    assert slowdown(device_variation=0.01, pass_variation=0.0) == pytest.approx(lasting, rel=0.01)
    assert slowdown(device_variation=0.0, pass_variation=0.01) == pytest.approx(passing, rel=0.01)
    # a check before the job leaves out devices that are far behind
    assert slowdown(device_variation=0.2, pass_variation=0.0) == 0.08


def test_a_dtype_of_which_nothing_is_known():
    cluster = replace(FRONTIER, compute={}, peak_tflops={"float32": 1.0})
    with pytest.raises(ConfigError, match=r"frontier.toml.*products.float16.*float32"):
        DeviceRates(cluster, "float16")
    DeviceRates(cluster, "float32")
