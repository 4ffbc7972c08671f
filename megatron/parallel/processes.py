"""This process, other processes of this host, and pools of them. Torch is imported only where it is
used.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from megatron.errors import LaunchError, MegatronError

if TYPE_CHECKING:
    pass

_LAUNCHERS = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "MPI_", "PALS_", "MV2_", "TORCHELASTIC_")
_LAUNCHED = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
)
_ROOT = Path(__file__).resolve().parents[2]
GONE, DEAD, STOPPED = "gone", "dead", "stopped"
_STATES = {
    "R": "running",
    "S": "sleeping",
    "D": "waiting in the kernel (D), for a disk, a network or a driver",
    "T": STOPPED,
    "t": "stopped by a debugger",
    "Z": DEAD,
    "X": DEAD,
    "I": "idle",
}
_OWN_THREADS = ("bounded", "rendezvous", "watchdog")  # left out of stacks


# -- time limits and stacks of this process ------------------------------------------------------


def bounded(
    function: Callable[[], Any],
    seconds: float,
    failure: str = "the store gave no answer",
    wake: threading.Event | None = None,
) -> Any:
    """Return the function's result; raise LaunchError when it takes longer, or when `wake` is set
    before it ends.

    For calls into torch that cannot be interrupted: a store whose host lost power never answers,
    and gloo waits five times its time limit for a peer that died before it connected. After an
    error the call continues in its own thread. `wake` is also set when the function ends.
    """
    outcome: Future[Any] = Future()
    ended = wake or threading.Event()

    def body() -> None:
        try:
            outcome.set_result(function())
        except Exception as error:
            outcome.set_exception(error)
        ended.set()

    threading.Thread(target=body, name="bounded", daemon=True).start()
    woken = ended.wait(seconds)
    if not outcome.done():
        raise LaunchError(
            f"{failure}: another rank failed" if woken else f"{failure} within {seconds:g} s"
        )
    return outcome.result()


def python_stacks(limit: int) -> str:
    """Return the Python stacks of this process in at most about `limit` characters.

    The main thread comes first, one frame a line, innermost last; then, after an empty line, one
    line for each other thread. Other threads and then outer frames are left out where the text is
    too long.
    """

    def shown(frame: Any, line: int) -> str:
        path = os.sep.join(frame.f_code.co_filename.split(os.sep)[-3:])
        return f"{path}:{line} {frame.f_code.co_name}"

    main, frames = threading.main_thread(), sys._current_frames()
    text = "\n".join([shown(*at) for at in traceback.walk_stack(frames[main.ident or 0])][::-1])
    if len(text) > limit:
        return f"(outer frames)...{text[-limit:]}"
    others = [
        f"thread {thread.name}: {shown(frame, frame.f_lineno)}"
        for thread in threading.enumerate()
        if thread is not main and thread.name not in _OWN_THREADS
        if (frame := frames.get(thread.ident or 0)) is not None
    ]
    complete = "\n".join([text, "", *others])
    return complete if others and len(complete) <= limit else text


def seconds_waited(path: str = "/proc/thread-self/schedstat") -> float | None:
    """Return the seconds that this thread waited for a core in use by others; None where Linux does
    not report it.

    Source: sched-stats.rst in the kernel's documentation.
    """
    try:
        return int(Path(path).read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


# -- memory of this process ----------------------------------------------------------------------


def release_free_memory() -> None:
    """Return the free pages of glibc's heap to the system; do nothing with another C library.

    Phases with tensors of other sizes leave holes that the next phase cannot use. Call it between
    phases: pages that are used again afterwards cost a fault each.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


# -- other processes -----------------------------------------------------------------------------


def _stat(pid: int) -> tuple[str, int]:
    """Return the state letter and start time (clock ticks since boot) of a process; ("", 0) without
    such a process.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0
    fields = text.rpartition(")")[2].split()  # the name before may hold blanks
    return fields[0], int(fields[19])


def process_start(pid: int) -> int:
    """Return a process's start time, which tells it from a later one with the same number; 0 where
    unknown.
    """
    return _stat(pid)[1]


def process_state(pid: int, start: int = 0) -> str:
    """Return "running", "sleeping", "stopped", ...; "gone" when the process has ended, even if its
    number is reused.
    """
    state, started = _stat(pid)
    if not state or (start and started != start):
        return GONE
    return _STATES.get(state, f"in state {state}")


def kill_process(pid: int, start: int, number: int = signal.SIGKILL) -> bool:
    """Send a signal to the process that started at `start`; return whether it was sent."""
    if not start or process_start(pid) != start:
        return False
    with contextlib.suppress(OSError):
        os.kill(pid, number)
        return True
    return False


def reserve_port() -> socket.socket:
    """Return a socket that holds a free port (getsockname()[1]) until it is closed.

    Bound with SO_REUSEADDR and not listening, it keeps the port from other processes that ask for
    any port and from outgoing connections; a server that sets SO_REUSEADDR too, as torch's store
    does, can still listen there.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    return held


def environment(
    environ: Mapping[str, str], rank: int, count: int, port: str, threads: int | None = None
) -> dict[str, str]:
    """Return the variables for one of `count` processes on this host, without those of any launcher
    in `environ`.
    """
    env = {k: v for k, v in environ.items() if k not in _LAUNCHED and not k.startswith(_LAUNCHERS)}
    env |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    env |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count))
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    path = env.get("PYTHONPATH", "")
    env["PYTHONPATH"] = f"{_ROOT}{os.pathsep}{path}" if path else str(_ROOT)
    if threads is not None:
        env["OMP_NUM_THREADS"] = str(threads)
    return env


def gpus_here() -> int:
    """Return the number of this node's GPUs, found by another process: the parent of workers must
    not hold a GPU.
    """
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    gpus = done.stdout.strip()
    return int(gpus) if gpus.isdigit() else 0


# -- pools of processes --------------------------------------------------------------------------


@contextlib.contextmanager
def process_pool(
    processes: int,
    method: Literal["fork", "spawn"],
    killed: str,
    start: Callable[..., object] | None = None,
    *arguments: Any,
) -> Iterator[Callable[..., Iterator[Any]]]:
    """Yield map(function, items, chunksize=1), computed in order by processes that have called
    start(*arguments).

    method  "fork": loaded data need not be sent, but no thread that matters there may be running;
            or "spawn"

    Ctrl-C reaches all processes of a terminal: only this one handles it, and ends the others. They
    also end when this process is killed. Raises MegatronError with the text `killed` when one of
    them is killed.
    """
    context = multiprocessing.get_context(method)
    pool = ProcessPoolExecutor(processes, context, _begin, (os.getpid(), start, arguments))

    def run(function: Callable[..., Any], items: Any, chunksize: int = 1) -> Iterator[Any]:
        # A process that starts here gets no Ctrl-C before _begin: it would end with a traceback.
        # This process gets one a moment later.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return pool.map(function, items, chunksize=chunksize)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        yield run
    except BrokenProcessPool:
        raise MegatronError(killed) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(parent: int, start: Callable[..., object] | None, arguments: tuple[Any, ...]) -> None:
    def end_with_parent() -> None:
        # a process that waits for tasks does not notice that their source was killed
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=end_with_parent, daemon=True).start()
    if start is not None:
        start(*arguments)
