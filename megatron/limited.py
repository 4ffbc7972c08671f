"""Child process for untrusted chat templates and tokenizers, with limits on time and memory.

Both are programs in all but name: a few lines of either can run for years or fill the memory, in
code that no signal handler interrupts. They therefore run in a child, whose limits on CPU time and
address space grow with the size of a request. Replies are JSON and bytes, never pickles, because a
template that breaks out of its sandbox could send anything.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import Any

from megatron.errors import ConfigError, DataError

Handler = Callable[[Any], Any]
_TIME_S = 10.0  # of CPU time; an ordinary tokenizer takes a tenth of this
_BYTES_PER_S = 1e5
_MEMORY_BYTES = 1 << 30  # an ordinary tokenizer takes half of this
_BYTES_PER_BYTE = 256
_WAITING = 10  # seconds to wait for each second of CPU time, since the machine may be busy
_START = (
    "import sys; sys.path[:] = {path!r}; from megatron.limited import serve; "
    "serve({target!r}, {number})"
)


class LimitError(DataError):
    """A template or tokenizer that exceeds its time or memory limit, or crashes its process."""


@dataclass(eq=False)
class LimitedProcess:
    """A child that calls `target`, "module:function", with `argument` to get a handler.

    The handler is called with each request, and returns bytes or a JSON value. Error messages call
    the template or tokenizer `what`. The child starts when first needed, and ends with this object
    or this process.
    """

    target: str
    argument: Any
    what: str
    size_bytes: int = 0  # of the files that it reads when it starts

    def __post_init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._connection: Connection
        self._parent = os.getpid()
        self._lock = threading.Lock()

    def ask(self, request: Any, size_bytes: int) -> Any:
        """Return the reply to a request about `size_bytes` of text.

        Raises the child's ConfigError or DataError, DataError for any other error in the child, and
        LimitError if the child exceeds a limit or crashes.
        """
        with self._lock:
            if self._child is None or self._parent != os.getpid():  # a forked process needs its own
                self._parent = os.getpid()
                self._connection, child_end = Pipe()
                number = child_end.fileno()
                start = _START.format(path=sys.path, target=self.target, number=number)
                with child_end:
                    self._child = subprocess.Popen(
                        [sys.executable, "-c", start],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        env={**os.environ, "MALLOC_ARENA_MAX": "2"},
                        pass_fds=[number],
                    )
                weakref.finalize(self, _end, self._child, self._connection)
                try:
                    self._exchange(self.argument, self.size_bytes)
                except (ConfigError, DataError):
                    self.close()
                    raise
            return self._exchange(request, size_bytes)

    def close(self) -> None:
        """End the child; another one starts when needed."""
        if self._child is not None and self._parent == os.getpid():
            _end(self._child, self._connection)
        self._child = None

    def _exchange(self, request: Any, size_bytes: int) -> Any:
        child = self._child
        connection = self._connection
        assert child is not None, "it was started"
        seconds = _TIME_S + size_bytes / _BYTES_PER_S
        memory = _MEMORY_BYTES + _BYTES_PER_BYTE * size_bytes
        timer = threading.Timer(_WAITING * seconds, child.kill)
        timer.start()
        try:
            connection.send((seconds, memory, request))
            reply = connection.recv_bytes(memory)
            content = connection.recv_bytes(memory)
        except (OSError, EOFError):
            self.close()
            code = child.wait()
            name = signal.Signals(-code).name if code < 0 else f"code {code}"
            raise LimitError(
                f"{self.what}: its process ended with {name}, perhaps because it took more than "
                f"{seconds:.0f} s of CPU time or {memory / 2**30:.1f} GiB of memory: use one from "
                "a source that you trust, or shorter texts"
            ) from None
        finally:
            timer.cancel()
        try:
            kind, value = json.loads(reply)
        except (ValueError, TypeError, RecursionError):
            self.close()
            raise DataError(
                f"{self.what}: its process sends {reply[:100]!r}, which is not a reply: use one "
                "from a source that you trust"
            ) from None
        if kind == "bytes":
            return content
        if kind == "value":
            return value
        if kind == "ConfigError":
            raise ConfigError(value)
        if kind == "DataError":
            raise DataError(value)
        if kind == "MemoryError":
            raise LimitError(
                f"{self.what}: takes more than {memory / 2**30:.1f} GiB of memory: use one from a "
                "source that you trust, or shorter texts"
            )
        raise DataError(f"{self.what} fails: {kind}: {value}")


def _end(child: subprocess.Popen[bytes], connection: Connection) -> None:
    child.kill()
    child.wait()
    connection.close()


def serve(target: str, number: int) -> None:
    """Answer requests over a connection until it is closed; this is the child's program.

    target  see LimitedProcess
    number  file descriptor of the connection
    """
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # the parent decides
    connection = Connection(number)
    module, _, name = target.partition(":")
    handler: Handler = getattr(importlib.import_module(module), name)
    built = False
    while True:
        try:
            seconds, memory, request = connection.recv()
        except EOFError:
            os._exit(0)
        content = b""
        try:
            used = resource.getrusage(resource.RUSAGE_SELF)
            with open("/proc/self/statm") as file:
                pages = int(file.read().split()[0])
            for kind, limit in (
                (resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + seconds)),
                (resource.RLIMIT_AS, pages * resource.getpagesize() + memory),
                (resource.RLIMIT_CORE, 0),
            ):
                hard = resource.getrlimit(kind)[1]
                resource.setrlimit(kind, (limit if hard < 0 else min(limit, hard), hard))
            value = handler(request)
            if not built:
                handler = value
                value = None
            if isinstance(value, bytes):
                content = value
                reply = json.dumps(["bytes", None])
            else:
                reply = json.dumps(["value", value])
        except BaseException as error:  # a panic in Rust is not an Exception
            reply = json.dumps([type(error).__name__, f"{error!s:.2000}"])
        built = True
        connection.send_bytes(reply.encode())
        connection.send_bytes(content)
