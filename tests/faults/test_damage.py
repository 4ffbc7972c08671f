"""Damaged files, through pretrain_gpt.py: named, passed over, and nothing is computed from them."""
from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.faults import damage


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_damaged_files_are_named_and_passed_over(tmp_path: Path) -> None:
    trained = damage.train(tmp_path, ranks=1)
    assert {"__0_0.distcp", "manifest.json", "state.json", damage.TRACKER} <= set(damage.files_of(trained))
    cases = [("__0_0.distcp", "flip"), ("__0_0.distcp", "zero"), ("manifest.json", "cut"), (damage.TRACKER, "cut")]
    found = [damage.hurt(trained, name, kind, number, number) for number, (name, kind) in enumerate(cases)]
    assert [case.faults for case in found] == [()] * len(cases)
    newest = damage.SAVES * damage.SAVE_INTERVAL
    assert [case.resumed for case in found] == [newest - damage.SAVE_INTERVAL] * 3 + [newest]
