"""What this rank does right now, kept where others can read it when the rank cannot speak any more.

Each rank has a record of fixed size, a page of a file that all ranks of its node map into memory (flight_file.py): step
and phase, the last instruction of the schedule, the last collective or message that it entered and whether it has left
it, and how many collectives it has posted in each kind of group. Writing makes no system call and takes no lock. So a
rank that is stopped, stuck in a kernel or dead is described by its neighbours (megatron.training.safety.watchdog).

Needs no torch.
"""
from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from ctypes import Structure, c_bool, c_char, c_double, c_int64
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.parallel.device_calls import DeviceCalls
from megatron.parallel.processes import DEAD, GONE, STOPPED

KINDS = ("world", "tensor", "data", "pipeline", "model", "embedding", "other")
RECORD_BYTES = 4096
_TEXT_BYTES = 3000
_MAGIC = b"MGFLY2"

_NUMBER_OF = {kind: number for number, kind in enumerate(KINDS)}
_clock = time.monotonic  # one clock for all processes of a node


class CallRecord(Structure):
    """A `Call` as a record has it; no name: none."""

    _fields_ = (
        ("name", c_char * 24), ("kind", c_int64), ("peer", c_int64),
        ("size_bytes", c_int64), ("sequence", c_int64),
    )  # fmt: skip


class _Record(Structure):
    """The page of a rank. `writes` changes with all progress; what is written for the watchdog comes last."""

    _fields_ = (
        ("magic", c_char * 8), ("rank", c_int64), ("pid", c_int64),
        ("process_start", c_int64), ("place", c_char * 96),
        ("writes", c_int64), ("moved_at", c_double),
        ("step", c_int64), ("phase", c_char * 24),
        ("operation", c_char * 24), ("stage", c_int64), ("micro_batch", c_int64),
        ("in_call", c_bool), ("call", CallRecord), ("posted", c_int64 * len(KINDS)),
        ("device_known", c_bool), ("device_call", CallRecord), ("reached", c_int64 * len(KINDS)),
        ("inquiry", c_int64), ("text", c_char * _TEXT_BYTES),
    )  # fmt: skip


class FlightRecorder:
    """Writes this rank's record; flight_file.FlightFile puts it into the node's file.

    memory  RECORD_BYTES that can be written to; by default memory of this process, which nobody else reads
    meter   measures calls and computations on the device; None: nobody asks for it

    One thread, the one that trains, calls everything but `alive`, `answer` and `device_is`, which any thread may call.
    """

    def __init__(self, memory: Any = None) -> None:
        self._attach(_Record.from_buffer(bytearray(RECORD_BYTES) if memory is None else memory))
        self.meter: DeviceCalls | None = None
        self._writes = 0
        self.posted = [0] * len(KINDS)
        """Collectives posted so far, by kind of group."""

    def _attach(self, record: _Record) -> None:
        self._record, self._call, self._counts = record, record.call, record.posted

    def describe(self, rank: int, pid: int, place: str, process_start: int = 0) -> None:
        """Write down whose record this is."""
        record = self._record
        record.rank, record.pid, record.process_start = rank, pid, process_start
        record.place = place.encode(errors="backslashreplace")[:96]
        record.phase = record.phase or b"set-up"
        record.magic = _MAGIC
        self._moved()

    def alive(self) -> None:
        """A sign of life from long work that enters no collective: reading, writing, building."""
        self._moved()

    def _moved(self) -> None:
        self._writes += 1
        self._record.writes = self._writes
        self._record.moved_at = _clock()

    # -- where the rank is ---------------------------------------------------------------------------------------------

    def step(self, iteration: int) -> None:
        """The step after `iteration` begins."""
        self._record.step = iteration
        self._moved()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """`with flight.phase("saving"):` what the rank does, in up to 24 ASCII characters."""
        before, self._record.phase = self._record.phase, name.encode()
        self._moved()
        try:
            yield
        finally:
            self._record.phase = before
            self._moved()

    def instruction(self, operation: bytes, stage: int, micro_batch: int) -> None:
        """An instruction of the schedule begins."""
        record = self._record
        record.operation, record.stage, record.micro_batch = operation, stage, micro_batch
        self._moved()
        if self.meter is not None:
            self.meter.begin()

    def computed(self) -> None:
        """The instruction that began last was a computation and has ended."""
        if self.meter is not None:
            self.meter.end()

    def schedule_ends(self) -> None:
        """There is no instruction that this rank is in."""
        self._record.operation = b""
        self._moved()

    # -- what it waits in ----------------------------------------------------------------------------------------------

    def enter(self, call: bytes, kind: str, size_bytes: int, by_host: bool = False) -> int:
        """A collective is posted, and may hold up this rank until `leave`; `by_host`: none of the device's. Returns its
        number among those of its kind of group, which is the same on all ranks of the group."""
        number = _NUMBER_OF[kind]
        self.posted[number] += 1
        sequence = self.posted[number]
        self._counts[number] = sequence
        self._enter(call, number, -1, size_bytes, sequence, by_host)
        return sequence

    def enter_wait(self, call: bytes, kind: str, size_bytes: int, sequence: int, by_host: bool = False) -> None:
        """This rank begins to wait for a collective that it posted as `sequence` before."""
        self._enter(call, _NUMBER_OF[kind], -1, size_bytes, sequence, by_host)

    def enter_message(self, call: bytes, kind: str, size_bytes: int, peer: int) -> None:
        """This rank posts a message to or from the global rank `peer`, or begins to wait for it."""
        self._enter(call, _NUMBER_OF[kind], peer, size_bytes, 0, False)

    def _enter(self, name: bytes, kind: int, peer: int, size_bytes: int, sequence: int, by_host: bool) -> None:
        call = self._call
        call.name, call.kind, call.peer, call.size_bytes, call.sequence = name, kind, peer, size_bytes, sequence
        self._record.in_call = True
        self._moved()
        if self.meter is not None and (self.meter.on_host or not by_host):
            self.meter.enter(CallRecord.from_buffer_copy(call))

    def leave(self) -> None:
        """What was entered last is over."""
        self._record.in_call = False
        self._moved()
        if self.meter is not None:
            self.meter.leave()

    # -- for the watchdog ----------------------------------------------------------------------------------------------

    def progress(self) -> int:
        """Changes with every write except answers."""
        return self._writes

    def answer(self, inquiry: int, text: str = "") -> None:
        """Leave an answer, this rank's stacks, for the neighbours; what is too long is cut at its end."""
        self._record.text = text.encode(errors="replace")[:_TEXT_BYTES]
        self._record.inquiry = inquiry

    def device_is(self, call: CallRecord | None, reached: list[int] | None) -> None:
        """Write down the call that the device is in and the collectives of each kind that it has come to, where its
        host is ahead of it; `reached` None: that is not known, or no longer so."""
        record = self._record
        record.device_call = call or CallRecord()
        record.reached[:] = reached or [0] * len(KINDS)
        record.device_known = reached is not None

    @property
    def buffer(self) -> bytes:
        """The record as it is now."""
        return bytes(self._record)

    def detach(self) -> None:
        """Let go of the memory: what is written from now on is lost."""
        self._attach(_Record.from_buffer_copy(self._record))


