"""Simulation of a long run, event by event: the spread over random months, and a check.

It shares the description of the run with the closed form (effective_time.py), but no formula.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field, fields

from megatron.planner.effective_time import DAY_S, EffectiveTime, LongRun
from megatron.planner.faults import KINDS


@dataclass(frozen=True)
class Month:
    """A simulated run: the shares of its time, its faults by kind, and its jobs.

    restarts  the most restarts within one job
    """

    shares: EffectiveTime
    faults: dict[str, int]
    jobs: int
    restarts: int


def simulate_month(run: LongRun, seed: str) -> Month:
    """Simulate a run with the faults that `seed` gives."""
    return _Simulation(run, random.Random(seed)).month()


def simulate_months(run: LongRun, number: int, seed: int = 0) -> list[Month]:
    """Simulate this many runs; the nth is the same whatever their number."""
    return [simulate_month(run, f"{seed} {n}") for n in range(number)]


def quantile(values: list[float], share: float) -> float:
    """Return the value below which this share of the values lies.

    >>> quantile([3.0, 1.0, 2.0], 0.5)
    2.0
    """
    return sorted(values)[round(share * (len(values) - 1))]


@dataclass(eq=False)
class _Simulation:
    """State of a simulated run.

    now      seconds since the begin
    work     seconds of training, at full speed, in the state that training is at
    disk     the same of the newest checkpoint on disk, which may be incomplete
    before   the same of the one before
    loaded   the same of the state that was loaded last
    taint    `work` at which bits were corrupted; None: they are not
    slow     end of each period with a slow rank
    """

    run: LongRun
    chance: random.Random
    now: float = 0.0
    work: float = 0.0
    disk: float = 0.0
    before: float = 0.0
    loaded: float = 0.0
    taint: float | None = None
    slow: list[float] = field(default_factory=list)
    repairs: list[float] = field(default_factory=list)
    spares: int = 0
    dropped: int = 0
    restarts: int = 0
    most: int = 0
    jobs: int = 0

    def month(self) -> Month:
        run = self.run
        self.lost = dict.fromkeys((f.name for f in fields(EffectiveTime)), 0.0)
        self.faults = dict.fromkeys(KINDS, 0)
        self.end = run.days * DAY_S
        self.rates = [(kind, run.rate(kind)) for kind in KINDS if run.rate(kind) > 0]
        self.total = sum(rate for _, rate in self.rates)
        while self.now < self.end:
            self.job()
        shares = {name: seconds / self.end for name, seconds in self.lost.items()}
        shares["effective"] = self.work / self.end
        return Month(EffectiveTime(**shares), self.faults, self.jobs, self.most)

    def spend(self, name: str, seconds: float) -> None:
        """Let time pass for a cause, at most until the end."""
        seconds = min(seconds, self.end - self.now)
        self.lost[name] += seconds
        self.now += seconds

    def next_fault(self) -> float:
        return self.now + self.chance.expovariate(self.total) if self.total else math.inf

    def job(self) -> None:
        """Simulate a job, from the queue to its end."""
        run = self.run
        self.jobs += 1
        self.restarts = self.dropped = 0
        self.slow.clear()
        self.taint = None
        self.spend("queue", run.queue_s)
        self.spares = run.spare_nodes
        if run.machine_nodes is not None:
            while True:
                while self.repairs and self.repairs[0] <= self.now:
                    heapq.heappop(self.repairs)
                free = run.machine_nodes - len(self.repairs) - run.nodes
                if free >= 0 or self.now >= self.end:
                    break
                self.spend("queue", self.repairs[0] - self.now)
            self.spares = min(self.spares, max(free, 0))
        self.fault_at = self.next_fault()
        self.limit = self.now + run.job_s if run.job_s else math.inf
        going = self.pause([("starts", run.start_s)])
        while going and self.now < self.end:
            going = self.train()
        self.most = max(self.most, self.restarts)

    def pause(self, parts: list[tuple[str, float]]) -> bool:
        """Let parts of a recovery pass, or less if a fault comes; return whether the job goes on."""
        run = self.run
        for name, seconds in parts:
            if not run.in_recovery:
                self.fault_at += seconds
            if self.now + seconds > self.fault_at:
                self.spend(name, self.fault_at - self.now)
                return self.now >= self.end or self.fault()
            self.spend(name, seconds)
        return True

    def train(self) -> bool:
        """Train until the next event and handle it; return whether the job goes on."""
        run = self.run
        speed = 1 - self.dropped / run.replicas
        slower = run.slowdown if self.slow else 1.0
        until = min(self.fault_at, self.limit, self.end, min(self.slow, default=math.inf))
        at_save = self.steps_until(until - self.now, speed / slower)
        if self.now >= self.end:
            return False
        if at_save:  # corruption is detected before a save to disk
            self.taint = None
            self.back_to(self.disk)
            self.restarts += 1
            return self.pause([("restarts", run.restart_s)])
        if self.slow and self.now >= min(self.slow):
            self.slow.remove(min(self.slow))
            if not run.restarts_of("slow"):
                return True
            self.restarts += run.restarts_of("slow")
            self.back_to(self.newest())
            return self.pause([("restarts", run.restart_s)])
        if self.now >= self.limit:
            return self.leave()
        return self.fault()

    def steps_until(self, seconds: float, speed: float) -> bool:
        """Train for this long; return whether a comparison of corrupt copies stopped it before."""
        run = self.run
        local = run.local_steps * run.step_s
        while seconds > 1e-9:
            # At most to the next save to disk; `work` is a multiple of the step's time only there.
            into = self.work % run.disk_s
            if run.disk_s - into < 1e-6:
                into = 0.0
            ahead = run.disk_s - into
            stalls = math.ceil(ahead / local - 1e-9) if local else 0
            whole = ahead / speed + stalls * run.local_stall_s
            if whole <= seconds:
                self.trained(ahead, speed)
                self.work = round(self.work / run.disk_s) * run.disk_s
                self.spend("saves", stalls * run.local_stall_s)
                if self.taint is not None:
                    return True
                self.before, self.disk = self.disk, self.work
                self.spend("saves", min(run.disk_stall_s, max(seconds - whole, 0.0)))
                seconds -= whole + run.disk_stall_s
                continue
            if not local:
                self.trained(seconds * speed, speed)
                return False
            first = local - into % local
            if first < 1e-6:
                first = local
            left = seconds
            if left > first / speed + run.local_stall_s:
                left -= first / speed + run.local_stall_s
                each = local / speed + run.local_stall_s
                number = int(left / each)
                self.trained(first + number * local, speed)
                self.spend("saves", (1 + number) * run.local_stall_s)
                left -= number * each
            work = min(left * speed, local)
            self.trained(work, speed)
            self.spend("saves", max(left - work / speed, 0.0))
            return False
        return False

    def trained(self, work: float, speed: float) -> None:
        """Add training; what it takes beyond full speed is lost."""
        seconds = work / speed
        left = self.end - self.now
        if seconds > left:
            work *= left / seconds
            seconds = left
        full = work
        replicas = full / (1 - self.dropped / self.run.replicas) - full
        self.lost["lost_replicas"] += replicas
        self.lost["slow_ranks"] += seconds - full - replicas
        self.work += work
        self.now += seconds

    def leave(self) -> bool:
        """Save, and end the job."""
        self.spend("saves", self.run.disk_stall_s + self.run.disk_lag_s)
        self.before = self.disk = self.loaded = self.work
        return False

    def newest(self) -> float:
        """Return the work in the newest state that a restart within the job can load."""
        run = self.run
        if not run.local_steps:
            return self.complete_on_disk()
        local = run.local_steps * run.step_s
        state = math.floor(self.work / local + 1e-9) * local
        if self.work - state < run.local_lag_s and state > self.disk:
            state -= local
        return max(state, self.disk, self.loaded)

    def complete_on_disk(self) -> float:
        """Return the work in the newest checkpoint whose files are complete."""
        return self.before if self.work - self.disk < self.run.disk_lag_s else self.disk

    def back_to(self, state: float) -> None:
        self.lost["lost_steps"] += self.work - state
        self.work = self.loaded = state
        self.disk = min(self.disk, state)
        self.before = min(self.before, state)
        if self.taint is not None and state <= self.taint:
            self.taint = None

    def fault(self) -> bool:
        """Let a fault occur now; return whether the job goes on."""
        run = self.run
        self.fault_at = self.next_fault()
        kinds = [kind for kind, _ in self.rates]
        kind = self.chance.choices(kinds, [rate for _, rate in self.rates])[0]
        self.faults[kind] += 1
        if kind == "maintenance":
            return self.leave()
        if kind == "slow":
            self.slow.append(self.now + run.detection("slow"))
            return True
        if kind == "corruption":
            self.taint = self.work if self.taint is None else self.taint
            return True
        if not run.restarts_of(kind):
            return True
        state = self.newest()
        self.before = self.disk = self.complete_on_disk()  # a save that is not complete is lost
        if kind in run.take_nodes:
            if run.machine_nodes is not None:
                heapq.heappush(self.repairs, self.now + run.repair_s)
            if self.chance.random() < run.disk_fraction:
                state = self.disk
            if self.spares:
                self.spares -= 1
            else:
                self.dropped += 1
            of_store = self.chance.random() < 1 / run.nodes
            if self.dropped > run.droppable or of_store:
                self.back_to(self.disk)
                if kind == "device" and not of_store:
                    self.spend("restarts", run.last_restarts * run.restart_s)
                    self.spend("lost_steps", run.last_restarts * run.step_s)
                self.spend("detection", run.ending_s)
                return False
        self.back_to(state)
        self.restarts += run.restarts_of(kind)
        return self.pause(
            [
                ("detection", run.detection(kind)),
                ("restarts", run.restarts_of(kind) * run.restart_s),
                ("lost_steps", run.repeated_s(kind)),
            ]
        )
