"""Refinement by runs, on made-up metrics files whose times are known multiples of the estimate's."""
from __future__ import annotations

import functools
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.config import Config
from megatron.errors import DataError
from megatron.jobs.refine import Run, correct, fit, messages_s, read_run, refined
from megatron.planner.cluster import load_cluster
from megatron.planner.timing import Estimate, estimate

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
    folder = metrics(tmp_path / "run/metrics.jsonl", QUIET, 1.3 * passes, 1.3 * rest).parent
    (tmp_path / "failed").mkdir()
    cluster, factors, errors, left_out = refined(FRONTIER, [folder, tmp_path / "failed"])
    assert factors.compute == factors.messages == pytest.approx(1.3) and factors.rest == pytest.approx(1.3, rel=0.02)
    assert estimate(QUIET, cluster).seconds == pytest.approx(1.3 * found.seconds, rel=0.01)
    assert len(left_out) == 1 and "failed" in left_out[0] and errors.rows[0][2] == "-23.1 %"
    before, after = FRONTIER.compute.figures, cluster.compute.figures
    for name in ("products.float16", "memory.copy", "update_gb_per_s"):  # rates
        factor = factors.rest if name == "update_gb_per_s" else 1.3
        old, new = ([point[-1] for point in figures[name].points] for figures in (before, after))
        assert new == pytest.approx([rate / factor for rate in old]), name
        assert after[name].basis == before[name].basis and "1.3" in after[name].source
    for name, factor in (("hop_within_s", 1.3), ("kernel_s", 1.3), ("step_overhead_s", factors.rest)):  # seconds
        assert after[name].value == pytest.approx(factor * before[name].value), name
    assert cluster.nic_gb_per_s == pytest.approx(25 / 1.3)


def test_the_last_start_and_steady_steps_with_the_full_batch_count(tmp_path: Path) -> None:
    path = metrics(tmp_path / "metrics.jsonl", QUIET, 2.0, 0.5)
    run = read_run(path)
    assert (run.passes, run.rest) == (2.0, 0.5)
    path.write_text(path.read_text() + metrics(tmp_path / "later.jsonl", QUIET, 3.0, 1.0).read_text())
    assert read_run(tmp_path).passes == 3.0


def test_what_is_no_metrics_file_of_a_long_enough_run(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("hello\n")
    untimed = metrics(tmp_path / "untimed.jsonl", QUIET, 1.0, 1.0)
    untimed.write_text(untimed.read_text().replace("times_ms", "other"))
    forged = metrics(tmp_path / "forged.jsonl", QUIET, 1.0, 1.0)
    forged.write_text(re.sub(r'"max": [0-9.]+', '"max": "x"', forged.read_text()))
    skipped = metrics(tmp_path / "skipped.jsonl", QUIET, 1.0, 1.0, skipped=1)
    start, *steps = metrics(tmp_path / "short.jsonl", QUIET, 2.0, 0.5).read_text().splitlines()
    short = tmp_path / "short.jsonl"
    short.write_text("\n".join((start, *steps[:4])))
    for path, value in (
        (tmp_path / "none.jsonl", ""), (tmp_path / "log.txt", ""), (skipped, "0 "), (short, "1 "),
        (untimed, "--timing-log-level"), (forged, "--timing-log-level"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=f"{path.name}.*{value}"):
            read_run(path)


CONFIGS = [
    QUIET, TALKING,
    *(Config.create(**MODEL, tensor_model_parallel_size=tp, micro_batch_size=mbs)
      for tp, mbs in ((2, 1), (4, 1), (2, 2), (4, 2), (8, 2), (8, 1))),
]  # fmt: skip


@functools.cache
def estimates() -> list[Estimate]:
    return [estimate(config, FRONTIER) for config in CONFIGS]


def noisy(compute: float, messages: float, noise: float, disturbed: tuple[int, ...], seed: int) -> list[Run]:
    """Runs of all configurations, twice, whose parts take known multiples and a little more or less by chance; some
    took three times as long, because others used the machine."""
    chance, runs = random.Random(seed), []
    for i, found in enumerate([*estimates(), *estimates()]):
        sent, exposed = messages_s(found), found.parts["data-parallel"]
        passes = compute * (found.run.makespan - sent) + messages * sent
        rest = found.seconds - found.run.makespan - exposed + messages * exposed
        slow = (3.0 if i in disturbed else 1.0) * math.exp(chance.gauss(0, noise))
        runs.append(Run(str(i), found.config, slow * passes, slow * rest))
    return runs


def least_squares(runs: list[Run]) -> tuple[float, float]:
    """The factors that plain least squares finds in the same runs."""
    parts = np.array([[e.run.makespan - messages_s(e), messages_s(e)] for e in [*estimates(), *estimates()]])
    found = np.linalg.lstsq(parts / np.array([[run.passes] for run in runs]), np.ones(len(runs)), rcond=None)[0]
    return float(found[0]), float(found[1])


@pytest.mark.parametrize("seed", range(3))
def test_disturbed_runs_among_many_do_not_decide(seed: int) -> None:
    """Plain least squares of the same runs would be far off: shown by fitting them so."""
    runs = noisy(1.2, 2.0, 0.01, (1, 5, 11), seed)
    factors = fit(runs, [*estimates(), *estimates()])
    assert factors.compute == pytest.approx(1.2, rel=0.04)
    assert factors.messages == pytest.approx(2.0, rel=0.08)
    assert factors.rest == pytest.approx(1.0, rel=0.08)
    plain = least_squares(runs)
    assert max(abs(plain[0] / 1.2 - 1), abs(plain[1] / 2.0 - 1)) > 0.15


def test_factors_are_not_made_of_noise() -> None:
    """Runs that scatter by 40 % around one factor of everything: plain least squares finds others in it."""
    ours, plain = [], []
    for seed in range(12):
        runs = noisy(1.5, 1.5, 0.4, (), seed)
        factors, (a, b) = fit(runs, [*estimates(), *estimates()]), least_squares(runs)
        ours.append(factors.messages / factors.compute)
        plain.append(b / a)

    def good(ratios: list[float]) -> int:
        return sum(0.6 < ratio < 1 / 0.6 for ratio in ratios)

    assert good(ours) >= 9 > good(plain)


def test_messages_that_would_take_longer_than_what_they_are_a_part_of() -> None:
    """The passes say that all is three times as slow, but what follows them takes less than its messages alone would
    then: the rest must not come out as nothing, and steps must be foretold."""
    runs = []
    for config, found in zip(CONFIGS, estimates(), strict=True):
        sent, after = found.parts["data-parallel"], found.seconds - found.run.makespan
        if 3.0 * sent > 0.3 * after:  # more than one replica
            runs.append(Run("", config, 3.0 * found.run.makespan, 0.3 * after))
    assert len(runs) >= 5
    factors = fit(runs, [estimate(run.config, FRONTIER) for run in runs])
    machine = correct(FRONTIER, factors, {"float16"})
    assert factors.rest > 0.2
    assert np.median([abs(estimate(run.config, machine).seconds / run.seconds - 1) for run in runs]) < 0.1
