"""weak_scaling.sh, strong_scaling.sh and sweep_tp_pp_mbs.sh: their points, costs, and how points are run."""
from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.errors import ConfigError
from megatron.planning.cluster import load_cluster
from megatron.planning.experiments import runner as running
from megatron.planning.experiments import show
from megatron.planning.experiments.cost import START_UP_S, Cost, cost, pack
from megatron.planning.experiments.folder import PointFolder
from megatron.planning.experiments.points import KINDS, Point, Request, legal_replicas, plan
from megatron.planning.experiments.runner import Place, Runner
from megatron.training.micro_batches import BatchSchedule
from tests.helpers.launching import ROOT
from tests.tools.measured import paper_flops

FRONTIER = load_cluster("frontier")
SCRIPTS = ("weak_scaling.sh", "strong_scaling.sh", "sweep_tp_pp_mbs.sh")


def layouts(points: Sequence[Point]) -> list[tuple[int, int, int]]:
    """(GCDs, replicas, batch) of each point."""
    assert all(p.config is not None for p in points), [p.problem for p in points]
    return [
        (p.world, p.config.parallel.data_parallel_size, p.config.batch.global_batch_size) for p in points if p.config
    ]


# ---- the paper's experiments


def test_weak_scaling_is_the_papers() -> None:
    assert layouts(plan(Request("weak", "175b"))) == [(64 * r, r, 640 * r) for r in (1, 2, 4, 8, 16)]
    assert layouts(plan(Request("weak", "1t"))) == [(512 * r, r, 1600 * r) for r in (1, 2, 3, 4, 6)]


def test_strong_scaling_is_the_papers() -> None:
    assert layouts(plan(Request("strong", "175b"))) == [(64 * r, r, 8000) for r in (1, 2, 4, 8, 16)]
    assert layouts(plan(Request("strong", "1t"))) == [(512 * r, r, 8016) for r in (1, 2, 3, 4, 6)]


@pytest.mark.parametrize("kind", ["weak", "strong"])
@pytest.mark.parametrize("model", ["175b", "1t"])
def test_our_recipe_has_the_papers_devices_and_batches(kind: str, model: str) -> None:
    """Whatever a replica takes: the same GCDs, and as many sequences for each of them."""
    ours, theirs = (layouts(plan(Request(kind, model, recipe))) for recipe in ("frontier", "paper"))
    assert [(world, batch) for world, _, batch in ours] == [(world, batch) for world, _, batch in theirs]


def test_sweeps_vary_one_thing() -> None:
    fixed = {
        "tp": ("pp", "dp", "mbs", "batch"), "pp": ("tp", "dp", "mbs", "batch"), "pp-bubble": ("tp", "dp", "mbs"),
        "batch": ("tp", "pp", "dp", "mbs"), "micro-batch": ("tp", "pp", "dp", "batch"),
    }  # fmt: skip
    for kind, names in fixed.items():
        points = plan(Request(kind, "22b"))
        rows = []
        for point in points:
            assert point.config is not None, point.problem
            p, b = point.config.parallel, point.config.batch
            rows.append({
                "tp": p.tensor_model_parallel_size, "pp": p.pipeline_model_parallel_size, "dp": p.data_parallel_size,
                "mbs": b.micro_batch_size, "batch": b.global_batch_size, "m": point.config.num_micro_batches(),
            })  # fmt: skip
        assert all(len({row[name] for row in rows}) == 1 for name in names), kind
        assert len({tuple(row.values()) for row in rows}) == len(points) >= 4
        assert {row["dp"] for row in rows} == {2 if kind == "micro-batch" else 1}
        if kind == "pp-bubble":
            assert {row["m"] / row["pp"] for row in rows} == {16.0}
    assert all(p.config is not None for kind in fixed for p in plan(Request(kind, "1.4b")))


@pytest.mark.parametrize(("batch", "micro", "most"), [(8000, 1, 16), (8016, 1, 12), (8016, 2, 8), (640, 4, 40)])
def test_legal_replicas(batch: int, micro: int, most: int) -> None:
    whole = [n for n in range(1, most + 1) if any(n * micro * k == batch for k in range(1, batch + 1))]
    assert legal_replicas(batch, micro, most) == whole


def test_a_batch_that_does_not_divide_is_refused_not_rounded() -> None:
    points = plan(Request("strong", "1t", values=(4, 5, 6)))
    assert [p.problem is None for p in points] == [True, False, True]
    assert "8016 is not a multiple of" in str(points[1].problem)
    lines = show.remarks(points, {p.name: cost(p, FRONTIER) for p in points})
    assert any("divides over 1, 2, 3, 4, 6 replicas, not over 5 (would need 8015 or 8020)" in line for line in lines)
    assert any(line.startswith("gcds-02560 is refused: ") for line in lines)


