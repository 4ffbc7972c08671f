"""Output of a run: log lines, a progress line, and events for files, trackers and callbacks.

Only rank 0 writes. Log parsers read the iteration and validation lines: their fields, the order and
the formats are therefore Megatron-DeepSpeed's.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import IO, Any, TextIO

from megatron.config import Config
from megatron.config.duration import show_duration
from megatron.protocols import Callback
from megatron.training.report.events import (
    ComputeTimes,
    End,
    Event,
    Iteration,
    TaskEvaluated,
    Validation,
    perplexity,
)
from megatron.training.report.trackers import Background, JsonLines, trackers

_SHOWN = 8  # slow ranks in the log: as many as one node has
_EVERY_S = 30.0  # longest time without a line
_BAR = 40  # most columns of the progress bar
_GROWTH = 1.05  # peak memory is reported again when it has grown by this factor
# no training run comes close to this; a higher figure means that the time or the peak is wrong
_PLAUSIBLE_UTILISATION = 0.9


def format_iteration(report: Iteration) -> str:
    """Return the iteration line.

    `TFLOPs:` is hardware TFLOP/s per device, recomputation included, as parsers expect; MFU and HFU
    follow if the device's peak is known. The loss, loss scale, grad norm, num zeros and params norm
    appear only if they have values, and the loss only if it is not 0.
    """
    fields = [
        f"iteration {report.iteration:8d}/{report.total_iterations:8d}",
        f"consumed samples: {report.consumed_samples:12d}",
        f"consumed tokens: {report.consumed_tokens:12d}",
        f"elapsed time per iteration (ms): {report.step_time_s * 1000.0:.1f}",
        f"learning rate: {report.learning_rate:.3E}",
        f"global batch size: {report.global_batch_size:5d}",
    ]
    if report.decoupled_learning_rate is not None:
        fields.insert(5, f"decoupled learning rate: {report.decoupled_learning_rate:.3E}")
    optional = [
        (f"{report.loss_name}: {{:.6E}}", report.lm_loss if report.lm_loss != 0.0 else None),
        ("loss scale: {:.1f}", report.loss_scale),
        ("grad norm: {:.3f}", report.grad_norm),
        ("num zeros: {:.1f}", report.num_zeros),
        ("params norm: {:.3f}", report.params_norm),
    ]
    fields += [form.format(value) for form, value in optional if value is not None]
    groups = report.components, report.balancing, report.scalars
    more = {name: value for group in groups for name, value in (group or {}).items()}
    fields += [f"{name}: {value:.6E}" for name, value in more.items() if value is not None]
    fields += [
        f"actual seqlen: {report.seq_length:5d}",
        f"number of skipped iterations: {report.skipped:3d}",
        f"number of nan iterations: {report.nan:3d}",
        f"samples per second: {report.samples_per_s:.3f}",
        f"tokens per gpu per second (tgs): {report.tokens_per_s_per_device:.3f}",
        f"TFLOPs: {report.hardware_tflops:.2f}",
    ]
    if report.mfu is not None and report.hfu is not None:
        fields += [f"MFU: {report.mfu:.3f}", f"HFU: {report.hfu:.3f}"]
    return " " + " | ".join(fields) + " |"


def format_validation(event: Validation) -> str:
    """Return the validation line between dashed lines."""
    name = event.loss_name
    figures = {f"{name} value": event.lm_loss}
    if name == "lm loss":
        figures["lm loss PPL"] = perplexity(event.lm_loss)
    figures |= event.components or {}
    if event.ema_loss is not None:
        figures[f"{name} of averaged weights"] = event.ema_loss
    line = f" validation loss at {event.where} | "
    line += "".join(f"{name}: {value:.6E} | " for name, value in figures.items())
    dashes = "-" * (len(line) + 1)
    return f"{dashes}\n{line}\n{dashes}"


def format_timers(times_ms: Mapping[str, Sequence[float]], option: str = "minmax") -> str:
    """Return log lines with the milliseconds of each phase of a step.

    `times_ms` has one value per rank for each phase. `option` is the value of --timing-log-option:
    minmax, max, or all to show every rank's value.
    """
    rows = [
        {"minmax": "(min, max) time", "max": "max time", "all": "times"}[option]
        + " across ranks (ms):"
    ]
    for name, times in times_ms.items():
        label = "    " + (name + " ").ljust(48, ".") + ":"
        if option == "all":
            rows.append(f"  {name}:")
            rows += [f"     rank {rank:3d}: {t:.2f}" for rank, t in enumerate(times)]
        elif option == "max":
            rows.append(f"{label} {max(times):.2f}")
        else:
            rows.append(f"{label} ({min(times):.2f}, {max(times):.2f})")
    return "\n".join(rows)


class Console:
    """Prints on the rank that reports; does nothing on the others.

    On a terminal, a line about the current work stays below the printed lines. Without a terminal,
    this line is printed after the second step and whenever nothing has been printed for 30 s. The
    first unit of work is excluded from rates: it may compile or connect. Printed lines are never
    cut or coloured, so that they can be parsed.

    omitted  texts that are not printed
    printed  set to which printed texts are added; None: to none
    """

    def __init__(
        self,
        enabled: bool,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.omitted: Collection[str] = ()
        self.printed: set[str] | None = None
        self._enabled = enabled
        self._clock = clock
        self._stream: IO[str] = stream if stream is not None else sys.stdout
        self._works: Any = None  # rich's Progress, for its rates; the innermost work is the last
        self._live: Any = None
        self._reported = self._moved = clock()  # when a line was printed, when a unit was done
        self._idle = threading.Event()

    @property
    def width(self) -> int:
        """Return the columns of the terminal; 100 without a terminal."""
        return shutil.get_terminal_size().columns if self._stream.isatty() else 100

    def say(self, text: str) -> None:
        """Print one or more lines."""
        if text in self.omitted:
            return
        if self.printed is not None:
            self.printed.add(text)
        self._reported = self._clock()
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        elif self._enabled:
            # in one write, because other threads print, too
            print(f"{text}\n", end="", file=self._stream, flush=True)

    def say_wrapped(self, text: str) -> None:
        """Print a text, wrapped to the width of the terminal."""
        fill = partial(textwrap.fill, break_long_words=False, break_on_hyphens=False)
        self.say(fill(text, self.width, initial_indent=" ", subsequent_indent="   "))

    @contextmanager
    def doing(
        self, what: str, total: int = 0, done: int = 0, where: Callable[[], str] = str
    ) -> Iterator[None]:
        """Show the progress of the work in the block; blocks may be nested.

        what         the work, with the name of its units if they are counted: "evaluation: batch"
        total, done  number of units, in all and done already; total 0: units are not counted
        where        returns the position within a unit, shown when a unit takes long
        """
        if not self._enabled:
            yield
            return
        outermost = not (self._works and self._works.tasks)
        self._moved = self._clock()
        if outermost:
            self._start()
        work = self._works.add_task(what, total=total or None, completed=done, where=where, note="")
        try:
            yield
        finally:
            self._works.remove_task(work)
            self._moved = self._clock()
            if outermost:
                self._idle.set()
                if self._live is not None:
                    self._live.stop()
                    self._live = None

    def advance(self, done: int | None = None, tokens: int = 0) -> None:
        """Note that a unit of the innermost work is done: the next one, or number `done`.

        The unit has `tokens` tokens; 0: its rate is not shown.
        """
        for work in self._works.tasks[-1:] if self._enabled else ():
            number = work.completed + 1 if done is None else done
            seconds = self._clock() - self._moved
            self._moved = self._clock()
            self._works.update(work.id, completed=number)
            recent = work.fields.get("unit_s")  # excludes other work, such as an evaluation
            if not tokens or recent is None:
                work.fields["unit_s"] = 0.0  # the first unit
                continue
            unit_s = 0.9 * recent + 0.1 * seconds if recent else max(seconds, 1e-9)
            work.fields.update(tokens=tokens, unit_s=unit_s)
            if not recent:
                self.tell()

    def note(self, text: str) -> None:
        """Show `text` with the innermost work, until the next note."""
        for work in self._works.tasks[-1:] if self._works else ():
            work.fields["note"] = text

    def tell(self, silent_s: float = 0.0) -> None:
        """Draw the progress line on a terminal; elsewhere print it after `silent_s` of silence."""
        if self._live is not None:
            self._live.refresh()
        elif self._clock() - self._reported >= silent_s:
            for work in self._works.tasks[-1:]:  # empty if the work has just ended
                self.say(f" {' | '.join(self._fields(work))}")

    def _fields(self, work: Any) -> list[str]:
        """Return the fields of the progress line; the first is the name of the work."""
        done = f" {work.completed:.0f}/{work.total:.0f}" if work.total else ""
        location = work.fields["where"]() if self._clock() - self._moved >= _EVERY_S else ""
        fields = [work.description + done, work.fields["note"], location]
        elapsed = f"{show_duration(work.elapsed)} elapsed"
        if not work.speed:
            return [*filter(None, fields), elapsed]
        rates = ("", "")
        if unit_s := work.fields.get("unit_s"):
            pace = f"{unit_s:.{3 if unit_s < 10 else 1}f} s/step"
            rates = (f"{work.fields['tokens'] / unit_s:,.0f} tokens/s", pace)
        left = f"{show_duration(work.remaining / work.speed)} left"
        return [*filter(None, (*fields, rates[0], elapsed, rates[1], left))]

    def _start(self) -> None:
        from rich.console import Console as RichConsole
        from rich.live import Live
        from rich.progress import Progress

        self._works = Progress(get_time=self._clock, disable=True, speed_estimate_period=1e9)
        if not self._stream.isatty():
            self._idle = threading.Event()
            threading.Thread(target=self._tell_regularly, args=(self._idle,), daemon=True).start()
            return
        console = RichConsole(file=self._stream)
        self._live = Live(
            get_renderable=self.line, console=console, transient=True, refresh_per_second=4
        )
        self._live.start()
        console.show_cursor()  # a process that is killed could not show it again

    def _tell_regularly(self, idle: threading.Event) -> None:
        while not idle.wait(max(1.0, _EVERY_S - (self._clock() - self._reported))):
            self.tell(_EVERY_S)

    def line(self) -> Any:
        """Return the line on a terminal: as many fields as fit, and a bar if there is room."""
        from rich.text import Text

        text = ""
        for work in self._works.tasks[-1:]:
            fields = self._fields(work)
            while len(text := " | ".join(fields)) >= self.width and len(fields) > 2:
                del fields[-2]
            if work.total:
                room = min(_BAR, self.width - len(text) - 2)
                text += f" {'━' * int(room * work.completed / work.total)}"
        return Text(text, no_wrap=True, overflow="ellipsis")


class LogLines(Callback):
    """Prints the events that have their own lines in the log."""

    def __init__(self, config: Config, console: Console) -> None:
        logging = config.logging
        self._timing_option = logging.timing_log_option if logging.timing_log_level else None
        self._memory_reported = 0.0
        self._console = console
        self._say = console.say

    def on_event(self, event: Event) -> None:
        """Print the lines of an event, and show the loss in the progress line."""
        match event:
            case Iteration():
                self._iteration(event)
            case Validation():
                self._say(format_validation(event))
            case TaskEvaluated():
                self._say(f" iteration {event.iteration}, task {event}")
            case ComputeTimes():
                self._say(
                    f" computing time of a step over ranks: min {event.min_ms:.1f} ms, median "
                    f"{event.median_ms:.1f} ms, max {event.max_ms:.1f} ms"
                )
                shown = [
                    f"rank {one['rank']} ({one['place']}) {one['ms']:.1f} ms, {one['ratio']:.2f}x"
                    for one in event.slow[:_SHOWN]
                ]
                if shown:
                    listed = f"{', '.join(shown)} ({event.slow_ranks} in all)"
                    self._say(f"   slower than the median of their stage: {listed}")
            case End() if event.energy_j > 0:  # not NaN
                kwh = event.energy_j / 3.6e6
                self._say(f" energy of this job on all nodes: {kwh:.3g} kWh")

    def _iteration(self, report: Iteration) -> None:
        """Print the line of an interval.

        The peak memory is reported after the first interval, and again when it has grown by 5 %.
        """
        self._say(format_iteration(report))
        for layer, of in (report.experts or {}).items():
            self._say(
                f"   experts of layer {layer}: largest load {of['imbalance']:.2f} times the mean, "
                f"entropy {of['entropy']:.3f} of the maximum, {of['dropped']:.2%} dropped"
            )
        if report.hfu is not None and report.hfu > _PLAUSIBLE_UTILISATION:
            self._say(
                f" warning: HFU {report.hfu:.3f} is more than a device can do: the time or the "
                "peak is wrong"
            )
        if report.times_ms and self._timing_option is not None:
            self._say(format_timers(report.times_ms, self._timing_option))
        peak_bytes = report.memory_bytes
        if peak_bytes > _GROWTH * self._memory_reported:
            most = (
                f" most memory held by a rank: {peak_bytes / 2**30:.2f} GiB, by rank "
                f"{report.memory_rank}"
            )
            if report.reserved_bytes is not None:
                most += f"; reserved by an allocator: {report.reserved_bytes / 2**30:.2f} GiB"
            else:
                most += " (the whole process, with libraries and memory that malloc keeps)"
            self._say(most)
            self._memory_reported = peak_bytes
        if report.lm_loss is not None:
            self._console.note(f"loss {report.lm_loss:.3f}")


class Reporter:
    """Reports a run to people and tools. Every rank may call it; only rank 0 writes.

    When `publish` returns, the log and the metrics file contain the event; trackers and the user's
    on_event may lag behind.
    """

    def __init__(self, config: Config, rank: int) -> None:
        self.console = Console(enabled=rank == 0)
        self.say = self.console.say
        self._direct: list[LogLines | JsonLines] = []
        self._behind: list[Background] = []
        if rank != 0:
            return
        self._direct.append(LogLines(config, self.console))
        if config.metrics_path is not None:
            folder = f"--save {config.checkpoint.save}"
            flag = "--metrics-file" if config.logging.metrics_file else folder
            self._direct.append(JsonLines(config.metrics_path, flag=flag, warn=self.say))
        self._behind = trackers(config, self.say)

    @contextmanager
    def describing(self, printed: set[str] | None) -> Iterator[None]:
        """Omit what this process has `printed` before about the same job; None: print all."""
        if printed is not None:
            self.console.omitted = frozenset(printed)
            self.console.printed = printed
        try:
            yield
        finally:
            self.console.omitted = ()
            self.console.printed = None

    def publish(self, event: Event) -> None:
        """Pass an event to the log, the metrics file, the trackers and the user's callbacks."""
        for callback in (*self._direct, *self._behind):
            callback.on_event(event)

    def closes(self, callback: Callback) -> bool:
        """Return whether `close` closes this callback, in the thread of its on_event."""
        return any(tracker.callback is callback for tracker in self._behind)

    def close(self) -> None:
        """Close the files, and wait for trackers, for a limited time."""
        for tracker in self._behind:
            tracker.finish()  # all of them end at the same time
        for callback in (*self._behind, *self._direct):
            callback.close()
