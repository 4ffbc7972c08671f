"""Report of a disturbed run: its time by cause, from its metrics file, and the prediction.

Every second between the first start and the last end is one of the shares of EffectiveTime
(megatron/planner/effective_time.py). A step counts if it is the last of its number: the others are
repeated.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from benchmarks.faults import history
from megatron.planner.effective_time import DAY_S, EffectiveTime, LongRun, effective_time
from megatron.planner.effective_time_simulation import quantile, simulate_months

if TYPE_CHECKING:
    from benchmarks.faults.month import Start

_MONTHS = 200
SAVES = ("checkpoint", "local_checkpoint")
"""Events of saves to disk and to memory."""


@dataclass
class Timeline:
    """Seconds of a run by cause, and what they consist of.

    wall_s     time from the first start to the last end
    seconds    time by share
    step_s     median time of a step
    faults     number of faults by kind of the model, see kind_of
    detection  seconds from each fault of a kind to its detection
    recovery   seconds from each fault to the next step of the job, without that step, by case;
               None for faults that stop nothing
    restarts   seconds of each restart within the job, to its first step
    starts     seconds of each start, to its first step
    breaks     seconds from the last step or restart of each job that a fault has ended to its end
    saves      seconds of each stall by a save, to disk ("checkpoint") and "local_checkpoint"
    delays     seconds from the begin of each such save until it counts
    ends       seconds from the last step to the end of each job that left by itself
    lost       number of steps that were repeated
    ways       how many ranks came back in-process, forked, as a spare, and by a new start
    states     how many restarts loaded a state from memory, and from disk
    """

    wall_s: float
    step_s: float
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    faults: Counter[str] = field(default_factory=Counter)
    detection: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    recovery: dict[str, list[float | None]] = field(default_factory=lambda: defaultdict(list))
    restarts: list[float] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)
    breaks: list[float] = field(default_factory=list)
    saves: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    delays: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    ends: list[float] = field(default_factory=list)
    lost: int = 0
    ways: Counter[str] = field(default_factory=Counter)
    states: Counter[str] = field(default_factory=Counter)

    @property
    def effective(self) -> float:
        return self.seconds["effective"] / self.wall_s

    def lines(self) -> Iterator[str]:
        """Yield lines that describe the faults and what became of them."""
        yield f"steps of {1000 * self.step_s:.1f} ms; {self.lost} steps were repeated"
        yield f"{'fault':30} {'number':>6} {'s to the next step: median':>27} {'worst':>7}"
        for case, outages in sorted(self.recovery.items()):
            stopped = [one for one in outages if one is not None]
            seconds = f"{median(stopped):27.2f} {max(stopped):7.2f}" if stopped else ""
            yield f"{case:30} {len(outages):6} {seconds}".rstrip()
        timed = {"restarts": self.restarts, "starts": self.starts} | {
            f"stalls ({event})": times for event, times in self.saves.items()
        }
        for name, times in timed.items():
            if times:
                yield (
                    f"{len(times)} {name}: {median(times):.2f} s in the median, {max(times):.2f} s at most"
                )
        yield "restarts loaded states from " + ", ".join(f"{k} {n}" for k, n in self.states.items())
        yield "ranks came back: " + ", ".join(f"{n} {way}" for way, n in self.ways.most_common())


def timeline(metrics: Path, marks: Path, starts: Sequence[Start]) -> Timeline:
    """Return where the time went.

    metrics  folder of the metrics file
    marks    folder in which each fault has left a file with its time
    """
    faults = [json.loads(mark.read_text()) for mark in marks.glob("fault_???")]
    due = [json.loads(mark.read_text()) for mark in marks.glob("due_???")]
    due = [
        {**mark, "kind": "process", "moment": "step"} for mark in due if mark["moment"] == "restart"
    ]
    again = [float(mark.name.removeprefix("again_")) for mark in marks.glob("again_*")]
    records = history.records(metrics)
    durations = [
        two["time"] - one["time"]
        for one, two in pairwise(records)
        if one["event"] == two["event"] == "iteration"
    ]
    result = Timeline(starts[-1].ended - starts[0].begun, median(durations))
    for fault in faults:
        result.faults[kind_of(fault)] += 1
        result.recovery[case_of(fault)].append(_recovery(fault, records, starts, result.step_s))
    result.faults["process"] += len(due)
    for record in records:
        if record["event"] in SAVES:
            result.saves[record["event"]].append(record["stall_s"])
            result.delays[record["event"]].append(record["elapsed_s"])
    restarts = sum(record["event"] == "restart" for record in records)
    local = sum(record["event"] == "local_checkpoint_loaded" for record in records)
    result.states.update({"memory": local, "disk": restarts - local})
    _Accounts(result, records, [*faults, *due], again, starts).settle()
    return result


def case_of(fault: Mapping[str, Any]) -> str:
    """Return what a fault is called in the table."""
    case = str(fault["kind"]) + (f" of {fault['flip']}" if fault["flip"] else "")
    return case + (f" during a {fault['moment']}" if fault["moment"] != "step" else "")


def kind_of(fault: Mapping[str, Any]) -> str:
    """Return the kind of fault as which the model counts it.

    Only a flipped weight trains on. Flipped bits of local checkpoints cost as much as the death of
    the process that follows, and those on disk a new start.
    """
    kinds = {"memory": "process", "disk": "maintenance"}
    return kinds.get(fault["flip"], str(fault["kind"]))


def _recovery(
    fault: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    starts: Sequence[Start],
    step_s: float,
) -> float | None:
    """Return the seconds from a fault to the job's next step after a restart or a new start."""
    if fault["kind"] in ("slow", "storage"):
        return None
    again = [float(record["time"]) for record in records if record["event"] == "restart"]
    again += [start.begun for start in starts]
    begun = min((at for at in again if at > fault["time"]), default=None)
    if begun is None:
        return None
    steps = (float(r["time"]) for r in records if r["event"] == "iteration")
    step = min((at for at in steps if at > begun), default=begun)
    return max(step - float(fault["time"]) - step_s, 0.0)


