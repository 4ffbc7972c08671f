"""Slow ranks are named, and those that wait for them are not."""

from megatron.parallel.layout import Layout
from megatron.training.report.metrics import summarise


def test_ranks_are_compared_with_those_of_their_stage():
    """Ranks are compared with those of their stage.

    The second stage does twice the work: that makes none of its ranks slow.
    """
    layout = Layout(pipeline=2, data=4)
    seconds = [1.0, 1.0, 1.5, 1.0, 2.0, 2.0, 2.0, 2.2]
    places = [f"n{rank // 4}:cuda:{rank % 4}" for rank in range(8)]
    slow = summarise(seconds, layout, places)["slow"]
    assert [(one["rank"], one["place"]) for one in slow] == [(2, "n0:cuda:2"), (7, "n1:cuda:3")]
    assert [one["ratio"] for one in slow] == [1.5, 1.1]
    assert [one["ms"] for one in slow] == [1500.0, 2200.0]


def test_stages_are_told_apart_in_any_order_of_ranks():
    """Stages are told apart in any order of ranks.

    Every second rank is of the second stage, which does twice the work.
    """
    result = summarise([1.0, 2.0, 1.0, 2.0, 1.0, 3.0], Layout(pipeline=2, data=3, order="pp-dp-tp"))
    assert [(one["rank"], one["ratio"]) for one in result["slow"]] == [(5, 1.5)]


def test_without_peers_nothing_is_said_about_slowness():
    assert summarise([1.0, 3.0], Layout(pipeline=2))["slow_ranks"] == 0
    assert summarise([1.0, 1.01], Layout(data=2))["slow"] == []
