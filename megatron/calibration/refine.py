"""Correct the description of a machine by runs on it: the times of their parts against the estimate of the same steps.

A run's passes take C + M seconds by the estimate, computations and bubble and messages, and T by its timers; the rest
of a step takes R' where the estimate says R. Factors of computing and of messages are the least squares of
T = a C + b M where runs tell the two apart, else a = b = T / (C + M); the factor of the rest makes R be R'.
Rates are divided by their factor and seconds multiplied, so that the estimate of the same runs comes out as measured.
"""
from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.config import Config
from megatron.errors import ConfigError, DataError
from megatron.planning.cluster import Cluster
from megatron.planning.compute import Figure, assumed_figures
from megatron.planning.metrics_file import read_records
from megatron.planning.timing import Estimate, estimate

WARM_UP = 3
"""Steps that are left out: the first one overlaps nothing, and memory finds its place."""
LEAST_STEPS = 3
_APART = 0.05
"""By so much the shares of messages in the passes of two runs differ at least to tell their factor from computing's."""
_FACTORS = (0.02, 50.0)


class Run(NamedTuple):
    """A run's steady step in seconds. passes: forward and backward; rest: what follows them."""

    name: str
    config: Config
    passes: float
    rest: float

    @property
    def seconds(self) -> float:
        return self.passes + self.rest


class Factors(NamedTuple):
    """By which measured seconds differ from estimated ones."""

    compute: float
    messages: float
    rest: float
    runs: int


class Refined(NamedTuple):
    """A run before and after, seconds of a step by the estimate."""

    run: Run
    before: float
    after: float


class Outcome(NamedTuple):
    factors: Factors
    runs: tuple[Refined, ...]


def refined(cluster: Cluster, paths: Sequence[Path]) -> tuple[Cluster, Outcome]:
    """The description with corrected figures, and what was found. Raises DataError for a file that is no metrics file
    or has too few steps, ConfigError for a run that does not fit on the machine."""
    runs = [read_run(path) for path in paths]
    before = [estimate(run.config, cluster) for run in runs]
    factors = fit(runs, before)
    dtypes = {run.config.precision.dtype_name for run in runs}
    corrected = correct(cluster, factors, dtypes)
    after = [estimate(run.config, corrected) for run in runs]
    rows = tuple(Refined(r, b.seconds, a.seconds) for r, b, a in zip(runs, before, after, strict=True))
    return corrected, Outcome(factors, rows)


def read_run(path: Path) -> Run:
    """What a metrics file, or the one in a run's folder, says of its last start. Raises DataError."""
    path = path / "metrics.jsonl" if path.is_dir() else path
    try:
        records = read_records(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}: give the metrics.jsonl of a run") from error
    starts = [i for i, record in enumerate(records) if record["event"] == "start"]
    if not starts:
        raise DataError(f"{path}: it has no record of a start: give the metrics.jsonl of a run (--metrics-file)")
    start, records = records[starts[-1]], records[starts[-1] :]
    steps = [r for r in records if r["event"] == "iteration" and r["iteration"] > start["iteration"] + WARM_UP]
    config = _config(path, start)
    # Of a batch that ramps up, the steps with the full one.
    steps = [r for r in steps if r["global_batch_size"] == config.batch.global_batch_size and not r["skipped"]]
    if len(steps) < LEAST_STEPS:
        raise DataError(
            f"{path}: {len(steps)} record(s) of steps with the full batch after the first {WARM_UP}: at least "
            f"{LEAST_STEPS} are needed: run about 20 steps with --log-interval 1 --timing-log-level 1"
        )
    seconds = statistics.median(r["step_time_s"] for r in steps)
    if not all("times_ms" in r for r in steps):
        raise DataError(f"{path}: no times of the parts of a step in it: run with --timing-log-level 1")
    passes = statistics.median(r["times_ms"]["forward-backward"]["max"] for r in steps) / 1e3
    return Run(path.parent.name + "/" + path.name, config, passes, max(seconds - passes, 0.0))


