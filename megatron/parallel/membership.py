"""The training process's connection to its supervisor, for restarts within the job.

The supervisor (supervisor.py) is the process that the launcher started. The training process is its
child, which outlives the loss of other ranks: it learns from its supervisor which ranks the next
generation of the job has, and which one it is itself.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.errors import EXIT_LOST_RANK
from megatron.parallel.launch import Launch
from megatron.parallel.parent_watch import die_with

# Messages from the training process, and to it. Each is a JSON object with its kind under "kind".
LOST = "lost"  # a peer is lost, or this rank's state is damaged; the process can take part again
READY = "ready"  # the process has left its groups and waits for the next generation
FAILED = "failed"  # the process is about to end, with an error
RANKED = "ranked"  # the process has its rank, which may differ from its task's number
REACHED = "reached"  # an iteration is complete
SAVED = "saved"  # the job has saved a checkpoint
START = "start"  # begin a generation
RESTART = "restart"  # leave the groups: a new generation begins
END = "end"  # there is no further generation
MESSAGE_BYTES = 1 << 16
SUPERVISED = "MEGATRON_SUPERVISED"
"""Variable with what a training process that was started by exec has from its supervisor."""
FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
"""Signals that the supervisor sends on; a new training process has them blocked."""
_CAUSE_CHARACTERS = 2000
_MOST_TASKS = 1024  # that a report names; every supervisor reads it


@dataclass(frozen=True)
class Generation:
    """A period of a job during which the same processes train together.

    number     0 for the first one
    launch     this process's identity in it
    cause      why the one before ended; "" for the first
    outage_s   seconds from the detection of the fault to the decision on this generation
    restarts   number of restarts so far, for each way in which a rank came back: "in-process",
               "forked", "spare"
    spares     number of spare tasks on nodes without repeated faults
    compared   whether only states may be loaded that were saved after a comparison of the weights'
               copies
    reached    the last iteration that the job has completed
    """

    number: int
    launch: Launch
    cause: str = ""
    outage_s: float = 0.0
    restarts: Mapping[str, int] = field(default_factory=dict)
    spares: int = 0
    compared: bool = False
    reached: int = 0

    def to_message(self) -> dict[str, Any]:
        return {"kind": START, **vars(self), "launch": vars(self.launch)}

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Generation:
        """Return the generation that `to_message` described."""
        values = {name: message[name] for name in cls.__dataclass_fields__}
        launch = dict(values.pop("launch"))
        launch["notices"] = tuple(launch["notices"])
        return cls(launch=Launch(**launch), **values)


class Membership:
    """The training process's end of the connection; used by its main thread.

    memory      descriptor of memory that outlives this process (checkpoint/local.py)
    started     time.monotonic() when the program of this task started, of which this process is a
                part: limits on the run's time count from there
    abort       called, in another thread, when this process has to leave its groups. At the start of
                each generation it ends the process, because calls of gloo that connect groups cannot
                be interrupted: set it when the groups are connected
    groups      groups of torch.distributed that this process has left
    cause       the last fault
    printed     what this process has printed about the job, which restarts need not repeat
    generation  the current generation, after `next`
    began_s     time.monotonic() when it was decided
    """

    generation: Generation
    began_s: float

    def __init__(self, connection: socket.socket, memory: int, started: float) -> None:
        self.memory = memory
        self.started = started
        self.abort: Callable[[], object] = lambda: None
        self.groups: Sequence[object] = ()
        self.cause = ""
        self.printed = set[str]()
        self._ends = False
        self._left = -1  # the number of the last generation
        self._connection = connection
        self._commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, name="membership", daemon=True).start()

    def _listen(self) -> None:
        while data := self._connection.recv(MESSAGE_BYTES):
            message = json.loads(data)
            if message["kind"] == START:
                self.abort = self._abandon
            self._commands.put(message)
            if message["kind"] in (RESTART, END):
                self.cause = message["cause"]
                self._ends = message["kind"] == END
                sys.audit("megatron.parallel.leaving_groups", self.cause)
                self.abort()
        os._exit(EXIT_LOST_RANK)  # the supervisor is gone, and the kernel ends this process, too

    def _abandon(self) -> None:
        """End this process, whose supervisor forks another; if the job ends, its ranks say why."""
        if not self._ends:
            os._exit(EXIT_LOST_RANK)

    def _send(self, kind: str, **values: Any) -> None:
        self._connection.send(json.dumps({"kind": kind, **values}).encode())

    def reached(self, iteration: int) -> None:
        """Report that a training step is complete."""
        self._send(REACHED, iteration=iteration)

    def saved(self) -> None:
        """Report that the job has saved a checkpoint: from now on it may be requeued."""
        self._send(SAVED)

    def ranked(self, rank: int) -> None:
        """Report this process's rank in the current generation."""
        self._send(RANKED, rank=rank)

    def failed(self, symptom: str) -> None:
        """Report the error with which this process is about to end."""
        self._send(FAILED, symptom=symptom[:_CAUSE_CHARACTERS])

    def lost(self, symptom: str, *, compared: bool = False) -> bool:
        """Report that this process cannot go on without a restart; wait for the decision.

        symptom   what this process has seen
        compared  whether copies of the weights differ, see Generation.compared

        Returns whether the job restarts.
        """
        self.announce(symptom, compared=compared)
        return bool(self._commands.get()["kind"] != END)

    def announce(
        self,
        symptom: str,
        tasks: Sequence[int] = (),
        *,
        compared: bool = False,
        replace: bool = False,
    ) -> None:
        """Report a fault without waiting, from any thread.

        The main thread then fails in its next collective, and calls `lost`.

        tasks    numbers in the current generation of the tasks whose processes are to be ended. If
                 they are too many to be named, each ends that cannot leave its groups
        replace  whether spares should take the place of their nodes
        """
        self._send(
            LOST,
            generation=self._left,
            symptom=symptom[:_CAUSE_CHARACTERS],
            ranks=list(tasks) if len(tasks) <= _MOST_TASKS else [],
            compared=compared,
            replace=replace,
        )

    def next(self) -> Generation | None:
        """Wait for the next generation; None if the job ends.

        Call this when this process has left all groups of the one before, first when it has
        handlers of signals: from then on it receives them.
        """
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        if self._left >= 0:  # the first START may have arrived
            self.abort = lambda: None  # it refers to the groups
        gc.collect()  # the parts of a run refer to each other, and hold device memory and groups
        groups = [[group] for group in self.groups]
        self.groups = ()
        while groups:
            drop_in_thread(groups.pop())
        sys.audit("megatron.parallel.left_groups", self._left)
        self._send(READY, generation=self._left)
        while True:
            message = self._commands.get()
            if message["kind"] == START:
                self.generation = Generation.from_message(message)
                self._left = self.generation.number
                self.began_s = time.monotonic()
                return self.generation
            if message["kind"] == END:
                self.cause = message["cause"]
                return None


def started_by_supervisor() -> Membership | None:
    """Return the connection of a training process that was started by exec; None in others."""
    value = os.environ.pop(SUPERVISED, None)
    if value is None:
        return None
    *numbers, started = value.split()
    parent, connection, memory = map(int, numbers)
    die_with(parent)
    for descriptor in (connection, memory):
        os.set_inheritable(descriptor, False)
    return Membership(socket.socket(fileno=connection), memory, float(started))


def drop_in_thread(last: list[object]) -> None:
    """Drop the last reference to an object in a thread.

    The destructor of a gloo group waits for the group's threads, and these, if they are in a
    collective when the connections are shut down, sometimes until the group's timeout.
    """
    threading.Thread(target=last.clear, name="left group", daemon=True).start()
