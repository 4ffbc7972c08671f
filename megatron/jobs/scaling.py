"""Measured runs: metrics from their folders, figures of their steady steps, and contradictions.

Steady steps are those after the warm-up, of the full batch, that were not skipped and had a finite
loss. Figures use the median of their times; the spread is their range divided by the median. Does
not need torch.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from megatron import metrics_file
from megatron.drawing import pyplot, save, tidy
from megatron.errors import DataError
from megatron.metrics_file import SETTINGS, check_kinds, read_beside, read_records
from megatron.model import formulas
from megatron.planner.published import Published, published
from megatron.planner.table import Table

METRICS = "metrics.jsonl"
POINT = "point.json"
RESULT = "result.json"
# Best square matrix product measured on an MI250X GCD (4096 to 8192, fp16, ROCm 7.0): a training
# step cannot beat it.
_MEASURED_GEMM_TFLOPS = {"MI250": 115.3}
_PLAUSIBLE_PART_OF_PEAK = 0.9  # out of reach for a training run: a higher figure is wrong


@dataclass(frozen=True)
class Line:
    """Record of a metrics file, for `steps` steps with a mean time of `step_time_s`.

    time  when it was written, in seconds since 1970
    """

    iteration: int
    steps: int
    global_batch_size: int
    step_time_s: float
    consumed_samples: float = math.nan
    model_tflops: float | None = None
    hardware_tflops: float | None = None
    memory_bytes: int = 0
    skipped: int = 0
    nan: int = 0
    time: float = math.nan


@dataclass(frozen=True)
class MeasuredRun:
    """Run: its settings, and its lines since the last start.

    settings  by the names of Megatron's arguments, as far as known
    point     description of an experiment's point; {} for any other run
    failure   why there are no figures; None if there are
    finished  whether it ran to its end
    """

    name: str
    path: Path
    settings: Mapping[str, Any]
    lines: tuple[Line, ...] = ()
    start_iteration: int = 0
    device: str = ""
    point: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None
    finished: bool = False

    def get(self, name: str) -> Any:
        """Return a setting; None if unknown."""
        return self.settings.get(name)

    @property
    def world_size(self) -> int | None:
        return cast("int | None", self.get("world_size"))

    @property
    def replicas(self) -> int | None:
        return cast("int | None", self.get("data_parallel_size"))


# -- reading ---------------------------------------------------------------------------------------


def find_runs(paths: Sequence[str | Path]) -> list[MeasuredRun]:
    """Find all runs below the given folders and in the given files, sorted by name.

    A folder is a run if it has a metrics file or a point's description. Raises DataError for a path
    that is missing or has no run.
    """
    runs: list[MeasuredRun] = []
    for path in map(Path, paths):
        if not path.exists():
            raise DataError(
                f"{path}: no such file or folder: give folders of runs, or metrics files"
            )
        marked = {file.parent for name in (METRICS, POINT) for file in path.rglob(name)}
        if not marked and path.is_dir():
            raise DataError(f"{path}: contains no run: a run has a {METRICS}")
        # Without attempts that were moved into a run's folder (runner.py).
        own = [
            p for p in sorted(marked) if not (p.name.startswith("attempt-") and p.parent in marked)
        ]
        runs += map(read_run, own or [path])
    return runs


def read_run(path: str | Path) -> MeasuredRun:
    """Read one run from its folder or metrics file. Raises DataError if it is unreadable."""
    path = Path(path)
    file = path / METRICS if path.is_dir() else path
    point = read_beside(file.parent / POINT, metrics_file.POINT)
    result = read_beside(file.parent / RESULT, metrics_file.RESULT)
    records = read_records(file) if file.exists() or not point else []
    if not (records or point or path.is_dir()):
        raise DataError(f"{path}: no metrics records: give folders of runs, or metrics files")
    starts = [at for at, record in enumerate(records) if record["event"] == "start"]
    records = records[starts[-1] :] if starts else records
    start: dict[str, Any] = records[0] if starts else {}
    sizes = {"world_size": "world", "data_parallel_size": "data"}
    layout = {name: (start.get("layout") or {}).get(short) for name, short in sizes.items()}
    settings = {
        **point.get("settings", {}),
        **(start.get("config") or {}),
        **{k: v for k, v in layout.items() if v},
    }
    check_kinds(settings, SETTINGS, path)
    first = int(start.get("iteration") or 0)
    lines = list[Line]()
    names = Line.__dataclass_fields__.keys() - {"steps"}
    for record in records:
        if (
            record["event"] == "iteration"
            and record.get("step_time_s")
            and record.get("global_batch_size")
        ):
            steps = max(1, record["iteration"] - (lines[-1].iteration if lines else first))
            lines.append(
                Line(
                    steps=steps,
                    **{name: record[name] for name in names if record.get(name) is not None},
                )
            )
    failure = result.get("reason") if result.get("status") not in (None, "done") else None
    if failure is None and not lines:
        failure = "no iteration was logged" if result or file.exists() else "not run yet"
    ends = [record.get("reason") for record in records if record["event"] == "end"]
    name = point.get("name") or (file.parent.name if file.name == METRICS else file.stem)
    return MeasuredRun(
        name,
        file,
        settings,
        tuple(lines),
        first,
        start.get("device") or "",
        point,
        failure,
        ends[-1:] == ["done"],
    )


# -- figures ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """Figures of one run; None if unavailable. Rates are in tokens/s; TFLOP/s are per device.

    range_s       the fastest and the slowest steady step; None for a single step
    memory_bytes  peak over all ranks
    skipped, nan  steps of the whole run
    problems      contradictions; with any, the figures are invalid
    notes         remarks on valid figures
    """

    run: MeasuredRun
    skipped: int = 0
    nan: int = 0
    memory_bytes: int | None = None
    steady: int = 0
    step_s: float | None = None
    range_s: tuple[float, float] | None = None
    batch: int | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_device: float | None = None
    model_tflops: float | None = None
    hardware_tflops: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def valid(self) -> bool:
        """Return whether there are figures without contradictions."""
        return self.step_s is not None and not self.problems and self.run.failure is None

    @property
    def spread(self) -> float | None:
        """Return the range of the steady steps over their median; None for a single step."""
        return (
            (self.range_s[1] - self.range_s[0]) / self.step_s
            if self.range_s and self.step_s
            else None
        )


def figures(
    run: MeasuredRun, warm_up: int | None = None, peak_tflops: float | None = None
) -> Figures:
    """Measure a run. A run without lines gives figures without values.

    warm_up      steps that do not count; None: that of its point, otherwise 1
    peak_tflops  of a device; None: the known value
    """
    memory = max((line.memory_bytes for line in run.lines), default=0) or None
    found = Figures(
        run, sum(line.skipped for line in run.lines), sum(line.nan for line in run.lines), memory
    )
    if not run.lines:
        return found
    first = run.start_iteration + (run.point.get("warm_up", 1) if warm_up is None else warm_up)
    full = max(line.global_batch_size for line in run.lines)
    steady = [
        line
        for line in run.lines
        if line.iteration - line.steps >= first
        and line.global_batch_size == full
        and not line.skipped
        and not line.nan
    ]
    if not steady:
        why = (
            f"no steady step: of {sum(line.steps for line in run.lines)} steps {found.skipped} "
            f"were skipped, {found.nan} had a non-finite loss, and none of the others has the full "
            "batch after the warm-up"
        )
        return replace(found, problems=() if run.failure else (why,))
    times = [line.step_time_s for line in steady]
    step_s = statistics.median(times)
    sequence = run.get("seq_length")
    tokens = full * sequence / step_s if sequence else None

    def stated(name: str) -> float | None:
        work = [
            rate * line.step_time_s for line in steady if (rate := getattr(line, name)) is not None
        ]
        return statistics.median(work) / step_s if work else None

    dtype = "float16" if run.get("fp16") else "bfloat16" if run.get("bf16") else "float32"
    peak = peak_tflops or formulas.peak_tflops(run.device, dtype)
    model = stated("model_tflops")
    hardware = stated("hardware_tflops")
    measured = (
        value
        for name, value in _MEASURED_GEMM_TFLOPS.items()
        if name in run.device and dtype != "float32"
    )
    ceiling = next(measured, math.inf if peak is None else _PLAUSIBLE_PART_OF_PEAK * peak)
    highest = max(model or 0.0, hardware or 0.0)
    problems = list(itertools.islice(_contradictions(run), 1))
    if highest > ceiling:
        problems.append(
            f"{highest:.4g} TFLOP/s per device are above the plausible limit of {ceiling:.4g}: the "
            f"best matrix product on such a device, or {_PLAUSIBLE_PART_OF_PEAK:g} of its peak"
        )
    notes = {
        f"{found.skipped} step(s) skipped, left out of the figures": found.skipped,
        f"{found.nan} step(s) with a non-finite loss, left out": found.nan,
        "the run did not reach its end": not run.finished and run.failure is None,
        "only one steady step: no spread, so differences cannot be judged": len(times) == 1,
    }
    return replace(
        found,
        steady=sum(line.steps for line in steady),
        step_s=step_s,
        batch=full,
        tokens_per_s=tokens,
        range_s=(min(times), max(times)) if len(times) > 1 else None,
        tokens_per_s_per_device=tokens / run.world_size if tokens and run.world_size else None,
        model_tflops=model,
        hardware_tflops=hardware,
        mfu=model / peak if model and peak else None,
        hfu=hardware / peak if hardware and peak else None,
        problems=tuple(problems),
        notes=tuple(text for text, holds in notes.items() if holds),
    )


def _contradictions(run: MeasuredRun) -> Iterator[str]:
    """Find samples and times that disagree with the previous line; missing ones (NaN) agree."""
    for before, line in itertools.pairwise(run.lines):
        counted = line.consumed_samples - before.consumed_samples
        expected = line.global_batch_size * line.steps
        # the batch size of steps between two lines is not known
        ramp = run.get("rampup_batch_size") and line.steps > 1
        if abs(counted - expected) > 0 and not ramp:
            yield (
                f"iteration {line.iteration}: {counted} samples were counted since iteration "
                f"{before.iteration}, but {line.steps} step(s) of {line.global_batch_size} take "
                f"{expected}"
            )
        passed = line.time - before.time
        took = line.step_time_s * line.steps
        if took > 1.05 * passed + 1.0:  # tolerance for reading clocks
            yield (
                f"iteration {line.iteration}: says {took:.4g} s, but the clock moved by "
                f"{passed:.4g} s since iteration {before.iteration}"
            )


WEAK = "weak"
STRONG = "strong"
SWEEP = "sweep"
OTHER = "other"
_TITLES = {
    WEAK: "weak scaling: batch per replica fixed",
    STRONG: "strong scaling: batch fixed",
    OTHER: "runs",
}
_ALIKE = (
    "num_layers hidden_size seq_length tensor_model_parallel_size pipeline_model_parallel_size "
    "micro_batch_size virtual_pipeline_model_parallel_size fp16 bf16 recompute_granularity"
).split()
Range = tuple[float, float, float]
"""Low end, value, high end."""


@dataclass(frozen=True)
class Series:
    """Runs that differ in one parameter.

    kind       weak (batch per replica is fixed), strong (batch is fixed), sweep (of `parameter`) or
               other
    members    in order of the parameter
    base       smallest valid run of weak or strong scaling, the reference for efficiency
    published  the paper's model, if the runs are of it
    """

    name: str
    kind: str
    parameter: str
    members: tuple[Figures, ...]
    base: Figures | None
    published: Published | None

    @property
    def device(self) -> str:
        """Name the device of a process; GCD also for the paper's models."""
        return "GCD" if self.published else formulas.device_unit(self.members[0].run.device)

    def efficiency(self, member: Figures) -> Range | None:
        """Return throughput per device relative to the base; None without a base or if invalid.

        The ends compare the slowest steps of one run with the fastest of the other.
        """
        base = self.base and throughput(self.base)
        mine = throughput(member)
        if not base or not mine:
            return None
        return mine[0] / base[2], mine[1] / base[1], mine[2] / base[0] if base[0] else math.inf

    def best(self) -> list[Figures]:
        """Return the valid runs with the highest throughput per device, within their spread."""
        rates = [(rate, m) for m in self.members if (rate := throughput(m))]
        top = max((rate for rate, _ in rates), key=lambda rate: rate[1], default=None)
        return [m for rate, m in rates if top and rate[2] >= top[0]]

    def remarks(self, member: Figures) -> list[str]:
        """List remarks on a run, the most serious first."""
        said = [*filter(None, [member.run.failure]), *member.problems, *member.notes]
        if self.kind == SWEEP and len(self.members) > 1 and member in (best := self.best()):
            said.append(
                "best"
                if len(best) == 1
                else f"among the best: {len(best)} runs are equal within their spread"
            )
        return said

    def value(self, member: Figures) -> float | None:
        """Return a run's value of the varied parameter."""
        return member.run.point.get("value") if self.kind == SWEEP else member.run.world_size


