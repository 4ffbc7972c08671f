"""Measured runs: metrics from their folders, figures for their steady steps, and contradictions.

Steady steps are steps after the warm-up, with the full batch, that were not skipped and had a
finite loss. Figures use the median of their times; the spread is their range divided by the median.
Two runs count as different only if the 95 % intervals of their medians do not overlap. This module
does not require torch.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from megatron import metrics_file
from megatron.config.model import EVEN_CHOICES
from megatron.errors import DataError
from megatron.metrics_file import SETTINGS, Records, check_kinds, read_beside, read_records
from megatron.model import formulas
from megatron.planner.published import Published, published

METRICS = "metrics.jsonl"
POINT = "point.json"
RESULT = "result.json"
# Best rate of a square matrix product measured on an MI250X GCD (4096 to 8192, fp16, ROCm 7.0): a
# training step cannot exceed it.
_MEASURED_DEVICE = "MI250"
_MEASURED_GEMM_TFLOPS = 115.3
_PLAUSIBLE_SHARE_OF_PEAK = 0.9  # out of reach for a training run, so higher figures are wrong


@dataclass(frozen=True)
class StepTimes:
    """A record in a metrics file, for `steps` steps with a mean time of `step_time_s`.

    iteration      the last of these steps, counted from 1
    model_tflops, hardware_tflops  TFLOP/s per device
    memory_bytes   peak so far over all ranks
    skipped, nan   numbers of steps that were skipped, and of steps with a non-finite loss
    time           when the record was written, in seconds since the epoch (1970)
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
    """A run: its settings, and its lines since the last start.

    path             its metrics file, which may be missing
    settings         by the names of Megatron's arguments, as far as they are known
    start_iteration  number of steps completed before the last start
    device           name of its devices; "" if unknown
    point            description of the point if the run is part of an experiment; otherwise {}
    failure          why the run failed or has no figures; None otherwise
    finished         whether it ran to the end
    left_out         number of lines in its file that are not records
    """

    name: str
    path: Path
    settings: Mapping[str, Any]
    lines: tuple[StepTimes, ...] = ()
    start_iteration: int = 0
    device: str = ""
    point: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None
    finished: bool = False
    left_out: int = 0

    @property
    def remark(self) -> str:
        """Return a notice about ignored lines in its file; "" if there are none."""
        if not self.left_out:
            return ""
        return f"{self.left_out} line(s) of {self.path} are not records of a run and were left out"

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
        # Leave out earlier attempts, which are in subfolders of a run's folder (runner.py).
        aside = {p for p in marked if p.name.startswith("attempt-") and p.parent in marked}
        runs += map(read_run, sorted(marked - aside) or [path])
    return runs


def read_run(path: str | Path) -> MeasuredRun:
    """Read one run from its folder or metrics file. Raises DataError if it is unreadable."""
    path = Path(path)
    file = path / METRICS if path.is_dir() else path
    point = read_beside(file.parent / POINT, metrics_file.POINT)
    result = read_beside(file.parent / RESULT, metrics_file.RESULT)
    records = read_records(file) if file.exists() or not point else Records()
    if not (records or point or path.is_dir()):
        raise DataError(f"{path}: no metrics records: give folders of runs, or metrics files")
    starts = [at for at, record in enumerate(records) if record["event"] == "start"]
    last = records[starts[-1] :] if starts else records
    start: dict[str, Any] = last[0] if starts else {}
    settings = {**point.get("settings", {}), **(start.get("config") or {})}
    layout = start.get("layout") or {}
    for name, short in (("world_size", "world"), ("data_parallel_size", "data")):
        settings[name] = layout.get(short) or settings.get(name)
    check_kinds(settings, SETTINGS, path)
    first = int(start.get("iteration") or 0)
    lines = list[StepTimes]()
    names = StepTimes.__dataclass_fields__.keys() - {"steps"}
    for record in last:
        timed = record.get("step_time_s") and record.get("global_batch_size")
        if record["event"] == "iteration" and timed:
            steps = max(1, record["iteration"] - (lines[-1].iteration if lines else first))
            figures = {name: record[name] for name in names if record.get(name) is not None}
            lines.append(StepTimes(steps=steps, **figures))
    failure = result.get("reason") if result.get("status") not in (None, "done") else None
    if failure is None and not lines:
        failure = "no iteration was logged" if result or file.exists() else "not run yet"
    ends = [record.get("reason") for record in last if record["event"] == "end"]
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
        records.left_out,
    )


