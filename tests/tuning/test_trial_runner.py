"""Trials as processes: what they end as, that they end alone, and that nothing is left of them.

Small programs stand in for training, and seconds are virtual; test_command.py has a search with real trials.
"""
from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import ConfigError
from megatron.planning.scaling.runs import read_run
from megatron.tuning import trial_runner as running
from megatron.tuning.trial_folder import trial_flags
from megatron.tuning.trial_runner import Place, TrialRunner, TrialSettings
from megatron.tuning.types import (
    CRASH,
    DONE,
    FAILED,
    HANG,
    LOST_RANK,
    OUT_OF_MEMORY,
    REFUSED,
    TIME_OUT,
    Candidate,
    Result,
    Trial,
)
from tests.helpers.clock import VirtualClock
from tests.tuning import test_result as metrics_files
from tests.tuning.waiting import Lifeline, until

pytestmark = pytest.mark.slow
GIB = 2**30
BASE = ("--preset", "tiny", "--num-layers", "2", "--global-batch-size", "8", "--num-workers", "0")
COPY = "open(metrics, 'w').write(open(metrics.partition('/trials')[0] + '/those').read())"


def candidate(*flags: str, processes: int = 1, nodes: int = 1, index: int = 0) -> Candidate:
    return Candidate(index, f"c{index}", {}, (*BASE, *flags), processes, nodes, 8 * 64)


TWO_RANKS = candidate("--tensor-model-parallel-size", "2", processes=2)


def settings(iterations: int = 2, warm_up: int = 1, limit_s: float = 1e6, stall_s: float | None = None,
             flags: Sequence[str] = ()) -> TrialSettings:  # fmt: skip
    return TrialSettings(iterations, warm_up, lambda _: limit_s, stall_s, tuple(flags))


def trial(of: Candidate, number: int = 1) -> Trial:
    return Trial(number, of, "test", f"trials/{number:04d}")


class Tuner(TrialRunner):
    """A runner on this machine, or on `hosts`, by a clock of its own."""

    def __init__(
        self, folder: Path, how: TrialSettings | None = None, memory: int | None = None, hosts: Sequence[str] = (),
        tasks: int = 2, say: Callable[[str], object] = lambda text: None,
    ) -> None:  # fmt: skip
        self.clock = VirtualClock()
        place = Place("slurm" if hosts else "local", tuple(hosts), tasks, 2 if hosts else 1, memory)
        super().__init__(folder, place, how or settings(), say, clock=self.clock, sleep=self.clock.sleep)

    def ended(self, pass_s: float = 0.0) -> list[Trial]:
        """Those that run, once they have ended; `pass_s` pass between two looks."""
        found = list[Trial]()

        def look() -> bool:
            self.clock.advance(pass_s)
            found.extend(self.poll())
            return not self.running

        until(look)
        return found

    def result(self, of: Candidate, number: int = 1) -> Result:
        self.start(trial(of, number))
        (done,) = self.ended()
        assert done.result is not None and self.can_start(of)
        return done.result


@pytest.fixture
def alive(tmp_path: Path) -> Lifeline:
    return Lifeline(tmp_path / "alive")


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Python programs in the place of training. They have `metrics`, the path of the metrics file, `rank`, and
    `stay`, which tells the lifeline that they are there and then does nothing for ever."""
    begin = f"""
import os, signal
def stay():
    kept = open({str(tmp_path / "alive")!r}, "w")
    while True: signal.pause()
rank = int(os.environ["RANK"])
"""

    def replace(program: str) -> None:
        def command(flags: Sequence[str]) -> list[str]:
            return [sys.executable, "-I", "-S", "-c", f"metrics = {flags[-1]!r}{begin}{program}"]

        monkeypatch.setattr(running, "training_command", command)

    return replace


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Shell programs in the place of the launcher of a job step, and a job that runs."""
    monkeypatch.setattr(running, "slurm_job_runs", lambda: True)
    return lambda program: monkeypatch.setattr(running, "slurm_command", lambda flags: ["bash", "-c", program])


# -- how trials end ----------------------------------------------------------------------------------------------------


