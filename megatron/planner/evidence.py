"""Errors of predictions for published runs of other codes, by machine and kind of layout.

`python benchmarks/published.py --update docs/measured/published.md` writes `evidence.toml` as well.
Irregular runs and those with software before CURRENT are not counted (benchmarks/published_runs.py).
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from megatron.config import Config
from megatron.errors import ConfigError
from megatron.planner.cluster import Cluster
from megatron.planner.trace import cached_sizes
from megatron.untrusted import read_toml, write_text

_FILE = Path(__file__).with_name("evidence.toml")
_EVERY = "all"

SMALL = 1e9
"""Parameters below which the host and the framework decide the time of a step."""

CURRENT = "2024"
"""First year of software that a prediction of today is compared with."""


class Errors(NamedTuple):
    """Errors of predicted seconds, as shares of the published ones.

    runs    number of predictions
    median  the median error
    ninth   the error that nine of ten predictions do not exceed
    worst   the largest error
    ratio   predicted over published seconds, in the median
    """

    runs: int
    median: float
    ninth: float
    worst: float
    ratio: float

    @classmethod
    def of(cls, ratios: Iterable[float]) -> Errors:
        """Summarize predictions by their ratios of predicted to published seconds."""
        ratios = list(ratios)
        ordered = sorted(abs(ratio - 1) for ratio in ratios)
        ninth = ordered[math.ceil(0.9 * len(ordered)) - 1]
        median = statistics.median(ordered)
        return cls(len(ordered), median, ninth, ordered[-1], statistics.median(ratios))

    @property
    def cells(self) -> tuple[str, ...]:
        """Return the number of runs, and the errors in per cent."""
        errors = self.median, self.ninth, self.worst
        return (str(self.runs), *(f"{100 * error:.1f} %" for error in errors))


def kind_of_layout(config: Config) -> str:
    """Return the part of a layout that matters most for the time of a step."""
    parallel = config.parallel
    if config.model.num_experts:
        return "experts"
    if parallel.context_parallel_size > 1:
        return "context parallelism"
    if parallel.pipeline_model_parallel_size > 1:
        return "pipeline"
    if config.engine.zero_stage > 1:
        return "ZeRO 2 and 3"
    return "tensor parallelism" if parallel.tensor_model_parallel_size > 1 else "data parallelism"


def evidence_words(cluster: Cluster, config: Config) -> str:
    """Describe how sure a prediction for this machine and kind of layout is."""
    errors = evidence()
    everywhere = errors[_EVERY, _EVERY]
    kind = kind_of_layout(config)
    of_machine = errors.get((cluster.name, _EVERY))
    of_kind = errors.get((cluster.name, kind))
    if of_machine is None:
        text = (
            f"no published run on {cluster.name} since {CURRENT} was compared. On other machines "
            f"predicted steps of {everywhere.runs} runs of other codes since {CURRENT} are off by "
            f"{_words(everywhere)}"
        )
    else:
        text = (
            f"predicted steps of {of_machine.runs} published runs of other codes since {CURRENT} on "
            f"{cluster.name} are off by {_words(of_machine)}"
        )
    if cached_sizes(config).parameters() < SMALL:
        text += "; models of less than a billion parameters, like this one, are predicted worse"
    if of_kind is not None:
        return f"{text}; {of_kind.runs} of this kind ({kind}) by {_words(of_kind)}"
    of_kind = errors.get((_EVERY, kind))
    if of_kind is None:
        return f"{text}; none of them is of this kind ({kind})"
    where = "" if of_machine is None else " on other machines"
    return f"{text}; {of_kind.runs} of this kind ({kind}){where} by {_words(of_kind)}"


def _words(errors: Errors) -> str:
    way = f"too {'short' if errors.ratio < 1 else 'long'}: {errors.ratio:.2f} of the published"
    if errors.runs == 1:
        return f"{errors.worst:.0%} ({way})"
    ninth = f", {errors.ninth:.0%} for nine of ten" if errors.runs >= 10 else ""
    if abs(errors.ratio - 1) < errors.median / 2:
        way = "either way"
    return f"{errors.median:.0%} in the median ({way}){ninth}, {errors.worst:.0%} at worst"


@functools.cache
def evidence() -> dict[tuple[str, str], Errors]:
    """Map (machine, kind of layout), each or both "all", to the errors."""
    tables = read_toml(_FILE, 1 << 16, error=ConfigError)
    return {
        (machine, kind): Errors(*row)
        for machine, kinds in tables.items()
        for kind, row in kinds.items()
    }


def write_evidence(
    ratios: Mapping[tuple[str, str], Sequence[float]], alone: Collection[str] = ()
) -> None:
    """Write the file from ratios of predicted to published seconds, by (machine, kind).

    alone  machines whose runs say nothing about other machines
    """
    groups: dict[str, dict[str, list[float]]] = {}
    for (machine, kind), each in sorted(ratios.items()):
        for row in (machine,) if machine in alone else (machine, _EVERY):
            for column in (kind, _EVERY):
                groups.setdefault(row, {}).setdefault(column, []).extend(each)
    lines = ["# Written by benchmarks/published.py --update: runs; errors as shares; ratio."]
    for machine, kinds in groups.items():
        lines += ["", f"[{machine}]"]
        for kind, each in kinds.items():
            runs, *shares = Errors.of(each)
            cells = ", ".join([str(runs), *(f"{share:.3f}" for share in shares)])
            lines.append(f'"{kind}" = [{cells}]')
    write_text(_FILE, "\n".join([*lines, ""]), choose="a writable checkout")
