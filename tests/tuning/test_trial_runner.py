"""Trials as real runs: what they end as, that they end alone, and that nothing is left of them."""
from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron.errors import ConfigError
from megatron.parallel.processes import process_state
from megatron.planning.experiments.endings import Ending
from megatron.planning.scaling.runs import read_run
from megatron.tuning import trial_runner as running
from megatron.tuning.trial_folder import trial_flags
from megatron.tuning.trial_runner import Place, TrialRunner, TrialSettings
from megatron.tuning.types import CRASH, DONE, FAILED, HANG, OUT_OF_MEMORY, REFUSED, TIME_OUT, Candidate, Result, Trial
from megatron.tuning.watch import Watch
from tests.helpers.launching import ROOT

GIB = 2**30
BASE = ("--preset", "tiny", "--num-layers", "2", "--global-batch-size", "8", "--num-workers", "0")
FOREVER = "import time; time.sleep(600)"


def candidate(*flags: str, processes: int = 1, nodes: int = 1, index: int = 0) -> Candidate:
    return Candidate(index, f"c{index}", {}, (*BASE, *flags), processes, nodes, 8 * 64)


def settings(iterations: int = 2, warm_up: int = 1, limit_s: float = 200.0, stall_s: float | None = None,
             flags: Sequence[str] = ()) -> TrialSettings:  # fmt: skip
    return TrialSettings(iterations, warm_up, lambda _: limit_s, stall_s, tuple(flags))


def runner(folder: Path, how: TrialSettings | None = None, memory: int | None = None) -> TrialRunner:
    return TrialRunner(folder, Place("local", (), 2, 1, memory), how or settings())


def trial(of: Candidate, number: int = 1) -> Trial:
    return Trial(number, of, "test", f"trials/{number:04d}")


def ended(of: TrialRunner, timeout_s: float = 240.0) -> Trial:
    """The one trial that runs, ended."""
    (found,) = all_ended(of, timeout_s)
    return found


def all_ended(of: TrialRunner, timeout_s: float = 240.0) -> list[Trial]:
    found, end = list[Trial](), time.monotonic() + timeout_s
    while of.running:
        assert time.monotonic() < end, f"{len(of.running)} trials do not end"
        found += of.poll()
        time.sleep(0.05)
    return found


def run(folder: Path, of: Candidate, how: TrialSettings | None = None, memory: int | None = None) -> Result:
    own = runner(folder, how, memory)
    own.start(trial(of))
    result = ended(own).result
    assert result is not None and not own.running and own.can_start(of)
    return result


def until(true: Callable[[], bool], timeout_s: float = 200.0) -> None:
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def ranks_of(folder: Path) -> list[int]:
    """Processes that write to a trial's metrics file, or wait to."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(folder / "metrics.jsonl").encode() in words and process_state(int(entry.name)) != "dead":
                found.append(int(entry.name))
    return found


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Python programs in the place of training. `metrics` is the path of the metrics file in them."""

    def replace(program: str) -> None:
        def command(flags: Sequence[str]) -> list[str]:
            return [sys.executable, "-c", f"metrics = {flags[-1]!r}\n{program}"]

        monkeypatch.setattr(running, "training_command", command)

    return replace


# ---- real training


def test_a_trial_gives_figures_of_its_steady_steps(tmp_path: Path) -> None:
    own = runner(tmp_path, settings(3, 2))
    of = candidate("--tensor-model-parallel-size", "2", processes=2)
    assert own.can_start(of)
    started = own.start(trial(of))
    assert started.started is not None and started.result is None and own.running == [started]
    assert not own.can_start(of)
    done = ended(own)
    result = done.result
    assert result is not None and result.status == DONE, result
    records = [json.loads(line) for line in (tmp_path / "trials/0001/metrics.jsonl").read_text().splitlines()]
    steps = sorted(record["step_time_s"] for record in records if record["event"] == "iteration" and
                   record["iteration"] > 2)  # fmt: skip
    assert len(steps) == 3 == result.steady and result.step_s == steps[1]
    assert result.spread == pytest.approx((steps[2] - steps[0]) / steps[1])
    assert result.tokens_per_s == pytest.approx(8 * 64 / steps[1])
    assert result.tokens_per_s_per_device == pytest.approx(8 * 64 / steps[1] / 2)
    assert result.memory_bytes == max(record.get("memory_bytes", 0) for record in records)
    assert result.skipped == result.nan == 0 and done.ended is not None and done.ended > started.started
    (tmp_path / "trials/0001/result.json").unlink()  # killed before it was written
    again = own.recover(started)
    assert again is not None and again.result is not None and again.result.step_s == result.step_s
    assert json.loads((tmp_path / "trials/0001/result.json").read_text())["status"] == DONE
    assert own.recover(trial(of, 2)) is None
    read = read_run(tmp_path / "trials/0001")
    assert read.failure is None and read.point["warm_up"] == 2 and read.finished


