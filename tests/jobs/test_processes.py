"""Processes of a run: their environment, their signals, and their end with their starter."""

import os
import signal
import sys

import pytest

from megatron.jobs import run_processes as launch
from megatron.jobs.run_processes import (
    RunProcesses,
    SlurmStep,
    slurm_command,
    start_here,
    start_step,
)
from tests.helpers.clock import VirtualClock
from tests.helpers.killing import forked, wait_for
from tests.jobs.waiting import Lifeline, until

FAST = [sys.executable, "-I", "-S", "-c"]
STEP = SlurmStep("x", ["n1"], 1, 1, 60.0)


# -- what is sent, and when: no process, no real second --------------------------------------------


class Ranks:
    """Processes as a Run sees them.

    `codes` are their exit codes; `sent` has (second, process or step, signal).
    """

    def __init__(self, monkeypatch, count, step=None):
        self.clock = VirtualClock(1000.0)
        self.codes = [None] * count
        self.sent = []

        def process(rank):
            return type("Process", (), {"pid": rank, "poll": lambda _: self.codes[rank]})()

        def send(to, name):
            self.sent.append((round(self.clock()) - 1000, to, name))

        monkeypatch.setattr(launch, "_tell_step", lambda name, number: send(name, number))
        monkeypatch.setattr(launch, "GRACE_S", 60.0)
        monkeypatch.setattr(
            os, "killpg", lambda pid, number: send(pid, signal.Signals(number).name[3:])
        )
        self.run = RunProcesses(step, self.clock)
        self.run.processes += [process(rank) for rank in range(count)]

    def look_for(self, seconds):
        """Poll every second; return whether it has ended."""
        return any(self.clock.sleep(1.0) or self.run.poll() for _ in range(seconds))


def test_ranks_whose_peer_is_lost_have_time_to_say_so_and_are_ended_then(
    monkeypatch,
):
    """Ranks whose peer is lost have time to report it and are then killed.

    Exit codes caused by the kill say nothing about the run.
    """
    ranks = Ranks(monkeypatch, 3)
    ranks.codes[1] = 1
    assert not ranks.look_for(20) and ranks.sent == []
    ranks.codes[2] = 75
    ranks.look_for(2)
    assert {sent[1:] for sent in ranks.sent} == {(0, "KILL"), (1, "KILL"), (2, "KILL")}
    ranks.codes[0] = -9
    assert ranks.look_for(1) and ranks.run.exit_codes == [1, 75]


def test_what_srun_does_not_heed_slurm_is_told_and_force_takes_the_tasks_first(
    monkeypatch,
):
    """Slurm is told to end a step that ignores srun; tasks are killed first.

    A step whose srun is gone would continue.
    """
    ranks = Ranks(monkeypatch, 1, step="x")
    ranks.run.stop()
    assert ranks.sent == [(0, 0, "TERM")], "first srun, which ends its tasks itself"
    ranks.look_for(6)
    assert {*ranks.sent[1:]} == {(6, 0, "TERM"), (6, "x", "TERM")}
    ranks.look_for(60)
    assert ranks.sent[-1][1:] == ("x", "KILL") and (0, "KILL") not in {
        sent[1:] for sent in ranks.sent
    }
    ranks.look_for(60)
    assert ranks.sent[-1][1:] == (0, "KILL")


# -- on this machine -------------------------------------------------------------------------------


def test_ranks_know_their_place_and_nothing_of_a_launcher(tmp_path, monkeypatch):
    program = (
        "import os; print({k: os.environ.get(k) for k in ('RANK', 'WORLD_SIZE', "
        "'SLURM_JOB_ID', 'A')})"
    )
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("A", "b")
    run = start_here([*FAST, program], 2, tmp_path)
    until(run.poll)
    assert run.exit_codes == [0, 0]
    outputs = [(tmp_path / "train.log").read_text(), (tmp_path / "tasks/task_1.err").read_text()]
    assert [eval(text) for text in outputs] == [
        {"RANK": str(rank), "WORLD_SIZE": "2", "SLURM_JOB_ID": None, "A": "b"} for rank in (0, 1)
    ]


def kill_the_starter(start, alive):
    """Start a run in another process, kill that process, and wait for the run to end."""

    def starter():
        started = start()
        signal.pause()
        assert started

    pid = forked(starter)
    alive.started()
    os.kill(pid, signal.SIGKILL)
    assert wait_for(pid) == -signal.SIGKILL
    alive.gone()


@pytest.mark.slow
def test_ranks_end_when_their_starter_is_killed(tmp_path):
    alive = Lifeline(tmp_path / "alive")
    program = f"import signal; kept = open({str(alive.path)!r}, 'w'); signal.pause()"
    kill_the_starter(lambda: start_here([*FAST, program], 2, tmp_path), alive)


# -- as steps of a job -----------------------------------------------------------------------------

STUB = """
PYTHON=python CODE=/code DEVICE=cpu
launch() { echo "launch $*"; return 5; }
launch_training() { launch "$CODE/pretrain_gpt.py" "$@"; }
"""
# Slurm with another step beside it, and a step that ends only when Slurm is told. The launcher's
# pauses take no time.
PROGRAMS = {
    "squeue": 'echo 7.1 x-1; echo 7.2 x; echo "$*" >"$SITE/asked"',
    "scancel": 'echo "$*" >"$SITE/told"; echo >"$SITE/end"',
    "sleep": "exit 0",
}
DEAF = """launch_training() {
    trap "" TERM; exec 9>"$SITE/alive"; until read -r _ <"$SITE/end"; do :; done; return 143
}
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Provide a tree whose job.sh starts nothing."""
    for folder, files in {"bin": PROGRAMS, "examples/frontier": {"job.sh": STUB}}.items():
        (tmp_path / folder).mkdir(parents=True)
        for name, text in files.items():
            (tmp_path / folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (tmp_path / folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("MEGATRON_ROOT", str(tmp_path))
    monkeypatch.setenv("SITE", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return tmp_path


@pytest.fixture
def deaf(site):
    """Return the lifeline of a step that ends only when Slurm is told."""
    (site / "examples/frontier/job.sh").write_text(STUB + DEAF)
    os.mkfifo(site / "end")
    return Lifeline(site / "alive")


def test_a_step_is_launched_by_the_jobs_own_functions(site, monkeypatch):
    monkeypatch.setenv("POINT_CODE", "/nvme")
    run = start_step(slurm_command(["--a", "b"]), STEP, site)
    until(run.poll)
    assert (
        run.exit_codes == [5]
        and (site / "train.log").read_text() == "launch /nvme/pretrain_gpt.py --a b\n"
    )


@pytest.mark.slow
def test_slurm_ends_the_step_of_a_starter_that_was_killed(site, deaf):
    kill_the_starter(lambda: start_step(slurm_command([]), STEP, site), deaf)
    assert (site / "told").read_text() == "-s KILL 7.2\n"
