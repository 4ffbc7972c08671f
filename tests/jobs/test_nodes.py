"""Which nodes of an allocation are dead, by a Slurm that says what it is told to."""
from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.jobs.nodes import Inquiry, Nodes
from tests.jobs.waiting import until

# What srun says when it is asked for a task on the node behind -w.
ANSWERS = 'while [[ $1 != -w ]]; do shift; done; echo "answers $2"'


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Programs in the place of Slurm's, in a job of the nodes n1, n2 and n3."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")

    def say(members: str = "n1 n2 n3", states: str = "n1 mixed, n3 draining", srun: str = ANSWERS) -> None:
        programs = {
            "squeue": f'echo "{members}"', "scontrol": 'tr " " "\\n" <<<"$3"', "sinfo": f'tr "," "\\n" <<<"{states}"',
            "srun": srun,
        }  # fmt: skip
        for name, program in programs.items():
            (tmp_path / name).write_text(f"#!/bin/bash\n{program}\n")
            (tmp_path / name).chmod(0o755)

    say()
    return say


def dead(*hosts: str) -> set[str]:
    asked = Inquiry(hosts)
    until(lambda: asked.dead is not None)
    return set(asked.dead or {})


@pytest.mark.slow
def test_who_is_dead(slurm: Callable[..., None]) -> None:
    """By programs of Slurm; n1, where the tuner is, shows that srun itself works."""
    failed = "srun: error: Task launch for StepId=7.2 failed on node n2: Communication connection failure"
    for said, expected in (
        ({}, set()),  # a node that is to be drained works until then
        ({"states": "n2 down*, n3 allocated"}, {"n2"}),
        # Back, but this job has lost it.
        ({"members": "n1 n3", "states": "n2 idle"}, {"n2"}),
        # Slurm notices after minutes; n3 may have been too slow to say anything before the abort.
        ({"srun": f"{ANSWERS} | grep -v n2 || echo '{failed}' >&2"}, {"n2"}),
        # A controller that was just restarted has heard of none: what the nodes say counts.
        ({"states": "n1 unknown*, n2 allocated*, n3 mixed*", "srun": f"{ANSWERS} | grep -v n2"}, {"n2"}),
        ({"srun": "echo 'srun: error: Unable to create step for job 7: Access denied' >&2; exit 1"}, set()),
        # A Slurm that says nothing holds no node for dead.
        ({"members": '"; exit 1; echo "', "states": '"; exit 1; echo "', "srun": "exit 1"}, set()),
        ({"states": "n2 allocated*, n3 mixed*", "srun": "exit 1"}, set()),  # it starts no step yet
    ):  # fmt: skip
        slurm(**said)
        assert dead("n2", "n3") == expected, said


def test_nodes_keep_their_order_and_do_not_come_back() -> None:
    said = list[str]()
    nodes = Nodes(["a", "b", "c", "d"], said.append)
    assert nodes.take(2) == ("a", "b") and nodes.take(1) == ("c",) and nodes.usable == 4
    nodes.leave_out({"b": "is down", "d": "is down"})
    nodes.leave_out({"b": "is down"})
    assert nodes.free == [] and nodes.usable == 2
    assert len(said) == 2 and "b" in said[0] and "3 of 4" in said[0]
    nodes.give_back(["c"])
    nodes.give_back(["a", "b"])
    assert nodes.take(2) == ("a", "c")
