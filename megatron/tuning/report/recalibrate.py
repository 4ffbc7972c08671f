"""The description of the machine corrected by the trials of a search, for the planner's next predictions."""
from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.errors import ConfigError, DataError, MegatronError
from megatron.planning.cluster import Cluster, load_cluster
from megatron.planning.cluster_write import write_cluster
from megatron.planning.timing import Estimate, estimate
from megatron.tuning.report.context import percent
from megatron.tuning.types import Trial

if TYPE_CHECKING:
    from megatron.calibration.refine import Outcome, Refined, Run

METRICS = "metrics.jsonl"
_SHOWN = 5
_HEADING = (
    "Figures corrected by the step times of trials of tools/tune.py; [sources] say by which factors.\n"
    "planning/compute.py has the names of the figures, their columns and units.\n"
    "GB are 10^9 bytes, GiB 2^30; bandwidths are for each direction."
)


def metrics_of(folder: Path, trials: Sequence[Trial]) -> list[Path]:
    """Metrics files of the valid trials of a tuner's folder."""
    return [folder / trial.folder / METRICS for trial in trials if trial.valid]


def update_cluster(source: str, metrics: Sequence[Path], out: Path, warm_up: int) -> str:
    """Write the machine `source` (a name or a file) with its figures corrected by these runs into `out`.

    Returns for a terminal what was corrected and how far predictions were and are off. Runs that tell nothing (too few
    steps, no times of the parts of a step) are left out and named. Raises ConfigError for a file that cannot be
    written, and where no run is left.
    """
    from megatron.calibration.refine import read_run, refined_by, render_factors

    if Path(source).exists() and out.exists() and Path(source).samefile(out):
        raise ConfigError(
            f"--update-cluster {out}: it is the description that the predictions of this search rest on: choose "
            "another file"
        )
    cluster, left_out = load_cluster(source), list[str]()
    layouts: dict[str, list[Run]] = {}
    estimates: dict[str, Estimate] = {}
    for path in metrics:
        try:
            run = read_run(path, warm_up)
            layout = _layout_of(run)
            if layout not in estimates:
                estimates[layout] = _estimated(run, cluster)
        except MegatronError as error:
            left_out.append(f"left out: {error}")
        else:
            layouts.setdefault(layout, []).append(run)
    if not layouts:
        reasons = "; ".join(left_out[:_SHOWN]) or "no trial has valid figures"
        raise ConfigError(f"--update-cluster {out}: nothing to correct it by: {reasons}")
    runs = [_together(same) for same in layouts.values()]
    corrected, outcome = refined_by(cluster, runs, [estimates[layout] for layout in layouts])
    write_cluster(corrected, out, _HEADING)
    lines = [render_factors(outcome.factors), *_errors(outcome), *_worst(outcome), *left_out[:_SHOWN]]
    if len(left_out) > _SHOWN:
        lines.append(f"left out: {len(left_out) - _SHOWN} more")
    trials = sum(map(len, layouts.values()))
    of = f" of {len(runs)} layout(s)" if len(runs) < trials else ""
    return "\n".join([*lines, f"{out}: {source}, corrected by {trials} trial(s){of}"])


def _layout_of(run: Run) -> str:
    """Equal for trials of one layout, which differ in the place of their files alone."""
    settings = {name: value for name, value in run.config.to_dict().items() if name != "metrics_file"}
    return json.dumps(settings, sort_keys=True, default=str)


def _together(runs: Sequence[Run]) -> Run:
    """Of one layout: it counts once, however often it was measured, for what is right for the leading ones is not
    right for all; and one that explains itself says nothing of the others."""
    if len(runs) == 1:
        return runs[0]
    return runs[0]._replace(
        name=", ".join(run.name for run in runs), passes=statistics.median(run.passes for run in runs),
        rest=statistics.median(run.rest for run in runs),
    )  # fmt: skip


def _estimated(run: Run, cluster: Cluster) -> Estimate:
    """Raises DataError for a run that this machine cannot have made."""
    try:
        return estimate(run.config, cluster)
    except ConfigError as error:
        raise DataError(f"{run.name}: {error}") from error


def _errors(outcome: Outcome) -> list[str]:
    """How far predictions are off, and how often they name the faster of two runs."""
    lines = []
    measured = [row.run.seconds for row in outcome.runs]
    tokens = [r.run.config.batch.global_batch_size * r.run.config.model.seq_length for r in outcome.runs]
    for words, predicted in (("before", [r.before for r in outcome.runs]), ("after", [r.after for r in outcome.runs])):
        off = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
        line = f"predictions {words}: {percent(statistics.median(off))} off in the median, {percent(max(off))} at most"
        rates = [m / n for m, n in zip(measured, tokens, strict=True)]
        guesses = [p / n for p, n in zip(predicted, tokens, strict=True)]
        pairs = [(i, j) for i in range(len(rates)) for j in range(i) if rates[i] != rates[j]]
        if pairs:
            right = sum((rates[i] < rates[j]) == (guesses[i] < guesses[j]) for i, j in pairs)
            line += f"; of two layouts they name the faster in {100 * right / len(pairs):.0f} % of pairs"
        lines.append(line)
    return lines


def _worst(outcome: Outcome) -> list[str]:
    """The trials whose predictions are still furthest off."""
    rows = sorted(outcome.runs, key=_off, reverse=True)[:_SHOWN]
    return [
        f"  {row.run.name}: {1e3 * row.run.seconds:.1f} ms a step, predicted {_signed(row.before, row)} before, "
        f"{_signed(row.after, row)} after"
        for row in rows
    ]


def _off(row: Refined) -> float:
    return abs(row.after / row.run.seconds - 1)


def _signed(seconds: float, row: Refined) -> str:
    return f"{100 * (seconds / row.run.seconds - 1):+.1f} %"
