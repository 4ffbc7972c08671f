"""Searches without processes: trials take turns, a function is the truth, nodes are counted."""

import dataclasses
import json

from megatron.jobs import result as results
from megatron.jobs import search as searching
from megatron.jobs import tune as module
from megatron.jobs.candidate_layouts import enumerate_candidates
from megatron.jobs.result import DONE, Ending, Result
from megatron.jobs.run_processes import RunProcesses
from megatron.jobs.runner import Attempt, Watch, write_json
from megatron.jobs.setup import make_setup
from megatron.jobs.tune import TuningSearch
from tools import tune

SPACE = """
title = "made"
flags = ["--preset", "tiny", "--tensor-model-parallel-size", "1", "--global-batch-size", "8", "--lr", "1e-4"]
[parameters]
mbs = [1, 2, 4, 8]
seed = [0, 1, 2]
[derived]
processes = "1"
"""


def truth(values):
    """Return the seconds of a step: best at mbs = 4, seed = 1; mbs = 8 with seed = 2 crashes."""
    if (values["mbs"], values["seed"]) == (8, 2):
        return Ending("crash", "exit code 1")
    return 1 + 0.2 * abs(values["mbs"] - 4) + 0.3 * abs(values["seed"] - 1)


def setup(folder, *words, space=SPACE, prior=True):
    """Set up tools/tune.py in this space; the planner's ranking is that of the list."""
    path = folder / "made.toml"
    folder.mkdir(exist_ok=True)
    path.write_text(space)
    defaults = f"--space {path} --no-prior --search optuna --confirm 0 --out {folder}/out".split()
    tuning = make_setup(tune.build_parser().parse_args([*defaults, *words]), [])
    return dataclasses.replace(tuning, prior=prior)


class FakeRunner:
    """Stand-in for a Runner: trials take `turns` turns each and end as the truth says.

    `stop`: is given the turn and returns whether a signal comes. `die`: (turn, host) of nodes that
    die.
    """

    def __init__(
        self,
        truth=truth,
        hosts=("n1",),
        turns=2,
        stop=lambda turn: False,
        die=(),
        left_s=lambda turn: None,
    ):
        self.truth = truth
        self.hosts = [*hosts]
        self.turns = turns
        self.stop = stop
        self.die = die
        self.turn = 0
        self.log = []
        self._left_s = left_s
        self._running = []

    def left_s(self):
        return self._left_s(self.turn)

    @property
    def free(self):
        busy = [host for _, hosts, _ in self._running for host in hosts]
        return [host for host in self.hosts if host not in busy]

    def room(self, nodes):
        return nodes <= len(self.free)

    def ever(self, nodes):
        return nodes <= len(self.hosts)

    def run(self, source):
        while True:
            for entry in list(self._running):
                job, hosts, started = entry
                dead = [host for host in hosts if host not in self.hosts]
                if dead or self.turn >= started + self.turns:
                    self._running.remove(entry)
                    self._end(source, job, hosts, started, f"{dead[0]} is down" if dead else "")
            if self.stop(self.turn):
                for job, hosts, started in self._running:
                    self._end(source, job, hosts, started, "interrupted by SIGTERM")
                return "SIGTERM"
            while (job := source.next(self)) is not None:
                assert self.room(job.nodes)
                job.folder.mkdir(parents=True, exist_ok=True)
                for old in ("result.json", "figures"):
                    (job.folder / old).unlink(missing_ok=True)
                write_json(job.folder / "point.json", job.point)
                self.log.append(("start", int(job.folder.name)))
                self._running.append((job, self.free[: job.nodes], self.turn))
            if not self._running:
                return ""
            self.turn += 1
            self.hosts = [host for host in self.hosts if (self.turn, host) not in self.die]

    def _end(self, source, job, hosts, started, interrupted):
        self.log.append(("lost" if interrupted else "end", int(job.folder.name)))
        outcome = self.truth({**job.point["values"], "number": int(job.folder.name)})
        why = outcome if isinstance(outcome, Ending) and not interrupted else None
        if not interrupted and why is None:
            (job.folder / "figures").write_text(json.dumps(outcome))
        run = RunProcesses()
        complete = not interrupted and why is None
        run.exit_codes = [0]
        times = float(started), float(self.turn), None
        watch = Watch(job, 0.0)
        source.ended(Attempt(job, tuple(hosts), run, watch, *times, complete, why, interrupted))


def no_files(monkeypatch):
    """Replace figures by those of the truth, which a trial leaves in place of metrics.

    The first trials never end. Trials of real processes have their own figures.
    """
    of_metrics = results.read_result
    by_metrics = results.is_complete

    def read(metrics, *more):
        figures = metrics.parent / "figures"
        if not figures.exists():
            return of_metrics(metrics, *more)
        step_s = json.loads(figures.read_text())
        return Result(DONE, step_s=step_s, spread=0.0, steady=5, memory_bytes=2**30)

    def complete(folder, steps):
        return (folder / "figures").exists() or by_metrics(folder, steps)

    monkeypatch.setattr(module, "read_result", read)
    monkeypatch.setattr(results, "is_complete", complete)
    monkeypatch.setattr(searching, "_FIRST", 1000)
    monkeypatch.setattr("os.fsync", lambda _: None)


def candidates_of(made, change=lambda c: c):
    enumeration = enumerate_candidates(made.space, [], made.machine, predict=False)
    ranked = (dataclasses.replace(c, step_s=1 + 0.001 * c.index) for c in enumeration.candidates)
    enumeration.candidates[:] = map(change, ranked)
    return enumeration


def search(made, runner=None, change=lambda c: c, say=lambda text: None):
    """Start the search once; return it and why it ended."""
    tuner = TuningSearch(made, candidates_of(made, change), say)
    return tuner, (runner or FakeRunner()).run(tuner) or tuner.why
