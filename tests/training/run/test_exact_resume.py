"""Exact resumption after SIGKILL; `make prove ONLY=kills` resumes on other layouts too."""

import dataclasses
import json

import pytest

from benchmarks.faults.corpus import make_corpus
from benchmarks.faults.history import records
from benchmarks.prove_resume import DATA, SAVE_INTERVAL, SCHEDULED, compare, prove

# One of the two checkpoints before it may be incomplete when the kill comes.
ITERATIONS = 12
STEP = 10
KILLED_IN = STEP - 1  # reported by then


@pytest.mark.slow
def test_a_run_that_was_killed_is_the_run_that_was_not(tmp_path):
    """A killed and resumed run equals an uninterrupted one.

    It has dropout, two blended data sets, validation and asynchronous saves in between. Phases,
    betas, batch sizes, clipping by kind and the average resume in their middle.
    """
    case = dataclasses.replace(SCHEDULED, asynchronous=True, resumed=(DATA,))
    folder = tmp_path / "case"
    data = make_corpus(tmp_path / "data")
    (row,) = prove(case, folder, data, ITERATIONS, STEP)
    assert row.faults == () and row.killed_in == KILLED_IN
    assert row.resumed_from in (SAVE_INTERVAL, 2 * SAVE_INTERVAL)
    averages = [record["ema_loss"] for record in records(folder / "whole", "validation")]
    assert len(set(averages)) == len(averages) > 2
    # The comparison itself can fail: one loss in the last digit, one more sample in the ledger.
    file = folder / "whole/metrics.jsonl"
    written = [json.loads(line) for line in file.read_text().splitlines()]
    last = {record["event"]: record for record in written}
    last["iteration"]["lm_loss"] *= 1 + 2e-7
    next(iter(last["data"]["sources"].values()))["samples"] = 1
    file.write_text("".join(json.dumps(record) + "\n" for record in written))
    spoilt = compare(case, DATA, folder / "whole", folder / "resumed_0", KILLED_IN, ITERATIONS)
    assert len(spoilt.faults) == 2
