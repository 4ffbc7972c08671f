"""Which nodes of an allocation are dead, by a Slurm that says what it is told to."""
from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.tuning.nodes import Inquiry, Nodes, is_dead, responds
from tests.tuning.waiting import until

ANSWERS = 'for node in n1 n2 n3; do echo "answers $node"; done'


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


def dead(*hosts: str, **probe: Any) -> set[str]:
    asked = Inquiry(hosts, **probe)
    until(lambda: asked.dead is not None)
    return set(asked.dead or {})


def test_states_of_dead_nodes() -> None:
    assert all(map(is_dead, ("down", "down*", "drained", "failing", "DOWN$", "reboot^")))
    living = ("allocated", "mixed", "draining", "idle", "completing", "mixed-", "planned", "")
    assert not any(map(is_dead, (*living, "allocated*", "unknown*"))) and all(map(responds, living))
    assert not any(map(responds, ("allocated*", "mixed*", "unknown", "unknown*")))


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
        ({"srun": f"echo answers n1; echo '{failed}' >&2; echo 'srun: Job step aborted' >&2; exit 1"},
         {"n2"}),
        ({"srun": "echo 'srun: error: Unable to create step for job 7: Access denied' >&2; exit 1"}, set()),
        # A Slurm that says nothing holds no node for dead.
        ({"members": '"; exit 1; echo "', "states": '"; exit 1; echo "', "srun": "exit 1"}, set()),
        ({"states": "n2 allocated*, n3 mixed*", "srun": "exit 1"}, set()),  # it starts no step yet
    ):  # fmt: skip
        slurm(**said)
        assert dead("n2", "n3") == expected, said


class Probe:
    """A step that says this at once, and ends only when it is signalled where it is `late`."""

    def __init__(self, said: str, late: bool) -> None:
        self._said, self._late = said.encode(), late

    def communicate(self, timeout: float) -> tuple[bytes, None]:
        if self._late:
            raise subprocess.TimeoutExpired("srun", timeout, output=self._said)
        return self._said, None

    def send_signal(self, _number: int) -> None:
        self._late = False


def behind(hosts: Sequence[str]) -> Any:
    """Together only n1 answers; alone n3 does too."""
    return Probe("answers n1\n" if len(hosts) > 1 else {"n2": ""}.get(hosts[0], f"answers {hosts[0]}\n"),
                 late=len(hosts) > 1)  # fmt: skip


def test_nodes_that_do_not_answer_in_time(slurm: Callable[..., None]) -> None:
    """srun comes to a node behind a dead one in its tree only when it has given up the other, which may take longer
    than anybody waits."""
    assert dead("n2", "n3", probe=behind) == {"n2"}
    # Not even the tuner's own node answers.
    assert dead("n2", probe=lambda hosts: Probe("", late=True)) == set()
    # A controller that was just restarted has heard of none; what it says counts where others answer.
    slurm(states="n1 unknown*, n2 allocated*, n3 mixed*")
    assert dead("n2", "n3", probe=behind) == {"n2"}


def test_an_inquiry_that_nobody_waits_for(slurm: Callable[..., None]) -> None:
    class Endless(Probe):
        asked, told = threading.Event(), threading.Event()

        def communicate(self, timeout: float) -> tuple[bytes, None]:
            self.asked.set()
            assert self.told.wait(50)
            return b"", None

        def terminate(self) -> None:
            self.told.set()

    asked = Inquiry(["n2"], probe=lambda hosts: Endless("", True))  # type: ignore[arg-type, return-value]
    assert Endless.asked.wait(50) and asked.dead is None
    asked.stop()
    until(lambda: asked.dead is not None)


def test_nodes_keep_their_order_and_do_not_come_back() -> None:
    said = list[str]()
    nodes = Nodes(["a", "b", "c", "d"], said.append)
    assert nodes.take(2) == ("a", "b") and nodes.take(1) == ("c",) and nodes.usable is None
    nodes.leave_out({"b": "is down", "d": "is down"})
    nodes.leave_out({"b": "is down"})
    assert nodes.free == 0 and nodes.usable == 2
    assert len(said) == 2 and "b" in said[0] and "3 of 4" in said[0]
    nodes.give_back(["c"])
    nodes.give_back(["a", "b"])
    assert nodes.take(2) == ("a", "c")
