"""Supervisors of restarts within the job, driven by hand, with small forked processes."""

import itertools
import json
import os
import signal
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import EXIT_LOST_RANK
from megatron.parallel import supervisor as module
from megatron.parallel.flight import file_path
from megatron.parallel.launch import Launch
from megatron.parallel.membership import Generation
from megatron.parallel.store import StoreConnection
from megatron.parallel.supervisor import RestartLimits, Supervisor, Task, places
from tests.helpers.clock import VirtualClock

# -- places ----------------------------------------------------------------------------------------


@st.composite
def survivors(draw):
    """Draw nodes of `per` ranks and spare nodes, of which some tasks are lost."""
    per = draw(st.integers(1, 4))
    nodes = draw(st.integers(1, 4))
    spares = draw(st.integers(0, 3))
    lost = draw(st.sets(st.integers(0, (nodes + spares) * per - 1)))
    size = nodes * per
    tasks = [
        Task(number, f"n{number // per}", number if number < size else None, True)
        for number in range((nodes + spares) * per)
        if number not in lost
    ]
    return per, size, tasks


@given(survivors())
def test_every_rank_has_one_task_and_survivors_keep_theirs(case):
    _, size, tasks = case
    size = min(size, len(tasks))
    of_task = places(tasks, size)
    assert sorted(of_task.values()) == list(range(size))
    assert of_task.keys() <= {task.number for task in tasks}
    if size == case[1]:
        for task in tasks:
            assert task.rank is None or of_task[task.number] == task.rank
    else:  # nobody has moved past another
        kept = [task for task in tasks if task.number in of_task and task.rank is not None]
        kept.sort(key=lambda task: task.rank)
        assert sorted(kept, key=lambda task: of_task[task.number]) == kept


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_the_ranks_of_a_lost_node_go_to_one_node(per, nodes, data):
    """One spare is missing on some nodes, which are used last."""
    lost = data.draw(st.integers(0, nodes - 1))
    size = nodes * per
    active = [Task(n, f"n{n // per}", n, True) for n in range(size) if n // per != lost]
    spares = [Task(size + n, f"s{n // per}", None, True) for n in range(2 * per)]
    if per > 1:
        del spares[data.draw(st.integers(0, per - 1))]
    of_task = places([*active, *spares], size)
    new = [task for task in spares if task.number in of_task]
    assert len({task.node for task in new}) == 1
    assert {of_task[task.number] for task in new} == {n for n in range(size) if n // per == lost}


def test_complete_nodes_remain_when_the_job_shrinks():
    tasks = [Task(n, f"n{n // 2}", n, True) for n in (0, 2, 3, 4, 5)]
    assert places(tasks, 4) == {2: 0, 3: 1, 4: 2, 5: 3}


def test_a_generation_survives_its_message():
    launch = Launch(3, 1, 4, 2, "host", 99, "slurm", "n1", "7", True, 2, ("a note",), "secret")
    generation = Generation(2, launch, "a cause", 1.5, {"forked": 2}, 1, True)
    message = json.loads(json.dumps(generation.to_message()))
    assert Generation.from_message(message) == generation


# -- supervisors -----------------------------------------------------------------------------------


def trains(last, *, progresses=True, leaves=True, code=0):
    """Return work that ends with `code` in generation `last`, and waits for a fault in others."""

    def work(membership):
        while (generation := membership.next()) is not None:
            left = threading.Event()
            membership.abort = left.set
            if progresses:
                membership.reached(generation.number + 1)
            membership.saved()
            if generation.number == last:
                membership.failed("AnError: for this reason")
                return code
            left.wait()
            if not leaves:
                signal.pause()
            if not membership.lost("a peer is lost"):
                return EXIT_LOST_RANK
        return EXIT_LOST_RANK

    return work


ANSWERED_S = 7.0  # after a fault; then tasks without an answer are lost
STARTED = 7.25  # seconds, when the program started


class Job:
    """Supervisors of several tasks in this process, with a store in memory and virtual time."""

    def __init__(self, work, n=2, nodes=None, **limits):
        self.clock = VirtualClock()
        self.said = []
        self.ends = []
        self.noted = []
        self.codes = {}
        limits.setdefault("restarts", 5)
        store = dist.HashStore()
        self.tasks = []
        for number in range(n):
            launch = Launch(
                number,
                0 if nodes else number,
                n,
                1 if nodes else n,
                node=f"n{number}" if nodes else "n0",
                job="test",
            )
            one = Supervisor(
                launch,
                timedelta(seconds=60),
                RestartLimits(**limits),
                work[number] if isinstance(work, list) else work,
                STARTED,
                (),
                lambda: None,
                self.ends.append,
                self.noted.append,
                self.said.append,
                self.clock,
                self.clock.sleep,
            )
            one.store.store = store
            self.tasks.append(one)

    def __enter__(self):
        for task in self.tasks:
            task._begin()
        return self

    def __exit__(self, *_):
        for task in self.tasks:
            if task._child is not None:
                task._child.kill()

    def until(self, condition, without=()):
        """Let all tasks but some work until a condition holds; the leader comes last.

        A leader that ends waits for the others, which cannot go on in that time.
        """
        while not condition():
            for number in reversed(range(len(self.tasks))):
                if number in self.codes or number in without:
                    continue
                code = self.tasks[number]._tick()
                if code is not None:
                    self.codes[number] = code

    def end(self, without=()):
        """Let the tasks work until each has ended; return their exit codes in order."""
        self.until(lambda: len(self.codes) == len(self.tasks) - len(without), without)
        return [self.codes.get(number) for number in range(len(self.tasks))]

    def reach(self, generation, without=()):
        """Let the tasks work until all ranks of a generation have completed a step."""

        def reached():
            taking_part = [
                task
                for number, task in enumerate(self.tasks)
                if number not in without and task._rank is not None
            ]
            return all(
                task._generation == generation and task._reached == generation + 1
                for task in taking_part
            )

        self.until(reached, without)

    def pass_time(self):
        """Let a second pass, unless the leader only waits for processes that need real time."""
        leader = self.tasks[0]
        if leader._failure is None or self.clock.now < leader._failed_at + ANSWERED_S:
            self.clock.advance(1.0)

    def pid(self, number):
        return self.tasks[number]._child.pid

    def kill(self, number, sent=signal.SIGKILL):
        os.kill(self.pid(number), sent)

    @property
    def decision(self):
        """The leader's last decision."""
        return self.tasks[0]._get(f"generation/{self.tasks[0]._generation}")


def test_a_process_that_dies_is_forked_anew_and_the_others_continue():
    with Job(trains(2), n=3) as job:
        for generation, victim in enumerate((1, 0)):
            job.reach(generation)
            before = [job.pid(number) for number in range(3)]
            job.kill(victim)
            job.until(lambda g=generation: all(task._generation > g for task in job.tasks))
            after = [job.pid(number) for number in range(3)]
            assert [a != b for a, b in zip(after, before, strict=True)] == [
                number == victim for number in range(3)
            ]
        assert f"rank 0 (n0, process {before[0]}) ended with signal 9" in job.decision["cause"]
        assert job.decision["restarts"] == {"forked": 2, "in-process": 4}
        assert job.end() == [0, 0, 0]
        assert len(job.said) == 2 and job.ends == []


def test_the_number_of_restarts_is_limited():
    with Job(trains(9), restarts=1) as job:
        job.reach(0)
        job.kill(1)
        job.reach(1)
        job.kill(1)
        codes = job.end()
        assert codes == [EXIT_LOST_RANK, 128 + signal.SIGKILL]
        assert "all 1 restarts of --max-restarts are used" in job.said[-1]
        assert job.ends == [True]  # it has saved: it may be requeued


def test_restarts_without_progress_end_the_job():
    with Job(trains(9, progresses=False), restarts=100) as job:
        for generation in range(9):
            job.until(
                lambda g=generation: (
                    job.codes or all(t._generation == g and t._child.left < g for t in job.tasks)
                )
            )
            if job.codes:
                break
            job.kill(1)
            job.until(lambda g=generation: job.codes or all(t._generation > g for t in job.tasks))
        assert job.end()[0] == EXIT_LOST_RANK
        assert "beyond iteration 0" in job.said[-1]
        assert generation == 3


@pytest.mark.parametrize("code", [2, 130])
def test_an_error_of_the_user_ends_all(code):
    with Job([trains(9), trains(0, code=code), trains(9)], n=3, spares=1) as job:
        assert job.end() == [EXIT_LOST_RANK, code, code]
        assert f"exit code {code}: AnError: for this reason" in job.said[-1]
        assert set(job.noted) == {code}
        assert job.ends == []  # it would come again: it is not requeued


def test_a_process_that_does_not_leave_is_replaced():
    with Job([trains(1, leaves=False), trains(1)]) as job:
        job.reach(0)
        stuck = job.pid(0)
        job.kill(1)
        job.until(lambda: all(task._failure is not None for task in job.tasks))
        job.clock.advance(RestartLimits(0).leaving_s + 1)
        assert job.end() == [0, 0]
        assert job.pid(0) != stuck
        assert job.decision["restarts"] == {"forked": 2}


def test_a_process_that_is_connecting_its_groups_is_replaced_at_once():
    def connects(membership):
        generation = membership.next()
        membership.reached(generation.number + 1)
        if generation.number == 1:
            return 0
        file_path(generation.launch).touch()  # for the flight records, until all have met
        signal.pause()  # like a call of gloo
        return 1

    with Job([connects, trains(1)]) as job:
        job.reach(0)
        started = job.clock.now
        launched = job.tasks[0]._launched
        job.kill(1)
        job.until(lambda: job.tasks[0]._generation == 1)
        assert job.decision["restarts"] == {"forked": 2}
        assert job.clock.now - started < 1.0
        assert job.end() == [0, 0]
        assert not file_path(launched).exists()


def test_a_supervisor_that_hangs_at_the_end_does_not_keep_the_others():
    with Job(trains(0), n=3, spares=1) as job:
        assert job.end(without=[1]) == [0, None, 0]
        assert job.noted == [0]


def test_a_spare_takes_the_place_of_a_lost_node():
    """Task 1 does nothing any more: no supervisor tells the others what became of it."""
    with Job(trains(1), n=4, nodes=True, spares=2) as job:
        job.reach(0)
        assert [task._child is None for task in job.tasks] == [False, False, True, True]

        def replaced():
            job.pass_time()
            return job.tasks[0]._generation == 1

        job.until(replaced, without=[1])
        decision = job.decision
        assert "task 1 has given no sign of life" in decision["cause"]
        assert "task 1 is lost" in decision["cause"]
        assert decision["restarts"] == {"in-process": 1, "spare": 1}
        assert job.end(without=[1]) == [0, None, 0, 0]
        assert [task._shown for task in job.tasks[2:]].count(1) == 1


def test_only_compared_states_are_loaded_until_a_step_is_complete():
    """A restart for copies that differ fails before its first step: the next one is as strict."""

    def work(membership):
        while (generation := membership.next()) is not None:
            left = threading.Event()
            membership.abort = left.set
            if generation.number in (0, 2):
                membership.reached(generation.number + 1)
            if generation.number == 0 and generation.launch.rank == 0:
                membership.announce("the copies of a weight differ", compared=True)
            left.wait()
            membership.lost("a peer is lost")
        return 0

    with Job(work) as job:
        compared = []
        for generation in range(1, 4):
            job.until(lambda g=generation: all(task._generation == g for task in job.tasks))
            if generation == 2:
                job.until(lambda: all(task._stepped for task in job.tasks))
            compared.append(job.decision["compared"])
            job.kill(1)
        assert compared == [True, True, False]


def test_the_job_waits_at_its_end_for_those_that_still_work(tmp_path):
    """Rank 0 is done; the process of rank 1 works for longer than a silent one is waited for."""
    go = tmp_path / "go"

    def works(membership):
        membership.next()
        while not go.exists():
            pass
        return 0

    with Job([trains(0), works]) as job:
        leader, other = job.tasks
        seconds = itertools.count(1)

        def sleep(_):
            job.clock.advance(1.0)
            if next(seconds) == 15:
                assert not job.noted
                go.touch()
            if 1 not in job.codes and (code := other._tick()) is not None:
                job.codes[1] = code

        leader.sleep = sleep
        assert job.end() == [0, 0]
        assert set(job.noted) == {0}


@pytest.mark.parametrize("size", [2, 0])
def test_without_spares_the_job_shrinks_or_ends(size):
    asked = []

    def smaller(available):
        asked.append(available)
        return size

    with Job(trains(1), n=3, nodes=True, smaller=smaller) as job:
        job.reach(0)
        job.tasks[0]._fail("rank 1 is lost")

        def decided():
            job.pass_time()
            return job.tasks[0]._generation == 1 or 0 in job.codes

        job.until(decided, without=[1])
        codes = job.end(without=[1])
        assert asked == [2]
        if size:
            assert codes == [0, None, 0]
            assert [task._shown for task in job.tasks] == [0, 1, 1]
        else:
            assert codes == [EXIT_LOST_RANK, None, EXIT_LOST_RANK]
            assert "2 of 3 processes are left, too few" in job.said[-1]


def test_a_node_that_dies_at_once_again_is_dropped():
    with Job(
        trains(2, progresses=False), n=3, nodes=True, smaller=lambda left: min(left, 2)
    ) as job:
        for generation in range(2):
            job.until(lambda g=generation: all(task._generation == g for task in job.tasks))
            job.kill(1)
        assert job.end() == [0, 0, 0]
        assert [task._rank for task in job.tasks] == [0, None, 1]


class _Lost:
    """A store whose host is lost."""

    def __getattr__(self, name):
        raise RuntimeError("connection reset by peer")


@pytest.mark.parametrize("answers", [False, True])
def test_without_its_store_the_job_ends_and_one_supervisor_of_the_node_says_so(
    monkeypatch, answers
):
    """A node that has only lost its connection ends by itself, and does not requeue the job."""
    monkeypatch.setattr(StoreConnection, "answers", lambda store: answers)
    monkeypatch.setattr(StoreConnection, "serves_store", False)
    with Job(trains(9)) as job:
        job.reach(0)
        for task in job.tasks:
            task.store.store = _Lost()
            with pytest.raises(module._StoreLostError) as error:
                task._tick()
            assert task._without_store(str(error.value)) == (0 if answers else EXIT_LOST_RANK)
            assert task._child.ended()
        assert job.ends == ([] if answers else [True])
        assert job.noted == ([] if answers else [EXIT_LOST_RANK] * 2)
        assert "connection reset by peer" in job.said[-1]


def test_a_leader_that_hangs_does_not_hold_the_nodes():
    """The script of the job ends it once it has the exit code, which any other node writes."""
    with Job(trains(9), nodes=True) as job:
        job.reach(0)
        assert job.tasks[1]._without_store("no decision", undecided=True) == EXIT_LOST_RANK
        assert job.noted == [EXIT_LOST_RANK]
        assert job.ends == [True]


EXECUTED = f"""
import threading
from megatron.parallel.membership import started_by_supervisor
membership = started_by_supervisor()
assert membership.started == {STARTED}
while (generation := membership.next()).number < 1:
    left = threading.Event()
    membership.abort = left.set
    membership.reached(generation.number + 1)
    left.wait()
    membership.lost("a peer is lost")
"""


def test_processes_are_executed_if_a_device_is_open(monkeypatch):
    monkeypatch.setattr(module, "device_is_open", lambda: True)
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", EXECUTED])
    with Job(trains(9)) as job:
        job.reach(0)
        job.kill(1)
        assert job.end() == [0, 0]
        assert job.tasks[0]._generation == 1


@pytest.mark.parametrize("before", [True, False])
def test_signals_are_forwarded(before):
    """The process that the launcher started gets the signal, and the one that trains acts on it.

    before  whether it comes while the supervisor's modules are imported
    """

    def work(membership):
        received = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: received.set())
        membership.next()
        if not before:
            os.kill(os.getppid(), signal.SIGTERM)
        received.wait()
        return 0

    handler = signal.getsignal(signal.SIGTERM)
    limits = RestartLimits(1)
    early = [signal.SIGTERM] if before else []
    supervisor = Supervisor(Launch(), timedelta(seconds=60), limits, work, received=early)
    assert supervisor.run() == 0
    assert signal.getsignal(signal.SIGTERM) == handler


def test_a_signal_that_comes_during_a_restart_is_not_lost():
    """A new process gets it when it has a handler; one that has got it does not get it twice."""

    def work(membership):
        received = []
        some = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: received.append(1) or some.set())
        while (generation := membership.next()) is not None:
            left = threading.Event()
            membership.abort = left.set
            membership.reached(generation.number + 1)
            if generation.number:
                some.wait()
                return 10 * len(received) + 2
            left.wait()
            membership.lost("a peer is lost")
        return 0

    with Job(work) as job:
        job.reach(0)
        for task in job.tasks:
            task._note(signal.SIGTERM, None)
        job.kill(1)
        assert job.end() == [12, 12]
        assert [task._child.code for task in job.tasks] == [12, 12]
