"""Local checkpoints: the state in host memory of each rank, with a copy in another node's memory.

A save copies this rank's shards, each element once over all ranks, to one of two slots of the
rank's memory file (memory_file.py), and then sends the slot to one neighbour, which keeps it in a
slot of its own. The other slots keep the save before. A save counts once all ranks have it, so a
failure at any moment leaves a whole one: on the ranks that survive, with copies of the shards of
those that do not.

The thread of the training loop communicates, between two steps; gloo's threads move the bytes while
training goes on. Two other threads of a rank only hash its copy, and wait for messages.

Replication over nodes follows Gemini (Wang et al., SOSP 2023, "GEMINI: Fast Failure Recovery in
Distributed Training with In-Memory Checkpoints", section 4).
"""

from __future__ import annotations

import datetime
import json
import math
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron.checkpoint.memory_file import (
    COPY,
    PRIMARY,
    HeaderTooLongError,
    Key,
    MemoryFile,
    MemorySlot,
    pages,
)
from megatron.checkpoint.shards import Entries, Shard, Stored
from megatron.checkpoint.shared_errors import errors_on_all_ranks
from megatron.checkpoint.tensors import (
    Tensors,
    copy_into,
    device_of,
    placed,
    snapshot_bytes,
    tensors_to_save,
)
from megatron.checkpoint.writer import Alive, nothing
from megatron.engine.engine import Engine
from megatron.errors import CheckpointError
from megatron.parallel.collectives import (
    all_reduce,
    broadcast_object,
    gather_first,
    post,
)
from megatron.parallel.host_memory import available_bytes, machine_number
from megatron.parallel.topology import Group, Topology

FLAG = "--non-persistent-save-interval"
_POLL_S = 0.1  # interval at which a rank that waits for a thread shows that it is alive
_STATE_BYTES = 1 << 20  # room for settings, provenance and state of the training loop, at first
_EVENT = "megatron.checkpoint.local"  # audit event, with the name of a moment


def neighbour_jump(nodes: Sequence[str], preferred: int | None = None) -> int:
    """Return the smallest jump for which rank + jump, modulo the ranks, is on another node.

    It is 0 if all ranks are on one node. If no jump suits every rank, return the one that suits
    most ranks.

    nodes      the node of each rank
    preferred  a jump to take in any case

    >>> neighbour_jump(["a", "a", "b", "b", "c", "c"]), neighbour_jump(["a", "a"])
    (2, 0)
    >>> neighbour_jump(["a", "a", "a", "b"])
    1
    """
    world = len(nodes)
    if preferred is not None:
        return preferred % world
    if len(set(nodes)) == 1:
        return 0
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    of_rank = torch.tensor([numbers[node] for node in nodes])
    best, jump = -1, 0
    for candidate in range(1, world):
        elsewhere = int((of_rank != of_rank.roll(-candidate)).sum())
        if elsewhere > best:
            best, jump = elsewhere, candidate
        if best == world:
            break
    return jump


@dataclass(frozen=True)
class Replication:
    """Placement of copies: those of rank r's shards on rank r + jump, modulo the ranks; 0: nowhere.

    ring  the ranks that are reached from this one by jumps, for the messages
    """

    jump: int = 0
    ring: Group | None = None

    @classmethod
    def between(
        cls, topology: Topology, jump: int, timeout: datetime.timedelta | None = None
    ) -> Replication:
        """Connect the ranks for messages between neighbours. All ranks call this.

        The messages have groups of their own: in the world's, small ones would wait for them.
        """
        size = topology.world.size
        step = math.gcd(jump, size)
        if step == size:
            return cls()
        ranks = range(topology.rank % step, size, step)
        return cls(jump, topology.messages_between(ranks, timeout))


class _HeaderOutcome(NamedTuple):
    """Outcome of writing a header.

    problem       why the slot was left empty; "" if it was not
    header_bytes  room that the header would need, if this is the problem; else 0
    """

    problem: str = ""
    header_bytes: int = 0


@dataclass
class _PendingLocal:
    """A local save between its copy and the moment at which all ranks have it.

    primary, copy  the slots of this rank's shards, and of its neighbour's; None: no replication
    hashed         writes the header of `primary`
    receive        the message from the neighbour
    received       waits until the messages to and from neighbours are complete
    """

    key: Key
    primary: MemorySlot
    copy: MemorySlot | None
    begun: float
    hashed: Future[_HeaderOutcome] = field(default_factory=Future)
    receive: dist.Work | None = None
    received: Future[None] | None = None

    @property
    def done(self) -> bool:
        """Return whether this rank has all that it gets; its neighbour may still be receiving."""
        if self.receive is None:
            return self.hashed.done()
        return self.received is not None and self.received.done()


