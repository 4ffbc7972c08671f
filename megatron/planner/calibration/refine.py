"""Correct the description of a machine by runs on it: the times of their parts against the estimate of the same steps.

A run's passes take C + M seconds by the estimate, computations and bubble and messages, and T by its timers; the rest
of a step takes R' where the estimate says R. Factors of computing and of messages are the least squares of
T = a C + b M where runs tell the two apart, else a = b = T / (C + M); the factor of the rest makes R be R'.
Of many short runs some are disturbed by others on the machine: medians and Huber's weights keep these from deciding,
and what explains the runs (two factors of the passes, one of them, one of everything) has to foretell those that it
was not fitted to.
Rates are divided by their factor and seconds multiplied, so that the estimate of the same runs comes out as measured.
"""
from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.config import Config
from megatron.errors import ConfigError, DataError
from megatron.metrics_file import read_records
from megatron.planner.cluster import Cluster, assumed_figures
from megatron.planner.compute import Figure
from megatron.planner.timing import Estimate, estimate

WARM_UP = 3
"""Steps that are left out: the first one overlaps nothing, and memory finds its place."""
LEAST_STEPS = 3
_APART = 0.05
"""By so much the shares of messages in the passes of two runs differ at least to tell their factor from computing's."""
_FACTORS = (0.02, 50.0)
_ENOUGH = 4
"""Runs from which on the ways to explain them are compared."""
_HUBER = 1.345  # of the residuals' scale: 95 % as good as least squares where nothing is disturbed
_NOISE = 0.005  # residuals below it are not told apart


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


def refined(cluster: Cluster, paths: Sequence[Path], warm_up: int = WARM_UP) -> tuple[Cluster, Outcome]:
    """The description with corrected figures, and what was found. Raises DataError for a file that is no metrics file
    or has too few steps, ConfigError for a run that does not fit on the machine."""
    return refined_by(cluster, [read_run(path, warm_up) for path in paths])


def refined_by(cluster: Cluster, runs: Sequence[Run]) -> tuple[Cluster, Outcome]:
    """The same by runs that were read. Raises ConfigError for a run that does not fit on the machine."""
    before = [estimate(run.config, cluster) for run in runs]
    factors = fit(runs, before)
    dtypes = {run.config.precision.dtype_name for run in runs}
    corrected = correct(cluster, factors, dtypes)
    after = [estimate(run.config, corrected) for run in runs]
    rows = tuple(Refined(r, b.seconds, a.seconds) for r, b, a in zip(runs, before, after, strict=True))
    return corrected, Outcome(factors, rows)


def read_run(path: Path, warm_up: int = WARM_UP) -> Run:
    """What a metrics file, or the one in a run's folder, says of its last start, without the first `warm_up` steps.
    Raises DataError."""
    path = path / "metrics.jsonl" if path.is_dir() else path
    records = read_records(path)
    starts = [i for i, record in enumerate(records) if record["event"] == "start"]
    if not starts:
        raise DataError(f"{path}: it has no record of a start: give the metrics.jsonl of a run (--metrics-file)")
    start, records = records[starts[-1]], records[starts[-1] :]
    try:
        config = Config.from_dict(start["config"])
    except (KeyError, ConfigError) as error:
        raise DataError(f"{path}: the settings in its record of the start cannot be read: {error}") from error
    # Of a batch that ramps up, the steps with the full one.
    steps = [
        r for r in records if r["event"] == "iteration" and r["iteration"] > start["iteration"] + warm_up
        and r.get("global_batch_size") == config.batch.global_batch_size and r.get("step_time_s")
        and not r.get("skipped")
    ]  # fmt: skip
    if len(steps) < LEAST_STEPS:
        raise DataError(
            f"{path}: {len(steps)} record(s) of steps with the full batch after the first {warm_up}: at least "
            f"{LEAST_STEPS} are needed: run about 20 steps with --log-interval 1 --timing-log-level 1"
        )
    seconds = statistics.median(r["step_time_s"] for r in steps)
    try:
        passes = statistics.median(r["times_ms"]["forward-backward"]["max"] for r in steps) / 1e3
        if not 0 < passes < math.inf:
            raise ValueError(f"{passes} s of forward and backward")
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: no times of the parts of a step that can be used ({error!r}): run with --timing-log-level 1"
        ) from error
    return Run(f"{path.parent.name}/{path.name}", config, passes, max(seconds - passes, 0.0))


