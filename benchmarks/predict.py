"""Calibrate this machine, predict step times of layouts not used in calibration, run, compare.

    python benchmarks/predict.py [--folder runs/predict] [--minutes 0.5] [--only 3 7] [--keep calibration runs]
    python benchmarks/predict.py --set gpu

There is one calibration for each number of processes (tools/calibrate.py: products, kernels,
messages, host; no layout is run), over the shapes of another model than the predicted ones. Then
each layout of predict_layouts.py is estimated before pretrain_gpt.py runs it, and the estimate is
compared with the median of its steady steps. This takes about twelve minutes on two quiet cores.
It reports the median and the worst error, and the rank correlation (Spearman) over all layouts and
among those of one model with one batch, where it tests the choice of the best layout.

The speed of a virtual machine's cores varies with the load of its host. Therefore a product of
fixed size is timed before and after each calibration and each run. In a second column of errors,
each prediction is multiplied by the slowdown of the machine since its calibration; a run's own
times are not used for this.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.predict_layouts import (
    CALIBRATED,
    GPU_CALIBRATED,
    GPU_LAYOUTS,
    LAYOUTS,
    TINY,
    PredictedLayout,
)
from benchmarks.shared import ROOT, Table, markdown, parser, train
from megatron.config.command_line import parse_plan
from megatron.metrics_file import read_records
from megatron.planner.cluster import load_cluster
from megatron.planner.subprocesses import environment, gpus_here
from megatron.planner.timing import estimate

WARM_UP = 3
STEPS = 7
"""Measured steps, after WARM_UP others, the first of which allocates memory for all."""
SETS = {
    "cpu": (CALIBRATED, LAYOUTS),
    "gpu": (GPU_CALIBRATED, GPU_LAYOUTS),
    "tiny": (CALIBRATED, TINY),
}


@dataclass(frozen=True)
class LayoutPrediction:
    """Prediction and measurement of a layout.

    predicted, measured  seconds of a step
    slower               time of a fixed product at the run over that at calibration
    parts                predicted seconds by part of a step
    steps                seconds of each steady step
    """

    layout: PredictedLayout
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
        """Return the error for a machine that was as fast at calibration as at the run."""
        return self.predicted * self.slower / self.measured - 1


def calibrate(processes: int, minutes: float, path: Path, model: str = CALIBRATED) -> None:
    """Calibrate this machine with a number of processes, over the shapes of `model`."""
    command = [sys.executable, str(ROOT / "tools" / "calibrate.py"), "-o", str(path)]
    command += ["--processes", str(processes), "--minutes", str(minutes), *model.split()]
    env = environment(os.environ, 0, 1, 0)
    subprocess.run(command, cwd=ROOT, env=env, check=True)


def predict(layout: PredictedLayout, cluster: Path) -> tuple[float, dict[str, float]]:
    """Return the predicted seconds of a step, and of its parts."""
    config = parse_plan([*layout.arguments, "--world-size", str(layout.processes)])
    estimated = estimate(config, load_cluster(cluster))
    return estimated.seconds, dict(estimated.breakdown)


def steps_of(metrics: Path) -> list[float]:
    """Return the seconds of the steady steps in a metrics file."""
    return [record["step_time_s"] for record in read_records(metrics, "iteration")][WARM_UP:]


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the correlation of the ranks."""

    def ranks(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        return [float(order.index(i)) for i in range(len(values))]

    return statistics.correlation(ranks(a), ranks(b))


def table(rows: Sequence[LayoutPrediction]) -> Table:
    """Return a table with a row for each layout."""
    head = "layout, model, processes, predicted ms, measured ms, error, machine slower, corrected error"
    lines = [head.split(", ")]
    for row in rows:
        milliseconds = [f"{1e3 * seconds:.0f}" for seconds in (row.predicted, row.measured)]
        errors = [f"{100 * error:+.1f} %" for error in (row.error, row.error_at_speed)]
        names = [row.layout.name, row.layout.model, str(row.layout.processes)]
        lines.append([*names, *milliseconds, errors[0], f"{row.slower:.2f}", errors[1]])
    return lines


def summary(rows: Sequence[LayoutPrediction]) -> str:
    """Return lines with the median and the worst error, and the rank correlations."""
    lines = [f"{len(rows)} layouts"]
    for name, error in (
        ("as predicted", attrgetter("error")),
        ("corrected for the machine's speed", attrgetter("error_at_speed")),
    ):
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
                f"Spearman among the {len(same)} of {kind}: {plain:.3f}, corrected for the "
                f"machine's speed {at_speed:.3f} (slowest {max(measured) / min(measured):.2f} "
                "times the fastest)"
            )
    return "\n".join(lines)


def probe(seconds: float = 0.6, device: str = "cpu") -> float:
    """Measure the current mean time of a fixed product on all cores, or on a GPU."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    size = 768 if device == "cpu" else 4096
    a, b, out = torch.ones(3, size, size, device=device).unbind()
    float(torch.mm(a, b, out=out)[0, 0])
    begin = time.perf_counter()
    count = 0
    while time.perf_counter() - begin < seconds:
        float(torch.mm(a, b, out=out)[0, 0])  # waits for a GPU
        count += 1
    return (time.perf_counter() - begin) / count


def main() -> None:
    made = parser(__doc__)
    add = made.add_argument
    add("--folder", type=Path, default=ROOT / "runs" / "predict")
    add("--minutes", type=float, default=0.5, help="measuring time for each number of processes")
    add("--only", nargs="+", type=int, metavar="I", help="layouts by their index in the list")
    sets = "set of layouts; gpu: for all GPUs here; tiny: a smoke test"
    add("--set", choices=SETS, default="cpu", help=sets)
    keep = "reuse these results of an earlier call, from the folder"
    add("--keep", nargs="+", choices=("calibration", "runs"), default=[], help=keep)
    options = made.parse_args()
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    model, layouts = SETS[options.set]
    device, most = ("cuda", gpus_here()) if options.set == "gpu" else ("cpu", 64)
    layouts = [layouts[i] for i in options.only] if options.only else layouts
    layouts = [layout for layout in layouts if layout.processes <= most]
    if not layouts:
        raise SystemExit(f"{most} GPU(s) here: none of these layouts can run")

    def timed(path: Path, kind: str, action: Callable[[], object]) -> float:
        """Run what writes a file; return the mean time of a product before and after."""
        speed = path.with_suffix(".speed")
        if kind not in options.keep or not path.exists():
            before = probe(device=device)
            action()
            speed.write_text(repr((before + probe(device=device)) / 2))
        return float(speed.read_text())

    rows = []
    length = ["--train-iters", str(WARM_UP + STEPS)]
    for processes in sorted({layout.processes for layout in layouts}):
        cluster = folder / f"{device}{processes}.toml"
        measure = partial(calibrate, processes, options.minutes, cluster, model)
        then = timed(cluster, "calibration", measure)
        for layout in (layout for layout in layouts if layout.processes == processes):
            seconds, seconds_of_parts = predict(layout, cluster)
            metrics = folder / f"{layout.slug}.jsonl"
            run = partial(train, metrics, [*layout.arguments, *length], processes)
            now = timed(metrics, "runs", run)
            steps = steps_of(metrics)
            rows.append(
                LayoutPrediction(
                    layout, seconds, statistics.median(steps), now / then, seconds_of_parts, steps
                )
            )
            print(markdown(table(rows[-1:]))[-1], flush=True)
    print("", *markdown(table(rows)), "", summary(rows), sep="\n")
    records = [{**asdict(row), "layout": f"{row.layout.model} {row.layout.name}"} for row in rows]
    (folder / "rows.json").write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
