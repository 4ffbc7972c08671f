"""A short chain of benchmarks/fault_campaign.py: killed once at each kind of moment, and still the same training."""
from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.faults import kills


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_run_that_is_killed_again_and_again_trains_as_if_it_were_not(tmp_path: Path) -> None:
    chain = kills.Chain("DP2", 2, ("--async-save", "--keep-last", "2"))
    outcome = kills.run_chain(chain, len(kills.KINDS), tmp_path / "chain", random.Random(1))
    assert outcome.wrong == []
    assert [kill.kind for kill in outcome.kills] == list(kills.KINDS)
    assert len(outcome.lost) == len(kills.KINDS) and outcome.steps_compared >= kills.SAVE_INTERVAL * 15
