"""When calls and computations ran on a device, whose host is far ahead of it.

Events are recorded into the device's stream around every collective and every wait for one; where times are wanted,
around every compute instruction, too. From those that have not happened yet follows where a device is that hangs; from
the times between those that have, how long it computed. Nothing waits for the device.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

Info = tuple[bytes, int, int, int, int]  # call, number of its kind of group, peer, bytes, number among its kind


class _DeviceCall:
    """A call between two events; `counted` once no instruction needs its time any more."""

    __slots__ = ("counted", "entered", "info", "left")

    def __init__(self, info: Info, entered: Any, left: Any, counted: bool) -> None:
        self.info, self.entered, self.left, self.counted = info, entered, left, counted


class DeviceCalls:
    """A flight recorder's meter.

    new_event   makes an event with record() and query(), as torch.cuda.Event has them, and where `timed` is set with
                elapsed_time(later) in ms; events that keep no time cost the device less
    computed_s  where `timed` is set: seconds of the compute instructions that are over, without those that the stream
                waited for messages
    """

    def __init__(self, new_event: Callable[[], Any], timed: bool) -> None:
        self._new_event, self.timed = new_event, timed
        self._free: list[Any] = []
        self._calls: deque[_DeviceCall] = deque()  # not yet seen to be over
        self._pending: deque[tuple[Any, Any, list[_DeviceCall]]] = deque()  # instructions not yet seen to be over
        self._begun: Any = None
        self._inside: list[_DeviceCall] = []
        self._entered: tuple[Info, Any] | None = None
        self.computed_s = 0.0

    @classmethod
    def on_cuda(cls, timed: bool = False) -> DeviceCalls:
        """Events in the current stream of the current device, CUDA's or ROCm's."""
        import torch

        return cls(lambda: torch.cuda.Event(enable_timing=timed), timed)

    def enter(self, info: Info) -> None:
        self._entered = info, self._mark()

    def leave(self) -> None:
        if self._entered is None:  # entered before there was this meter
            return
        call = _DeviceCall(*self._entered, self._mark(), self._begun is None)
        self._entered = None
        self._calls.append(call)
        if self._begun is not None:
            self._inside.append(call)
        self._forget()

    def begin(self) -> None:
        """An instruction begins; one that `end` was not called for is no computation, and not counted."""
        if not self.timed:
            return
        if self._begun is not None:
            self._free.append(self._begun)
            self._drop(self._inside)
        self._begun, self._inside = self._mark(), []

    def end(self) -> None:
        if self._begun is None:
            return
        self._pending.append((self._begun, self._mark(), self._inside))
        self._begun, self._inside = None, []
        self.settle()

    def settle(self) -> None:
        """Count the instructions that are over by now."""
        while self._pending and self._pending[0][1].query():
            begun, ended, inside = self._pending.popleft()
            waited = sum(call.entered.elapsed_time(call.left) for call in inside)
            self.computed_s += (begun.elapsed_time(ended) - waited) / 1000
            self._free += (begun, ended)
            self._drop(inside)
        self._forget()

    def _drop(self, calls: list[_DeviceCall]) -> None:
        for call in calls:
            call.counted = True

    def _forget(self) -> None:
        """Let go of the oldest calls, as far as they are over and counted."""
        while self._calls and self._calls[0].counted and self._calls[0].left.query():
            call = self._calls.popleft()
            self._free += (call.entered, call.left)

    def _mark(self) -> Any:
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event

    def where(self, posted: list[int]) -> tuple[Info | None, list[int]]:
        """The call that the device is in, or None; and how many collectives of each kind of group it has come to, of
        the `posted` that the host has posted. For another thread, while the one that records stands still."""
        reached, current = list(posted), None
        calls = [(call.info, call.entered, call.left) for call in list(self._calls)]
        if self._entered is not None:
            calls.append((*self._entered, None))
        for info, entered, left in calls:
            _, kind, _, _, sequence = info
            if not entered.query():
                reached[kind] = min(reached[kind], sequence - 1) if sequence else reached[kind]
            elif current is None and left is not None and not left.query():
                current = info
        return current, reached