class Call(NamedTuple):
    """The collective or message that a rank is in. `sequence` counts the collectives of a kind of group, from 1; it is
    0 for a message, which has a `peer` instead (-1: none)."""

    name: str
    kind: str
    peer: int
    size_bytes: int
    sequence: int

    def __str__(self) -> str:
        size = f" of {self.size_bytes} bytes" if self.size_bytes else ""
        if self.peer >= 0:
            return f"{self.name}{size} {'to' if self.name == 'send' else 'from'} rank {self.peer}"
        return f"{self.name}{size} over its {self.kind} group (number {self.sequence})"


@dataclass(frozen=True)
class FlightState:
    """A record as it was read.

    process        what the system says of the process (megatron.parallel.processes)
    instruction    "" where it runs no schedule; call: None where it is in no collective or message
    quiet_s        seconds since its last progress
    posted         collectives it has posted, by kind of group; it and `call` are the device's where that is known
    inquiry        the number of the last one that the rank has answered; 0: none
    stack          its answer: the frames of its threads, one a line, the main thread's first and the innermost last
    """

    rank: int
    pid: int
    process_start: int
    place: str
    step: int
    phase: str
    instruction: str
    call: Call | None
    quiet_s: float
    posted: list[int]
    inquiry: int = 0
    stack: str = ""
    process: str = ""

    @property
    def where(self) -> str:
        """What the rank does, in a few words."""
        inside = [f", in {part}" for part in (self.instruction, self.call) if part]
        return f"step {self.step + 1}{''.join(inside)} ({self.phase})"

    @property
    def lost(self) -> bool:
        """Whether the process cannot do anything any more."""
        return self.process in (STOPPED, DEAD, GONE)

    @classmethod
    def read(cls, page: bytes) -> FlightState | None:
        """What a record of this host says; None where nobody has written one."""
        record = _Record.from_buffer_copy(page)
        if record.magic != _MAGIC:
            return None
        of, instruction = record.call if record.in_call else record.device_call, ""
        if record.operation:
            instruction = f"{_text(record.operation)} of stage {record.stage}, micro-batch {record.micro_batch}"
        return cls(
            rank=record.rank,
            pid=record.pid,
            process_start=record.process_start,
            place=_text(record.place),
            step=record.step,
            phase=_text(record.phase),
            instruction=instruction,
            call=Call(_text(of.name), KINDS[of.kind], of.peer, of.size_bytes, of.sequence) if of.name else None,
            quiet_s=_clock() - record.moved_at,
            posted=list(record.reached if record.device_known else record.posted),
            inquiry=record.inquiry,
            stack=_text(record.text),
        )

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> FlightState:
        fields = json.loads(text)
        return cls(**{**fields, "call": fields["call"] and Call(*fields["call"])})

    def posted_in(self, kind: str) -> int:
        """Collectives posted in this rank's group of a kind."""
        return self.posted[_NUMBER_OF[kind]]


def _text(field: bytes) -> str:
    return field.decode(errors="replace")