def test_layouts_that_contradict_themselves_are_refused() -> None:
    for point, words in zip(
        plan(Request("tp", "22b", values=(5, 32))) + plan(Request("pp", "22b", values=(96, 12))),
        ("not a multiple of", "not a multiple of", "each stage needs a layer", "do not fill nodes"), strict=True,
    ):  # fmt: skip
        assert point.config is None and words in str(point.problem)


@pytest.mark.parametrize(("request_", "words"), [
    (Request("week", "175b"), "one of weak, strong"), (Request("weak", "175b", iterations=0), "at least 1"),
    (Request("weak", "175b", "ours"), "use paper or frontier"), (Request("weak", "1.4b"), "give --batch"),
    (Request("weak", "gpt-9000"), "is unknown"), (Request("weak", "175b", values=(0,)), "not at least 1"),
    (Request("weak", "175b", flags=("--lr", "x")), "--lr"),
])  # fmt: skip
def test_requests_that_make_no_sense(request_: Request, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(request_)


@pytest.mark.parametrize("kind", ["weak", "strong", "batch"])
def test_the_warm_up_takes_a_small_batch_and_measured_steps_the_full_one(kind: str) -> None:
    for point in plan(Request(kind, "175b" if kind != "batch" else "22b", warm_up=2, iterations=3)):
        assert point.config is not None
        batches, consumed, sizes = BatchSchedule.from_config(point.config), 0, []
        for _ in range(5):
            sizes.append(batches.global_batch_size(consumed))
            consumed += sizes[-1]
        full = point.config.batch.global_batch_size
        assert sizes[2:] == [full] * 3 and sizes[0] == sizes[1]
        # Enough micro-batches to fill the pipeline several times, or all of them.
        stages = point.config.parallel.pipeline_model_parallel_size
        assert point.config.num_micro_batches(sizes[0]) == min(4 * stages, point.config.num_micro_batches())
        assert point.config.batch.train_iters == 5


# ---- cost


def test_times_are_those_of_the_published_throughput() -> None:
    (point,) = plan(Request("weak", "175b", values=(2,), iterations=3, warm_up=0))
    found = cost(point, FRONTIER)
    seconds = paper_flops("175b", 1280) / (128 * 69.2e12)
    bubble = 15 / (640 + 15)
    assert found.bubble == pytest.approx(bubble) and found.iteration_s == pytest.approx(seconds / (1 - bubble))
    assert found.total_s == pytest.approx(START_UP_S + 3 * seconds / (1 - bubble))
    assert cost(point, FRONTIER, tflops=138.4).iteration_s == pytest.approx(seconds / (1 - bubble) / 2)


def test_points_that_outlast_a_small_job_are_named() -> None:
    """Up to 91 nodes a job may last 2 hours: too short for 8000 sequences of 175B on 8 and 16, and for 1T on 64."""
    too_long = {}
    for kind in ("weak", "strong"):
        for model in ("175b", "1t"):
            points = plan(Request(kind, model))
            costs = {p.name: cost(p, FRONTIER) for p in points}
            too_long[kind, model] = [p.nodes for p in points if not costs[p.name].fits_alone()]
            lines = "\n".join(show.remarks(points, costs))
            assert lines.count("in partition extended") == len(too_long[kind, model])
    assert too_long == {("weak", "175b"): [], ("weak", "1t"): [], ("strong", "175b"): [8, 16], ("strong", "1t"): [64]}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 100)), min_size=1, max_size=12), st.integers(1, 12),
    st.booleans(),
)  # fmt: skip
def test_packing_never_takes_more_nodes_than_there_are(
    sizes: list[tuple[int, int]], nodes: int, side_by_side: bool
) -> None:
    request = Request("weak", "tiny")
    points = [(Point(str(i), request, i, n, n, 1, ()), float(t)) for i, (n, t) in enumerate(sizes)]
    slots = pack(points, nodes, side_by_side=side_by_side)
    assert sorted(s.point.name for s in slots) == sorted(p.name for p, _ in points if p.nodes <= nodes)
    for slot in slots:
        at_once = [s for s in slots if s.start_s <= slot.start_s < s.end_s]
        assert sum(s.point.nodes for s in at_once) <= nodes
        assert side_by_side or len(at_once) == 1
    # No nodes rest while a waiting point fits on them: at most twice the best possible (Garey and Graham 1975).
    fitting = [(p.nodes, t) for p, t in points if p.nodes <= nodes]
    if side_by_side and fitting:
        best = max(max(t for _, t in fitting), sum(n * t for n, t in fitting) / nodes)
        assert max(s.end_s for s in slots) <= 2 * best


