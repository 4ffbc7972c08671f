"""A run as recorded in its files: effective records, events, the timeline, provenance.

Needs no torch. Files that a run's files name are not opened, except those that a checkpoint's
manifest lists.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint.files import PROVENANCE, read_manifest
from megatron.checkpoint.find import find
from megatron.checkpoint.settings import plain
from megatron.config.settings import all_options
from megatron.errors import DataError, MegatronError
from megatron.jobs.scaling import Figures, figures, find_runs
from megatron.metrics_file import read_records
from megatron.untrusted import read_json
from megatron_report.interruptions import restarts, returns_to

Record = dict[str, Any]
TIMELINE = "timeline.json"
_TIMELINE_BYTES = 1 << 28
_MOST_BARS = 20_000  # of a timeline: more cannot be told apart
_EVENT_FIELDS = {
    "start": "iteration",
    "iteration": "skipped nan",
    "loss_spike": "lm_loss median back_to_iteration samples",
    "not_finite": "skipped_since first",
    "stragglers": "slow",
    "checkpoint_failed": "reason",
    "rejected_checkpoint": "folder reason instead",
    "end": "reason",
}
"""Fields of records by event. The report lists a record if one of its fields is not empty, every
restart, and every other start after the first record.
"""
_AXES = ("iteration", "tokens", "hours")


@dataclass(frozen=True)
class RecordedRun:
    """One run of a report.

    name       its name, or the path of its metrics file if another run has the same name
    measured   figures of its steady steps since its last start
    records    all records, each with the `tokens` (None if unknown) and `hours` of the run so far
    effective  the records that no later record replaces; see `effective_records`
    """

    name: str
    measured: Figures
    records: Sequence[Record]
    effective: Sequence[Record]

    def of(self, event: str) -> list[Record]:
        """Return the effective records of an event."""
        return [record for record in self.effective if record["event"] == event]

    @property
    def start(self) -> Record:
        """Return the record of the last start; {} without one."""
        return next((r for r in reversed(self.records) if r["event"] == "start"), {})

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the settings that are known."""
        return self.measured.run.settings

    @property
    def chosen(self) -> Mapping[str, Any]:
        """Return the settings that differ from their defaults, as far as they are known."""
        defaults = {name: option.default for name, option in all_options().items()}
        different = {k: v for k, v in self.config.items() if plain(defaults.get(k)) != v}
        return self.start.get("differs") or different

    @property
    def ended(self) -> str:
        """Return a description of how the run ended."""
        last = next((r for r in reversed(self.records) if r["event"] in ("start", "end")), {})
        if last.get("event") == "end":
            reason = last.get("reason") or "without a reason"
            return "completed" if reason == "done" else f"ended: {reason}"
        failed = self.measured.run.failure
        return failed or "no end recorded: it is running, or was killed"


def read_runs(
    paths: Sequence[str], warm_up: int | None = None, peak_tflops: float | None = None
) -> list[RecordedRun]:
    """Read the runs in these folders and metrics files. Raises DataError if one is unreadable."""
    recorded = find_runs(paths)
    names = [run.name for run in recorded]
    runs = []
    for run in recorded:
        name = run.name if names.count(run.name) == 1 else str(run.path)
        records = list(_placed(read_records(run.path) if run.path.is_file() else []))
        measured = figures(dataclasses.replace(run, name=name), warm_up, peak_tflops)
        runs.append(RecordedRun(name, measured, records, effective_records(records)))
    return runs


def effective_records(records: Sequence[Record]) -> list[Record]:
    """Return the records in effect.

    A resumed start and a roll-back drop the records of later iterations, except for starts.
    """
    effective: list[Record] = []
    for record in records:
        back = returns_to(record)
        if back is not None:
            effective = [
                r for r in effective if r["event"] == "start" or (r.get("iteration") or 0) <= back
            ]
        effective.append(record)
    return effective


def _placed(records: Sequence[Record]) -> Iterator[Record]:
    """Yield each record with the tokens and hours of the run so far.

    The time from the last record before a start to that start does not count.
    """
    before = started = now = 0.0
    for record in records:
        time = record.get("time")
        if record["event"] == "start":
            before = before + now
            started = time or 0.0
            now = 0.0
        elif time is not None:
            now = max(now, time - started) if started else 0.0
        tokens = record.get("consumed_tokens")
        if tokens is None and record.get("seq_length") and record.get("consumed_samples"):
            tokens = record["consumed_samples"] * record["seq_length"]
        yield {**record, "tokens": tokens, "hours": (before + now) / 3600}


def axes(records: Sequence[Record]) -> dict[str, list[Any]]:
    """Return the positions of the records on each horizontal axis."""
    return {axis: [record.get(axis) for record in records] for axis in _AXES}


