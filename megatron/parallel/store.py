"""A process's connection to the store that all ranks of a job share, and setup of its host."""

from __future__ import annotations

import contextlib
import ctypes
import re
import resource
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from megatron.config.duration import show_duration
from megatron.errors import LaunchError
from megatron.parallel.host_processes import bounded
from megatron.parallel.launch import Launch

T = TypeVar("T")

ANSWER_S = 5.0  # how long the store, or a rank, may take to answer
_BATCH = 1024  # keys in one request: a request's time grows faster than the number of keys
_PATIENCE_S = 3.0  # how long torch may look for a store that has not started yet
_FOREVER = timedelta(days=20)  # longer times do not fit into torch's 31 bits of milliseconds
# requests per second, from all ranks together, for a key that they wait for; serving them takes
# rank 0 about 0.2 cores
_ASKED = 10_000


@dataclass(eq=False)
class StoreConnection:
    """A connection to this job's part of the store, which the first process or the launcher serves.

    launch        this process
    timeout       time limit for the store to start, and for torch's requests
    clock, sleep  functions that measure, and spend, the time between requests for an awaited key
    server        the rank that serves the store
    """

    launch: Launch
    timeout: timedelta
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], object] = time.sleep
    server: int = field(default=0, init=False)
    store: dist.Store = field(init=False)
    """A host that has lost power never answers: call the store's methods through `bounded`."""

    @property
    def serves_store(self) -> bool:
        """True when the store ends with this process."""
        return self.launch.task == 0 and not self.launch.store_served

    @property
    def pause_s(self) -> float:
        """Longest time in seconds between a rank's requests for an awaited key.

        From 2,000 ranks on it grows with their number.
        """
        return max(0.2, self.share_s)

    @property
    def share_s(self) -> float:
        """Time in seconds between a rank's requests with which all ranks together make _ASKED."""
        return self.launch.world_size / _ASKED

    @property
    def store_name(self) -> str:
        """The server and address of the store, for messages."""
        served_by = "the launcher's store" if self.launch.store_served else f"rank {self.server}"
        return f"{served_by} at {self.launch.store_host}:{self.launch.master_port}"

    def open(self) -> None:
        """Connect to the store, which may take `timeout` to start, or serve it.

        A single process, unless its launcher serves a store, has one in its own memory. Raises
        LaunchError if the store cannot be served or reached.
        """
        if self.launch.world_size == 1 and not self.launch.store_served:
            self.store = dist.HashStore()
        else:
            self.store = self._of_job(self._serve() if self.serves_store else self._client())

    def another(self) -> dist.Store:
        """Return another connection to the store.

        While a thread waits for a key on a connection, other threads get no answer on it.
        """
        if isinstance(self.store, dist.HashStore):
            return self.store
        return self._of_job(self._client())

    def answers(self) -> bool:
        """Return whether the server of the store answers another connection."""
        address = self.launch.store_host, self.launch.master_port
        try:
            socket.create_connection(address, timeout=ANSWER_S).close()
            bounded(partial(self._connect, address), ANSWER_S)
        except (RuntimeError, OSError, LaunchError):
            return False
        return True

    @staticmethod
    def _connect(address: tuple[str, int]) -> dist.Store:
        # torch retries after ever longer pauses, and when its own timeout expires it prints stack
        # traces.
        return dist.TCPStore(
            *address, None, is_master=False, timeout=_FOREVER, wait_for_workers=False
        )

    def _of_job(self, store: dist.Store) -> dist.Store:
        return dist.PrefixStore(self.launch.store_prefix(), store)

    def _serve(self) -> dist.Store:
        """Serve the store for all ranks; only to this host if all of them are on it."""
        raise_file_limit()
        port = self.launch.master_port
        inside = None
        try:
            if self.launch.on_one_node:
                inside = socket.create_server(("127.0.0.1", port))
                port = inside.getsockname()[1]
            return dist.TCPStore(
                "127.0.0.1",
                port,
                None,
                is_master=True,
                timeout=self.timeout,
                wait_for_workers=False,
                master_listen_fd=None if inside is None else inside.detach(),
                # before torch 2.8 the libuv server does not accept a socket
                use_libuv=inside is None or TorchVersion(torch.__version__) >= "2.8",
            )
        except (RuntimeError, OSError) as error:
            raise LaunchError(
                f"rank 0 on node {self.launch.node} cannot listen on port {port}, perhaps because "
                "another run or another process with rank 0 uses it: set MASTER_PORT to a free "
                f"port, and give every process its own rank ({str(error).splitlines()[0]})"
            ) from error

    def _client(self) -> dist.Store:
        """Connect to the store's server, which may take `timeout` to start."""
        # Rank 0 reaches its own store via the loopback address, whatever its host name resolves to.
        address = (
            "127.0.0.1" if self.serves_store else self.launch.store_host,
            self.launch.master_port,
        )
        seconds = self.timeout.total_seconds()
        deadline = self.clock() + seconds
        connect = partial(self._connect, address)

        try:
            try:
                client = bounded(connect, min(seconds, _PATIENCE_S))
            except LaunchError:
                self._await_listener(address, deadline)
                left = max(ANSWER_S, deadline - self.clock())
                client = bounded(connect, left, "a process listens there, but does not answer")
        except (RuntimeError, OSError, LaunchError) as error:
            raise LaunchError(
                f"rank {self.launch.rank} on node {self.launch.node} could not reach "
                f"{self.store_name} within {show_duration(seconds)}: {error}. Either the "
                "process that serves it did not start (look at the output of rank 0 or of the "
                "launcher), or MASTER_ADDR or MASTER_PORT is not its host or port"
            ) from error
        client.set_timeout(self.timeout)
        return client

    def _await_listener(self, address: tuple[str, int], deadline: float) -> None:
        """Wait until a process listens at the address; raise OSError after the deadline.

        If rank 0 started late, torch would retry less and less often, and might connect only
        minutes after the start.
        """
        while True:
            try:
                socket.create_connection(address, timeout=ANSWER_S).close()
                return
            except OSError:
                if self.clock() >= deadline:
                    raise
                self.sleep(0.1)

    def poll(self, keys: Sequence[str], deadline: float, unless: str = "") -> bool:
        """Return whether all keys appear before the deadline, and before the key `unless` does."""
        pause = 0.005
        longest = 0.2 if self.launch.task == 0 else self.pause_s
        for batch in batches(keys):
            while not self.store.check(batch):
                left = deadline - self.clock()
                if left <= 0 or (unless and self.store.check([unless])):
                    return False
                self.sleep(min(pause, left))
                pause = min(pause * 1.5, longest)
        return True

    def comes(self, key: str, seconds: float) -> bool:
        """Return whether the key appears within `seconds`."""
        return self.poll([key], self.clock() + seconds)

    def values(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that exist."""
        return [value for batch in batches(keys) for value in self.store.multi_get(batch)]

    def ranks_without(self, kind: str, most: int, among: Sequence[int] = ()) -> list[int]:
        """Return the first ranks, of those of `among` or all, without a key `kind/rank`.

        Returns at most `most`. Ranges are bisected, so that a few missing keys take only a few
        requests.
        """
        missing: list[int] = []
        ranges = list(batches(among or range(self.launch.world_size)))[::-1]
        while ranges and len(missing) < most:
            ranks = ranges.pop()
            if self.store.check([f"{kind}/{rank}" for rank in ranks]):
                continue
            if len(ranks) == 1:
                missing += ranks
            else:
                middle = len(ranks) // 2
                ranges += [ranks[middle:], ranks[:middle]]
        return missing


def batches(keys: Sequence[T]) -> Iterator[list[T]]:
    """Yield batches of the keys, each for one request to the store."""
    for start in range(0, len(keys), _BATCH):
        yield list(keys[start : start + _BATCH])


# -- this host -----------------------------------------------------------------------------------


def raise_file_limit() -> None:
    """Raise the open-file limit to the hard limit: the store and gloo need sockets per rank."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def host_name_is_local() -> bool:
    """Return whether this host's name resolves to an address that it can bind.

    gloo needs this if no interface is given.
    """
    try:
        with socket.socket() as probe:
            probe.bind((socket.gethostbyname(socket.gethostname()), 0))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def without_dns() -> Iterator[None]:
    """Let this process look up host names in /etc/hosts only (with glibc; otherwise no effect).

    This is for the process that serves the store: torch looks up the name of every address that
    connects, in the store's only thread and only for its log. If each lookup takes 50 ms, the
    lookups for 75,264 ranks take an hour.
    """
    configure = getattr(
        ctypes.CDLL(None), "__nss_configure_lookup", lambda database, services: None
    )
    try:
        text = Path("/etc/nsswitch.conf").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    usual = re.search(r"^\s*hosts:([^#\n]*)", text, re.MULTILINE)
    configure(b"hosts", b"files")
    try:
        yield
    finally:
        configure(b"hosts", (usual[1].strip() if usual else "files dns").encode())
