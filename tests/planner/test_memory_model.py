"""The planner's memory beside the dry run, in layouts that are drawn at random.

The campaign "memory" compares others.
"""

from __future__ import annotations

import pytest

from benchmarks import memory_model
from benchmarks.memory_layouts import drawn


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1003, 1019, 1021, 1023])
def test_the_planners_memory_is_what_the_code_allocates(seed: int) -> None:
    rows = memory_model.compare_formula(drawn(seed))
    assert memory_model.holds(rows), rows