def throughput(m: Figures) -> Range | None:
    """Return tokens/s per device in the slowest, the median and the fastest steady step.

    None for an invalid run. A single step has no range.
    """
    rate = m.tokens_per_s_per_device
    if rate is None or m.step_s is None or not m.valid:
        return None
    fast, slow = m.range_s or (0.0, math.inf)
    return rate * m.step_s / slow, rate, rate * m.step_s / fast if fast else math.inf


def compare(measured: Sequence[Figures]) -> list[Series]:
    """Group runs into series: by their points' experiment, or by model and replica layout."""
    groups: dict[str, list[Figures]] = {}
    for each in measured:
        key = each.run.point.get("experiment") or [each.run.get(name) for name in _ALIKE]
        groups.setdefault(str(key), []).append(each)
    return [_series(groups[key]) for key in sorted(groups)]


def _series(members: list[Figures]) -> Series:
    run = members[0].run
    point = members[0].run.point
    known = published(run.get("num_layers"), run.get("hidden_size"))
    name = point.get("experiment") or (known.name if known else f"{run.get('num_layers')} layers")
    if point.get("kind") == SWEEP:
        members.sort(key=lambda m: m.run.point.get("value") or 0)
        return Series(
            name, SWEEP, str(point.get("parameter") or "value"), tuple(members), None, known
        )
    members.sort(key=lambda m: m.run.world_size or 0)
    valid = [m for m in members if m.valid and m.run.world_size]
    # The kind depends on what is constant while the number of devices varies.
    kind = OTHER
    if len({m.run.world_size for m in valid}) > 1:
        shares = {m.batch / m.run.replicas for m in valid if m.batch and m.run.replicas}
        kind = STRONG if len({m.batch for m in valid}) == 1 else WEAK if len(shares) == 1 else OTHER
    return Series(name, kind, "devices", tuple(members), None if kind == OTHER else valid[0], known)


