"""A measured run as its folder tells of it: metrics file, or log where there is none. Needs no torch."""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.errors import DataError
from megatron.planning import metrics_file
from megatron.planning.metrics_file import SETTINGS, check_kinds, read_beside, read_records
from megatron.planning.scaling.logs import read_log
from megatron.untrusted import open_regular

METRICS, POINT, RESULT = "metrics.jsonl", "point.json", "result.json"


@dataclass(frozen=True)
class Line:
    """What one log line or record says of the `steps` steps that it stands for; times are means over them.

    tflops are per device: `model_tflops` without recomputation, `hardware_tflops` with it. `memory_bytes` is the most
    that any rank had held, `memory_rank` which it was; where that is None, of rank 0 alone, as older files have it.
    `clock_s` is when it was written, in seconds since 1970.
    """

    iteration: int
    steps: int
    global_batch_size: int
    step_s: float
    consumed_samples: int | None = None
    samples_per_s: float | None = None
    tokens_per_s_per_device: float | None = None
    model_tflops: float | None = None
    hardware_tflops: float | None = None
    memory_bytes: int | None = None
    memory_rank: int | None = None
    skipped: int = 0
    nan: int = 0
    loss_scale: float | None = None
    grad_norm: float | None = None
    clock_s: float | None = None


@dataclass(frozen=True)
class MeasuredRun:
    """A run: what it was to do, and its lines from the last start on.

    settings  by the names of Megatron's arguments, as far as they are known
    point     the description of an experiment's point; {} for any other run
    failure   why it gave no figures; None when it did
    finished  whether it came to its end; None when the source does not tell
    pauses    (seconds since 1970) of what a run did beside steps: evaluations, checkpoints
    """

    name: str
    path: Path
    source: str
    settings: Mapping[str, Any]
    lines: tuple[Line, ...]
    start_iteration: int = 0
    device: str | None = None
    point: Mapping[str, Any] = field(default_factory=dict)
    failure: str | None = None
    finished: bool | None = None
    pauses: tuple[float, ...] = ()

    def get(self, name: str) -> Any:
        """A setting, None where it is not known."""
        return self.settings.get(name)

    @property
    def world_size(self) -> int | None:
        return self.settings.get("world_size")

    @property
    def replicas(self) -> int | None:
        return self.settings.get("data_parallel_size")

    @property
    def dtype_name(self) -> str:
        return "float16" if self.get("fp16") else "bfloat16" if self.get("bf16") else "float32"


class NothingToReportError(DataError):
    """A folder without a run."""


def find_runs(paths: Sequence[str | Path]) -> list[MeasuredRun]:
    """Every run below the given folders, and of the given files, in order of their names.

    A folder is a run when it has a metrics file or a point's description, or holds *.log, *.out or *.txt files with
    iteration lines and no such folder below it. Raises DataError for a path that is missing or has no run.
    """
    runs: list[MeasuredRun] = []
    for path in map(Path, paths):
        if path.is_file():
            runs.append(read_run(path))
        elif path.is_dir():
            found = _below(path)
            if not found:
                raise NothingToReportError(f"{path}: no run in it: neither {METRICS} nor a log with iteration lines")
            runs += found
        else:
            raise DataError(f"{path}: no such file or folder: give folders of runs, metrics files or logs")
    return _with_own_names(runs)


def _below(folder: Path) -> list[MeasuredRun]:
    marked = {file.parent for name in (METRICS, POINT) for file in folder.rglob(name)}
    if marked:
        return [read_run(each) for each in sorted(marked) if not _is_earlier_attempt(each, marked)]
    runs = []
    for file in sorted(each for pattern in ("*.log", "*.out", "*.txt") for each in folder.rglob(pattern)):
        found = read_log(file)
        if found.lines:
            runs.append(_from_log(file, file.stem, {}))
    return runs


def _is_earlier_attempt(folder: Path, runs: Set[Path]) -> bool:
    """Whether a run moved this folder aside into its own (experiments/folder.py), rather than its user named it so."""
    return folder.name.startswith("attempt-") and folder.parent in runs


def _with_own_names(runs: list[MeasuredRun]) -> list[MeasuredRun]:
    """Runs of one experiment have names of their own; others that share one get the folder above before it."""
    names = Counter((run.point.get("experiment"), run.name) for run in runs)
    return [
        replace(run, name=f"{_folder(run).parent.name}/{run.name}")
        if names[run.point.get("experiment"), run.name] > 1
        else run
        for run in runs
    ]


