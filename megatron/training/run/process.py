"""What a process does when something goes wrong: one clear message, the right exit code, no hanging. Where only its
output cannot be written, it goes on.

Imports no torch, so that a mistake on the command line is reported at once.
"""
from __future__ import annotations

import contextlib
import errno
import faulthandler
import functools
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from megatron.errors import LostRankError, MegatronError, flush_output, print_error

EXIT_ERROR = 1  # an error of the program, or a peer's
EXIT_USER_ERROR = 2  # something the user can mend
EXIT_LOST_RANK = 75  # a rank died or hung: nothing to mend, start it again (EX_TEMPFAIL of sysexits.h)
EXIT_INTERRUPTED = 130


class _Output(io.FileIO):
    """Standard output or standard error whose writes never fail: what cannot be written is lost, which is said once on
    the other of the two."""

    lost = False

    def write(self, data: Any, /) -> int:
        """Write what can be written; the number of bytes is always that of `data`, so that no buffer keeps the rest."""
        reason = "it would have to wait"
        try:
            if (written := super().write(data)) is not None:
                return written
        except OSError as error:
            reason = error.strerror or str(error)
        if not self.lost:
            self.lost = True
            text = f"note: {self.name} cannot be written ({reason}): what is printed there is lost, the run goes on\n"
            with contextlib.suppress(OSError):
                os.write(3 - self.fileno(), text.encode())
        return len(data)


def guard_output() -> None:
    """Replace standard output and standard error by streams whose writes never fail. Call it before any file is opened:
    one that is closed gets its number back, so that no file of the run receives what is printed."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # opened such that a write fails, as it did
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)
    for number, name in ((1, "stdout"), (2, "stderr")):
        output = _Output(number, "w", closefd=False)
        output.name = f"standard {'output' if number == 1 else 'error'}"
        buffer, old = io.BufferedWriter(output), getattr(sys, name)
        stream = io.TextIOWrapper(buffer, old and old.encoding, "backslashreplace", line_buffering=True)
        setattr(sys, name, stream)


def _output_lost() -> bool:
    flush_output()
    return bool(getattr(getattr(getattr(sys.stdout, "buffer", None), "raw", None), "lost", False))


def run_guarded(body: Callable[[], object], rank: int | Callable[[], int], prefix: str = "") -> int:
    """Call `body` and return the exit code; messages of errors go to standard error.

    `rank` is this process's, or a function that gives it, for a process that gets another one in `body`.
    A MegatronError is shown without traceback, in full by rank 0 behind `prefix`, by default the error's type, by which
    a log tells a run's endings apart, and in one line by the others. Any other exception
    is shown with its traceback and the rank. Of a fatal signal, such as the bus error of a mapped file that was cut
    short, Python shows where it struck.
    """
    if not faulthandler.is_enabled():
        with contextlib.suppress(OSError, AttributeError, RuntimeError):  # standard error is no file
            faulthandler.enable(all_threads=False)
    who = rank if callable(rank) else lambda: rank
    try:
        body()
    except MegatronError as error:
        print_error(error, who(), prefix or type(error).__name__)
        return EXIT_LOST_RANK if isinstance(error, LostRankError) else EXIT_USER_ERROR
    except KeyboardInterrupt:
        print_error("interrupted", prefix=f"rank {who()}")
        return EXIT_INTERRUPTED
    except SystemExit as exit_:
        code = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        return code or (EXIT_ERROR if _output_lost() else 0)  # of --help and the like, whose output is the result
    except BrokenPipeError:
        return _reader_left()
    except BaseException as failure:
        if getattr(failure, "errno", None) == errno.ENAMETOOLONG:  # wherever a name is looked up, as in as_tool
            print_error(failure, prefix=f"rank {who()}")
            return EXIT_USER_ERROR
        # One write, so that the tracebacks of several ranks do not interleave.
        print_error(traceback.format_exc().rstrip(), prefix=f"rank {who()} failed")
        return EXIT_ERROR
    return 0


def as_tool(main: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """Make the `main` of a tool, which takes its words, one that by default takes the words of this process. Errors of
    the user and what the system refuses end in a message and exit code 2.

    What is no character of the output's encoding, such as a part of a file's name, is shown as an escape.
    """

    @functools.wraps(main)
    def guarded(argv: Sequence[str] | None = None) -> int:
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
    """The reader of our output left, as `| head` does: the rest goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_ERROR


def leave(code: int) -> NoReturn:
    """End the process at once. No destructor runs: after a failure they would wait for peers that are gone, and
    threads inside of communication libraries do not survive the end of the interpreter."""
    flush_output()
    os._exit(code)
