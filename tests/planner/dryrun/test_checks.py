"""What is compared between ranks, on messages that were changed by hand."""
from __future__ import annotations

from typing import Any

import pytest

from megatron.config import Config
from megatron.parallel.topology import Layout
from megatron.pipeline.instructions import RECEIVES, SENDS
from megatron.pipeline.schedule import build_schedule
from megatron.planner.dryrun.checks import check_alike, check_collectives, check_messages, expected_messages
from megatron.planner.dryrun.messages import Collective, Log, Message

SHAPE = (8, 1, 4)


def posted(schedule: str = "1f1b", size: int = 4, chunks: int = 1, count: int = 6) -> dict[int, list[Message]]:
    """What all ranks of a correct step post."""
    return {
        rank: [Message(i, i.peer_stage % size, SHAPE, "bfloat16") for i in plan if i.op in SENDS | RECEIVES]
        for rank, plan in enumerate(build_schedule(schedule, size, chunks, count))
    }


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("zb-h1", 1), ("interleaved", 2)])
@pytest.mark.parametrize("size", [2, 4])
def test_a_schedule_goes_together(schedule: str, chunks: int, size: int) -> None:
    assert check_messages(posted(schedule, size, chunks)) == []


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: m.update({1: m[1][:-1]}), "rank 1"),
        (lambda m: m[1].__setitem__(0, m[1][0]._replace(shape=(4, 1, 4))), "[4, 1, 4]"),
        (lambda m: m[1].__setitem__(0, m[1][0]._replace(dtype="float32")), "float32"),
        (lambda m: m[2].pop(0), "6"),
        (lambda m: m[2].pop(max(i for i, x in enumerate(m[2]) if not x.sends)), "rank 2"),
        (lambda m: m[2].pop(next(i for i, x in enumerate(m[2]) if x.sends)), "rank 2"),
        (lambda m: m[1].insert(0, m[1].pop(1)), "rank 0"),
    ],
)
def test_a_mistake_in_a_message_is_named(change: Any, expected: str) -> None:
    messages = posted()
    change(messages)
    findings = check_messages(messages)
    assert findings and expected in " ".join(f.text for f in findings)
    assert all(f.kind == "messages" for f in findings)


def test_ranks_that_nobody_looked_at_get_the_schedules_messages() -> None:
    """Of 4 pipeline ranks 0, 1 and 3 were seen; 2 is like 1. Its neighbours' mistakes show."""
    config = Config.create(
        num_layers=4, hidden_size=8, num_attention_heads=2, seq_length=8, pipeline_model_parallel_size=4,
        global_batch_size=6, world_size=4,
    )
    layout, like, messages = Layout(pipeline=4), {0: 0, 1: 1, 2: 1, 3: 3}, posted()
    seen = {rank: messages[rank] for rank in (0, 1, 3)}
    assert expected_messages(config, layout, 6, seen, like) == messages
    first = next(i for i, m in enumerate(seen[3]) if m.sends)
    seen[3] = [m._replace(shape=(2,)) if i == first else m for i, m in enumerate(seen[3])]
    (finding,) = check_messages(expected_messages(config, layout, 6, seen, like))
    assert finding.rank == 3 and "2" in finding.text


def call(ranks: range | list[int], rows: int = 4, name: str = "allreduce") -> Collective:
    return Collective(name, ranks, ((rows,),), "float32")


def test_members_of_a_group_must_post_the_same() -> None:
    both, other = [0, 4], [1, 5]
    good = {0: [call(both), call(both, 8)], 4: [call(both), call(other), call(both, 8)]}
    assert check_collectives(good) == []
    (finding,) = check_collectives({**good, 4: [call(both), call(both, 9)]})
    assert "0, 4" in finding.text and "[8]" in finding.text and "[9]" in finding.text
    (finding,) = check_collectives({**good, 4: [call(both)]})
    assert "rank 4" in finding.text


def test_ranks_of_one_stage_are_compared_by_direction() -> None:
    """Ranks 0 and 1 are tensor ranks of one stage; their data-parallel groups are 0, 2 and 1, 3."""
    layout = Layout(tensor=2, data=2)
    mine = Log(collectives=[call([0, 1]), call([0, 2])])
    assert check_alike(layout, 0, 1, mine, Log(collectives=[call([0, 1]), call([1, 3])])) == []
    (finding,) = check_alike(layout, 0, 1, mine, Log(collectives=[call([0, 1]), call([1, 3], 5)]))
    assert "data" in finding.text
    # Rank 2 owns other parameters: what it sums over its tensor group may differ.
    assert check_alike(layout, 0, 2, mine, Log(collectives=[call([2, 3], 7), call([0, 2])])) == []
    (finding,) = check_alike(layout, 0, 2, mine, Log(collectives=[call([2, 3])]))
    assert "data" in finding.text
