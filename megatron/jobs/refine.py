"""Correct a machine's description from the step times of runs on it.

According to the estimate, a step of a run computes for C seconds (including bubbles and the host's
work) and waits M seconds for messages; the measured time is T seconds. The factors a and b in T = a
C + b M correct the machine: seconds are multiplied and rates divided by them. Both equal the median
of T / (C + M), unless two different factors explain the runs much better. Medians limit the
influence of a few disturbed runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.config import Config
from megatron.errors import ConfigError, DataError
from megatron.jobs.scaling import figures
from megatron.jobs.scaling import read_run as read_measured
from megatron.planner.cluster import Cluster, assumed_figures
from megatron.planner.compute import is_rate, is_time
from megatron.planner.table import Table
from megatron.planner.timing import Estimate, estimate

WARM_UP = 3
LEAST_STEPS = 3
"""Number of steps to ignore (the first has no overlap, memory settles), and to require then."""
_LEAST_RUNS = 4  # for two factors: with three runs, a pair that fits two has no median error
_BETTER = 0.5  # two factors must reduce the error of one factor to less than this share
# ratios to try of the message factor to the compute factor, 2.5 % apart
_RATIOS = np.geomspace(0.1, 10.0, 187)
_LEAST = 0.02  # smallest plausible factor
_MOST = 50.0
_OF_MESSAGES = ("collectives.", "messages", "collective_start_s", "hop_", "message_")


class RefinementRun(NamedTuple):
    """Name and configuration of a run, and the median seconds of its steady steps."""

    name: str
    config: Config
    seconds: float
    remark: str = ""  # about lines in its file that were ignored


Factors = tuple[float, float]
"""Ratios of measured to estimated seconds: for computation (with optimizer and host), messages."""


def refined(cluster: Cluster, paths: Sequence[Path]) -> tuple[Cluster, Factors, Table, list[str]]:
    """Correct a machine description from the metrics files of runs.

    Return the corrected description, the factors, a table of the estimates' errors before and after
    the correction, and the runs and lines that were left out. Raises DataError if no run can be
    used, and ConfigError for a run that does not fit on the machine.
    """
    runs = list[RefinementRun]()
    left_out = list[str]()
    for path in paths:
        try:
            run = read_run(path)
        except DataError as error:
            left_out.append(str(error))
            continue
        runs.append(run)
        if run.remark:
            left_out.append(run.remark)
    if not runs:
        raise DataError(left_out[0])
    before = [estimate(run.config, cluster) for run in runs]
    factors = fit(runs, before)
    corrected = correct(cluster, factors, {run.config.precision.dtype_name for run in runs})
    after = [estimate(run.config, corrected) for run in runs]
    rows = [
        (
            run.name,
            f"{1e3 * run.seconds:.1f}",
            *(f"{100 * (e.seconds / run.seconds - 1):+.1f} %" for e in estimates),
        )
        for run, *estimates in zip(runs, before, after, strict=True)
    ]
    return (
        corrected,
        factors,
        Table("", ("run", "ms/step", "estimate before", "after"), rows),
        left_out,
    )


def read_run(path: Path) -> RefinementRun:
    """Read the last start in a metrics file or a folder's metrics file, without its first steps.

    Raises DataError if the file cannot be read or has too few valid steps.
    """
    measured = figures(read_measured(path), WARM_UP)
    run = measured.run
    if not measured.valid or measured.step_s is None or measured.steady < LEAST_STEPS:
        why = run.failure or "; ".join(measured.problems) or f"{measured.steady} steady step(s)"
        raise DataError(
            f"{path}: {why}: at least {LEAST_STEPS} steps with the full batch are needed after the "
            f"first {WARM_UP}: run about 20 steps with --log-interval 1"
        )
    # earlier versions had a setting for each scalar
    settings = {n: v for n, v in run.settings.items() if not n.endswith("_to_tensorboard")}
    try:
        return RefinementRun(
            f"{run.path.parent.name}/{run.path.name}",
            Config.from_dict(settings),
            measured.step_s,
            run.remark,
        )
    except ConfigError as error:
        raise DataError(
            f"{path}: the settings in its start record cannot be read: {error}"
        ) from error


def messages_s(estimate: Estimate) -> float:
    """Return the seconds that a step spends on messages."""
    return sum(
        estimate.breakdown[name]
        for name in ("layer messages", "pipeline messages", "data-parallel")
    )


def fit(runs: Sequence[RefinementRun], estimates: Sequence[Estimate]) -> Factors:
    """Fit the factors to runs, given their estimates in the same order.

    Raises DataError for implausible factors.
    """
    seconds = np.array([run.seconds for run in runs])
    sent = np.array([messages_s(factors) for factors in estimates])
    computed = np.array([factors.seconds for factors in estimates]) - sent

    def tried(ratio: float) -> tuple[float, Factors]:
        """Return the median error at a ratio of message to compute factor, and both factors."""
        slower = seconds / (computed + ratio * sent)
        factor = float(np.median(slower))
        return float(np.median(abs(slower / factor - 1))), (factor, ratio * factor)

    error, factors = tried(1.0)
    if len(runs) >= _LEAST_RUNS:
        least, two = min(map(tried, _RATIOS.tolist()))
        factors = two if least < _BETTER * error else factors
    if not _LEAST <= min(factors) <= max(factors) <= _MOST:
        raise DataError(
            "the runs take {:.3g} times the estimated seconds for computations and {:.3g} times "
            "for messages: they are not from this machine".format(*factors)
        )
    return factors


def correct(cluster: Cluster, factors: Factors, dtypes: set[str]) -> Cluster:
    """Return the machine with corrected figures, including assumed ones for these dtypes."""
    peaks = {dtype: peak for dtype, peak in cluster.peak_tflops.items() if dtype in dtypes}
    corrected = []
    for name, figure in {**assumed_figures(peaks), **cluster.compute}.items():
        if not (is_time(name) or is_rate(name)):
            continue
        factor = factors[name.startswith(_OF_MESSAGES)]
        source = f"{figure.source}; seconds times {factor:.3f} according to the step times of runs"
        scaled = figure.scaled(factor if is_time(name) else 1 / factor)
        corrected.append(dataclasses.replace(scaled, source=source))
    return cluster.with_figures(corrected).with_bandwidths(1 / factors[1])
