"""Virtual clock for code that takes its clock and its sleep function as arguments."""

from __future__ import annotations

from collections.abc import Callable


class VirtualClock:
    """Clock whose time passes only while a caller calls its `sleep`.

        clock = VirtualClock()
        waiter = Waiter(clock=clock, sleep=clock.sleep)
        clock.at(5.0, lambda: file.touch())     # happens when the clock gets there
        waiter.wait(timeout_s=60)               # returns at once, at 5 virtual seconds

    A wait that nothing ends raises AssertionError after `limit_s` virtual seconds.
    """

    def __init__(self, start: float = 1000.0, limit_s: float = 1e6) -> None:
        self.now = start
        self.slept: list[float] = []
        self._end = start + limit_s
        self._events: list[tuple[float, Callable[[], object]]] = []

    def __call__(self) -> float:
        return self.now

    def at(self, seconds_from_now: float, what: Callable[[], object]) -> None:
        """Call `what` in `seconds_from_now` virtual seconds."""
        self._events.append((self.now + seconds_from_now, what))

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass, at least 1 ms, and make the calls that become due."""
        self.slept.append(seconds)
        self.advance(max(seconds, 1e-3))

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while due := [event for event in self._events if event[0] <= end]:
            event = min(due, key=lambda one: one[0])
            self._events.remove(event)
            self.now = max(self.now, event[0])
            event[1]()
        self.now = max(self.now, end)
        assert self.now < self._end, "virtual time is over: the wait has no end"