def messages_s(found: Estimate) -> float:
    """Seconds of a step's passes that are spent on messages."""
    return found.parts["tensor messages"] + found.parts["pipeline messages"]


def fit(runs: Sequence[Run], estimates: Sequence[Estimate]) -> Factors:
    """The factors of these runs.

    Of several ways to explain them that one is taken which foretells best the step of a run that it was not fitted to;
    of few runs the first that is possible.
    """
    after = [(e.parts["data-parallel"], e.seconds - e.run.makespan) for e in estimates]
    parts = np.array([
        (e.run.makespan - messages_s(e), messages_s(e), exposed, rest - exposed)
        for e, (exposed, rest) in zip(estimates, after, strict=True)
    ])  # fmt: skip
    took = np.array([(run.passes, run.rest) for run in runs])
    ways = [way for way in (_apart, _together, _whole) if way(parts, took) is not None]
    best = min(ways, key=lambda way: _error(parts, took, way)) if len(runs) >= _ENOUGH else ways[0]
    found = best(parts, took)
    assert found is not None, "it is possible"
    compute, sent, _, rest = (min(max(factor, _FACTORS[0]), _FACTORS[1]) for factor in found)
    return Factors(compute, sent, rest, len(runs))


# Seconds of each run: by the estimate of computations and of messages in the passes, of messages after them, of the
# rest; and what the passes and what follows them took. A way to explain these finds a factor of each of the four, or
# None.
_Found = tuple[float, float, float, float] | None
_Way = Callable[[Any, Any], _Found]


def _apart(parts: Any, took: Any) -> _Found:
    """A factor of computations and one of messages by the passes of runs whose shares of messages differ: least squares
    relative to what each run took, with Huber's weights (Huber 1964), found by weighting again until nothing moves."""
    shares = parts[:, 1] / parts[:, :2].sum(1)
    if shares.max() - shares.min() < _APART:
        return None
    table = parts[:, :2] / took[:, :1]
    weights, found = np.ones(len(table)), np.zeros(2)
    for _ in range(30):
        root, last = np.sqrt(weights), found
        found = np.linalg.lstsq(table * root[:, None], root, rcond=None)[0]
        residuals = np.abs(1 - table @ found)
        scale = max(float(np.median(residuals)) / 0.6745, _NOISE)
        weights = np.minimum(1.0, _HUBER * scale / np.maximum(residuals, 1e-12))
        if np.allclose(found, last, rtol=1e-9):
            break
    return _with_rest(parts, took, *map(float, found)) if min(found) > 0 else None


def _together(parts: Any, took: Any) -> _Found:
    """One factor of the passes."""
    factor = _median(took[:, 0] / parts[:, :2].sum(1))
    return _with_rest(parts, took, factor, factor)


def _with_rest(parts: Any, took: Any, compute: float, sent: float) -> _Found:
    """With the factor of what follows the passes beside messages; None where messages alone would take longer."""
    rest = float(np.median((took[:, 1] - sent * parts[:, 2]) / parts[:, 3]))
    return (compute, sent, sent, rest) if rest > _FACTORS[0] else None


def _whole(parts: Any, took: Any) -> _Found:
    """One factor of everything."""
    factor = _median(took.sum(1) / parts.sum(1))
    return factor, factor, factor, factor


def _median(ratios: Any) -> float:
    """As far from the ratios below it as from those above, as factors."""
    return float(np.exp(np.median(np.log(ratios))))


def _error(parts: Any, took: Any, way: _Way) -> float:
    """How far off the steps of runs are that are left out, as log of a factor in the median."""
    off = []
    for i in range(len(parts)):
        found = way(np.delete(parts, i, 0), np.delete(took, i, 0))
        off.append(math.inf if found is None else abs(math.log(parts[i] @ found / took[i].sum())))
    return statistics.median(off)


def correct(cluster: Cluster, factors: Factors, dtypes: set[str]) -> Cluster:
    """The machine with its figures corrected. Figures that were assumed because the file has none are in it then."""
    known = cluster.compute.figures
    peaks = {dtype: peak for dtype, peak in cluster.peak_tflops.items() if dtype in dtypes}
    figures = {**assumed_figures(peaks), **known}
    found = [_corrected(figure, factors) for figure in figures.values()]
    corrected = dataclasses.replace(cluster, compute=cluster.compute.with_figures(found))
    return corrected.with_bandwidths(1 / factors.messages)


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
