"""The processes come together: a store, a hello of each, a rank for each, and the names of those that do not come.

Every process writes a hello, under the launcher's number for it (Launch.task), to a store that the first of them or the
launcher serves; the first checks them, gives each its rank (placing.py) and publishes a verdict.
"""
from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron.errors import LaunchError
from megatron.parallel.hello import Alike, Hello, difference, make_hello, place, refusal
from megatron.parallel.launch import Launch
from megatron.parallel.placing import Placing, Task, assign
from megatron.parallel.processes import bounded
from megatron.parallel.report import device_name, list_places, plain, raise_file_limit, show_duration
from megatron.parallel.topology import compress_ranks

T = TypeVar("T")

ANSWER_S = 5.0  # how long the store, or a rank, may take to answer
_BATCH = 1024  # so many keys are asked for at once: the store's time for a question grows faster than its keys
_NAMED = 64  # so many missing ranks are looked for; beyond, nobody reads on
_PATIENCE_S = 3.0  # for a store that is not there yet; torch looks for it every second or so until then
_FOREVER = timedelta(days=20)  # longer ones do not fit torch's 31 bits of milliseconds
_ASKED = 10_000  # times a second that all ranks together look for a key that they wait for: 0.2 of a core of rank 0
AS_LAUNCHED = Placing()
_OPEN = (
    "whoever connects to the store of the ranks can guess its keys, and end this job: export MEGATRON_JOB_TOKEN, a "
    "random text, before srun, mpirun or torchrun"
)


