"""Progress of searches on stderr: a rewritten line on a terminal, otherwise a line at intervals."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Self, TextIO

from megatron.config.duration import show_duration

Progress = Callable[[str, str, int, int], None]
"""Function of the activity, the unit of work, the number of units done, and their total."""

QUIET_S = 2.0
"""Seconds without progress at the beginning: a shorter search prints nothing."""
LINE_S = 10.0
"""Seconds between two lines in a log."""
STAGES = {"ranking layouts": 0.6, "checking memory": 0.3, "simulating schedules": 0.1}
"""Activities of a search for layouts, in order, each with its usual share of the time."""
_BEAT_S = 0.5


class SearchActivity(NamedTuple):
    """Activity of a search.

    share    share that is done of all searches or, if it is not in STAGES, of the activity
    began_s  time on the clock when that began
    """

    what: str
    unit: str
    done: int
    total: int
    share: float
    began_s: float


class SearchProgress:
    """Shows the activity of a search, how much is done, and an estimate of the time left.

    Call it like `Progress`. As a context manager it also shows that time passes while nothing is
    done. Several searches are shown as a whole: enter it once for each. `searches` is their number,
    `stream` is stderr by default, and `clock` returns seconds.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        searches: int = 1,
    ) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._rewrites = self._stream.isatty()
        self._clock = clock
        self._due_s = clock() + QUIET_S
        self._activity: SearchActivity | None = None
        self._shown = ""
        self._searches = searches
        self._search = 0  # the number of the present one, from 1 on
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._beats = False
        self._thread: threading.Thread | None = None

    def __call__(self, what: str, unit: str, done: int, total: int) -> None:
        """Note what is done, and show it if a line is due."""
        before = self._activity
        share = self._share(what, done / max(total, 1))
        began_s = self._clock()
        if before is not None and (before.what == what or {before.what, what} <= STAGES.keys()):
            share = max(share, before.share)
            began_s = before.began_s
        self._activity = SearchActivity(what, unit, done, total, share, began_s)
        if self._beats and self._thread is None:
            # Not before: a search forks its processes before it reports anything.
            self._thread = threading.Thread(target=self._beat, name="progress", daemon=True)
            self._thread.start()
        self.show()

    def _share(self, what: str, of_activity: float) -> float:
        """Return the share that is done of all searches, if a share of one's activity is."""
        if what not in STAGES:
            return of_activity
        names = [*STAGES]
        before = sum(STAGES[name] for name in names[: names.index(what)])
        of_search = before + STAGES[what] * of_activity
        return (max(self._search - 1, 0) + of_search) / self._searches

    def show(self) -> None:
        """Show the activity if a line is due."""
        with self._lock:
            now = self._clock()
            if self._activity is None or now < self._due_s:
                return
            self._due_s = now + (_BEAT_S / 2 if self._rewrites else LINE_S)
            self._shown = self._words(self._activity, now)
            if self._rewrites:
                width = shutil.get_terminal_size().columns - 1
                self._stream.write(f"\r{self._shown[:width]}\x1b[K")
            else:
                self._stream.write(f"{self._shown}\n")
            self._stream.flush()

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_S):
            self.show()

    def _words(self, activity: SearchActivity, now: float) -> str:
        what, unit, done, total, share, began_s = activity
        spent_s = now - began_s
        time_words = f"{show_duration(spent_s)} so far"
        if share:
            time_words = f"about {show_duration(spent_s * (1 - share) / share)} left"
        which = f"layout {self._search} of {self._searches}, " if self._searches > 1 else ""
        # the rest is cut on a narrow terminal
        return f" {share:.0%} done, {time_words}: {which}{what}, {done:,} of {total:,} {unit}"

    def begin(self) -> None:
        """Note that the next search begins, as entering does."""
        self._search += 1

    def __enter__(self) -> Self:
        self.begin()
        self._beats = True
        self._thread = None
        self._ended.clear()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        if self._rewrites and self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
