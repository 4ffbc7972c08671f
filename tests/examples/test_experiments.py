"""Scaling scripts and sweep_tp_pp_mbs.sh: points, costs, and running the points.

The scaling scripts are weak_scaling.sh and strong_scaling.sh.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import sys
from typing import Any

import pytest

from megatron.data.file_lock import FolderClaim
from megatron.jobs import experiment as show
from megatron.jobs import runner as running
from megatron.jobs.experiment import (
    KINDS,
    Experiment,
    ExperimentRequest,
    Point,
    bubble_of,
    least_time_s,
    plan,
    priced,
    state_of,
)
from megatron.jobs.runner import START_UP_S, LaunchTarget, Runner
from megatron.planner.cluster import load_cluster
from megatron.training.run.schedules import BatchSchedule
from tests.examples.stubs import own_environment, shell
from tests.helpers.clock import VirtualClock
from tests.helpers.launching import ROOT
from tests.tools.measured import paper_flops

FRONTIER = load_cluster("frontier")


SCALED = list(itertools.product(("weak", "strong"), ("175b", "1t")))


def layouts(points):
    """Return (GCDs, replicas, batch) of each point."""
    assert all(p.config is not None for p in points), [p.problem for p in points]
    return [
        (p.world, p.config.parallel.data_parallel_size, p.config.batch.global_batch_size)
        for p in points
        if p.config
    ]


# ---- the paper's experiments


def test_scaling_is_the_papers():
    """Scaling points have the paper's devices and sequences, whatever a replica takes here."""
    for model, each, weak, strong, replicas in (
        ("175b", 64, 640, 8000, (1, 2, 4, 8, 16)),
        ("1t", 512, 1600, 8016, (1, 2, 3, 4, 6)),
    ):
        for kind, expected in (
            ("weak", [(each * r, r, weak * r) for r in replicas]),
            ("strong", [(each * r, r, strong) for r in replicas]),
        ):
            assert layouts(plan(ExperimentRequest(kind, model))) == expected
            ours = layouts(plan(ExperimentRequest(kind, model, "frontier")))
            assert [(world, batch) for world, _, batch in ours] == [
                (world, batch) for world, _, batch in expected
            ]


def test_a_replica_has_context_parallel_ranks_too():
    for model, flags, each in (
        ("tiny", ("--context-parallel-size", "2"), 2),
        ("llama-8b-1m-frontier", (), 256),
    ):
        points = plan(ExperimentRequest("weak", model, values=(2, 4), batch=4, flags=flags))
        assert layouts(points) == [(2 * each, 2, 8), (4 * each, 4, 16)]


def test_sweeps_vary_one_thing():
    fixed = {
        "tp": ("pp", "dp", "mbs", "batch"),
        "pp": ("tp", "dp", "mbs", "batch"),
        "pp-bubble": ("tp", "dp", "mbs"),
        "batch": ("tp", "pp", "dp", "mbs"),
        "micro-batch": ("tp", "pp", "dp", "batch"),
    }
    for kind, names in fixed.items():
        points = plan(ExperimentRequest(kind, "22b"))
        rows = []
        for point in points:
            assert point.config is not None, point.problem
            p = point.config.parallel
            b = point.config.batch
            rows.append(
                dict(
                    tp=p.tensor_model_parallel_size,
                    pp=p.pipeline_model_parallel_size,
                    dp=p.data_parallel_size,
                    mbs=b.micro_batch_size,
                    batch=b.global_batch_size,
                    m=point.config.num_micro_batches(),
                )
            )
        assert all(len({row[name] for row in rows}) == 1 for name in names), kind
        assert len({tuple(row.values()) for row in rows}) == len(points) >= 4
        assert {row["dp"] for row in rows} == {2 if kind == "micro-batch" else 1}
        if kind == "pp-bubble":
            assert {row["m"] / row["pp"] for row in rows} == {16.0}


def test_a_batch_that_does_not_divide_is_refused_not_rounded():
    points = plan(ExperimentRequest("strong", "1t", values=(4, 5, 6)))
    assert [p.problem is None for p in points] == [True, False, True]
    assert "8016" in str(points[1].problem)
    lines = show.remarks([priced(p, FRONTIER) for p in points], 384, FRONTIER)
    assert any(
        all(expected in line for expected in ("gcds-02560 ", "8015", "8020")) for line in lines
    )


