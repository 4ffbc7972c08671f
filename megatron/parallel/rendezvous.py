"""What ties the processes together after they have met (meeting.py), and how they learn which of them failed.

A daemon thread of each rank looks for calls in the store, and answers when somebody calls the roll: a rank that does
not answer is dead, and the others can name it. What was found out is told to all at once: a rank that sees the failure
last, when the store is gone, names the rank that died and not the one that it waited for. Calls are numbered, so that a
watchdog may ask as often as it likes.

A rank has one connection to the store, and torch uses it, too. Nobody else gets an answer over it while torch waits for
a key; so nothing here waits in it, and where torch does for long, this rank makes another.
"""
from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from megatron.errors import LaunchError, LostRankError
from megatron.parallel.environment import changed
from megatron.parallel.flight import FlightFile, FlightRecorder, FlightState
from megatron.parallel.hello import Alike
from megatron.parallel.launch import Launch, select_device
from megatron.parallel.meeting import ANSWER_S, AS_LAUNCHED, Meeting
from megatron.parallel.placing import Placing, check_devices
from megatron.parallel.processes import bounded, process_start
from megatron.parallel.report import (
    device_name,
    host_name_is_local,
    list_places,
    plain,
    raise_file_limit,
    show_duration,
    without_dns,
)
from megatron.parallel.topology import compress_ranks

_SOURCE_LINE = re.compile(r"\[\S+\.(cc|cpp):\d+\] ?")  # where gloo was compiled, which tells nobody anything
_SHOWN = 64  # places in the code that a finding lists
_HELD_S = 2.0  # how long torch may wait in the connection to the store before this rank makes another
_LINGER_S = 5.0  # how long the rank that serves the store stays for others at the end, once they can have heard of it
# Up to so many ranks gloo connects at the start; more would take minutes. When it connects on demand, it waits without
# end for a rank that died before the first message: there the launcher has to end the job (srun --kill-on-bad-exit).
_FULL_MESH = 1024
_ROLL, _INQUIRY = "roll", "inquiry"  # what a call may be


