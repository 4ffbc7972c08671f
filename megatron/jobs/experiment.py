"""Scaling experiments: their points, their costs, and a job source that runs them.

Every point is resolved by pretrain_gpt.py's parser, so that contradictions are found before
anything is queued. Costs are estimated from the published throughput and compared with the
machine's limits. This module does not require torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from megatron import metrics_file
from megatron.config import Config, parse_args
from megatron.config.duration import show_duration
from megatron.data.file_lock import FolderClaim
from megatron.errors import ConfigError
from megatron.jobs.result import DONE, FAILED, REFUSED, Result, earlier
from megatron.jobs.runner import SLACK, START_UP_S, Attempt, Job, JobSource, Runner, Say
from megatron.jobs.scaling import METRICS, POINT
from megatron.metrics_file import read_beside
from megatron.model.formulas import paper_flops
from megatron.planner.cluster import Cluster
from megatron.planner.published import MODELS, Published, published
from megatron.planner.table import Table

_DATA_FLAGS = {"--data-path", "--train-data-path", "--data-file-list", "--mock-data"}
# The paper's runs: fp16, ranks in Megatron's order on devices 0, 1, ... The initial loss scale is
# lower than Megatron's 2^32, with which the first steps, and so all of these short runs, would
# overflow and be skipped.
_PAPER_FLAGS = (
    "--fp16 --initial-loss-scale 4096 --rank-order tp-dp-pp --device-order 0,1,2,3,4,5,6,7"
).split()
# GPT-2's 50,257 entries become 51,200, whatever the tensor-parallel size
_PAPER_VOCABULARY_MULTIPLE = 1024
_WARM_UP_DEPTHS = 4  # micro-batches per stage in a warm-up step
_LIMIT_S = 3600.0  # time limit for a point whose time cannot be predicted


class ExperimentKind(NamedTuple):
    """A kind of experiment.

    parameter  name of the size that varies, for reports
    varies     the size that varies: dp, tp, pp, mbs or batch; values: its default values
    batch      global batch size in a sweep with the paper's models; pp-bubble: micro-batches per
               stage, with any model
    replicas   number of replicas in a sweep with the paper's models
    """

    parameter: str
    varies: str
    values: tuple[int, ...]
    batch: int = 0
    replicas: int = 1


_REPLICAS_OF_1T = (1, 2, 3, 4, 6)
KINDS: Mapping[str, ExperimentKind] = {
    "weak": ExperimentKind("replicas", "dp", (1, 2, 4, 8, 16)),  # replicas as in the paper
    "strong": ExperimentKind("replicas", "dp", (1, 2, 4, 8, 16)),
    "tp": ExperimentKind("tensor-parallel size", "tp", (1, 2, 4, 8, 16), 128),
    "pp": ExperimentKind("pipeline-parallel size, batch fixed", "pp", (8, 16, 24, 48), 128),
    "pp-bubble": ExperimentKind("pipeline-parallel size, bubble fixed", "pp", (8, 16, 24, 48), 16),
    "batch": ExperimentKind("global batch size", "batch", (8, 16, 32, 64, 128, 256, 640)),
    # Two replicas share the optimizer states: with a single replica on 8 GCDs, a micro-batch of 8
    # does not fit.
    "micro-batch": ExperimentKind("micro-batch size", "mbs", (1, 2, 4, 8), 512, 2),
}


@dataclass(frozen=True)
class ExperimentRequest:
    """A requested experiment.

    kind            name in KINDS
    model           22b, 175b, 1t (the paper's models), or the name of any preset
    recipe          paper: the preset as published, in fp16; frontier: its improved version
    values          values of the size that varies; empty for the kind's defaults
    batch           samples per replica (weak), micro-batches per pipeline stage (pp-bubble), or
                    samples per step (no effect in kind batch). None: the published size or the
                    kind's default, or without these the global batch size of the model's flags
    iterations      measured steps with the full batch, after `warm_up` steps
    tasks_per_node  processes per node, if a point has that many
    flags           additional flags for pretrain_gpt.py; they take precedence
    """

    kind: str
    model: str
    recipe: str = "paper"
    values: tuple[int, ...] = ()
    batch: int | None = None
    iterations: int = 3
    warm_up: int = 2
    tasks_per_node: int = 8
    flags: tuple[str, ...] = ()

    @property
    def of_the_paper(self) -> bool:
        """Return whether the model is one of the paper's, which have two recipes."""
        return any(model.name == self.model for model in MODELS)

    @property
    def experiment(self) -> str:
        """Return the name of the experiment and its folder, such as 'weak-175b-paper'."""
        return f"{self.kind}-{self.model}" + (f"-{self.recipe}" if self.of_the_paper else "")

    @property
    def recipe_flags(self) -> tuple[str, ...]:
        """Return the model's flags, with mock data unless the request's flags name data."""
        named = {flag.split("=")[0] for flag in self.flags}
        data = () if _DATA_FLAGS & named else ("--mock-data",)
        if not self.of_the_paper:
            return ("--preset", self.model, *data)
        if self.recipe == "frontier":
            return ("--preset", f"gpt-{self.model}-frontier", *data)
        return ("--preset", f"gpt-{self.model}", *_PAPER_FLAGS, *data)


@dataclass(frozen=True)
class Point:
    """A run in an experiment. If its settings are invalid, `config` is None and `problem` says why.

    name         name of its folder
    value        value of the size that varies
    world        number of processes
    flags        for pretrain_gpt.py, without the path of the metrics file
    iteration_s  seconds per step with the full batch; total_s: for the whole point with its warm-up
                 and start-up; None: unknown
    limit_h      time limit in hours for a job on this many nodes
    queue        first partition that allows this many nodes for this long, if one is known
    """

    name: str
    request: ExperimentRequest
    value: int
    world: int
    nodes: int
    flags: tuple[str, ...]
    config: Config | None = None
    problem: str | None = None
    iteration_s: float | None = None
    total_s: float | None = None
    limit_h: float | None = None
    queue: str | None = None

    @property
    def steps(self) -> int:
        """Return the number of steps in the run."""
        return self.request.warm_up + self.request.iterations

    @property
    def fits_alone(self) -> bool:
        """Return whether the time limit for a job on this point's nodes suffices, if known."""
        return self.total_s is None or self.limit_h is None or self.total_s <= 3600 * self.limit_h

    def description(self) -> dict[str, object]:
        """Return the contents of point.json: the varied value, and all settings."""
        kind = KINDS[self.request.kind]
        request = self.request
        return {
            "name": self.name,
            "experiment": request.experiment,
            "parameter": kind.parameter,
            "value": self.value,
            "kind": request.kind if kind.varies == "dp" else "sweep",
            "world": self.world,
            "nodes": self.nodes,
            "warm_up": request.warm_up,
            "flags": list(self.flags),
            "settings": self.config.to_dict() if self.config else {},
        }


def plan(request: ExperimentRequest) -> list[Point]:
    """Return a request's points, in the order of its values. Raises ConfigError."""
    base = parse_args([*request.recipe_flags, "--train-iters", "1", *request.flags], None)
    kind = KINDS[request.kind]
    known = _paper(base)
    values = request.values or kind.values
    if known is not None and kind.varies == "dp" and not request.values:
        # The paper's number of GCDs, whatever the size of a replica in the recipe.
        replicas = _REPLICAS_OF_1T if request.model == "1t" else values
        replica_gcds = _replica_gcds(base)
        gcds = [known.replica_gcds * count for count in replicas]
        values = tuple(n // replica_gcds for n in gcds if n % replica_gcds == 0) or (1,)
    return [_point(request, base, value) for value in values]


def _replica_gcds(base: Config) -> int:
    parallel = base.parallel
    stages = parallel.pipeline_model_parallel_size
    return parallel.tensor_model_parallel_size * stages * parallel.context_parallel_size


def _paper(base: Config) -> Published | None:
    return published(base.model.num_layers, base.model.hidden_size)


def _point(request: ExperimentRequest, base: Config, value: int) -> Point:
    kind = KINDS[request.kind]
    recipe_batch = base.batch.global_batch_size
    known = _paper(base)
    sizes = {
        "tp": base.parallel.tensor_model_parallel_size,
        "pp": base.parallel.pipeline_model_parallel_size,
        "mbs": base.batch.micro_batch_size,
        "dp": kind.replicas if request.of_the_paper else 1,
    }
    batch = request.batch or (kind.batch if request.of_the_paper else recipe_batch)
    if request.kind == "weak":
        each = request.batch or recipe_batch
        if known is not None and request.batch is None:
            # The published number of sequences per GCD, even if a replica of the recipe has a
            # different size.
            each = -(-known.per_replica * _replica_gcds(base) // known.replica_gcds)
        batch = each * value
    elif request.kind == "strong":
        batch = request.batch or (known.total if known else None) or recipe_batch
    elif request.kind == "pp-bubble":
        batch = (request.batch or kind.batch) * value * sizes["mbs"]
    sizes |= {"batch": batch, kind.varies: value}
    tensor, pipeline, micro, batch = (sizes[name] for name in ("tp", "pp", "mbs", "batch"))
    world = tensor * pipeline * base.parallel.context_parallel_size * sizes["dp"]
    tasks = min(world, request.tasks_per_node)
    # Use a smaller batch during the warm-up if that is faster: once the pipeline is full,
    # compilation, allocation and connections do not depend on the number of micro-batches.
    step = micro * sizes["dp"]
    small = _WARM_UP_DEPTHS * pipeline * step
    steps = request.warm_up + request.iterations
    ramp = ""
    if request.warm_up and small < batch and batch % step == 0:
        ramp = f"--rampup-batch-size {small} {batch - small} {request.warm_up * small}"
    words = (
        f"--tensor-model-parallel-size {tensor} --pipeline-model-parallel-size {pipeline} "
        f"--micro-batch-size {micro} --global-batch-size {batch} {ramp} --train-iters {steps} "
        "--log-interval 1 --eval-iters 0"
    )
    if request.of_the_paper and request.recipe == "paper":
        words += f" --make-vocab-size-divisible-by {max(1, _PAPER_VOCABULARY_MULTIPLE // tensor)}"
    flags = [*request.recipe_flags, *words.split(), *request.flags]
    config = None
    problem = None
    if world % tasks:
        problem = (
            f"{world} processes do not fill nodes of {tasks}: choose TP x PP x CP x replicas as "
            f"a multiple of {tasks}"
        )
    else:
        try:
            config = parse_args(flags, world)
        except ConfigError as error:
            problem = " ".join(str(error).split())
    # A folder name that sorts by the varied size.
    name = f"gcds-{world:05d}" if kind.varies == "dp" else f"{request.kind}-{value:05d}"
    return Point(name, request, value, world, world // tasks, tuple(flags), config, problem)


def bubble_of(config: Config) -> float:
    """Return the bubble fraction of a step: (p - 1) / (v m + p - 1)."""
    waits = config.parallel.pipeline_model_parallel_size - 1
    return waits / (
        config.parallel.virtual_pipeline_model_parallel_size * config.num_micro_batches() + waits
    )


def priced(
    point: Point, cluster: Cluster | None, tflops: float | None = None, partition: str | None = None
) -> Point:
    """Return the point with its cost filled in.

    tflops     hardware TFLOP/s per device; None: the published value for this model
    partition  partition whose time limit applies; None: the default partition

    Raises ConfigError for more nodes than the machine or the partition allows, and for an unknown
    partition.
    """
    limit = cluster.wall_limit_hours(point.nodes, partition) if cluster is not None else None
    config = point.config
    known = _paper(config) if config is not None else None
    rate = tflops or (known.tflops if known else None)
    if config is None or rate is None:
        return replace(point, limit_h=limit)
    model = config.model
    batch = config.batch.global_batch_size
    ramp = config.batch.rampup_batch_size
    vocabulary = model.padded_vocab_size(config.parallel.tensor_model_parallel_size)
    flops = paper_flops(1, model.seq_length, model.num_layers, model.hidden_size, vocabulary)
    # The published rate holds for a nearly full pipeline: a larger bubble makes a step longer.
    sample_s = flops / (rate * 1e12 * point.world) / (1 - bubble_of(config))
    samples = point.request.iterations * batch + point.request.warm_up * (
        ramp[0] if ramp else batch
    )
    total_s = START_UP_S + sample_s * samples
    longer = (
        queue.name
        for queue in (cluster.partitions if cluster is not None else ())
        if (queue.max_nodes or point.nodes) >= point.nodes
        and 3600 * (queue.max_hours or 0) >= total_s
    )
    return replace(
        point,
        iteration_s=sample_s * batch,
        total_s=total_s,
        limit_h=limit,
        queue=next(longer, None),
    )


# -- running points --------------------------------------------------------------------------------


class Experiment(JobSource):
    """The points of an experiment that are not done yet, longest first.

    A failed point is recorded, and the others continue.

    limit_s       time limit for each point; None: derived from its cost
    retry_failed  whether to repeat failed points
    say           called with one line for each event
    waiting       points that were not started or were interrupted, with the reasons
    out_of_time   whether points were postponed for lack of time, or the run was interrupted

    Raises ConfigError for a folder that holds a point with other settings.
    """

    def __init__(
        self,
        root: Path,
        points: Sequence[Point],
        limit_s: float | None = None,
        retry_failed: bool = False,
        say: Say = print,
    ) -> None:
        super().__init__(say)
        self._root = root
        self._limit_s = limit_s
        self.waiting = dict[str, str]()
        self.out_of_time = False
        self._claims = dict[str, tuple[Point, FolderClaim]]()
        self._to_do = list[Point]()
        for point in sorted(points, key=lambda p: (-(p.total_s or 0.0), -p.nodes)):
            state, reason = state_of(root / point.name, point)
            if state == DONE:
                self.results[point.name] = Result(DONE)
                say(f"{point.name}: done already")
            elif state == REFUSED or (state == FAILED and not retry_failed):
                self.results[point.name] = Result(FAILED, reason=f"{state}: {reason}")
                say(f"{point.name}: {state}: {reason}")
            else:
                self._to_do.append(point)

    def reasons(self, status: str) -> dict[str, str | None]:
        """Return the reasons of the points with this status, by name."""
        return {name: one.reason for name, one in self.results.items() if one.status == status}

    @property
    def resumable(self) -> bool:
        """Return whether some points were completed and others ran out of time.

        If no point was completed, jobs could be resumed forever without progress.
        """
        return self.out_of_time and bool({*self.finished} & {*self.reasons(DONE)})

    def run(self, runner: Runner) -> None:
        """Run all points that are not done."""
        why = runner.run(self)
        self.out_of_time |= bool(why)
        for point in list(self._to_do):
            self._postpone(point, f"interrupted by {why}" if runner.signal else why)

    def next(self, runner: Runner) -> Job | None:
        """Return the job of the first point that fits on the free nodes and in the remaining time.

        Points are postponed if they need more nodes or time than there are, or if another process
        runs them.
        """
        for point in list(self._to_do):
            left = runner.left_s()
            if not runner.ever(point.nodes):
                self._postpone(
                    point,
                    f"needs {point.nodes} nodes; fewer of {len(runner.target.hosts)} are usable",
                )
            elif not runner.room(point.nodes):
                continue
            elif left is not None and point.total_s is not None and left < point.total_s:
                self.out_of_time = True
                self._postpone(
                    point,
                    f"needs about {show_duration(point.total_s)}, but the job ends in "
                    f"{show_duration(left)}",
                )
            elif (job := self._claimed(point)) is not None:
                self.say(
                    f"{point.name}: {point.world} process(es), at most "
                    f"{show_duration(job.limit_s)}; {job.folder}"
                )
                return job
        return None

    def _claimed(self, point: Point) -> Job | None:
        """Return the job of a point, unless another process is running it."""
        folder = self._root / point.name
        claim = FolderClaim(folder, f"point {folder}")
        try:
            claim.take(self.say)
        except ConfigError as error:
            self._postpone(point, str(error))
            return None
        self._to_do.remove(point)
        self._claims[point.name] = point, claim
        limit = self._limit_s or (
            _LIMIT_S if point.total_s is None else SLACK * point.total_s + START_UP_S
        )
        return Job(
            point.name,
            folder,
            point.description(),
            point.flags,
            point.world,
            point.nodes,
            point.steps,
            limit,
            limit,
            point.iteration_s,
        )

    def _postpone(self, point: Point, why: str) -> None:
        self._to_do.remove(point)
        self.waiting[point.name] = why
        self.say(f"{point.name}: not run: {why}")

    def report(self, end: Attempt, result: Result) -> None:
        point, claim = self._claims.pop(end.job.name)
        outcome = end.interrupted
        if result.status:
            outcome = f"{result.status} after {show_duration(end.ended - end.started)}"
            outcome += f": {result.reason}; {end.job.folder}" if result.reason else ""
        else:
            self._to_do.append(point)
        self.say(f"{point.name}: {outcome}")
        claim.release()


def state_of(folder: Path, point: Point) -> tuple[str, str]:
    """Return a point's state ('refused', 'failed', 'done', 'interrupted' or ''), and the reason.

    '' means that the point was not started. Raises ConfigError if the folder has other settings.
    """
    if point.problem:
        return REFUSED, point.problem
    saved = read_beside(folder / POINT, metrics_file.POINT)
    description = point.description()
    for name in description if saved else ():
        if name != "settings" and saved.get(name) != description[name]:
            raise ConfigError(
                f"{folder} holds a point with another '{name}' ({saved.get(name)}, now "
                f"{description[name]}): remove it, or give another --out"
            )
    if (before := earlier(folder, point.steps)).status:
        return before.status, before.reason or ""
    return "interrupted" if (folder / METRICS).exists() or saved else "", ""


# -- before a job ----------------------------------------------------------------------------------


def table(points: Sequence[Point], root: Path) -> Table:
    """Tabulate the points, with their state in the experiment's folder."""
    first = points[0].request
    rows = list[tuple[str, ...]]()
    for point in points:
        sizes = [""] * 4
        times = [""] * 4
        if point.config is not None:
            parallel = point.config.parallel
            batch = point.config.batch
            layout = (
                parallel.tensor_model_parallel_size,
                parallel.pipeline_model_parallel_size,
                parallel.context_parallel_size,
                parallel.data_parallel_size,
            )
            sizes = [
                "x".join(map(str, layout)),
                f"{batch.micro_batch_size}",
                f"{batch.global_batch_size:,}",
                f"{100 * bubble_of(point.config):.1f} %",
            ]
        if point.total_s is not None:
            times = [
                f"{point.iteration_s or 0.0:,.0f}",
                show_duration(point.total_s),
                "" if point.limit_h is None else f"{point.limit_h:g} h",
                f"{point.nodes * point.total_s / 3600:,.1f}",
            ]
            times[2] += ": too short" * (not point.fits_alone)
        state = state_of(root / point.name, point)[0]
        rows.append((point.name, f"{point.nodes}", f"{point.world:,}", *sizes, *times, state))
    head = (
        "point,nodes,GCDs,TPxPPxCPxDP,micro,batch,bubble,s/step,time,longest job,node-hours,state"
    )
    title = (
        f"{first.experiment}: {first.warm_up} warm-up and {first.iterations} measured step(s) at "
        "each point"
    )
    return Table(title, tuple(head.split(",")), rows)


def remarks(
    points: Sequence[Point],
    nodes: int,
    cluster: Cluster | None,
    side_by_side: bool = True,
    partition: str | None = None,
) -> list[str]:
    """List points that are refused or too long; compare one allocation with one job per point."""
    lines = [f"{p.name} is refused: {p.problem}" for p in points if p.problem]
    lines += [
        f"{p.name} takes longer than the longest job on its nodes: use a larger allocation for "
        "several points, or " + (f"partition {p.queue}" if p.queue else "fewer iterations")
        for p in points
        if not p.fits_alone
    ]
    known = [(p.nodes, p.total_s) for p in points if p.total_s is not None]
    if not known:
        return [*lines, "no published time for this model: give --tflops to estimate times"]
    least_s = least_time_s(
        [(n, seconds) for n, seconds in known if n <= nodes], nodes, side_by_side
    )
    limit = (
        f" (longest job on this many nodes: {cluster.wall_limit_hours(nodes, partition):g} h)"
        if cluster
        else ""
    )
    left_out = ", ".join(p.name for p in points if p.nodes > nodes)
    return [
        *lines,
        f"one allocation of {nodes} node(s), "
        f"{'side by side' if side_by_side else 'one after another'}: at least "
        f"{show_duration(least_s)}, {nodes * least_s / 3600:,.1f} node-hours{limit}; if it ends "
        "earlier, the same command resumes"
        + (f"; too large for it: {left_out}" if left_out else ""),
        f"a job for each point: {sum(n * seconds for n, seconds in known) / 3600:,.1f} node-hours",
    ]


def least_time_s(
    points: Sequence[tuple[int, float]], nodes: int, side_by_side: bool = True
) -> float:
    """Return the least time that an allocation needs for points given as (nodes, seconds).

    Side by side, this is the larger of two bounds: the longest point, and full use of all nodes.

    >>> least_time_s([(2, 10.0), (1, 40.0)], 2), least_time_s([(2, 10.0), (1, 40.0)], 2, side_by_side=False)
    (40.0, 50.0)
    """
    times = [seconds for _, seconds in points]
    if not side_by_side:
        return sum(times)
    return max(sum(n * s for n, s in points) / nodes, *times, 0.0)
