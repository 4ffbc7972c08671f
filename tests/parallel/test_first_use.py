"""Groups of real processes are used once at the start.

If one hangs, every rank lists its members.
"""

import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.errors import LaunchError
from megatron.parallel import rendezvous
from megatron.parallel.collectives import use_groups
from megatron.parallel.flight import FlightState
from megatron.parallel.launch import detect_launch
from megatron.parallel.layout import Layout
from megatron.parallel.topology import Topology
from tests.helpers.fault_points import on
from tests.helpers.processes import run_processes
from tests.parallel.ranks import patient_connection

pytestmark = pytest.mark.slow

EVENT = "megatron.parallel.group"
RANKS = 4
# (tensor, pipeline, ring) -> uses of each rank's groups: all-reduces and pairs of neighbours.
USES = {
    (2, 1, False): [3, 3, 3, 3],  # tensor, data, world
    (2, 2, False): [4, 4, 4, 4],  # tensor, both ends, the pair, world, which is also a replica
    (1, 4, False): [3, 3, 3, 3],  # both ends or two pairs, one pair, world
    (1, 4, True): [4, 3, 3, 4],
    (1, 1, False): [1, 1, 1, 1],
}


def connections(port):
    """Count the established connections at a port of this host."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def used(rank):
    with patient_connection(detect_launch()) as met:
        counts = []
        for tensor, pipeline, ring in USES:
            owners = [*range(pipeline)] * 2 if ring else ()
            use = partial(use_groups, Topology.create(tensor, pipeline, owners=owners))
            counts.append(met.unless_failed(use, 180.0, "it did not end"))
        return counts, connections(met.launch.master_port)


def test_each_group_and_each_neighbour_once_over_two_connections_to_the_store():
    counts, connected = zip(*run_processes(RANKS, used), strict=True)
    assert list(counts) == [list(of_rank) for of_rank in zip(*USES.values(), strict=True)]
    assert max(connected) == 2 * RANKS


def hang(rank):
    """Hang rank 1 in the tensor group of ranks 0 and 1.

    Ranks 2 and 3 wait for them in their data groups. Rank 0's time limit expires when all have
    arrived.
    """
    met = patient_connection(detect_launch(), range(RANKS))
    topology = Topology.create(2, 1, flight=met.flight)

    def arrive(kind):
        met.store.set(f"in/{rank}", kind)
        if rank == 1:
            threading.Event().wait()

    on(EVENT, arrive, 1 if rank < 2 else 2)

    def use():
        threading.Thread(target=use_groups, args=(topology,), daemon=True).start()
        while rank > 0 or not met.store.check([f"in/{other}" for other in range(RANKS)]):
            time.sleep(0.002)
        while rank == 0 and met.flight.posted[1] == 0:  # in its tensor group
            time.sleep(0.002)
        raise LaunchError("it did not end")

    with pytest.raises(LaunchError) as caught:
        met.unless_failed(use, 180.0, "it did not end")
    error = met.explain(caught.value)
    rendezvous.ANSWER_S = 0.1  # gloo may wait for dead ranks for ever
    met.close()
    return type(error).__name__, str(error)


def test_where_a_group_hangs_every_rank_tells_who_is_in_which():
    for kind, text in run_processes(RANKS, hang):
        before, _, seen_here = text.partition("Seen here as")
        assert kind == "LostRankError" and seen_here, text
        assert all(
            words in before for words in ("rank 0 in", "tensor group", "rank 2-3 in", "data")
        )


EXPERTS = Layout(tensor=2, pipeline=2, data=8, context=2, expert=4, expert_node=2, shard=4)


class Handle:
    """Stand-in for the process group of some ranks."""

    def __init__(self, ranks):
        self.ranks = sorted(ranks)


class Device(TorchDispatchMode):
    """A device on which calls have no effect before a number is read.

    `done` has the kind of group, the call and the peer that the flight record names while one is
    read. `wrong` is the kind of group whose sums are one too small.
    """

    def __init__(self, rank, layout, wrong=""):
        super().__init__()
        self.topology = Topology.from_layout(
            layout, rank, device=torch.device("cpu"), new_group=Handle
        )
        self.topology.flight.describe(rank, 1, "n")
        self.wrong = wrong
        self.done = []
        self.pending = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and self.pending:
            state = FlightState.read(self.topology.flight.buffer)
            assert state is not None and state.call is not None
            self.done.append((state.call.kind, state.call.name, state.call.peer))
            while self.pending:
                self.pending.pop()()
        return func(*args, **(kwargs or {}))

    def all_reduce(self, x, group):
        kinds = {id(each.handle): each.kind for each in reversed(self.topology.groups)}
        total = len(group.ranks) - (kinds[id(group)] == self.wrong)
        self.pending.append(lambda: x.fill_(total))

    def all_to_all_single(self, x, sent, group):
        assert set(sent.tolist()) == {group.ranks.index(self.topology.rank)}
        self.pending.append(lambda: x.copy_(torch.arange(len(x))))

    def isend(self, x, peer, group):
        assert group.ranks == sorted([peer, self.topology.rank])
        self.pending.append(lambda: None)
        return SimpleNamespace(wait=lambda: None)

    def irecv(self, x, peer, group):
        self.pending.append(lambda: x.fill_(peer))
        return SimpleNamespace(wait=lambda: None)

    def use(self, monkeypatch):
        for name in ("all_reduce", "all_to_all_single", "isend", "irecv"):
            monkeypatch.setattr(f"torch.distributed.{name}", getattr(self, name))
        with self:
            use_groups(self.topology)


def test_the_device_is_waited_for_in_the_record_of_each_group(
    monkeypatch,
):
    """A hang on the device is therefore in the group that hangs.

    Rank 19 is the second of its tensor and of its data line, on the second of two stages.
    """
    device = Device(19, EXPERTS)
    device.use(monkeypatch)
    assert not device.pending
    calls = Counter((kind, call) for kind, call, _ in device.done)
    sums = "tensor pipeline data context model expert expert_data world expert_between "
    sums += "expert_within data.inner data.outer data.copies expert_data.copies"
    assert {kind for kind, call in calls if call == "all_reduce"} <= set(sums.split())
    assert calls["expert", "all_reduce"] == 1
    assert calls["expert_between", "all_to_all"] == calls["expert_within", "all_to_all"] == 1
    assert [call[1:] for call in device.done if call[1] in ("send", "receive")] == [
        ("receive", 3),
        ("send", 3),
    ]
    assert set(calls.values()) == {1} and device.done[-1][:2] == ("world", "all_reduce")