def _config(path: Path, start: dict[str, Any]) -> Config:
    try:
        return Config.from_dict(start["config"])
    except (KeyError, ConfigError) as error:
        raise DataError(f"{path}: the settings in its record of the start cannot be read: {error}") from error


def messages_s(found: Estimate) -> float:
    """Seconds of a step's passes that are spent on messages."""
    return found.parts["tensor messages"] + found.parts["pipeline messages"]


def fit(runs: Sequence[Run], estimates: Sequence[Estimate]) -> Factors:
    """The factors of these runs."""
    passes = np.array([e.run.makespan for e in estimates])
    messages = np.array([messages_s(e) for e in estimates])
    measured = np.array([run.passes for run in runs])
    shares = messages / passes
    together = math.exp(float(np.mean(np.log(measured / passes))))
    compute = sent = together
    if shares.max() - shares.min() >= _APART:
        # Each run counts alike: relative to what it took.
        table = np.stack([(passes - messages) / measured, messages / measured], axis=1)
        (a, b), *_ = np.linalg.lstsq(table, np.ones(len(runs)), rcond=None)
        if a > 0 and b > 0:
            compute, sent = float(a), float(b)
    exposed = np.array([e.parts["data-parallel"] for e in estimates])
    rest = np.array([e.seconds - e.run.makespan for e in estimates]) - exposed
    left = np.array([run.rest for run in runs]) - sent * exposed
    ratio = math.exp(float(np.mean(np.log(np.maximum(left / rest, _FACTORS[0])))))
    return Factors(_bounded(compute), _bounded(sent), _bounded(ratio), len(runs))


def _bounded(factor: float) -> float:
    return min(max(factor, _FACTORS[0]), _FACTORS[1])


def correct(cluster: Cluster, factors: Factors, dtypes: set[str]) -> Cluster:
    """The machine with its figures corrected. Figures that were assumed because the file has none are in it then."""
    known = cluster.compute.figures
    peaks = {dtype: peak for dtype, peak in cluster.peak_tflops.items() if dtype in dtypes}
    figures = {**assumed_figures(peaks), **known}
    found = [_corrected(figure, factors) for figure in figures.values()]
    b = 1 / factors.messages
    return dataclasses.replace(
        cluster, compute=cluster.compute.with_figures(found),
        links={pair: w * b for pair, w in cluster.links.items()}, nic_gb_per_s=cluster.nic_gb_per_s * b,
        collective_gb_per_s={key: w * b for key, w in cluster.collective_gb_per_s.items()},
    )  # fmt: skip


_OF_MESSAGES = ("collectives.", "messages", "collective_start_s", "hop_", "message_")
_OF_REST = ("update_gb_per_s", "step_overhead_s")


def _corrected(figure: Figure, factors: Factors) -> Figure:
    which = "messages" if figure.name.startswith(_OF_MESSAGES) else "rest" if figure.name in _OF_REST else "compute"
    factor: float = getattr(factors, which)
    is_rate = figure.name.startswith(("products.", "attention.", "memory.", "update_"))
    source = f"{figure.source}; seconds times {factor:.3f} by the step times of {factors.runs} run(s)"
    return dataclasses.replace(figure.scaled(1 / factor if is_rate else factor), source=source)


def render(outcome: Outcome) -> str:
    """The factors and each run before and after, as text."""
    f = outcome.factors
    lines = [
        f"seconds times {f.compute:.3f} for computations, {f.messages:.3f} for messages, {f.rest:.3f} for optimizer "
        f"and host ({f.runs} run(s))",
        f"{'run':40s} {'measured':>10s} {'before':>18s} {'after':>18s}   (ms per step)",
    ]
    for run, before, after in outcome.runs:
        cells = (f"{1e3 * s:9.1f} {100 * (s / run.seconds - 1):+6.1f} %" for s in (before, after))
        lines.append(f"{run.name[-40:]:40s} {1e3 * run.seconds:10.1f} {'  '.join(cells)}")
    return "\n".join(lines)
