"""What this rank does right now, kept where others can read it when the rank cannot speak any more.

Each rank has a record of fixed size, a page of a file that all ranks of its node map into memory (flight_file.py):
the step and the phase, the last instruction of the schedule, the last collective or message that it entered, whether
it has left it, and how many collectives it has posted in each kind of group. Writing is a few struct.pack_into calls
into mapped memory: no system call, no lock, nothing that grows. The file lives as long as a process of the job, so a
rank that is stopped, stuck in a kernel or dead is described by its neighbours (megatron.training.watchdog).

Needs no torch.
"""
from __future__ import annotations

import struct
import time
from dataclasses import dataclass
from typing import Any, Protocol

KINDS = ("world", "tensor", "data", "pipeline", "model", "embedding", "other")
RECORD_BYTES = 4096
_MAGIC = b"MGFLIGHT"
_VERSION = 1

_HEADER = struct.Struct("<8s6iQ96s")  # magic, version, rank, pid, tensor, pipeline, data; start of the process; place
_PHASE = struct.Struct("<Qdq16s")  # writes, time, step, phase
_INSTRUCTION = struct.Struct("<Qdii16s")  # writes, time, stage, micro-batch, operation
_ENTERED = struct.Struct("<QdiiqQ16s")  # entries, time, kind of group, peer, bytes, number in its kind, call
_LEFT = struct.Struct("<Qd")  # the entry that was left, time
_ALIVE = struct.Struct("<Qd")  # signs of life, time
_COUNT = struct.Struct("<Q")
_DEVICE = struct.Struct("<iiiqQ16s7Q")  # whether valid, kind, peer, bytes, number, call; what the device has come to
_ANSWER = struct.Struct("<qdiI")  # inquiry, time, flags, bytes of the text behind it

_PHASE_AT, _INSTRUCTION_AT, _ENTERED_AT, _LEFT_AT, _ALIVE_AT, _POSTED_AT = 256, 320, 384, 448, 464, 512
_DEVICE_AT, _ANSWER_AT = 768, 1024  # these are written for the watchdog: an answer is no progress
_TEXT_AT = _ANSWER_AT + _ANSWER.size
_TEXT_BYTES = RECORD_BYTES - _TEXT_AT

_NUMBER_OF = {kind: number for number, kind in enumerate(KINDS)}
_clock = time.monotonic  # one clock for all processes of a node


class Meter(Protocol):
    """Measures calls and computations on a device, whose time the host does not see (device_calls.py)."""

    def enter(self, info: tuple[bytes, int, int, int, int]) -> None: ...
    def leave(self) -> None: ...
    def begin(self) -> None: ...
    def end(self) -> None: ...