class LocalSaver:
    """Writer of a rank's local checkpoints, one at a time.

    All ranks call each method, in the same order, except `advance`, `done` and `close`.

    memory       this rank's memory file
    replication  where the copies are
    keep         the save that has been loaded, if it was a local one: it stays until there is a
                 newer one
    alive        called on the calling thread while it waits

    Two copies of a rank's shards, and two of its neighbour's, are allocated at once. If slots of
    other sizes hold the save in `keep`, only one of each is, and the others after the first save.

    Raises CheckpointError on every rank if a rank lacks the memory.
    """

    def __init__(
        self,
        memory: MemoryFile,
        engine: Engine,
        topology: Topology,
        replication: Replication = Replication(),
        *,
        keep: Key | None = None,
        alive: Alive = nothing,
    ) -> None:
        world = topology.world
        self._memory = memory
        self._engine = engine
        self._topology = topology
        self._alive = alive
        self._last = keep  # the newest save that all ranks have
        if memory.compared is not None:  # what was compared later is not this run's future
            memory.copies_compared(min(memory.compared, 0 if keep is None else keep.iteration))
        self._pending: _PendingLocal | None = None
        self.note = ""
        """Reason why a rank's memory could not be pinned; "" if it was or need not be."""
        # Views, which stay valid: listing them at each save would cost as much as a small copy.
        self._tensors = tensors = tensors_to_save(engine, topology, True)
        self._device = device_of(tensors)
        self._stored = json.dumps(_entries(tensors), separators=(",", ":"))
        data = pages(snapshot_bytes(tensors))
        header = pages(2 * len(self._stored) + _STATE_BYTES)
        # what earlier processes have found to be needed
        header = max([header, *(s.header_bytes for s in memory.slots if s.role == PRIMARY)])
        elements = sum(view.numel() for _, _, view, _ in placed(tensors))
        number = max((key.number for key in _keys(memory)), default=0)
        mine = torch.tensor([[data, header, elements, number]])
        table = gather_first(mine, world)
        self._elements = int(table[:, 2].sum())
        self._number = int(table[:, 3].max())
        self._attempt = broadcast_object(secrets.token_hex(8), world)
        self._ring = replication.ring
        self._to = (topology.rank + replication.jump) % world.size
        self._from = (topology.rank - replication.jump) % world.size
        self._sizes: dict[str, tuple[int, int]] = {}
        self._settled = False
        self._arrange(table)

    @property
    def bytes(self) -> int:
        """Return the bytes of host memory that this rank's local checkpoints take."""
        return sum(slot.size_bytes for slot in self._memory.slots)

    @property
    def copied(self) -> int:
        """Return the bytes of this rank's shards."""
        return self._sizes[PRIMARY][0]

    @property
    def pending(self) -> bool:
        """Return whether a save is not known to be complete: the same on every rank."""
        return self._pending is not None

    @property
    def done(self) -> bool:
        """Return whether this rank's part of the pending save is complete or has failed."""
        return self._pending is None or self._pending.done

    @property
    def failed(self) -> bool:
        """Return whether this rank's part of the pending save has failed."""
        pending = self._pending
        if pending is None or not pending.hashed.done() or pending.hashed.exception() is not None:
            return False  # `commit` raises the exception
        return bool(pending.hashed.result().problem)

    @property
    def last(self) -> Key | None:
        """Return the newest save that all ranks have."""
        return self._last

    def start(
        self,
        iteration: int,
        state: Mapping[str, object],
        about: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        """Copy the engine's state; return when the engine may change.

        state  the caller's own counters, serializable as JSON and the same on every rank
        about  returns settings and provenance of the run; called on rank 0, in a thread

        Waits for an earlier save that is still pending.
        """
        self.finish()
        self._number += 1
        topology = self._topology
        key = Key(self._number, iteration, self._attempt)
        pending = _PendingLocal(key, self._free(PRIMARY), None, time.perf_counter())
        pending.primary.erase()
        if self._ring is not None:
            pending.copy = self._free(COPY)
            pending.copy.erase()
            buffer = pending.copy.memory.tensor
            pending.receive = post(b"receive", buffer, self._ring, self._from)
        sys.audit(_EVENT, "copying")
        self._engine.fragments()  # nothing changes the state from now on
        copy_into(pending.primary.memory.tensor, self._tensors)
        sys.audit(_EVENT, "copied")
        content = {
            "key": key,
            "rank": topology.rank,
            "world": topology.world.size,
            "elements": self._elements,
            "size_bytes": snapshot_bytes(self._tensors),
            "state": state,
            "engine": self._engine.scalars(),
        }
        _in_thread(
            pending.hashed, partial(_complete, pending.primary, content, about, self._stored)
        )
        self._pending = pending

    def advance(self) -> None:
        """Send this rank's shards once they are hashed; called between two steps."""
        pending = self._pending
        if pending is None or not pending.hashed.done() or pending.receive is None:
            return
        if pending.received is None:
            assert self._ring is not None, "there is a neighbour"
            works = [
                post(b"send", pending.primary.memory.tensor, self._ring, self._to),
                pending.receive,
            ]
            pending.received = Future()
            sys.audit(_EVENT, "sending")
            _in_thread(pending.received, lambda: [work.wait() for work in works])

    def commit(self, failed: bool = False) -> float:
        """End the pending save, which is done on every rank; return the seconds since its start.

        failed  whether it has failed on any rank: the one before then stays the last one

        Raises the error of a message, on the rank that has it.
        """
        pending = self._pending
        assert pending is not None and pending.done, "a save is done before it is committed"
        self._pending = None
        written = pending.hashed.result()
        if written.problem:
            print(
                f"WARNING: rank {self._topology.rank} has no local checkpoint of iteration "
                f"{pending.key.iteration}: {written.problem}",
                file=sys.stderr,
                flush=True,
            )
        if pending.received is not None:
            pending.received.result()
        elapsed_s = time.perf_counter() - pending.begun
        if failed:
            for slot in filter(None, (pending.primary, pending.copy)):
                slot.erase()
            self._make_room(written.header_bytes)
            return elapsed_s
        if pending.copy is not None:
            pending.copy.key = pending.key
        self._last = pending.key
        sys.audit(_EVENT, "committed")
        if not self._settled:
            self._arrange()
        return elapsed_s

    def finish(self) -> None:
        """Complete a pending save on all ranks, and wait for it."""
        if self._pending is None:
            return
        self._wait(self._pending.hashed)
        self.advance()
        if self._pending.received is not None:
            self._wait(self._pending.received)
        failed = torch.tensor([int(self.failed)])
        all_reduce(failed, self._topology.world, dist.ReduceOp.MAX)  # until all ranks are here
        self.commit(bool(failed.item()))

    def clear(self) -> None:
        """Forget all saves: the run goes back to a state before them."""
        self.finish()
        self._last = None
        self._memory.copies_compared(0)
        for slot in self._memory.slots:
            slot.erase()

    def copies_compared(self, iteration: int) -> None:
        """Note that the copies of the weights were equal after `iteration`."""
        self._memory.copies_compared(iteration)

    def close(self) -> None:
        """End the work of this rank's threads; there is no communication.

        For a job whose groups are broken. A pending save may become complete on this rank.
        """
        pending = self._pending
        self._pending = None
        if pending is None:
            return
        wait([pending.hashed])
        # A message that still arrives must not be written into a slot that is used again.
        if pending.copy is not None and not pending.done:
            self._memory.remove(pending.copy)

    def _wait(self, future: Future[Any]) -> None:
        while wait([future], _POLL_S).not_done:
            self._alive()

    def _fits(self, slot: MemorySlot) -> bool:
        return (slot.data_bytes, slot.header_bytes) == self._sizes.get(slot.role)

    def _free(self, role: str) -> MemorySlot:
        """Return the slot of a role for the next save, which is not that of the last one."""
        slots = [
            slot
            for slot in self._memory.slots
            if slot.role == role
            and self._fits(slot)
            and (slot.key is None or slot.key != self._last)
        ]
        return min(slots, key=lambda slot: slot.key.number if slot.key is not None else -1)

    def _make_room(self, header_bytes: int) -> None:
        """Enlarge the slots of ranks whose header does not fit; 0: this one's does.

        All ranks call this. Raises CheckpointError on every rank.
        """
        data, header = self._sizes[PRIMARY]
        mine = torch.tensor([[data, max(header, pages(2 * header_bytes))]])
        self._arrange(gather_first(mine, self._topology.world))

    def _arrange(self, table: torch.Tensor | None = None) -> None:
        """Allocate the slots that are missing, and remove those of other sizes.

        table  [rank, 2] with sizes of data and header, if they are new

        Slots that hold the last save stay; all ranks then allocate only one of each kind. All ranks
        call this. Raises CheckpointError on every rank.
        """
        memory = self._memory
        if table is not None:
            sizes_of = [(int(data), int(header)) for data, header in table[:, :2]]
            self._sizes = {PRIMARY: sizes_of[self._topology.rank]}
            if self._ring is not None:
                self._sizes[COPY] = sizes_of[self._from]
        misfits = [slot for slot in memory.slots if not self._fits(slot)]
        in_use = [slot for slot in misfits if slot.key is not None and slot.key == self._last]
        several = torch.tensor([int(bool(in_use))])
        all_reduce(several, self._topology.world, dist.ReduceOp.MAX)
        self._settled = not several.item()
        count = 2 if self._settled else 1
        needed = count * sum(map(sum, self._sizes.values()))
        removed = [slot for slot in misfits if slot not in in_use]
        fitting_bytes = sum(slot.size_bytes for slot in memory.slots if self._fits(slot))
        more = needed - fitting_bytes - sum(slot.size_bytes for slot in removed)
        available = available_bytes()  # before any rank takes more
        mine = torch.tensor([[more, machine_number()]])
        table = gather_first(mine, self._topology.world)
        here = int(table[table[:, 1] == mine[0, 1], 0].sum())
        what = f"getting {needed / 2**30:.2f} GiB of host memory for {FLAG}"
        with errors_on_all_ranks(self._topology, what):
            if here > available:
                raise CheckpointError(
                    f"the ranks of a node need {here / 2**30:.2f} GiB, and "
                    f"{available / 2**30:.2f} GiB are available: --replication-factor 1 takes half "
                    "as much; with more ranks, each has less"
                )
            for slot in removed:
                memory.remove(slot)
            for role, sizes in self._sizes.items():
                fitting = [s for s in memory.slots if s.role == role and self._fits(s)]
                fitting += [memory.add(role, *sizes) for _ in range(count - len(fitting))]
                for slot in fitting if role == PRIMARY else ():
                    self.note = slot.memory.pin(self._device, FLAG) or self.note


def _entries(tensors: Tensors) -> Entries:
    """Return the entries of the shards in a copy of `tensors`."""
    entries: dict[str, Stored] = {}
    for name, offset, view, at in placed(tensors):
        dtype = str(view.dtype).removeprefix("torch.")
        shape = tensors[name].shape
        entry = entries.setdefault(name, {"shape": shape, "dtype": dtype, "boxes": []})
        entry["boxes"].append(Shard(offset, tuple(view.shape), "slot", at, view.nbytes, None))
    return entries


def _keys(memory: MemoryFile) -> list[Key]:
    """Return the saves in the slots; erase slots with damaged headers."""
    keys = []
    for slot in memory.slots:
        try:
            header = slot.read()
        except CheckpointError:
            slot.erase()
            continue
        if header is not None:
            keys.append(header.key)
    return keys


def _complete(
    slot: MemorySlot,
    content: Mapping[str, Any],
    about: Callable[[], Mapping[str, object]],
    stored: str,
) -> _HeaderOutcome:
    """Hash a copy and write its header."""
    value = slot.digest(content["size_bytes"], nothing)
    sys.audit(_EVENT, "hashed")
    try:
        more = {"digest": value, "about": about() if content["rank"] == 0 else {}}
        text = json.dumps({**content, **more}, separators=(",", ":"))
        slot.complete(content["key"], f'{text[:-1]},"stored":{stored}}}'.encode())
    except HeaderTooLongError as error:
        return _HeaderOutcome(str(error), error.size_bytes)
    except (CheckpointError, TypeError, ValueError) as error:
        return _HeaderOutcome(str(error))
    return _HeaderOutcome()


def _in_thread(future: Future[Any], function: Callable[[], object]) -> None:
    """Give `future` the result of a function that a thread runs, for which no exit waits."""

    def body() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=body, name="local-checkpoint", daemon=True).start()
