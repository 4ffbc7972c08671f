"""Rank 0 asks, the others answer, over a store; every wait has a limit, and who did not answer is known.

Orders and answers have keys of their own, so that nobody waits for anybody else. A rank waits for its next order inside
the store, which costs nothing; rank 0 reads answers in batches, and one counter tells it when all are there. So 75,000
ranks cost it some hundred requests a step (cf. megatron/parallel/rendezvous.py).
"""
from __future__ import annotations

import functools
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron.errors import LaunchError, LostRankError
from megatron.parallel.launch import Launch
from megatron.parallel.meeting import serving_store
from megatron.parallel.report import bounded, raise_file_limit

_BATCH = 1024  # keys in one request
_MOST, _STRAGGLE, _STRAGGLE_S = 0.9, 4.0, 10.0  # see Conductor.ask; not before so many seconds
_PROBE_S = 10.0  # how long the store may take to answer a trivial question
_NOTHING = b"-"  # stands where an answer will be
_FOREVER = timedelta(hours=1)


class StoreLostError(LostRankError):
    """The store that rank 0 serves gives no answer."""


def serve_store(launch: Launch, limit_s: float) -> Any:
    """Rank 0's store, or the launcher's. Raises LaunchError where the port is taken."""
    raise_file_limit()
    if launch.store_served:
        return connect_store(launch, launch.master_port, limit_s)
    port = launch.master_port if launch.world_size > 1 else 0
    try:
        return serving_store(launch, port, timedelta(seconds=limit_s))
    except (RuntimeError, OSError) as error:
        raise LaunchError(
            f"rank 0 on node {launch.node} cannot serve port {port}, perhaps because another run uses it: set "
            f"MASTER_PORT to a free port ({str(error).splitlines()[0]})"
        ) from error


def connect_store(launch: Launch, port: int, limit_s: float) -> Any:
    """A connection of this process's own. Raises StoreLostError when nobody serves within the limit."""
    own = launch.rank == 0 and not launch.store_served
    host = "127.0.0.1" if own else launch.store_host
    deadline, reason = time.monotonic() + limit_s, "no answer"
    while True:  # a plain socket waits without torch's stack traces
        left = deadline - time.monotonic()
        if left <= 0:
            raise StoreLostError(
                f"rank {launch.rank} on node {launch.node} does not reach rank 0's store at {host}:{port} within "
                f"{limit_s:g} s: {reason}"
            )
        try:
            socket.create_connection((host, port), timeout=min(left, _PROBE_S)).close()
            break
        except OSError as error:
            reason = str(error)
            time.sleep(min(0.1, max(left, 0.0)))

    def open_client() -> Any:
        return dist.TCPStore(host, port, None, is_master=False, timeout=_FOREVER, wait_for_workers=False)

    failure = f"rank {launch.rank} on node {launch.node}: rank 0's store at {host}:{port} gave no answer"
    try:
        return bounded(open_client, max(deadline - time.monotonic(), _PROBE_S), failure)
    except (RuntimeError, LaunchError) as error:
        raise StoreLostError(str(error)) from error


def job_part(store: Any, launch: Launch) -> Any:
    """The part of a store that belongs to this measurement."""
    return dist.PrefixStore(launch.store_prefix("preflight"), store)


