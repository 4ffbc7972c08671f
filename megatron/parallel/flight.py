"""Flight records: each rank's current activity, which others can read even if it cannot answer.

Each rank has a record of fixed size, one page of a file that all ranks of its node share: step and
phase, the current instruction of the schedule, the last collective or message that the rank entered
and whether it has left that call, and the number of collectives it has posted in each kind of
group. The rank's own page is mapped into its memory, so that writing makes no system call and takes
no lock. Thus other ranks on the node can describe a
rank that is stopped, stuck in a kernel or dead (megatron.training.safety.watchdog). If a host is
far ahead of its device, `DeviceCalls` measures which call the device has reached.

Only `DeviceCalls.of` imports torch, and only for a GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from ctypes import Structure, c_bool, c_char, c_double, c_int64
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from megatron.parallel import layout
from megatron.parallel.host_processes import DEAD, GONE, STOPPED, process_state
from megatron.parallel.launch import Launch

if TYPE_CHECKING:
    import torch

KINDS = (*layout.KINDS, "other")
RECORD_BYTES = 4096
_TEXT_BYTES = 3000
_MAGIC = b"MGFLY5"
_PAGE = max(RECORD_BYTES, mmap.ALLOCATIONGRANULARITY)

_NUMBER_OF = {kind: number for number, kind in enumerate(KINDS)}
_clock = time.monotonic  # one clock for all processes of a node


class CallRecord(Structure):
    """The binary form of a `PendingCall` in a record; without a name it means no call."""

    _fields_ = (
        ("name", c_char * 24),
        ("kind", c_int64),
        ("peer", c_int64),
        ("size_bytes", c_int64),
        ("sequence", c_int64),
    )


class _Record(Structure):
    """A rank's page in the file."""

    _fields_ = (
        ("magic", c_char * 8),
        ("rank", c_int64),
        ("pid", c_int64),
        ("process_start", c_int64),
        ("place", c_char * 96),
        ("moved_at", c_double),
        ("step", c_int64),
        ("phase", c_char * 24),
        ("operation", c_char * 24),
        ("stage", c_int64),
        ("micro_batch", c_int64),
        ("in_call", c_bool),
        ("call", CallRecord),
        ("posted", c_int64 * len(KINDS)),
        ("device_known", c_bool),
        ("device_call", CallRecord),
        ("reached", c_int64 * len(KINDS)),
        ("inquiry", c_int64),
        ("text", c_char * _TEXT_BYTES),
    )


