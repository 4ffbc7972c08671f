"""benchmarks/tuner.py: truth, noise and trials to the best on tables whose answers are known beforehand."""
from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.tuning.types import DONE, FAILED, HANG, OUT_OF_MEMORY, Candidate, Parameter, Result, Trial

pytestmark = pytest.mark.campaign("benchmarks")
ROOT = Path(__file__).resolve().parents[2]
TP, PP, MBS = (1, 2, 4), (1, 2, 4), (1, 2, 4, 8, 16, 32, 64)
SIZE = len(TP) * len(PP) * len(MBS)


@pytest.fixture(autouse=True)
def benchmarks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def module(name: str) -> Any:
    return importlib.import_module(name)


def seconds(tp: int, pp: int, mbs: int) -> float:
    """Of a step: least at tp 2, pp 4, mbs 8; the next best is 10 % dearer."""
    return 1 + 0.1 * abs(math.log2(tp) - 1) + 0.2 * (2 - math.log2(pp)) + 0.15 * abs(math.log2(mbs) - 3)


def made(
    predicted: Callable[[int, int, int], float] = seconds, second_pass: Callable[[int], float] = lambda index: 1.0
) -> Any:
    """A table of SIZE layouts, of three steady steps in each of two passes; `second_pass`: how much slower it was."""
    tables = module("tuner_table")
    candidates, passes = [], ({}, {})
    for index, values in enumerate(itertools.product(TP, PP, MBS)):
        key, step_s = "tp={},pp={},mbs={}".format(*values), seconds(*values)
        named = dict(zip(("tp", "pp", "mbs"), values, strict=True))
        candidates.append(Candidate(index, key, named, ("--x", str(index)), 4, 1, 1000, 1e9, predicted(*values)))
        passes[0][key] = tables.Measured((step_s, 0.9 * step_s, 1.1 * step_s))
        passes[1][key] = tables.Measured(tuple(second_pass(index) * s for s in passes[0][key].steps_s))
    parameters = (Parameter("tp", TP), Parameter("pp", PP), Parameter("mbs", MBS))
    return tables.Table("made", parameters, tuple(candidates), passes)


def search_of(name: str, prior: bool, limit: int | None = None, whole: bool = False) -> Any:
    return module("tuner_replay").Search(name, name, prior, limit, whole)


# -- the table ---------------------------------------------------------------------------------------------------------


def test_truth_is_the_median_of_all_passes_and_regret_counts_from_the_least() -> None:
    table = made()
    best = table.candidates[table.best]
    assert best.key == "tp=2,pp=4,mbs=8" and table.near() == {best.index}
    assert table.truth[best.index] == pytest.approx(math.log(1.0 / 1000))
    beside = next(c for c in table.candidates if c.key == "tp=4,pp=4,mbs=8")
    assert table.regret(beside.index) == pytest.approx(0.1)
    # Six steps of 0.9, 1, 1.1 and twice that: the median is the mean of 1.1 and 1.8.
    assert math.exp(made(second_pass=lambda index: 2.0).truth[best.index]) == pytest.approx(1.45 / 1000)


def test_a_layout_that_failed_once_has_the_truth_of_its_other_pass_and_one_that_always_failed_none() -> None:
    table, failed = made(), module("tuner_table").Measured((), OUT_OF_MEMORY)
    once, always = table.candidates[0].key, table.candidates[1].key
    first, second = ({**measured, always: failed} for measured in table.passes)
    broken = dataclasses.replace(table, passes=({**first, once: failed}, second))
    assert broken.truth[0] == pytest.approx(table.truth[0])
    assert broken.truth[1] == math.inf and 1 not in broken.near()
    answers = [broken.answers(seed) for seed in range(20)]
    assert {told[1] for told in answers} == {(None, OUT_OF_MEMORY)}
    assert {told[0][1] for told in answers} == {None, OUT_OF_MEMORY}  # of either pass


