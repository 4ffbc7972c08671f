"""Comparisons between ranks, on messages changed by hand."""

import pytest

from megatron.pipeline.orders import RECEIVES, SENDS
from megatron.pipeline.schedule import build_schedule
from megatron.planner.dryrun.rank import Collective, RankMessage, check_collectives, check_messages

SHAPE = (8, 1, 4)
PLAN = build_schedule("1f1b", 4, 1, 6)[1]
POSTED = [RankMessage(i, SHAPE, "bfloat16") for i in PLAN if i.op in SENDS | RECEIVES]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: m.pop(), f"message {len(POSTED)}"),
        (lambda m: m.append(m[-1]), f"message {len(POSTED) + 1}"),
        (lambda m: m.__setitem__(0, m[0]._replace(shape=(4, 1, 4))), "[4, 1, 4]"),
        (lambda m: m.__setitem__(0, m[0]._replace(dtype="float32")), "float32"),
        (lambda m: m.insert(0, m.pop(1)), "message 1"),
    ],
    ids=["too few", "too many", "shape", "dtype", "order"],
)
def test_a_mistake_in_a_message_is_named(change, expected):
    messages = [*POSTED]
    assert check_messages(1, messages, PLAN, SHAPE, "bfloat16") == []
    change(messages)
    (finding,) = check_messages(1, messages, PLAN, SHAPE, "bfloat16")
    assert (finding.kind, finding.rank) == ("messages", 1) and expected in finding.text


def call(rows):
    return Collective("allreduce", ((rows,),), "float32")


def test_members_of_a_group_must_post_the_same():
    """Members of a shared group must post the same.

    Rank 4 may post anything in a group without rank 0.
    """
    good = {0: {(0, 4): [call(4), call(8)]}, 4: {(1, 4): [call(5)], (0, 4): [call(4), call(8)]}}
    assert check_collectives(good) == []
    (finding,) = check_collectives({**good, 4: {(0, 4): [call(4), call(9)]}})
    assert "0, 4" in finding.text and "[8]" in finding.text and "[9]" in finding.text
    for calls in ({(0, 4): [call(4)]}, {}):
        (finding,) = check_collectives({**good, 4: calls})
        assert "rank 4" in finding.text