class FlightRecorder:
    """The writer of this rank's record.

    memory  RECORD_BYTES of writable memory; by default private memory, which no other process reads
    meter   measures calls and computations on the device; None: not measured

    Threads other than the training thread may only call `alive`, `progress`, `answer` and
    `device_is`, and read `buffer`.
    """

    def __init__(self, memory: Any = None) -> None:
        self._attach(_Record.from_buffer(bytearray(RECORD_BYTES) if memory is None else memory))
        self.meter: DeviceCalls | None = None
        self._writes = 0
        self.posted = [0] * len(KINDS)
        """Collectives posted so far, by kind of group."""

    def _attach(self, record: _Record) -> None:
        self._record = record
        self._call = record.call
        self._counts = record.posted

    def detach(self) -> None:
        """Release the memory: later writes are lost."""
        self._attach(_Record.from_buffer_copy(self._record))

    def describe(self, rank: int, pid: int, location: str, process_start: int = 0) -> None:
        """Write the rank, process and location (node:device) of this record."""
        record = self._record
        record.rank = rank
        record.pid = pid
        record.process_start = process_start
        record.place = location.encode(errors="backslashreplace")[:96]
        record.phase = record.phase or b"set-up"
        record.magic = _MAGIC
        self.alive()

    def alive(self) -> None:
        """Record progress.

        All methods that write this rank's activity do this, too. Call it during long work without
        collectives, such as reading, writing or building.
        """
        self._writes += 1
        self._record.moved_at = _clock()

    # -- the rank's activity ---------------------------------------------------------------------

    def step(self, iteration: int) -> None:
        """Begin the step after `iteration`."""
        self._record.step = iteration
        self.alive()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Set the name of the phase inside the block, in at most 24 ASCII characters: "saving"."""
        before = self._record.phase
        self._record.phase = name.encode()
        self.alive()
        try:
            yield
        finally:
            self._record.phase = before
            self.alive()

    def instruction(self, operation: bytes, stage: int, micro_batch: int) -> None:
        """Begin an instruction of the schedule."""
        record = self._record
        record.operation = operation
        record.stage = stage
        record.micro_batch = micro_batch
        self.alive()
        if self.meter is not None:
            self.meter.begin(operation, stage, micro_batch)

    def computed(self) -> None:
        """Note that the last instruction was a computation and has ended on the host."""
        if self.meter is not None:
            self.meter.end()

    def schedule_ends(self) -> None:
        """Note that the rank is no longer in any instruction."""
        self._record.operation = b""
        self.alive()

    # -- calls that may block --------------------------------------------------------------------

    def enter(
        self,
        name: bytes,
        kind: str,
        size_bytes: int,
        by_host: bool = False,
        *,
        peer: int = -1,
        sequence: int = 0,
    ) -> int:
        """Enter a call that may block this rank until `leave`.

        A call is a collective or a message, or the wait for one.

        by_host   whether only the host takes part in the call
        peer      the global rank to or from which a message goes; -1: a collective
        sequence  the number of a collective that was already posted; 0: it is posted now

        Returns a collective's number among all collectives in its kind of group, which is the same
        on all ranks of the group; 0 for a message.
        """
        call = self._call
        number = _NUMBER_OF[kind]
        waits = sequence > 0
        if peer < 0 and not waits:
            self._counts[number] = self.posted[number] = sequence = self.posted[number] + 1
        call.name = name
        call.kind = number
        call.peer = peer
        call.size_bytes = size_bytes
        call.sequence = sequence
        self._record.in_call = True
        self.alive()
        if self.meter is not None and (self.meter.on_host or not by_host):
            self.meter.enter(CallRecord.from_buffer_copy(call), waits)
        return sequence

    def leave(self) -> None:
        """Leave the call that was entered last."""
        self._record.in_call = False
        self.alive()
        if self.meter is not None:
            self.meter.leave()

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Neither count nor time calls inside the block, which records a pass for replays.

        Its replays count no calls either.
        """
        meter = self.meter
        posted = list(self.posted)
        self.meter = None
        try:
            yield
        finally:
            self.meter = meter
            self._counts[:] = self.posted[:] = posted

    # -- for the watchdog ------------------------------------------------------------------------

    def progress(self) -> int:
        """Return a number that changes whenever progress is recorded (see `alive`)."""
        return self._writes

    def answer(self, inquiry: int, text: str = "") -> None:
        """Write an answer to an inquiry: this rank's stacks, truncated if they are too long."""
        self._record.text = text.encode(errors="replace")[:_TEXT_BYTES]
        self._record.inquiry = inquiry

    def device_is(self, call: CallRecord | None, reached: list[int] | None) -> None:
        """Write the device's current call and how many collectives of each kind it has reached.

        For a host that is ahead of its device. `reached` is None if unknown or no longer valid.
        """
        record = self._record
        record.device_call = call or CallRecord()
        record.reached[:] = reached or [0] * len(KINDS)
        record.device_known = reached is not None

    @property
    def buffer(self) -> bytes:
        """A copy of the current record."""
        return bytes(self._record)


class PendingCall(NamedTuple):
    """A collective or message that a rank is in.

    `sequence` counts the collectives of a kind of group from 1; it is 0 for a message, which has a
    `peer` (else -1).
    """

    name: str
    kind: str
    peer: int
    size_bytes: int
    sequence: int

    @classmethod
    def of(cls, record: CallRecord) -> PendingCall:
        """Return the call in a record."""
        name = record.name.decode(errors="replace")
        return cls(name, KINDS[record.kind], record.peer, record.size_bytes, record.sequence)

    def __str__(self) -> str:
        size = f" of {self.size_bytes} bytes" if self.size_bytes else ""
        if self.peer >= 0:
            return f"{self.name}{size} {'to' if self.name == 'send' else 'from'} rank {self.peer}"
        return f"{self.name}{size} over its {self.kind} group (number {self.sequence})"


