"""Running the points of an experiment, and showing them before a job: what they cost and what does not fit."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron import metrics_file
from megatron.config.duration import show_duration
from megatron.data.file_lock import FolderClaim
from megatron.errors import ConfigError
from megatron.jobs.points import Cost, Point, bubble_of
from megatron.jobs.runner import SLACK, START_UP_S, End, Job, Runner, is_complete
from megatron.jobs.scaling import METRICS, POINT, RESULT
from megatron.metrics_file import read_beside
from megatron.planner.cluster import Cluster
from megatron.planner.table import Table

_LIMIT_S = 3600.0  # of a point whose time cannot be predicted


@dataclass
class Experiment:
    """The source of a runner's jobs: the points that are not done, the longest first. A point that fails is recorded
    and the others go on.

    limit_s  longest time of a point, None: by its cost
    done, skipped, failed, waiting  names of the points by what became of them, with reasons; skipped ones were done
             before, waiting ones were not started or were interrupted
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
            state, reason = state_of(self.root / point.name, point)
            if state == "done":
                self.skipped.append(point.name)
                self.say(f"{point.name}: done already")
            elif state == "refused" or (state == "failed" and not self.retry_failed):
                self.failed[point.name] = f"{state}: {reason}"
                self.say(f"{point.name}: {state}: {reason}")
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
        for point in list(self._to_do):
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
        return None

    def _claimed(self, point: Point) -> Job | None:
        """The job of a point that nobody else measures now."""
        folder, cost = self.root / point.name, self.costs[point.name]
        claim = FolderClaim(folder, f"point {folder}")
        try:
            claim.take(self.say)
        except ConfigError as error:
            self._postpone(point, str(error))
            return None
        self._to_do.remove(point)
        self._claims[point.name] = claim
        limit = self.limit_s or (_LIMIT_S if cost.total_s is None else SLACK * cost.total_s + START_UP_S)
        return Job(point.name, folder, point.description(), point.flags, point.world, point.nodes, point.steps, limit,
                   limit, cost.iteration_s)  # fmt: skip

    def _postpone(self, point: Point, why: str) -> None:
        self._to_do.remove(point)
        self.waiting[point.name] = why
        self.say(f"{point.name}: not run: {why}")

    def ended(self, end: End) -> None:
        name = end.job.name
        if end.interrupted:
            self.say(f"{name}: {end.interrupted}")
            self._to_do += [point for point in self.points if point.name == name]
        elif end.complete or end.why is None:
            end.note({"status": "done", "reason": None})
            self.done.append(name)
            self.say(f"{name}: done after {show_duration(end.ended - end.started)}")
        else:
            end.note({"status": "failed", "kind": end.why.kind, "reason": end.why.reason})
            self.failed[name] = end.why.reason
            self.say(f"{name}: failed after {show_duration(end.ended - end.started)}: {end.why.reason}; "
                     f"{end.job.folder}")  # fmt: skip
        self._claims.pop(name).release()


def state_of(folder: Path, point: Point) -> tuple[str, str]:
    """'refused' or 'failed' with the reason, 'done', 'interrupted', or '' when there is nothing yet of a point. Raises
    ConfigError when the folder has a point with other settings."""
    if point.problem:
        return "refused", point.problem
    there, mine = read_beside(folder / POINT, metrics_file.POINT), point.description()
    for name in mine if there else ():
        if name != "settings" and there.get(name) != mine[name]:
            raise ConfigError(f"{folder} holds a point with another '{name}' ({there.get(name)}, now {mine[name]}): "
                              "remove it, or give another --out")  # fmt: skip
    if is_complete(folder, point.steps):
        return "done", ""
    result = read_beside(folder / RESULT, metrics_file.RESULT)
    if result.get("status") == "failed":
        return "failed", str(result.get("reason"))
    return "interrupted" if (folder / METRICS).exists() or there else "", ""