def test_too_little_memory_ends_the_trial_alone(tmp_path: Path) -> None:
    result = run(tmp_path, candidate("--hidden-size", "1024", "--num-layers", "12"), memory=GIB // 2)
    assert (result.status, result.kind) == (FAILED, OUT_OF_MEMORY) and "allocate" in str(result.reason), result
    assert run(tmp_path, candidate(), memory=GIB).status == DONE


def test_what_training_refuses_is_recorded_as_such(tmp_path: Path) -> None:
    """A flag that is right as far as the command line goes: only the run finds out."""
    result = run(tmp_path, candidate("--data-path", str(tmp_path / "absent")))
    assert (result.status, result.kind) == (FAILED, REFUSED) and "absent" in str(result.reason), result
    result = run(tmp_path, candidate("--num-attention-heads", "7"))
    assert (result.status, result.kind) == (FAILED, REFUSED) and "7" in str(result.reason), result


def test_a_rank_that_stands_still_ends_the_trial_as_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "GRACE_S", 1.0)
    own = runner(tmp_path, settings(10_000, 1, stall_s=15.0))
    own.start(trial(candidate("--tensor-model-parallel-size", "2", processes=2)))
    folder = tmp_path / "trials/0001"
    until(lambda: (folder / "metrics.jsonl").exists() and '"iteration": 3' in (folder / "metrics.jsonl").read_text())
    for pid in ranks_of(folder):
        os.kill(pid, signal.SIGSTOP)
    result = ended(own).result
    assert result is not None and (result.status, result.kind) == (FAILED, HANG), result
    assert "no step in" in str(result.reason) and not ranks_of(folder)
    assert own.can_start(candidate())


@pytest.mark.slow
def test_a_rank_that_is_killed_does_not_leave_the_other(tmp_path: Path) -> None:
    own = runner(tmp_path, settings(10_000, 1))
    own.start(trial(candidate("--tensor-model-parallel-size", "2", processes=2)))
    folder = tmp_path / "trials/0001"
    until(lambda: (folder / "metrics.jsonl").exists() and '"iteration": 3' in (folder / "metrics.jsonl").read_text())
    os.kill(max(ranks_of(folder)), signal.SIGKILL)
    result = ended(own).result
    assert result is not None and (result.status, result.kind) == (FAILED, OUT_OF_MEMORY), result
    assert str(result.reason).startswith("killed, probably by the kernel's out-of-memory killer")
    assert not ranks_of(folder)


def test_stopping_interrupts_and_the_next_start_keeps_what_was_there(tmp_path: Path) -> None:
    own = runner(tmp_path, settings(10_000, 1))
    of = candidate()
    own.start(trial(of))
    folder = tmp_path / "trials/0001"
    until(lambda: (folder / "metrics.jsonl").exists())
    (stopped,) = own.stop_all("SIGUSR1")
    assert stopped.result is None and stopped.ended is not None and not own.running and not ranks_of(folder)
    assert not (folder / "result.json").exists() and own.recover(stopped) is None
    again = runner(tmp_path)
    again.start(stopped)
    done = ended(again)
    assert done.result is not None and done.result.status == DONE
    assert (folder / "attempt-1/metrics.jsonl").exists()
    (folder / "attempt-1").rename(folder / "attempt-2")  # somebody removed the first
    again.start(stopped)
    assert ended(again).result is not None and (folder / "attempt-1/result.json").exists()


