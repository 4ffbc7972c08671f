"""Ranks for tests of the rendezvous: threads or processes, whose time limits the test ends."""

import os
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron.parallel import rendezvous, store
from megatron.parallel.launch import Launch
from megatron.parallel.rendezvous import Rendezvous
from tests.helpers.fault_points import on
from tests.helpers.processes import free_port

LONG = timedelta(seconds=180)  # only a hang takes this long
ANSWER_S, LINGER_S = 40.0, 20.0  # instead of 5 s each: no rank times out by the real clock


class Patience:
    """Clock that stands still until all expected messages have arrived.

    The code under test polls and sleeps by it. For each of `over`, in their order: once it returns
    true, `passing` seconds have passed.
    """

    def __init__(self, *over, passing=ANSWER_S + 1):
        self._over = list(over)
        self._passing = passing
        self._now = 0.0
        self._asking = threading.Lock()

    def __call__(self):
        return self._now

    def sleep(self, seconds):
        time.sleep(0.002)
        if self._asking.acquire(blocking=False):  # several threads may sleep
            try:
                if self._over and self._over[0]():
                    self._now += self._passing
                    del self._over[0]
            finally:
                self._asking.release()


def be_patient(patch):
    """Raise real-time limits for hosts that never answer to limits for hangs."""
    for module in (store, rendezvous):
        patch.setattr(module, "ANSWER_S", ANSWER_S)
    patch.setattr(rendezvous, "_LINGER_S", LINGER_S)


def patient_connection(launch, survivors=(), mapping=rendezvous.AS_LAUNCHED):
    """Join the rendezvous in a process that ends with its test case.

    A roll call ends when the survivors have answered it. The rank with the store stops waiting when
    they have left.
    """
    be_patient(pytest.MonkeyPatch())
    met = []
    on("megatron.parallel.met", met.append)
    keys, count = [f"answer/{rank}" for rank in survivors], len(survivors)
    clock = Patience(
        lambda: bool(keys and met) and met[0].store.check(keys),
        lambda: met[0].store.add("left", 0) >= count,
    )
    return Rendezvous(launch, torch.device("cpu"), LONG, mapping, clock, clock.sleep).join()


class Apart(Rendezvous):
    """Rank of several in this process: everything but torch.distributed, over a store on a port."""

    def _initialise(self):
        pass


class InMemory(Apart):
    """The same over a store in memory, which asks no name server for addresses."""

    stores = {}  # noqa: RUF012

    def _serve(self):
        return self._client()

    def _client(self):
        return self.stores.setdefault(self.launch.master_port, dist.HashStore())


def ranks_in_threads(
    numbers,
    size,
    step=lambda _: None,
    clocks=None,
    kind=InMemory,
    alike=(),
    **launch,
):
    """Run `step` on ranks that meet, each in a thread, and return its results or errors.

    Thread i is rank numbers[i] of `size`, with alike[i].
    """
    port = launch.pop("master_port", None) or free_port()
    results = [None] * len(numbers)
    job = f"test.{os.getpid()}.{port}"

    def run(thread, rank):
        clock = (clocks or {}).get(thread) or Patience()
        described = Launch(
            rank=rank,
            local_rank=rank,
            world_size=size,
            master_port=port,
            node=f"n{rank}",
            job=job,
            launcher="torchrun",
            **{"local_world_size": size, **launch},
        )
        try:
            identity = (alike[thread] if alike else None) or {}
            joined = kind(
                described,
                torch.device("cpu"),
                LONG,
                rendezvous.AS_LAUNCHED,
                clock,
                clock.sleep,
                identity,
            ).join()
            try:
                results[thread] = step(joined)
            finally:
                joined.close()
        except Exception as error:
            results[thread] = error

    threads = [threading.Thread(target=run, args=one) for one in enumerate(numbers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
