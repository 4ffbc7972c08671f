"""Interleaving: the order of the samples of a blend, against exact fractions."""

from bisect import bisect_left
from contextlib import nullcontext
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.interleave import Interleaving
from tests.data.implementations import without_extension

WEIGHTS = {
    "one": [3.0],
    "two equal": [1.0, 1.0],
    "seven equal": [1 / 7] * 7,
    "300 equal": [2.0] * 300,
    "a millionth": [1.0, 1e-6, 0.25],
    "all sizes": [10.0 ** -(i % 7) for i in range(40)],
    "a hundred": [1.0 + i * i for i in range(100)],
    "300": [1.0 + (i * 7919) % 301 for i in range(300)],
}


@pytest.fixture(params=[nullcontext, without_extension], ids=["C++", "numpy"])
def implementation(request):
    with request.param():
        yield


def time(weight, number):
    """Return the double nearest to (number + 1/2) / weight."""
    return float(Fraction(2 * number + 1, 2) / Fraction(weight))


def position_of(weights, source, number):
    """Return how many samples precede sample `number` of `source`."""
    when = time(weights[source], number)
    return sum(
        bisect_left(range(2**51), (when, source), key=lambda j: (time(weights[other], j), other))
        for other in range(len(weights))
    )


def ask(interleaving, positions):
    sources, numbers = interleaving.find(np.array(positions, np.int64))
    assert sources.dtype == numbers.dtype == np.int64
    return list(zip(sources.tolist(), numbers.tolist(), strict=True))


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
def test_order_is_that_of_the_times(weights):
    interleaving = Interleaving(weights)
    normal = interleaving.weights.tolist()
    assert normal == pytest.approx(
        [float(Fraction(w) / sum(map(Fraction, weights))) for w in weights]
    )
    count = 1000
    horizon = count + len(weights)  # all samples of the first 1000 have earlier times
    samples = sorted(
        (when, source, number)
        for source, weight in enumerate(normal)
        for number in range(int(weight * horizon) + 2)
        if (when := time(weight, number)) < horizon
    )[:count]
    expected = [(source, number) for _, source, number in samples]
    assert len(expected) == count
    assert ask(interleaving, range(count)) == expected
    assert ask(interleaving, range(500, 510)) == expected[500:510]
    scattered = [0, 1, 5, 6, 7, 300, 999, 2, 2, 500]
    assert ask(interleaving, scattered) == [expected[i] for i in scattered]
    assert ask(interleaving, []) == []
    for n in (0, 1, 2, 37, 500, 999):
        taken = [source for source, _ in expected[:n]]
        assert interleaving.counts(n).tolist() == [taken.count(a) for a in range(len(weights))]


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("start", [10**6, 10**12, 2**50 + 12345])
@pytest.mark.parametrize("name", ["one", "two equal", "seven equal", "a millionth", "all sizes"])
def test_far_positions(name, start):
    interleaving = Interleaving(WEIGHTS[name])
    weights = interleaving.weights.tolist()
    positions = [start, start + 1, start + 2, start + 90, start + 10**5]
    samples = ask(interleaving, positions)
    assert [position_of(weights, *sample) for sample in samples] == positions
    counts = interleaving.counts(start)
    assert counts.sum() == start
    source, number = samples[0]
    assert counts[source] == number


@given(
    weights=st.lists(st.floats(1e-6, 1) | st.sampled_from([0.5, 1.0]), min_size=1, max_size=12),
    start=st.integers(0, 2**50),
    gaps=st.lists(st.integers(1, 30), min_size=1, max_size=30),
)
def test_extension_and_numpy_give_the_same_order(weights, start, gaps):
    interleaving = Interleaving(weights)
    positions = list(accumulate(gaps, initial=start))
    samples = ask(interleaving, positions)
    with without_extension():
        assert ask(interleaving, positions) == samples
