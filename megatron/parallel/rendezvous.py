"""The rendezvous of all processes, and the detection of processes that fail later.

Every process writes a description of itself, under its number from the launcher (Launch.task), to a
store that the first process or the launcher serves. The first process compares the descriptions,
gives each process its rank (rank_mapping.py) and publishes a verdict: the ranks, or an error that
names processes that are missing, conflict or differ.

After that a daemon thread on each rank checks the store for calls. Every rank answers a roll call:
a rank that does not answer is dead, and the others can name it. The threads then fetch the findings
as soon as they are in the store. Thus a rank that sees the failure late, when the store is gone,
names the rank that died, not the rank that it was waiting for. Calls are numbered, so a watchdog
may make any number of them.

A rank has two connections to the store, because a connection on which a thread waits for a key does
not serve other threads: torch uses one exclusively, and this module never waits on the other.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from megatron.config.duration import show_duration
from megatron.errors import LaunchError, LostRankError
from megatron.parallel.environment import changed
from megatron.parallel.flight import FlightFile, FlightRecorder, FlightState
from megatron.parallel.host_processes import bounded, process_start, shut_down, sockets
from megatron.parallel.launch import Launch, select_device
from megatron.parallel.process_descriptions import (
    Alike,
    conflict,
    describe_process,
    difference,
    digests,
)
from megatron.parallel.rank_mapping import (
    LaunchedProcess,
    RankMapping,
    assign,
    check_devices,
    ranks_per_node,
)
from megatron.parallel.store import (
    ANSWER_S,
    StoreConnection,
    T,
    batches,
    host_name_is_local,
    raise_file_limit,
    without_dns,
)
from megatron.parallel.topology import Topology, compress_ranks

AS_LAUNCHED = RankMapping()
# the source path with which gloo was compiled, which does not help users
_SOURCE_LINE = re.compile(r"\[\S+\.(cc|cpp):\d+\] ?")
_SHOWN = 64  # maximum number of missing ranks to look for, and of activities that findings list
_LINGER_S = 5.0  # how long the rank that serves the store stays for others at the end
# With NCCL and more ranks than this, gloo connects ranks on demand: to connect all of them at the
# start would take minutes. When it connects on demand, it waits forever for a rank that died before
# the first message: the launcher has to end the job (srun --kill-on-bad-exit).
_FULL_MESH = 1024
_ROLL = "roll"  # a roll call, made by a rank that has failed or looks for the cause of a failure
_INQUIRY = "inquiry"  # a call made by a watchdog
_NOBODY = -1  # in place of the failed rank's number, if no rank reported why it failed
_OPEN = (
    "any process that connects to the ranks' store can guess its keys and end this job: export "
    "MEGATRON_JOB_TOKEN, a random string and the same on all nodes, before srun, mpirun or torchrun"
)


class Rendezvous(StoreConnection):
    """A connection of this process to all others; after `join`, also through torch.distributed.

    It is a context manager.

    launch, device       this process; after `join`, `launch` has its final rank
    timeout              time limit for all processes to arrive, and for each collective later
    mapping              the ranks that the processes on a node take; by default the launcher's
    alike                values that must be equal on all ranks
    notices              lines for the log about launch and placement; the same on all ranks
    ranks_per_node       see rank_mapping.py
    flight, flight_file  this rank's flight recorder, and the file of its node's flight records
    on_inquiry           called in a separate thread with the number of an inquiry
    judged               cleared while a watchdog finds out whether the job hangs
    acts_on_failure      whether this rank, rather than another, acts on the findings of `explain`
                         by requeuing the job
    failed               whether a rank has failed, so that peers may be missing at the end
    restarts             whether this process will take part in another rendezvous after a failure
    left                 then, after `close`, the groups that it has left, see drop_in_thread
    """

    acts_on_failure = False
    failed = False
    restarts = False
    _absentees = 0
    _call = 1  # the number of the next call
    _roll_findings = ""  # the findings of a roll call
    _reported = False  # whether a rank reported why it failed
    _store_lost = False
    _closed = False

    def __init__(
        self,
        launch: Launch,
        device: torch.device,
        timeout: timedelta,
        mapping: RankMapping = AS_LAUNCHED,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
        alike: Alike | None = None,
    ) -> None:
        super().__init__(launch, timeout, clock, sleep)
        self.device = device
        self.mapping = mapping
        self.alike = alike or {}
        self.backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        self.notices: list[str] = []
        self.ranks_per_node = 1
        self.flight = FlightRecorder()
        self.flight_file: FlightFile
        self.on_inquiry: Callable[[int], None] | None = None
        self.judged = threading.Event()
        self.judged.set()

        self._answers_ended = threading.Event()  # no more calls are answered
        self._pause = self._answers_ended.wait if sleep is time.sleep else sleep
        self._torch_store: dist.Store  # torch's own connection to the store
        self._answer_s = ANSWER_S + self.pause_s  # time for a rank to receive and answer a call
        self._listener: threading.Thread | None = None
        self._variables = contextlib.ExitStack()  # variables set until the end
        self._explained: LaunchError | None = None
        self._before: Set[int] = set()
        self._connections = set[int]()  # of the groups
        self.left: Sequence[object] = ()
        self._alarm: Future[None] = Future()  # done after a roll call, or if the store is gone

    @property
    def _myself(self) -> str:
        task = f", task {self.launch.task}" if self.launch.task != self.launch.rank else ""
        return f"rank {self.launch.rank} ({self.launch.node}:{self.device}{task})"

    @functools.cached_property
    def locations(self) -> list[str]:
        """ "node:device" of every rank, in rank order."""
        locations: list[str] = json.loads(self.store.get("places"))
        return locations

    @functools.cached_property
    def tasks(self) -> list[int]:
        """The task of every rank, in rank order."""
        tasks: list[int] = json.loads(self.store.get("tasks"))
        return tasks

    def join(self) -> Self:
        """Meet all other ranks, take the rank that `mapping` gives and start torch.distributed.

        Raises LaunchError within `timeout` and a few seconds if ranks are missing (it names them
        and locations of the others), if two of them conflict or differ in a value of `alike`, or if
        the store cannot be reached; within the same time again if torch.distributed does not start;
        and at once if it is running already. Exports the launcher-independent variables (RANK, ...)
        until close().
        """
        if dist.is_initialized():
            raise LaunchError(
                "torch.distributed is initialised already: connect once, or close the first "
                "rendezvous"
            )
        deadline = self.clock() + self.timeout.total_seconds()
        with (
            without_dns()
            if self.serves_store and not self.launch.on_one_node
            else contextlib.nullcontext()
        ):
            self.open()
            self._torch_store = self.another()
            self.flight_file = FlightFile(self.launch)
            self.flight = self.flight_file.recorder
            atexit.register(self._leave)
            try:
                # _meet keeps the deadline itself unless the store's host hangs or has lost power.
                left = max(deadline - self.clock(), 0.0)
                failure = f"{self._myself}: {self.store_name} gave no answer"
                bounded(lambda: self._meet(deadline), left + ANSWER_S, failure)
            except LaunchError:
                self._leave()
                raise
            except RuntimeError as error:
                self._store_lost = True
                self._leave()
                raise LaunchError(f"{self._myself}: {self._store_gone()}") from error
        where = f"{self.launch.node}:{self.device}"
        pid = os.getpid()
        self.flight.describe(self.launch.rank, pid, where, process_start(pid))
        self.flight_file.unlink()  # all ranks of the node have opened it
        sys.audit("megatron.parallel.met", self)
        try:
            self._listen()
            self._initialise()
        except (RuntimeError, ValueError, LaunchError) as error:
            explanation = self.explain(error)
            self.close()
            raise explanation from error
        return self

    # -- the rendezvous --------------------------------------------------------------------------

    def _meet(self, deadline: float) -> None:
        """Describe this process to the others, and take the rank that the verdict assigns.

        Raises LaunchError if the verdict is an error.
        """
        store = self.store
        task = self.launch.task
        description = describe_process(self.launch, self.device, self.backend, self.mapping)
        alike = digests(self.alike)
        for digest, text in alike.values():
            # of thousands of processes with the same digest, few need to write the text
            if not store.check([f"alike/{digest}"]):
                store.set(f"alike/{digest}", text)
        description = description._replace(
            alike={kind: digest for kind, (digest, _) in alike.items()}
        )
        written = json.dumps(description._asdict())
        verdict: dict[str, Any] = {}
        if problem := self._interface_problem():
            verdict = {"error": problem}
        elif store.compare_set(f"participant/{task}", "", written).decode() != written:
            verdict = {
                "error": f"two processes have rank {task}: {self._location_of_task(task)}, and "
                f"{description.location}, process {description.pid}: each process needs its own rank"
            }
        elif task == 0:
            verdict = self._judge(deadline)
        if verdict:
            store.set("verdict", json.dumps(verdict))
        elif self.poll(["verdict"], deadline):
            verdict = json.loads(store.get("verdict"))
        else:
            verdict = {"error": self._absent()}
        if "error" in verdict:
            raise LaunchError(verdict["error"])
        # From now on this process uses the rank that it was given.
        self.server = verdict["server"]
        self.notices = verdict["notices"]
        self.ranks_per_node = verdict["ranks_per_node"]
        self.launch = replace(self.launch, rank=int(store.get(f"rank/{task}")))

    def _interface_problem(self) -> str:
        """Return why gloo cannot use the interfaces that the environment names, or ""."""
        for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(","):
            try:
                if name:
                    dist.ProcessGroupGloo.create_device(interface=name)
            except (RuntimeError, TypeError) as error:  # TypeError: a name that is not text
                reason = str(error).splitlines()[0]
                return (
                    f"{self._myself}: gloo cannot use the interface {name!r} in "
                    f"GLOO_SOCKET_IFNAME ({reason})"
                )
        return ""

    def _location_of_task(self, task: int) -> str:
        """Return the location of a process that has described itself."""
        described = LaunchedProcess(**json.loads(self.store.get(f"participant/{task}")))
        return f"{described.location}, process {described.pid}"

    def _absent(self) -> str:
        """Return the error that names the missing ranks."""
        size = self.launch.world_size
        missing = self.ranks_without("participant", _SHOWN)
        within = show_duration(self.timeout.total_seconds())
        self._absentees = len(missing)
        if not missing:
            first = self._location_of_task(0)
            return f"all ranks arrived, but rank 0 ({first}) did not answer within {within}"
        present = "not listed"
        more = " and perhaps more"
        if len(missing) < _SHOWN:
            came = sorted(set(range(size)).difference(missing))[:_SHOWN]
            more = ""
            present = _list_locations(came, [self._location_of_task(rank) for rank in came])
        return (
            f"rank {compress_ranks(missing)}{more} of {size} did not arrive within {within}. "
            f"Present: {present}. Look at the output of the missing ranks; if they only "
            "start slowly, raise --distributed-timeout-minutes"
        )

    def _judge(self, deadline: float) -> dict[str, Any]:
        """Wait, in the first process, for all descriptions and return the verdict.

        Writes the rank of each process, and the location and the task of each rank. Returns {} if
        another process has already given the verdict.
        """
        keys = [f"participant/{task}" for task in range(self.launch.world_size)]
        if not self.poll(keys, deadline, unless="verdict"):
            return {} if self.store.check(["verdict"]) else {"error": self._absent()}
        tasks = [LaunchedProcess(**json.loads(value)) for value in self.values(keys)]
        error = conflict(tasks) or difference(
            [task.alike for task in tasks], lambda digest: self.store.get(f"alike/{digest}")
        )
        if error:
            return {"error": error}
        assignment = assign(tasks, self.mapping.device_order)
        ranks = assignment.ranks
        notices = [*self.launch.notices, *assignment.notices]
        if not self.launch.token and (self.launch.store_served or not self.launch.on_one_node):
            notices.append(_OPEN)
        of_rank = sorted(range(len(ranks)), key=ranks.__getitem__)  # the task of each rank
        self.locations = [
            tasks[task]._replace(number=assignment.devices[task]).location for task in of_rank
        ]
        self.store.set("places", json.dumps(self.locations))
        self.store.set("tasks", json.dumps(of_rank))
        for some in batches(range(len(ranks))):
            self.store.multi_set(  # type: ignore[attr-defined]
                [f"rank/{task}" for task in some], [str(ranks[task]) for task in some]
            )
        per_node = ranks_per_node([tasks[task].node for task in of_rank])
        return {"server": ranks[0], "notices": notices, "ranks_per_node": per_node}

    def _initialise(self) -> None:
        """Start torch.distributed."""
        self._before = sockets().keys()
        launch = self.launch
        on_device = self.device.type == "cuda"
        variables = dict[str, str]()
        if launch.on_one_node and not host_name_is_local():
            variables["GLOO_SOCKET_IFNAME"] = "lo"
        raise_file_limit()  # gloo connects each rank with all others of a group
        if on_device and launch.world_size > _FULL_MESH:
            # With NCCL, gloo carries only Python objects and single numbers, which need few of the
            # connections. (torch >= 2.8 reads this variable.)
            variables["TORCH_GLOO_LAZY_INIT"] = "1"
            # torch's monitor of NCCL also queries the store, every second on every rank.
            variables["TORCH_NCCL_COORD_CHECK_MILSEC"] = str(int(1000 * max(1.0, self.pause_s)))
        chosen = {name: os.environ.get(name, value) for name, value in variables.items()}
        self._variables.enter_context(changed(os.environ, {**launch.environment(), **chosen}))
        if on_device:
            torch.cuda.set_device(self.device)

        def start() -> None:
            if on_device:
                torch.cuda.set_device(self.device)  # the current device is per thread
            # No device_id: with it torch makes groups by splitting the world's communicator, and
            # every rank would have to take part in every group.
            dist.init_process_group(
                self.backend,
                store=dist.PrefixStore("torch", self._torch_store),
                rank=launch.rank,
                world_size=launch.world_size,
                timeout=self.timeout,
            )

        # While gloo connects, it waits five times the timeout for a rank that died, and cannot be
        # interrupted.
        seconds = self.timeout.total_seconds() + ANSWER_S
        self.unless_failed(start, seconds, "torch.distributed did not start")

    def unless_failed(self, function: Callable[[], T], seconds: float, failure: str) -> T:
        """Call `function` like `bounded`; raise LaunchError at once if another rank fails."""
        return bounded(function, seconds, failure, self._alarm)

    def _try(self, function: Callable[[], T], seconds: float) -> T | None:
        """Return the function's result; None if the store is gone or does not answer in time."""
        if not self._store_lost:
            try:
                return bounded(function, seconds)
            except (RuntimeError, LaunchError):
                self._store_lost = True
        return None

    def abort(self, topology: Topology) -> None:
        """Make this rank's calls fail that wait for others, from another thread.

        gloo's `abort` leaves a waiting call as it is, but the call fails when its connections are
        shut down.
        """
        shut_down(sockets().keys() & self._connections)
        if self.device.type == "cuda":
            topology.abort()

    def connected(self) -> None:
        """Note that all groups are connected."""
        self._connections |= sockets().keys() - self._before
        sys.audit("megatron.parallel.connected")

    # -- failures --------------------------------------------------------------------------------

    def fail(self, message: str) -> None:
        """Report to the other ranks why this rank stops. Never raises."""
        self.failed = True
        finding = json.dumps([self.launch.rank, f"{self._myself} failed: {message}"])

        def write() -> None:
            # Only the first failure is the cause. The other ranks must learn of it before this
            # process ends, and perhaps the store with it.
            if self.store.compare_set("findings", "", finding).decode() == finding:
                self._call_all(_ROLL)

        self._try(write, ANSWER_S)

    def explain(self, error: BaseException) -> LaunchError:
        """Return an error that gives the cause of `error`, a failed or timed-out collective.

        It names the ranks that failed or died, as far as they are known. This takes a few seconds.
        The result is a LostRankError, unless a rank reported why it failed. Raise it from `error`.
        """
        if self._explained is None:
            self.failed = True
            # a watchdog that detects a hang ends this process with a better diagnosis
            self.judged.wait(2 * self._answer_s)
            seen = symptom(error)
            text = self._roll_findings or self._try(
                lambda: self._diagnose(seen), 4 * self._answer_s
            )
            text = text or self._roll_findings or self._store_gone()
            if self._store_lost:  # and the rank that served it
                self.acts_on_failure = self.launch.task == 1
            kind = LaunchError if self._reported else LostRankError
            self._explained = kind(f"{self._myself}: {text}. Seen here as {seen}")
        return self._explained

    def _store_gone(self) -> str:
        gone = "is gone" if self.launch.store_served else "is gone, and with it the store"
        return f"{self.store_name} {gone}: it died, ended or was stopped; look at its output"

    def _diagnose(self, seen: str) -> str:
        if self.launch.world_size == 1:
            return "there is no other rank"
        if not self.store.check(["findings"]) and self.store.add("explainers", 1) == 1:
            self.acts_on_failure = True
            findings = json.dumps([_NOBODY, self._call_roll(seen)])
            self.store.compare_set("findings", "", findings)
        if not self.comes("findings", 2 * self._answer_s):
            return "no rank has found out why"
        return self._findings()

    def _findings(self) -> str:
        """Return the message of the first rank that failed, or the findings of the roll call."""
        rank, text = json.loads(self.store.get("findings"))
        self._reported = rank != _NOBODY
        return str(text)

    def _call_roll(self, seen: str) -> str:
        """Ask every rank whether it is alive and what it is doing; return the findings."""
        ranks = range(self.launch.world_size)
        deadline = self.clock() + self._answer_s
        self._call_all(_ROLL)
        self.poll([f"answer/{rank}" for rank in ranks], deadline)
        dead = self.ranks_without("answer", _SHOWN)
        self._absentees = len(dead)
        if dead:
            tasks = self.tasks
            where = [
                self.locations[r] + (f", task {tasks[r]}" if tasks[r] != r else "") for r in dead
            ]
            return (
                f"no sign of life from rank {compress_ranks(dead)}: died or was killed "
                f"({_list_locations(dead, where)})"
            )
        at = defaultdict[str, list[int]](list)
        for rank, answer in enumerate(self.values([f"answer/{rank}" for rank in ranks])):
            at[answer.decode()].append(rank)
        activities = [
            f"rank {compress_ranks(of)} {where}" for where, of in list(at.items())[:_SHOWN]
        ]
        # The others may have stopped only because this rank called.
        return f"no rank died; {', '.join(activities)}; rank {self.launch.rank} was the first to see {seen}"

    # -- calls -----------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Start the thread that answers calls."""
        if self.launch.world_size == 1:
            return

        def listen() -> None:
            while not self._answers_ended.is_set():
                try:
                    while self.store.check([f"call/{self._call}"]):
                        self._answer(self.store.get(f"call/{self._call}").decode())
                        self._call += 1
                    if (
                        self._alarm.done()
                        and not self._roll_findings
                        and self.store.check(["findings"])
                    ):
                        # By the time this rank sees the failure, the store may be gone.
                        self._roll_findings = self._findings()
                except RuntimeError:
                    self._store_lost = True
                    self._sound_alarm()
                    return
                self._pause(self.pause_s)

        self._listener = threading.Thread(target=listen, name="rendezvous", daemon=True)
        self._listener.start()

    def _answer(self, call: str) -> None:
        if call.startswith(_ROLL):
            state = FlightState.read(self.flight.buffer)
            where = state.where if state else "an unknown place"
            self.store.set(f"answer/{self.launch.rank}", f"in {where}")
            self._sound_alarm()
        elif self.on_inquiry is not None:
            self.on_inquiry(self._call)

    def _sound_alarm(self) -> None:
        if not self._alarm.done():
            self._alarm.set_result(None)

    def inquire(self) -> int:
        """Ask all ranks to answer for a watchdog (see on_inquiry); return the inquiry's number."""
        return self._call_all(_INQUIRY)

    def _call_all(self, call: str) -> int:
        """Make a call under the first free number; return this number.

        Every rank answers the calls in order.
        """
        signed = f"{call}/{self.launch.rank}"
        number = self._call
        while self.store.compare_set(f"call/{number}", "", signed).decode() != signed:
            number += 1
        return number

    # -- the end ---------------------------------------------------------------------------------

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        if error is not None:
            self.fail(f"{type(error).__name__}: {error}")
        self.close()

    def close(self) -> None:
        """End torch.distributed and leave; all ranks call this. Harmless when called twice."""
        if self._closed:
            return
        if self.restarts and dist.is_initialized():
            self.left = list(dist.distributed_c10d._world.pg_map)
        waits = self.failed and self.device.type == "cuda" and not self.restarts
        if dist.is_initialized() and not waits:
            # After a failure NCCL would wait for dead ranks, unless its communicators have been
            # aborted, as before a restart; the end of the process frees its communicators.
            with contextlib.suppress(RuntimeError, LaunchError):
                if self.failed:  # gloo waits for messages that are still in progress
                    bounded(dist.destroy_process_group, ANSWER_S, "torch.distributed did not end")
                else:
                    dist.destroy_process_group()
        self._leave()
        self._variables.close()

    def _leave(self) -> None:
        """Record in the store that this rank has left.

        The rank that serves the store stays briefly for ranks that still need it.
        """
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._leave)
        if self.launch.world_size > 1:
            self._try(self._write_left, 2 * _LINGER_S + self.pause_s)
        self._answers_ended.set()
        if self._listener is not None and not self._store_lost:
            self._listener.join(timeout=ANSWER_S)
        self.flight_file.close()

    def _write_left(self) -> None:
        # The answer is written first: a roll call must not wait for this rank longer than it stays
        # to serve the store.
        self.store.set(f"answer/{self.launch.rank}", "has ended")
        self._answers_ended.set()
        deadline = self.clock() + _LINGER_S + self.pause_s
        gone = self.store.add("left", 1)
        while (
            self.serves_store
            and gone < self.launch.world_size - self._absentees
            and self.clock() < deadline
        ):
            self.sleep(0.02)
            gone = self.store.add("left", 0)


