"""Which nodes of an allocation are dead, by a Slurm that says what it is told to, and what that means for trials."""
from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron.tuning import nodes as asking
from megatron.tuning import trial_runner as running
from megatron.tuning.nodes import Inquiry, Nodes, is_dead, responds
from megatron.tuning.trial_runner import Place, TrialRunner
from megatron.tuning.types import FAILED, LOST_RANK, OUT_OF_MEMORY
from tests.tuning.test_trial_runner import candidate, ended, settings, trial, until

ANSWERS = 'for node in n1 n2 n3; do echo "answers $node"; done'


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Programs in the place of Slurm's, in a job of the nodes n1, n2 and n3."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")

    def say(members: str = "n1 n2 n3", states: str = "n1 mixed, n3 draining", srun: str = ANSWERS) -> None:
        programs = {
            "squeue": f'case "$*" in *%T*) echo RUNNING ;; *) echo "{members}" ;; esac',
            "scontrol": 'tr " " "\\n" <<<"$3"', "sinfo": f'tr "," "\\n" <<<"{states}"', "srun": srun,
        }  # fmt: skip
        for name, program in programs.items():
            (folder / name).write_text(f"#!/bin/bash\n{program}\n")
            (folder / name).chmod(0o755)

    say()
    return say


def dead(*hosts: str) -> dict[str, str]:
    asked = Inquiry(hosts)
    until(lambda: asked.dead is not None)
    return dict(asked.dead or {})


def test_states_of_dead_nodes() -> None:
    assert all(map(is_dead, ("down", "down*", "drained", "failing", "DOWN$", "reboot^")))
    living = ("allocated", "mixed", "draining", "idle", "completing", "mixed-", "planned", "")
    assert not any(map(is_dead, (*living, "allocated*", "unknown*"))) and all(map(responds, living))
    assert not any(map(responds, ("allocated*", "mixed*", "unknown", "unknown*")))


def test_who_is_dead(slurm: Callable[..., None]) -> None:
    assert dead("n2", "n3") == {}, "a node that is to be drained works until then"
    slurm(states="n2 down*, n3 allocated")
    assert dead("n2", "n3") == {"n2": "is down"}
    slurm(members="n1 n3", states="n2 idle")
    assert dead("n2", "n3") == {"n2": "is no longer in the job"}, "back, but this job has lost it"


def test_a_node_that_slurm_does_not_know_to_be_dead(
    slurm: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm notices after minutes. n1, where the tuner is, shows that srun itself works."""
    failed = "srun: error: Task launch for StepId=7.2 failed on node n2: Communication connection failure"
    slurm(srun=f"echo answers n1; echo '{failed}' >&2; echo 'srun: Job step aborted' >&2; exit 1")
    assert dead("n2", "n3") == {"n2": "does not answer"}, "n3 may have been too slow to say anything before the abort"
    slurm(srun="echo 'srun: error: Unable to create step for job 7: Access denied' >&2; exit 1")
    assert dead("n2", "n3") == {}
    monkeypatch.setattr(asking, "_ANSWER_S", 1.0)
    slurm(srun="exec sleep 600")
    assert dead("n2") == {}, "not even the tuner's own node"


# Together only n1 answers; alone n3 does too.
BEHIND = """case "$*" in
    *"-w n1 "*) echo "answers n1" ;; *"-w n2 "*) exit 1 ;; *"-w n3 "*) echo "answers n3" ;;
    *) echo "answers n1"; exec sleep 600 ;;