def test_a_trial_gives_figures_of_its_steady_steps(tmp_path: Path, programs: Callable[[str], None]) -> None:
    """By the metrics file of a run of two ranks; killed before the result was noted, they are found again."""
    of = metrics_files.CANDIDATE
    metrics_files.write(tmp_path / "those", metrics_files.records())
    programs(f"if not rank: {COPY}")
    own = Tuner(tmp_path, settings(metrics_files.ITERATIONS, metrics_files.WARM_UP))
    assert own.can_start(of)
    started = own.start(trial(of))
    assert started.started is not None and started.result is None and own.running == [started]
    assert not own.can_start(of)
    (done,) = own.ended()
    assert done.result is not None and done.result == metrics_files.read(tmp_path, metrics_files.records())
    assert done.ended is not None and done.ended >= started.started and own.can_start(of)
    noted = tmp_path / "trials/0001/result.json"
    noted.unlink()
    again = own.recover(started)
    assert again is not None and again.result is not None and again.result.step_s == done.result.step_s
    assert json.loads(noted.read_text())["status"] == DONE
    assert own.recover(trial(of, 2)) is None
    read = read_run(tmp_path / "trials/0001")
    assert read.failure is None and read.point["warm_up"] == metrics_files.WARM_UP and read.finished


@pytest.mark.parametrize(("program", "how", "kind", "words"), [
    ("stay()", settings(limit_s=20.0), TIME_OUT, "0:20"),
    (f"{COPY}; stay()", settings(stall_s=30.0), HANG, "step 1 of 3"),
    # It ignores a wish to end, and so does a process of its own making.
    ("signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork(); stay()", settings(limit_s=20.0), TIME_OUT, "0:20"),
])  # fmt: skip
def test_what_takes_too_long_is_stopped_and_nothing_is_left(
    tmp_path: Path, programs: Callable[[str], None], alive: Lifeline, program: str, how: TrialSettings, kind: str,
    words: str,
) -> None:  # fmt: skip
    metrics_files.write(tmp_path / "those", metrics_files.records()[:2])  # as far as the first step
    programs(program)
    own = Tuner(tmp_path, how)
    own.start(trial(candidate()))
    alive.started()
    (done,) = own.ended(pass_s=4.0)
    assert done.result is not None and (done.result.status, done.result.kind) == (FAILED, kind), done.result
    assert words in str(done.result.reason) and own.can_start(candidate())
    alive.gone()


def test_a_rank_that_is_killed_does_not_leave_the_other(
    tmp_path: Path, programs: Callable[[str], None], alive: Lifeline
) -> None:
    programs("os.kill(os.getpid(), signal.SIGKILL) if rank else stay()")
    own = Tuner(tmp_path)
    own.start(trial(TWO_RANKS))
    alive.started()
    (done,) = own.ended(pass_s=1.0)
    assert done.result is not None and (done.result.status, done.result.kind) == (FAILED, OUT_OF_MEMORY), done.result
    alive.gone()


