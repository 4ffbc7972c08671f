"""How a process ends when something goes wrong: one clear message, the right exit code, no hanging.

Imports no torch, so that a mistake on the command line is reported at once.
"""
from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import traceback
from collections.abc import Callable

from megatron.errors import LostRankError, MegatronError

EXIT_ERROR = 1  # an error of the program, or a peer's
EXIT_USER_ERROR = 2  # something the user can mend
EXIT_LOST_RANK = 75  # a rank died or hung: nothing to mend, start it again (EX_TEMPFAIL of sysexits.h)
EXIT_INTERRUPTED = 130


def run_guarded(body: Callable[[], object], rank: int | Callable[[], int]) -> int:
    """Call `body` and return the exit code; messages of errors go to standard error.

    `rank` is this process's, or a function that gives it, for a process that gets another one in `body`.
    A MegatronError is shown without traceback, in full by rank 0 and in one line by the others. Any other exception
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
        text = f"{type(error).__name__}: {error}"
        _print_error(text if who() == 0 else f"rank {who()}: {' '.join(text.split())}")
        return EXIT_LOST_RANK if isinstance(error, LostRankError) else EXIT_USER_ERROR
    except KeyboardInterrupt:
        _print_error(f"rank {who()}: interrupted")
        return EXIT_INTERRUPTED
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except BrokenPipeError:  # the reader of our output left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except BaseException:
        # One write, so that the tracebacks of several ranks do not interleave.
        _print_error(f"rank {who()} failed:\n{traceback.format_exc()}".rstrip())
        return EXIT_ERROR
    return 0


def leave(code: int) -> None:
    """End the process at once. No destructor runs: after a failure they would wait for peers that are gone, and
    threads inside of communication libraries do not survive the end of the interpreter."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _print_error(text: str) -> None:
    sys.stdout.flush()
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
