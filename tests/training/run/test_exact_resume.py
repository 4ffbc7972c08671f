"""Exact resumption after SIGKILL on four ranks, on the same layout and on another."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import prove_resume
from benchmarks.faults.corpus import make_corpus
from benchmarks.faults.history import records
from benchmarks.prove_resume import SCHEDULED, Case, Layout, compare, prove

# One of the two checkpoints before it may be incomplete when the kill comes.
ITERATIONS, STEP = 12, 10
KILLED_IN = STEP - 1  # reported by then
PIPELINES = Layout("PP2 DP2", 4, ("--pipeline-model-parallel-size", "2"))
# Without a pipeline the same two ranks add up the same gradients. Two sums would differ: the
# gradient of a head that is tied to the embedding, and the norm over all gradients, by which
# clipping divides.
UNCUT = Layout("DP2", 2)
CASE = Case(
    "fp32",
    PIPELINES,
    (PIPELINES, UNCUT),
    asynchronous=True,
    alike=(UNCUT,),
    flags=("--untie-embeddings-and-output-weights", "--clip-grad", "0"),
)


@pytest.mark.slow
def test_a_run_that_was_killed_is_the_run_that_was_not(tmp_path: Path) -> None:
    """A killed and resumed run equals an uninterrupted one.

    It has dropout, two blended data sets, validation and asynchronous saves in between.
    """
    data = make_corpus(tmp_path / "data")
    rows = list(prove(CASE, tmp_path / "case", data, ITERATIONS, STEP))
    assert [row.faults for row in rows] == [(), ()]
    assert [row.killed_in for row in rows] == [KILLED_IN] * 2
    assert {row.resumed_from for row in rows} <= {
        prove_resume.SAVE_INTERVAL,
        2 * prove_resume.SAVE_INTERVAL,
    }
    # The comparison itself can fail: one loss in the last digit, one more sample in the ledger.
    whole, resumed = tmp_path / "case" / "whole", tmp_path / "case" / "resumed_0"
    change_last(
        whole, "iteration", lambda record: record.update(lm_loss=record["lm_loss"] * (1 + 2e-7))
    )
    change_last(
        whole, "data", lambda record: next(iter(record["sources"].values())).update(samples=1)
    )
    assert len(compare(CASE, PIPELINES, whole, resumed, KILLED_IN, ITERATIONS).faults) == 2


@pytest.mark.slow
def test_schedules_and_the_average_go_on(tmp_path: Path) -> None:
    """Phases, betas, batch sizes, clipping by kind and the average resume in their middle."""
    data = make_corpus(tmp_path / "data")
    rows = list(prove(SCHEDULED, tmp_path / "case", data, ITERATIONS, STEP))
    assert [row.faults for row in rows] == [(), ()]
    found = [record["ema_loss"] for record in records(tmp_path / "case/whole", "validation")]
    assert len(set(found)) == len(found) > 2


def change_last(folder: Path, event: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the last record of an event in a metrics file."""
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines()
    at = max(n for n, line in enumerate(lines) if json.loads(line)["event"] == event)
    record = json.loads(lines[at])
    change(record)
    lines[at] = json.dumps(record)
    file.write_text("\n".join(lines) + "\n")