@dataclass(eq=False)
class Rendezvous(Meeting):
    """This process's tie to all others: after `join` over torch.distributed. As a context manager it closes itself.

    places                    "node:device" of every rank, in rank order
    flight, flight_file       this rank's flight recorder, and its node's file of them
    on_inquiry                called in a thread of its own with the number of an inquiry
    doing                     number and name of what this rank is in, of things that all ranks do one after the other,
                              for a roll call; 0: its flight record says more
    """

    doing = (0, "")
    speaks = False  # whether this rank is the one that acts on what `explain` found
    _call = 1  # the one that is looked for
    _heard = ""  # what a roll call brought to light
    _reported = False  # a rank said why it failed
    _alarmed = False  # another rank failed, or the store is gone
    _failed = False
    _store_lost = False
    _closed = False

    def __post_init__(self) -> None:
        self.flight = FlightRecorder()
        self.flight_file: FlightFile
        self.on_inquiry: Callable[[int], None] | None = None
        self.judged = threading.Event()  # cleared while a watchdog finds out whether the job hangs
        self.judged.set()
        self._deaf = threading.Event()  # no more calls are answered
        self._pause = self._deaf.wait if self.sleep is time.sleep else self.sleep
        self._left_to_torch: Any = None  # the first connection to the store, once this rank has another
        self._changing = threading.Lock()  # held by who makes another
        self._held_s = _HELD_S + self.pause_s  # torch may wait in the connection: ranks that poll go on so far apart
        self._answer_s = ANSWER_S + self.pause_s  # a rank may take to hear a call and to answer it
        self._watcher: threading.Thread | None = None
        self._variables = contextlib.ExitStack()  # that are set until the end
        self._explained: LaunchError | None = None
        self._alarm = threading.Event()  # as _alarmed, for who waits; set at the end of what is waited for, too

    def join(self) -> Self:
        """Meet all other ranks, take the rank that `placing` gives and initialise torch.distributed.

        Raises LaunchError within `timeout` when ranks are missing (it names them and tells where the others are), when
        they differ in what they must have `alike`, or when the store cannot be reached. Exports the
        launcher-independent variables (RANK, ...) until close().
        """
        if dist.is_initialized():
            raise LaunchError("torch.distributed is initialised already: connect once, or close the first rendezvous")
        deadline = self.clock() + self.timeout.total_seconds()
        with without_dns() if self.serves_store and not self.launch.on_one_node else contextlib.nullcontext():
            self._meet(deadline)
        where = f"{self.launch.node}:{device_name(self.device)}"
        self.flight.describe(self.launch.rank, os.getpid(), where, process_start(os.getpid()))
        self.flight_file.unlink()  # all ranks of the node have opened it
        sys.audit("megatron.parallel.met", self)
        try:
            self._watch()
            self._initialise()
        except (RuntimeError, ValueError, LaunchError) as error:
            explanation = self.explain(error)
            self.close()
            raise explanation from error
        return self

    def _meet(self, deadline: float) -> None:
        """Connect to the store and say hello."""
        self._store = self._open_store(self.timeout.total_seconds())
        self.flight_file = FlightFile(self.launch)
        self.flight = self.flight_file.recorder
        atexit.register(self._leave)
        try:
            # It heeds the deadline itself unless the store's host hangs or lost power.
            left, failure = deadline - self.clock(), f"{self._myself}: {self._store_name} gave no answer"
            bounded(lambda: self._say_hello(deadline), max(left, 0.0) + ANSWER_S, failure)
        except (RuntimeError, LaunchError) as error:
            self._store_lost = not isinstance(error, LaunchError)
            self._leave()
            if self._store_lost:
                raise LaunchError(f"{self._myself}: {self._store_gone()}") from error
            raise

    def _initialise(self) -> None:
        launch = self.launch
        variables = launch.environment()
        if launch.on_one_node and not host_name_is_local():
            variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        raise_file_limit()  # gloo connects every rank with every other of a group
        if self.device.type == "cuda" and launch.world_size > _FULL_MESH:
            # Beside NCCL, gloo only carries Python objects, to and from rank 0. (torch >= 2.8 knows the variable.)
            variables["TORCH_GLOO_LAZY_INIT"] = os.environ.get("TORCH_GLOO_LAZY_INIT", "1")
            # torch's monitor of NCCL looks into the store, too, by itself every second on every rank.
            pause_ms = str(int(1000 * max(1.0, self.pause_s)))
            variables["TORCH_NCCL_COORD_CHECK_MILSEC"] = os.environ.get("TORCH_NCCL_COORD_CHECK_MILSEC", pause_ms)
        self._variables.enter_context(changed(os.environ, variables))
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        # While gloo connects it waits five times the time limit for a rank that died, and cannot be interrupted.
        seconds = self.timeout.total_seconds() + ANSWER_S
        self.unless_failed(self._start_torch, seconds, "torch.distributed did not start")

    def _start_torch(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # each thread has a current device of its own
        # No device_id: with it torch makes groups by splitting the whole world's communicator, in which every rank
        # would have to take part in every group.
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore("torch", self._store),
            rank=self.launch.rank,
            world_size=self.launch.world_size,
            timeout=self.timeout,
        )

    # -- after the meeting -----------------------------------------------------------------------------------------

    @property
    def places(self) -> list[str]:
        if self._places is None:
            self._places = json.loads(self._store.get("places"))
        return self._places

    def unless_failed(self, function: Callable[[], Any], seconds: float, failure: str) -> Any:
        """`bounded`, which ends at once when another rank fails."""
        self._alarm = threading.Event()
        if self._alarmed:
            self._alarm.set()
        try:
            return bounded(function, seconds, failure, self._alarm)
        except LaunchError:
            with contextlib.suppress(LaunchError):
                self._leave_to_torch()  # which may wait in it any time from here on
            raise

    def _sound_alarm(self) -> None:
        self._alarmed = True
        self._alarm.set()

    def fail(self, message: str) -> None:
        """Tell the others why this rank stops. Never raises."""
        self._failed = True
        self._try(lambda: self._write_failure(plain(message)), ANSWER_S)

    def _exists(self, key: str = "verdict") -> bool:
        """Whether the store has a key; asked over another connection where torch waits in this one."""
        try:
            found: bool = bounded(lambda: self._store.check([key]), self._held_s)
            return found
        except LaunchError:
            self._leave_to_torch()
        return bool(self._store.check([key]))

    def _leave_to_torch(self) -> None:
        """Leave the connection to torch, which waits in it, perhaps for a rank that is gone, and make another."""
        with self._changing:
            if self._left_to_torch is None:
                another = dist.PrefixStore(self._prefix, self._client(ANSWER_S))
                self._left_to_torch, self._store = self._store, another  # the first may be what serves the store

    def comes(self, key: str, seconds: float) -> bool:
        """Whether the store gets a key within so many seconds."""
        return self._poll([key], self.clock() + seconds)

    def gather(self, name: str, size: int) -> None:
        """Wait until so many ranks have called this, with this name and as often as this rank.

        What torch does next among them then waits in the connection to the store for moments only.
        """
        number = self._store.add(f"gathered/{name}", 1) - 1
        key = f"gathered/{name}/{number // size}"
        if number % size == size - 1:
            self._store.set(key, "")
        if not self.comes(key, self.timeout.total_seconds()):
            raise LaunchError(f"not all of {size} ranks came within {show_duration(self.timeout)}")

    def _try(self, write: Callable[[], None], seconds: float) -> None:
        """Write to the store if it is still there."""
        if not self._store_lost:
            try:
                self._exists()
                bounded(write, seconds)
            except (RuntimeError, LaunchError):
                self._store_lost = True

    def _write_failure(self, message: str) -> None:
        said = f"{self._myself} failed: {message}"
        self._store.compare_set("failure", "", json.dumps([self.launch.rank, said]))  # the first, which is the cause
        if self.serves_store and self._store.add("explainers", 1) == 1:
            # gloo shows the others a closed connection only when this process ends, with the store: tell them now
            self._store.set("findings", said)
            self._call_all(_ROLL)

    def explain(self, error: BaseException) -> LaunchError:
        """What a failed or timed-out collective means: the ranks that failed or died, as far as it can be known.

        Takes some seconds. `raise rendezvous.explain(error) from error`. A LostRankError, unless a rank said itself why
        it failed.
        """
        if self._explained is None:
            self._failed = True
            self.judged.wait(2 * self._answer_s)  # a watchdog that finds a hang ends this process, and knows more
            symptom = (_SOURCE_LINE.sub("", str(error)).splitlines() or [""])[0].split(". ")[0]
            seen = f"{type(error).__name__}: {symptom}"
            text = self._heard
            if not text and not self._store_lost:
                try:
                    text = bounded(lambda: self._diagnose(seen), 4 * self._answer_s)
                except (RuntimeError, LaunchError):
                    self._store_lost = True
            text = text or self._heard or self._store_gone()
            if self._store_lost:  # with the rank that served it
                self.speaks = self.launch.task == 1
            kind = LaunchError if self._reported else LostRankError
            self._explained = kind(f"{self._myself}: {text}. Seen here as {seen}")
        return self._explained

    def _store_gone(self) -> str:
        return f"{self._store_name} is gone, and with it the store: it died, ended or was stopped; look at its output"

    def _diagnose(self, seen: str) -> str:
        if self.launch.world_size == 1:
            return "no other rank takes part"
        self._exists()
        self.speaks = self._store.add("explainers", 1) == 1
        if self.speaks:
            self._store.set("findings", self._call_roll(seen))
        elif not self.comes("findings", 2 * self._answer_s):
            return "no rank has found out why"
        return self._findings()

    def _findings(self) -> str:
        """What the rank that called the roll found, or what the first rank that failed said itself."""
        if self._store.check(["failure"]):
            rank, said = json.loads(self._store.get("failure"))
            if rank != self.launch.rank:
                self._reported = True
                return str(said)
        findings: bytes = self._store.get("findings")
        return findings.decode()

    def _call_roll(self, seen: str) -> str:
        """Ask every rank for a sign of life, and what it does."""
        ranks, deadline = range(self.launch.world_size), self.clock() + self._answer_s
        self._call_all(_ROLL)
        self._poll([f"answer/{rank}" for rank in ranks], deadline)
        dead = self.ranks_without("answer", _SHOWN)
        self._absentees = len(dead)
        if dead:
            places = list_places([(rank, self._where(rank)) for rank in dead])
            return f"no sign of life from rank {compress_ranks(dead)}: died or was killed ({places})"
        answers = [json.loads(answer) for answer in self.values([f"answer/{rank}" for rank in ranks])]
        # Those in a later step than others wait for them.
        first = min((step for step, _ in answers if step), default=0)
        at: dict[str, list[int]] = {}
        for rank, (step, place) in enumerate(answers):
            if step <= first:
                at.setdefault(place, []).append(rank)
        found = [f"rank {compress_ranks(of)} {place}" for place, of in list(at.items())[:_SHOWN]]
        # The others may only have stopped because this rank called.
        return f"no rank died; {', '.join(found)}; rank {self.launch.rank} was the first to see {seen}"

    def _where(self, rank: int) -> str:
        task = int(self._store.get(f"task/{rank}")) if self._renumbered else rank
        return self.places[rank] + (f", task {task}" if task != rank else "")

    def _watch(self) -> None:
        """Start the thread that answers roll calls."""
        if self.launch.world_size == 1:
            return

        def listen() -> None:
            while not self._deaf.is_set():
                try:
                    while self._exists(f"call/{self._call}"):
                        self._answer(self._store.get(f"call/{self._call}").decode().partition("/")[0])
                        self._call += 1
                    if self._alarmed and not self._heard and self._exists("findings"):
                        # The store may be gone when this rank sees the failure.
                        self._heard = self._findings()
                except LaunchError:
                    self._pause(ANSWER_S)  # the store's host hangs, or is stopped like the whole job
                except RuntimeError:
                    self._store_lost = True
                    self._sound_alarm()
                    return
                self._pause(self.pause_s)

        self._watcher = threading.Thread(target=listen, name="rendezvous", daemon=True)
        self._watcher.start()

    def _answer(self, call: str) -> None:
        if call == _ROLL:
            state, (step, name) = FlightState.read(self.flight.buffer), self.doing
            where = name or (state.where if state else "an unknown place")
            self._store.set(f"answer/{self.launch.rank}", json.dumps([step, f"in {where}"]))
            self._sound_alarm()
        elif self.on_inquiry is not None:
            self.on_inquiry(self._call)

    def inquire(self) -> int:
        """Ask all ranks to answer for a watchdog (see on_inquiry). Returns the number of the inquiry."""
        return self._call_all(_INQUIRY)

    def _call_all(self, call: str) -> int:
        """Take the first number that no rank has called under. Every rank answers the calls in their order."""
        own, number = f"{call}/{self.launch.rank}", self._call
        while self._store.compare_set(f"call/{number}", "", own).decode() != own:
            number += 1
        return number

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(f"{type(error).__name__}: {error}")
        self.close()

    def close(self) -> None:
        """End torch.distributed and leave; all ranks call it. Harmless when called twice."""
        if self._closed:
            return
        if dist.is_initialized() and not (self._failed and self.device.type == "cuda"):
            # After a failure NCCL would wait for the dead; the end of the process frees its communicators.
            with contextlib.suppress(RuntimeError, LaunchError):
                if self._failed:  # gloo waits for what is still under way
                    bounded(dist.destroy_process_group, ANSWER_S, "torch.distributed did not end")
                else:
                    dist.destroy_process_group()
        self._leave()
        self._variables.close()

    def _leave(self) -> None:
        """Write that this rank is gone; the rank that serves the store stays a little for those that still ask."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._leave)
        self._try(self._write_left, 2 * _LINGER_S + self._held_s)
        self._deaf.set()
        if self._watcher is not None and not self._store_lost:
            self._watcher.join(timeout=ANSWER_S)
        self.flight_file.close()

    def _write_left(self) -> None:
        launch = self.launch
        if launch.world_size == 1:
            return
        # First the answer: a roll call must not wait for this rank longer than this rank stays to serve the store.
        self._store.set(f"answer/{launch.rank}", json.dumps([0, "has ended"]))
        self._deaf.set()
        deadline = self.clock() + _LINGER_S + self._held_s
        gone = self._store.add("left", 1)
        while self.serves_store and gone < launch.world_size - self._absentees and self.clock() < deadline:
            self.sleep(0.02)
            gone = self._store.add("left", 0)


def connect(
    launch: Launch, timeout: timedelta = timedelta(minutes=10), backend: str | None = None,
    placing: Placing = AS_LAUNCHED, alike: Alike | None = None,
) -> Rendezvous:  # fmt: skip
    """Bring all processes together and initialise torch.distributed. The rendezvous is a context manager.

    `backend` None takes nccl (which is RCCL on ROCm) where there is a device and gloo elsewhere; `timeout` holds for
    the meeting and for every collective after it. `placing` says which ranks the processes of a node take: from then on
    the rendezvous's own `launch` counts. `alike` is what all ranks must have alike. Raises LaunchError that names the
    ranks that did not come, or those that have something else and what it is.
    """
    device = select_device(launch, backend, check_devices(placing))
    return Rendezvous(launch, device, timeout, placing, alike=alike or {}).join()
