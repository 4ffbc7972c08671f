"""Effective training time: how much of a long run's time is training that counts, in closed form.

Effective training time is the time of the steps that make up the trained model, over the time that
passes (the "effective training time ratio" of Kokolis et al., arXiv 2410.21680, section II). The
rest is lost to saves, to the detection of faults, to restarts, to steps that are repeated, to slow
ranks, to lost data-parallel replicas, to new starts of the job, and to waiting in the queue.

Faults are Poisson processes. Between two starts of a job, local checkpoints (in host memory) and
restarts within the job give the ratio of Daly (Future Generation Computer Systems 22, 2006,
equation 13), here with several kinds of faults; rarer ways back, such as to a checkpoint on disk,
are added to first order. effective_time_simulation.py simulates the same run event by event.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from megatron.errors import ConfigError
from megatron.planner.faults import KINDS

DAY_S = 86400.0
TAKE_NODES = ("device", "node", "network")
"""Kinds of faults after which a node is usually not used any more."""
RESTARTS = {"device": 2, "maintenance": 0}
"""Restarts within the job that a fault costs, if not one."""


@dataclass(frozen=True)
class LongRun:
    """A long run, and what a fault costs it.

    nodes, spare_nodes    nodes that train, and nodes whose processes wait
    replicas, droppable   data-parallel replicas; number of them without which the job goes on when
                          no spare is left (each lost node costs one)
    days                  length of the run
    rates                 faults per node and day of each kind (faults.py)
    step_s                seconds of a step
    local_steps           steps between two local checkpoints; 0: there are none
    local_stall_s         time for which a local save stops training
    local_lag_s           time after which it counts: the neighbour has its copy
    disk_steps, disk_stall_s, disk_lag_s
                          the same of checkpoints on disk; the copies of weights are compared before
                          each, which is how corruption is detected
    detection_s           seconds from a fault of each kind to its detection; for a slow rank, while
                          steps take `slowdown` times as long
    restart_s             seconds of a restart within the job, from the detection to the first step
    start_s               seconds of a new start of the job, from its begin to the first step
    queue_s               time in the queue before a job begins
    job_s                 time limit of a job; 0: none
    disk_fraction         share of the lost nodes that are lost together with their neighbour, so
                          that the local checkpoint is lost, too
    machine_nodes         nodes of the machine that a job can get; None: always enough
    repair_s              time after which a node that failed can be used again
    take_nodes            kinds of faults after which a node is not used any more
    restarts              restarts within the job after a fault of each kind, if not one; before
                          each further one a step is lost, in which the fault shows again
    last_restarts         such restarts after a faulty device for which there is no other node,
                          before the job ends
    end_s                 seconds from a fault that ends a job to its end; None: those until the loss
                          of a node is detected
    in_recovery           whether faults occur also during recoveries and starts
    """

    nodes: int
    rates: Mapping[str, float]
    days: float = 30.0
    spare_nodes: int = 0
    replicas: int = 1
    droppable: int = 0
    step_s: float = 10.0
    local_steps: int = 10
    local_stall_s: float = 0.1
    local_lag_s: float = 1.0
    disk_steps: int = 200
    disk_stall_s: float = 1.0
    disk_lag_s: float = 60.0
    detection_s: Mapping[str, float] | None = None
    slowdown: float = 1.1
    restart_s: float = 60.0
    start_s: float = 600.0
    queue_s: float = 0.0
    job_s: float = 0.0
    disk_fraction: float = 0.01
    machine_nodes: int | None = None
    repair_s: float = DAY_S
    take_nodes: tuple[str, ...] = TAKE_NODES
    restarts: Mapping[str, int] = field(default_factory=lambda: RESTARTS)
    last_restarts: int = 3
    end_s: float | None = None
    in_recovery: bool = True

    def __post_init__(self) -> None:
        if self.disk_steps < 1 or (self.local_steps and self.disk_steps % self.local_steps):
            raise ConfigError(
                f"steps between checkpoints on disk ({self.disk_steps}) must be a multiple of those "
                f"between local ones ({self.local_steps})"
            )
        if self.droppable >= self.replicas:
            raise ConfigError(
                f"a job with {self.replicas} replicas cannot go on without {self.droppable} of them"
            )

    def rate(self, *kinds: str) -> float:
        """Return the faults of these kinds per second, over all nodes."""
        return self.nodes * sum(self.rates.get(kind, 0.0) for kind in kinds) / DAY_S

    def detection(self, kind: str) -> float:
        return (self.detection_s or {}).get(kind, 0.0)

    def restarts_of(self, kind: str) -> int:
        """Return the number of restarts within the job that a fault of this kind costs."""
        return self.restarts.get(kind, 1)

    def repeated_s(self, kind: str) -> float:
        """Return the seconds of steps that are lost between the restarts of a fault."""
        return max(self.restarts_of(kind) - 1, 0) * self.step_s

    @property
    def ending_s(self) -> float:
        """Seconds from a fault that ends a job to its end."""
        return self.detection("node") if self.end_s is None else self.end_s

    @property
    def save_s(self) -> float:
        """Seconds of training between two states that most faults return to."""
        return (self.local_steps or self.disk_steps) * self.step_s

    @property
    def disk_s(self) -> float:
        """Seconds of training between two checkpoints on disk."""
        return self.disk_steps * self.step_s


@dataclass(frozen=True)
class EffectiveTime:
    """Shares of a run's time, which add up to 1.

    effective      training that counts
    saves          training stopped by saves
    detection      after faults, until they are detected
    restarts       restarts within the job
    lost_steps     steps that are repeated, also partial ones
    slow_ranks     more time for the same steps
    lost_replicas  fewer nodes that train
    starts         new starts of the job, until the first step
    queue          time without nodes
    """

    effective: float
    saves: float = 0.0
    detection: float = 0.0
    restarts: float = 0.0
    lost_steps: float = 0.0
    slow_ranks: float = 0.0
    lost_replicas: float = 0.0
    starts: float = 0.0
    queue: float = 0.0

    @property
    def of_allocation(self) -> float:
        """Effective training time over the time during which the job has its nodes."""
        return self.effective / (1.0 - self.queue)

    def items(self) -> Iterator[tuple[str, float]]:
        """Yield the name and the share of each field."""
        for f in fields(self):
            yield f.name, getattr(self, f.name)


def effective_time(run: LongRun) -> EffectiveTime:
    """Return the expected shares of a run's time, in closed form."""
    job = _job(run)
    within, down_s = _within_job(run, job.kept)
    # A fault during the start of a job leads to a restart within it.
    total = _rate_within(run, job.kept)
    start_s, again_s = run.start_s, 0.0
    if total and run.in_recovery:
        start_s = -math.expm1(-total * run.start_s) / total
        again_s = -math.expm1(-total * run.start_s) * down_s
    # A job that breaks loses the steps since its last checkpoint on disk; others save in the end.
    detection_s = job.broken * run.ending_s
    again_s += job.broken_by_device * run.last_restarts * run.restart_s
    repeated_s = job.broken_by_device * run.last_restarts * run.step_s
    last_save_s = (1 - job.broken) * (run.disk_stall_s + run.disk_lag_s)
    cycle_s = (
        job.length_s + run.queue_s + start_s + again_s + repeated_s + detection_s + last_save_s
    )
    share = job.length_s / cycle_s
    training = share * within.effective * (1 - job.absent)
    # A job begins at a checkpoint. If it ends after a time that is exponentially distributed, this
    # much is since the last one; half of the interval for long jobs.
    since_s = job.length_s - run.disk_s / math.expm1(run.disk_s / job.length_s)
    rework_s = job.broken * (since_s + run.disk_lag_s) * (1 - job.absent)
    lost = min(rework_s / cycle_s, training)
    return EffectiveTime(
        effective=training - lost,
        saves=share * within.saves + last_save_s / cycle_s,
        detection=share * within.detection + detection_s / cycle_s,
        restarts=share * within.restarts + again_s / cycle_s,
        lost_steps=share * within.lost_steps + lost + repeated_s / cycle_s,
        slow_ranks=share * within.slow_ranks,
        lost_replicas=share * within.effective * job.absent,
        starts=start_s / cycle_s,
        queue=run.queue_s / cycle_s,
    )


