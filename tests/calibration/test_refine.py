"""Refinement by runs, on made-up metrics files whose times are known multiples of the estimate's."""
from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.calibration.refine import messages_s, read_run, refined, render
from megatron.config import Config
from megatron.errors import DataError
from megatron.planning.cluster import load_cluster
from megatron.planning.timing import estimate

FRONTIER = load_cluster("frontier")
MODEL: dict[str, Any] = dict(
    num_layers=8, hidden_size=2048, num_attention_heads=16, seq_length=2048, vocab_size=50257, global_batch_size=16,
    fp16=True, world_size=8,
)
QUIET = Config.create(**MODEL)
TALKING = Config.create(**MODEL, tensor_model_parallel_size=8, sequence_parallel=True, tp_comm_overlap=False)


def metrics(path: Path, config: Config, passes: float, rest: float, **changes: Any) -> Path:
    """A run of six steps, of which the first three take ten times as long."""
    records: list[dict[str, Any]] = [{"event": "start", "iteration": 0, "config": config.to_dict()}]
    for i in range(1, 7):
        slow = 10.0 if i <= 3 else 1.0
        times = {"forward-backward": {"min": 1.0, "max": 1e3 * passes * slow}, "optimizer": {"min": 1.0, "max": 2.0}}
        records.append({
            "event": "iteration", "iteration": i, "step_time_s": slow * (passes + rest), "skipped": 0,
            "global_batch_size": config.batch.global_batch_size, "times_ms": times, **changes,
        })  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n")
    return path


def test_one_run_corrects_everything_to_what_it_took(tmp_path: Path) -> None:
    found = estimate(QUIET, FRONTIER)
    passes, rest = found.run.makespan, found.seconds - found.run.makespan
    path = metrics(tmp_path / "metrics.jsonl", QUIET, 1.3 * passes, 1.3 * rest)
    cluster, outcome = refined(FRONTIER, [path])
    assert outcome.factors.compute == outcome.factors.messages == pytest.approx(1.3)
    assert outcome.factors.rest == pytest.approx(1.3, rel=0.02)
    (row,) = outcome.runs
    assert row.run.seconds == pytest.approx(1.3 * found.seconds) and row.before == found.seconds
    assert row.after == pytest.approx(1.3 * found.seconds, rel=0.01)
    before, after = FRONTIER.compute.figures["products.float16"], cluster.compute.figures["products.float16"]
    assert [point[-1] for point in after.points] == pytest.approx([point[-1] / 1.3 for point in before.points])
    assert after.basis == before.basis and "times 1.300 by the step times of 1 run(s)" in after.source
    assert cluster.nic_gb_per_s == pytest.approx(25 / 1.3)
    assert cluster.compute.figures["hop_within_s"].value == pytest.approx(
        1.3 * FRONTIER.compute.figures["hop_within_s"].value
    )
    assert "1.300 for computations" in render(outcome) and "-23.1 %" in render(outcome)


def test_runs_with_other_shares_of_messages_tell_the_factors_apart(tmp_path: Path) -> None:
    paths = []
    for name, config in (("quiet", QUIET), ("talking", TALKING)):
        found = estimate(config, FRONTIER)
        sent = messages_s(found)
        passes = 1.2 * (found.run.makespan - sent) + 2.0 * sent
        rest = found.seconds - found.run.makespan
        paths.append(metrics(tmp_path / name / "metrics.jsonl", config, passes, rest))
    _, outcome = refined(FRONTIER, [path.parent for path in paths])
    assert outcome.factors.compute == pytest.approx(1.2) and outcome.factors.messages == pytest.approx(2.0)
    assert outcome.factors.runs == 2


def test_the_last_start_and_steady_steps_with_the_full_batch_count(tmp_path: Path) -> None:
    path = metrics(tmp_path / "metrics.jsonl", QUIET, 2.0, 0.5)
    run = read_run(path)
    assert (run.passes, run.rest) == (2.0, 0.5)
    again = path.read_text() + metrics(tmp_path / "later.jsonl", QUIET, 3.0, 1.0).read_text()
    path.write_text(again)
    assert read_run(path).passes == 3.0


def test_what_is_no_metrics_file_of_a_long_enough_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none.jsonl: No such file"):
        read_run(tmp_path / "none.jsonl")
    (tmp_path / "log.txt").write_text("hello\n")
    with pytest.raises(DataError, match="no record of a start"):
        read_run(tmp_path / "log.txt")
    skipped = metrics(tmp_path / "skipped.jsonl", QUIET, 1.0, 1.0, skipped=1)
    with pytest.raises(DataError, match=r"0 record\(s\) of steps with the full batch after the first 3: at least 3"):
        read_run(skipped)
    path = metrics(tmp_path / "untimed.jsonl", QUIET, 1.0, 1.0)
    path.write_text(path.read_text().replace("times_ms", "other"))
    with pytest.raises(DataError, match="run with --timing-log-level 1"):
        read_run(path)