# -- tables ----------------------------------------------------------------------------------------


def state(m: Figures) -> str:
    """Return 'valid', 'invalid', or the state of a run without figures."""
    if m.run.failure is not None:
        return "not run" if m.run.failure == "not run yet" else "failed"
    return "valid" if m.valid else "invalid"


_FIGURES = (
    "steady step_s spread tokens_per_s tokens_per_s_per_device model_tflops hardware_tflops mfu "
    "hfu memory_bytes skipped"
).split()
_HEADS = {
    "run": "run",
    "devices": "{}s",
    "layout": "TPxPPxDP",
    "micro_batch": "micro",
    "global_batch": "batch",
    "step_s": "s/step",
    "spread": "spread",
    "tokens_per_s": "tokens/s",
    "model_tflops": "TFLOP/s",
    "mfu": "MFU",
    "hfu": "HFU",
    "efficiency": "efficiency",
    "within": "within",
    "memory_bytes": "GiB",
    "state": "state",
}
"""Column titles by the names of the CSV file; {} is a device."""
_SHARES = {"spread", "mfu", "hfu", "efficiency"}


def _row(series: Series, m: Figures) -> dict[str, Any]:
    """Return a run's unrounded values by the names of the CSV file; None for no figure."""
    sizes = (m.run.get(f"{name}_model_parallel_size") for name in ("tensor", "pipeline"))
    efficiency = series.efficiency(m)
    return {
        "series": series.name,
        "kind": series.kind,
        "parameter": series.parameter,
        "value": series.value(m),
        "run": m.run.name,
        "devices": m.run.world_size,
        "micro_batch": m.run.get("micro_batch_size"),
        "layout": "x".join(str(size or "?") for size in (*sizes, m.run.replicas)),
        "global_batch": m.batch or m.run.get("global_batch_size"),
        **{name: getattr(m, name) for name in _FIGURES},
        "efficiency": efficiency[1] if efficiency else None,
        "within": f"{efficiency[0]:.1%} to {efficiency[2]:.1%}"
        if efficiency and efficiency[2] < math.inf
        else None,
        "state": state(m),
        "remarks": "; ".join(series.remarks(m)),
    }