def _costs_row(kind: str, model: str) -> str:
    """A row of EXPERIMENTS.md's table of costs."""
    points = plan(Request(kind, model))
    costs = {p.name: cost(p, FRONTIER) for p in points}
    steps = [c.iteration_s or 0.0 for c in costs.values()]
    totals = [(p, costs[p.name].total_s or 0.0) for p in points]
    nodes = max(p.nodes for p in points)
    end_s = max(slot.end_s for slot in pack(totals, nodes))

    def span(values: Sequence[float]) -> str:
        low, high = f"{min(values):,.0f}", f"{max(values):,.0f}"
        return low if low == high else f"{low} to {high}"

    return (
        f"| {kind} {model} | {span([p.world for p in points])} | {span(steps)} | {nodes} | {int(end_s // 3600)} h "
        f"{round(end_s % 3600 / 60):02d} min | {nodes * end_s / 3600:,.0f} | "
        f"{sum(p.nodes * t for p, t in totals) / 3600:,.0f} |"
    )


def test_costs_in_the_documentation_are_those_of_a_dry_run() -> None:
    text = (ROOT / "examples/frontier/EXPERIMENTS.md").read_text()
    for kind, model in (("weak", "175b"), ("weak", "1t"), ("strong", "175b"), ("strong", "1t")):
        assert _costs_row(kind, model) in text
    for kind in ("tp", "pp", "pp-bubble", "batch", "micro-batch"):
        assert _costs_row(kind, "22b") in text


# ---- running points


