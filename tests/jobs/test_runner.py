"""Runs as processes: their outcomes, their own end, and nothing left behind.

Small programs stand in for training, and seconds are virtual; test_tune.py has a search with real
trials.
"""

import json
import os
import signal
import sys

import pytest

from megatron.jobs import runner as running
from megatron.jobs.result import CRASH, HANG, LOST_RANK, OUT_OF_MEMORY, STOPPED, TIME_OUT
from megatron.jobs.runner import ALLOCATION, TIME, Job, LaunchTarget, Runner, time_left
from tests.helpers.clock import VirtualClock
from tests.jobs.waiting import Lifeline

pytestmark = pytest.mark.slow
STEP = '{"event": "iteration", "iteration": %d, "step_time_s": 1.0}'
END = '{"event": "end", "iteration": 3, "reason": "done"}'


def job(folder, name="a", processes=1, nodes=1, **more):
    return Job(
        name, folder / name, {"name": name}, (), processes, nodes, 3, **{"limit_s": 1e6, **more}
    )


class Jobs:
    """Source of these jobs, in order.

    `again`: interrupted jobs run again. `at`: called when all have started.
    """

    def __init__(self, *jobs, requeue=False, at=lambda: None):
        self.left = list(jobs)
        self.ends = []
        self.requeue = requeue
        self.at = at
        self.most = self.started = 0

    def next(self, runner):
        self.most = max(self.most, self.started - len(self.ends))
        if not self.left:
            self.at()
        if not self.left or not runner.room(self.left[0].nodes):
            return None
        self.started += 1
        return self.left.pop(0)

    def ended(self, end):
        self.ends.append(end)
        if end.interrupted and self.requeue:
            self.left.append(end.job)

    @property
    def end(self):
        (end,) = self.ends
        return end

    @property
    def why(self):
        """Return the kind of the last end, None if it is no failure of the job."""
        why = self.ends[-1].why
        return None if why is None or self.ends[-1].interrupted else why.kind


def run(
    source,
    hosts=(),
    pass_s=0.0,
    say=lambda text: None,
    **more,
):
    """Run with a virtual clock that advances by `pass_s` between polls, in little real time."""
    clock = VirtualClock()

    def sleep(_):
        clock.advance(pass_s)
        os.sched_yield()

    target = LaunchTarget("slurm" if hosts else "local", tuple(hosts), 2 if hosts else 1)
    return Runner(target, say, clock=clock, sleep=sleep, **more).run(source)


@pytest.fixture
def alive(tmp_path):
    return Lifeline(tmp_path / "alive")


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """Replace training by Python programs.

    They have `metrics`, which writes records, `rank`, and `stay`, which opens the lifeline and then
    blocks for ever.
    """
    begin = f"""
import os, signal
def stay():
    kept = open({str(tmp_path / "alive")!r}, "w")
    while True: signal.pause()
rank = int(os.environ["RANK"])
"""

    def replace(program):
        def command(flags):
            write = (
                f"def metrics(*lines): open({flags[-1]!r}, 'a').write(''.join(line + chr(10) "
                "for line in lines))\n"
            )
            return [sys.executable, "-I", "-S", "-c", f"{write}{begin}{program}"]

        monkeypatch.setattr(running, "training_command", command)

    return replace


@pytest.fixture
def steps(monkeypatch):
    """Replace the launcher of a job step by shell programs, in a running job."""
    monkeypatch.setattr(running, "_squeue", lambda _: "RUNNING")
    return lambda program: monkeypatch.setattr(
        running, "slurm_command", lambda flags: ["bash", "-c", program]
    )


# -- how runs end ----------------------------------------------------------------------------------


def test_a_run_with_all_its_steps_is_complete_and_described(tmp_path, programs):
    programs(f"rank or metrics({STEP % 3!r}, {END!r})")
    source = Jobs(job(tmp_path, processes=2), job(tmp_path, "b"))
    assert run(source) == "" and source.most <= 1
    first, second = source.ends
    assert (first.job.name, second.job.name) == ("a", "b")
    assert first.complete and first.why is None and not first.interrupted
    assert first.run.exit_codes == [0, 0]
    assert json.loads((tmp_path / "a/point.json").read_text()) == {"name": "a", "hosts": []}
    first.note({"status": "done"})
    noted = json.loads((tmp_path / "a/result.json").read_text())
    assert (noted["status"], noted["exit_code"]) == ("done", 0)


