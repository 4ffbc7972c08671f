"""Measured runs: read from their folders, figures of their steady steps, and what contradicts these. Needs no torch.

Steady steps are those after the warm-up, of the full batch, that were not skipped and whose loss was finite. A figure
is taken from the median of their times; the spread is their range over it.
"""
from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
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


@dataclass(frozen=True)
class Line:
    """A record of a metrics file, under its names, of the `steps` steps that it stands for; step_time_s is their mean.

    time: when it was written, in seconds since 1970; times_ms: of the parts of a step, of the fastest and the slowest
    rank.
    """

    iteration: int
    steps: int
    global_batch_size: int
    step_time_s: float
    consumed_samples: int | None = None
    model_tflops: float | None = None
    hardware_tflops: float | None = None
    memory_bytes: int | None = None
    skipped: int | None = None
    nan: int | None = None
    time: float | None = None
    times_ms: Mapping[str, Any] | None = None

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
        """A setting, None where it is not known."""
        return self.settings.get(name)

    @property
    def world_size(self) -> int | None:
        return self.get("world_size")

    @property
    def replicas(self) -> int | None:
        return self.get("data_parallel_size")


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
            raise DataError(f"{path}: no run in it: a run has a {METRICS}")
        # What a run moved aside into its own folder (runner.py) is none.
        own = [p for p in sorted(marked) if not (p.name.startswith("attempt-") and p.parent in marked)]
        runs += map(read_run, own or [path])
    return runs


def read_run(path: str | Path) -> MeasuredRun:
    """Read one run: its folder or its metrics file. Raises DataError when nothing can be read from it."""
    path = Path(path)
    file = path / METRICS if path.is_dir() else path
    point = read_beside(file.parent / POINT, metrics_file.POINT)
    result = read_beside(file.parent / RESULT, metrics_file.RESULT)
    records = read_records(file) if file.exists() or not point else []
    if not (records or point or path.is_dir()):
        raise DataError(f"{path}: no metrics records in it: give folders of runs, or metrics files")
    starts = [at for at, record in enumerate(records) if record["event"] == "start"]
    records = records[starts[-1] :] if starts else records
    start: dict[str, Any] = records[0] if starts else {}
    sizes = {"world_size": "world", "data_parallel_size": "data"}
    layout = {name: (start.get("layout") or {}).get(short) for name, short in sizes.items()}
    settings = {**point.get("settings", {}), **(start.get("config") or {}), **{k: v for k, v in layout.items() if v}}
    check_kinds(settings, SETTINGS, path)
    first, lines = int(start.get("iteration") or 0), list[Line]()
    names = {each.name for each in fields(Line)} - {"steps"}
    for record in records:
        if record["event"] == "iteration" and record.get("step_time_s") and record.get("global_batch_size"):
            steps = max(1, record["iteration"] - (lines[-1].iteration if lines else first))
            lines.append(Line(steps=steps, **{key: record[key] for key in names & record.keys()}))
    failure = result.get("reason") if result.get("status") not in (None, "done") else None
    if failure is None and not lines:
        failure = "no iteration was logged" if result or file.exists() else "not run yet"
    ends = [record.get("reason") for record in records if record["event"] == "end"]
    name = point.get("name") or (file.parent.name if file.name == METRICS else file.stem)
    return MeasuredRun(name, file, settings, tuple(lines), first, start.get("device") or "", point, failure,
                       ends[-1:] == ["done"])  # fmt: skip


# -- figures -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judge:
    """What figures are judged by. warm_up: steps; peak_tflops: of a device; None: what is known."""

    warm_up: int | None = None
    peak_tflops: float | None = None


