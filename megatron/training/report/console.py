"""What a person sees: a live progress line on a terminal, plain lines in a log file."""
from __future__ import annotations

import sys
from typing import IO, Any, TextIO


class Console:
    """Prints on the rank that reports; silent on the others.

    On a terminal a progress line stays below the printed lines; elsewhere there is none. Lines are never wrapped, cut
    or coloured, so that they can be parsed.
    """

    def __init__(self, enabled: bool, stream: TextIO | None = None) -> None:
        self._enabled = enabled
        self._stream: IO[str] = stream if stream is not None else sys.stdout
        self._live: Any = None
        self._task: Any = None

    def say(self, text: str) -> None:
        """Print one or more lines."""
        if not self._enabled:
            return
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def begin(self, done: int, total: int) -> None:
        """Show the progress line, `done` of `total` iterations, if this is a terminal and rich is installed."""
        if not self._enabled or not self._stream.isatty():
            return
        try:
            from rich.console import Console as RichConsole
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        except ImportError:
            return
        self._live = Progress(
            TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"), console=RichConsole(file=self._stream), transient=True,
            refresh_per_second=4,
        )  # fmt: skip
        self._task = self._live.add_task("training", total=total, completed=done, note="")
        self._live.start()

    def update(self, done: int, note: str | None = None) -> None:
        """Move the progress line; `note` stands at its end until the next one."""
        if self._live is not None:
            fields = {} if note is None else {"note": note}
            self._live.update(self._task, completed=done, **fields)

    def end(self) -> None:
        """Take the progress line away."""
        if self._live is not None:
            self._live.stop()
            self._live = None