def test_what_stands_still_at_its_memory_limit_is_out_of_memory(
    tmp_path: Path, programs: Callable[[str], None], alive: Lifeline
) -> None:
    programs("kept = []\ntry:\n    while True: kept.append(bytearray(1 << 20))\n"
             "except MemoryError:\n    kept.pop()\nstay()")  # fmt: skip
    own = Tuner(tmp_path, settings(limit_s=20.0), memory=GIB // 4)
    own.start(trial(candidate()))
    alive.started()
    (done,) = own.ended(pass_s=4.0)
    assert done.result is not None and (done.result.status, done.result.kind) == (FAILED, OUT_OF_MEMORY), done.result
    assert "0.25 GiB" in str(done.result.reason)


def test_a_crash_is_told_in_the_programs_words(tmp_path: Path, programs: Callable[[str], None]) -> None:
    programs("raise ValueError('x')")
    result = Tuner(tmp_path).result(candidate())
    assert (result.status, result.kind) == (FAILED, CRASH) and "ValueError: x" in str(result.reason)
    noted = json.loads((tmp_path / "trials/0001/result.json").read_text())
    assert (noted["status"], noted["kind"], noted["exit_code"]) == (FAILED, CRASH, 1)
    programs("pass")
    result = Tuner(tmp_path).result(candidate())
    assert (result.status, result.kind) == (FAILED, CRASH), "it ended well, and yet too early"


def test_candidates_that_cannot_run_here_are_refused_without_a_process(
    tmp_path: Path, programs: Callable[[str], None]
) -> None:
    programs("open(metrics, 'w')")
    for of, words in (
        (candidate("--tensor-model-parallel-size", "3", processes=3), "multiple"), (candidate(nodes=2), "2 nodes"),
        (candidate("--num-attention-heads", "7"), "7"),
    ):  # fmt: skip
        result = Tuner(tmp_path).result(of)
        assert (result.status, result.kind) == (FAILED, REFUSED) and words in str(result.reason), result
    assert not (tmp_path / "trials/0001/metrics.jsonl").exists()


def test_stopping_interrupts_and_the_next_start_keeps_what_was_there(
    tmp_path: Path, programs: Callable[[str], None], alive: Lifeline
) -> None:
    programs("open(metrics, 'w'); stay()")
    own, folder = Tuner(tmp_path), tmp_path / "trials/0001"
    own.start(trial(candidate()))
    alive.started()
    (stopped,) = own.stop_all("SIGUSR1")
    alive.gone()
    assert stopped.result is None and stopped.ended is not None and not own.running
    assert not (folder / "result.json").exists() and own.recover(stopped) is None
    programs("pass")
    for attempts in (["attempt-1"], ["attempt-1", "attempt-2"]):
        own.start(stopped)
        assert own.ended()[0].result is not None
        assert sorted(path.name for path in folder.glob("attempt-*")) == attempts
    assert (folder / "attempt-1/metrics.jsonl").exists() and (folder / "attempt-2/result.json").exists()


def test_disks_that_take_nothing(tmp_path: Path, programs: Callable[[str], None]) -> None:
    programs("pass")
    own = Tuner(tmp_path)
    own.start(trial(candidate()))
    (tmp_path / "trials/0001/result.part").mkdir()
    with pytest.raises(ConfigError, match="trials/0001"):
        own.ended()
    (tmp_path / "full").mkdir()
    (tmp_path / "full/trials").write_text("a file")
    with pytest.raises(ConfigError, match="trial 1"):
        Tuner(tmp_path / "full").start(trial(candidate()))


# -- as steps of a job -------------------------------------------------------------------------------------------------


def test_nodes_are_disjoint_and_come_back(tmp_path: Path, steps: Callable[[str], None]) -> None:
    """Steps of one, two and two nodes among three, two at once; a shell in the place of srun tells of its place."""
    steps('echo "$HOSTS $NODES $TASKS_PER_NODE $MASTER_PORT $SRUN_FLAGS" > "$LOGS.place"; exit 3')
    own = Tuner(tmp_path, hosts=("n1", "n2", "n3"))
    of = {n: candidate(processes=n, nodes=n, index=n) for n in (1, 2, 3, 4)}
    first, second = own.start(trial(of[1], 1)), own.start(trial(of[2], 2))
    assert (first.hosts, second.hosts) == (("n1",), ("n2", "n3")) and not own.can_start(of[1])
    assert {each.number for each in own.ended()} == {1, 2} and own.can_start(of[3]) and not own.can_start(of[4])
    assert own.start(trial(of[2], 3)).hosts == ("n1", "n2") and own.can_start(of[1]) and not own.can_start(of[2])
    own.ended()
    told = [(tmp_path / f"trials/000{n}/tasks.place").read_text().split() for n in (1, 2, 3)]
    assert [words[:3] for words in told] == [["n1", "1", "1"], ["n2,n3", "2", "1"], ["n1,n2", "2", "1"]]
    assert len({words[3] for words in told}) == 3
    names = [words[-1] for words in told]
    assert names == [f"--job-name=trial-{n}-{os.getpid()}" for n in (1, 2, 3)], "of another search here they differ"


@pytest.mark.parametrize("taken, starts", [(1, 2), (9, 3)])
def test_a_port_that_another_program_has_is_no_fault_of_the_layout(
    tmp_path: Path, steps: Callable[[str], None], taken: int, starts: int
) -> None:
    ports = tmp_path / "ports"
    steps(f"""echo "$MASTER_PORT" >> {ports}; (($(wc -l < {ports}) <= {taken})) || exit 3
        echo "LaunchError: rank 0 on node n1 cannot serve port $MASTER_PORT, perhaps because ..." >&2; exit 2""")
    result = Tuner(tmp_path, hosts=["n1"]).result(candidate())
    assert result.kind == CRASH and (result.reason == "exit code 3") == (taken == 1), result
    tried = ports.read_text().split()
    assert len(tried) == len(set(tried)) == starts


def test_a_trial_that_ends_with_its_allocation_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A squeue that says what it says of a job that was cancelled, of one that runs, and nothing; it heeds filters of
    somebody's shell."""
    monkeypatch.setattr(running, "slurm_command", lambda flags: ["bash", "-c", "exit 143"])
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    squeue = tmp_path / "bin/squeue"
    squeue.parent.mkdir()
    for name in ("sinfo", "scontrol", "srun"):  # of this machine's Slurm, if it has one, nothing is asked
        (squeue.parent / name).symlink_to("/bin/false")
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    for script, lost in (
        ("echo COMPLETING", True), ("echo Invalid job id specified >&2; exit 1", True), ("echo RUNNING", False),
        ("echo Unable to contact >&2; exit 1", False), ("[[ -n ${SQUEUE_STATES-} ]] || echo RUNNING", False),
    ):  # fmt: skip
        squeue.write_text(f"#!/bin/bash\n{script}\n")
        squeue.chmod(0o755)
        own = Tuner(tmp_path, hosts=["n1"])
        own.start(trial(candidate()))
        (done,) = own.ended()
        assert done.ended is not None and (done.result is None) is lost, script


class Asked:
    """In the place of an inquiry about nodes. `dead` is what is wrong with nodes; None: no answer comes."""

    dead: dict[str, str] | None = None
    stopped = False
    asked = 0

    def __init__(self, hosts: Sequence[str]) -> None:
        Asked.asked += 1

    def stop(self) -> None:
        Asked.stopped = True


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> type[Asked]:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(running, "Inquiry", Asked)
    for name, value in {"dead": None, "stopped": False, "asked": 0}.items():
        monkeypatch.setattr(Asked, name, value)
    return Asked


def test_a_trial_that_a_node_took_along_is_no_answer_twice(
    tmp_path: Path, steps: Callable[[str], None], asked: type[Asked]
) -> None:
    """It is run again on other nodes; when that goes on it is its layout's doing."""
    steps('[[ $HOSTS == n2 ]] && exit 2; exit 75')
    said, hosts = list[str](), ("n1", "n2", "n3")
    own = Tuner(tmp_path, hosts=hosts, tasks=1, say=said.append)
    of, big = candidate(), candidate(processes=3, nodes=3)
    for number, host in enumerate(hosts, 1):
        asked.dead = {host: "is down"}
        assert own.start(trial(of)).hosts == (host,)
        (lost,) = own.ended()
        assert own.can_ever_start(of) is (number < 3) and not own.can_ever_start(big) and len(said) == number
        if number < 3:
            assert lost.result is None and own.lost_by(lost) == f"{host} is down"
            assert not (tmp_path / "trials/0001/result.json").exists()
    assert lost.result is not None and (lost.result.status, lost.result.kind) == (FAILED, LOST_RANK)
    assert "n3 is down" in str(lost.result.reason) and own.lost_by(lost) is None


def test_a_failure_on_nodes_that_live_and_one_that_says_why_are_answers(
    tmp_path: Path, steps: Callable[[str], None], asked: type[Asked]
) -> None:
    steps("exit 75")
    own, asked.dead = Tuner(tmp_path, hosts=("n1", "n2"), tasks=1), {}
    assert own.result(candidate()).kind == LOST_RANK
    asked.dead = {"n1": "is down"}
    steps("echo 'torch.OutOfMemoryError: HIP out of memory' >&2; exit 1")
    result = own.result(candidate(), 2)
    assert result.kind == OUT_OF_MEMORY and "n1 is down" in str(result.reason)
    assert own.start(trial(candidate(), 3)).hosts == ("n2",), "all the same it is left out"
    own.ended()


def test_stopped_while_slurm_is_asked_a_trial_is_run_again(
    tmp_path: Path, steps: Callable[[str], None], asked: type[Asked]
) -> None:
    steps("exit 75")
    own = Tuner(tmp_path, hosts=("n1", "n2"), tasks=1)
    own.start(trial(candidate()))
    until(lambda: own.poll() or asked.asked)
    assert own.poll() == [] and own.running
    (stopped,) = own.stop_all("SIGUSR1")
    assert stopped.result is None and stopped.ended is not None and not own.running and asked.stopped


# -- flags -------------------------------------------------------------------------------------------------------------


def test_flags_of_a_trial() -> None:
    words = trial_flags(candidate("--tensorboard-dir", "x", "--fp16"), settings(4, 2, flags=("--seed", "3")))
    given: dict[str, Any] = dict(itertools.pairwise(words))
    assert {"--train-iters": "6", "--eval-iters": "0", "--log-interval": "1", "--timing-log-level": "1",
            "--initial-loss-scale": "4096", "--seed": "3"}.items() <= given.items()  # fmt: skip
    assert "--mock-data" in words and "--tensorboard-dir" not in words
    own = trial_flags(candidate("--data-path", "d", "--fp16", "--initial-loss-scale", "8"), settings())
    assert "--mock-data" not in own and own.count("--initial-loss-scale") == 1
    old = trial_flags(candidate("--train-weighted-split-paths", "t: 1 0:1 d"), settings())
    assert "--mock-data" not in old
