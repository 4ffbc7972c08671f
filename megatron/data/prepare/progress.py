"""How far preprocessing is: a bar on a terminal, plain lines in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.data.prepare.preprocess import Totals

SHOWN_BAD = 10
LINE_S = 10.0


class Progress:
    """Shows Totals on stderr. Rates are of this run: what an interrupted one had done before does not count.

    log_interval: documents between two lines where stderr is not a terminal; None: a line every 10 s. clock: seconds.
    """

    def __init__(self, log_interval: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._log_interval = None if log_interval is None else max(log_interval, 1)
        self._next_line: float | None = None  # documents, or seconds
        self._bar: Any = None
        self._bad = 0
        self._on_terminal = sys.stderr.isatty()

    def update(self, totals: Totals) -> None:
        if self._on_terminal:
            if self._bar is None:
                self._start_bar(totals)
            self._bar.update(self._task, completed=totals.file_bytes, description=self.describe(totals))
            return
        if self._log_interval is None:
            self._line_after(totals, self._clock(), LINE_S, self._started)
        else:
            self._line_after(totals, totals.documents, self._log_interval, totals.earlier_documents)

    def _line_after(self, totals: Totals, position: float, interval: float, start: float) -> None:
        """A line when `position`, in documents or seconds, has passed the next multiple of `interval`."""
        if self._next_line is None:
            self._next_line = (start // interval + 1) * interval
        if position >= self._next_line:
            self.say(f" preprocessed {self.describe(totals)}, {self._time_left(totals)}")
            self._next_line = (position // interval + 1) * interval

    def describe(self, totals: Totals) -> str:
        """Documents, tokens, MB of text, and MB/s of this run."""
        seconds = max(self._clock() - self._started, 1e-9)
        rate = (totals.input_bytes - totals.earlier_bytes) / 1e6 / seconds
        bad = f", {totals.bad_documents} bad" if totals.bad_documents else ""
        return (
            f"{totals.documents} documents, {totals.tokens} tokens, {totals.input_bytes / 1e6:.1f} MB{bad}, "
            f"{rate:.2f} MB/s"
        )

    def summary(self, totals: Totals) -> list[str]:
        """The last lines: what was written, and where."""
        seconds = self._clock() - self._started
        per_document = totals.tokens / max(totals.documents, 1)
        lines = [
            f"wrote {self.describe(totals)}",
            f"  {per_document:.1f} tokens per document, {_duration(seconds)}"
            + (f" after {totals.earlier_documents} documents of an earlier run" if totals.earlier_documents else ""),
        ]
        if totals.empty_documents:
            lines.append(f"  {totals.empty_documents} empty documents left out")
        if totals.bad_documents:
            lines.append(f"  {totals.bad_documents} bad documents left out: {totals.bad_input}")
        return lines + [f"  {output}.bin, {output}.idx" for output in totals.outputs]

    def bad(self, document: object) -> None:
        """Show one of the first bad documents."""
        self._bad += 1
        if self._bad <= SHOWN_BAD:
            self.say(f"skipped: {document}")
        elif self._bad == SHOWN_BAD + 1:
            self.say("skipped: more, which are only counted here and named in a file at the end")

    def say(self, text: str) -> None:
        """A line that does not disturb the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _start_bar(self, totals: Totals) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        # Begun where this run begins: the time left is reckoned from what comes after.
        self._task = self._bar.add_task("", total=totals.total_file_bytes, completed=totals.earlier_file_bytes)
        self._bar.start()

    def _time_left(self, totals: Totals) -> str:
        done = totals.file_bytes - totals.earlier_file_bytes
        left = totals.total_file_bytes - totals.file_bytes
        seconds = (self._clock() - self._started) * left / max(done, 1)
        return f"{totals.file_bytes / max(totals.total_file_bytes, 1):.1%} of the input, {_duration(seconds)} left"


def _duration(seconds: float) -> str:
    """
    >>> _duration(4.26), _duration(61), _duration(3725)
    ('4.3 s', '1 min 1 s', '1 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