# -- figures ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figures:
    """Figures of one run; None if unavailable. Rates are in tokens/s; TFLOP/s are per device.

    steady        number of steady steps
    step_s        their median seconds
    range_s       the fastest and the slowest steady step; None for a single step
    median_s      95 % interval of the median step; None for a single step
    independent   number of independent values among the steady ones, see independent_values
    batch         samples per step
    mfu, hfu      share of the device's peak in model and in hardware TFLOP/s
    memory_bytes  peak memory over all ranks
    skipped, nan  numbers of skipped steps and of non-finite losses in the whole run
    problems      contradictions; if there are any, the figures are invalid
    notes         other remarks
    """

    run: MeasuredRun
    skipped: int = 0
    nan: int = 0
    memory_bytes: int | None = None
    steady: int = 0
    step_s: float | None = None
    range_s: tuple[float, float] | None = None
    median_s: tuple[float, float] | None = None
    independent: float | None = None
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
        """Return whether the run did not fail and has figures without contradictions."""
        return self.step_s is not None and not self.problems and self.run.failure is None

    @property
    def spread(self) -> float | None:
        """Return the range of the steady steps over their median; None for a single step."""
        if not (self.range_s and self.step_s):
            return None
        return (self.range_s[1] - self.range_s[0]) / self.step_s


def figures(
    run: MeasuredRun, warm_up: int | None = None, peak_tflops: float | None = None
) -> Figures:
    """Compute the figures of a run; most are None for a run without lines.

    warm_up      number of steps that do not count; None: as in its point, otherwise 1
    peak_tflops  peak of a device; None: the known value
    """
    memory = max((line.memory_bytes for line in run.lines), default=0) or None
    result = Figures(
        run,
        sum(line.skipped for line in run.lines),
        sum(line.nan for line in run.lines),
        memory,
        notes=tuple(
            filter(None, (run.remark, run.get("moe_router_force_load_balancing") and EVEN_CHOICES))
        ),
    )
    if not run.lines:
        return result
    full = max(line.global_batch_size for line in run.lines)
    steady = _steady(run, run.point.get("warm_up", 1) if warm_up is None else warm_up, full)
    if not steady:
        why = (
            f"no steady step: of {sum(line.steps for line in run.lines)} steps {result.skipped} "
            f"were skipped, {result.nan} had a non-finite loss, and none of the others has the "
            "full batch after the warm-up"
        )
        return replace(result, problems=() if run.failure else (why,))
    times = [line.step_time_s for line in steady]
    several = len(times) > 1
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
    ceiling = math.inf if peak is None else _PLAUSIBLE_SHARE_OF_PEAK * peak
    if _MEASURED_DEVICE in run.device and dtype != "float32":
        ceiling = _MEASURED_GEMM_TFLOPS
    highest = max(model or 0.0, hardware or 0.0)
    problems = list(itertools.islice(_contradictions(run), 1))
    if highest > ceiling:
        problems.append(
            f"{highest:.4g} TFLOP/s per device is above the plausible limit of {ceiling:.4g}: the "
            f"best matrix product on such a device, or {_PLAUSIBLE_SHARE_OF_PEAK:g} of its peak"
        )
    notes = {
        f"{result.skipped} step(s) skipped, left out of the figures": result.skipped,
        f"{result.nan} step(s) with a non-finite loss, left out": result.nan,
        "the run did not reach its end": not run.finished and run.failure is None,
        "only one steady step: no spread, so differences cannot be judged": not several,
    }
    return replace(
        result,
        steady=sum(line.steps for line in steady),
        step_s=step_s,
        batch=full,
        tokens_per_s=tokens,
        range_s=(min(times), max(times)) if several else None,
        median_s=median_interval(times) if several else None,
        independent=independent_values(times),
        tokens_per_s_per_device=tokens / run.world_size if tokens and run.world_size else None,
        model_tflops=model,
        hardware_tflops=hardware,
        mfu=model / peak if model and peak else None,
        hfu=hardware / peak if hardware and peak else None,
        problems=tuple(problems),
        notes=(*result.notes, *(text for text, holds in notes.items() if holds)),
    )


def _steady(run: MeasuredRun, warm_up: int, full: int) -> list[StepTimes]:
    """Return the lines after the warm-up: full batch, no step skipped, all losses finite."""
    return [
        line
        for line in run.lines
        if line.iteration - line.steps >= run.start_iteration + warm_up
        and line.global_batch_size == full
        and not line.skipped
        and not line.nan
    ]


