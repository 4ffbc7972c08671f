"""permute: a permutation that is statistically random."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.permutation import permute
from tests.data.implementations import without_extension


@given(
    size=st.integers(1, 40) | st.integers(1, 2**62) | st.sampled_from([2**63 - 1, 2**62, 2**32]),
    key=st.integers(0, 2**64 - 1),
    data=st.data(),
)
def test_extension_and_numpy_give_the_same_numbers(size, key, data):
    within = st.integers(0, size - 1) | st.sampled_from([0, size - 1])
    positions = np.array(data.draw(st.lists(within, max_size=30)), np.int64)
    compiled = permute(positions, size, key)
    with without_extension():
        plain = permute(positions, size, key)
    assert compiled.dtype == plain.dtype == np.int64
    assert compiled.tolist() == plain.tolist()


@given(
    size=st.integers(1, 3000)
    | st.sampled_from([root * root + i for root in (2, 3, 255, 256, 257) for i in (-1, 0, 1)]),
    key=st.integers(0, 2**40),
)
def test_every_number_once(size, key):
    assert sorted(permute(np.arange(size), size, key).tolist()) == list(range(size))


@given(size=st.integers(1, 10**15), key=st.integers(0, 2**40), data=st.data())
def test_a_place_has_the_same_number_however_it_is_asked_for(size, key, data):
    positions = data.draw(st.lists(st.integers(0, size - 1), max_size=20, unique=True))
    numbers = permute(np.array(positions, np.int64), size, key).tolist()
    assert len(set(numbers)) == len(positions) and all(0 <= number < size for number in numbers)
    assert [int(permute(np.array([position]), size, key)[0]) for position in positions] == numbers


def test_neighbours_are_strangers():
    """Steps between neighbours of a large order are uniform, and different keys are independent."""
    size = 10**5
    one = permute(np.arange(size), size, 1)
    two = permute(np.arange(size), size, 2)
    steps = np.histogram(np.diff(one) % size, 100)[0]
    assert ((steps - steps.mean()) ** 2 / steps.mean()).sum() < 99 + 5 * math.sqrt(2 * 99)
    # Correlations of independent orders have a standard deviation of 1 / sqrt(size).
    for other in (two, np.arange(size)):
        assert abs(np.corrcoef(one, other)[0, 1]) < 5 / math.sqrt(size)
