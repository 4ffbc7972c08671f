import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.datasets import (
    split_bounds,
)


@pytest.mark.parametrize(
    ("split", "size", "bounds"),
    [
        ("969, 30, 1", 1000, ((0, 969), (969, 999), (999, 1000))),
        # Shares .5 .5: cuts round(2.5) = 2 (to even) and 4, one sequence short, so both cuts move
        # up by one.
        ("1,1", 5, ((0, 3), (3, 5), (5, 5))),
        # Thirds of 5: cuts 2, 4, 6, one too many, so all cuts move down by one.
        ("1,1,1", 5, ((0, 1), (1, 3), (3, 5))),
    ],
)
def test_split_by_hand(split, size, bounds):
    assert split_bounds(split, size) == bounds


@given(
    shares=st.lists(st.floats(0, 1000), min_size=1, max_size=3).filter(
        lambda shares: sum(shares) > 0.01
    ),
    size=st.integers(0, 10_000),
)
def test_split_covers_everything_once(shares, size):
    bounds = split_bounds(",".join(map(str, shares)), size)
    assert bounds[0][0] == 0 and bounds[2][1] == size
    assert bounds[0][1] == bounds[1][0] and bounds[1][1] == bounds[2][0]
    total = sum(shares)
    for (start, stop), share in zip(bounds, shares, strict=False):
        assert 0 <= start <= stop
        # rounding of each of three parts, and of their sum
        assert abs((stop - start) - share / total * size) <= 2
