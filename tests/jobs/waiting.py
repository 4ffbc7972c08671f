"""Waiting for processes without a clock: FIFOs report their start and their end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

LIMIT_S = 50.0


def until(true: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Wait until a condition is true; only a hang takes `limit_s`."""
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.01)


class Lifeline:
    """FIFO that processes under test hold open for writing as long as they live.

    `started` waits until one of them has opened it, `gone` until all have closed it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)

    def started(self) -> None:
        self._file = open(self.path, "rb")  # noqa: SIM115

    def gone(self) -> None:
        with self._file:
            self._file.read()
