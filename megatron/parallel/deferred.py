"""Weight gradients that wait: the split backward pass of zero-bubble schedules (Qi et al., arXiv 2401.10241, sec. 2).

During a BACKWARD_INPUT instruction the linear layers compute only the gradient of their input and leave the weight's
part here as a callable; the BACKWARD_WEIGHT instruction of the same micro-batch runs it later.
"""
from __future__ import annotations

from collections.abc import Callable


class WeightGradients:
    """The queue that one rank's linear layers and its pipeline executor share."""

    def __init__(self) -> None:
        self._deferring = False
        self._waiting: list[Callable[[], None]] = []

    @property
    def deferring(self) -> bool:
        """True while layers must leave their weight gradients here."""
        return self._deferring

    def begin(self) -> None:
        """Start to collect; until `take` every weight gradient is deferred."""
        assert not self._waiting, "weight gradients of another backward pass were never taken"
        self._deferring = True

    def add(self, compute: Callable[[], None]) -> None:
        assert self._deferring, "a weight gradient was deferred outside begin() ... take()"
        self._waiting.append(compute)

    def take(self) -> list[Callable[[], None]]:
        """End collecting and hand over what was deferred, in order."""
        waiting, self._waiting, self._deferring = self._waiting, [], False
        return waiting