esac"""


def test_a_node_behind_a_dead_one_in_sruns_tree_is_not_dead(
    slurm: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """srun comes to it only when it has given up the other, which may take longer than anybody waits."""
    probe = asking._probe

    def heard(hosts: Sequence[str]) -> subprocess.Popen[bytes]:
        """A probe that has said its word, or ended: the time that is then waited in vain may be short."""
        found = probe(hosts)
        until(lambda: (tmp_path / f"said-{found.pid}").exists() or found.poll() is not None)
        return found

    monkeypatch.setattr(asking, "_probe", heard)
    monkeypatch.setattr(asking, "_ANSWER_S", 1.0)
    slurm(srun=BEHIND.replace("exec sleep", f"touch {tmp_path}/said-$$; exec sleep"))
    assert dead("n2", "n3") == {"n2": "does not answer"}


def test_nodes_of_a_controller_that_has_just_been_restarted_are_asked(slurm: Callable[..., None]) -> None:
    """It has heard of none of them yet. What it says counts where a node does not answer, and others do."""
    slurm(states="n1 unknown*, n2 allocated*, n3 mixed*", srun=BEHIND)
    assert dead("n2", "n3") == {"n2": "does not respond"}
    slurm(states="n2 allocated*, n3 mixed*", srun="exit 1")
    assert dead("n2", "n3") == {}, "it starts no step yet"


def test_a_slurm_that_says_nothing_holds_no_node_for_dead(slurm: Callable[..., None]) -> None:
    slurm(members='"; exit 1; echo "', states='"; exit 1; echo "', srun="exit 1")
    assert dead("n1", "n2") == {}


def test_an_inquiry_that_nobody_waits_for(slurm: Callable[..., None], tmp_path: Path) -> None:
    slurm(srun=f"touch {tmp_path}/asked; exec sleep 600")
    asked = Inquiry(["n2"])
    until((tmp_path / "asked").exists)
    asked.stop()
    until(lambda: asked.dead is not None)


def test_nodes_keep_their_order_and_do_not_come_back() -> None:
    said = list[str]()
    nodes = Nodes(["a", "b", "c", "d"], said.append)
    assert nodes.take(2) == ("a", "b") and nodes.take(1) == ("c",) and nodes.usable is None
    nodes.leave_out({"b": "is down", "d": "is down"})
    nodes.leave_out({"b": "is down"})
    assert nodes.free == 0 and nodes.usable == 2
    assert said[0] == "b is down: it is left out from now on; 3 of 4 node(s) are left" and len(said) == 2
    nodes.give_back(["c"])
    nodes.give_back(["a", "b"])
    assert nodes.take(2) == ("a", "c")


def test_a_trial_that_a_node_took_along_is_no_answer_twice(
    slurm: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is run again on other nodes; when that goes on it is its layout's doing."""
    monkeypatch.setattr(running, "slurm_command", lambda flags: ["bash", "-c", '[[ $HOSTS == n2 ]] && exit 2; exit 75'])
    said = list[str]()
    hosts = ("n1", "n2", "n3")
    own = TrialRunner(tmp_path, Place("slurm", hosts, 1), settings(), said.append)
    of, big = candidate(processes=1, nodes=1), candidate(processes=3, nodes=3)
    for number, host in enumerate(hosts, 1):
        slurm(states=f"{host} down")
        assert own.start(trial(of)).hosts == (host,)
        lost = ended(own)
        assert own.can_ever_start(of) is (number < 3) and not own.can_ever_start(big) and len(said) == number
        if number < 3:
            assert lost.result is None and own.lost_by(lost) == f"{host} is down"
            assert not (tmp_path / "trials/0001/result.json").exists()
    assert lost.result is not None and (lost.result.status, lost.result.kind) == (FAILED, LOST_RANK)
    assert str(lost.result.reason).endswith("n3 is down") and own.lost_by(lost) is None


def test_a_failure_on_nodes_that_live_and_one_that_says_why_are_answers(
    slurm: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "slurm_command", lambda flags: ["bash", "-c", "exit 75"])
    own = TrialRunner(tmp_path, Place("slurm", ("n1", "n2"), 1), settings())
    of = candidate(processes=1, nodes=1)
    own.start(trial(of))
    result = ended(own).result
    assert result is not None and result.kind == LOST_RANK and own.can_start(of)
    slurm(states="n1 down")
    program = "echo 'torch.OutOfMemoryError: HIP out of memory' >&2; exit 1"
    monkeypatch.setattr(running, "slurm_command", lambda flags: ["bash", "-c", program])
    assert own.start(trial(of, 2)).hosts == ("n1",)
    result = ended(own).result
    assert result is not None and result.kind == OUT_OF_MEMORY and "n1 is down" in str(result.reason)
    assert own.start(trial(of, 3)).hosts == ("n2",), "all the same it is left out"
    ended(own)


def test_stopped_while_slurm_is_asked_a_trial_is_run_again(
    slurm: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm(srun=f"touch {tmp_path}/asked; exec sleep 600")
    monkeypatch.setattr(running, "slurm_command", lambda flags: ["bash", "-c", "exit 75"])
    own = TrialRunner(tmp_path, Place("slurm", ("n1", "n2"), 1), settings())
    own.start(trial(candidate(processes=1, nodes=1)))
    end = time.monotonic() + 200
    while not (tmp_path / "asked").exists():
        assert own.poll() == [] and own.running and time.monotonic() < end
        time.sleep(0.05)
    (stopped,) = own.stop_all("SIGUSR1")
    assert stopped.result is None and stopped.ended is not None and not own.running
