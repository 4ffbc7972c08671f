"""Refinement by runs: made-up metrics files with times at known multiples of the estimate's."""

import functools
import json
import math
import random
import re

import pytest

from megatron.config import Config
from megatron.errors import DataError
from megatron.jobs.refine import RefinementRun, fit, messages_s, read_run, refined
from megatron.planner.cluster import load_cluster
from megatron.planner.timing import estimate
from tests.tools import measured

FRONTIER = load_cluster("frontier")
MODEL = dict(
    num_layers=8,
    hidden_size=2048,
    num_attention_heads=16,
    seq_length=2048,
    vocab_size=50257,
    global_batch_size=16,
    fp16=True,
    world_size=8,
)
QUIET = Config.create(**MODEL)
TALKING = Config.create(
    **MODEL, tensor_model_parallel_size=8, sequence_parallel=True, tp_comm_overlap=False
)


def metrics(path, config, seconds, **changes):
    """Write a run of six steps, of which the first three take ten times as long."""
    start, *steps, _ = measured.records(config.to_dict(), [10 * seconds] * 3 + [seconds] * 3)
    written = [start, *({**step, **changes} for step in steps)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(record)}\n" for record in written))
    return path


def test_one_run_corrects_everything_to_what_it_took(tmp_path):
    estimated = estimate(QUIET, FRONTIER)
    folder = metrics(tmp_path / "run/metrics.jsonl", QUIET, 1.3 * estimated.seconds).parent
    (tmp_path / "failed").mkdir()
    cluster, factors, errors, left_out = refined(FRONTIER, [folder, tmp_path / "failed"])
    assert factors == pytest.approx((1.3, 1.3))
    assert estimate(QUIET, cluster).seconds == pytest.approx(1.3 * estimated.seconds, rel=0.01)
    assert len(left_out) == 1 and "failed" in left_out[0] and errors.rows[0][2] == "-23.1 %"
    before = FRONTIER.compute
    after = cluster.compute
    for name in ("products.float16", "memory.copy", "update_gb_per_s"):  # rates
        old, new = ([point[-1] for point in figures[name].points] for figures in (before, after))
        assert new == pytest.approx([rate / 1.3 for rate in old]), name
        assert after[name].basis == before[name].basis and "1.3" in after[name].source
    for name in ("hop_within_s", "kernel_s", "step_overhead_s"):  # seconds
        assert after[name].value == pytest.approx(1.3 * before[name].value), name
    assert cluster.nic_gb_per_s == pytest.approx(25 / 1.3)


def test_the_last_start_and_steady_steps_with_the_full_batch_count(tmp_path):
    path = metrics(tmp_path / "metrics.jsonl", QUIET, 2.5)
    assert read_run(path).seconds == 2.5
    path.write_text(path.read_text() + metrics(tmp_path / "later.jsonl", QUIET, 4.0).read_text())
    assert read_run(tmp_path).seconds == 4.0


def test_what_is_no_metrics_file_of_a_long_enough_run(tmp_path):
    (tmp_path / "log.txt").write_text("hello\n")
    forged = metrics(tmp_path / "forged.jsonl", QUIET, 2.0)
    forged.write_text(re.sub(r'"step_time_s": [0-9.]+', '"step_time_s": "x"', forged.read_text()))
    skipped = metrics(tmp_path / "skipped.jsonl", QUIET, 2.0, skipped=1)
    start, *steps = metrics(tmp_path / "short.jsonl", QUIET, 2.5).read_text().splitlines()
    short = tmp_path / "short.jsonl"
    short.write_text("\n".join((start, *steps[:4])))
    for path, value in (
        (tmp_path / "none.jsonl", ""),
        (tmp_path / "log.txt", ""),
        (skipped, "no steady step"),
        (short, "1 steady"),
        (forged, "step_time_s"),
    ):
        with pytest.raises(DataError, match=f"{path.name}.*{value}"):
            read_run(path)


CONFIGS = [
    QUIET,
    TALKING,
    *(
        Config.create(**MODEL, tensor_model_parallel_size=tp, micro_batch_size=mbs)
        for tp, mbs in ((2, 1), (4, 1), (2, 2), (4, 2), (8, 2), (8, 1))
    ),
]


@functools.cache
def estimates():
    return [estimate(config, FRONTIER) for config in CONFIGS]


def noisy(seed):
    """Return two runs of each configuration: 1.2 times the work, 2 times the messages, 1 % of noise.

    Three took three times as long, because others used the machine.
    """
    chance = random.Random(seed)
    runs = []
    for i, estimated in enumerate([*estimates(), *estimates()]):
        sent = messages_s(estimated)
        slow = (3.0 if i in (1, 5, 11) else 1.0) * math.exp(chance.gauss(0, 0.01))
        seconds = slow * (1.2 * (estimated.seconds - sent) + 2 * sent)
        runs.append(RefinementRun(str(i), estimated.config, seconds))
    return runs


@pytest.mark.parametrize("seed", range(3))
def test_disturbed_runs_among_many_do_not_decide(seed):
    """A few disturbed runs among many have no effect."""
    runs = noisy(seed)
    factors = fit(runs, [*estimates(), *estimates()])
    assert factors[0] == pytest.approx(1.2, rel=0.04)
    assert factors[1] == pytest.approx(2.0, rel=0.08)


def test_runs_of_another_machine_correct_nothing(tmp_path):
    with pytest.raises(DataError, match="not from this machine"):
        refined(FRONTIER, [metrics(tmp_path / "metrics.jsonl", QUIET, 1e3)])