class Conductor:
    """The side that asks; one thread of rank 0."""

    def __init__(
        self, store: Any, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._store = store
        self._clock, self._sleep = clock, sleep
        self._step = 0
        self._next: dict[int, int] = {}  # number of each rank's next order

    def ask(
        self, orders: Mapping[int, Mapping[str, Any]], limit_s: float, patience_s: float = 0.0, at_most_s: float = 0.0
    ) -> dict[int, dict[str, Any]]:
        """Give each rank its order; the answers that came within the limit.

        patience_s  with answers still coming in, wait on until twice the time of the last one and so long after, but
                    not beyond at_most_s; without it, stragglers are given up that take four times as long as nine of
                    ten ranks took

        Ranks that share an order share the object, which is then written as text once.
        """
        self._step += 1
        start = self._clock()
        ranks, texts = list(orders), {}
        for order in orders.values():
            if id(order) not in texts:
                texts[id(order)] = json.dumps({**order, "step": self._step})
        numbers = {rank: self._next.get(rank, 0) for rank in ranks}
        for batch in _batches(ranks):
            keys = [f"answer/{rank}/{numbers[rank]}" for rank in batch]
            self._store.multi_set(keys, [_NOTHING] * len(keys))
        for batch in _batches(ranks):
            self._store.multi_set(
                [f"order/{rank}/{numbers[rank]}" for rank in batch], [texts[id(orders[rank])] for rank in batch]
            )
        self._next.update({rank: number + 1 for rank, number in numbers.items()})
        self._await_count(len(ranks), start, limit_s, patience_s, at_most_s)
        answers: dict[int, dict[str, Any]] = {}
        for batch in _batches(ranks):
            values = self._store.multi_get([f"answer/{rank}/{numbers[rank]}" for rank in batch])
            answers.update({r: json.loads(v) for r, v in zip(batch, values, strict=True) if v != _NOTHING})
        return answers

    def _await_count(self, wanted: int, start: float, limit_s: float, patience_s: float, at_most_s: float) -> None:
        pause, came, last, most_s = 0.005, 0, start, float("inf")
        while True:
            now, count = self._clock(), self._store.add(f"came/{self._step}", 0)
            if count != came:
                came, last = count, now
            if count >= _MOST * wanted:
                most_s = min(most_s, now - start)
            deadline = start + max(limit_s, min(2 * (last - start) + patience_s, at_most_s))
            if not patience_s:
                deadline = min(deadline, start + max(_STRAGGLE_S, _STRAGGLE * most_s))
            if count >= wanted or now >= deadline:
                return
            self._sleep(min(pause, deadline - now))
            pause = min(pause * 1.5, 0.1)


class Worker:
    """The side that answers: one for every rank, rank 0 too. Raises LaunchError when another process has this rank."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._number = 0
        self._step = 0
        # All ranks look now and then whether rank 0 is still there; the more they are, the less often each.
        self._slice_s = max(5.0, world_size / 5000)
        if self._within(lambda: store.add(f"claim/{rank}", 1)) > 1:
            raise LaunchError(f"two processes say they are rank {rank}: every process needs a rank of its own")

    def next_order(self, limit_s: float) -> dict[str, Any]:
        """Wait for this rank's next order. Raises StoreLostError when rank 0 is gone or gives none in time."""
        key = f"order/{self._rank}/{self._number}"
        deadline = time.monotonic() + limit_s
        while True:
            slice_s = max(min(self._slice_s, deadline - time.monotonic()), 0.01)
            try:
                wait = functools.partial(self._store.wait, [key], timedelta(seconds=slice_s))
                bounded(wait, slice_s + _PROBE_S)
                break
            except (RuntimeError, LaunchError) as error:
                self._probe(error)
                if time.monotonic() >= deadline:
                    raise StoreLostError(f"rank 0 is there, but gave no order within {limit_s:g} s") from error
        order: dict[str, Any] = json.loads(self._within(lambda: self._store.get(key)))
        self._number += 1
        self._step = order.pop("step")
        return order

    def answer(self, value: Mapping[str, Any]) -> None:
        """Answer the order that came last."""
        text = json.dumps(value)
        self._within(lambda: self._store.set(f"answer/{self._rank}/{self._number - 1}", text))
        self._within(lambda: self._store.add(f"came/{self._step}", 1))

    def _probe(self, error: BaseException) -> None:
        """Return if the store answers."""
        if isinstance(error, LaunchError):
            raise StoreLostError(f"rank 0's store gave no answer within {self._slice_s + _PROBE_S:g} s") from error
        self._within(lambda: self._store.check(["order"]))

    def _within(self, step: Any) -> Any:
        try:
            return bounded(step, _PROBE_S, "rank 0's store gave no answer")
        except (RuntimeError, LaunchError) as error:
            raise StoreLostError(str(error).splitlines()[0]) from error


def _batches(items: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(items), _BATCH):
        yield items[start : start + _BATCH]