def _rate_within(run: LongRun, kept: float) -> float:
    """Return the faults per second that lead to restarts within the job.

    kept  share of the lost nodes without which the job goes on
    """
    return sum(_rates_within(run, kept).values())


def _rates_within(run: LongRun, kept: float) -> dict[str, float]:
    return {
        kind: run.rate(kind) * (kept if kind in run.take_nodes else 1.0)
        for kind in KINDS
        if run.restarts_of(kind)
    }


def _within_job(run: LongRun, kept: float) -> tuple[EffectiveTime, float]:
    """Return the shares of the time between a job's first step and its end.

    Returns also the mean time from a fault to the next step.
    """
    total = _rate_within(run, kept)
    work_s = run.save_s
    stall_s = run.local_stall_s if run.local_steps else run.disk_stall_s
    disk_stall = run.disk_stall_s / run.disk_s if run.local_steps else 0.0
    if not total:
        busy = 1 + stall_s / work_s + disk_stall
        return EffectiveTime(1 / busy, saves=1 - 1 / busy), 0.0
    weights = {kind: rate / total for kind, rate in _rates_within(run, kept).items()}
    detection = {kind: _stopped_s(run, kind) for kind in weights}
    restarts = {kind: run.restarts_of(kind) * run.restart_s for kind in weights}
    repeated = {kind: run.repeated_s(kind) for kind in weights}

    def mean(of_kind: Mapping[str, float]) -> float:
        return sum(weight * of_kind[kind] for kind, weight in weights.items())

    # A fault during a recovery begins a new one: with q the mean of exp(-total * recovery), a fault
    # and all that follow until the next step take (1 - q) / (q * total) on average.
    stopped = {kind: detection[kind] + restarts[kind] + repeated[kind] for kind in weights}
    stopped_s = down_s = mean(stopped)
    if run.in_recovery:
        q = mean({kind: math.exp(-total * stopped[kind]) for kind in weights})
        down_s = (1 - q) / (q * total)
    cycle_s = 1 / total + down_s
    of_down = down_s / stopped_s if stopped_s else 0.0
    # Daly: of a time without faults, exponentially distributed, the complete intervals count.
    done_s = work_s / math.expm1(total * (work_s + stall_s))
    extra_s = mean({kind: _extra_lost_s(run, kind) for kind in weights})
    slow_s = run.rate("slow") / total * run.detection("slow") * (1 - 1 / run.slowdown)
    up_s = 1 / total - slow_s
    saves_s = up_s * (stall_s / (work_s + stall_s) + disk_stall)
    effective_s = max((done_s - extra_s - slow_s) / (1 + disk_stall), 0.0)
    shares = EffectiveTime(
        effective=effective_s / cycle_s,
        saves=saves_s / cycle_s,
        detection=of_down * mean(detection) / cycle_s,
        restarts=of_down * mean(restarts) / cycle_s,
        lost_steps=(up_s - saves_s - effective_s + of_down * mean(repeated)) / cycle_s,
        slow_ranks=slow_s / cycle_s,
    )
    return shares, down_s


