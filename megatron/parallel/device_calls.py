"""When calls and computations ran on a device, whose host is far ahead of it.

Events are recorded into the device's stream around every collective and every wait for one and, where times are wanted,
around every compute instruction. Those that have not happened yet show where a device hangs; the times between the
others show how long it computed. Nothing waits for the device. A CPU has events of its own, which happen at once.
"""
from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

_clock = time.monotonic


class HostEvent:
    """An event of the CPU, with the methods of torch.cuda.Event."""

    def record(self) -> None:
        self._at = _clock()

    def query(self) -> bool:
        """Whether it has happened."""
        return True

    def elapsed_time(self, later: HostEvent) -> float:
        """Milliseconds from this event to a later one."""
        return 1000 * (later._at - self._at)


class DeviceCalls:
    """The meter of a flight recorder.

    new_event   makes an event, as torch.cuda.Event
    timed       measure compute instructions, too; events without times cost the device less
    on_host     whether calls that only the host takes part in count
    computed_s  where `timed`: seconds of the compute instructions that are over, without the waits inside of them

    A call is anything with a `kind`, the number of its kind of group, and a `sequence`, its number among these.
    """

    def __init__(self, new_event: Callable[[], Any], timed: bool = False, on_host: bool = False) -> None:
        self._new_event, self._timed, self.on_host = new_event, timed, on_host
        self._calls: deque[tuple[Any, Any, Any]] = deque()  # not yet seen to be over: call, event before, event after
        self._entered: tuple[Any, Any] | None = None
        self._begun: Any = None
        self._inside: list[tuple[Any, Any]] = []  # events around the waits of the instruction that began last
        self._ended: deque[tuple[Any, Any, list[tuple[Any, Any]]]] = deque()  # instructions not yet counted
        self.computed_s = 0.0

    @classmethod
    def of(cls, device: Any, timed: bool = False) -> DeviceCalls:
        """The meter of a torch.device: events in its current stream."""
        if device.type == "cpu":
            return cls(HostEvent, timed, on_host=True)
        import torch

        return cls(lambda: torch.cuda.Event(enable_timing=timed), timed)

    def _mark(self) -> Any:
        event = self._new_event()
        event.record()
        return event

    def enter(self, call: Any) -> None:
        """A call begins."""
        self._entered = call, self._mark()

    def leave(self) -> None:
        """The call that was entered last is over on the host."""
        if self._entered is None:  # a call that is not measured, or that began before this meter
            return
        (call, entered), left = self._entered, self._mark()
        self._entered = None
        self._calls.append((call, entered, left))
        if self._begun is not None:
            self._inside.append((entered, left))
        while self._calls and self._calls[0][2].query():
            self._calls.popleft()

    def begin(self) -> None:
        """An instruction begins; it counts as a computation if `end` is called before the next one."""
        if self._timed:
            self._begun, self._inside = self._mark(), []

    def end(self) -> None:
        """The computation that began last is over on the host."""
        if self._begun is not None:
            self._ended.append((self._begun, self._mark(), self._inside))
            self._begun = None
            self.settle()

    def settle(self) -> None:
        """Count the computations that are over by now."""
        while self._ended and self._ended[0][1].query():
            begun, ended, inside = self._ended.popleft()
            waited_ms = sum(entered.elapsed_time(left) for entered, left in inside)
            self.computed_s += (begun.elapsed_time(ended) - waited_ms) / 1000

    def where(self, posted: list[int]) -> tuple[Any, list[int]]:
        """The call that the device is in, or None, and how many collectives of each kind of group it has come to, of
        the `posted` that its host has posted. For another thread, while the one that records stands still."""
        reached, current = list(posted), None
        calls = list(self._calls)
        if self._entered is not None:
            calls.append((*self._entered, None))
        for call, entered, left in calls:
            if not entered.query():
                if call.sequence:
                    reached[call.kind] = min(reached[call.kind], call.sequence - 1)
            elif current is None and left is not None and not left.query():
                current = call
        return current, reached