def _folder(run: MeasuredRun) -> Path:
    return run.path.parent if run.path.name == METRICS else run.path


def read_run(path: str | Path) -> MeasuredRun:
    """One run: its folder, its metrics file or its log. Raises DataError when nothing can be read from it."""
    path = Path(path)
    folder = path if path.is_dir() else path.parent
    metrics = folder / METRICS if path.is_dir() else path
    point = read_beside(folder / POINT, metrics_file.POINT)
    result = read_beside(folder / RESULT, metrics_file.RESULT)
    if metrics.is_file() and metrics.stat().st_size and _is_metrics(metrics):
        name = folder.name if metrics.name == METRICS else metrics.stem
        run = _from_metrics(metrics, point.get("name") or name, point)
    else:
        logs = [path] if path.is_file() else sorted(folder.glob("*.log"))
        log = next((each for each in logs if read_log(each).lines), None)
        if log is not None:
            run = _from_log(log, point.get("name") or (folder.name if path.is_dir() else log.stem), point)
        elif point:
            settings = dict(point.get("settings", {}))
            run = MeasuredRun(point.get("name", folder.name), folder, "none", settings, (), point=point)
        else:
            raise DataError(f"{path}: no metrics records and no iteration lines: give metrics.jsonl or a training log")
    failure = result.get("reason") if result.get("status") not in (None, "done") else None
    if failure is None and not run.lines:
        failure = "not run yet" if not result and not metrics.exists() else "no iteration was logged"
    check_kinds(run.settings, SETTINGS, path)
    return replace(run, failure=failure)


def _is_metrics(path: Path) -> bool:
    with open_regular(path, error=DataError) as file:
        return file.read(1 << 10).lstrip().startswith(b"{")


def _from_metrics(path: Path, name: str, point: Mapping[str, Any]) -> MeasuredRun:
    records = read_records(path)
    starts = [at for at, record in enumerate(records) if record["event"] == "start"]
    records = records[starts[-1] :] if starts else records
    start = records[0] if starts else {}
    settings = dict(point.get("settings", {})) | dict(start.get("config") or {})
    layout = start.get("layout") or {}
    for mine, theirs in (("world", "world_size"), ("data", "data_parallel_size")):
        if layout.get(mine):
            settings[theirs] = layout[mine]
    first = int(start.get("iteration") or 0)
    lines, before = [], first
    for record in records:
        if record["event"] == "iteration" and record.get("step_time_s") and record.get("global_batch_size"):
            lines.append(_line(record, before))
            before = record["iteration"]
    ends = [record for record in records if record["event"] == "end"]
    return MeasuredRun(
        name, path, "metrics", settings, tuple(lines), first, start.get("device"), dict(point),
        finished=bool(ends) and ends[-1].get("reason") == "done",
        pauses=tuple(r["time"] for r in records if r["event"] in ("validation", "checkpoint") and r.get("time")),
    )  # fmt: skip


def _line(record: Mapping[str, Any], before: int) -> Line:
    same = (
        "consumed_samples", "samples_per_s", "tokens_per_s_per_device", "model_tflops", "hardware_tflops",
        "memory_bytes", "memory_rank", "loss_scale", "grad_norm",
    )  # fmt: skip
    known: dict[str, Any] = {name: record.get(name) for name in same}
    return Line(
        record["iteration"], max(1, record["iteration"] - before), record["global_batch_size"],
        record["step_time_s"], skipped=record.get("skipped") or 0, nan=record.get("nan") or 0,
        clock_s=record.get("time"), **known,
    )  # fmt: skip


def _from_log(path: Path, name: str, point: Mapping[str, Any]) -> MeasuredRun:
    found = read_log(path)
    settings = dict(point.get("settings", {})) | found.settings
    world, tensor, pipeline = (
        settings.get(n) for n in ("world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")
    )
    if world and tensor and pipeline and not settings.get("data_parallel_size"):
        settings["data_parallel_size"] = world // (tensor * pipeline)
    lines, before = [], found.lines[0]["iteration"] - found.interval if found.lines else 0
    first = before
    for fields in found.lines:
        lines.append(Line(**fields, steps=max(1, fields["iteration"] - before)))
        before = fields["iteration"]
    return MeasuredRun(name, path, "log", settings, tuple(lines), first, found.device, dict(point))
