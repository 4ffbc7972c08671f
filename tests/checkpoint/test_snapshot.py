"""Memory for a copy of the state: exact size, registered with the driver, and released."""

import gc

import torch

from megatron.checkpoint.tensors import LocalShards, Snapshot, snapshot_bytes


class Driver:
    """Stand-in for cudaHostRegister and cudaHostUnregister in torch.cuda.cudart()."""

    def __init__(self):
        self.registered = {}
        self.calls = 0

    def cudaHostRegister(self, address, size, flags):
        self.calls += 1
        assert address not in self.registered
        self.registered[address] = (size, flags)
        return 0

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return 0


def state(*sizes):
    return {
        str(i): LocalShards((n,), {(0,): torch.arange(n, dtype=torch.float32) + i})
        for i, n in enumerate(sizes)
    }


def values(tensors):
    return [view.tolist() for shards in tensors.values() for view in shards.views.values()]


def test_it_registers_exactly_what_the_state_takes_and_before_the_first_copy():
    driver = Driver()
    tensors = state(16 * 1000, 1, 16)
    snapshot = Snapshot(driver)
    snapshot.reserve(tensors)
    size = 64 * 1000 + 64 + 64  # each tensor begins on a cache line of 64 bytes
    assert snapshot.bytes == snapshot_bytes(tensors) == size and snapshot.note == ""
    ((address, registered),) = driver.registered.items()
    assert registered == (size, 0)
    copy = snapshot.take(tensors)
    assert copy["0"].views[(0,)].data_ptr() == address, "the copy lies in it"
    before = values(tensors)
    for shards in tensors.values():
        shards.views[(0,)].zero_()
    assert values(copy) == before
    snapshot.take(state(10))
    assert driver.calls == 1, "it is kept for smaller states"


def test_it_is_given_back_once_when_it_is_too_small_or_dropped():
    driver = Driver()
    snapshot = Snapshot(driver)
    snapshot.take(state(16))
    snapshot.take(state(16, 16))
    assert list(driver.registered.values()) == [(128, 0)]
    del snapshot
    gc.collect()
    assert driver.registered == {}
