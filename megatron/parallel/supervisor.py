"""Restarts within the job: each process that the launcher started supervises a training process.

The supervisor imports what training needs, but touches no device, and forks the training process.
If that process dies or cannot leave a hanging collective, the supervisor forks another, which has
everything imported. Training processes that survive leave their groups, and all meet again as the
next generation of the job. Supervisors of spare ranks wait until they are needed. The launcher sees
only supervisors, so it neither ends the job nor starts it anew.

The supervisors share the store of the rendezvous, which that of the first task or the launcher
serves. The first one to see a fault writes it under "failure/GENERATION"; each of the others sees
the key, answers under "alive/...", and under "ready/..." once its training process has left its
groups or has ended. The first task's supervisor, the leader, then decides which tasks take part in
the next generation, and writes each one's place. If the store is lost, the job ends as it does
without a supervisor.

A supervisor has one thread, because a fork copies only the thread that calls it.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import select
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

from megatron.errors import EXIT_LOST_RANK, LaunchError
from megatron.parallel.flight import file_path
from megatron.parallel.host_processes import bounded
from megatron.parallel.launch import Launch
from megatron.parallel.membership import (
    END,
    FAILED,
    FORWARDED,
    LOST,
    MESSAGE_BYTES,
    RANKED,
    REACHED,
    READY,
    RESTART,
    SAVED,
    SUPERVISED,
    Generation,
    Membership,
)
from megatron.parallel.parent_watch import die_with
from megatron.parallel.store import ANSWER_S, StoreConnection, batches
from megatron.parallel.topology import compress_ranks

_RESTARTABLE = (1, EXIT_LOST_RANK)  # exit codes after which a process may be started anew
# Faults of a node after which spares take its place; without spares, the job goes on without it if
# no step was completed since the last one.
_FAULTS = 2
_WITHOUT_PROGRESS = 3  # faults in a row without a step that was new, after which the job ends
_BEAT_S = 2.0  # interval of the signs of life that one supervisor of each node gives
_SILENT_S = 20.0  # a node without a sign of life for this long is lost
_LINGER_S = 10.0  # how long the supervisor that serves the store stays for silent ones at the end
_END_S = 600.0  # the same for those whose training processes have not ended
_OF_SYMPTOM = ("ranks", "compared", "replace")  # fields of a symptom that describe the fault
_PATIENCE_S = 1.0  # how long a supervisor waits for another one that knows the cause of a fault
_TICK_S = 0.05
_EVENT = "megatron.parallel.supervisor"  # audit event, with the name of a moment


@dataclass(frozen=True)
class RestartLimits:
    """Limits on restarts.

    restarts   number of restarts; after them a fault ends the job
    spares     number of tasks, the last ones, that wait at the start
    smaller    returns the largest number of ranks, at most the given one, with which the job can
               continue; 0 if it cannot
    leaving_s  seconds that a training process has to leave its groups before it is killed
    """

    restarts: int
    spares: int = 0
    smaller: Callable[[int], int] = lambda available: 0
    leaving_s: float = 20.0


class Task(NamedTuple):
    """A task of the launcher, as it answers after a fault.

    number   the launcher's number
    node     its host
    rank     its rank in the generation that ended; None for a spare
    process  whether its training process survived
    reached  the last iteration that it completed
    """

    number: int
    node: str
    rank: int | None
    process: bool
    reached: int = 0


def places(tasks: Sequence[Task], size: int) -> dict[int, int]:
    """Return the rank of each task that takes part in the next generation of `size` ranks.

    A task that had a rank keeps it if the size stays the same. The ranks of lost tasks go to
    spares, those of one node to spares of one node as far as possible. If there are fewer ranks
    than before, tasks on complete nodes take part first, in the order of their old ranks.
    """
    of_node = Counter(task.node for task in tasks if task.rank is not None)
    active = [task for task in tasks if task.rank is not None]
    spares = [task for task in tasks if task.rank is None]
    staying = {
        task.number: task.rank for task in active if task.rank is not None and task.rank < size
    }
    missing = sorted(set(range(size)) - set(staying.values()))
    if len(missing) <= len(spares) and len(active) <= size:
        free = Counter(task.node for task in spares)
        spares.sort(key=lambda task: (-free[task.node], task.node, task.number))
        return staying | {task.number: rank for task, rank in zip(spares, missing, strict=False)}
    full = max(of_node.values(), default=0)
    ordered = sorted(
        tasks,
        key=lambda task: (
            task.rank is None,
            of_node[task.node] < full,
            task.number if task.rank is None else task.rank,
        ),
    )[:size]
    ordered.sort(key=lambda task: (task.rank is None, task.rank or 0, task.number))
    return {task.number: rank for rank, task in enumerate(ordered)}


@dataclass(eq=False)
class _Child:
    """A training process.

    connection  this end of it
    left        the last generation that it has left
    error       the error with which it has ended, or is about to; "" if unknown
    code        its exit code; None while it runs
    """

    pid: int
    connection: socket.socket
    left: int = -1
    error: str = ""
    code: int | None = None

    def send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has died
            self.connection.send(json.dumps(message).encode())

    def messages(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return what the process has sent; waits up to `timeout_s` for something."""
        received = list[dict[str, Any]]()
        while select.select([self.connection], [], [], 0.0 if received else timeout_s)[0]:
            try:
                data = self.connection.recv(MESSAGE_BYTES)
            except OSError:
                data = b""
            if not data:
                if not received:
                    time.sleep(timeout_s)  # it is dying
                break
            received.append(json.loads(data))
        return received

    def ended(self) -> bool:
        """Return whether the process has ended; sets `code`, negative after a signal."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def kill(self, wait_s: float = ANSWER_S) -> bool:
        """Kill the process; return whether it has ended. A process may be stuck in a driver."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + wait_s
        while not self.ended() and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.ended()


