"""Correct the description of a machine by runs on it: the times of their parts against the estimate of the same steps.

By the estimate a run's passes compute for C seconds, bubbles included, and send for M; by its timers they take T. Where
several runs tell the two apart, the factors of computing and of messages are those of T = a C + b M, else a = b =
T / (C + M). What follows the passes has a factor of its own. All are medians, so that runs which something disturbed do
not decide. Rates are divided by their factor and seconds multiplied.
"""
from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megatron.config import Config
from megatron.errors import ConfigError, DataError
from megatron.jobs import scaling
from megatron.planner.cluster import Cluster, assumed_figures
from megatron.planner.compute import Figure
from megatron.planner.table import Table
from megatron.planner.timing import Estimate, estimate

WARM_UP, LEAST_STEPS = 3, 3
"""Steps that are left out (the first one overlaps nothing, memory finds its place), and how many are needed after."""
_APART = 0.05  # least difference of the shares of messages in two runs that tell the factors apart
_BETTER = 0.5  # of the errors of one factor: two are believed where they leave less
_LEAST, _MOST = 0.02, 50.0  # of a factor


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
    """Measured over estimated seconds: of computations, of messages, of the optimizer and the host."""

    compute: float
    messages: float
    rest: float


class Refined(NamedTuple):
    """A corrected machine, and how far estimates are from its runs before and after. left_out: why others are not
    used."""

    cluster: Cluster
    factors: Factors
    errors: Table
    left_out: tuple[str, ...]


def refined(cluster: Cluster, paths: Sequence[Path]) -> Refined:
    """Correct a machine by metrics files, or folders with one. Raises DataError where none of them can be used, and
    ConfigError for a run that does not fit on the machine."""
    runs, left_out = list[Run](), list[str]()
    for path in paths:
        try:
            runs.append(read_run(path))
        except DataError as error:
            left_out.append(str(error))
    if not runs:
        raise DataError(left_out[0])
    before = [estimate(run.config, cluster) for run in runs]
    factors = fit(runs, before)
    corrected = correct(cluster, factors, {run.config.precision.dtype_name for run in runs})
    after = [estimate(run.config, corrected) for run in runs]
    rows = [
        (run.name, f"{1e3 * run.seconds:.1f}", *(f"{100 * (e.seconds / run.seconds - 1):+.1f} %" for e in estimates))
        for run, *estimates in zip(runs, before, after, strict=True)
    ]
    return Refined(corrected, factors, Table("", ("run", "ms a step", "estimate before", "after"), rows),
                   tuple(left_out))  # fmt: skip


def read_run(path: Path) -> Run:
    """Read the last start in a metrics file, or in the one of a folder, without its first steps. Raises DataError."""
    found = scaling.read_run(path)
    steps = scaling.steady_lines(found, WARM_UP)
    if len(steps) < LEAST_STEPS:
        raise DataError(
            f"{path}: {len(steps)} record(s) of steps with the full batch after the first {WARM_UP}: at least "
            f"{LEAST_STEPS} are needed: run about 20 steps with --log-interval 1 --timing-log-level 1"
        )
    try:
        config = Config.from_dict(dict(found.settings))
        passes = statistics.median((step.times_ms or {})["forward-backward"]["max"] for step in steps) / 1e3
        if not 0 < passes < math.inf:
            raise ValueError(f"{passes} s of forward and backward")
    except ConfigError as error:
        raise DataError(f"{path}: the settings in its record of the start cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: no times of the parts of a step that can be used ({error!r}): run with --timing-log-level 1"
        ) from error
    seconds = statistics.median(step.step_s for step in steps)
    return Run(f"{found.path.parent.name}/{found.path.name}", config, passes, max(seconds - passes, 0.0))


def messages_s(found: Estimate) -> float:
    """Seconds of a step's passes that are spent on messages."""
    return found.parts["tensor messages"] + found.parts["pipeline messages"]


def fit(runs: Sequence[Run], estimates: Sequence[Estimate]) -> Factors:
    """The factors of these runs, whose estimates are in the same order."""
    sent = np.array([messages_s(e) for e in estimates])
    computed = np.array([e.run.makespan for e in estimates]) - sent
    exposed = np.array([e.parts["data-parallel"] for e in estimates])  # messages after the passes
    other = np.array([e.seconds - e.run.makespan for e in estimates]) - exposed
    passes, after = np.array([(run.passes, run.rest) for run in runs]).T
    one = float(np.median(passes / (computed + sent)))
    compute, messages = _apart(computed, sent, passes, one) or (one, one)
    rest = float(np.median((after - messages * exposed) / other))
    if rest < _LEAST:  # its messages alone would take longer: one factor of everything
        compute = messages = rest = float(np.median((passes + after) / (computed + sent + exposed + other)))
    return Factors(*(min(max(factor, _LEAST), _MOST) for factor in (compute, messages, rest)))


def _apart(computed: Any, sent: Any, passes: Any, one: float) -> tuple[float, float] | None:
    """Factors of computing and of messages as medians over pairs of runs whose shares of messages differ (Theil 1950,
    Sen 1968); None where they do not explain the passes much better than `one` factor does."""
    shares = sent / (computed + sent)
    found = [
        np.linalg.solve([[computed[i], sent[i]], [computed[j], sent[j]]], [passes[i], passes[j]])
        for i, j in itertools.combinations(range(len(passes)), 2) if abs(shares[i] - shares[j]) >= _APART
    ]  # fmt: skip
    if len(passes) < 3 or not found:
        return None
    a, b = map(float, np.median(found, axis=0))
    errors = [float(np.median(abs(explained / passes - 1))) for explained in
              (a * computed + b * sent, one * (computed + sent))]  # fmt: skip
    return (a, b) if min(a, b) > 0 and errors[0] < _BETTER * errors[1] else None


def correct(cluster: Cluster, factors: Factors, dtypes: set[str]) -> Cluster:
    """The machine with its figures corrected, and with those of these dtypes that were assumed because it has none."""
    peaks = {dtype: peak for dtype, peak in cluster.peak_tflops.items() if dtype in dtypes}
    figures = {**assumed_figures(peaks), **cluster.compute.figures}
    corrected = dataclasses.replace(
        cluster, compute=cluster.compute.with_figures(_corrected(figure, factors) for figure in figures.values())
    )
    return corrected.with_bandwidths(1 / factors.messages)


_OF_MESSAGES = ("collectives.", "messages", "collective_start_s", "hop_", "message_")
_OF_REST = ("update_gb_per_s", "step_overhead_s")


def _corrected(figure: Figure, factors: Factors) -> Figure:
    which = "messages" if figure.name.startswith(_OF_MESSAGES) else "rest" if figure.name in _OF_REST else "compute"
    factor: float = getattr(factors, which)
    is_rate = figure.name.startswith(("products.", "attention.", "memory.", "update_"))
    source = f"{figure.source}; seconds times {factor:.3f} by the step times of runs"
    return dataclasses.replace(figure.scaled(1 / factor if is_rate else factor), source=source)
