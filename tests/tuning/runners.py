"""Runners of trials that run nothing: the truth is a function, time passes by turns, nodes are counted."""
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from megatron.tuning.layouts import Layout
from megatron.tuning.types import DONE, Candidate, Result, Trial

TURNS = 3


def figures(candidate: Candidate, step_s: float, memory_bytes: int | None = None) -> Result:
    return Result(DONE, step_s=step_s, spread=0.0, steady=5, tokens_per_s=candidate.tokens / step_s,
                  memory_bytes=memory_bytes)  # fmt: skip


class Made:
    """Trials take `turns` polls each, and end as `truth` says.

    log  what was started and ended, in order; recovered: results that were complete although nobody noted them
    die  by number of a trial: the hosts that die in it, of which the last one is named; each kills it once
    """

    def __init__(
        self, truth: Callable[[Candidate], Result], hosts: Sequence[str] = ("this",), turns: int = TURNS,
        recovered: dict[int, Result] | None = None, die: dict[int, Sequence[str]] | None = None,
    ) -> None:  # fmt: skip
        self.truth, self.hosts, self.turns, self.recovered = truth, list(hosts), turns, recovered or {}
        self.free, self.left = list(hosts), dict[int, int]()
        self.now, self.log, self.stops = 1000.0, list[tuple[str, int]](), list[str]()
        self.die, self.lost = dict(die or {}), dict[int, str]()
        self._running: list[Trial] = []

    @property
    def running(self) -> Sequence[Trial]:
        return self._running

    def can_start(self, candidate: Candidate) -> bool:
        return candidate.nodes <= len(self.free)

    def can_ever_start(self, candidate: Candidate) -> bool:
        return candidate.nodes <= len(self.hosts) or not self.lost

    def lost_by(self, trial: Trial) -> str | None:
        return self.lost.get(trial.number) if trial.result is None else None

    def start(self, trial: Trial) -> Trial:
        hosts, self.free = self.free[: trial.candidate.nodes], self.free[trial.candidate.nodes :]
        started = dataclasses.replace(trial, hosts=tuple(hosts), started=self.now)
        self._running.append(started)
        self.left[trial.number] = self.turns
        self.log.append(("start", trial.number))
        return started

    def poll(self) -> list[Trial]:
        ended = []
        for trial in list(self._running):
            self.left[trial.number] -= 1
            if self.left[trial.number] <= 0:
                self._running.remove(trial)
                dead = self.die.pop(trial.number, ())
                self.hosts = [host for host in self.hosts if host not in dead]
                self.free = [host for host in (*self.free, *trial.hosts) if host in self.hosts]
                if dead:
                    self.lost[trial.number] = f"{dead[-1]} is down"
                self.log.append(("lost" if dead else "end", trial.number))
                result = None if dead else self.of(trial)
                ended.append(dataclasses.replace(trial, ended=self.now, result=result))
        return ended

    def of(self, trial: Trial) -> Result:
        return self.truth(trial.candidate)

    def stop_all(self, why: str) -> list[Trial]:
        stopped, self._running = self._running, []
        self.free = list(self.hosts)
        if stopped:
            self.stops.append(why)
        return [dataclasses.replace(trial, ended=self.now) for trial in stopped]

    def recover(self, trial: Trial) -> Trial | None:
        result = self.recovered.get(trial.number)
        return None if result is None else dataclasses.replace(trial, ended=self.now, result=result)

    def tick(self) -> None:
        self.now += 1.0


class Quiet:
    """Keeps what is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)

    def started(self, trial: Trial) -> None:
        self.lines.append(f"started {trial.number}")

    def ended(self, trial: Trial, layout: Layout, best: Layout | None, before: Layout | None) -> None:
        self.lines.append(f"ended {trial.number}")

    def update(self, view: object) -> None:
        pass