def read_timeline(run: RecordedRun) -> tuple[list[Record], str]:
    """Return (spans of a run's timeline, why there are none); one of the two is empty.

    A span is {name, row, start_ms, ms, micro_batch}. Reads complete events ("ph": "X", times in
    microseconds) of the trace event format. Each stage has a row, which shows the first thread of
    that stage; a thread's metadata or an event's arguments name the stage. A span is named after
    the event's category, or else after its operation or name. Events of the category "other"
    enclose others and are left out.
    """
    path = run.measured.run.path.with_name(TIMELINE)
    if not path.exists():
        return [], f"no {path.name} in the run's folder"
    threads: dict[tuple[str, str], Any] = {}
    rows: dict[str, tuple[str, str]] = {}
    spans: list[Record] = []
    try:
        for event in read_json(path, _TIMELINE_BYTES, error=DataError)["traceEvents"]:
            thread = (str(event.get("pid")), str(event.get("tid")))
            arguments = event.get("args") or {}
            if event["ph"] == "M" and "pipeline" in arguments:
                threads[thread] = arguments["pipeline"]
            name = str(event.get("cat") or arguments.get("op") or event.get("name"))
            if event["ph"] != "X" or name == "other":
                continue
            row = f"stage {threads.get(thread, arguments.get('stage', thread[0]))}"
            if rows.setdefault(row, thread) == thread:
                start = event["ts"] / 1e3
                length = event["dur"] / 1e3
                if not abs(start) + abs(length) < 1e100:
                    raise OverflowError("its times are not finite")
                span = {"name": name, "row": row, "micro_batch": arguments.get("micro_batch")}
                spans.append({**span, "start_ms": start, "ms": length})
        spans.sort(key=lambda span: (span["start_ms"], -span["ms"]))
        begin = spans[0]["start_ms"]
        return [{**span, "start_ms": span["start_ms"] - begin} for span in spans[:_MOST_BARS]], ""
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        return [], f"{path.name} is not the timeline of a run ({error!r})"
    except DataError as error:
        return [], str(error)


def provenance(run: RecordedRun) -> tuple[Record, str]:
    """Return (provenance of the newest valid checkpoint in the run's folder, why there is none).

    One of the two is empty.
    """
    try:
        checkpoint = find(run.measured.run.path.parent).folder
        if checkpoint is None:
            return {}, "no checkpoint in the run's folder"
        manifest = read_manifest(checkpoint)
        if PROVENANCE not in manifest.files:
            return {}, f"{checkpoint.name} has no provenance"
        return {"checkpoint": checkpoint.name, **manifest.read_json(PROVENANCE)}, ""
    except MegatronError as error:
        return {}, str(error)


def events(run: RecordedRun) -> Iterator[Record]:
    """Yield {iteration, event, what, time} for each record to list; see `_EVENT_FIELDS`.

    A restart also has outage_s. The start that belongs to it is left out.
    """
    within = {restart.number: restart for restart in restarts(run.records)}
    starts_within = {restart.start for restart in within.values()}
    for number, record in enumerate(run.records):
        event = record["event"]
        if number in starts_within:
            continue
        if number in within:
            yield _restart(record, within[number].source)
            continue
        if (event, record.get("reason")) == ("end", "done") or (not number and event == "start"):
            continue
        fields = {name: record.get(name) for name in _EVENT_FIELDS.get(event, "").split()}
        what = [
            _describe(name, value) for name, value in fields.items() if value or event == "start"
        ]
        if what:
            label = {"start": "resume", "iteration": "skip"}.get(event, event.replace("_", " "))
            at = record.get("iteration")
            yield {
                "iteration": at,
                "event": label,
                "what": "; ".join(what),
                "time": record.get("time"),
            }


def _restart(record: Record, source: str) -> Record:
    """Return the event of a restart within the job, which continued from this source."""
    cause = record.get("cause") or "cause unknown"
    return {
        "iteration": record.get("iteration"),
        "event": "restart",
        "what": f"number {record.get('restart')}, from {source}; {cause}",
        "outage_s": record.get("outage_s"),
        "time": record.get("time"),
    }


def _describe(name: str, value: Any) -> str:
    """Return a name and its value as text; of a list of dicts, the first dicts without the name."""
    if isinstance(value, list) and isinstance(value[0], dict):
        tables = [", ".join(f"{key} {one[key]}" for key in one) for one in value[:8]]
        return "; ".join(tables) + (f"; and {len(value) - 8} more" if len(value) > 8 else "")
    return f"{name.replace('_', ' ')} {value}"