def _text(name: str, value: Any) -> str:
    """Format a cell, with three digits for measured values.

    >>> _text("step_s", 69.234), _text("tokens_per_s", 12345.6), _text("mfu", 0.3614), _text("hfu", None)
    ('69.2', '12,346', '36.14 %', '')
    """
    if value is None or isinstance(value, str):
        return value or ""
    if name in _SHARES:
        return f"{100 * value:.2f} %"
    value = value / 2**30 if name == "memory_bytes" else value
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 999.5 else f"{value:.3g}"


def table(series: Series) -> Table:
    """Make a table of the columns that are not empty."""
    says = (
        f"throughput against {series.parameter}" if series.kind == SWEEP else _TITLES[series.kind]
    )
    if series.base is not None:
        says += f"; efficiency against {series.base.run.world_size} {series.device}s"
    if series.published is not None:
        says += f"; published HFU: {series.published.percent} %"
    rows = [_row(series, m) for m in series.members]
    shown = [name for name in _HEADS if any(row[name] is not None for row in rows)]
    return Table(
        f"{series.name} ({says})",
        tuple(_HEADS[name].format(series.device) for name in shown),
        [tuple(_text(name, row[name]) for name in shown) for row in rows],
    )


def as_csv(everything: Sequence[Series]) -> str:
    """Format all runs as CSV, unrounded, with the remarks."""
    rows = [_row(series, m) for series in everything for m in series.members]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


