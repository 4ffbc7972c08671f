"""A line now and then while the start of a run waits for index files, which takes minutes for hundreds of gigabytes."""
from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from megatron.data import index_cache

INTERVAL_S = 20.0


@contextlib.contextmanager
def told_if_slow(
    say: Callable[[str], None], clock: Callable[[], float] = time.monotonic,
    pause: Callable[[threading.Event, float], bool] = threading.Event.wait,
) -> Iterator[None]:
    """Inside of the block, say every INTERVAL_S seconds what index files are being built or waited for, and at the end
    how long it took; nothing when the block is done sooner.

    `pause` waits for the event or so many seconds, and says whether the event came.
    """
    start, done, handler = clock(), threading.Event(), _Last()

    def tell() -> None:
        while not pause(done, INTERVAL_S):
            say(f" index files: {handler.last}, {clock() - start:.0f} s so far")

    logger, level = index_cache.log, index_cache.log.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    thread = threading.Thread(target=tell, name="megatron-index-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        logger.removeHandler(handler)
        logger.setLevel(level)
    seconds = clock() - start
    if seconds >= INTERVAL_S:
        say(f" index files: ready after {seconds:.0f} s; tools/build_index.py builds them before a run")


class _Last(logging.Handler):
    """Keeps the last message."""

    last = "reading"

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()
