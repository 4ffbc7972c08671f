"""The place of every rank, also of those that never came."""
from __future__ import annotations

import itertools

import pytest

from megatron.preflight.measure.expected import UNKNOWN, Place, places_of_ranks, slurm_places

STEP = {"SLURM_STEP_NODELIST": "frontier[00007-00008,00011]", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}
BLOCK = [Place("frontier00007", 0), Place("frontier00007", 1), Place("frontier00008", 0), Place("frontier00008", 1),
         Place("frontier00011", 0)]  # fmt: skip
CYCLIC = [BLOCK[0], BLOCK[2], BLOCK[4], BLOCK[1], BLOCK[3]]


def test_slurm_tells_all_places() -> None:
    nodes = slurm_places(STEP, 5)
    assert [place for node in nodes for place in node] == BLOCK
    assert slurm_places({}, 5) == []
    assert slurm_places({"SLURM_STEP_NODELIST": "a[1-2]"}, 4) == [
        [Place("a1", 0), Place("a1", 1)], [Place("a2", 0), Place("a2", 1)],
    ]  # fmt: skip
    assert slurm_places(STEP, 7) == []  # neither list nor counts fit


@pytest.mark.parametrize("true", [BLOCK, CYCLIC])
def test_the_missing_get_the_place_of_the_distribution_that_fits(true: list[Place]) -> None:
    """Whoever is missing."""
    for present in (set(chosen) for size in range(6) for chosen in itertools.combinations(range(5), size)):
        found = places_of_ranks(slurm_places(STEP, 5), {rank: true[rank] for rank in present}, 5, 2)
        assert all(found[rank] == true[rank] for rank in present)
        assert sorted(found) == sorted(BLOCK)  # each place once
        if present - {0}:  # rank 0 is at the same place in both
            assert found == true


def test_without_slurm_neighbours_tell_the_node() -> None:
    places = places_of_ranks([], {1: Place("a", 1), 0: Place("a", 0)}, 6, 3)
    assert places[:3] == [Place("a", 0), Place("a", 1), Place("a", 2)]
    assert places[3:] == [Place(f"{UNKNOWN} 1", local) for local in range(3)]
