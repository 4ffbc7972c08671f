"""Measured runs: read from their folders, figures of their steady steps, and what contradicts these. Needs no torch.

Steady steps are those after the warm-up, of the full batch, that were not skipped and whose loss was finite. A figure
is taken from the median of their times; the spread is their range over it.
"""
from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron import metrics_file
from megatron.errors import DataError
from megatron.metrics_file import SETTINGS, check_kinds, read_beside, read_records
from megatron.model import formulas

METRICS, POINT, RESULT = "metrics.jsonl", "point.json", "result.json"
# Best square matrix product measured on an MI250X GCD (4096 to 8192, fp16, ROCm 7.0): a training step cannot beat it.
_MEASURED_GEMM_TFLOPS = {"MI250": 115.3}
_PLAUSIBLE_PART_OF_PEAK = 0.9  # no training run comes near, beyond it the figure is wrong
_CLOCK = 0.05  # what reading clocks may explain


@dataclass(frozen=True)
class Line:
    """A record of a metrics file, under its names, of the `steps` steps that it stands for; times are means over them.

    step_time_s, time  seconds of a step; when it was written, in seconds since 1970
    memory_rank        the rank that held memory_bytes, the most; None in older files, which tell of rank 0 alone
    """

    iteration: int
    steps: int
    global_batch_size: int
    step_time_s: float
    consumed_samples: int | None = None
    model_tflops: float | None = None
    hardware_tflops: float | None = None
    memory_bytes: int | None = None
    memory_rank: int | None = None
    skipped: int | None = None
    nan: int | None = None
    loss_scale: float | None = None
    grad_norm: float | None = None
    time: float | None = None

    @property
    def step_s(self) -> float:
        return self.step_time_s