def test_a_pass_is_read_from_the_trials_and_their_metrics(tmp_path: Path) -> None:
    candidates = made().candidates
    (tmp_path / "trials" / "0001").mkdir(parents=True)
    records = [{"event": "start", "iteration": 0}]
    seconds = (9.0, 8.0, 2.0, 3.0, 4.0)
    records += [{"event": "iteration", "iteration": i, "step_time_s": s} for i, s in enumerate(seconds)]
    (tmp_path / "trials" / "0001" / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    trials = [
        Trial(1, candidates[5], "x", "trials/0001", result=Result(DONE, step_s=3.0)),
        Trial(2, candidates[6], "x", "trials/0002", result=Result(FAILED, HANG, "no step")),
        Trial(3, candidates[7], "x", "trials/0003"),
    ]
    tables = module("tuner_table")
    done, hung = candidates[5].key, candidates[6].key
    measured = tables.measured_in(tmp_path, trials, 2)
    assert measured == {done: tables.Measured((2.0, 3.0, 4.0)), hung: tables.Measured((), HANG)}


# -- replays -----------------------------------------------------------------------------------------------------------


def test_the_planners_order_finds_the_best_where_the_planner_has_it() -> None:
    """Predictions in an order of our choice: the best is their fifth."""
    replays = module("tuner_replay")
    ahead = {(1, 1, 64): 0.1, (4, 1, 64): 0.2, (1, 1, 1): 0.3, (4, 1, 1): 0.4, (2, 4, 8): 0.5}
    table = made(lambda *values: ahead.get(values, 1 + seconds(*values)))
    replay = replays.replay(table, search_of("exhaustive", True, whole=True), 0)
    assert replay.found_at(table) == 5 and sorted(replay.tried) == list(range(SIZE))
    # What is named before that is the dearest of all: 1 + 0.1 + 0.4 + 0.45, then the least of the four.
    assert replay.regret(table, 1) == pytest.approx(0.1 + 0.4 + 0.45)
    assert replay.regret(table, 5) == replay.regret(table, SIZE) == pytest.approx(0.0)


def test_random_finds_it_on_average_when_the_urn_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of k marked balls among n lies at (n + 1) / (k + 1) on average; here k is 1."""
    monkeypatch.setattr("os.fsync", lambda handle: None)  # thousands, for journals that nobody goes on with
    replays, table, seeds = module("tuner_replay"), made(), range(40)
    found = [replays.replay(table, search_of("random", False, whole=True), seed).found_at(table) for seed in seeds]
    mean, deviation = (SIZE + 1) / 2, math.sqrt((SIZE**2 - 1) / 12 / len(seeds))
    assert abs(sum(found) / len(seeds) - mean) < 4 * deviation


def test_a_bayesian_search_stops_at_half_and_finds_the_best_with_a_true_prior() -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("optuna")
    replays, table = module("tuner_replay"), made()
    replay = replays.replay(table, search_of("optuna", True, 4), 0)
    assert replay.found_at(table) == 1 and len(replay.tried) == SIZE // 2
    assert replay == replays.replay(table, search_of("optuna", True, 4), 0)


# -- what is reported --------------------------------------------------------------------------------------------------


def test_what_is_measured_again_is_named_by_all_its_measurements() -> None:
    """The best is told 12 % too slow by one pass and as it is by the other; six layouts lie 10 % behind it."""
    replays, report = module("tuner_replay"), module("tuner_report")
    best = made().best
    table = made(second_pass=lambda index: 1.12 if index == best else 1.0)
    table = dataclasses.replace(table, passes=tuple(
        {key: dataclasses.replace(m, steps_s=(1.05 * m.step_s, m.step_s, 0.95 * m.step_s)) for key, m in found.items()}
        for found in table.passes
    ))  # fmt: skip
    assert max(table.errors) == pytest.approx(-min(table.errors), abs=0.01) and max(table.errors) > 0.05
    answers = {table.again(best, turn, 3) for turn in range(1, 200)}
    assert {round(cost - table.truth[best], 9) for cost, _ in answers} == {round(e, 9) for e in table.errors}
    slow = next(seed for seed in range(50) if table.answers(seed)[best][0] > table.truth[best] + 0.05)
    search = search_of("random", False, whole=True)
    replay = replays.replay(table, search, slow)
    assert sorted(replay.tried) == list(range(SIZE)) and 0 < len(replay.confirmed) <= 5
    assert replay.regret_confirmed(table, 0) == replay.regret(table, SIZE)
    (row,) = report.rows_of(table, [replay])
    assert row.confirmed == {n: (replay.regret_confirmed(table, n),) for n in (0, 3, 5)}
    early = dataclasses.replace(replay, named=(1,), confirmed=(2, best))
    assert [early.regret_confirmed(table, n) for n in (0, 1, 3)] == [*map(table.regret, (1, 2)), 0.0]


def test_a_search_that_is_not_installed_is_no_proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuner, replays = module("tuner"), module("tuner_replay")
    found = replays.replay(made(), search_of("exhaustive", True, whole=True), 0)
    monkeypatch.setattr(tuner, "missing", lambda name: ["deephyper"] if name == "deephyper" else [])
    monkeypatch.setattr(tuner, "replay_all", lambda *arguments: [found])
    made().write(tmp_path / "table.json")
    given = argparse.Namespace(folder=tmp_path, space="two-cores", seeds=1)
    proof = tuner.Proof(given)
    proof.replay()
    (fails,) = proof.fails
    assert "deephyper" in fails


# -- for real ----------------------------------------------------------------------------------------------------------

TINY = """
title = "tiny"
flags = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "2", "--seq-length", "32",
         "--vocab-size", "127", "--tokenizer-type", "NullTokenizer", "--mock-data", "--num-workers", "0",
         "--global-batch-size", "4", "--lr", "1e-3"]
[parameters]
pp = [1, 2]
mbs = [1, 2]
[trial]
iterations = 2
warm_up = 1
"""


def test_all_stages_with_real_trials(tmp_path: Path) -> None:
    """Four layouts on two processes; a limit may fail among so few, and then the exit code says so."""
    (tmp_path / "tiny.toml").write_text(TINY)
    command = [sys.executable, str(ROOT / "benchmarks" / "tuner.py"), "--folder", str(tmp_path / "proof"), "--space",
               str(tmp_path / "tiny.toml"), "--processes", "2", "--minutes", "0.05", "--passes", "1",
               "--seeds", "1"]  # fmt: skip
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode in (0, 1), found.stdout + found.stderr
    table = module("tuner_table").Table.read(tmp_path / "proof" / "table.json")
    assert len(table.candidates) == 4 and all(map(math.isfinite, table.truth))
    assert all(len(measured.steps_s) == 2 for measured in table.passes[0].values())
    figures = json.loads((tmp_path / "proof" / "figures.json").read_text())
    assert set(figures["stages"]) == {"calibrate", "sweep", "replay", "live"}
    assert [len(figures[name]["tried"]) for name in ("live-prior", "live-no-prior")] == [1, 2]
    (whole,) = [row for row in figures["replay"] if row["search"] == "random"]
    assert whole["tried"] == 4 and whole["trials"][0] is not None