@dataclass(eq=False)
class Supervisor:
    """The supervisor of one task.

    launch   the launcher's identity of this process, whose world size includes the spares
    timeout  time limit for all supervisors to arrive, and for requests to the store
    limits   limits on restarts
    work     trains in the forked process, given its Membership; returns the exit code
    started  see Membership
    received  signals that came before, which the training process will get
    prepare  called first, when signals are forwarded already
    on_end   called by one supervisor when the job ends by a fault, with whether the job has saved
             a checkpoint
    note_end  called with the exit code of the job by each supervisor that learns that it has ended
    say      prints a line
    clock, sleep  functions that measure, and spend, time
    """

    launch: Launch
    timeout: timedelta
    limits: RestartLimits
    work: Callable[[Membership], int]
    started: float = field(default_factory=time.monotonic)
    received: Sequence[int] = ()
    prepare: Callable[[], object] = lambda: None
    on_end: Callable[[bool], object] = lambda saved: None
    note_end: Callable[[int], object] = lambda code: None
    say: Callable[[str], object] = lambda line: print(line, file=sys.stderr, flush=True)
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    _signal: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.store = StoreConnection(self.launch, self.timeout)
        self.leads = self.launch.task == 0
        self._memory = os.memfd_create("megatron-state")
        self._child: _Child | None = None
        self._launched: Launch | None = None  # the identity of the training process
        self._generation = 0
        # This task's number in the generation, from which its training process's rank may differ.
        self._rank: int | None = None
        self._shown: int | None = None  # that rank
        self._size = 0
        self._reached = 0
        self._saved = False
        self._failure: dict[str, Any] | None = None
        self._failed_at = 0.0
        self._alive = False
        self._ready = False
        self._stepped = False  # whether the training process has completed a step of the generation
        self._ask_at = 0.0
        self._working_at = 0.0
        self._symptom: tuple[float, dict[str, Any]] | None = None
        self._node = 0  # index of this task's node, if it gives signs of life for it
        self._beat_at = 0.0
        # of the leader
        self._best = 0
        self._futile = 0
        self._used = Counter[str]()
        self._restarts = 0
        self._compared = False
        self._lost: set[int] = set()
        self._faults = Counter[str]()  # of each node
        self._beats: dict[int, tuple[int, float]] = {}  # of each node's first task
        self._beats_at = 0.0

    # -- the store ---------------------------------------------------------------------------------

    def _ask(self, function: Callable[[], Any]) -> Any:
        """Return the result of a request to the store. Raises _StoreLostError."""
        try:
            # as patient as the leader is with the others
            return bounded(function, _SILENT_S + self.store.pause_s)
        except (RuntimeError, LaunchError) as error:
            raise _StoreLostError(str(error).splitlines()[0]) from error

    def _count(self, key: str, more: int = 0) -> int:
        """Add to the counter `key`, which may be new, and return it."""
        return int(self._ask(lambda: self.store.store.add(key, more)))

    def _set(self, key: str, value: Any) -> None:
        self._ask(lambda: self.store.store.set(key, json.dumps(value)))

    def _get(self, key: str) -> Any:
        """Return the value of a key; None if it does not exist."""
        store = self.store.store
        return self._ask(lambda: json.loads(store.get(key)) if store.check([key]) else None)

    def _values(self, keys: Sequence[str]) -> list[Any]:
        """Return the values of keys that exist."""
        return [json.loads(value) for value in self._ask(lambda: self.store.values(keys))]

    # -- the life of a job -------------------------------------------------------------------------

    def run(self) -> int:
        """Supervise until the job ends; return this task's exit code."""
        before = {
            number: signal.signal(number, self._note)
            for number in FORWARDED
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        self._signal = self._signal or (self.received[-1] if self.received else 0)
        try:
            self.prepare()
            self.store.open()
            self._begin()
            while True:
                code = self._tick()
                if code is not None:
                    return code
        except _StoreLostError as error:
            return self._without_store(str(error), isinstance(error, _NoDecisionError))
        finally:
            if self._child is not None and not self._child.ended():
                self._child.kill()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        if self._child is not None and self._child.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, number)

    def _begin(self) -> None:
        """Start the first generation, whose ranks are those of the launcher."""
        launch = self.launch
        size = launch.world_size - self.limits.spares
        if self._is_beating:
            self._node = self._count("nodes", 1) - 1
            self._set(f"node/{self._node}", launch.task)
            self._count(f"beat/{self._node}", 1)
        if launch.rank >= size:
            return
        local = min(launch.local_world_size, size - (launch.rank - launch.local_rank))
        identity = self._identity(0, launch.rank, size, local)
        self._start(Generation(0, identity, spares=self.limits.spares))

    def _identity(self, generation: int, rank: int, size: int, local_size: int) -> Launch:
        """Return the identity of this task's training process in a generation."""
        served = self.launch.world_size > 1 or self.launch.store_served
        return replace(
            self.launch,
            rank=rank,
            task=rank,
            world_size=size,
            local_world_size=local_size,
            master_addr=self.launch.store_host,
            store_served=served,
            job=f"{self.launch.job}.{generation}" if generation else self.launch.job,
        )

    @property
    def _is_beating(self) -> bool:
        return self.launch.local_rank == 0 and self.launch.world_size > 1

    def _enter(self, generation: int, rank: int | None) -> None:
        """Note that a generation begins, in which this task has a rank, or is a spare."""
        self._generation = generation
        self._rank = self._shown = rank
        self._failure = None
        self._alive = self._ready = self._stepped = False
        self._symptom = None

    def _start(self, generation: Generation) -> None:
        """Tell the training process to begin a generation; fork one if there is none."""
        self._enter(generation.number, generation.launch.rank)
        self._launched = generation.launch
        self._size = generation.launch.world_size
        sys.audit(_EVENT, "starting")
        forked = self._child is None or self._child.ended()
        if self._child is None or forked:
            self._child = self._fork()
        self._child.send(generation.to_message())
        sys.audit(_EVENT, "started")
        if forked and self._signal:  # a second one would end the others without a save
            os.kill(self._child.pid, self._signal)

    def _fork(self) -> _Child:
        """Start a training process that inherits everything that is imported here."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        parent = os.getpid()
        # The process receives them when it has handlers, see Membership.next.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        pid = self._exec(theirs) if device_is_open() else os.fork()
        if pid:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
            return _Child(pid, ours)
        try:
            die_with(parent)
            ours.close()
            for number in FORWARDED:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    signal.signal(number, signal.SIG_DFL)
            if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            code = self.work(Membership(theirs, self._memory, self.started))
        except BaseException:
            import traceback

            traceback.print_exc()
            code = 1
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        # No destructor of the supervisor's objects may run here, such as that of the store.
        os._exit(code)

    def _exec(self, theirs: socket.socket) -> int:
        """Start a training process anew: libraries have opened a device here, which no fork survives."""
        descriptors = (theirs.fileno(), self._memory)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, True)
        supervised = f"{os.getpid()} {theirs.fileno()} {self._memory} {self.started}"
        return os.posix_spawn(sys.executable, sys.orig_argv, {**os.environ, SUPERVISED: supervised})

    # -- between faults ----------------------------------------------------------------------------

    def _tick(self) -> int | None:
        """Handle what has happened; return the exit code if the job has ended for this task."""
        self._listen()
        if self._is_beating and self.clock() - self._beat_at >= _BEAT_S:
            self._beat_at = self.clock()
            self._count(f"beat/{self._node}", 1)
            if self._rank is None and not self._saved:
                # A spare may be the last one left, without the store, and decide on a requeue.
                self._saved = self._has("saved")
        if self._rank is not None and self.clock() - self._working_at >= self._working_s:
            self._working_at = self.clock()
            if self._count(self._key("done")):  # the others' patience ends with silence
                self._count(self._key("working"), 1)
        if self._failure is None and (code := self._watch()) is not None:
            return code
        if self._failure is not None:
            return self._recover()
        return None

    def _listen(self) -> None:
        """Receive the training process's messages, or wait for a tick."""
        if self._child is None or self._child.code is not None:
            self.sleep(min(_TICK_S, self.store.pause_s))
            return
        self._receive(self._child, _TICK_S)

    def _receive(self, child: _Child, timeout_s: float) -> None:
        """Handle the training process's messages, for the first of which this waits."""
        for message in child.messages(timeout_s):
            kind = message["kind"]
            if kind == REACHED:
                self._stepped = True
                self._reached = max(self._reached, message["iteration"])
            elif kind == SAVED and not self._saved:
                self._saved = True
                if self._rank == 0:
                    self._set("saved", True)
            elif kind == RANKED:
                self._shown = message["rank"]
            elif kind == READY:
                child.left = message["generation"]
            elif kind == FAILED:
                child.error = message["symptom"]
            elif kind == LOST and self._symptom is None:
                if message["generation"] != self._generation:  # a thread was late
                    continue
                # Another supervisor may know more: its process has died.
                patience = 0.0 if message["ranks"] or message["compared"] else _PATIENCE_S
                self._symptom = (self.clock() + patience, message)

    def _watch(self) -> int | None:
        """Look for faults and for the end of the job."""
        child = self._child
        if child is not None and child.ended():
            if self._rank is None:  # it was idle
                self._child = None
            elif child.code == 0:
                return self._done()
            else:
                self._report_death(child)
        if self._failure is None and self._symptom is not None:
            at, message = self._symptom
            if self.clock() >= at:
                cause = f"rank {self._shown} ({self.launch.node}): {message['symptom']}"
                self._fail(cause, **{name: message[name] for name in _OF_SYMPTOM})
        if self._failure is not None or not self._may_ask():
            return None
        self._look()
        if self._failure is None and self.leads:
            self._look_for_silent_nodes()
        if self._failure is None and self._rank is None and self._get("finished") is not None:
            self._depart()
            return 0
        return None

    def _may_ask(self) -> bool:
        """Return whether it is time to ask for what other tasks have written."""
        if self.store.share_s <= _TICK_S:
            return True
        now = self.clock()
        if now < self._ask_at:
            return False
        self._ask_at = now + self.store.share_s
        return True

    @property
    def _working_s(self) -> float:
        """Seconds between two signs of a task that the end of the job has to wait for."""
        return max(_BEAT_S, 10 * self.store.share_s)

    def _report_death(self, child: _Child) -> None:
        self._receive(child, 0.0)
        code = child.code or 0
        how = f"exit code {code}" + (f": {child.error}" if child.error else "")
        if code < 0:
            how = f"signal {-code} ({signal.Signals(-code).name})"
        user_code = 0
        if code not in (0, *_RESTARTABLE) and (code > 0 or -code == self._signal):
            user_code = code if code > 0 else 128 - code
        ends = user_code > 0 or self._count(self._key("done")) > 0
        where = f"rank {self._shown} ({self.launch.node}, process {child.pid})"
        self._fail(
            f"{where} ended with {how}", final=ends, user_code=user_code, node=self.launch.node
        )

    def _fail(
        self,
        cause: str,
        final: bool = False,
        user_code: int = 0,
        node: str = "",
        ranks: Sequence[int] = (),
        compared: bool = False,
        replace: bool = False,
    ) -> None:
        """Report a fault to all supervisors, unless another one has been reported.

        final               whether the job ends
        user_code           exit code if the user must mend something, or has ended the job; else 0
        node                the node that has the fault; "" if unknown
        ranks, compared, replace  as in Membership.announce
        """
        failure = {
            "cause": cause,
            "final": final,
            "user_code": user_code,
            "node": node,
            "ranks": list(ranks),
            "compared": compared,
            "replace": replace,
        }
        text = json.dumps(failure)
        store = self.store.store
        self._ask(lambda: store.compare_set(self._key("failure"), "", text))
        self._look()

    def _key(self, kind: str) -> str:
        return f"{kind}/{self._generation}"

    def _look(self) -> None:
        """Look for a fault that a supervisor has reported."""
        self._failure = self._get(self._key("failure"))
        if self._failure is None:
            return
        self._failed_at = self.clock()
        sys.audit("megatron.parallel.fault", self._generation, self._failure["cause"])
        kind = END if self._failure["final"] else RESTART
        if self._child is not None and not self._child.ended():
            if self._rank in self._failure["ranks"]:
                self._child.kill()
            else:
                self._child.send({"kind": kind, "cause": self._failure["cause"]})

    def _look_for_silent_nodes(self) -> None:
        """Report nodes that have given no sign of life for _SILENT_S."""
        now = self.clock()
        if now - self._beats_at < _BEAT_S or self.launch.world_size == 1:
            return
        if self._count(self._key("done")):
            return  # the job is ending
        self._beats_at = now
        nodes = range(self._count("nodes"))
        tasks = self._values([f"node/{node}" for node in nodes])
        counts = self._values([f"beat/{node}" for node in nodes])
        for task, count in zip(tasks, counts, strict=True):
            last, at = self._beats.get(task, (None, now))
            if count != last:
                self._beats[task] = (count, now)
            elif task not in self._lost and now - at > _SILENT_S:
                self._fail(
                    f"the node of task {task} has given no sign of life for {now - at:.0f} s"
                )
                return

    def _has(self, key: str) -> bool:
        return bool(self._ask(lambda: self.store.store.check([key])))

    def _done(self) -> int:
        """Take note that this task's training process has ended well; return its exit code."""
        try:
            if self._count(self._key("done"), 1) == self._size:
                self._finished()
            elif self.leads:
                self._await_the_others()
        except _StoreLostError:
            self.note_end(0)  # the leader's supervisor hangs, or has ended
        self._depart()
        return 0

    def _await_the_others(self) -> None:
        """Wait for the end of all ranks. A supervisor that hangs does not report that of its rank."""
        linger_s = max(_LINGER_S, 3 * self._working_s)
        end = self.clock() + max(_END_S, linger_s)
        deadline = self.clock() + linger_s
        signs = 0
        while not self._has("finished") and not self._has(self._key("failure")):
            working = self._count(self._key("working"))
            if working > signs:
                signs = working
                deadline = min(self.clock() + linger_s, end)
            if self.clock() > deadline:
                self._finished()
            self.sleep(_TICK_S)

    def _finished(self) -> None:
        """Note that training is complete, and let the supervisors of spares end."""
        self._set("finished", True)
        self.note_end(0)

    def _depart(self) -> None:
        """Note that this supervisor ends; the one that serves the store waits for the others."""
        expected = self.launch.world_size - len(self._lost)
        deadline = self.clock() + _LINGER_S
        with contextlib.suppress(_StoreLostError):
            departed = self._count("departed", 1)
            while self.leads and departed < expected and self.clock() < deadline:
                self.sleep(_TICK_S)
                departed = self._count("departed")

    # -- after a fault -----------------------------------------------------------------------------

    def _recover(self) -> int | None:
        """Bring this task to the next generation; return the exit code if there is none."""
        failure = self._failure
        assert failure is not None, "a fault has been reported"
        child = self._child
        number = self._generation + 1
        waited_s = self.clock() - self._failed_at
        if failure["final"]:
            return self._finish(failure["cause"], failure["user_code"])
        if not self._alive:
            self._alive = True
            sys.audit(_EVENT, "answering")
            self._set(f"alive/{number}/{self.launch.task}", True)
        if not self._ready:
            survives = child is not None and not child.ended()
            takes_part = self._rank is not None
            if survives and takes_part and child is not None and child.left < self._generation:
                if waited_s < self.limits.leaving_s:
                    return None
                if not child.kill():
                    self.say(
                        f" task {self.launch.task} ({self.launch.node}): process {child.pid} cannot "
                        "be killed: this task leaves the job"
                    )
                    return EXIT_LOST_RANK
                survives = False
            self._ready = True
            mine = Task(self.launch.task, self.launch.node, self._rank, survives, self._reached)
            about = [*mine, self._saved, self._stepped]
            self._set(f"ready/{number}/{self.launch.task}", about)
            self._count(f"ready/{number}", 1)
            sys.audit(_EVENT, "ready")
        if self.leads and self._get(f"generation/{number}") is None:
            self._lead(number, waited_s)
        elif not self.leads and not self._may_ask():
            return None
        decision = self._get(f"generation/{number}")
        if decision is None:
            if waited_s > self.limits.leaving_s + self.timeout.total_seconds():
                raise _NoDecisionError("the leader has not decided on the next generation")
            return None
        return self._follow(number, decision)

    def _lead(self, number: int, waited_s: float) -> None:
        """Decide on the next generation, once all tasks that live are ready."""
        tasks = [task for task in range(self.launch.world_size) if task not in self._lost]
        answer_s = ANSWER_S + self.store.pause_s
        if waited_s < answer_s and self._count(f"ready/{number}") < len(tasks):
            return
        late = self._without(f"ready/{number}", tasks)
        if late:
            alive = late - self._without(f"alive/{number}", sorted(late))
            if waited_s < answer_s or (alive and waited_s < self.limits.leaving_s + 2 * answer_s):
                return
        ready = [task for task in tasks if task not in late]
        values = self._values([f"ready/{number}/{task}" for task in ready])
        self._lost |= late
        assert self._failure is not None, "a fault has been reported"
        self._saved = any(saved for *_, saved, _ in values)
        # Until a step is complete, a local checkpoint that was not to be loaded may still exist.
        stepped = any(stepped for *_, stepped in values)
        self._compared = self._failure["compared"] or (self._compared and not stepped)
        cause = self._failure["cause"]
        if late:
            tasks_lost = f"task {compress_ranks(late)} is lost: its supervisor gives no answer"
            cause = f"{tasks_lost} (seen as: {cause})"
        self._decide(number, [Task(*about) for *about, _, _ in values], cause)

    def _without(self, kind: str, tasks: Sequence[int]) -> set[int]:
        """Return the tasks that do not have a key of this kind."""
        return set(self._ask(lambda: self.store.ranks_without(kind, len(tasks), tasks)))

    def _decide(self, number: int, tasks: Sequence[Task], cause: str) -> None:
        """Write the places of the tasks in the next generation, or that there is none.

        cause   why the last generation has ended
        """
        assert self._failure is not None, "a fault has been reported"
        best = max((task.reached for task in tasks), default=0)
        self._futile = 0 if best > self._best else self._futile + 1
        self._best = max(best, self._best)
        needed = size = self.launch.world_size - self.limits.spares
        culprits = {task.node for task in tasks if task.rank in self._failure["ranks"]}
        for node in culprits | {self._failure["node"]}:
            self._faults[node] += _FAULTS if self._failure["replace"] else 1
        good = [task for task in tasks if self._faults[task.node] < _FAULTS]
        if len(good) >= size:
            tasks = good
        elif self._futile and (smaller := self.limits.smaller(len(good))):
            tasks, size = good, smaller
        elif len(tasks) < size:
            size = self.limits.smaller(len(tasks))
        problem = ""
        if self._restarts >= self.limits.restarts:
            problem = f"all {self.limits.restarts} restarts of --max-restarts are used"
        elif self._futile >= _WITHOUT_PROGRESS:
            problem = (
                f"before the last {_WITHOUT_PROGRESS} faults the job did not get beyond iteration "
                f"{self._best}"
            )
        elif not size:
            problem = (
                f"{len(tasks)} of {needed} processes are left, too few to continue (--spare-ranks, "
                "--min-ranks)"
            )
        if problem:
            self._set(f"generation/{number}", {"end": f"{cause}; {problem}"})
            return
        sys.audit(_EVENT, "deciding")
        self._restarts += 1
        self.say(f" fault: {cause}; restart {number} of at most {self.limits.restarts}")
        of_task = places(tasks, size)
        known = {task.number: task for task in tasks}
        for task in of_task:
            way = "in-process" if known[task].process else "forked"
            self._used["spare" if known[task].rank is None else way] += 1
        local = Counter(known[task].node for task in of_task)
        for some in batches(list(of_task)):
            self._ask(
                partial(
                    self._write_places,
                    number,
                    {task: (of_task[task], local[known[task].node]) for task in some},
                )
            )
        self._set(
            f"generation/{number}",
            {
                "size": size,
                "cause": cause,
                "outage_s": self.clock() - self._failed_at,
                "restarts": dict(self._used),
                "spares": max(len(good) - size, 0),
                "compared": self._compared,
                "reached": self._best,
            },
        )

    def _write_places(self, number: int, places: Mapping[int, tuple[int, int]]) -> None:
        """Write the rank of tasks, and the number of ranks on their node."""
        keys = [f"place/{number}/{task}" for task in places]
        values = [json.dumps(place) for place in places.values()]
        self.store.store.multi_set(keys, values)  # type: ignore[attr-defined]

    def _remove_flight_file(self) -> None:
        """Remove the file that a process has left which was killed while the ranks met."""
        if self._launched is not None:
            file_path(self._launched).unlink(missing_ok=True)

    def _follow(self, number: int, decision: Mapping[str, Any]) -> int | None:
        """Take this task's place in the next generation; return the exit code if there is none."""
        self._remove_flight_file()
        if "end" in decision:
            return self._finish(decision["end"])
        place = self._get(f"place/{number}/{self.launch.task}")
        if place is None:  # a spare
            self._enter(number, None)
            return None
        rank, local_size = place
        self._start(
            Generation(
                number,
                self._identity(number, rank, decision["size"], local_size),
                decision["cause"],
                decision["outage_s"],
                decision["restarts"],
                decision["spares"],
                decision["compared"],
                decision["reached"],
            )
        )
        return None

    def _end(self, child: _Child, cause: str) -> int:
        """Let the training process end, or kill it; return the task's exit code."""
        child.send({"kind": END, "cause": cause})
        deadline = self.clock() + self.limits.leaving_s + 4 * ANSWER_S
        while not child.ended() and self.clock() < deadline:
            self._saved |= any(one["kind"] == SAVED for one in child.messages(_TICK_S))
        if not child.ended():
            child.kill()
        self._remove_flight_file()
        code = child.code or 0
        return 128 - code if code < 0 else code

    def _finish(self, cause: str, user_code: int = 0) -> int:
        """End this task after a fault without a restart; return the exit code.

        user_code   exit code of an error that would come again; 0 if the job may be requeued
        """
        code = user_code or EXIT_LOST_RANK
        self.note_end(code)
        if self._child is not None:
            code = self._end(self._child, cause)
        if self.leads:
            self.say(f" the job ends: {cause}")
            if not user_code:
                self.on_end(self._saved)
        self._depart()
        return code

    def _without_store(self, reason: str, undecided: bool = False) -> int:
        """End this task after the loss of the store; return the exit code.

        If only the connection of this node is lost, the others go on without it.

        undecided  whether the leader, and not its store, gives no answer
        """
        cause = f"the store of the job is lost ({reason})"
        alone = not undecided and not self.store.serves_store
        if alone:
            self.sleep(ANSWER_S)  # the process that serves it may be ending
            alone = self.store.answers()
        if alone:
            cause = (
                f"{self.launch.node} has lost its connection to {self.store.store_name} ({reason})"
            )
            if self.launch.local_rank == 0:
                self.say(f" this node leaves the job: {cause}")
            if self._child is not None:
                self._end(self._child, cause)
            return 0
        if self._child is not None and self._end(self._child, cause) == 0:
            self.note_end(0)
            return 0
        if undecided or self.launch.task < self.launch.local_world_size:
            # Not on other nodes than the store's, which may only have lost their connection to it.
            self.note_end(EXIT_LOST_RANK)
        if self.launch.local_rank == 0:
            # The first node left requeues the job, whose end stops the others before their turn.
            node = self.launch.task // max(self.launch.local_world_size, 1)
            self.sleep(min(node, 60))
            self.say(f" the job ends: {cause}")
            self.on_end(self._saved)
        return EXIT_LOST_RANK


class _StoreLostError(Exception):
    """The store does not answer: the process that serves it, or its node, is lost."""


class _NoDecisionError(_StoreLostError):
    """The store answers, but the leader does not decide."""


def device_is_open() -> bool:
    """Return whether this process has opened a GPU, which a forked process could not use."""
    for link in glob.glob("/proc/self/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(link).startswith(("/dev/kfd", "/dev/nvidia", "/dev/dri/")):
                return True
    return False