class _Accounts:
    """Adds every interval between two events of a run to its timeline."""

    def __init__(
        self,
        result: Timeline,
        records: Sequence[Mapping[str, Any]],
        faults: Sequence[Mapping[str, Any]],
        again: Sequence[float],
        starts: Sequence[Start],
    ) -> None:
        self.result = result
        # Faults that stop training at once, with their kinds.
        self.faults = sorted(
            [(f["time"], f["kind"]) for f in faults] + [(at, "device") for at in again]
        )
        self.slow = {
            n for f in faults if f["kind"] == "slow" for n in range(f["step"] + 1, f["step"] + 25)
        }
        last = {r["iteration"]: n for n, r in enumerate(records) if r["event"] == "iteration"}
        self.counts = set(last.values())
        numbered = [
            (r["time"], r["event"], r, n)
            for n, r in enumerate(records)
            if r["event"] in ("iteration", "restart")
        ]
        numbered += [(s.begun, "begin", {}, -1) for s in starts]
        numbered += [(s.ended, "end", {"codes": s.codes}, -1) for s in starts]
        self.stalls = sorted((r["time"], r["stall_s"]) for r in records if r["event"] in SAVES)
        self.events = sorted(numbered, key=lambda event: event[0])

    def settle(self) -> None:
        result = self.result
        previous = self.events[0]
        for event in self.events[1:]:
            at, kind, record, number = event
            start, before, *_ = previous
            counts = number in self.counts
            if kind == "iteration":
                result.lost += not counts
            if before == "iteration" and kind == "iteration":
                self._step(start, at, record["iteration"], counts)
            elif before in ("begin", "restart") and kind == "iteration":
                step_s = min(result.step_s, at - start)
                self._add("effective" if counts else "lost_steps", step_s)
                self._recovered("starts" if before == "begin" else "restarts", at - start - step_s)
            elif kind == "restart":
                ended = before == "begin"  # a fault before the first step
                self._restart(start, at, record["outage_s"], "starts" if ended else "lost_steps")
            elif kind == "end":
                self._end(start, at, record["codes"], before)
            else:
                self._add("queue", at - start)
            previous = event
        self.result.ways += self._ways()

    def _ways(self) -> Counter[str]:
        """Return how ranks came back; the numbers in the records are of one job so far."""
        ways, of_job = Counter[str](), Counter[str]()
        for _, kind, record, _ in self.events:
            if kind == "restart":
                of_job = Counter(record["ways"])
            elif kind == "begin":
                ways += of_job
                of_job.clear()
        ways += of_job
        begins = sum(kind == "begin" for _, kind, _, _ in self.events)
        return ways + Counter({"new starts of the job": begins - 1})

    def _add(self, share: str, seconds: float) -> None:
        self.result.seconds[share] += seconds

    def _recovered(self, share: str, seconds: float) -> None:
        """Add the end of a restart or a start, whose begin has been added."""
        self._add(share, seconds)
        if share == "restarts":
            self.result.restarts[-1] += seconds
        else:
            self.result.starts.append(seconds)

    def _step(self, start: float, at: float, iteration: int, counts: bool) -> None:
        if not counts:
            self._add("lost_steps", at - start)
            return
        stalled = 0.0
        while self.stalls and self.stalls[0][0] <= at:
            time, seconds = self.stalls.pop(0)
            stalled += seconds if time > start else 0.0
        stalled = min(stalled, at - start)
        self._add("saves", stalled)
        slow = (
            max(at - start - stalled - self.result.step_s, 0.0) if iteration in self.slow else 0.0
        )
        self._add("slow_ranks", slow)
        self._add("effective", at - start - stalled - slow)

    def _fault_between(self, start: float, end: float) -> tuple[float, str] | None:
        return next((fault for fault in self.faults if start - 0.5 <= fault[0] <= end), None)

    def _restart(self, start: float, at: float, outage_s: float, share: str) -> None:
        """Add the time from the last step before a restart to the moment at which it is complete."""
        detected = max(at - outage_s, start)
        fault = self._fault_between(start, detected)
        begin = min(max(fault[0], start), detected) if fault else detected
        self._add(share, begin - start)
        self._add("detection", detected - begin)
        self._add("restarts", at - detected)
        if fault:
            self.faults.remove(fault)
            self.result.detection[fault[1]].append(detected - begin)
        self.result.restarts.append(at - detected)

    def _end(self, start: float, at: float, codes: Sequence[int], before: str) -> None:
        """Add the time from the last event of a job to its end."""
        if before == "begin":
            self._add("starts", at - start)
        elif all(code in (0, -9) for code in codes):
            self._add("saves", at - start)
            self.result.ends.append(at - start)
        else:
            fault = self._fault_between(start, at)
            if fault:
                self.faults.remove(fault)
            self._add("detection", at - start)
            self.result.breaks.append(at - start)