@dataclass(frozen=True)
class MeasuredRun:
    """A run: what it was to do, and its lines from the last start on.

    settings  by the names of Megatron's arguments, as far as they are known
    point     the description of an experiment's point; {} for any other run
    failure   why it gave no figures; None when it did
    finished  whether it came to its end
    pauses    (seconds since 1970) of what a run did beside steps: evaluations, checkpoints
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
    pauses: tuple[float, ...] = ()

    def get(self, name: str) -> Any:
        """A setting, None where it is not known."""
        return self.settings.get(name)

    @property
    def world_size(self) -> int | None:
        return self.get("world_size")

    @property
    def replicas(self) -> int | None:
        return self.get("data_parallel_size")


class NothingToReportError(DataError):
    """A folder without a run."""


# -- reading -----------------------------------------------------------------------------------------------------------


def find_runs(paths: Sequence[str | Path]) -> list[MeasuredRun]:
    """Every run below the given folders, and of the given files, in order of their names.

    A folder is a run when it has a metrics file or a point's description. Raises DataError for a path that is missing
    or has no run.
    """
    runs: list[MeasuredRun] = []
    for path in map(Path, paths):
        if not path.exists():
            raise DataError(f"{path}: no such file or folder: give folders of runs, or metrics files")
        marked = {file.parent for name in (METRICS, POINT) for file in path.rglob(name)}
        if not marked and path.is_dir():
            raise NothingToReportError(f"{path}: no run in it: a run has a {METRICS}")
        # What a run moved aside into its own folder (experiment.py) is none.
        own = [p for p in sorted(marked) if not (p.name.startswith("attempt-") and p.parent in marked)]
        runs += map(read_run, own or [path])
    names = Counter((run.point.get("experiment"), run.name) for run in runs)
    alike = {name for (_, name), count in names.items() if count > 1}
    return [replace(r, name=f"{r.path.parent.parent.name}/{r.name}") if r.name in alike else r for r in runs]


def read_run(path: str | Path) -> MeasuredRun:
    """One run: its folder or its metrics file. Raises DataError when nothing can be read from it."""
    path = Path(path)
    file = path / METRICS if path.is_dir() else path
    point = read_beside(file.parent / POINT, metrics_file.POINT)
    result = read_beside(file.parent / RESULT, metrics_file.RESULT)
    records = read_records(file) if file.exists() or not point else []
    if not (records or point or path.is_dir()):
        raise DataError(f"{path}: no metrics records in it: give folders of runs, or metrics files")
    run = _run(file, records, point)
    check_kinds(run.settings, SETTINGS, path)
    failure = result.get("reason") if result.get("status") not in (None, "done") else None
    if failure is None and not run.lines:
        failure = "not run yet" if not result and not file.exists() else "no iteration was logged"
    return replace(run, failure=failure)


def _run(path: Path, records: list[dict[str, Any]], point: dict[str, Any]) -> MeasuredRun:
    """Make a run of the records from the last start on."""
    starts = [at for at, record in enumerate(records) if record["event"] == "start"]
    records = records[starts[-1] :] if starts else records
    start: dict[str, Any] = records[0] if starts else {}
    settings = dict(point.get("settings", {})) | dict(start.get("config") or {})
    layout = start.get("layout") or {}
    for mine, theirs in (("world", "world_size"), ("data", "data_parallel_size")):
        if layout.get(mine):
            settings[theirs] = layout[mine]
    first, lines = int(start.get("iteration") or 0), list[Line]()
    names = {each.name for each in dataclasses.fields(Line)} - {"steps"}
    for record in records:
        if record["event"] == "iteration" and record.get("step_time_s") and record.get("global_batch_size"):
            steps = max(1, record["iteration"] - (lines[-1].iteration if lines else first))
            lines.append(Line(steps=steps, **{key: record[key] for key in names & record.keys()}))
    ends = [record for record in records if record["event"] == "end"]
    pauses = tuple(r["time"] for r in records if r["event"] in ("validation", "checkpoint") and r.get("time"))
    name = point.get("name") or (path.parent.name if path.name == METRICS else path.stem)
    finished = bool(ends) and ends[-1].get("reason") == "done"
    return MeasuredRun(name, path, settings, tuple(lines), first, start.get("device") or "", point, finished=finished,
                       pauses=pauses)  # fmt: skip


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judge:
    """What figures are judged by. warm_up: steps; peak: TFLOP/s of a device; None to take what is known."""

    warm_up: int | None = None
    peak_tflops: float | None = None


@dataclass(frozen=True)
class Figures:
    """One run's figures; None where they cannot be had. Rates are tokens per second; TFLOP/s are per device.

    range_s       the fastest and the slowest steady step; spread: their difference over the median
    paper_tflops  by the formula of Dash et al., whose published figures it compares with; paper_hfu over the peak
    memory_bytes  most that any rank held, and which: memory_rank. Where that is None, of rank 0 alone
    skipped, nan  steps of the whole run
    problems      what contradicts the figures: with any, they are invalid
    notes         what is worth knowing of valid ones
    """

    run: MeasuredRun
    skipped: int = 0
    nan: int = 0
    memory_bytes: int | None = None
    memory_rank: int | None = None
    steady: int = 0
    step_s: float | None = None
    range_s: tuple[float, float] | None = None
    batch: int | None = None
    tokens_per_s: float | None = None
    tokens_per_s_per_device: float | None = None
    model_tflops: float | None = None
    hardware_tflops: float | None = None
    paper_tflops: float | None = None
    mfu: float | None = None
    hfu: float | None = None
    paper_hfu: float | None = None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def device(self) -> str:
        """What TFLOP/s are per."""
        return formulas.device_unit(self.run.device)

    @property
    def valid(self) -> bool:
        """Whether there are figures and nothing contradicts them."""
        return self.step_s is not None and not self.problems and self.run.failure is None

    @property
    def spread(self) -> float | None:
        """None of a single step."""
        return (self.range_s[1] - self.range_s[0]) / self.step_s if self.range_s and self.step_s else None


def figures(run: MeasuredRun, judge: Judge | None = None) -> Figures:
    """Measure a run. A run without lines gives figures without values."""
    judge = judge or Judge()
    most = max(run.lines, key=lambda line: line.memory_bytes or 0, default=None)
    found = Figures(run, sum(line.skipped or 0 for line in run.lines), sum(line.nan or 0 for line in run.lines))
    if most is None:
        return found
    rank = 0 if run.world_size == 1 else most.memory_rank
    if most.memory_bytes:
        found = replace(found, memory_bytes=most.memory_bytes, memory_rank=rank)
    first = run.start_iteration + (run.point.get("warm_up", 1) if judge.warm_up is None else judge.warm_up)
    full = max(line.global_batch_size for line in run.lines)
    after = [line for line in run.lines if line.iteration - line.steps >= first and line.global_batch_size == full]
    steady = [line for line in after if not line.skipped and not line.nan]
    if not steady:
        steps = sum(line.steps for line in run.lines)
        why = (f"{found.skipped} of {steps} steps were skipped, {found.nan} had a loss that is not finite" if after
               else f"the run has {steps}, none after the warm-up with its full batch")  # fmt: skip
        return replace(found, problems=() if not after and run.failure else (f"no steady step: {why}",))
    times = [line.step_s for line in steady]
    step_s, world, sequence = statistics.median(times), run.world_size, run.get("seq_length")

    def stated(name: str) -> float | None:
        work = [rate * line.step_s for line in steady if (rate := getattr(line, name)) is not None]
        return statistics.median(work) / step_s if work else None

    dtype = "float16" if run.get("fp16") else "bfloat16" if run.get("bf16") else "float32"
    peak = judge.peak_tflops or formulas.peak_tflops(run.device, dtype)
    tokens = full * sequence / step_s if sequence else None
    rates = (stated("model_tflops"), stated("hardware_tflops"), _paper_tflops(run, full, step_s))
    mfu, hfu, paper_hfu = (rate / peak if rate is not None and peak else None for rate in rates)
    found = replace(
        found, steady=sum(line.steps for line in steady), step_s=step_s, batch=full, tokens_per_s=tokens,
        range_s=(min(times), max(times)) if len(times) > 1 else None,
        tokens_per_s_per_device=tokens / world if tokens and world else None,
        model_tflops=rates[0], hardware_tflops=rates[1], paper_tflops=rates[2], mfu=mfu, hfu=hfu, paper_hfu=paper_hfu,
    )  # fmt: skip
    measured = (value for name, value in _MEASURED_GEMM_TFLOPS.items() if name in run.device and dtype != "float32")
    ceiling = next(measured, math.inf if peak is None else _PLAUSIBLE_PART_OF_PEAK * peak)
    highest, over = max((rate for rate in rates if rate is not None), default=0.0), list[str]()
    if highest > ceiling:
        over.append(f"{highest:.4g} TFLOP/s per {found.device} are more than {ceiling:.4g}, which no training reaches: "
                    f"the best product measured on the device, or {_PLAUSIBLE_PART_OF_PEAK:g} of its peak")  # fmt: skip
    return replace(found, problems=(*_contradictions(run), *over), notes=tuple(_notes(found)))


def _paper_tflops(run: MeasuredRun, batch: int, step_s: float) -> float | None:
    """Hardware TFLOP/s of a device as Dash et al. count them, for what the run says of its sizes."""
    sizes = [run.get(name) for name in ("seq_length", "num_layers", "hidden_size", "vocab_size")]
    if not all(sizes) or not run.world_size:
        return None
    multiple = (run.get("make_vocab_size_divisible_by") or 128) * (run.get("tensor_model_parallel_size") or 1)
    sizes[3] = -(-sizes[3] // multiple) * multiple
    flops = formulas.paper_flops(batch, *sizes, checkpointing=run.get("recompute_granularity") == "full")
    return formulas.achieved_tflops(flops, step_s, run.world_size)


def _contradictions(run: MeasuredRun) -> Iterator[str]:
    """The first line that each thing is said against."""
    for check in (_samples, _clock, _hidden_skips):
        yield from itertools.islice(check(run), 1)


def _samples(run: MeasuredRun) -> Iterator[str]:
    for before, line in itertools.pairwise(run.lines):
        if before.consumed_samples is None or line.consumed_samples is None:
            continue
        counted, expected = line.consumed_samples - before.consumed_samples, line.global_batch_size * line.steps
        ramp = run.get("rampup_batch_size") and line.steps > 1  # the batch of steps between two lines is not known
        if counted != expected and not ramp:
            yield (f"iteration {line.iteration}: {counted} samples were counted since iteration {before.iteration}, "
                   f"but {line.steps} step(s) of {line.global_batch_size} take {expected}")  # fmt: skip


def _clock(run: MeasuredRun) -> Iterator[str]:
    """Steps cannot take longer than the clock says has passed, nor much less without a reason."""
    for before, line in itertools.pairwise(run.lines):
        if before.time is None or line.time is None:
            continue
        start, end, took = before.time, line.time, line.step_s * line.steps
        paused = any(start <= at <= end for at in run.pauses)
        if took > (end - start) * (1 + _CLOCK) + 1.0 or (not paused and end - start > 2 * took + 10.0):
            yield (f"iteration {line.iteration}: says {took:.4g} s, but the clock moved by {end - start:.4g} s since "
                   f"iteration {before.iteration}")  # fmt: skip


def _hidden_skips(run: MeasuredRun) -> Iterator[str]:
    """Steps that were skipped without being counted. A line shows the scale of before or after its skipped step."""
    for before, line in itertools.pairwise(run.lines):
        old, new = before.loss_scale, line.loss_scale
        if old and new and new < old and not (before.skipped or line.skipped):
            yield (f"iteration {line.iteration}: the loss scale fell from {old:g} to {new:g}, but no step is "
                   "counted as skipped")  # fmt: skip
    if run.lines and all(line.grad_norm == 0.0 and not line.skipped for line in run.lines):
        yield f"the gradient norm is 0 in all {len(run.lines)} lines, but no step is counted as skipped"


def _notes(found: Figures) -> Iterator[str]:
    if found.skipped:
        yield f"{found.skipped} step(s) skipped, left out of the figures"
    if found.nan:
        yield f"{found.nan} step(s) with a loss that is not finite, left out"
    if not found.run.finished and found.run.failure is None:
        yield "the run did not come to its end"
    if found.spread is None:
        yield "one steady step only: no spread, so nothing is told apart from it"
    elif found.spread > 0.1:
        yield f"step times differ by {found.spread:.0%} of their median"