@pytest.mark.parametrize(
    ("program", "more", "kind", "words"),
    [
        ("stay()", {"limit_s": 20.0}, TIME_OUT, "0:20"),
        (f"metrics({STEP % 1!r}); stay()", {"stall_s": 30.0}, HANG, "step 1 of 3"),
        # It ignores a request to end, and so does a process that it started.
        (
            "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.fork(); stay()",
            {"limit_s": 20.0},
            TIME_OUT,
            "0:20",
        ),
    ],
)
def test_what_takes_too_long_is_stopped_and_nothing_is_left(
    tmp_path,
    programs,
    alive,
    monkeypatch,
    program,
    more,
    kind,
    words,
):
    programs(program)
    started = []
    look = running.Watch.look

    def after_the_start(self, now):
        started or started.append(alive.started() is None)
        return look(self, now)

    monkeypatch.setattr(running.Watch, "look", after_the_start)
    source = Jobs(job(tmp_path, **more))
    run(source, pass_s=4.0)
    assert source.why == kind and words in source.end.why.reason, source.end
    alive.gone()


def test_a_rank_that_is_killed_does_not_leave_the_other(tmp_path, programs, alive):
    programs("os.kill(os.getpid(), signal.SIGKILL) if rank else stay()")
    source = Jobs(job(tmp_path, processes=2))
    run(source, pass_s=1.0)
    assert source.why == OUT_OF_MEMORY


def test_before_the_first_step_there_is_the_whole_limit(tmp_path):
    watch = running.Watch(job(tmp_path, limit_s=1000.0, stall_s=30.0), 0.0)
    folder = tmp_path / "a"
    folder.mkdir()
    assert not any(watch.look(float(now)) for now in range(0, 900, 5))
    (folder / "metrics.jsonl").write_text(STEP % 1 + "\n")
    assert watch.look(905.0) is None and watch.look(910.0) is None
    ends = [watch.look(float(now)) for now in range(915, 945, 5)]
    assert ends[-1] is not None and ends[-1].kind == HANG


def test_a_run_is_stopped_by_its_validation_losses(tmp_path):
    asked = []

    def stops(losses):
        asked.append(list(losses))
        return losses[-1:] == [7.5]

    watch = running.Watch(job(tmp_path, limit_s=1000.0, stops=stops), 0.0)
    folder = tmp_path / "a"
    folder.mkdir()
    loss = '{"event": "validation", "dataset": "%s", "lm_loss": %s, "iteration": 1}\n'
    text = STEP % 1 + "\n" + loss % ("valid", 9.5) + loss % ("test", 7.5)
    (folder / "metrics.jsonl").write_text(text)
    assert watch.look(5.0) is None and asked[-1] == [9.5]
    (folder / "metrics.jsonl").write_text(text + loss % ("valid", 7.5))
    end = watch.look(6.0)
    assert (
        end is not None and (end.kind, asked[-1]) == (STOPPED, [9.5, 7.5]) and "7.5" in end.reason
    )


def test_a_crash_is_told_in_the_programs_words(tmp_path, programs):
    for program, words in (("raise ValueError('x')", "ValueError: x"), ("pass", "ended early")):
        programs(program)
        source = Jobs(job(tmp_path))
        run(source)
        assert source.why == CRASH and words in source.end.why.reason and not source.end.complete
    assert (tmp_path / "a/attempt-1/train.log").exists(), "what an earlier attempt left is kept"


# -- ends of the starter ---------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_ends_it_in_order_and_what_ran_is_interrupted(tmp_path, programs, alive, number):
    programs("stay()")
    before = signal.getsignal(number)
    sent = []

    def at():
        if not sent:
            alive.started()
            sent.append(True)
            os.kill(os.getpid(), number)

    source = Jobs(job(tmp_path), at=at)
    assert run(source) == number.name and signal.getsignal(number) == before
    assert number.name in source.end.interrupted and source.end.why is None
    alive.gone()


def test_an_error_of_the_source_leaves_nothing_running(tmp_path, programs, alive):
    programs("stay()")

    def at():
        alive.started()
        raise OSError("x")

    source = Jobs(job(tmp_path), at=at)
    with pytest.raises(OSError, match="x"):
        run(source)
    assert source.end.interrupted
    alive.gone()


