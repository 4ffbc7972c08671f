"""Slow ranks are named, and those that wait for them are not."""

import pytest

from megatron.parallel.layout import Layout
from megatron.training.report.metrics import summarise
from tests.helpers.tiny import values


@pytest.mark.parametrize(
    ("layout", "seconds", "slow"),
    [
        (
            Layout(pipeline=2, data=4),
            [1.0, 1.0, 1.5, 1.0, 2.0, 2.0, 2.0, 2.2],
            [(2, "n0:cuda:2", 1.5, 1500.0), (7, "n1:cuda:3", 1.1, 2200.0)],
        ),
        (
            Layout(pipeline=2, data=3, order="pp-dp-tp"),
            [1.0, 2.0, 1.0, 2.0, 1.0, 3.0],
            [(5, "n1:cuda:1", 1.5, 3000.0)],
        ),
        (Layout(pipeline=2), [1.0, 3.0], []),  # without peers nothing is said about slowness
    ],
)
def test_ranks_are_compared_with_those_of_their_stage(layout, seconds, slow):
    """The second stage does twice the work: that makes none of its ranks slow."""
    places = [f"n{rank // 4}:cuda:{rank % 4}" for rank in range(len(seconds))]
    summary = summarise(seconds, layout, places)
    assert summary["slow_ranks"] == len(slow)
    assert values(summary["slow"], "rank", "place", "ratio", "ms") == slow
