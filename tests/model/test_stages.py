"""Layers of pipeline stages: none is lost, none is repeated, and the stated rule holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import ConfigError
from megatron.model.stages import assign_layers


@given(st.integers(1, 24), st.integers(0, 200))
def test_the_rule(num_stages, more):
    """The layers that are left over are on the stages before the last."""
    num_layers = num_stages + more
    stages = assign_layers(num_layers, num_stages)
    each, left = divmod(num_layers, num_stages)
    last = num_stages - 1
    assert [len(stage) for stage in stages] == [
        each + (last - left <= stage < last) for stage in range(num_stages)
    ]
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12))
def test_layout_is_followed(counts):
    stages = assign_layers(sum(counts), len(counts), ",".join(map(str, counts)))
    assert [len(stage) for stage in stages] == counts
    assert [layer for stage in stages for layer in stage] == list(range(sum(counts)))


@pytest.mark.parametrize(
    "num_layers, num_stages, layout, named",
    [
        (3, 4, None, ["3", "4"]),
        (14, 4, "3,4,4", ["3,4,4", "4"]),
        (15, 4, "3,4,4,3", ["3,4,4,3", "14", "15"]),
        (8, 4, "2,2,2,x", ["2,2,2,x"]),
    ],
)
def test_refused(num_layers, num_stages, layout, named):
    with pytest.raises(ConfigError) as error:
        assign_layers(num_layers, num_stages, layout)
    assert all(word in str(error.value) for word in named), str(error.value)
