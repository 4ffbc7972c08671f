"""A run as its files tell it: records that still hold, events, the pipeline's timeline, provenance.

Needs no torch. Nothing that the files name is opened: only files of fixed names in the run's folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint.files import PROVENANCE, read_manifest
from megatron.checkpoint.find import find
from megatron.config.settings import all_options
from megatron.errors import DataError, MegatronError
from megatron.jobs.scaling import Figures, figures, find_runs
from megatron.metrics_file import read_records
from megatron.untrusted import read_json

Record = dict[str, Any]
TIMELINE = "timeline.json"
_TIMELINE_BYTES = 1 << 28
_MOST_BARS = 20_000  # of a timeline: more cannot be told apart
_AXES = ("iteration", "tokens", "hours")


@dataclass(frozen=True)
class Run:
    """One run of a report.

    name        unique in the report
    measured    figures of its steady steps since its last start
    records     all records; each with `tokens` and `hours` of the job, where known
    kept        those of them that hold: without what a resumed run did again
    timeline    spans of one step, see `read_timeline`; with `no_timeline`, why there are none
    provenance  of the newest checkpoint in the run's folder; with `no_provenance`, why there is none
    """

    name: str
    measured: Figures
    records: Sequence[Record]
    kept: Sequence[Record]
    timeline: Sequence[Record] = ()
    no_timeline: str = ""
    provenance: Record = field(default_factory=dict)
    no_provenance: str = ""

    def of(self, event: str) -> list[Record]:
        """Return the records of an event that hold."""
        return [record for record in self.kept if record["event"] == event]

    @property
    def start(self) -> Record:
        """Return the record of the last start; {} without one."""
        return next((r for r in reversed(self.records) if r["event"] == "start"), {})

    @property
    def config(self) -> Record:
        """Return all settings as far as they are known."""
        return {**self.measured.run.settings, **(self.start.get("config") or {})}

    @property
    def chosen(self) -> Record:
        """Return the settings that differ from their defaults."""
        defaults = {name: option.default for name, option in all_options().items()}
        different = {k: v for k, v in self.config.items() if _plain(defaults.get(k)) != v}
        return self.start.get("differs") or different

    @property
    def ended(self) -> str:
        """Say how the run ended."""
        last = next((r for r in reversed(self.records) if r["event"] in ("start", "end")), {})
        if last.get("event") == "end":
            reason = last.get("reason") or "without a reason"
            return "completed" if reason == "done" else f"ended: {reason}"
        failed = self.measured.run.failure
        return failed or "no end recorded: it is running, or was killed"


def read_runs(
    paths: Sequence[str], warm_up: int | None = None, peak_tflops: float | None = None
) -> list[Run]:
    """Read the runs in these folders and metrics files. Raises DataError if one is unreadable."""
    found = find_runs(paths)
    names = [run.name for run in found]
    runs = []
    for run in found:
        name = run.name if names.count(run.name) == 1 else str(run.path)
        records = read_records(run.path) if run.path.is_file() else []
        placed = list(_placed(records))
        folder = run.path.parent
        provenance, no_provenance = _provenance(folder)
        timeline, no_timeline = read_timeline(folder / TIMELINE)
        runs.append(
            Run(
                name,
                figures(dataclasses.replace(run, name=name), warm_up, peak_tflops),
                placed,
                holding(placed),
                timeline,
                no_timeline,
                provenance,
                no_provenance,
            )
        )
    return runs


def holding(records: Sequence[Record]) -> list[Record]:
    """Return the records that hold: a resumed run or a roll-back replaces later iterations."""
    kept: list[Record] = []
    for record in records:
        back = (
            record["iteration"] if record["event"] == "start" else record.get("back_to_iteration")
        )
        if back is not None:
            kept = [r for r in kept if r["event"] == "start" or (r.get("iteration") or 0) <= back]
        kept.append(record)
    return kept


def _placed(records: Sequence[Record]) -> Iterator[Record]:
    """Add to each record its tokens, and the hours that the job had run, without its pauses."""
    before = started = now = 0.0
    for record in records:
        time = record.get("time")
        if record["event"] == "start":
            before, started, now = before + now, time or 0.0, 0.0
        elif time is not None:
            now = max(now, time - started) if started else 0.0
        tokens = record.get("consumed_tokens")
        if tokens is None and record.get("seq_length") and record.get("consumed_samples"):
            tokens = record["consumed_samples"] * record["seq_length"]
        yield {**record, "tokens": tokens, "hours": (before + now) / 3600}


def axes(records: Sequence[Record]) -> dict[str, list[Any]]:
    """Return the possible horizontal positions of the records."""
    return {axis: [record.get(axis) for record in records] for axis in _AXES}


def read_timeline(path: Path) -> tuple[list[Record], str]:
    """Return the spans of a timeline {name, row, start_ms, ms, micro_batch}, or why there are none.

    Reads complete events ("ph": "X", times in microseconds) of the trace event format. There is a
    row for each stage: the first thread of the stage that a thread's metadata or an event's
    arguments name. The event's category is its name, unless it is "other": such events are around
    others.
    """
    if not path.exists():
        return [], f"no {path.name} in the run's folder"
    try:
        listed = read_json(path, _TIMELINE_BYTES, error=DataError).get("traceEvents")
    except DataError as error:
        return [], str(error)
    threads: dict[tuple[str, str], Any] = {}
    rows: dict[str, tuple[str, str]] = {}
    spans: list[Record] = []
    for event in listed if isinstance(listed, list) else []:
        if not isinstance(event, dict):
            continue
        thread = str(event.get("pid")), str(event.get("tid"))
        told: Record = event["args"] if isinstance(event.get("args"), dict) else {}
        if event.get("ph") == "M" and "pipeline" in told:
            threads[thread] = told["pipeline"]
        start: Any = event.get("ts")
        length: Any = event.get("dur")
        if event.get("ph") != "X" or not (_is_time(start) and _is_time(length)):
            continue
        name = str(event.get("cat") or told.get("op") or event.get("name"))
        row = f"stage {threads.get(thread, told.get('stage', thread[0]))}"
        if name != "other" and rows.setdefault(row, thread) == thread:
            times = {"start_ms": start / 1e3, "ms": length / 1e3}
            spans.append(
                {"name": name, "row": row, "micro_batch": told.get("micro_batch"), **times}
            )
    if not spans:
        return [], f"{path.name} has no complete event"
    begin = min(span["start_ms"] for span in spans)
    shown = sorted(spans, key=lambda span: (span["start_ms"], -span["ms"]))[:_MOST_BARS]
    return [{**span, "start_ms": span["start_ms"] - begin} for span in shown], ""


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e100


def _provenance(folder: Path) -> tuple[Record, str]:
    """Return the provenance of the newest good checkpoint in a folder, and why there is none."""
    try:
        checkpoint = find(folder).folder
        if checkpoint is None:
            return {}, "no checkpoint in the run's folder"
        manifest = read_manifest(checkpoint)
        if PROVENANCE not in manifest.files:
            return {}, f"{checkpoint.name} has no record of it"
        return {"checkpoint": checkpoint.name, **manifest.read_json(PROVENANCE)}, ""
    except MegatronError as error:
        return {}, str(error)


def events(run: Run) -> Iterator[Record]:
    """Yield {iteration, time, event, what} for whatever was not a plain step of the run."""
    started = False
    for record in run.records:
        event, what = record["event"], ""
        if event == "start":
            event, what = "resume", f"from iteration {record['iteration']}"
            if not (started or record["iteration"]):
                what = ""
            started = True
        elif event == "iteration":
            counts = {"skipped": record.get("skipped"), "not finite": record.get("nan")}
            event = "skip"
            what = ", ".join(f"{count} step(s) {name}" for name, count in counts.items() if count)
        elif event == "loss_spike":
            back = record.get("back_to_iteration")
            what = f"loss {record.get('lm_loss')}, median {record.get('median')}: "
            what += "training continued" if back is None else f"back to iteration {back}"
            event = "loss spike" if back is None else "roll-back"
        elif event == "stragglers":
            slow = [
                f"rank {one.get('rank')} ({one.get('place')}) {one.get('ratio')} x"
                for one in record.get("slow") or []
            ]
            what = ", ".join(slow[:8]) + (f" and {len(slow) - 8} more" if len(slow) > 8 else "")
        elif event == "not_finite":
            event, what = "not finite", f"{record.get('first')}"
        elif event == "checkpoint_failed":
            event, what = "save failed", record.get("reason") or "?"
        elif event == "rejected_checkpoint":
            event = "checkpoint rejected"
            what = (
                f"{record.get('folder')}: {record.get('reason')}; {record.get('instead')} instead"
            )
        elif event == "end" and record.get("reason") != "done":
            what = f"{record.get('reason')}"
        if what:
            yield {
                **{k: record.get(k) for k in ("iteration", "time")},
                "event": event,
                "what": what,
            }


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
