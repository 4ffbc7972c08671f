"""Run a function in N processes on this machine, with the environment that a launcher would set.

Processes are forked from a server that has imported torch and DeepSpeed once, so that a case of eight processes
starts in a fraction of a second.
"""
from __future__ import annotations

import multiprocessing
import os
import queue
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.helpers.preload"])


class ProcessFailed(AssertionError):
    """A process raised, died or did not end in time; the message holds the tracebacks of all that failed."""


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _body(results: Any, rank: int, env: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(env)
    try:
        results.put((rank, True, fn(rank, *args)))
    except BaseException as error:
        results.put((rank, False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    results.close()
    results.join_thread()
    os._exit(0)  # a process whose peers died must not wait for them in a destructor


def run_processes(
    n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120, env: dict[str, str] | None = None
) -> list[Any]:
    """Call `fn(rank, *args)` in n processes; the results in rank order.

    `fn` is a function at the top of a module; arguments and results are pickled (return numbers and numpy arrays,
    not tensors). Raises ProcessFailed with every failed rank's traceback.
    """
    outcomes = run_processes_raw(n, fn, *args, timeout_s=timeout_s, env=env)
    bad = [f"--- rank {r}\n{value}" for r, (ok, value) in enumerate(outcomes) if not ok]
    if bad:
        raise ProcessFailed("\n".join(bad))
    return [value for _, value in outcomes]


def run_processes_raw(
    n: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120, env: dict[str, str] | None = None
) -> list[tuple[bool, Any]]:
    """Like run_processes, but returns (succeeded, result or error text) for each rank instead of raising."""
    results = _context.Queue()
    port = str(free_port())
    processes = []
    for rank in range(n):
        variables = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
            # torch's store asks DNS for the name of ::ffff:127.0.0.1. A query lost on a busy machine would take five
            # seconds, longer than the time limits of some tests.
            "RES_OPTIONS": "timeout:1",
            # The server has the environment of its own start, perhaps within a test that names another library.
            "MEGATRON_KERNELS_LIBRARY": os.environ.get("MEGATRON_KERNELS_LIBRARY", ""),
            **(env or {}),
        }
        process = _context.Process(target=_body, args=(results, rank, variables, fn, args), daemon=True)
        process.start()
        processes.append(process)
    outcomes: list[tuple[bool, Any]] = [(False, f"no result within {timeout_s} s")] * n
    missing, deadline = set(range(n)), time.monotonic() + timeout_s
    while missing and time.monotonic() < deadline:
        try:
            rank, ok, value = results.get(timeout=0.2)
        except queue.Empty:
            for rank in sorted(missing):
                if processes[rank].exitcode is not None and results.empty():
                    outcomes[rank] = (False, f"ended with exit code {processes[rank].exitcode} and no result")
                    missing.discard(rank)
            continue
        outcomes[rank] = (ok, value)
        missing.discard(rank)
    for process in processes:
        process.join(timeout=1)
        if process.is_alive():
            process.kill()
            process.join()
    return outcomes
