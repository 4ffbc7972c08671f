"""Groups of real processes are used once at the start; the one that fails is named on every
rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import LaunchError
from megatron.parallel import group_check
from megatron.parallel.group_check import check_groups
from megatron.parallel.launch import detect_launch
from megatron.parallel.rendezvous import Rendezvous
from megatron.parallel.topology import Layout, Topology
from tests.helpers.fault_points import on
from tests.helpers.processes import run_processes
from tests.parallel.ranks import patient_connection

pytestmark = pytest.mark.slow

EVENT, RANKS = "megatron.parallel.group", 4
# (tensor, pipeline, ring) -> what the groups of each rank are used for: all-reduces and pairs of
# neighbours.
USES = {
    (2, 1, False): [3, 3, 3, 3],  # tensor, data, world
    (2, 2, False): [4, 4, 4, 4],  # tensor, both ends, the pair, world, which is a replica, too
    (1, 4, False): [3, 3, 3, 3],  # both ends or two pairs, one pair, world
    (1, 4, True): [4, 3, 3, 4],
    (1, 1, False): [1, 1, 1, 1],
}


def connections(port: int) -> int:
    """How many connections stand at a port of this host."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


def used(rank: int) -> tuple[list[int], int]:
    with patient_connection(detect_launch()) as met:
        made = ((Topology.create(tensor, pipeline), ring) for tensor, pipeline, ring in USES)
        counts = [check_groups(topology, met, 180.0, ring) for topology, ring in made]
        return counts, connections(met.launch.master_port)


def test_each_group_and_each_neighbour_once_over_two_connections_to_the_store() -> None:
    counts, kept = zip(*run_processes(RANKS, used), strict=True)
    assert list(counts) == [list(of_rank) for of_rank in zip(*USES.values(), strict=True)]
    assert max(kept) == 2 * RANKS


def test_groups_and_neighbours_of_a_rank() -> None:
    """Also the pipeline group, which is a replica where the tensor size is 1."""
    topology = Topology.from_layout(Layout(1, 3, 2), 2, new_group=tuple)
    found = [
        (group.kind, call.split()[0], wanted)
        for _, call, group, wanted, _ in group_check._uses(topology, False)
    ]
    assert found == [
        ("data", "all-reduce", 2),
        ("pipeline", "all-reduce", 3),
        ("pipeline", "messages", 0),
        ("pipeline", "messages", 4),
        ("world", "all-reduce", 6),
    ]


def held(rank: int, met: Rendezvous) -> None:
    """Ranks 0 and 1 are in their tensor group, of which rank 1 never comes out, ranks 2 and 3 wait
    for them in their data groups. The time of rank 0 is over when all are there."""
    store = met.store

    def arrive(name: str) -> None:
        store.set(f"in/{rank}", name)
        if rank == 1:
            threading.Event().wait()

    def until_all_are_there(
        function: Callable[[], Any], seconds: float, failure: str, *wake: Any
    ) -> Any:
        threading.Thread(target=function, daemon=True).start()
        while not store.check([f"in/{other}" for other in range(RANKS)]):
            time.sleep(0.002)
        raise LaunchError(failure)

    on(EVENT, arrive, 1 if rank < 2 else 2)
    if rank == 0:
        met.unless_failed = until_all_are_there  # type: ignore[method-assign]


def wrong(rank: int, met: Rendezvous) -> None:
    """Rank 1 counts twice as many in its tensor group."""
    plain = group_check.all_reduce
    if rank == 1:
        group_check.all_reduce = lambda x, group: (
            plain(x, group) * (2 if group.kind == "tensor" else 1)
        )  # type: ignore[assignment]


def check_failing(rank: int, plant: Callable[[int, Rendezvous], None]) -> tuple[str, str]:
    met = patient_connection(detect_launch(), range(RANKS))
    topology = Topology.create(2, 1, flight=met.flight)
    plant(rank, met)
    with pytest.raises(LaunchError) as caught:
        check_groups(topology, met, 180.0)
    found = met.explain(caught.value)
    met.close()
    return type(found).__name__, str(found)


@pytest.mark.parametrize("plant", [held, wrong])
def test_the_group_that_fails_is_named_on_every_rank_with_its_ranks(
    plant: Callable[..., None],
) -> None:
    for kind, text in run_processes(RANKS, check_failing, plant):
        before, _, own = text.partition("Seen here as")
        assert (
            kind == "LostRankError"
            and "tensor" in before
            and "0-1" in before
            and "data" not in before
        ), text
        assert own
