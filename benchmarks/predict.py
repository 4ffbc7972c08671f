"""Calibrate this machine, predict step times of layouts not used in calibration, run, compare.

    python benchmarks/predict.py [--folder runs/predict] [--minutes 0.5] [--only 3 7] [--keep calibration runs]
    python benchmarks/predict.py --set gpu

There is one calibration for each number of processes (tools/calibrate.py: products, kernels,
messages, host; no layout is run), over the shapes of another model than the predicted ones. Then
each layout of predict_layouts.py is estimated before pretrain_gpt.py runs it, and the estimate is
compared with the median of its steady steps. This takes about twelve minutes on two quiet cores.
Reported are the median and the worst error, and the rank correlation (Spearman), over all layouts
and among those of one model with one batch, where it tests the choice of the best layout.

The speed of a virtual machine's cores varies with the load of its host. Therefore a product of
fixed size is timed before and after each calibration and each run. In a second column of errors,
each prediction is multiplied by the slowdown of the machine since its calibration; a run's own
times are not used for this.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from predict_layouts import CALIBRATED, GPU_CALIBRATED, GPU_LAYOUTS, LAYOUTS, TINY, Layout  # noqa: E402

from benchmarks.parity import train  # noqa: E402
from megatron.config.command_line import parse_plan  # noqa: E402
from megatron.metrics_file import read_records  # noqa: E402
from megatron.planner.cluster import load_cluster  # noqa: E402
from megatron.planner.processes import environment, gpus_here  # noqa: E402
from megatron.planner.timing import estimate  # noqa: E402

WARM_UP, STEPS = 3, 7
"""The first step overlaps nothing and makes memory; the next ones find it."""
LIMIT_S = 300.0
SETS = {
    "cpu": (CALIBRATED, LAYOUTS),
    "gpu": (GPU_CALIBRATED, GPU_LAYOUTS),
    "tiny": (CALIBRATED, TINY),
}


@dataclass(frozen=True)
class Row:
    """Seconds of a step. slower: time of a fixed product at the run over that at calibration."""

    layout: Layout
    predicted: float
    measured: float
    slower: float
    parts: dict[str, float]
    steps: list[float]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def error_at_speed(self) -> float:
        """Return the error if the machine was as fast as at the time of the run."""
        return self.predicted * self.slower / self.measured - 1


def calibrate(processes: int, minutes: float, path: Path, model: str = CALIBRATED) -> None:
    """Calibrate this machine with a number of processes, over the shapes of `model`."""
    command = [
        sys.executable,
        str(ROOT / "tools" / "calibrate.py"),
        "-o",
        str(path),
        "--processes",
        str(processes),
        "--minutes",
        str(minutes),
        *model.split(),
    ]
    env = environment(os.environ, 0, 1, 0)
    subprocess.run(command, cwd=ROOT, env=env, check=True)


def predict(layout: Layout, cluster: Path) -> tuple[float, dict[str, float]]:
    """Seconds of a step and their parts."""
    config = parse_plan([*layout.arguments, "--world-size", str(layout.processes)])
    found = estimate(config, load_cluster(cluster))
    return found.seconds, dict(found.parts)


def run(layout: Layout, folder: Path) -> None:
    """Train for some steps, with a metrics file in the folder."""
    steps = ["--train-iters", str(WARM_UP + STEPS)]
    train(
        folder / f"{layout.slug}.jsonl",
        [*layout.arguments, *steps],
        layout.processes,
        limit_s=LIMIT_S,
    )


def steps_of(metrics: Path) -> list[float]:
    """Seconds of the steady steps in a metrics file."""
    return [r["step_time_s"] for r in read_records(metrics) if r["event"] == "iteration"][WARM_UP:]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Correlation of the ranks."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [float(order.index(i)) for i in range(len(values))]

    return statistics.correlation(ranks(a), ranks(b))


def table(rows: Sequence[Row]) -> str:
    """Markdown: one row for each layout."""
    lines = [
        "| model | processes | layout | predicted ms | measured ms | error | machine slower | "
        "error at its speed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.layout.model} | {row.layout.processes} | {row.layout.name} | "
        f"{1e3 * row.predicted:.0f} | {1e3 * row.measured:.0f} | {100 * row.error:+.1f} % | "
        f"{row.slower:.2f} | {100 * row.error_at_speed:+.1f} % |"
        for row in rows
    ]
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """Median and worst error, and the ranking."""
    lines = [f"{len(rows)} layouts"]
    for name, error in (
        ("as predicted", Row.error.fget),
        ("at the machine's speed", Row.error_at_speed.fget),
    ):
        assert error is not None
        worst = max(rows, key=lambda row: abs(error(row)))
        median = statistics.median(abs(error(row)) for row in rows)
        where = f"({worst.layout.model}, {worst.layout.name})"
        lines.append(
            f"{name}: median error {100 * median:.1f} %, worst {100 * error(worst):+.1f} % {where}"
        )
    for kind in ("all", *dict.fromkeys(row.layout.model for row in rows)):
        same = [row for row in rows if kind in ("all", row.layout.model)]
        if len(same) > 2:
            measured = [row.measured for row in same]
            plain = spearman([row.predicted for row in same], measured)
            at_speed = spearman([row.predicted * row.slower for row in same], measured)
            lines.append(
                f"Spearman among the {len(same)} of {kind}: {plain:.3f}, at the machine's speed "
                f"{at_speed:.3f} (slowest {max(measured) / min(measured):.2f} times the fastest)"
            )
    return "\n".join(lines)


def probe(seconds: float = 0.6, device: str = "cpu") -> float:
    """Measure the current mean time of a fixed product on all cores, or on a GPU."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    size = 768 if device == "cpu" else 4096
    a, b, out = torch.ones(3, size, size, device=device).unbind()
    float(torch.mm(a, b, out=out)[0, 0])
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        float(torch.mm(a, b, out=out)[0, 0])  # waits for a GPU
        count += 1
    return (time.perf_counter() - begin) / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "predict")
    parser.add_argument(
        "--minutes", type=float, default=0.5, help="measuring time for each number of processes"
    )
    parser.add_argument(
        "--only", nargs="+", type=int, metavar="I", help="layouts by their index in the list"
    )
    parser.add_argument(
        "--set",
        choices=SETS,
        default="cpu",
        help="set of layouts; gpu: for all GPUs here; tiny: a smoke test",
    )
    parser.add_argument(
        "--keep",
        nargs="+",
        choices=("calibration", "runs"),
        default=[],
        help="reuse these from an earlier call in the folder",
    )
    parser.add_argument(
        "--fastest", action="store_true", help="compare with the fastest step, for a busy machine"
    )
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    model, layouts = SETS[arguments.set]
    device, most = ("cuda", gpus_here()) if arguments.set == "gpu" else ("cpu", 64)
    layouts = [layouts[i] for i in arguments.only] if arguments.only else layouts
    layouts = [layout for layout in layouts if layout.processes <= most]
    if not layouts:
        raise SystemExit(f"{most} GPU(s) here: none of these layouts can run")
    rows = []
    for processes in sorted({layout.processes for layout in layouts}):
        cluster = folder / f"{device}{processes}.toml"
        if "calibration" not in arguments.keep or not cluster.exists():
            before = probe(device=device)
            calibrate(processes, arguments.minutes, cluster, model)
            cluster.with_suffix(".speed").write_text(repr((before + probe(device=device)) / 2))
        then = float(cluster.with_suffix(".speed").read_text())
        for layout in (layout for layout in layouts if layout.processes == processes):
            seconds, parts = predict(layout, cluster)
            metrics = folder / f"{layout.slug}.jsonl"
            if "runs" not in arguments.keep or not metrics.exists():
                before = probe(device=device)
                run(layout, folder)
                metrics.with_suffix(".speed").write_text(repr((before + probe(device=device)) / 2))
            steps, now = steps_of(metrics), float(metrics.with_suffix(".speed").read_text())
            measured = min(steps) if arguments.fastest else statistics.median(steps)
            rows.append(Row(layout, seconds, measured, now / then, parts, steps))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
    print(f"\n{table(rows)}\n\n{summary(rows)}")
    (folder / "rows.json").write_text(json.dumps([_as_json(row) for row in rows], indent=1))


def _as_json(row: Row) -> dict[str, Any]:
    return {
        "model": row.layout.model,
        "layout": row.layout.name,
        "processes": row.layout.processes,
        "predicted_s": row.predicted,
        "measured_s": row.measured,
        "slower": row.slower,
        "steps_s": row.steps,
        "parts_s": row.parts,
    }


if __name__ == "__main__":
    main()
