"""Encodes blocks in worker processes and returns them in their order.

A few blocks per worker are under way, so that no worker waits and memory does not grow when one takes long.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.process import BaseProcess

from megatron.data.prepare import sources
from megatron.data.prepare.encode import EncodedBlock, PreprocessOptions, encode_block
from megatron.data.prepare.sources import Block
from megatron.data.tokenizer import Tokenizer, build_tokenizer
from megatron.errors import DataError

POLL_S = 0.2
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
    # Not forked: the tokenizer libraries have threads of their own.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _begin, (options,))
    children: dict[int, BaseProcess] = {}
    try:
        yield from _in_order(pool, children, blocks, workers, poll)
    except BrokenProcessPool:
        raise _death(children.values()) from None
    except MemoryError:
        raise DataError("there is not enough memory: try fewer --workers") from None
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in children.values():
            child.kill()  # it holds nothing that could be lost
        for child in children.values():
            child.join()


def _in_order(
    pool: ProcessPoolExecutor,
    children: dict[int, BaseProcess],
    blocks: Iterator[Block],
    workers: int,
    poll: Callable[[], None],
) -> Iterator[tuple[Block, EncodedBlock]]:
    pending: deque[tuple[Block, Future[EncodedBlock]]] = deque()
    pending_bytes, more = 0, True
    # Ctrl-C goes to all processes of a terminal. A blocked signal stays blocked in a new process from its start.
    while more or pending:
        poll()
        # Large documents count by their bytes.
        while more and len(pending) < _PENDING_PER_WORKER * workers and (
            pending_bytes < _PENDING_PER_WORKER * workers * sources.BLOCK_BYTES
        ):
            block = next(blocks, None)
            more = block is not None
            if block is not None:
                before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
                try:
                    pending.append((block, pool.submit(_encode, block)))
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, before)
                children.update(pool._processes)
                pending_bytes += block.text_bytes
        if pending and wait([pending[0][1]], POLL_S).done:
            block, future = pending.popleft()
            pending_bytes -= block.text_bytes
            yield block, future.result()


def _death(children: Iterable[BaseProcess]) -> DataError:
    """The error for a worker that ended."""
    ended = multiprocessing.connection.wait([child.sentinel for child in children], timeout=5)
    how = "ended"
    for child in children:
        if child.sentinel in ended:
            child.join(5)
            code = child.exitcode or 0
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            break
    return DataError(f"a worker process {how}, perhaps because memory ran out: try fewer --workers")


_here: tuple[Tokenizer, PreprocessOptions] | None = None  # of a worker process


def _begin(options: PreprocessOptions) -> None:
    """Prepare a worker process: one worker, one core, and none that outlives the process it works for."""
    global _here
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker was started by another process"

    def follow() -> None:
        parent.join()
        os._exit(0)

    threading.Thread(target=follow, daemon=True).start()
    _here = build_tokenizer(**options.tokenizer, num_threads=1), options


def _encode(block: Block) -> EncodedBlock:
    assert _here is not None, "the process was prepared"
    return encode_block(block, *_here)