class Programs:
    """Small programs in the place of training, by the name of the point."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, programs: dict[str, str]) -> None:
        self.calls: list[str] = []

        def command(point: Point, launcher: str, folder: PointFolder) -> list[str]:
            self.calls.append(point.name)
            end = point.request.iterations + point.request.warm_up
            done = json.dumps({"event": "end", "iteration": end, "reason": "done"})
            return [sys.executable, "-c", programs.get(point.name, "finish()").replace(
                "finish()", f"open({str(folder.metrics)!r}, 'w').write({done!r} + chr(10))"
            )]  # fmt: skip

        monkeypatch.setattr(running, "command", command)


def tiny(*values: int, nodes: int = 1) -> list[Point]:
    request = Request("weak", "tiny", values=values, iterations=2, warm_up=1)
    return [Point(f"p{v}", request, v, v, v * nodes, 1, ("--flag", str(v))) for v in values]


def run_points(root: Path, points: Sequence[Point], place: Place, **more: Any) -> Runner:
    """Nothing is known of times: the largest point goes first."""
    unknown = {p.name: Cost(None, None, None, None) for p in points}
    runner = Runner(root, place, unknown, say=lambda line: None, **more)
    runner.run(points)
    return runner


def test_a_point_that_fails_is_recorded_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = Programs(monkeypatch, {
        "p1": "print('RuntimeError: HIP out of memory. Tried to allocate 2 GiB'); raise SystemExit(1)",
        "p2": "import time; time.sleep(600)",
        "p3": "print('error: --lr is missing'); raise SystemExit(2)",
    })  # fmt: skip
    points = tiny(1, 2, 3, 4)
    costs = {p.name: Cost(None, 1.0 if p.name == "p2" else None, None, None) for p in points}
    monkeypatch.setattr(running, "limit_s", lambda cost, given: 2.0 if cost.total_s else 200.0)
    runner = Runner(tmp_path, Place("local"), costs, say=lambda line: None)
    runner.run(points)
    assert runner.outcome.done == ["p4"] and runner.outcome.failed == {
        "p1": "out of memory: RuntimeError: HIP out of memory. Tried to allocate 2 GiB",
        "p2": "stopped after its limit of 0:02", "p3": "refused: error: --lr is missing",
    }  # fmt: skip
    recorded = json.loads((tmp_path / "p1/result.json").read_text())
    assert (recorded["status"], recorded["reason"], recorded["exit_code"]) == (
        "failed", runner.outcome.failed["p1"], 1,
    )  # fmt: skip
    assert json.loads((tmp_path / "p2/point.json").read_text())["value"] == 2
    programs.calls.clear()
    again = run_points(tmp_path, points, Place("local"))
    assert programs.calls == [] and again.outcome.skipped == ["p4"] and set(again.outcome.failed) == {"p1", "p2", "p3"}
    Programs(monkeypatch, {})
    again = run_points(tmp_path, points, Place("local"), retry_failed=True)
    assert sorted(again.outcome.done) == ["p1", "p2", "p3"]
    assert "HIP out of memory" in (tmp_path / "p1/attempt-1/train.log").read_text()


def test_an_interrupted_point_runs_again_and_a_complete_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = Programs(monkeypatch, {
        "p2": "import os, signal, time; os.kill(os.getppid(), signal.SIGUSR1); time.sleep(600)",
    })  # fmt: skip
    points = tiny(1, 2, 3)
    before = signal.getsignal(signal.SIGUSR1)
    runner = run_points(tmp_path, points, Place("local"))
    assert runner.outcome.done == ["p3"] and set(runner.outcome.waiting) == {"p1", "p2"} and runner.outcome.resumable
    assert not (tmp_path / "p2/result.json").exists() and signal.getsignal(signal.SIGUSR1) is before
    programs = Programs(monkeypatch, {})
    runner = run_points(tmp_path, points, Place("local"))
    assert programs.calls == ["p2", "p1"] and runner.outcome.skipped == ["p3"]
    assert (tmp_path / "p2/attempt-1/train.log").exists()


def test_a_point_that_another_experiment_measures_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = Programs(monkeypatch, {})
    other = PointFolder(tmp_path, tiny(1)[0])
    other.claim.take(print)
    runner = run_points(tmp_path, tiny(1, 2), Place("local"))
    assert programs.calls == ["p2"] and runner.outcome.done == ["p2"]
    assert "in use by another run" in runner.outcome.waiting["p1"] and not runner.outcome.resumable
    other.claim.release()
    runner = run_points(tmp_path, tiny(1, 2), Place("local"))
    assert runner.outcome.done == ["p1"] and runner.outcome.skipped == ["p2"]
    assert not list(tmp_path.glob("*/.in_use*"))


def test_points_share_an_allocation_on_nodes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import os, time; time.sleep(0.5); "
        "print(os.environ['HOSTS'], os.environ['NODES'], os.environ['MASTER_PORT']); finish()"
    )
    hosts = ["n1", "n2", "n3", "n4"]
    for side_by_side in (True, False):
        Programs(monkeypatch, {f"p{n}": program for n in (1, 2, 3, 5)})
        root = tmp_path / str(side_by_side)
        runner = run_points(root, tiny(1, 2, 3, 5), Place("slurm", hosts, side_by_side))
        assert sorted(runner.outcome.done) == ["p1", "p2", "p3"]
        assert runner.outcome.waiting == {"p5": "needs 5 nodes, there are 4"} and not runner.outcome.resumable
        ran = []
        for number in (1, 2, 3):
            names, nodes, port = (root / f"p{number}/train.log").read_text().split()
            result = json.loads((root / f"p{number}/result.json").read_text())
            assert len(set(names.split(","))) == number == int(nodes) and set(names.split(",")) <= set(hosts)
            assert names.split(",") == result["hosts"]
            ran.append((result["started"], result["ended"], set(result["hosts"]), port))
        both = [(a, b) for i, a in enumerate(ran) for b in ran[:i] if a[0] < b[1] and b[0] < a[1]]
        assert all(not a[2] & b[2] and a[3] != b[3] for a, b in both)
        assert bool(both) is side_by_side


@pytest.mark.parametrize(("iteration", "reason"), [(2, "done"), (3, "signal 10"), (3, None)])
def test_a_metrics_file_that_ends_early_is_not_complete(tmp_path: Path, iteration: int, reason: str | None) -> None:
    (point,) = tiny(1)
    folder = PointFolder(tmp_path, point)
    folder.prepare()
    end = {"event": "end", "iteration": iteration, "reason": reason} if reason else {"event": "iteration"}
    folder.metrics.write_text(json.dumps(end) + "\n")
    assert not folder.complete() and folder.state() == "interrupted"
    folder.metrics.write_text(json.dumps({"event": "end", "iteration": 3, "reason": "done"}) + "\n")
    assert folder.complete() and folder.state() == "done"


def test_what_does_not_fit_into_the_time_left_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Programs(monkeypatch, {})
    (point,) = tiny(1)
    place = Place("slurm", ["n1"], time_left_s=lambda: 100.0)
    runner = Runner(tmp_path, place, {"p1": Cost(1.0, 3600.0, None, None)}, say=lambda line: None)
    runner.run([point])
    assert "1:40 are left" in runner.outcome.waiting["p1"] and runner.outcome.out_of_time
    assert not runner.outcome.resumable and not (tmp_path / "p1").exists()


def test_a_folder_of_another_point_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Programs(monkeypatch, {})
    (point,) = tiny(1)
    run_points(tmp_path, [point], Place("local"))
    other = Point("p1", point.request, 1, 1, 1, 1, ("--flag", "other"))
    with pytest.raises(ConfigError, match="holds a point with another 'flags'"):
        run_points(tmp_path, [other], Place("local"))


# ---- the scripts


def script(name: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SITE_", "MEGATRON_", "OUT"))}
    variables = {**kept, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run(
        ["bash", f"examples/frontier/{name}", *arguments], cwd=ROOT, env=variables, capture_output=True, text=True,
        timeout=400, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_dry_run_shows_points_and_costs(name: str, tmp_path: Path) -> None:
    done = script(name, "--dry-run", OUT=str(tmp_path / "runs"))
    assert done.returncode == 0, done.stderr
    kinds = {"weak_scaling.sh": ["weak"], "strong_scaling.sh": ["strong"]}.get(name, list(KINDS)[2:])
    model = "22b" if name.startswith("sweep") else "175b"
    for kind in kinds:
        assert f"{kind}-{model}-paper: 2 step(s) of warm-up and 3 measured" in done.stdout
    assert "node-hours" in done.stdout and not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_nothing_is_submitted_by_accident(name: str) -> None:
    done = script(name)
    assert done.returncode == 2 and "not inside an allocation" in done.stderr


def test_submission_asks_for_what_the_points_need(tmp_path: Path) -> None:
    """sbatch is a stub that notes its arguments: one job of the largest size, or one for each point."""
    stub = tmp_path / "bin/sbatch"
    stub.parent.mkdir()
    stub.write_text(f'#!/bin/bash\necho "$@" >>{tmp_path}/calls\n')
    stub.chmod(0o755)
    more = {"PATH": f"{stub.parent}:{os.environ['PATH']}", "OUT": str(tmp_path / "runs"), "MODEL": "1t"}
    assert script("strong_scaling.sh", SUBMIT="one", **more).returncode == 0
    path = f"{ROOT}/examples/frontier/strong_scaling.sh"
    assert (tmp_path / "calls").read_text() == f"-N 384 -t 12:00:00 {path}\n"
    (tmp_path / "calls").unlink()
    assert script("strong_scaling.sh", "--one-at-a-time", SUBMIT="each", **more).returncode == 0
    # 1T on 64 nodes takes longer than the 2 h of so small a job.
    expected = {
        64: "24:00:00 -p extended", 128: "06:00:00", 192: "12:00:00", 256: "12:00:00", 384: "12:00:00",
    }  # fmt: skip
    assert (tmp_path / "calls").read_text().splitlines() == [
        f"-N {n} -t {how} {path} --points gcds-{8 * n:05d} --one-at-a-time" for n, how in expected.items()
    ]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_small_experiment_runs_for_real_and_is_reported(tmp_path: Path) -> None:
    """Two points on one and two processes, a third that fails, then the same command again, then the report."""
    small = {
        "MODEL": "tiny", "LAUNCHER": "local", "VALUES": "1 2 3", "BATCH": "4", "ITERATIONS": "3", "WARM_UP": "1",
        "OUT": str(tmp_path),
    }  # fmt: skip
    flags = ("--", "--num-layers", "2", "--hidden-size", "32")
    done = script("strong_scaling.sh", *flags, **small)
    root = tmp_path / "strong-tiny"
    assert done.returncode == 1 and "2 point(s) done, 1 failed" in done.stdout, done.stdout + done.stderr
    assert "more processes than needed" in done.stdout
    again = script("strong_scaling.sh", *flags, **small)
    assert again.stdout.count("done already") == 2, again.stdout
    report = subprocess.run(
        [sys.executable, "tools/report_scaling.py", str(root), "--out", str(root / "report"), "--strict"],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert report.returncode == 0, report.stdout + report.stderr
    with open(root / "report/report.csv", newline="") as file:
        rows = {row["run"]: row for row in csv.DictReader(file)}
    one, two = rows["gcds-00001"], rows["gcds-00002"]
    assert (one["state"], two["state"], rows["gcds-00003"]["state"]) == ("valid", "valid", "failed")
    assert (one["layout"], two["layout"], two["global_batch"], two["steady_steps"]) == ("1x1x1", "1x1x2", "4", "3")
    expected = float(one["step_s"]) / (2 * float(two["step_s"]))
    assert float(two["efficiency"]) == pytest.approx(expected, rel=1e-12)
    assert (root / "report/strong_scaling.png").stat().st_size > 10_000
