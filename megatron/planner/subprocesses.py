"""Processes that the planner, the tuner and the benchmarks start on this host. Needs no torch."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TypeVar

from megatron.errors import MegatronError
from megatron.parallel.launch import Launch

T = TypeVar("T")

_LAUNCHERS = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "MPI_", "PALS_", "MV2_", "TORCHELASTIC_")
LAUNCHED = (*Launch().environment(), "GROUP_RANK")
_ROOT = Path(__file__).resolve().parents[2]


def seconds_waited() -> float:
    """Return the seconds for which this thread has waited for a core that others used.

    Return 0 if Linux does not report them.

    Source: sched-stats.rst in the kernel's documentation.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def reserve_port() -> socket.socket:
    """Return a socket that holds a free port (getsockname()[1]) until it is closed.

    It is bound with SO_REUSEADDR and does not listen: no outgoing connection and no process that
    asks for any free port can get this one. A server that sets SO_REUSEADDR, such as torch's store,
    can still listen on it.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


def environment(environ: Mapping[str, str], rank: int, count: int, port: int) -> dict[str, str]:
    """Return the environment of process `rank` of `count` on this host.

    It is `environ` with torch's variables for this process (RANK, ...), without any other variables
    of launchers, with this repository first in PYTHONPATH, and with the log level ERROR for torch's
    C++ code.
    """
    env = {k: v for k, v in environ.items() if k not in LAUNCHED and not k.startswith(_LAUNCHERS)}
    env |= Launch(rank, rank, count, count, master_port=port).environment()
    env["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    path = env.get("PYTHONPATH", "")
    env["PYTHONPATH"] = f"{_ROOT}{os.pathsep}{path}" if path else str(_ROOT)
    return env


def gpus_here() -> int:
    """Return the number of this node's GPUs; 0 if torch cannot count them.

    Another process counts them, because the parent of workers must not hold a GPU.
    """
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    gpus = done.stdout.strip()
    return int(gpus) if gpus.isdigit() else 0


# -- pools of processes --------------------------------------------------------------------------


@contextlib.contextmanager
def process_pool(processes: int, killed: str) -> Iterator[Callable[..., Iterator[Any]]]:
    """Yield a function like map(function, items) that computes the results in other processes.

    Its first call forks the processes, so that loaded data need not be sent. At that time no thread
    may be running that these processes depend on.

    Ctrl-C reaches every process in a terminal: only this one handles it, and ends the others. They
    also end when this process is killed. Raises MegatronError with the text `killed` if one of them
    is killed.
    """
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(processes, context, _begin, (os.getpid(),))

    def run(function: Callable[[T], object], items: Iterable[T]) -> Iterator[object]:
        # Block Ctrl-C in new processes until _begin: otherwise they would end with a traceback.
        # This process gets it a moment later.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return pool.map(function, items)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    try:
        yield run
    except BrokenProcessPool:
        raise MegatronError(killed) from None
    except BaseException:
        # An error or Ctrl-C does not wait for tasks that run, which may take minutes.
        for process in (pool._processes or {}).values():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(parent: int) -> None:
    def end_with_parent() -> None:
        # a process that waits for tasks does not notice when its parent is killed
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=end_with_parent, daemon=True).start()