@dataclass(frozen=True)
class FlightState:
    """The content of a record.

    step           iterations that were complete when the current step began
    instruction    "" outside of a schedule
    call           the call that the host is in, or else the device, if known; None: no call
    quiet_s        seconds since the rank's last progress
    posted         collectives that the device has reached, if known, or else that the host has
                   posted, by kind of group
    inquiry        the number of the last inquiry that the rank has answered; 0: none
    stack          its answer: Python stacks from megatron.parallel.host_processes.python_stacks
    process        the system's state of the process (host_processes.process_state)
    """

    rank: int
    pid: int
    process_start: int
    location: str
    step: int
    phase: str
    instruction: str
    call: PendingCall | None
    quiet_s: float
    posted: list[int]
    inquiry: int = 0
    stack: str = ""
    process: str = ""

    @property
    def where(self) -> str:
        """The rank's activity in a few words."""
        inside = [f", in {activity}" for activity in (self.instruction, self.call) if activity]
        return f"step {self.step + 1}{''.join(inside)} ({self.phase})"

    @property
    def lost(self) -> bool:
        """True when the process is stopped (other than by a debugger), dead or gone."""
        return self.process in (STOPPED, DEAD, GONE)

    def posted_in(self, kind: str) -> int:
        """Return the entry of `posted` for this kind of group."""
        return self.posted[_NUMBER_OF[kind]]

    @classmethod
    def read(cls, page: bytes) -> FlightState | None:
        """Read a record of a rank on this host; None if none has been written."""
        record = _Record.from_buffer_copy(page)
        if record.magic != _MAGIC:
            return None

        def text(name: str) -> str:
            return bytes(getattr(record, name)).decode(errors="replace")

        current = record.call if record.in_call else record.device_call
        instruction = ""
        if record.operation:
            position = f"of stage {record.stage}, micro-batch {record.micro_batch}"
            instruction = f"{text('operation')} {position}"
        return cls(
            record.rank,
            record.pid,
            record.process_start,
            text("place"),
            record.step,
            text("phase"),
            instruction,
            PendingCall.of(current) if current.name else None,
            _clock() - record.moved_at,
            list(record.reached if record.device_known else record.posted),
            record.inquiry,
            text("text"),
        )

    def to_json(self) -> str:
        """Return the state for another host."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> FlightState:
        """Return the state that another rank serialized with `to_json`."""
        state = cls(**json.loads(text))
        return state if state.call is None else replace(state, call=PendingCall(*state.call))


def file_path(launch: Launch, folder: Path | None = None) -> Path:
    """Return a path that the ranks of this job on this node share with no other job."""
    if folder is None:
        shared = Path("/dev/shm")
        folder = shared if os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())
    digest = hashlib.sha256(os.fsencode(f"{launch.master_port}-{launch.job}-{launch.node}"))
    return folder / f"megatron-{os.getuid()}-{digest.hexdigest()[:32]}.flight"


class FlightFile:
    """A node's file of one job's flight records: this process's page, and a view of the others.

    It is in /dev/shm, which is memory, or else in the folder for temporary files. Once all ranks of
    the node have opened it, its name is removed: the file disappears with the last process, however
    that process ends. If a rank dies before that, a later job, or its supervisor, removes the name. A
    rank that cannot open or enlarge the file sees only its own page.
    """

    def __init__(self, launch: Launch, folder: Path | None = None) -> None:
        self._path = file_path(launch, folder)
        start = launch.local_rank * _PAGE
        self._lock = threading.Lock()  # the watchdog's thread reads while another one closes
        self._fd = -1
        try:
            self._fd = os.open(
                self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
            )
            # If pages were not allocated, running out of memory would kill the process with SIGBUS.
            os.posix_fallocate(self._fd, start, _PAGE)
        except OSError:
            self._close()
            self._fd = os.memfd_create(self._path.name)
            os.posix_fallocate(self._fd, start, _PAGE)
        self._memory = mmap.mmap(self._fd, _PAGE, offset=start)
        # A job that was killed during its rendezvous may have left the file behind.
        self._memory[:] = bytes(_PAGE)
        self.recorder = FlightRecorder(self._memory)
        self._named = True

    def unlink(self) -> None:
        """Remove the file's name. Harmless when called twice.

        Call this only once all ranks of the node have opened the file.
        """
        if self._named:
            self._named = False
            self._path.unlink(missing_ok=True)

    def states(self) -> list[FlightState]:
        """Return the records that ranks on this node have written, in order of local rank.

        Returns none once the file is closed.
        """
        with self._lock:
            size = os.fstat(self._fd).st_size if self._fd >= 0 else 0
            pages = [os.pread(self._fd, RECORD_BYTES, start) for start in range(0, size, _PAGE)]
        live = []
        for page in pages:
            state = FlightState.read(page) if len(page) == RECORD_BYTES else None
            if state is not None:
                process = process_state(state.pid, state.process_start)
                live.append(replace(state, process=process))
        return live

    def close(self) -> None:
        """Erase this rank's record and close the file. Harmless when called twice."""
        if self._fd < 0:
            return
        self.unlink()
        self.recorder.detach()
        self._memory[:] = bytes(_PAGE)
        with contextlib.suppress(BufferError):  # another thread is writing to it
            self._memory.close()
        self._close()

    def _close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1