class FlightRecorder:
    """Writes this rank's record; flight_file.open_recorder puts it into the node's file.

    buffer      RECORD_BYTES of writable memory; by default memory of this process, which nobody else reads
    computed_s  seconds in compute instructions, without those inside of collectives, since the program began

    One thread, the one that trains, calls everything but `alive` and `answer`; `alive` may come from any thread.
    """

    def __init__(self, buffer: Any = None) -> None:
        self.buffer = bytearray(RECORD_BYTES) if buffer is None else buffer
        self.meter: Meter | None = None
        self.computed_s = 0.0
        self._waited_s = 0.0
        self._begun, self._waited_before = 0.0, 0.0
        self._writes, self._calls, self._signs = 0, 0, 0
        self._entered = 0.0
        self._posted = [0] * len(KINDS)
        self._step, self._phase = 0, b"set-up"

    def describe(
        self, rank: int, pid: int, place: str, process_start: int = 0, sizes: tuple[int, int, int] = (0, 0, 0)
    ) -> None:
        """Write down whose record this is; `sizes` are the tensor, pipeline and data-parallel size, 0: not known."""
        header = (_MAGIC, _VERSION, rank, pid, *sizes, process_start, place.encode(errors="backslashreplace")[:96])
        _HEADER.pack_into(self.buffer, 0, *header)
        self._write_phase()

    def set_layout(self, tensor: int, pipeline: int, data: int) -> None:
        struct.pack_into("<3i", self.buffer, 8 + 3 * 4, tensor, pipeline, data)

    # -- where the rank is ---------------------------------------------------------------------------------------------

    def step(self, iteration: int) -> None:
        """The step after `iteration` begins."""
        self._step = iteration
        self._write_phase()

    def phase(self, name: str) -> _Phase:
        """`with flight.phase("saving"):` what the rank does, in up to 16 characters."""
        return _Phase(self, name)

    def _write_phase(self) -> None:
        self._writes += 1
        _PHASE.pack_into(self.buffer, _PHASE_AT, self._writes, _clock(), self._step, self._phase)

    def alive(self) -> None:
        """A sign of life from long work that enters no collective: reading, writing, building."""
        self._signs += 1
        _ALIVE.pack_into(self.buffer, _ALIVE_AT, self._signs, _clock())

    def instruction(self, operation: bytes, stage: int, micro_batch: int) -> None:
        """An instruction of the schedule begins."""
        self._begun, self._waited_before = _clock(), self._waited_s
        self._writes += 1
        _INSTRUCTION.pack_into(
            self.buffer, _INSTRUCTION_AT, self._writes, self._begun, stage, micro_batch, operation
        )  # fmt: skip
        if self.meter is not None:
            self.meter.begin()

    def computed(self) -> None:
        """The instruction that began last was a computation and has ended."""
        self.computed_s += _clock() - self._begun - (self._waited_s - self._waited_before)
        if self.meter is not None:
            self.meter.end()

    def schedule_ends(self) -> None:
        """There is no instruction that this rank is in."""
        self._writes += 1
        _INSTRUCTION.pack_into(self.buffer, _INSTRUCTION_AT, self._writes, _clock(), 0, 0, b"")

    # -- what it waits in ----------------------------------------------------------------------------------------------

    def enter(self, call: bytes, kind: str, size_bytes: int, by_host: bool = False) -> int:
        """A collective is posted, and may hold up this rank until `leave`; `by_host`: none of the device's. Returns its
        number among those of its kind of group, which is the same on all ranks of the group."""
        number = _NUMBER_OF[kind]
        sequence = self._posted[number] + 1
        self._posted[number] = sequence
        _COUNT.pack_into(self.buffer, _POSTED_AT + 8 * number, sequence)
        self._enter(call, number, -1, size_bytes, sequence, by_host)
        return sequence

    def enter_wait(self, call: bytes, kind: str, size_bytes: int, sequence: int, by_host: bool = False) -> None:
        """This rank begins to wait for a collective that it posted as `sequence` before."""
        self._enter(call, _NUMBER_OF[kind], -1, size_bytes, sequence, by_host)

    def enter_message(self, call: bytes, kind: str, size_bytes: int, peer: int) -> None:
        """This rank posts a message to or from the global rank `peer`, or begins to wait for it."""
        self._enter(call, _NUMBER_OF[kind], peer, size_bytes, 0)

    def _enter(
        self, call: bytes, kind: int, peer: int, size_bytes: int, sequence: int, by_host: bool = False
    ) -> None:
        self._calls += 1
        self._entered = now = _clock()
        _ENTERED.pack_into(
            self.buffer, _ENTERED_AT, self._calls, now, kind, peer, size_bytes, sequence, call
        )  # fmt: skip
        if self.meter is not None and not by_host:
            self.meter.enter((call, kind, peer, size_bytes, sequence))

    def leave(self) -> None:
        """What was entered last is over."""
        now = _clock()
        self._waited_s += now - self._entered
        _LEFT.pack_into(self.buffer, _LEFT_AT, self._calls, now)
        if self.meter is not None:
            self.meter.leave()

    # -- for the watchdog ----------------------------------------------------------------------------------------------

    def progress(self) -> bytes:
        """Changes with every write except answers."""
        return bytes(self.buffer[_PHASE_AT:_DEVICE_AT])

    def answer(self, inquiry: int, flags: int, text: str) -> None:
        """Leave an answer, such as this rank's stacks, for the neighbours; what is too long is cut at its end."""
        data = text.encode(errors="replace")[:_TEXT_BYTES]
        self.buffer[_TEXT_AT : _TEXT_AT + len(data)] = data
        _ANSWER.pack_into(self.buffer, _ANSWER_AT, inquiry, _clock(), flags, len(data))

    def device_is(self, info: tuple[bytes, int, int, int, int] | None, reached: list[int] | None) -> None:
        """Write down the call that the device is in and the collectives of each kind that it has come to, where its
        host is ahead of it; `reached` None: that is not known, or no longer so."""
        call, kind, peer, size_bytes, sequence = info or (b"", 0, -1, 0, 0)
        valid = (0 if reached is None else 1) + (0 if info is None else 2)
        counts = reached or [0] * len(KINDS)
        _DEVICE.pack_into(self.buffer, _DEVICE_AT, valid, kind, peer, size_bytes, sequence, call, *counts)

    @property
    def posted(self) -> list[int]:
        """Collectives posted so far, by kind of group."""
        return list(self._posted)

    def detach(self) -> Any:
        """Let go of the memory, which is returned; what is written from now on is lost."""
        memory, self.buffer = self.buffer, bytearray(self.buffer)
        return memory