def symptom(error: BaseException) -> str:
    """Return an error's type and the first sentence of its message."""
    text = (_SOURCE_LINE.sub("", str(error)).splitlines() or [""])[0].split(". ")[0]
    return f"{type(error).__name__}: {text}"


def _list_locations(ranks: Sequence[int], locations: Sequence[str]) -> str:
    """Return the first sixteen ranks with their locations, and the number of others, as text."""
    shown = "; ".join(
        f"rank {rank} on {location}"
        for rank, location in zip(ranks[:16], locations[:16], strict=True)
    )
    return shown + (f"; {len(ranks) - 16} more" if len(ranks) > 16 else "")


def connect(
    launch: Launch,
    timeout: timedelta = timedelta(minutes=10),
    backend: str | None = None,
    mapping: RankMapping = AS_LAUNCHED,
    alike: Alike | None = None,
) -> Rendezvous:
    """Bring all processes together and initialise torch.distributed.

    The rendezvous is a context manager. If `backend` is None, nccl (which is RCCL on ROCm) is used
    if there is a device, otherwise gloo. `timeout` applies to the rendezvous and to every
    collective after it. `mapping` determines which ranks the processes of a node take: afterwards
    use the rendezvous's `launch`, not the one passed here. `alike` contains the values that must be
    equal on all ranks. Raises LaunchError: see select_device, check_devices and Rendezvous.join.
    """
    device = select_device(launch, backend, check_devices(mapping))
    return Rendezvous(launch, device, timeout, mapping, alike=alike).join()