CONFIGS = [
    QUIET, TALKING,
    *(Config.create(**MODEL, tensor_model_parallel_size=tp, micro_batch_size=mbs)
      for tp, mbs in ((2, 1), (4, 1), (2, 2), (4, 2), (8, 2), (8, 1))),
]  # fmt: skip


def noisy(
    folder: Path, compute: float, messages: float, noise: float, disturbed: tuple[int, ...], seed: int
) -> list[Path]:
    """Runs of all configurations, twice, whose parts take known multiples and a little more or less by chance; some
    took three times as long, because others used the machine."""
    chance, paths = random.Random(seed), []
    for i, config in enumerate([*CONFIGS, *CONFIGS]):
        found = estimate(config, FRONTIER)
        sent = messages_s(found)
        passes = compute * (found.run.makespan - sent) + messages * sent
        exposed = found.parts["data-parallel"]
        rest = found.seconds - found.run.makespan - exposed + messages * exposed
        slow = (3.0 if i in disturbed else 1.0) * math.exp(chance.gauss(0, noise))
        paths.append(metrics(folder / f"{i}" / "metrics.jsonl", config, slow * passes, slow * rest))
    return paths


@pytest.mark.parametrize("seed", range(3))
def test_disturbed_runs_among_many_do_not_decide(tmp_path: Path, seed: int) -> None:
    """Plain least squares of the same runs would be far off: shown by fitting them so."""
    paths = noisy(tmp_path, 1.2, 2.0, 0.01, (1, 5, 11), seed)
    _, outcome = refined(FRONTIER, paths)
    assert outcome.factors.compute == pytest.approx(1.2, rel=0.04)
    assert outcome.factors.messages == pytest.approx(2.0, rel=0.08)
    assert outcome.factors.rest == pytest.approx(1.0, rel=0.08)
    runs = [read_run(path) for path in paths]
    found = [estimate(run.config, FRONTIER) for run in runs]
    parts = np.array([[e.run.makespan - messages_s(e), messages_s(e)] for e in found])
    relative = parts / np.array([[run.passes] for run in runs])
    plain = np.linalg.lstsq(relative, np.ones(len(runs)), rcond=None)[0]
    assert max(abs(plain[0] / 1.2 - 1), abs(plain[1] / 2.0 - 1)) > 0.15


def test_factors_are_not_made_of_noise(tmp_path: Path) -> None:
    """Runs that scatter by 40 % around one factor of everything: plain least squares finds others in it."""
    ours, plain = [], []
    for seed in range(12):
        paths = noisy(tmp_path / f"{seed}", 1.5, 1.5, 0.4, (), seed)
        _, outcome = refined(FRONTIER, paths)
        ours.append(outcome.factors.messages / outcome.factors.compute)
        runs = [read_run(path) for path in paths]
        found = [estimate(run.config, FRONTIER) for run in runs]
        table = np.array([[e.run.makespan - messages_s(e), messages_s(e)] for e in found])
        a, b = np.linalg.lstsq(table / np.array([[r.passes] for r in runs]), np.ones(len(runs)), rcond=None)[0]
        plain.append(b / a)

    def good(ratios: list[float]) -> int:
        return sum(0.6 < ratio < 1 / 0.6 for ratio in ratios)

    assert good(ours) >= 9 > good(plain)


def test_messages_that_would_take_longer_than_what_they_are_a_part_of(tmp_path: Path) -> None:
    """The passes say that all is three times as slow, but what follows them takes less than its messages alone would
    then: the rest must not come out as nothing, and steps must be foretold."""
    paths = []
    for i, config in enumerate(CONFIGS):
        found = estimate(config, FRONTIER)
        sent, after = found.parts["data-parallel"], found.seconds - found.run.makespan
        if 3.0 * sent > 0.3 * after:  # more than one replica
            path = tmp_path / f"{i}" / "metrics.jsonl"
            paths.append(metrics(path, config, 3.0 * found.run.makespan, 0.3 * after))
    assert len(paths) >= 5
    _, outcome = refined(FRONTIER, paths)
    assert outcome.factors.rest > 0.2
    assert np.median([abs(row.after / row.run.seconds - 1) for row in outcome.runs]) < 0.1


def test_a_run_with_a_shorter_warm_up(tmp_path: Path) -> None:
    path = metrics(tmp_path / "metrics.jsonl", QUIET, 2.0, 0.5)
    start, *steps = map(json.loads, path.read_text().splitlines())
    later = [{**step, "iteration": step["iteration"] - 2} for step in steps[3:]]  # steps 2 to 4 of a shorter run
    path.write_text("".join(json.dumps(record) + "\n" for record in (start, *later)))
    with pytest.raises(DataError, match="after the first 3"):
        read_run(path)
    assert read_run(path, warm_up=1).seconds == pytest.approx(2.5)