@pytest.mark.parametrize("kind", ["weak", "strong", "batch"])
def test_the_warm_up_takes_a_small_batch_and_measured_steps_the_full_one(kind):
    for point in plan(
        ExperimentRequest(kind, "175b" if kind != "batch" else "22b", warm_up=2, iterations=3)
    ):
        assert point.config is not None
        batches = BatchSchedule.from_config(point.config)
        consumed = 0
        sizes = []
        for _ in range(5):
            sizes.append(batches.global_batch_size(consumed))
            consumed += sizes[-1]
        full = point.config.batch.global_batch_size
        assert sizes[2:] == [full] * 3 and sizes[0] == sizes[1]
        # Enough micro-batches to fill the pipeline several times, or all of them.
        stages = point.config.parallel.pipeline_model_parallel_size
        assert point.config.num_micro_batches(sizes[0]) == min(
            4 * stages, point.config.num_micro_batches()
        )
        assert point.config.batch.train_iters == 5


# ---- cost


def test_times_are_those_of_the_published_throughput():
    (point,) = plan(ExperimentRequest("weak", "175b", values=(2,), iterations=3, warm_up=0))
    costs = priced(point, FRONTIER)
    seconds = paper_flops("175b", 1280) / (128 * 69.2e12)
    bubble = 15 / (640 + 15)
    assert point.config is not None and bubble_of(point.config) == pytest.approx(bubble)
    assert costs.iteration_s == pytest.approx(seconds / (1 - bubble))
    assert costs.total_s == pytest.approx(START_UP_S + 3 * seconds / (1 - bubble))
    assert priced(point, FRONTIER, tflops=138.4).iteration_s == pytest.approx(
        seconds / (1 - bubble) / 2
    )


def _costs_row(kind, model):
    """Return a row of EXPERIMENTS.md's table of costs."""
    points = [priced(p, FRONTIER) for p in plan(ExperimentRequest(kind, model))]
    steps = [p.iteration_s or 0.0 for p in points]
    totals = [(p.nodes, p.total_s or 0.0) for p in points]
    nodes = max(p.nodes for p in points)
    least_s = least_time_s(totals, nodes)

    def span(values):
        low = f"{min(values):,.0f}"
        high = f"{max(values):,.0f}"
        return low if low == high else f"{low} to {high}"

    return (
        f"| {kind} {model} | {span([p.world for p in points])} | {span(steps)} | {nodes} | "
        f"{int(least_s // 3600)} h {round(least_s % 3600 / 60):02d} min | "
        f"{nodes * least_s / 3600:,.0f} | {sum(n * t for n, t in totals) / 3600:,.0f} |"
    )


def test_costs_in_the_documentation_are_those_of_a_dry_run():
    text = (ROOT / "examples/frontier/EXPERIMENTS.md").read_text()
    for kind, model in SCALED:
        assert _costs_row(kind, model) in text
    for kind in ("tp", "pp", "pp-bubble", "batch", "micro-batch"):
        assert _costs_row(kind, "22b") in text


# ---- running points


class Runs:
    """Stand-in for runs of points, without processes.

    Each takes five virtual seconds, then ends as `ends` says by the point's name: exit codes (no
    code: success, with metrics) and a log; None: never. `steps` has the name, both ends and the
    hosts of each run.
    """

    def __init__(self, monkeypatch, ends=None):
        self.clock = VirtualClock()
        self.calls = []
        self.ends = ends or {}
        self.steps: list[tuple[str, float, float, Any]] = []
        monkeypatch.setattr(
            running, "start_here", lambda words, count, folder, _: FakeRun(self, folder, None)
        )
        monkeypatch.setattr(
            running, "start_step", lambda words, step, folder, _: FakeRun(self, folder, step)
        )

    def run(
        self,
        root,
        points,
        target=LaunchTarget("local"),  # noqa: B008
        left_s=lambda: None,
        **more,
    ):
        """Run the points; while no times are known, the largest one goes first."""
        self.calls.clear()
        experiment = Experiment(root, points, say=lambda line: None, **{"limit_s": None, **more})
        clock = self.clock
        experiment.run(Runner(target, print, left_s=left_s, clock=clock, sleep=clock.sleep))
        return experiment