# -- when calls and computations ran on a device -------------------------------------------------


class HostEvent:
    """An event of the CPU, with the methods of torch.cuda.Event."""

    def record(self) -> None:
        self._at = _clock()

    def query(self) -> bool:
        """Return whether the event has happened: always True."""
        return True

    def synchronize(self) -> None:
        """Wait until the event has happened: return at once."""

    def elapsed_time(self, later: HostEvent) -> float:
        """Return the milliseconds from this event to a later one."""
        return 1000 * (later._at - self._at)


class DeviceEvent(Protocol):
    """An event of a device, such as torch.cuda.Event."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: Any, /) -> float: ...


MOST_MARKS = 1 << 17
"""Maximum number of marks kept per step; a step of a large pipeline has about 10,000."""


class DeviceCalls:
    """The meter of a flight recorder: when calls and computations ran on the device.

    Events are recorded into the device's stream around every collective, message and wait for one
    and, while `marks` are kept, around every compute instruction. Events that have not happened yet
    show where a device hangs. No method waits for the device. On a CPU, events happen when they are
    recorded.

    new_event   makes an event such as torch.cuda.Event
    on_host     also measure calls in which only the host takes part
    marks       while this is a list, calls, computations and parts of a step are added to it, with
                the events before and after each. If it is None, events on a GPU have no timing,
                which costs the device less
    """

    def __init__(self, new_event: Callable[[], DeviceEvent], on_host: bool = False) -> None:
        self._new_event = new_event
        self.on_host = on_host
        # calls not known to have finished: call, event before, whether it is a wait, event after
        self._calls: deque[tuple[CallRecord, DeviceEvent, bool, DeviceEvent]] = deque()
        self._entered: tuple[CallRecord, DeviceEvent, bool] | None = None
        self._begun: tuple[object, DeviceEvent] | None = None
        self.marks: list[tuple[object, DeviceEvent, DeviceEvent]] | None = None

    @classmethod
    def of(cls, device: torch.device) -> DeviceCalls:
        """Return the meter of a torch.device, with events in its current stream."""
        if device.type == "cpu":
            return cls(HostEvent, on_host=True)
        import torch

        meter = cls(lambda: torch.cuda.Event(enable_timing=meter.marks is not None))
        return meter

    def mark(self) -> DeviceEvent:
        """Record an event into the stream and return it."""
        event = self._new_event()
        event.record()
        return event

    def add(self, what: object, begun: DeviceEvent, ended: DeviceEvent | None = None) -> None:
        """Add `what`, which ran between two events, to the marks, if they are kept.

        ended  None: record the second event now
        """
        if self.marks is not None and len(self.marks) < MOST_MARKS:
            self.marks.append((what, begun, ended or self.mark()))

    def enter(self, call: CallRecord, waits: bool = False) -> None:
        """Begin a call; `waits`: it is the wait for a collective that began before."""
        self._entered = call, self.mark(), waits

    def leave(self) -> None:
        """End, on the host, the call that was entered last."""
        if self._entered is None:  # a call that is not measured, or that began before this meter
            return
        call, begun, waits = self._entered
        ended = self.mark()
        self._entered = None
        self._calls.append((call, begun, waits, ended))
        self.add(call, begun, ended)
        while self._calls and self._calls[0][-1].query():
            self._calls.popleft()

    def begin(self, *instruction: object) -> None:
        """Begin an instruction; it is a computation if `end` is called before the next begins."""
        self._begun = None if self.marks is None else (instruction, self.mark())

    def end(self) -> None:
        """End, on the host, the computation that began last."""
        if self._begun is not None:
            self.add(*self._begun)

    def where(self, posted: list[int]) -> tuple[CallRecord | None, list[int]]:
        """Return the device's current call, or None, and how many collectives it has reached.

        posted  number of collectives that the host has posted, by kind of group, like the result

        Another thread calls this while the recording thread is blocked.
        """
        reached = list(posted)
        current = None
        calls = [*self._calls, *([(*self._entered, None)] if self._entered else [])]
        for call, entered, waits, left in calls:
            if not entered.query():
                if call.sequence and not waits:
                    reached[call.kind] = min(reached[call.kind], call.sequence - 1)
            elif current is None and left is not None and not left.query():
                current = call
        return current, reached
