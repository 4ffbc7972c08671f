"""Groups of real processes are used once at the start.

If one hangs, every rank lists its members.
"""

import threading
import time
from functools import partial
from pathlib import Path

import pytest

from megatron.errors import LaunchError
from megatron.parallel import rendezvous
from megatron.parallel.collectives import use_groups
from megatron.parallel.launch import detect_launch
from megatron.parallel.topology import Topology
from tests.helpers.fault_points import on
from tests.helpers.processes import run_processes
from tests.parallel.ranks import patient_connection

pytestmark = pytest.mark.slow

EVENT, RANKS = "megatron.parallel.group", 4
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
            use = partial(use_groups, Topology.create(tensor, pipeline), ring)
            counts.append(met.unless_failed(use, 180.0, "it did not end"))
        return counts, connections(met.launch.master_port)


def test_each_group_and_each_neighbour_once_over_two_connections_to_the_store():
    counts, kept = zip(*run_processes(RANKS, used), strict=True)
    assert list(counts) == [list(of_rank) for of_rank in zip(*USES.values(), strict=True)]
    assert max(kept) == 2 * RANKS


def held(rank):
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
    found = met.explain(caught.value)
    rendezvous.ANSWER_S = 0.1  # gloo may wait for dead ranks for ever
    met.close()
    return type(found).__name__, str(found)


def test_where_a_group_hangs_every_rank_tells_who_is_in_which():
    for kind, text in run_processes(RANKS, held):
        before, _, own = text.partition("Seen here as")
        assert kind == "LostRankError" and own, text
        assert all(part in before for part in ("rank 0 in", "tensor group", "rank 2-3 in", "data"))