@dataclass(eq=False)
class Meeting:
    """What a process knows of the others once all have met; Rendezvous is the rest of it.

    launch, device   this process, with the rank that it was given
    timeout          for all to come
    placing          which ranks the processes of a node take; by default those of the launcher
    clock, sleep     by which it asks again and again, and gives up
    alike            what all processes must have alike
    server           the rank that serves the store
    notices          what the log should say about launch and placement; the same on all ranks
    """

    launch: Launch
    device: torch.device
    timeout: timedelta
    placing: Placing = AS_LAUNCHED
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    alike: Alike = field(default_factory=dict)
    notices: list[str] = field(default_factory=list, init=False)
    _store: Any = field(default=None, init=False)
    _places: list[str] | None = field(default=None, init=False)

    server = 0
    _renumbered = False
    _absentees = 0

    @property
    def backend(self) -> str:
        """What torch.distributed runs on."""
        return "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"

    @property
    def store(self) -> Any:
        """This job's part of the store. Another host may never answer: put what is asked of it into `bounded`."""
        return self._store

    @property
    def serves_store(self) -> bool:
        """Whether the store ends with this process."""
        return self.launch.task == 0 and not self.launch.store_served

    @property
    def _myself(self) -> str:
        task = f", task {self.launch.task}" if self.launch.task != self.launch.rank else ""
        return f"rank {self.launch.rank} ({self.launch.node}:{device_name(self.device)}{task})"

    @property
    def _store_name(self) -> str:
        served_by = "the launcher's store" if self.launch.store_served else f"rank {self.server}"
        return f"{served_by} at {self.launch.store_host}:{self.launch.master_port}"

    @property
    def pause_s(self) -> float:
        """Seconds after which a rank looks again for a key that it waits for: the more ranks look, the longer."""
        return max(0.2, self.launch.world_size / _ASKED)

    def _open_store(self, seconds: float) -> Any:
        if self.launch.world_size == 1 and not self.launch.store_served:
            return dist.HashStore()
        return dist.PrefixStore(self._prefix, self._serve() if self.serves_store else self._client(seconds))

    @property
    def _prefix(self) -> str:
        return self.launch.store_prefix("megatron")

    def _serve(self) -> Any:
        """The store of all ranks; where they are all on this host, for this host only."""
        raise_file_limit()
        port, inside = self.launch.master_port, None
        try:
            if self.launch.on_one_node:
                inside = socket.create_server(("127.0.0.1", port))
                port = inside.getsockname()[1]
            return dist.TCPStore(
                "127.0.0.1", port, None, is_master=True, timeout=self.timeout, wait_for_workers=False,
                master_listen_fd=None if inside is None else inside.detach(),
            )  # fmt: skip
        except (RuntimeError, OSError) as error:
            raise LaunchError(
                f"rank 0 on node {self.launch.node} cannot serve port {port}, perhaps because another run or another "
                f"process with rank 0 uses it: set MASTER_PORT to a free port, and give every process a rank of its "
                f"own ({str(error).splitlines()[0]})"
            ) from error

    def _client(self, seconds: float) -> Any:
        """A connection to the store, which may come to be within so many seconds."""
        # Rank 0 reaches its own store through the loopback device, whatever its name resolves to.
        address = "127.0.0.1" if self.serves_store else self.launch.store_host, self.launch.master_port
        deadline = self.clock() + seconds

        def connect() -> Any:
            # torch tries again by itself, after ever longer pauses. Its own time limit would end in stack traces.
            return dist.TCPStore(*address, None, is_master=False, timeout=_FOREVER, wait_for_workers=False)

        try:
            try:
                client = bounded(connect, min(seconds, _PATIENCE_S))
            except LaunchError:
                self._await_listener(address, deadline)
                left = max(ANSWER_S, deadline - self.clock())
                client = bounded(connect, left, "somebody listens there, but does not answer")
        except (RuntimeError, OSError, LaunchError) as error:
            raise LaunchError(
                f"rank {self.launch.rank} on node {self.launch.node} does not reach {self._store_name} within "
                f"{show_duration(self.timeout)}: {error}. Either rank 0 did not start (look at its output), or it "
                f"runs elsewhere than MASTER_ADDR and MASTER_PORT say"
            ) from error
        client.set_timeout(self.timeout)
        return client

    def _await_listener(self, address: tuple[str, int], deadline: float) -> None:
        """Wait until somebody listens there. Where rank 0 comes late, torch would look again ever less often, and join
        up to minutes after it. Raises OSError after the deadline."""
        while True:
            try:
                socket.create_connection(address, timeout=ANSWER_S).close()
                return
            except OSError:
                if self.clock() >= deadline:
                    raise
                self.sleep(0.1)

    def _say_hello(self, deadline: float) -> None:
        launch, store = self.launch, self._store
        hello = make_hello(launch, self.device, self.backend, self.placing)
        error = self._duplicate() if store.add(f"claim/{launch.task}", 1) > 1 else self._interface_problem()
        if error:
            store.set("verdict", plain(error))
            raise LaunchError(error)
        hello["alike"] = self._tell_alike()
        store.set(f"hello/{launch.task}", json.dumps(hello))
        if launch.task == 0:
            error = self._gather_hellos(deadline)
            store.set("verdict", plain(error))
        else:
            self._poll(["verdict"], deadline)
            error = store.get("verdict").decode() if store.check(["verdict"]) else self._absent()
        if error:
            raise LaunchError(error)
        self._take_rank()

    def _tell_alike(self) -> dict[str, str]:
        """Digests of what all must have alike. What it is only the first with a digest writes, of perhaps thousands."""
        told = {}
        for kind, values in self.alike.items():
            text = json.dumps(values, sort_keys=True)
            told[kind] = digest = hashlib.sha256(text.encode()).hexdigest()[:32]
            if not self._store.check([f"alike/{digest}"]):
                self._store.set(f"alike/{digest}", text)
        return told

    def _interface_problem(self) -> str:
        """Why gloo cannot use the interfaces that the environment names, or ""."""
        named = os.environ.get("GLOO_SOCKET_IFNAME", "")
        for name in named.split(",") if named else ():
            try:
                dist.ProcessGroupGloo.create_device(interface=name)
            except (RuntimeError, TypeError) as error:  # a name that is no text is none of torch's
                there = ", ".join(known for _, known in socket.if_nameindex())
                reason = str(error).splitlines()[0]
                return f"{self._myself}: GLOO_SOCKET_IFNAME={named}: {name!r} is of no use, of {there} here: {reason}"
        return ""

    def _duplicate(self) -> str:
        """Why this process cannot go on: another one came with its number first."""
        launch = self.launch
        known = self._poll([f"hello/{launch.task}"], self.clock() + ANSWER_S)
        other = self._place(launch.task) if known else "another process"
        return (
            f"two processes say they are rank {launch.task}: {other}, and {launch.node}:{device_name(self.device)}, "
            f"process {os.getpid()}: every process needs a rank of its own"
        )

    def _gather_hellos(self, deadline: float) -> str:
        """The first process: wait for all, give them ranks, publish their places; the error that all report, or ""."""
        keys = [f"hello/{task}" for task in range(self.launch.world_size)]
        if not self._poll(keys, deadline, unless="verdict"):
            return self._store.get("verdict").decode() if self._store.check(["verdict"]) else self._absent()
        hellos: list[Hello] = [json.loads(value) for value in self.values(keys)]
        error = refusal(hellos) or difference(hellos, lambda digest: self._store.get(f"alike/{digest}"))
        if error:
            return error
        self._publish(hellos)
        return ""

    def _publish(self, hellos: list[Hello]) -> None:
        """Tell each process its rank, and all of them where each rank is."""
        said = [Task(hello["node"], hello["number"], tuple(hello["address"]), tuple(hello["near"])) for hello in hellos]
        found = assign(said, self.placing.device_order)
        ranks, notices = found.ranks, [*self.launch.notices, *found.notices]
        if not self.launch.token and (self.launch.store_served or not self.launch.on_one_node):
            notices.append(_OPEN)
        tasks = sorted(range(len(ranks)), key=ranks.__getitem__)
        self._places = [place({**hellos[task], "number": found.devices[task]}) for task in tasks]
        self._store.set("places", json.dumps(self._places))
        renumbered = tasks != sorted(tasks)
        for some in batches(range(len(ranks))) if renumbered else ():
            self._store.multi_set([f"task/{rank}" for rank in some], [str(tasks[rank]) for rank in some])
            self._store.multi_set([f"rank/{task}" for task in some], [str(ranks[task]) for task in some])
        self._store.set("meeting", json.dumps({"renumbered": renumbered, "server": ranks[0], "notices": notices}))

    def _take_rank(self) -> None:
        """From here on this process goes by the rank that it was given."""
        meeting = json.loads(self._store.get("meeting"))
        self.server, self.notices = meeting["server"], meeting["notices"]
        self._renumbered = meeting["renumbered"]
        if self._renumbered:
            self.launch = dataclasses.replace(self.launch, rank=int(self._store.get(f"rank/{self.launch.task}")))

    def _poll(self, keys: Sequence[str], deadline: float, unless: str = "") -> bool:
        """Whether all keys exist before the deadline, and before the key `unless` does."""
        pause, longest = 0.005, 0.2 if self.launch.task == 0 else self.pause_s
        for batch in batches(keys):
            while not self._store.check(batch):
                left = deadline - self.clock()
                if left <= 0 or (unless and self._store.check([unless])):
                    return False
                self.sleep(min(pause, left))
                pause = min(pause * 1.5, longest)
        return True

    def values(self, keys: Sequence[str]) -> list[bytes]:
        """What the store has under keys that exist."""
        return [value for batch in batches(keys) for value in self._store.multi_get(batch)]

    def _absent(self) -> str:
        size, missing = self.launch.world_size, self.ranks_without("hello", _NAMED)
        within = show_duration(self.timeout)
        self._absentees = len(missing)
        if not missing:
            return f"all ranks came, but rank 0 ({self._place(0)}) gave no go-ahead within {within}"
        many = len(missing) == _NAMED
        present = [] if many else sorted(set(range(size)).difference(missing))[:_NAMED]
        who = f"rank{'s' if len(missing) > 1 else ''} {compress_ranks(missing)}{' and perhaps more' if many else ''}"
        return (
            f"{who} of {size} did not come within {within}. Present: "
            f"{list_places([(rank, self._place(rank)) for rank in present]) or 'not listed'}. Look at the output of "
            f"the missing; if they only start slowly, raise --distributed-timeout-minutes"
        )

    def ranks_without(self, kind: str, most: int) -> list[int]:
        """The first ranks without a key `kind/rank`, at most so many; halves ranges, so that few misses cost little."""
        found: list[int] = []
        ranges = list(batches(range(self.launch.world_size)))[::-1]
        while ranges and len(found) < most:
            ranks = ranges.pop()
            if self._store.check([f"{kind}/{rank}" for rank in ranks]):
                continue
            if len(ranks) == 1:
                found += ranks
            else:
                middle = len(ranks) // 2
                ranges += [ranks[middle:], ranks[:middle]]
        return found

    def _place(self, task: int) -> str:
        """Where a process is that has said hello, by its launcher's number."""
        hello = json.loads(self._store.get(f"hello/{task}"))
        return f"{place(hello)}, process {hello['pid']}"


def batches(keys: Sequence[T]) -> Iterator[list[T]]:
    """Parts of the keys, each for one request to the store."""
    for start in range(0, len(keys), _BATCH):
        yield list(keys[start : start + _BATCH])
