"""The culprit by the observed states of ranks, for known cases."""

import pytest

from megatron.parallel.flight import KINDS, FlightState, PendingCall
from megatron.parallel.host_processes import GONE, STOPPED
from megatron.parallel.layout import Layout
from megatron.training.safety.watchdog import judge

LIMIT = 30.0


def seen(
    rank,
    call=None,
    quiet_s=40.0,
    process="sleeping",
    stack="loop.py:1 train",
    **posted,
):
    device = f"n{rank // 2}:cuda:{rank % 2}"
    doing = "FORWARD of stage 0, micro-batch 2"
    counts = [posted.get(kind, 0) for kind in KINDS]
    return FlightState(
        rank, 100 + rank, 1, device, 16, "training", doing, call, quiet_s, counts, 1, stack, process
    )


def receives(rank, peer):
    return seen(rank, PendingCall("receive", "pipeline", peer, 64, 0))


def reduces(rank, name="all_reduce", size=8, kind="data", **more):
    """Return a rank in collective 5 of a group."""
    return seen(rank, PendingCall(name, kind, -1, size, 5), **{kind: 5}, **more)


@pytest.mark.parametrize(
    ("ranks", "layout", "culprits", "words"),
    [
        pytest.param(
            [receives(0, 1), receives(1, 2), seen(2, process=STOPPED), receives(3, 2)],
            Layout(pipeline=4),
            [2],
            "rank 2;n1:cuda:0;SIGSTOP;17;FORWARD;micro-batch 2;40 s;0-1, 3",
            id="end of a chain",
        ),
        pytest.param(
            [*map(reduces, range(2)), seen(2, data=4, stack="a.py:1 b\nd.py:7 read"), reduces(3)],
            Layout(data=4),
            [2],
            "d.py:7;0-1, 3",
            id="not come to a collective",
        ),
        pytest.param(
            [reduces(0), seen(1, quiet_s=10.0, data=4)], Layout(data=2), None, "", id="at work"
        ),
        pytest.param(
            [reduces(0), seen(1, quiet_s=10.0, process=GONE, data=4)],
            Layout(data=2),
            [1],
            "",
            id="died a moment ago",
        ),
        pytest.param(
            [reduces(rank, kind="world") for rank in (0, 1)],
            Layout(data=4),
            [2, 3],
            "2-3;n7",
            id="node without a sign of life",
        ),
        # the stuck one may wait, in an unrecorded call, for the lost one
        pytest.param(
            [reduces(0), seen(1, data=4), seen(2, process=STOPPED, data=4)],
            Layout(data=3),
            [2],
            "",
            id="lost explains more than stuck",
        ),
        pytest.param(
            [reduces(0), reduces(1, "reduce", 4)],
            Layout(data=2),
            [0, 1],
            "all_reduce;8 bytes; reduce;4 bytes;number 5",
            id="different calls under one number",
        ),
        pytest.param(
            [receives(0, 1), receives(1, 2), receives(2, 1)],
            Layout(pipeline=3),
            [1, 2],
            "rank 1;rank 2;receive;64 bytes",
            id="circle",
        ),
        pytest.param(
            [reduces(0), reduces(1)], Layout(data=2), [0, 1], "", id="entered by all, left by none"
        ),
        pytest.param(
            [seen(0, quiet_s=1.0), seen(1)], Layout(data=2), [1], "", id="awaited by nobody yet"
        ),
    ],
)
def test_the_culprit(ranks, layout, culprits, words):
    places = ["", "", "n7:cuda:0", "n7:cuda:1"]
    verdict = judge(dict(enumerate(ranks)), layout, LIMIT, places)
    assert (verdict and verdict.culprits) == culprits
    assert verdict is None or all(word in verdict.conclusion for word in words.split(";"))