class FakeRun:
    def __init__(self, runs, folder, step):
        self.folder = folder
        self.runs = runs
        self.step = step
        self.begun = runs.clock()
        self.stopped = False
        self.exit_codes = None
        runs.calls.append(folder.name)
        self.end = runs.ends.get(folder.name, (0, ""))
        (folder / "train.log").write_text(self.end[1] if self.end else "")

    def poll(self):
        over = self.end and self.runs.clock() > self.begun + 5
        if self.exit_codes is None and (self.stopped or over):
            self.exit_codes = [] if self.stopped else [self.end[0]]
            self.runs.steps.append((self.folder.name, self.begun, self.runs.clock(), self.step))
            if self.exit_codes == [0]:
                (self.folder / "metrics.jsonl").write_text(END)
        return self.exit_codes is not None

    def stop(self):
        self.stopped = True

    kill = stop


END = '{"event": "end", "iteration": 3, "reason": "done"}\n'


def tiny(*values):
    request = ExperimentRequest("weak", "tiny", values=values, iterations=2, warm_up=1)
    return [Point(f"p{v}", request, v, v, v, ("--flag", str(v))) for v in values]


def test_a_point_that_fails_is_recorded_and_the_next_one_runs(tmp_path, monkeypatch):
    runs = Runs(
        monkeypatch, {"p1": (1, "RuntimeError: HIP-OOM"), "p2": None, "p3": (2, "error: --lr")}
    )
    points = tiny(1, 2, 3, 4)
    outcome = runs.run(tmp_path, points, limit_s=120.0)
    assert [*outcome.reasons("done")] == ["p4"] and [name for name, *_ in runs.steps] == [
        "p4",
        "p3",
        "p2",
        "p1",
    ]
    for name, words in (("p3", "--lr"), ("p2", "2:00"), ("p1", "HIP-OOM")):
        assert words in str(outcome.reasons("failed")[name])
    (took,) = (end - begun for name, begun, end, _ in runs.steps if name == "p2")
    assert took == pytest.approx(120, abs=1)
    recorded = json.loads((tmp_path / "p1/result.json").read_text())
    reason = outcome.reasons("failed")["p1"]
    assert recorded.items() >= dict(status="failed", reason=reason, exit_code=1).items()
    assert json.loads((tmp_path / "p2/point.json").read_text())["value"] == 2
    resumed = runs.run(tmp_path, points)
    assert (runs.calls, [*resumed.reasons("done")]) == ([], ["p4"])
    assert set(resumed.reasons("failed")) == {"p1", "p2", "p3"}
    resumed = Runs(monkeypatch).run(tmp_path, points, retry_failed=True)
    assert sorted(resumed.finished) == ["p1", "p2", "p3"]
    assert "HIP-OOM" in (tmp_path / "p1/attempt-1/train.log").read_text()


