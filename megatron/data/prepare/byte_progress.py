"""How far a tool has got through its bytes: a bar on a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TextIO

LINE_INTERVAL_S = 10.0


class ByteProgress:
    """Shows bytes done of `total`, MB/s and the time left on stderr. A context manager; `clock` gives seconds."""

    def __init__(
        self, what: str, total: int, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._total = what, max(total, 1)
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._started = self._last_line = clock()
        self._bar: Any = None

    def __enter__(self) -> Self:
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
            from rich.progress import TransferSpeedColumn as Speed

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), Speed(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(file=self._stream), transient=True)
            self._task = self._bar.add_task(self._what, total=self._total)
            self._bar.start()
        return self

    def update(self, done: int) -> None:
        """`done` bytes so far."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done)
            return
        now = self._clock()
        if now - self._last_line < LINE_INTERVAL_S:
            return
        self._last_line = now
        rate = done / (now - self._started)
        left = max(self._total - done, 0) / max(rate, 1.0)
        print(
            f" {self._what}: {done / 1e6:.0f} of {self._total / 1e6:.0f} MB ({done / self._total:.0%}), "
            f"{rate / 1e6:.1f} MB/s, {left:.0f} s left",
            file=self._stream,
            flush=True,
        )

    def say(self, text: str) -> None:
        """A line that does not disturb the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
