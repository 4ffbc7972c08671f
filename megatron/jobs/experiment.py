"""Running the points of an experiment, and showing them before a job: what they cost and what does not fit."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron import metrics_file
from megatron.config.duration import show_duration
from megatron.data.folder_claim import FolderClaim
from megatron.errors import ConfigError
from megatron.jobs.points import Cost, Point
from megatron.jobs.runner import SLACK, START_UP_S, End, Job, Runner, is_complete, write_json
from megatron.jobs.scaling import METRICS, POINT, RESULT
from megatron.metrics_file import read_beside
from megatron.planner.cluster import Cluster
from megatron.planner.table import Table

_LIMIT_S = 3600.0  # of a point of which nobody can say how long it takes


@dataclass
class Experiment:
    """The source of a runner's jobs: the points that are not done, the longest first. A point that fails is recorded
    and the others go on.

    limit_s  longest time of a point, None: by its cost
    done, skipped, failed, waiting  names of the points by what became of them, with reasons; waiting ones were not
             started or were interrupted
    out_of_time  whether that was for want of time
    Raises ConfigError for a folder that holds something else.
    """

    root: Path
    points: Sequence[Point]
    costs: Mapping[str, Cost]
    limit_s: float | None = None
    retry_failed: bool = False
    say: Callable[[str], object] = print
    done: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    waiting: dict[str, str] = field(default_factory=dict)
    out_of_time: bool = False

    def __post_init__(self) -> None:
        self._claims = dict[str, FolderClaim]()
        self._to_do = list[Point]()
        for point in sorted(self.points, key=lambda p: (-(self.costs[p.name].total_s or 0.0), -p.nodes)):
            folder = self.root / point.name
            state = f"failed: refused: {point.problem}" if point.problem else state_of(folder, point)
            if state == "done":
                self.skipped.append(point.name)
                self.say(f"{point.name}: done already")
            elif state.startswith("failed") and (point.problem or not self.retry_failed):
                self.failed[point.name] = state.removeprefix("failed: ")
                self.say(f"{point.name}: {state}" + ("" if point.problem else " (--retry-failed runs it again)"))
                if point.problem:
                    folder.mkdir(parents=True, exist_ok=True)
                    write_json(folder / POINT, point.description())
                    write_json(folder / RESULT, {"status": "failed", "reason": self.failed[point.name]})
            else:
                self._to_do.append(point)

    @property
    def resumable(self) -> bool:
        """Something was done and the rest did not fit into the time: without the first it would never end."""
        return self.out_of_time and bool(self.done)

    def run(self, runner: Runner) -> None:
        """Run every point that is to be run."""
        why = runner.run(self)
        self.out_of_time |= bool(why)
        for point in self._to_do:
            self._postpone(point, f"interrupted by {why}" if runner.signal else why)

    def next(self, runner: Runner) -> Job | None:
        for point in list(self._to_do):
            needed, left = self.costs[point.name].total_s, runner.left_s()
            if not runner.ever(point.nodes):
                self._postpone(point, f"needs {point.nodes} nodes, there are {len(runner.place.hosts)}")
            elif not runner.room(point.nodes):
                continue
            elif left is not None and needed is not None and left < needed:
                self.out_of_time = True
                self._postpone(point, f"needs about {show_duration(needed)}, {show_duration(left)} are left of the job")
            elif (job := self._claimed(point)) is not None:
                self.say(f"{point.name}: {point.world} process(es), at most {show_duration(job.limit_s)}; {job.folder}")
                return job
            if point in self._to_do:
                self._to_do.remove(point)
        return None

    def _claimed(self, point: Point) -> Job | None:
        """The job of a point that nobody else measures now, or has measured meanwhile."""
        folder, cost, request = self.root / point.name, self.costs[point.name], point.request
        claim = FolderClaim(folder, f"point {folder}")
        try:
            claim.take(self.say)
        except ConfigError as error:
            self._postpone(point, str(error))
            return None
        if state_of(folder, point) == "done":
            claim.release()
            self.skipped.append(point.name)
            self.say(f"{point.name}: done meanwhile by another run")
            return None
        self._claims[point.name] = claim
        self._to_do.remove(point)
        limit = self.limit_s or (_LIMIT_S if cost.total_s is None else SLACK * cost.total_s + START_UP_S)
        return Job(point.name, folder, point.description(), point.flags, point.world, point.nodes,
                   request.warm_up + request.iterations, limit, limit, cost.iteration_s)  # fmt: skip

    def _postpone(self, point: Point, why: str) -> None:
        self.waiting[point.name] = why
        self.say(f"{point.name}: not run: {why}")

    def ended(self, end: End) -> None:
        name = end.job.name
        point, took = next(p for p in self.points if p.name == name), show_duration(end.ended - end.started)
        if end.interrupted:
            self.say(f"{name}: {end.interrupted}")
            self._to_do.append(point)
        elif end.complete or end.why is None:
            end.note({"status": "done", "reason": None})
            self.done.append(name)
            self.say(f"{name}: done after {took}")
        else:
            end.note({"status": "failed", "kind": end.why.kind, "reason": end.why.reason})
            self.failed[name] = end.why.reason
            self.say(f"{name}: failed after {took}: {end.why.reason}; {end.job.folder}")
        self._claims.pop(name).release()


def state_of(folder: Path, point: Point) -> str:
    """'done', 'failed: why', 'interrupted' or '' when there is nothing yet of a point. Raises ConfigError when the
    folder has a point with other settings."""
    there, mine = read_beside(folder / POINT, metrics_file.POINT), point.description()
    for name in mine if there else ():
        if name != "settings" and there.get(name) != mine[name]:
            raise ConfigError(f"{folder} holds a point with another '{name}' ({there.get(name)}, now {mine[name]}): "
                              "remove it, or give another --out")  # fmt: skip
    if is_complete(folder, point.request.warm_up + point.request.iterations):
        return "done"
    result = read_beside(folder / RESULT, metrics_file.RESULT)
    if result.get("status") == "failed":
        return f"failed: {result.get('reason')}"
    return "interrupted" if (folder / METRICS).exists() or there else ""


# -- before a job ------------------------------------------------------------------------------------------------------


_HEADS = (
    "point", "nodes", "GCDs", "TP", "PP", "DP", "micro", "batch", "micro-batches", "bubble", "s/step", "time",
    "node-hours", "state",
)  # fmt: skip


def table(points: Sequence[Point], costs: Mapping[str, Cost], states: Mapping[str, str]) -> Table:
    """One row for each point; `states` says what is there of it already."""
    first = points[0].request
    title = f"{first.experiment}: {first.warm_up} step(s) of warm-up and {first.iterations} measured at each point"
    return Table(title, _HEADS, [_row(p, costs[p.name], states.get(p.name, "")) for p in points])


def _row(point: Point, cost: Cost, state: str) -> tuple[str, ...]:
    head = [point.name, f"{point.nodes}", f"{point.world:,}"]
    config = point.config
    if config is None:
        return (*head, *[""] * 10, "refused")
    sizes = [
        config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size,
        config.parallel.data_parallel_size, config.batch.micro_batch_size, config.batch.global_batch_size,
        config.num_micro_batches(),
    ]  # fmt: skip
    bubble = "" if cost.bubble is None else f"{100 * cost.bubble:.1f} %"
    times = ["", "", ""]
    if cost.total_s is not None and cost.iteration_s is not None:
        hours = point.nodes * cost.total_s / 3600
        times = [f"{cost.iteration_s:,.0f}", show_duration(cost.total_s), f"{hours:,.1f}"]
    return (*head, *(f"{n:,}" for n in sizes), bubble, *times, state)


def remarks(points: Sequence[Point], costs: Mapping[str, Cost]) -> list[str]:
    """Why points are refused, and which outlast a job of their own size."""
    lines = [f"{p.name} is refused: {p.problem}" for p in points if p.problem]
    for point in points:
        cost = costs[point.name]
        if cost.fits_alone() is False and cost.total_s is not None and cost.limit_h is not None:
            lines.append(
                f"{point.name}: about {show_duration(cost.total_s)}, but a job of {point.nodes} node(s) may last "
                f"{cost.limit_h:g} h: run it in a larger allocation beside others"
                + (f", in partition {cost.queue}" if cost.queue else "") + ", or with fewer iterations"
            )
    if any(c.total_s is None and p.config is not None for p, c in ((p, costs[p.name]) for p in points)):
        lines.append("no time is published for this model: give --tflops to estimate times")
    return lines


def budget(points: Sequence[Point], costs: Mapping[str, Cost], nodes: int, cluster: Cluster | None,
           side_by_side: bool = True, partition: str | None = None) -> list[str]:  # fmt: skip
    """What one allocation of `nodes` nodes takes for these points, beside a job for each."""
    known = [(p.nodes, t) for p in points if (t := costs[p.name].total_s) is not None]
    if not known:
        return []
    least_s = least_time_s([each for each in known if each[0] <= nodes], nodes, side_by_side)
    limit = cluster.wall_limit_hours(nodes, partition) if cluster is not None else None
    lines = [
        f"one allocation of {nodes} node(s), {'side by side' if side_by_side else 'one after another'}: at least "
        f"{show_duration(least_s)}, {nodes * least_s / 3600:,.1f} node-hours"
        + (f" (longest job on so many nodes: {limit:g} h)" if limit is not None else ""),
        f"a job for each point: {sum(n * t for n, t in known) / 3600:,.1f} node-hours",
    ]  # fmt: skip
    if limit is not None and least_s > 3600 * limit:
        lines.append(f"longer than {limit:g} h: what is not done goes on when the same command is submitted again")
    left_out = [p.name for p in points if p.nodes > nodes]
    return [*lines, f"too large for it: {', '.join(left_out)}"] if left_out else lines


def least_time_s(points: Sequence[tuple[int, float]], nodes: int, side_by_side: bool = True) -> float:
    """Least time of an allocation for points of (nodes, seconds): side by side that of the longest of them, or of all
    with all nodes always at work, whichever is longer.

    >>> least_time_s([(2, 10.0), (1, 40.0)], 2), least_time_s([(2, 10.0), (1, 40.0)], 2, side_by_side=False)
    (40.0, 50.0)
    """
    times = [seconds for _, seconds in points]
    return max(*times, sum(n * s for n, s in points) / nodes, 0.0) if side_by_side and times else sum(times)
