"""Signals, errors and lost output of a process: clear messages, correct exit codes, no hangs.

This module does not import torch, so that a mistake on the command line is reported immediately and
a signal may arrive while torch is being imported.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn

from megatron.errors import (
    EXIT_LOST_RANK,
    LostRankError,
    MegatronError,
    flush_output,
    print_error,
)

EXIT_ERROR = 1  # an error in the program, or output that could not be written
EXIT_USER_ERROR = 2  # something the user can fix
EXIT_INTERRUPTED = 130

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
# Ctrl-C may reach a process twice: from the terminal and from its launcher.
_ONE_PRESS_S = 1.0


@contextlib.contextmanager
def signals_noted() -> Iterator[list[int]]:
    """Collect the signals that ask the run to end, but Ctrl-C, while nothing can act on them."""
    received = list[int]()
    before = {}
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            if number != signal.SIGINT and signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda n, _: received.append(n))
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


class Signals:
    """Requests to end the run: the signals in SIGNALS, noted inside the context if `enabled`.

    Only the first signal counts: Slurm and people send several. But a second SIGINT ends the
    process immediately with exit code 130; while `saving` returns True, only a third does. A SIGINT
    within a second of another is not counted. SIGHUP, which a terminal or a connection sends when
    it closes, and SIGINT remain ignored if they already were, as under nohup or in the background
    of a shell script. Nothing is noted if a thread other than the main one enters the context,
    because Python lets only the main thread set handlers.

    received  number of the first signal; 0 before that
    saving    returns whether a checkpoint is being written
    prints    whether this process prints the effect of SIGINT
    """

    def __init__(
        self,
        enabled: bool = True,
        *,
        prints: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.enabled = enabled
        self.received = 0
        self.saving: Callable[[], bool] = lambda: False
        self._prints = prints
        self._clock = clock
        self._presses = 0
        self._pressed_s = float("-inf")
        self._previous: dict[int, Any] = {}
        self._wake = -1

    def __enter__(self) -> Signals:
        if self.enabled and threading.current_thread() is threading.main_thread():
            # A thread waits for SIGINT: Python calls a handler only after the current C call, which
            # may be long.
            read_end, self._wake = os.pipe()
            os.set_blocking(self._wake, False)
            signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
            threading.Thread(
                target=self._read_signals, args=(read_end,), name="Ctrl-C", daemon=True
            ).start()
            for number in SIGNALS:
                ignored = signal.getsignal(number) is signal.SIG_IGN
                if ignored and number in (signal.SIGHUP, signal.SIGINT):
                    continue
                self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous.clear()
        if self._wake >= 0:
            signal.set_wakeup_fd(-1)
            os.close(self._wake)  # ends the thread
            self._wake = -1

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number

    def _read_signals(self, read_end: int) -> None:
        while number := os.read(read_end, 1):
            if number[0] == signal.SIGINT:
                self.press()
        os.close(read_end)

    def press(self) -> None:
        """Handle a SIGINT."""
        now = self._clock()
        if now - self._pressed_s < _ONE_PRESS_S:
            return
        self._pressed_s = now
        self._presses = self._presses + 1
        ends = self._presses > (2 if self.saving() else 1)
        if ends:
            text = "the run ends at once"
        elif self._presses == 2:
            text = "a checkpoint is being written; a third Ctrl-C ends the run without it"
        else:
            by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
            last = "torchrun gives it 30 s" if by_torchrun else "a second Ctrl-C ends it at once"
            text = f"the run finishes its step, saves and ends; {last}"
        if self._prints:
            print(f" Ctrl-C: {text}", file=sys.stderr, flush=True)
        if ends:
            leave(EXIT_INTERRUPTED)


@contextlib.contextmanager
def handled_signals(
    numbers: Iterable[signal.Signals], note: Callable[[int], None]
) -> Iterator[None]:
    """Call `note` for these signals; those that are ignored, as under nohup, stay ignored."""
    before = {
        number: signal.signal(number, lambda received, _: note(received))
        for number in numbers
        if signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Output(io.FileIO):
    """Standard output or standard error whose writes never fail.

    Output that cannot be written is lost; a note on the other stream says so once.
    """

    lost = False

    def write(self, data: Any, /) -> int:
        """Write as much as possible; if nothing can be written, drop `data` and return its length.

        If `data` were not dropped, the buffer would keep it and fail again.
        """
        reason = "writing would block"
        try:
            if (written := super().write(data)) is not None:
                return written
        except OSError as error:
            reason = error.strerror or str(error)
        if not self.lost:
            self.lost = True
            text = (
                f"note: {self.name} cannot be written ({reason}): its output is lost; the run "
                "continues\n"
            )
            with contextlib.suppress(OSError):
                os.write(3 - self.fileno(), text.encode())
        return len(data)


def _check_terminal_size() -> None:
    """Remove COLUMNS and LINES if invalid: libraries that print would fail with them."""
    for name in ("COLUMNS", "LINES"):
        value = os.environ.get(name, "")
        if not (value.isascii() and value.isdecimal() and len(value) < 6):
            os.environ.pop(name, None)


def guard_output() -> None:
    """Replace standard output and standard error with streams whose writes never fail.

    Call this before any file is opened. The descriptor of a closed stream is opened on /dev/null,
    so that no file of the run gets it and receives printed text.
    """
    _check_terminal_size()
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # read-only: a write fails, as it did when closed
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
    for number, name in ((1, "stdout"), (2, "stderr")):
        output = _Output(number, "w", closefd=False)
        output.name = f"standard {'output' if number == 1 else 'error'}"
        buffer = io.BufferedWriter(output)
        old = getattr(sys, name)
        stream = io.TextIOWrapper(
            buffer, old and old.encoding, "backslashreplace", line_buffering=True
        )
        setattr(sys, name, stream)


def _output_lost() -> bool:
    flush_output()
    return bool(getattr(getattr(getattr(sys.stdout, "buffer", None), "raw", None), "lost", False))


@contextlib.contextmanager
def results_apart() -> Iterator[None]:
    """Reserve standard output for Python's prints, in programs that print their results.

    Text that libraries write to its descriptor goes to standard error: Gloo in torch 2.10 writes a
    line for each group, RCCL its version.
    """
    old = sys.stdout
    try:
        replaced = old.fileno() != 1
    except (AttributeError, OSError, ValueError):  # none, closed, or not a file
        replaced = True
    if replaced:
        yield
        return
    old.flush()
    results = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(os.dup(results), "w", encoding=old.encoding, errors=old.errors) as stream:
            sys.stdout = stream
            yield
    finally:
        sys.stdout = old
        os.dup2(results, 1)
        os.close(results)


def run_guarded(body: Callable[[], object], rank: int | Callable[[], int], prefix: str = "") -> int:
    """Call `body` and return the exit code; error messages go to standard error.

    `rank` is the rank of this process, or a function that returns it if `body` may change it. A
    MegatronError is shown without a traceback: in full on rank 0, after `prefix` (default: the
    error's type, which identifies the end of a run in its log), and in one line on other ranks.
    KeyboardInterrupt, a file name that is too long and the text of a SystemExit are shown with the
    rank, without a traceback; a SystemExit with a code and a broken pipe are not shown. Any other
    exception is shown with its traceback and the rank. After a fatal signal, such as the bus error
    when a mapped file has been truncated, Python shows where it occurred.
    """
    if not faulthandler.is_enabled():
        # standard error may not be a file
        with contextlib.suppress(OSError, AttributeError, RuntimeError):
            faulthandler.enable(all_threads=False)
    who = rank if callable(rank) else lambda: rank
    try:
        body()
    except MegatronError as error:
        _tell_torchrun(f"{type(error).__name__}: {error}")
        print_error(error, who(), prefix or type(error).__name__)
        return EXIT_LOST_RANK if isinstance(error, LostRankError) else EXIT_USER_ERROR
    except KeyboardInterrupt:
        _tell_torchrun("interrupted")
        print_error("interrupted; nothing was saved at this point", prefix=f"rank {who()}")
        return EXIT_INTERRUPTED
    except SystemExit as exit_:
        code = exit_.code
        if code is not None and not isinstance(code, int):
            _tell_torchrun(str(code))
            print_error(str(code), prefix=f"rank {who()}")
            return EXIT_ERROR
        # the result of --help and the like is their output: losing it is an error
        return code or (EXIT_ERROR if _output_lost() else 0)
    except BrokenPipeError:
        return _reader_left()
    except BaseException as failure:
        # a file name that is too long is a user error wherever it is used, as in as_tool
        if getattr(failure, "errno", None) == errno.ENAMETOOLONG:
            print_error(failure, prefix=f"rank {who()}")
            return EXIT_USER_ERROR
        text = traceback.format_exc().rstrip()
        _tell_torchrun(text)
        # One write, so that the tracebacks of several ranks do not interleave.
        print_error(text, prefix=f"rank {who()} failed")
        return EXIT_ERROR
    return 0


def _tell_torchrun(text: str) -> None:
    """Write why this process failed into the error file that torchrun prints when it ends.

    The format is defined by torch.distributed.elastic.multiprocessing.errors.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def as_tool(main: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """Wrap the `main` of a tool: its argv defaults to the arguments of this process.

    A MegatronError or OSError ends in a message and exit code 2, except that a broken pipe ends in
    exit code 1 and Ctrl-C in 130, both without a message. Characters that the encoding of the
    output lacks, for example in a file name, are shown as escapes.
    """

    @functools.wraps(main)
    def guarded(argv: Sequence[str] | None = None) -> int:
        _check_terminal_size()
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        try:
            return main(sys.argv[1:] if argv is None else argv)
        except (MegatronError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                return _reader_left()
            print_error(error)
            return EXIT_USER_ERROR
        except KeyboardInterrupt:
            return EXIT_INTERRUPTED

    return guarded


def _reader_left() -> int:
    """Discard further output after its reader has left, as in `| head`; return the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_ERROR


def leave(code: int) -> NoReturn:
    """End the process immediately, without destructors.

    After a failure, destructors would wait for peers that are gone, and threads of communication
    libraries do not survive the shutdown of the interpreter.
    """
    flush_output()
    os._exit(code)