def _stopped_s(run: LongRun, kind: str) -> float:
    """Return the time without training until a fault is detected."""
    return 0.0 if kind in ("slow", "corruption") else run.detection(kind)


def _extra_lost_s(run: LongRun, kind: str) -> float:
    """Return the training that a fault costs beyond that since the last save, on average."""
    lag_s = run.local_lag_s if run.local_steps else run.disk_lag_s
    if kind == "corruption":
        # It is detected at the end of the interval of checkpoints on disk in which it occurred.
        return run.disk_s - run.save_s / 2
    to_disk = (run.disk_s - run.save_s) / 2 + run.disk_lag_s
    share = run.disk_fraction if kind in run.take_nodes and run.local_steps else 0.0
    return lag_s * (1 - share) + to_disk * share


@dataclass(frozen=True)
class _Job:
    """Mean course of a job.

    length_s  time from its first step to its end
    absent    share of the replicas that are lost
    broken    probability that it breaks: a fault ends it, without a save
    broken_by_device  probability that a faulty device does so for lack of another node
    kept      share of the lost nodes without which it goes on
    """

    length_s: float
    absent: float
    broken: float
    broken_by_device: float
    kept: float


def _job(run: LongRun) -> _Job:
    spares = _spares(run)
    # The store is on the first node, without which no job goes on.
    store = run.rate(*run.take_nodes) / run.nodes
    lost = run.rate(*run.take_nodes) - store  # without the first node
    ends = run.rate("maintenance") + store
    limit_s = max(run.job_s - run.start_s, run.step_s) if run.job_s else math.inf
    limit_s = min(limit_s, run.days * DAY_S)
    # Time with i nodes lost: the integral of Poisson(i; lost * t) * exp(-ends * t) up to the limit.
    # One lost node more than the last i ends the job.
    both = lost + ends
    if not both:
        return _Job(limit_s, 0.0, 0.0, 0.0, 1.0)
    times = [
        (lost / both) ** i / both * _more_than(i, both * limit_s)
        for i in range(spares + run.droppable + 1)
    ]
    length_s = sum(times)
    absent = sum((i - spares) / run.replicas * time for i, time in enumerate(times) if i > spares)
    broken = min(lost * times[-1] + store * length_s, 1.0)
    by_device = run.rate("device") * times[-1] * (1 - 1 / run.nodes)
    kept = 1 - broken / ((lost + store) * length_s) if lost else 1.0
    return _Job(length_s, absent / length_s, broken, by_device, max(kept, 0.0))


