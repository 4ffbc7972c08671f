"""Slow network in software: gloo messages complete only when a slow link would deliver them.

    import delayed_links
    links = delayed_links.install(latency_s=0.005, gigabytes_per_s=0.5)  # in every process, at the
    same place
    ...                                                                   # torch.distributed,
    DeepSpeed, megatron links.uninstall()

    python benchmarks/delayed_links.py --latency-ms 5 --gigabytes-per-s 0.5 pretrain_gpt.py --train-iters 10 ...

The second form runs a program under the delay (start it once per rank, as the program itself).

What is modelled:

- A message begins when the last of its ranks has posted it. Every rank sends its posting time along
  with the message (a second, tiny exchange). This works only on one machine, where the clocks of
  processes agree.
- The messages of a link are serialized. A process group is one link for its collectives; each
  direction of a pair of ranks in a group is one link for point-to-point. A message arrives at

      max(begun, link free) + latency + bytes / bandwidth,

  and the link is free again after bytes / bandwidth: latency delays each message, but does not
  block the link.
- Bytes are those that a ring of n ranks puts on each rank's wire: 2 (n-1)/n of the tensor for an
  all-reduce, (n-1)/n of the whole for a reduce-scatter or an all-gather, the tensor for a reduce, a
  broadcast and point-to-point. A barrier has none.
- Computation continues in the meantime, without busy-waiting. The delay is in wait(), which sleeps,
  and in is_completed(). The real message is sent as well, and its time counts only if it is longer
  than that of the link.

Not delayed: gather, scatter, all-to-all, coalesced collectives, receives from any source, and what
C++ code sends by itself (DistributedDataParallel). `get_future` of a delayed message is refused.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import runpy
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# Tags of the exchanged posting times, above any tag that a program uses for its own messages.
FROM_SENDER, FROM_RECEIVER = 1 << 28, 1 << 29


def _bytes(tensors: Any) -> int:
    """Bytes of a tensor or of nested sequences of tensors."""
    if isinstance(tensors, torch.Tensor):
        return tensors.numel() * tensors.element_size()
    return sum(_bytes(tensor) for tensor in tensors)


def _ring(n: int) -> float:
    return (n - 1) / n


# Bytes on a rank's wire, from the size of the group and the arguments of the ProcessGroup's method.
COLLECTIVES: dict[str, Callable[..., float]] = {
    "allreduce": lambda n, tensors, *_: 2 * _ring(n) * _bytes(tensors),
    "reduce": lambda n, tensors, *_: _bytes(tensors),
    "broadcast": lambda n, tensors, *_: _bytes(tensors),
    "allgather": lambda n, outputs, *_: _ring(n) * _bytes(outputs),
    "_allgather_base": lambda n, output, *_: _ring(n) * _bytes(output),
    "all_gather_single": lambda n, output, *_: _ring(n) * _bytes(output),
    "reduce_scatter": lambda n, output, inputs, *_: _ring(n) * _bytes(inputs),
    "_reduce_scatter_base": lambda n, output, whole, *_: _ring(n) * _bytes(whole),
    "reduce_scatter_single": lambda n, output, whole, *_: _ring(n) * _bytes(whole),
    "barrier": lambda n, *_: 0.0,
}


@dataclass
class Message:
    """One message as this rank saw it. Times are seconds of time.monotonic().

    posted   by this rank
    begun    posted by the last rank
    departs  the link has nothing older to carry
    arrives  the earliest time at which wait() returns
    waited   when this rank began and ended to wait for it; nothing if it never did
    """

    kind: str
    link: str
    size_bytes: float
    posted: float
    begun: float = 0.0
    departs: float = 0.0
    arrives: float = 0.0
    waited: tuple[float, float] | None = None
    error: BaseException | None = None
    known: threading.Event = field(default_factory=threading.Event, repr=False)


class DelayedWork:
    """The work handle of a delayed message."""

    def __init__(self, work: Any, message: Message) -> None:
        self._work = work
        self._finished = False
        self.message = message

    def wait(self, *timeout: Any, **named: Any) -> bool:
        started = time.monotonic()
        self._finish(*timeout, **named)
        self.message.known.wait()
        if self.message.error is not None:
            raise self.message.error
        while (remaining := self.message.arrives - time.monotonic()) > 0:
            time.sleep(remaining)
        if self.message.waited is None:
            self.message.waited = started, time.monotonic()
        return True

    def is_completed(self) -> bool:
        if not self.message.known.is_set() or time.monotonic() < self.message.arrives:
            return False
        if self.message.error is None:
            # short: every rank has posted it; and gloo reports point-to-point only to those who
            # wait
            self._finish()
        return True

    def _finish(self, *timeout: Any, **named: Any) -> None:
        """Wait for the real message; only once, because a second wait in gloo never ends."""
        if not self._finished:
            self._work.wait(*timeout, **named)
            self._finished = True

    def get_future(self) -> Any:
        raise NotImplementedError("a delayed message has no future: use wait()")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class _Link:
    """Link with serialized messages; a separate thread determines when each began."""

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._free = 0.0
        self._messages: queue.SimpleQueue[tuple[Message, Callable[[], float]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def carry(self, message: Message, all_posted: Callable[[], float]) -> None:
        """Store `all_posted`, which waits until every rank has posted and returns the last time."""
        self._messages.put((message, all_posted))

    def _run(self) -> None:
        while True:
            message, all_posted = self._messages.get()
            try:
                message.begun = all_posted()
            except BaseException as error:  # the thread that waits for the message wants to know
                message.error = error
            message.departs = max(message.begun, self._free)
            self._free = message.departs + message.size_bytes / self._bytes_per_s
            message.arrives = self._free + self._latency_s
            message.known.set()
            del message, all_posted  # the queue may be empty for long: hold no tensors


class Links:
    """Installed delay: its settings, and all messages of this process in posting order."""

    def __init__(self, latency_s: float, gigabytes_per_s: float) -> None:
        self.latency_s = latency_s
        self.bytes_per_s = gigabytes_per_s * 1e9
        self.messages: list[Message] = []
        self._links: dict[str, _Link] = {}
        self._lock = threading.Lock()
        self._originals: dict[str, Callable[..., Any]] = {}
        self._descriptors: dict[str, Any] = {}

    def time_s(self, size_bytes: float) -> float:
        """Seconds from the beginning of a message to its arrival over a link that is free."""
        return self.latency_s + size_bytes / self.bytes_per_s

    def install(self) -> None:
        for name in (*COLLECTIVES, "send", "recv"):
            if name in vars(dist.ProcessGroup):  # not every version of torch has every method
                self._originals[name] = getattr(dist.ProcessGroup, name)
                self._descriptors[name] = vars(dist.ProcessGroup)[name]
        with contextlib.suppress(ImportError):  # peers run without megatron
            from megatron.layers.context import LayerContext

            LayerContext.region = NotImplemented  # messages that C++ code would send by itself
        for name in self._originals:
            delayed = (
                self._delayed_collective(name) if name in COLLECTIVES else self._delayed_pair(name)
            )
            setattr(dist.ProcessGroup, name, delayed)

    def uninstall(self) -> None:
        """Messages posted from now on are not delayed; those on their way still are."""
        # not the functions: they would not be bound to a group
        for name, descriptor in self._descriptors.items():
            setattr(dist.ProcessGroup, name, descriptor)

    def _post(
        self,
        kind: str,
        link: str,
        size_bytes: float,
        posted: torch.Tensor,
        all_posted: Callable[[], float],
    ) -> Message:
        message = Message(kind, link, size_bytes, float(posted))
        if link not in self._links:
            self._links[link] = _Link(self.latency_s, self.bytes_per_s)
        self.messages.append(message)
        self._links[link].carry(message, all_posted)
        return message

    def _delayed_collective(self, name: str) -> Callable[..., Any]:
        original, all_reduce, size_bytes = (
            self._originals[name],
            self._originals["allreduce"],
            COLLECTIVES[name],
        )

        def delayed(group: Any, *args: Any, **kwargs: Any) -> Any:
            if group.size() == 1:
                return original(group, *args, **kwargs)
            with self._lock:
                own = torch.tensor([time.monotonic()], dtype=torch.float64)
                stamp = own.clone()
                options: Any = dist.AllreduceOptions()
                options.reduceOp = dist.ReduceOp.MAX
                stamps = all_reduce(group, [stamp], options)
                work = original(group, *args, **kwargs)

                def all_posted() -> float:
                    stamps.wait()
                    return float(stamp)

                bytes_on_wire = size_bytes(group.size(), *args, *kwargs.values())
                link = f"group {group.group_name}"
                return DelayedWork(work, self._post(name, link, bytes_on_wire, own, all_posted))

        return delayed

    def _delayed_pair(self, name: str) -> Callable[..., Any]:
        original, send, recv = (
            self._originals[name],
            self._originals["send"],
            self._originals["recv"],
        )
        outgoing, incoming = (
            (FROM_SENDER, FROM_RECEIVER) if name == "send" else (FROM_RECEIVER, FROM_SENDER)
        )

        def delayed(group: Any, tensors: Any, peer: int, tag: int = 0) -> Any:
            with self._lock:
                own = torch.tensor([time.monotonic()], dtype=torch.float64)
                other = torch.empty_like(own)
                sent, received = (
                    send(group, [own], peer, tag + outgoing),
                    recv(group, [other], peer, tag + incoming),
                )
                work = original(group, tensors, peer, tag)

                def all_posted() -> float:
                    sent.wait()
                    received.wait()
                    return max(float(own), float(other))

                ends = (group.rank(), peer) if name == "send" else (peer, group.rank())
                link = f"group {group.group_name} {ends[0]}->{ends[1]}"
                return DelayedWork(work, self._post(name, link, _bytes(tensors), own, all_posted))

        return delayed


def install(latency_s: float, gigabytes_per_s: float) -> Links:
    """Delay the messages of all gloo groups of this process, also future ones, until `uninstall`.

    Every process of a group must call it, between the same two messages. Raises ValueError for an
    invalid delay.
    """
    if latency_s < 0 or not gigabytes_per_s > 0:
        raise ValueError(
            f"latency_s={latency_s} must not be negative, gigabytes_per_s={gigabytes_per_s} "
            "positive"
        )
    links = Links(latency_s, gigabytes_per_s)
    links.install()
    return links


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--gigabytes-per-s", type=float, default=float("inf"))
    parser.add_argument("program", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    arguments = parser.parse_args()
    install(arguments.latency_ms / 1e3, arguments.gigabytes_per_s)
    sys.argv = [arguments.program, *arguments.arguments]
    sys.path.insert(0, str(Path(arguments.program).resolve().parent))
    runpy.run_path(arguments.program, run_name="__main__")


if __name__ == "__main__":
    main()