def predicted_run(
    measured: Timeline,
    ranks: int,
    spares: int,
    local_steps: int,
    disk_steps: int,
    slow: tuple[int, float],
) -> LongRun:
    """Return the run that the model has to predict: measured times, and the faults that occurred.

    slow  number of steps for which a rank is slow, and seconds by which each of them takes longer

    Its nodes have one rank each. Faults occur at steps, so their rates are those of the time in which
    the job trains. A full disk stops nothing here, and a slow rank recovers by itself.
    """

    def mean(times: Sequence[float]) -> float:
        return fmean(times) if times else 0.0

    down = ("detection", "restarts", "starts", "queue")
    days = (measured.wall_s - sum(measured.seconds[share] for share in down)) / DAY_S
    steps, more_s = slow
    slow_s = steps * (measured.step_s + more_s)
    return LongRun(
        nodes=ranks,
        rates={kind: count / (ranks * days) for kind, count in measured.faults.items()},
        days=measured.wall_s / DAY_S,
        spare_nodes=spares,
        step_s=measured.step_s,
        local_steps=local_steps,
        local_stall_s=mean(measured.saves["local_checkpoint"]),
        local_lag_s=mean(measured.delays["local_checkpoint"]),
        disk_steps=disk_steps,
        disk_stall_s=mean(measured.saves["checkpoint"]),
        disk_lag_s=mean(measured.delays["checkpoint"]),
        detection_s={kind: mean(times) for kind, times in measured.detection.items()}
        | {"slow": slow_s},
        slowdown=1 + more_s / measured.step_s,
        restart_s=mean(measured.restarts),
        start_s=mean(measured.starts),
        restarts={"device": 2, "maintenance": 0, "slow": 0, "storage": 0},
        end_s=mean(measured.breaks),
        in_recovery=False,
    )


def compare(measured: Timeline, run: LongRun) -> list[str]:
    """Return lines with the measured shares beside the model's, with the 90 % interval of simulated months."""
    closed = effective_time(run)
    months = simulate_months(run, _MONTHS)
    lines = [
        f"{'share of the time':16} {'measured':>10} {'predicted':>10} {'90 % of simulations':>22}"
    ]
    for share in fields(EffectiveTime):
        name = share.name
        simulated = [getattr(month.shares, name) for month in months]
        low, high = quantile(simulated, 0.05), quantile(simulated, 0.95)
        lines.append(
            f"{name.replace('_', ' '):16} {100 * measured.seconds[name] / measured.wall_s:8.2f} % "
            f"{100 * getattr(closed, name):8.2f} % {100 * low:10.2f} to {100 * high:.2f} %"
        )
    return lines
