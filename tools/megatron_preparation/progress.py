"""Progress in bytes: a bar on a terminal, regular lines in a log file."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from megatron_preparation.preprocess import Totals

SHOWN_BAD = 10
LINE_S = 10.0


class ByteProgress:
    """Context manager that shows the share of `total` bytes done, MB/s and the time left on stderr.

    Rates exclude the first `done` bytes. `what` is the title, `clock` returns seconds, and `unit`
    names what is counted instead of bytes.
    """

    def __init__(
        self,
        what: str,
        total: int,
        done: int = 0,
        clock: Callable[[], float] = time.monotonic,
        unit: str = "",
    ) -> None:
        self._unit = unit
        self._what = what
        self._total = max(total, 1)
        self._first = self._added = done
        self._clock = clock
        self._started = self._last_line = clock()
        self._bar: Any = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeRemainingColumn,
            )
            from rich.progress import TransferSpeedColumn as Speed

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                *((MofNCompleteColumn(),) if self._unit else (DownloadColumn(), Speed())),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._what, total=self._total, completed=self._first)
            self._bar.start()
        return self

    def add(self, more: int) -> None:
        """Show `more` bytes than before."""
        self._added += more
        self.update(self._added)

    def update(self, done: int, what: str | None = None, due: bool | None = None) -> None:
        """Show `done` bytes under the title `what`.

        A log file gets a line if `due`; None: every LINE_S seconds.
        """
        if self._bar is not None:
            self._bar.update(self._task, completed=done, description=what or self._what)
            return
        now = self._clock()
        if now - self._last_line >= LINE_S if due is None else due:
            self._last_line = now
            rate = max((done - self._first) / max(now - self._started, 1e-9), 1.0)
            unit = self._unit
            scale = 1.0
            digits = 0
            if not unit:
                unit = "MB"
                scale = 1e6
                digits = 0 if self._total >= 1e8 else 3
            self.say(
                f" {what or self._what}: {done / scale:.{digits}f} of "
                f"{self._total / scale:.{digits}f} {unit} ({done / self._total:.0%}), "
                f"{rate / scale:.{digits + 1}f} {unit}/s, "
                f"{max(self._total - done, 0) / rate:.0f} s left"
            )

    def say(self, text: str) -> None:
        """Print a line without disturbing the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class PreprocessProgress:
    """Shows Totals of preprocessing on stderr. Rates exclude the work of an interrupted run.

    log_interval: documents between two lines if stderr is not a terminal; None: a line every LINE_S
    seconds.
    """

    def __init__(
        self, log_interval: int | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._started = clock()
        self._log_interval = log_interval
        self._bytes: ByteProgress | None = None
        self._shown_documents = self._bad = 0

    def update(self, totals: Totals) -> None:
        """Show the progress, if due."""
        if self._bytes is None:
            self._bytes = ByteProgress(
                "", totals.total_file_bytes, totals.earlier_file_bytes, self._clock
            ).__enter__()
            self._shown_documents = totals.earlier_documents
        due = None
        if self._log_interval is not None:
            due = (
                totals.documents // self._log_interval > self._shown_documents // self._log_interval
            )
            self._shown_documents = totals.documents
        self._bytes.update(totals.file_bytes, self.describe(totals), due)

    def describe(self, totals: Totals) -> str:
        """Return documents, tokens, MB of text, bad documents if any, and MB/s of this run."""
        read = totals.input_bytes - totals.earlier_bytes
        seconds = max(self._clock() - self._started, 1e-9)
        rate = f", {read / 1e6 / seconds:.2f} MB/s" if read else ""
        bad = f", {totals.bad_documents} bad" if totals.bad_documents else ""
        return (
            f"{totals.documents} documents, {totals.tokens} tokens, "
            f"{totals.input_bytes / 1e6:.1f} MB{bad}{rate}"
        )

    def summary(self, totals: Totals) -> list[str]:
        """Return the last lines: what was written, and where."""
        per_document = totals.tokens / max(totals.documents, 1)
        earlier = (
            f" after {totals.earlier_documents} documents of an earlier run"
            if totals.earlier_documents
            else ""
        )
        lines = (
            []
            if totals.unchanged
            else [
                f"wrote {self.describe(totals)}",
                f"  {per_document:.1f} tokens per document, {self._clock() - self._started:.1f} "
                f"s{earlier}",
            ]
        )
        if totals.empty_documents:
            lines.append(f"  {totals.empty_documents} empty documents left out")
        if totals.bad_documents:
            lines.append(f"  {totals.bad_documents} bad documents left out: {totals.bad_input}")
        return lines + [f"  {output}.bin, {output}.idx" for output in totals.outputs]

    def bad(self, document: object) -> None:
        """Count a bad document, and show it if it is one of the first SHOWN_BAD."""
        self._bad += 1
        if self._bad <= SHOWN_BAD:
            self.say(f"skipped: {document}")
        elif self._bad == SHOWN_BAD + 1:
            self.say("skipped: more documents, which are counted, and listed in a file at the end")

    def say(self, text: str) -> None:
        """Print a line without disturbing the bar."""
        (self._bytes or ByteProgress("", 0)).say(text)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bytes is not None:
            self._bytes.__exit__()
