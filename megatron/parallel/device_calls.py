"""Measurement of when calls and computations ran on a device whose host is far ahead of it.

Events are recorded into the device's stream around every collective and every wait for one and,
where times are wanted, around every compute instruction. Events that have not happened yet show
where a device hangs; the times between the others show how long it computed. Nothing waits for the
device. On a CPU, events happen when they are recorded.
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
        """Return whether it has happened."""
        return True

    def elapsed_time(self, later: HostEvent) -> float:
        """Return the milliseconds from this event to a later one."""
        return 1000 * (later._at - self._at)


class DeviceCalls:
    """The meter of a flight recorder.

    new_event   makes an event such as torch.cuda.Event
    timed       also measure compute instructions; events without times cost the device less
    on_host     count calls in which only the host takes part
    computed_s  where `timed`: seconds of the finished compute instructions, without the waits
                inside them

    A call is anything with a `kind`, the number of its kind of group, and a `sequence`, its number
    among these.
    """

    def __init__(
        self, new_event: Callable[[], Any], timed: bool = False, on_host: bool = False
    ) -> None:
        self._new_event, self._timed, self.on_host = new_event, timed, on_host
        # not known to be over: call, event before, event after
        self._calls: deque[tuple[Any, Any, Any]] = deque()
        self._entered: tuple[Any, Any] | None = None
        self._begun: Any = None
        # events around the waits of the current instruction
        self._inside: list[tuple[Any, Any]] = []
        # instructions not yet counted
        self._ended: deque[tuple[Any, Any, list[tuple[Any, Any]]]] = deque()
        self.computed_s = 0.0

    @classmethod
    def of(cls, device: Any, timed: bool = False) -> DeviceCalls:
        """Return the meter of a torch.device, with events in its current stream."""
        if device.type == "cpu":
            return cls(HostEvent, timed, on_host=True)
        import torch

        return cls(lambda: torch.cuda.Event(enable_timing=timed), timed)

    def _mark(self) -> Any:
        event = self._new_event()
        event.record()
        return event

    def enter(self, call: Any) -> None:
        """Begin a call."""
        self._entered = call, self._mark()

    def leave(self) -> None:
        """End, on the host, the call that was entered last."""
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
        """Begin an instruction; it counts as a computation if `end` is called before the next
        one.
        """
        if self._timed:
            self._begun, self._inside = self._mark(), []

    def end(self) -> None:
        """End, on the host, the computation that began last."""
        if self._begun is not None:
            self._ended.append((self._begun, self._mark(), self._inside))
            self._begun = None
            self.settle()

    def settle(self) -> None:
        """Count the computations that have finished."""
        while self._ended and self._ended[0][1].query():
            begun, ended, inside = self._ended.popleft()
            waited_ms = sum(entered.elapsed_time(left) for entered, left in inside)
            self.computed_s += (begun.elapsed_time(ended) - waited_ms) / 1000

    def where(self, posted: list[int]) -> tuple[Any, list[int]]:
        """Return the device's current call, or None, and the number of collectives of each kind
        that it has reached.

        posted  the numbers that its host has posted. For another thread, while the recording thread
                is blocked.
        """
        reached, current = list(posted), None
        calls = [*self._calls, *([(*self._entered, None)] if self._entered else [])]
        for call, entered, left in calls:
            if not entered.query():
                if call.sequence:
                    reached[call.kind] = min(reached[call.kind], call.sequence - 1)
            elif current is None and left is not None and not left.query():
                current = call
        return current, reached