def independent_values(values: Sequence[float]) -> float:
    """Return the number of independent values that would scatter as `values` do.

    The number is n (1 - r) / (1 + r), as for an autoregressive process of order 1 (Wilks,
    Statistical Methods in the Atmospheric Sciences, section on the sampling distribution of a
    mean). r is the correlation between neighbours; it counts as 0 if it is negative, or for fewer
    than 10 values.
    """
    mean = statistics.fmean(values)
    n = len(values)
    variance = sum((value - mean) ** 2 for value in values)
    if n < 10 or not variance:
        return float(n)
    covariance = sum((a - mean) * (b - mean) for a, b in itertools.pairwise(values))
    r = min(0.99, max(0.0, covariance / variance))
    return n * (1 - r) / (1 + r)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the median, between two of the values.

    This is the interval of the sign test, which assumes no distribution (Conover, Practical
    Nonparametric Statistics, section 3.2, in its normal approximation), for the number of
    independent values. For up to 7 values it is their range.
    """
    ordered = sorted(values)
    n = independent_values(values)
    outside = max(0.0, math.floor(n / 2 - 0.98 * math.sqrt(n)))
    index = math.floor(outside * (len(ordered) - 1) / max(1.0, n - 1))
    return ordered[index], ordered[-1 - index]


def _contradictions(run: MeasuredRun) -> Iterator[str]:
    """Yield samples and times that contradict the previous line; missing values (NaN) never do."""
    for before, line in itertools.pairwise(run.lines):
        counted = line.consumed_samples - before.consumed_samples
        expected = line.global_batch_size * line.steps
        # the batch sizes of the steps between two lines are unknown
        ramp = run.get("rampup_batch_size") or run.get("step_batch_size_schedule")
        if abs(counted - expected) > 0 and not (ramp and line.steps > 1):
            yield (
                f"iteration {line.iteration}: {counted} samples were counted since iteration "
                f"{before.iteration}, but {line.steps} step(s) of {line.global_batch_size} take "
                f"{expected}"
            )
        passed = line.time - before.time
        took = line.step_time_s * line.steps
        if took > 1.05 * passed + 1.0:  # tolerance for reading clocks
            yield (
                f"iteration {line.iteration}: reports {took:.4g} s, but the clock moved by "
                f"{passed:.4g} s since iteration {before.iteration}"
            )


WEAK = "weak"
STRONG = "strong"
SWEEP = "sweep"
OTHER = "other"
_ALIKE = (
    "num_layers hidden_size seq_length tensor_model_parallel_size pipeline_model_parallel_size "
    "micro_batch_size virtual_pipeline_model_parallel_size fp16 bf16 recompute_granularity"
).split()
Range = tuple[float, float, float]
"""Low end, value, high end."""


@dataclass(frozen=True)
class Series:
    """A series of runs that differ in one parameter.

    kind       weak (batch per replica is fixed), strong (batch is fixed), sweep (of `parameter`) or
               other
    parameter  what varies, for headings
    members    in order of the parameter; unrelated runs in the given order
    base       reference for efficiency: the first valid run, which in weak or strong scaling is the
               smallest; None for a sweep
    published  the paper's model, if the runs train one
    """

    name: str
    kind: str
    parameter: str
    members: tuple[Figures, ...]
    base: Figures | None
    published: Published | None

    @property
    def scales(self) -> bool:
        """Return whether the number of devices varies, with a fixed batch or batch per replica."""
        return self.kind in (WEAK, STRONG)

    def efficiency(self, member: Figures) -> Range | None:
        """Return throughput per device relative to the base; None without a base or valid figures.

        The bounds compare the slow end of one run's interval with the fast end of the other's, so
        that they lie on different sides of 1 if the intervals overlap.
        """
        base = self.base and throughput(self.base)
        rates = throughput(member)
        if not base or not rates:
            return None
        return rates[0] / base[2], rates[1] / base[1], rates[2] / base[0] if base[0] else math.inf

    def best(self) -> list[Figures]:
        """Return the valid run with the highest throughput per device, and those equal to it.

        Runs count as equal if they differ only within the noise.
        """
        rates = [(rate, m) for m in self.members if (rate := throughput(m))]
        top = max((rate for rate, _ in rates), key=lambda rate: rate[1], default=None)
        return [m for rate, m in rates if top and rate[2] >= top[0]]

    def remarks(self, member: Figures) -> list[str]:
        """List remarks on a run, most serious first."""
        comments = [*filter(None, [member.run.failure]), *member.problems, *member.notes]
        if self.kind == SWEEP and len(self.members) > 1 and member in (best := self.best()):
            comments.append(
                "best"
                if len(best) == 1
                else f"among the best: {len(best)} runs are equal within the noise"
            )
        return comments

    def value(self, member: Figures) -> float | None:
        """Return a run's value of the varied parameter."""
        return member.run.point.get("value") if self.kind == SWEEP else member.run.world_size