# -- before a job ------------------------------------------------------------------------------------------------------


_HEADS = (
    "point", "nodes", "GCDs", "TPxPPxDP", "micro", "batch", "bubble", "s/step", "time", "longest job", "node-hours",
    "state",
)  # fmt: skip


def table(points: Sequence[Point], costs: Mapping[str, Cost], root: Path) -> Table:
    """One row for each point, with what is there of it already in the experiment's folder."""
    first = points[0].request
    title = f"{first.experiment}: {first.warm_up} step(s) of warm-up and {first.iterations} measured at each point"
    return Table(title, _HEADS, [_row(p, costs[p.name], state_of(root / p.name, p)[0]) for p in points])


def _row(point: Point, cost: Cost, state: str) -> tuple[str, ...]:
    sizes, times, config = [""] * 4, [""] * 4, point.config
    if config is not None:
        parallel, batch = config.parallel, config.batch
        sizes = [
            f"{parallel.tensor_model_parallel_size}x{parallel.pipeline_model_parallel_size}x"
            f"{parallel.data_parallel_size}", f"{batch.micro_batch_size}", f"{batch.global_batch_size:,}",
            f"{100 * bubble_of(config):.1f} %",
        ]  # fmt: skip
    if cost.total_s is not None:
        longest = "" if cost.limit_h is None else f"{cost.limit_h:g} h" + ("" if cost.fits_alone else ": too short")
        times = [f"{cost.iteration_s or 0.0:,.0f}", show_duration(cost.total_s), longest,
                 f"{point.nodes * cost.total_s / 3600:,.1f}"]  # fmt: skip
    return point.name, f"{point.nodes}", f"{point.world:,}", *sizes, *times, state


def remarks(points: Sequence[Point], costs: Mapping[str, Cost], nodes: int, cluster: Cluster | None,
            side_by_side: bool = True, partition: str | None = None) -> list[str]:  # fmt: skip
    """Why points are refused, and what one allocation of `nodes` nodes takes for all, beside a job for each."""
    lines = [f"{p.name} is refused: {p.problem}" for p in points if p.problem]
    for point in points:
        if not costs[point.name].fits_alone:
            queue = costs[point.name].queue
            lines.append(f"{point.name} needs a larger allocation, beside others, or "
                         + (f"partition {queue}" if queue else "fewer iterations"))  # fmt: skip
    known = [(p, t) for p in points if (t := costs[p.name].total_s) is not None]
    if not known:
        return [*lines, "no time is published for this model: give --tflops to estimate times"]
    least_s = least_time_s([(p.nodes, t) for p, t in known if p.nodes <= nodes], nodes, side_by_side)
    limit = f" (longest job on so many nodes: {cluster.wall_limit_hours(nodes, partition):g} h)" if cluster else ""
    left_out = ", ".join(p.name for p in points if p.nodes > nodes)
    return [
        *lines,
        f"one allocation of {nodes} node(s), {'side by side' if side_by_side else 'one after another'}: at least "
        f"{show_duration(least_s)}, {nodes * least_s / 3600:,.1f} node-hours{limit}; where it ends before, the same "
        "command goes on" + (f"; too large for it: {left_out}" if left_out else ""),
        f"a job for each point: {sum(p.nodes * t for p, t in known) / 3600:,.1f} node-hours",
    ]


def least_time_s(points: Sequence[tuple[int, float]], nodes: int, side_by_side: bool = True) -> float:
    """Least time of an allocation for points of (nodes, seconds): side by side that of the longest of them, or of all
    with all nodes always at work, whichever is longer.

    >>> least_time_s([(2, 10.0), (1, 40.0)], 2), least_time_s([(2, 10.0), (1, 40.0)], 2, side_by_side=False)
    (40.0, 50.0)
    """
    times = [seconds for _, seconds in points]
    return max(*times, sum(n * s for n, s in points) / nodes, 0.0) if side_by_side and times else sum(times)
