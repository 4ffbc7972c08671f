"""Encodes blocks in worker processes and returns them in their order.

Each worker has one connection. Two blocks at most wait in a worker, so that it never waits for us, and a few blocks per
worker are under way in all, so that memory does not grow when one takes long. A worker that dies ends its connection,
and so do we for the workers when this process is killed: nobody waits for the dead.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from megatron.data.prepare import sources
from megatron.data.prepare.encode import EncodedBlock, PreprocessOptions, encode_block
from megatron.data.prepare.sources import Block
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.errors import DataError, MegatronError

POLL_S = 0.2
_BLOCKS_PER_WORKER = 2
_PENDING_PER_WORKER = 4
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def encode_blocks(
    blocks: Iterator[Block],
    tokenizer: Tokenizer,
    options: PreprocessOptions,
    workers: int,
    poll: Callable[[], None] = lambda: None,
) -> Generator[tuple[Block, EncodedBlock], None, None]:
    """Blocks with their tokens, in order. One worker is this process, with `tokenizer`; several are processes that
    build their own. `poll` is called every POLL_S at least, but not while this process encodes.

    Raises DataError when a worker dies.
    """
    if workers == 1:
        for block in blocks:
            poll()
            yield block, encode_block(block, tokenizer, options)
        return
    team = _Team(workers, options)
    try:
        yield from team.encode(blocks, poll)
    finally:
        team.stop()


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    given: deque[_Task] = field(default_factory=deque)


@dataclass
class _Task:
    block: Block
    result: EncodedBlock | None = None


class _Team:
    """Workers are started as blocks come, so that a small input does not start many."""

    def __init__(self, size: int, options: PreprocessOptions) -> None:
        # Not forked: the tokenizer libraries have threads of their own.
        self._context = multiprocessing.get_context("spawn")
        self._size, self._options = size, options
        self._pending: deque[_Task] = deque()
        self._pending_bytes = 0
        self._workers: list[_Worker] = []

    def encode(self, blocks: Iterator[Block], poll: Callable[[], None]) -> Iterator[tuple[Block, EncodedBlock]]:
        more = True
        while True:
            poll()
            while more and self._has_room():
                block = next(blocks, None)
                more = block is not None
                if block is not None:
                    self._give(block)
            while self._pending and self._pending[0].result is not None:
                task = self._pending.popleft()
                self._pending_bytes -= task.block.text_bytes
                assert task.result is not None
                yield task.block, task.result
                if more and self._has_room():
                    break
            else:
                if self._pending:
                    self._collect()
                elif not more:
                    return

    def _has_room(self) -> bool:
        """Whether another block may be under way. Large documents count by their bytes."""
        return (
            len(self._pending) < _PENDING_PER_WORKER * self._size
            and self._pending_bytes < _PENDING_PER_WORKER * self._size * sources.BLOCK_BYTES
            and (
                len(self._workers) < self._size
                or any(len(worker.given) < _BLOCKS_PER_WORKER for worker in self._workers)
            )
        )

    def _next_worker(self) -> _Worker:
        """The one with the fewest blocks; a new one if all have some."""
        worker = min(self._workers, key=lambda worker: len(worker.given), default=None)
        if worker is not None and (not worker.given or len(self._workers) == self._size):
            return worker
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, self._options), daemon=True)
        # Ctrl-C goes to all processes of a terminal. A blocked signal stays blocked in a new process from its start.
        with _signals_blocked():
            process.start()
        theirs.close()
        self._workers.append(_Worker(process, ours))
        return self._workers[-1]

    def _give(self, block: Block) -> None:
        worker = self._next_worker()
        task = _Task(block)
        try:
            worker.connection.send(block)
        except OSError:
            raise self._death(worker, task) from None
        worker.given.append(task)
        self._pending.append(task)
        self._pending_bytes += block.text_bytes

    def _collect(self) -> None:
        """Wait a moment for results and take those that are there."""
        busy = {worker.connection: worker for worker in self._workers}  # idle ones too: they may die
        for ready in wait(list(busy), POLL_S):
            assert isinstance(ready, Connection)
            worker = busy[ready]
            try:
                result = ready.recv()
            except (OSError, EOFError):
                raise self._death(worker) from None
            if isinstance(result, BaseException):
                raise result
            worker.given.popleft().result = result

    def _death(self, worker: _Worker, task: _Task | None = None) -> DataError:
        worker.process.join(5)
        code = worker.process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"ended with code {code}"
        at = worker.given[0] if worker.given else task
        where = f" at {at.block.where(at.block.first)}" if at else ""
        why = ", perhaps because memory ran out: try fewer --workers" if code == -signal.SIGKILL else ""
        return DataError(f"a worker process {how}{where}{why}")

    def stop(self) -> None:
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()  # it holds nothing that could be lost
        for worker in self._workers:
            worker.process.join()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(connection: Connection, options: PreprocessOptions) -> None:
    """The life of a worker process: blocks in, tokens out, until the connection ends."""
    blocks: queue.SimpleQueue[Block] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, blocks), daemon=True).start()
    try:
        tokenizer = build_tokenizer(**options.tokenizer, num_threads=1)  # one worker, one core
        while True:
            connection.send(encode_block(blocks.get(), tokenizer, options))
    except MegatronError as error:
        with suppress(OSError):
            connection.send(error)
    except MemoryError:
        with suppress(OSError):
            connection.send(DataError("a worker process has not enough memory: try fewer --workers"))
    except OSError:  # nobody listens any more
        return


def _receive(connection: Connection, blocks: queue.SimpleQueue[Block]) -> None:
    """Take blocks while the others are encoded, which needs no lock of Python's, so that the sender never waits."""
    try:
        while True:
            blocks.put(connection.recv())
    except (OSError, EOFError):
        os._exit(0)  # in the middle of a block, too: nobody wants it
