"""Waiting for processes without a clock: FIFOs report their start and their end."""

import os
import time

LIMIT_S = 50.0


def until(true, limit_s=LIMIT_S):
    """Wait until a condition is true; only a hang takes `limit_s`."""
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it does not come true"
        time.sleep(0.01)


class Lifeline:
    """FIFO that processes under test hold open for writing as long as they live.

    `started` waits until one of them has opened it, `gone` until all have closed it.
    """

    def __init__(self, path):
        self.path = path
        os.mkfifo(path)

    def started(self):
        self._file = open(self.path, "rb")  # noqa: SIM115

    def gone(self):
        with self._file:
            self._file.read()
