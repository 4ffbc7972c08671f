"""Functions run in N processes on this machine, with a launcher's environment.

Processes are forked from a server that has imported torch and DeepSpeed once, so that a case of
eight processes starts in a fraction of a second.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

from megatron.planner.subprocesses import reserve_port

fork_context = multiprocessing.get_context("forkserver")
fork_context.set_forkserver_preload(["tests.helpers.preload"])

LIMIT_S = 50.0  # below the test's time limit, which would not name the process that hung
SETUP_LIMIT_S = 600.0  # for a fixture's run shared by many tests


def limit_s() -> float:
    """Return the time limit of processes in this phase of a test; a guard against hangs."""
    return (
        SETUP_LIMIT_S if os.environ.get("PYTEST_CURRENT_TEST", "").endswith("(setup)") else LIMIT_S
    )


class ProcessFailed(AssertionError):
    """Error of a process that raised, died or timed out; the message holds all tracebacks."""


_reserved: list[socket.socket] = []


def free_port() -> int:
    """Return a port that no other process gets as long as this one lives."""
    _reserved.append(reserve_port())
    port: int = _reserved[-1].getsockname()[1]
    return port


def rank_environment(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a process of one node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _body(
    results: Connection,
    rank: int,
    env: dict[str, str],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(env)
    results.send(None)  # fn and its module are loaded
    with contextlib.suppress(EOFError):
        # All others are loaded too: time limits of the test do not include imports.
        results.recv()
    try:
        outcome = (True, fn(rank, *args))
    except BaseException as error:
        outcome = (False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    results.send(outcome)
    if rank == 0 and outcome[0]:  # it serves the store, to which others may still connect
        with contextlib.suppress(EOFError):
            results.recv()
    os._exit(0)  # a process whose peers died must not wait for them in a destructor


def _outcome(process: Any, pipe: Connection) -> tuple[bool, Any] | None:
    """Return (succeeded, result or error text) of a process that has reported or ended; or None."""
    # Read before the pipe: if the process has ended, its last message is in the pipe by then.
    ended = process.exitcode is not None
    try:
        if pipe.poll():
            outcome: tuple[bool, Any] = pipe.recv()
            return outcome
        if not ended:
            return None
    except (EOFError, ConnectionError):
        process.join(timeout=60)  # it has closed its end of the pipe, and is about to exit
    return False, f"ended with exit code {process.exitcode} and no result"


def _begin_together(pipes: list[Connection], deadline: float) -> None:
    for pipe in pipes:
        with contextlib.suppress(EOFError, ConnectionError):  # its end is noticed later
            if pipe.poll(max(deadline - time.monotonic(), 0.0)):
                pipe.recv()
    for pipe in pipes:
        with contextlib.suppress(ConnectionError):
            pipe.send(None)


def run_processes(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float | None = None,
    env: dict[str, str] | None = None,
) -> list[Any]:
    """Call `fn(rank, *args)` in n processes; return the results in rank order.

    `fn` is a function at the top of a module; arguments and results are pickled (return numbers and
    numpy arrays, not tensors). Raises ProcessFailed with every failed rank's traceback.
    """
    outcomes = run_processes_raw(n, fn, *args, timeout_s=timeout_s, env=env)
    bad = [f"--- rank {r}\n{value}" for r, (ok, value) in enumerate(outcomes) if not ok]
    if bad:
        raise ProcessFailed("\n".join(bad))
    return [value for _, value in outcomes]


def run_processes_raw(
    n: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float | None = None,
    env: dict[str, str] | None = None,
) -> list[tuple[bool, Any]]:
    """Call like run_processes, but do not raise.

    Return (succeeded, result or error text) for each rank.
    """
    timeout_s = timeout_s or limit_s()
    port = free_port()
    processes = []
    pipes = []
    for rank in range(n):
        variables = {
            **rank_environment(rank, n, port),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
            # torch's store asks DNS for the name of ::ffff:127.0.0.1. A lost query on a busy
            # machine would take five seconds, longer than the time limits of some tests.
            "RES_OPTIONS": "timeout:1",
            # The server has the environment of its own start, perhaps from a test that names
            # another library.
            "MEGATRON_KERNELS_LIBRARY": os.environ.get("MEGATRON_KERNELS_LIBRARY", ""),
            **(env or {}),
        }
        # Each process has a separate pipe: one that is killed while writing to a shared pipe would
        # block the others.
        parent_end, child_end = fork_context.Pipe()
        process = fork_context.Process(
            target=_body, args=(child_end, rank, variables, fn, args), daemon=True
        )
        process.start()
        child_end.close()
        processes.append(process)
        pipes.append(parent_end)
    outcomes: list[tuple[bool, Any]] = [(False, f"no result within {timeout_s} s")] * n
    missing = set(range(n))
    deadline = time.monotonic() + timeout_s
    _begin_together(pipes, deadline)
    while missing and (left := deadline - time.monotonic()) > 0:
        wait(
            [waited for rank in missing for waited in (pipes[rank], processes[rank].sentinel)],
            timeout=left,
        )
        for rank in sorted(missing):
            if outcome := _outcome(processes[rank], pipes[rank]):
                outcomes[rank] = outcome
                missing.discard(rank)
    for pipe in pipes:
        pipe.close()
    for process in processes:
        process.join(timeout=1)
        if process.is_alive():
            process.kill()
            process.join()
    return outcomes