@dataclass(frozen=True)
class Figures:
    """One run's figures; None where they cannot be had. Rates are tokens per second; TFLOP/s are per device.

    range_s       the fastest and the slowest steady step, None of a single one
    memory_bytes  most that any rank held
    skipped, nan  steps of the whole run
    problems      what contradicts the figures: with any, they are invalid
    notes         what is worth knowing of valid ones
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
        """Whether there are figures and nothing contradicts them."""
        return self.step_s is not None and not self.problems and self.run.failure is None

    @property
    def spread(self) -> float | None:
        """Range of the steady steps over their median; None of a single step."""
        return (self.range_s[1] - self.range_s[0]) / self.step_s if self.range_s and self.step_s else None


def figures(run: MeasuredRun, judge: Judge | None = None) -> Figures:
    """Measure a run. A run without lines gives figures without values."""
    judge = judge or Judge()
    memory = max((line.memory_bytes or 0 for line in run.lines), default=0) or None
    found = Figures(run, sum(line.skipped or 0 for line in run.lines), sum(line.nan or 0 for line in run.lines), memory)
    if not run.lines:
        return found
    steady = steady_lines(run, judge.warm_up)
    if not steady:
        why = (f"no steady step: of {sum(line.steps for line in run.lines)} steps {found.skipped} were skipped, "
               f"{found.nan} had a loss that is not finite, and none of the others is after the warm-up with the full "
               "batch")  # fmt: skip
        return replace(found, problems=() if run.failure else (why,))
    times, full = [line.step_s for line in steady], steady[0].global_batch_size
    step_s, sequence = statistics.median(times), run.get("seq_length")
    tokens = full * sequence / step_s if sequence else None

    def stated(name: str) -> float | None:
        work = [rate * line.step_s for line in steady if (rate := getattr(line, name)) is not None]
        return statistics.median(work) / step_s if work else None

    dtype = "float16" if run.get("fp16") else "bfloat16" if run.get("bf16") else "float32"
    peak = judge.peak_tflops or formulas.peak_tflops(run.device, dtype)
    model, hardware = stated("model_tflops"), stated("hardware_tflops")
    measured = (value for name, value in _MEASURED_GEMM_TFLOPS.items() if name in run.device and dtype != "float32")
    ceiling = next(measured, math.inf if peak is None else _PLAUSIBLE_PART_OF_PEAK * peak)
    highest, problems = max(model or 0.0, hardware or 0.0), list(itertools.islice(_contradictions(run), 1))
    if highest > ceiling:
        problems.append(f"{highest:.4g} TFLOP/s per device are more than {ceiling:.4g}, which no training reaches: "
                        f"the best product measured on it, or {_PLAUSIBLE_PART_OF_PEAK:g} of its peak")  # fmt: skip
    notes = {
        f"{found.skipped} step(s) skipped, left out of the figures": found.skipped,
        f"{found.nan} step(s) with a loss that is not finite, left out": found.nan,
        "the run did not come to its end": not run.finished and run.failure is None,
        "one steady step only: no spread, so nothing is told apart from it": len(times) == 1,
    }
    return replace(
        found, steady=sum(line.steps for line in steady), step_s=step_s, batch=full, tokens_per_s=tokens,
        range_s=(min(times), max(times)) if len(times) > 1 else None,
        tokens_per_s_per_device=tokens / run.world_size if tokens and run.world_size else None,
        model_tflops=model, hardware_tflops=hardware, mfu=model / peak if model and peak else None,
        hfu=hardware / peak if hardware and peak else None,
        problems=tuple(problems), notes=tuple(text for text, holds in notes.items() if holds),
    )  # fmt: skip


def steady_lines(run: MeasuredRun, warm_up: int | None = None) -> list[Line]:
    """The lines of a run's steady steps; warm_up: how many do not count, None: as its point says, else 1."""
    first = run.start_iteration + (run.point.get("warm_up", 1) if warm_up is None else warm_up)
    full = max((line.global_batch_size for line in run.lines), default=0)
    return [line for line in run.lines if line.iteration - line.steps >= first and line.global_batch_size == full
            and not line.skipped and not line.nan]  # fmt: skip


def _contradictions(run: MeasuredRun) -> Iterator[str]:
    """Samples or times that do not agree with the line before."""
    for before, line in itertools.pairwise(run.lines):
        counted, expected = _between(before, line, "consumed_samples"), line.global_batch_size * line.steps
        ramp = run.get("rampup_batch_size") and line.steps > 1  # the batch of steps between two lines is not known
        if counted not in (None, expected) and not ramp:
            yield (f"iteration {line.iteration}: {counted} samples were counted since iteration {before.iteration}, "
                   f"but {line.steps} step(s) of {line.global_batch_size} take {expected}")  # fmt: skip
        passed, took = _between(before, line, "time"), line.step_s * line.steps
        if passed is not None and took > 1.05 * passed + 1.0:  # what reading clocks may explain
            yield (f"iteration {line.iteration}: says {took:.4g} s, but the clock moved by {passed:.4g} s since "
                   f"iteration {before.iteration}")  # fmt: skip


def _between(before: Line, line: Line, name: str) -> float | None:
    old, new = getattr(before, name), getattr(line, name)
    return None if old is None or new is None else new - old