class _Phase:
    def __init__(self, flight: FlightRecorder, name: str) -> None:
        self._flight, self._name, self._before = flight, name.encode()[:16], b""

    def __enter__(self) -> None:
        self._before, self._flight._phase = self._flight._phase, self._name
        self._flight._write_phase()

    def __exit__(self, *_: object) -> None:
        self._flight._phase = self._before
        self._flight._write_phase()


@dataclass(frozen=True)
class Call:
    """The collective or message that a rank is in. `sequence` counts the collectives of a kind of group, from 1; it is
    0 for a message, which has a `peer` instead (-1: none)."""

    name: str
    kind: str
    peer: int
    size_bytes: int
    sequence: int


@dataclass(frozen=True)
class FlightState:
    """A record as it was read. Times are seconds ago; `call` is None where the rank is in no collective or message,
    `instruction` is "" where it runs no schedule.

    `inquiry`, `answer_age_s`, `flags` and `text` are of the answer that the rank left last; `posted` counts the
    collectives it has posted, by kind of group. Both are the device's where that was written down.
    """

    rank: int
    pid: int
    process_start: int
    place: str
    sizes: tuple[int, int, int]
    step: int
    phase: str
    instruction: str
    instruction_age_s: float
    call: Call | None
    call_age_s: float
    quiet_s: float
    posted: tuple[int, ...]
    inquiry: int
    answer_age_s: float
    flags: int
    text: str

    @classmethod
    def read(cls, page: bytes, now: float | None = None) -> FlightState | None:
        """What a record says; None where nobody has written one. `now` is the monotonic clock of the same host."""
        magic, version, rank, pid, tensor, pipeline, data, start, place = _HEADER.unpack_from(page, 0)
        if magic != _MAGIC or version != _VERSION:
            return None
        now = _clock() if now is None else now
        _, phase_at, step, phase = _PHASE.unpack_from(page, _PHASE_AT)
        _, instruction_at, stage, micro_batch, operation = _INSTRUCTION.unpack_from(page, _INSTRUCTION_AT)
        entry, entered_at, kind, peer, size, sequence, name = _ENTERED.unpack_from(page, _ENTERED_AT)
        left, left_at = _LEFT.unpack_from(page, _LEFT_AT)
        _, alive_at = _ALIVE.unpack_from(page, _ALIVE_AT)
        inquiry, answered_at, flags, length = _ANSWER.unpack_from(page, _ANSWER_AT)
        call = None if entry == left else Call(_text(name), KINDS[kind], peer, size, sequence)
        posted = struct.unpack_from(f"<{len(KINDS)}Q", page, _POSTED_AT)
        valid, kind, peer, size, sequence, name, *reached = _DEVICE.unpack_from(page, _DEVICE_AT)
        if valid & 1:
            posted = tuple(reached)
        if valid & 2 and call is None:
            call = Call(_text(name), KINDS[kind], peer, size, sequence)
        return cls(
            rank=rank,
            pid=pid,
            process_start=start,
            place=_text(place),
            sizes=(tensor, pipeline, data),
            step=step,
            phase=_text(phase),
            instruction=f"{_text(operation)} of stage {stage}, micro-batch {micro_batch}" if operation[0] else "",
            instruction_age_s=now - instruction_at,
            call=call,
            call_age_s=now - entered_at,
            quiet_s=now - max(phase_at, instruction_at, entered_at, left_at, alive_at),
            posted=posted,
            inquiry=inquiry,
            answer_age_s=now - answered_at,
            flags=flags,
            text=page[_TEXT_AT : _TEXT_AT + min(length, _TEXT_BYTES)].decode(errors="replace"),
        )

    def posted_in(self, kind: str) -> int:
        return self.posted[_NUMBER_OF[kind]]


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="replace")