def test_nothing_outlives_a_tuner_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from tests.tuning.test_trial_runner import candidate, runner, settings, trial\n"
        "own = runner(Path(sys.argv[1]), settings(10_000, 1))\n"
        "own.start(trial(candidate('--tensor-model-parallel-size', '2', processes=2)))\n"
        "time.sleep(600)\n"
    )
    tuner = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT)
    folder = tmp_path / "trials/0001"
    try:
        until(lambda: (folder / "metrics.jsonl").exists() and len(ranks_of(folder)) == 2)
    finally:
        tuner.kill()
        tuner.wait()
    until(lambda: not ranks_of(folder))


# ---- programs in its place


def test_a_trial_that_takes_too_long(tmp_path: Path, programs: Callable[[str], None]) -> None:
    programs(FOREVER)
    result = run(tmp_path, candidate(), settings(limit_s=1.0))
    assert (result.status, result.kind) == (FAILED, TIME_OUT)
    assert result.reason == "stopped after its limit of 0:01, before its first step"


def test_a_clock_that_is_set_is_no_reason_to_stop_a_trial(
    tmp_path: Path, programs: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs("import time; time.sleep(1.5); raise ValueError('of its own')")
    own, clock = runner(tmp_path), time.time
    own.start(trial(candidate()))
    monkeypatch.setattr(time, "time", lambda: clock() + 86400)
    result = ended(own).result
    assert result is not None and result.kind == CRASH and "of its own" in str(result.reason), result


def test_a_trial_that_will_not_end_is_ended_by_force(
    tmp_path: Path, programs: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a process of its own making, which has the same files open."""
    monkeypatch.setattr(running, "GRACE_S", 0.5)
    programs(
        "import signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', metrics])\ntime.sleep(600)"
    )
    assert run(tmp_path, candidate(), settings(limit_s=2.0)).kind == TIME_OUT
    until(lambda: not ranks_of(tmp_path / "trials/0001"))


def test_what_stands_still_at_its_memory_limit_is_out_of_memory(
    tmp_path: Path, programs: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(
        "import os, time\nkept, full = [], metrics + '.full'\ntry:\n    while True: kept.append(bytearray(1 << 20))\n"
        "except MemoryError:\n    kept.pop()\n    os.mkdir(full)\n    time.sleep(600)"
    )

    def look(watch: Watch, now: float) -> Ending | None:
        """Its time is over once it has all the memory that it gets, however long that takes."""
        full = (tmp_path / "trials/0001/metrics.jsonl.full").exists()
        return Ending(TIME_OUT, "stopped after its limit") if full else None

    monkeypatch.setattr(Watch, "look", look)
    result = run(tmp_path, candidate(), memory=GIB // 4)
    assert (result.status, result.kind) == (FAILED, OUT_OF_MEMORY) and "at its limit of 0.25 GiB" in str(result.reason)


def test_a_crash_is_told_in_the_programs_words(tmp_path: Path, programs: Callable[[str], None]) -> None:
    programs("raise ValueError('no such thing')")
    result = run(tmp_path, candidate())
    assert (result.status, result.kind, result.reason) == (FAILED, CRASH, "exit code 1: ValueError: no such thing")
    noted = json.loads((tmp_path / "trials/0001/result.json").read_text())
    assert (noted["status"], noted["kind"], noted["exit_code"]) == (FAILED, CRASH, 1)
    programs("pass")
    assert run(tmp_path, candidate()).reason == "ended early"


def test_candidates_that_cannot_run_here_are_refused_without_a_process(
    tmp_path: Path, programs: Callable[[str], None]
) -> None:
    programs("open(metrics, 'w')")
    for of, words in (
        (candidate("--tensor-model-parallel-size", "3", processes=3), "multiple"), (candidate(nodes=2), "2 nodes"),
    ):  # fmt: skip
        result = run(tmp_path, of)
        assert (result.status, result.kind) == (FAILED, REFUSED) and words in str(result.reason), result
    assert not (tmp_path / "trials/0001/metrics.jsonl").exists()


def test_nodes_are_disjoint_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one, two and one nodes among three, two at once; a shell in the place of srun tells of its place."""
    program = 'echo "$HOSTS $NODES $TASKS_PER_NODE $MASTER_PORT $SRUN_FLAGS" > "$LOGS.place"; sleep 0.7; exit 3'
    monkeypatch.setattr(running, "slurm_command", lambda flags: ["bash", "-c", program])
    own = TrialRunner(tmp_path, Place("slurm", ("n1", "n2", "n3"), 2, 2), settings())
    of = {n: candidate(processes=n, nodes=n, index=n) for n in (1, 2, 3, 4)}
    first, second = own.start(trial(of[1], 1)), own.start(trial(of[2], 2))
    assert (first.hosts, second.hosts) == (("n1",), ("n2", "n3")) and not own.can_start(of[1])
    assert {each.number for each in all_ended(own)} == {1, 2} and own.can_start(of[3]) and not own.can_start(of[4])
    assert own.start(trial(of[2], 3)).hosts == ("n1", "n2") and own.can_start(of[1]) and not own.can_start(of[2])
    assert ended(own).result is not None
    told = [(tmp_path / f"trials/000{n}/tasks.place").read_text().split() for n in (1, 2, 3)]
    assert [words[:3] for words in told] == [["n1", "1", "1"], ["n2,n3", "2", "1"], ["n1,n2", "2", "1"]]
    assert len({words[3] for words in told}) == 3
    names = [words[-1] for words in told]
    assert names == [f"--job-name=trial-{n}-{os.getpid()}" for n in (1, 2, 3)], "of another search here they differ"


@pytest.mark.parametrize("taken, starts", [(1, 2), (9, 3)])
def test_a_port_that_another_program_has_is_no_fault_of_the_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: int, starts: int
) -> None:
    ports = tmp_path / "ports"
    program = f"""echo "$MASTER_PORT" >> {ports}; (($(wc -l < {ports}) <= {taken})) || exit 3
        echo "LaunchError: rank 0 on node n1 cannot serve port $MASTER_PORT, perhaps because ..." >&2; exit 2"""
    monkeypatch.setattr(running, "slurm_command", lambda flags: ["bash", "-c", program])
    own = TrialRunner(tmp_path, Place("slurm", ("n1",), 2), settings())
    own.start(trial(candidate(processes=1, nodes=1), 1))
    result = ended(own).result
    assert result is not None and result.kind == CRASH, result
    assert (result.reason == "exit code 3") == (taken == 1) and own.can_start(candidate(processes=1, nodes=1))
    tried = ports.read_text().split()
    assert len(tried) == len(set(tried)) == starts


# ---- flags


def test_flags_of_a_trial() -> None:
    words = trial_flags(candidate("--tensorboard-dir", "x", "--fp16"), settings(4, 2, flags=("--seed", "3")))
    assert " ".join(words[-10:-2]) == "--train-iters 6 --eval-iters 0 --log-interval 1 --timing-log-level 1"
    assert words[-2:] == ["--initial-loss-scale", "4096"] and {"--seed", "--mock-data"} < set(words)
    assert "--tensorboard-dir" not in words
    own = trial_flags(candidate("--data-path", "d", "--fp16", "--initial-loss-scale", "8"), settings())
    assert "--mock-data" not in own and own.count("--initial-loss-scale") == 1


def test_a_trial_that_ends_with_its_allocation_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A squeue that says what it says of a job that was cancelled, of one that runs, and nothing; it heeds filters of
    somebody's shell."""
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setattr(running, "slurm_command", lambda flags: ["bash", "-c", "exit 143"])
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
        own = TrialRunner(tmp_path, Place("slurm", ("n1",), 1), settings())
        own.start(trial(candidate()))
        done = ended(own)
        assert done.ended is not None and (done.result is None) is lost, script


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "trials").write_text("a file")
    with pytest.raises(ConfigError, match="trial 1 cannot be started in"):
        runner(tmp_path).start(trial(candidate()))


def test_an_end_that_cannot_be_written(tmp_path: Path, programs: Callable[[str], None]) -> None:
    programs("pass")
    own = runner(tmp_path)
    own.start(trial(candidate()))
    (tmp_path / "trials/0001/result.part").mkdir()
    with pytest.raises(ConfigError, match=r"trials/0001: the end of trial 1 cannot be written \(Is a directory\)"):
        ended(own)


def test_an_unknown_launcher(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use local or slurm"):
        TrialRunner(tmp_path, Place("mpi", (), 1), settings())
