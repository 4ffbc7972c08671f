"""Processes of this machine that share a piece of work: Ctrl-C, and the death of any of them, end all in order."""
from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeVar

from megatron.errors import MegatronError

T = TypeVar("T")
R = TypeVar("R")


class Map(Protocol):
    """function(item) for each of the items, in their order, computed by several processes."""

    def __call__(self, function: Callable[[T], R], items: Sequence[T], chunksize: int = 1) -> Iterator[R]: ...


@contextmanager
def process_pool(
    processes: int, method: Literal["fork", "spawn"], killed: str, start: Callable[..., object] | None = None,
    *arguments: Any,
) -> Iterator[Map]:  # fmt: skip
    """A map over so many processes, in each of which `start` was called with the arguments.

    method  "fork": what is loaded need not be sent, but nothing may have started threads that matter there; "spawn"

    Ctrl-C reaches all processes of a terminal: only this one takes notice, and it ends the others. They end, too, where
    this one is killed. Raises MegatronError with the text `killed` where one of them is.
    """
    context = multiprocessing.get_context(method)
    pool = ProcessPoolExecutor(processes, context, _begin, (os.getpid(), start, arguments))

    def run(function: Callable[[T], R], items: Sequence[T], chunksize: int = 1) -> Iterator[R]:
        with _interrupts_held():
            return pool.map(function, items, chunksize=chunksize)

    try:
        yield run
    except BrokenProcessPool:
        raise MegatronError(killed) from None
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """A process that starts in here gets no Ctrl-C before _begin: it would end as if it had failed, with a traceback.
    For this process one comes a moment later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(parent: int, start: Callable[..., object] | None, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if start is not None:
        start(*arguments)


def _end_with(parent: int) -> None:
    """Who waits for tasks does not notice that the one who gives them was killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