def _more_than(i: int, mean: float) -> float:
    """Return the probability of more than `i` events of a Poisson distribution."""
    if mean == math.inf:
        return 1.0
    term = math.exp(-mean)
    if not term:  # normal approximation, for means above 700
        return 0.5 * math.erfc((i + 0.5 - mean) / math.sqrt(2 * mean))
    total = term
    for n in range(1, i + 1):
        term *= mean / n
        total += term
    return max(1.0 - total, 0.0)


def in_repair(run: LongRun) -> float:
    """Return the mean number of nodes in repair."""
    return run.rate(*run.take_nodes) * run.repair_s


def _spares(run: LongRun) -> int:
    """Return the number of spare nodes at the start of a job.

    Raises ConfigError if the nodes in repair leave too few for the run.
    """
    if run.machine_nodes is None:
        return run.spare_nodes
    left = run.machine_nodes - run.nodes - in_repair(run)
    if left < 0:
        raise ConfigError(
            f"of {run.machine_nodes} nodes, {in_repair(run):.0f} are in repair on average, which "
            f"leaves fewer than the {run.nodes} that train: take fewer"
        )
    return min(run.spare_nodes, int(left))


def best_interval_s(stall_s: float, faults_per_s: float) -> float:
    """Return the time of training between two saves that loses least.

    Daly's estimate (equation 37 of the paper above), whose first term is Young's, sqrt(2 * stall /
    rate) (Communications of the ACM 17, 1974).

    >>> best_interval_s(2.0, 1 / 10000.0)
    198.7
    """
    x = stall_s * faults_per_s / 2
    if x >= 1:
        return 1 / faults_per_s
    return math.sqrt(2 * stall_s / faults_per_s) * (1 + math.sqrt(x) / 3 + x / 9) - stall_s
