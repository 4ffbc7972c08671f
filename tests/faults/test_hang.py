"""A rank that is stopped by SIGSTOP is named by the others, which end."""
from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.faults import hang


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_a_stopped_rank_is_named_and_the_run_resumed(tmp_path: Path) -> None:
    found = hang.stop_one(tmp_path, "PP2 zero-bubble", 1, random.Random(1))
    assert found.faults == () and "SIGSTOP" in found.conclusion