# -- the picture -----------------------------------------------------------------------------------


def draw(everything: Sequence[Series], path: Path) -> bool:
    """Draw scaling efficiency with the published point, and the throughput of each sweep.

    Bars are the range of the steady steps. Returns False if there is nothing to draw. Raises
    ConfigError without matplotlib, or if the file cannot be written.
    """
    plot = pyplot(instead="give --no-plots")
    shown = [series for series in everything if series.kind == SWEEP or series.base is not None]
    if not shown:
        return False
    figure, row = plot.subplots(
        1, len(shown), figsize=(5.4 * len(shown), 4.4), layout="constrained", squeeze=False
    )
    for axes, series in zip(row[0], shown, strict=True):
        sweep = series.kind == SWEEP
        axes.set_title(series.name)
        axes.set_xlabel(series.parameter if sweep else f"{series.device}s")
        axes.set_ylabel(
            f"tokens/s per {series.device}" if sweep else f"efficiency of {series.kind} scaling"
        )
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        points = [
            (series.value(m), throughput(m) if sweep else series.efficiency(m))
            for m in series.members
        ]
        known = [
            (x, y[1], y[1] - y[0], y[2] - y[1] if y[2] < math.inf else 0.0)
            for x, y in points
            if x and y
        ]
        xs, ys, *bars = zip(*known, strict=True) if known else ((), (), (), ())
        axes.errorbar(xs, ys, bars, fmt="o-", capsize=3)
        target = getattr(series.published, series.kind, None)
        if target is not None:
            axes.plot(*target, "*", markersize=12, label=f"published: {100 * target[1]:.4g} %")
            axes.legend(frameon=False, loc="lower left")
        tidy(axes)
        axes.set_ylim(0, None)
    save(figure, path)
    return True