def test_time_that_is_up_stops_what_runs(tmp_path, programs):
    programs("while True: signal.pause()")
    source = Jobs(job(tmp_path))
    assert run(source, left_s=lambda: 0.0) == TIME and source.end.interrupted == TIME


def test_time_left_is_that_of_whatever_ends_first():
    clock = VirtualClock(5.0)
    left = time_left(1000.0, lambda: 100.0, reserve_s=30.0, clock=clock)
    assert left() == 70.0
    clock.advance(81.0)
    assert left() == -11.0
    assert (
        time_left(50.0, lambda: None, clock=clock)() == 50.0
        and time_left(None, lambda: None)() is None
    )


# -- as steps of a job -----------------------------------------------------------------------------


def test_nodes_are_disjoint_and_come_back(tmp_path, steps):
    """Nodes are disjoint and are reused.

    Steps take one, two and two nodes of three, two at a time; a shell in place of srun reports its
    nodes.
    """
    steps('echo "$HOSTS $NODES $TASKS_PER_NODE $MASTER_PORT $SRUN_FLAGS" > "$LOGS.place"; exit 3')
    jobs = [
        job(tmp_path, name, processes=nodes, nodes=nodes)
        for name, nodes in (("a", 1), ("b", 2), ("c", 2))
    ]
    source = Jobs(*jobs)
    assert run(source, hosts=("n1", "n2", "n3")) == ""
    assert len(source.ends) == 3 and source.most == 2
    a, b, c = ((each.folder / "tasks.place").read_text().split() for each in jobs)
    assert a[:3] == ["n1", "1", "1"] and b[:3] == ["n2,n3", "2", "1"] and c[1] == "2"
    assert len({a[3], b[3], c[3]}) == 3
    names = [words[-1] for words in (a, b, c)]
    assert names == [f"--job-name={name}-{os.getpid()}" for name in "abc"]


def test_what_ends_with_its_allocation_is_interrupted(tmp_path, monkeypatch):
    """Jobs that end with their allocation are interrupted.

    A stub of squeue answers for a cancelled job, for a running one, and not at all; it applies the
    filters of a user's shell.
    """
    monkeypatch.setattr(running, "slurm_command", lambda flags: ["bash", "-c", "exit 143"])
    monkeypatch.setattr(running, "Inquiry", Asked)
    monkeypatch.setattr(Asked, "dead", [])
    monkeypatch.setenv("SQUEUE_STATES", "PENDING")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    squeue = tmp_path / "bin/squeue"
    squeue.parent.mkdir()
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    for script, lost in (
        ("echo COMPLETING", True),
        ("echo Invalid job id specified >&2; exit 1", True),
        ("echo RUNNING", False),
        ("echo Unable to contact >&2; exit 1", False),
        ("[[ -n ${SQUEUE_STATES-} ]] || echo RUNNING", False),
    ):
        squeue.write_text(f"#!/bin/bash\n{script}\n")
        squeue.chmod(0o755)
        source = Jobs(job(tmp_path))
        assert run(source, hosts=["n1"]) == (ALLOCATION if lost else ""), script
        assert (source.end.interrupted == ALLOCATION) is lost


class Asked:
    """Stand-in for an inquiry about nodes. `dead`: the dead ones; None: all."""

    dead: list[str] | None = None

    def __init__(self, hosts):
        self.dead = list(hosts) if Asked.dead is None else Asked.dead


def test_what_a_node_took_along_runs_again_on_others_twice(tmp_path, steps, monkeypatch):
    """A job lost with its node runs again on others twice.

    The third loss is attributed to its layout, as running out of memory is at once.
    """
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(running, "Inquiry", Asked)
    messages = []
    hosts = ("n1", "n2", "n3", "n4")
    steps("exit 75")
    source = Jobs(job(tmp_path), requeue=True)
    run(source, hosts=hosts, say=messages.append)
    assert [end.hosts for end in source.ends] == [("n1",), ("n2",), ("n3",)] and len(messages) == 3
    first, second, last = source.ends
    assert "n1" in first.interrupted and "n2" in second.interrupted
    assert source.why == LOST_RANK and last.why is not None and "n3" in last.why.reason
    steps("echo 'torch.OutOfMemoryError: HIP out of memory' >&2; exit 1")
    source = Jobs(job(tmp_path))
    run(source, hosts=hosts)
    assert source.why == OUT_OF_MEMORY