def test_an_interrupted_point_runs_again_and_a_complete_one_does_not(tmp_path, monkeypatch):
    runs = Runs(monkeypatch, {"p2": None})
    points = tiny(1, 2, 3)
    before = signal.getsignal(signal.SIGUSR1)
    runs.clock.at(30, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    outcome = runs.run(tmp_path, points)
    assert outcome.finished == ["p3"] and set(outcome.waiting) == {"p1", "p2"} and outcome.resumable
    assert not (tmp_path / "p2/result.json").exists() and signal.getsignal(signal.SIGUSR1) is before
    runs = Runs(monkeypatch)
    assert runs.run(tmp_path, points).finished == ["p2", "p1"] and runs.calls == ["p2", "p1"]
    assert (tmp_path / "p2/attempt-1/train.log").exists()


def test_a_point_that_another_experiment_measures_is_left_to_it(tmp_path, monkeypatch):
    runs = Runs(monkeypatch)
    claim = FolderClaim(tmp_path / "p1", "the point")
    claim.take(print)
    outcome = runs.run(tmp_path, tiny(1, 2))
    assert (outcome.finished, set(outcome.waiting), outcome.resumable) == (["p2"], {"p1"}, False)
    claim.release()
    outcome = runs.run(tmp_path, tiny(1, 2))
    assert outcome.finished == ["p1"] and set(outcome.reasons("done")) == {"p1", "p2"}
    assert not list(tmp_path.glob("*/.in_use*"))


def test_what_does_not_fit_into_the_time_left_is_not_started(tmp_path, monkeypatch):
    target = LaunchTarget("slurm", ("n1",))
    (point,) = tiny(1)
    long = dataclasses.replace(point, iteration_s=1.0, total_s=3600.0)
    outcome = Runs(monkeypatch).run(tmp_path, [long], target, left_s=lambda: 100.0)
    assert "1:40" in outcome.waiting["p1"] and outcome.out_of_time
    assert not outcome.resumable and not (tmp_path / "p1").exists()


def test_a_metrics_file_that_ends_early_is_not_complete(tmp_path):
    (point,) = tiny(1)
    assert state_of(tmp_path, point)[0] == ""
    for end, state in (
        (END.replace("3", "2"), "interrupted"),
        (END.replace("done", "signal 10"), "interrupted"),
        ('{"event": "iteration"}\n', "interrupted"),
        (END, "done"),
    ):
        (tmp_path / "metrics.jsonl").write_text(end)
        assert state_of(tmp_path, point)[0] == state


# ---- the scripts


def script(name, *arguments, **environ):
    variables = {**own_environment(), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environ}
    words = "bash", f"examples/frontier/{name}", *arguments
    return shell(*words, cwd=ROOT, env=variables, timeout=400)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("weak_scaling.sh", ["weak-175b"]),
        ("strong_scaling.sh", ["strong-175b"]),
        ("sweep_tp_pp_mbs.sh", [f"{kind}-22b" for kind in list(KINDS)[2:]]),
    ],
)
def test_a_dry_run_shows_points_and_costs_and_nothing_is_submitted_by_accident(
    name, kinds, tmp_path
):
    """A dry run shows points and costs, and nothing is submitted by accident.

    The planner is a stub that prints its arguments.
    """
    planner = tmp_path / "planner"
    planner.write_text('#!/bin/bash\nshift\nprintf "%s|" "$@"; echo\n')
    planner.chmod(0o755)
    done = script(name, "--dry-run", PYTHON=str(planner), OUT=str(tmp_path / "runs"), BATCH="256")
    assert done.returncode == 0, done.stderr
    for line, kind in zip(done.stdout.splitlines(), kinds, strict=True):
        words = line.split("|")
        options = dict(itertools.pairwise(words))
        assert f"{words[0]}-{options['--preset']}" == kind and words[-2] == "--dry-run"
        assert options["--out"] == f"{tmp_path}/runs/{kind}-{options['--recipe']}"
        # the tool refuses the size that varies
        assert options.get("--batch") == (None if words[0] == "batch" else "256")
    done = script(name, PYTHON=str(planner))
    assert (done.returncode, done.stdout) == (2, "") and done.stderr


@pytest.mark.slow
def test_submission_asks_for_what_the_points_need(tmp_path):
    """Submission asks for one job of the largest size, or one for each point, failed ones included.

    A stub of sbatch notes its arguments.
    """
    stub = tmp_path / "bin/sbatch"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/bash\necho "$@" >>{tmp_path}/calls\n')
    stub.chmod(0o755)
    more = {
        "PATH": f"{stub.parent}:{os.environ['PATH']}",
        "OUT": str(tmp_path / "runs"),
        "MODEL": "1t",
    }
    assert script("strong_scaling.sh", SUBMIT="one", **more).returncode == 0
    path = f"{ROOT}/examples/frontier/strong_scaling.sh"
    assert (tmp_path / "calls").read_text() == f"-N 384 -t 12:00:00 {path}\n"
    (tmp_path / "calls").unlink()
    failed = tmp_path / "runs/strong-1t-paper/gcds-00512/result.json"
    failed.parent.mkdir(parents=True)
    failed.write_text('{"status": "failed", "kind": "crash", "reason": "node lost"}')
    more |= {"SUBMIT": "each", "RETRY_FAILED": "1"}
    assert script("strong_scaling.sh", "--one-at-a-time", **more).returncode == 0
    # 1T on 64 nodes takes longer than the 2 h of such a small job.
    expected = {
        64: "24:00:00 -p extended",
        128: "06:00:00",
        192: "12:00:00",
        256: "12:00:00",
        384: "12:00:00",
    }
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"-N {n} -t {how} {path} --points gcds-{8 * n:05d} --one-at-a-time"
        for n, how in expected.items()
    ]