def throughput(m: Figures) -> Range | None:
    """Return tokens/s per device for the median steady step, between the bounds of its interval.

    None for an invalid run. A single step has no interval: its bounds are 0 and infinity.
    """
    rate = m.tokens_per_s_per_device
    if rate is None or m.step_s is None or not m.valid:
        return None
    fast, slow = m.median_s or (0.0, math.inf)
    return rate * m.step_s / slow, rate, rate * m.step_s / fast if fast else math.inf


def compare(measured: Sequence[Figures]) -> list[Series]:
    """Group runs into series: by experiment, or by model and replica layout.

    If several groups belong to no experiment and show no scaling, their runs form one series, in
    the given order.
    """
    groups: dict[str, list[Figures]] = {}
    for each in measured:
        key = each.run.point.get("experiment") or [each.run.get(name) for name in _ALIKE]
        groups.setdefault(str(key), []).append(each)
    series_list = [_series(groups[key]) for key in sorted(groups)]
    loose = [s for s in series_list if s.kind == OTHER and not s.members[0].run.point]
    if len(loose) > 1:
        loose_members = {id(member) for series in loose for member in series.members}
        members = tuple(m for m in measured if id(m) in loose_members)
        base = next((m for m in members if m.valid), None)
        series_list = [s for s in series_list if s not in loose]
        series_list.append(Series("runs", OTHER, "devices", members, base, None))
    return series_list


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
    return Series(name, kind, "devices", tuple(members), valid[0] if valid else None, known)


# -- the table -------------------------------------------------------------------------------------


def state(m: Figures) -> str:
    """Return 'valid' or 'invalid', or for a run without figures 'failed' or 'not run'."""
    if m.run.failure is not None:
        return "not run" if m.run.failure == "not run yet" else "failed"
    return "valid" if m.valid else "invalid"


_FIGURES = (
    "steady independent step_s spread tokens_per_s_per_device model_tflops "
    "hardware_tflops mfu hfu memory_bytes skipped"
).split()


def row(series: Series, m: Figures) -> dict[str, object]:
    """Return a run's unrounded values by name; None for missing figures.

    `noise` is half the width of the median's interval, as a share of the median.
    """
    sizes = (m.run.get(f"{name}_model_parallel_size") for name in ("tensor", "pipeline"))
    low, efficiency, high = series.efficiency(m) or (None, None, None)
    against = m is not series.base and efficiency is not None and low is not None and high
    interval = m.median_s
    step_s = m.step_s
    return {
        "run": m.run.name,
        "verdict": _verdict(low or 0.0, efficiency or 0.0, high or 0.0) if against else None,
        "value": series.value(m) if series.kind == SWEEP else None,
        "devices": m.run.world_size,
        "layout": "x".join(str(size or "?") for size in (*sizes, m.run.replicas)),
        "tokens_per_s": m.tokens_per_s,
        "noise": (interval[1] - interval[0]) / 2 / step_s if interval and step_s else None,
        "efficiency": efficiency,
        "efficiency_interval": [low, high if high != math.inf else None] if efficiency else None,
        "state": state(m),
        "micro_batch": m.run.get("micro_batch_size"),
        "global_batch": m.batch or m.run.get("global_batch_size"),
        **{name: getattr(m, name) for name in _FIGURES},
        "remarks": "; ".join(series.remarks(m)) or None,
    }


def _verdict(low: float, efficiency: float, high: float) -> str:
    """Describe how a run compares with the base run.

    >>> _verdict(0.97, 1.0, 1.02), _verdict(1.02, 1.05, 1.08), _verdict(0.9, 0.95, 0.99)
    ('no difference beyond noise', '5.0 % faster (2.0 to 8.0 %)', '5.0 % slower (1.0 to 10.0 %)')
    """
    if low <= 1 <= high:
        return "no difference beyond noise"
    less, most = sorted((abs(low - 1), abs(high - 1)))
    word = "faster" if low > 1 else "slower"
    return f"{100 * abs(efficiency - 1):.1f} % {word} ({100 * less:.1f} to {100 * most:.1f} %)"
