"""A small `make prove-resume`: killed with SIGKILL, resumed on the same layout and on another, compared to the bit."""
from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import prove_resume
from benchmarks.faults.corpus import make_corpus

ITERATIONS = 24


@pytest.mark.slow
@pytest.mark.parametrize("case", prove_resume.QUICK, ids=lambda case: f"{case.dtype}-{case.killed.name}")
def test_a_run_that_was_killed_is_the_run_that_was_not(case: prove_resume.Case, tmp_path: Path) -> None:
    """Dropout, two blended data sets, validation and asynchronous saves in between."""
    data = make_corpus(tmp_path / "data")
    rows = list(prove_resume.prove(case, tmp_path / "case", data, ITERATIONS, random.Random(3)))
    assert [row.resumed for row in rows] == list(case.resumed)
    assert [row.faults for row in rows] == [()] * len(rows)
    assert all(0 < row.resumed_from < ITERATIONS and row.resumed_from <= row.killed_in <= ITERATIONS for row in rows)
    # The comparison itself can fail: one loss in the last digit, one more sample in the ledger.
    whole, resumed = tmp_path / "case" / "whole", tmp_path / "case" / "resumed_0"
    change_last(whole, "iteration", lambda record: record.update(lm_loss=record["lm_loss"] * (1 + 2e-7)))
    change_last(whole, "data", lambda record: next(iter(record["sources"].values())).update(samples=1))
    row = prove_resume.compare(case, case.resumed[0], whole, resumed, rows[0].killed_in, ITERATIONS)
    assert row.faults == ("the ledger differs", f"figures of steps [{ITERATIONS}] differ")


def change_last(folder: Path, event: str, change: object) -> None:
    """Change the last record of an event in a metrics file."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines()
    at = max(n for n, line in enumerate(lines) if json.loads(line)["event"] == event)
    record = json.loads(lines[at])
    change(record)  # type: ignore[operator]
    lines[at] = json.dumps(record)
    file.write_text("\n".join(lines) + "\n")
