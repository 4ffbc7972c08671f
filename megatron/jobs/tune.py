"""tools/tune.py: from its words to a search by trials, the report and the exit code.

What is known of a search lies in the folders of its trials, as those of experiments: point.json when one is started,
result.json when it has ended. A search that was killed goes on from there.
"""
from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from itertools import takewhile
from pathlib import Path
from typing import Any

from megatron.config.command_line import parse_args
from megatron.config.duration import show_duration
from megatron.data.folder_claim import FolderClaim
from megatron.errors import ConfigError, DataError, MegatronError
from megatron.jobs import report
from megatron.jobs.candidates import GIB, Candidate, Enumeration, enumerate_candidates, trial_flags
from megatron.jobs.endings import CRASH
from megatron.jobs.layouts import (
    CONFIRM,
    Layout,
    Trial,
    cost,
    in_turn,
    layouts_of,
    noise_of,
    ranked,
    ruled_out,
    within_noise,
    written,
)
from megatron.jobs.result import DONE, FAILED, Result, read_result
from megatron.jobs.runner import (
    TIME,
    End,
    Job,
    Runner,
    is_complete,
    slurm_time_left_s,
    time_left,
    write_json,
)
from megatron.jobs.scaling import METRICS, POINT, RESULT
from megatron.jobs.search import History, propose
from megatron.jobs.setup import Setup, make_setup
from megatron.jobs.space import known_spaces, value_text
from megatron.metrics_file import RECORD, read_beside
from megatron.planner.table import Table, print_table
from megatron.untrusted import is_count, read_json

EXHAUSTED, BUDGET, NODES = "nothing is left to try", "the trials are used up", "too few nodes are left"
_IDENTITY = "search.json"
_MOST_BYTES = 1 << 24  # of a file of the folder
_RESERVE_S = 120.0  # of an allocation, to stop what runs and to write the report
_SHOWN = 10


def run(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Do what the words say; returns the exit code. Raises ConfigError."""
    if args.list_spaces:
        for name, title in known_spaces().items():
            print(f"{name:20} {title}")
        return 0
    setup = make_setup(args, flags)
    if args.report_only and not any((setup.out / "trials").glob("*")):
        raise ConfigError(f"--report-only: {setup.out} has no trials to report on")
    if args.dry_run:
        _dry_run(setup, _enumerate(setup))
        return 0
    if not args.report_only:
        claim = FolderClaim(setup.out, f"--out {setup.out}")
        claim.take(lambda text: _say(text.strip()))
        try:
            return _search(setup)
        finally:
            claim.release()
    search = Search(setup, _enumerate(setup), _say)
    _report(setup, search)
    return 0 if search.ranked else 1


def _say(text: str) -> None:
    print(f" tune: {text}", flush=True)


def _enumerate(setup: Setup) -> Enumeration:
    return enumerate_candidates(
        setup.space, setup.flags, setup.machine, predict=setup.cluster is not None, seed=setup.args.seed,
        tell=lambda looked, of: _say(f"looked at {looked:,} of {of:,} combinations"),
    )  # fmt: skip


def _search(setup: Setup) -> int:
    found = _enumerate(setup)
    if not found.candidates:
        raise ConfigError("nothing can be tried: no layout of the space is valid and fits here (--dry-run says why)")
    _say(f"{len(found.candidates):,} layouts of {setup.space.combinations:,} combinations, searched by "
         f"{setup.searched_by}; {setup.out}")  # fmt: skip
    search = Search(setup, found, _say)
    allocation_s: Callable[[], float | None] = slurm_time_left_s if setup.place.launcher == "slurm" else lambda: None
    runner = Runner(setup.place, _say, left_s=time_left(setup.walltime_s, allocation_s, _RESERVE_S))
    why = runner.run(search) or search.why
    goes_on = why not in (EXHAUSTED, BUDGET)
    said = f"interrupted by {why}" if runner.signal else why
    _say(f"{said}: {search.done} trial(s) ended in this start" + (f"; the same command goes on from {setup.out}"
                                                               if goes_on else ""))  # fmt: skip
    try:
        _report(setup, search)
    except (MegatronError, OSError) as error:
        if not goes_on:
            raise
        _say(f"error: {error}")  # which is no reason not to go on
    if goes_on:
        return 4 if why == TIME and not search.done else 3
    return 0 if search.ranked else 1


def _report(setup: Setup, search: Search) -> None:
    """Write the report and print what matters of it."""
    found = report.Report(setup, search.found, search.trials)
    for line in found.summary():
        _say(line)
    for path in found.write():
        _say(f"wrote {path}")
    if search.ranked:
        _say(f"the best: {found.command()}")


# -- a search ----------------------------------------------------------------------------------------------------------


class Search:
    """The source of a runner's jobs: proposals become trials, trials become better proposals, until the budget is used.
    When the search has ended, the layouts that may be the best are measured again.

    trials  all of them, by number; found: the list that is searched; done: how many ended in this start; why: with what
            it ends, once nothing more can be started
    Raises ConfigError where the folder has another search's trials.
    """

    def __init__(self, setup: Setup, found: Enumeration, say: Callable[[str], object]) -> None:
        self._setup, self.found, self._say = setup, found, say
        self._objective, self._out = setup.args.objective, setup.out
        self._by_key = {candidate.key: candidate for candidate in found.candidates}
        self._prior = _prior(found.candidates, self._objective) if setup.prior else None
        self._running = set[int]()
        self._held: Trial | None = None
        self._idle: tuple[int, ...] = ()
        self.done, self.why = 0, EXHAUSTED
        _check_identity(setup)
        self.trials = {trial.number: trial for trial in read_trials(setup.out, self._by_key, setup.steps)}
        ended = sum(trial.result is not None for trial in self.trials.values())
        if self.trials and not setup.args.report_only:
            say(f"going on: {ended} of {len(self.trials)} trials have ended")
        self._waiting = [] if setup.args.report_only else self._to_go_on()

    @property
    def ranked(self) -> list[Layout]:
        """Layouts with figures, the best first."""
        return ranked(self.trials.values(), self._objective)

    # -- what was before -----------------------------------------------------------------------------------------------

    def _to_go_on(self) -> list[Trial]:
        """What was interrupted, and with --retry-failed what failed, as far as --max-trials and --confirm have room for
        it; counts what is complete although nobody was there to note it."""
        args, waiting = self._setup.args, list[Trial]()
        for trial in list(self.trials.values()):
            if trial.candidate.key not in self._by_key:
                continue
            if trial.result is None and is_complete(self._job(trial).folder, self._setup.steps):
                end = End(self._job(trial), trial.hosts, 0.0, 0.0, None, True)
                self._take(trial, end, "the tuner ended before it")
            elif trial.result is None or (args.retry_failed and trial.result.status != DONE):
                waiting.append(trial)
        tried = sum(t.result is not None and t.by != CONFIRM for t in self.trials.values())
        over = args.max_trials is not None and tried > args.max_trials
        kept = [t for t in waiting if (self._place(t) <= args.confirm if t.by == CONFIRM else not over)]
        for trial in kept:
            self.trials[trial.number] = dataclasses.replace(trial, result=None)
        return kept

    def _place(self, trial: Trial) -> int:
        """Which of the confirming trials since the last one of the search it is, from 1 on."""
        before = [self.trials[n] for n in sorted(self.trials, reverse=True) if n <= trial.number]
        return sum(1 for _ in takewhile(lambda each: each.by == CONFIRM, before))

    # -- what is next --------------------------------------------------------------------------------------------------

    def next(self, runner: Runner) -> Job | None:
        if not runner.room(min(c.nodes for c in self.found.candidates)):
            return None
        if self._held is not None and not runner.ever(self._held.candidate.nodes):  # nodes died meanwhile
            self._waiting += [self._held] if self._held.number in self.trials else []
            self._held, self._idle = None, ()
        now = (self.done, len(self._running), len(runner.running))
        if self._held is None and now != self._idle:
            self._held = self._choose(runner)
        if self._held is None:
            self._idle = now
            return None
        if not self._has_time(runner.left_s()):
            self.why = TIME
            return None
        # The first in the queue is not overtaken by smaller ones, which would keep it waiting for ever.
        if not runner.room(self._held.candidate.nodes):
            return None
        trial, self._held = dataclasses.replace(self._held, result=None), None
        self.trials[trial.number] = trial
        self._running.add(trial.number)
        candidate = trial.candidate
        expected = "" if candidate.step_s is None else f", {candidate.step_s:.3g} s a step predicted"
        how = "to confirm what was found" if trial.by == CONFIRM else f"chosen by {trial.by}"
        self._say(f"trial {trial.number} {candidate.key}: {candidate.processes} process(es), {how}{expected}")
        return self._job(trial)

    def _choose(self, runner: Runner) -> Trial | None:
        """The trial that is to be started next; None: none, and `why` says what that is the end of."""
        args, trials = self._setup.args, self.trials.values()
        searched = sum(t.by != CONFIRM for t in trials if t.result is not None or t.number in self._running)
        over = args.max_trials is not None and searched >= args.max_trials
        if over:
            self._waiting = [trial for trial in self._waiting if trial.by == CONFIRM]
        self.why = BUDGET if over else EXHAUSTED
        for trial in self._waiting:
            if runner.ever(trial.candidate.nodes):
                self._waiting.remove(trial)
                return trial
        lacking = bool(self._waiting)
        if not over:
            history = self._history()
            small = [i for i in history.open if runner.ever(self.found.candidates[i].nodes)]
            lacking = lacking or len(small) < len(history.open)
            if small:
                count = sum(trial.by != CONFIRM for trial in trials)
                index, by = propose(self._setup.search, args.seed, dataclasses.replace(history, open=small), count)
                return self._new(self.found.candidates[index], by)
        if not lacking and not any(self.trials[n].by != CONFIRM for n in self._running):
            last = self.trials.get(max(self.trials, default=0))
            if last is not None and self._place(last) < args.confirm:
                # Where nodes died the first in turn may have too few: their turn stays theirs, for others measured more
                # often instead would be named on better evidence.
                turn = in_turn(list(trials), self._objective, self._by_key)
                able = [key for key in turn if runner.ever(self._by_key[key].nodes)]
                if able:
                    return self._new(self._by_key[able[0]], CONFIRM)
                lacking = bool(turn)
        self.why = NODES if lacking else self.why
        return None

    def _new(self, candidate: Candidate, by: str) -> Trial:
        return Trial(max(self.trials, default=0) + 1, candidate, by)

    def _history(self) -> History:
        """All that the next proposal depends on."""
        trials, seen, tried = self.trials.values(), dict[int, float | None](), set[int]()
        for one in layouts_of(trials):
            index = one.candidate.index
            if one.candidate.key in self._by_key:
                tried.add(index)
                if one.step_s is not None or one.failures:  # a lost rank says nothing of the layout
                    seen[index] = None if one.step_s is None else math.log(one.cost(self._objective))
        pending = {self.trials[n].candidate.index for n in self._running if self.trials[n].by != CONFIRM}
        out = tried | pending | ruled_out(self.found.candidates, trials)
        out |= {trial.candidate.index for trial in self._waiting}
        open_ = [index for index in range(len(self.found.candidates)) if index not in out]
        return History(self.found.candidates, self._setup.space.parameters, seen, open_, frozenset(pending),
                       self._prior)  # fmt: skip

    def _has_time(self, left_s: float | None) -> bool:
        """Whether a trial that begins now is likely to end in time; the first ones are begun in any case."""
        took = [t.ended - t.started for t in self.trials.values() if t.step_s and t.ended and t.started]
        return left_s is None or left_s > (statistics.median(took) if took else 0.0)

    # -- a trial -------------------------------------------------------------------------------------------------------

    def _job(self, trial: Trial) -> Job:
        setup, candidate = self._setup, trial.candidate
        flags = trial_flags(candidate.flags, setup.steps)
        point = {
            "name": f"{trial.number:04d} {candidate.key}", "by": trial.by, "world": candidate.processes,
            "nodes": candidate.nodes, "iterations": setup.iterations, "warm_up": setup.warm_up, "flags": flags,
            "key": candidate.key, "values": dict(candidate.values),
        }  # fmt: skip
        return Job(f"trial-{trial.number}", setup.out / f"trials/{trial.number:04}", point, flags, candidate.processes,
                   candidate.nodes, setup.steps, setup.limit_s(candidate), setup.args.stall, candidate.step_s)

    def ended(self, end: End) -> None:
        trial = self.trials[int(end.job.folder.name)]
        self._running.discard(trial.number)
        if end.interrupted:
            self._say(f"trial {trial.number} {trial.candidate.key}: {end.interrupted}: it is run again")
            self._waiting.insert(0, trial)
            self._idle = ()
            return
        self._take(trial, end, "" if end.why is None else f"after its last step: {end.why.reason}")

    def _take(self, trial: Trial, end: End, note: str) -> None:
        """Note how a trial ended and say what it is worth."""
        if end.complete:
            asked = parse_args(end.job.flags, end.job.processes)
            result = read_result(end.job.folder / METRICS, asked, self._setup.warm_up, note)
        else:
            result = Result(FAILED, end.why.kind if end.why else CRASH, end.why.reason if end.why else None)
        end.note({k: v for k, v in dataclasses.asdict(result).items() if not (isinstance(v, float) and v != v)})
        self.trials[trial.number] = dataclasses.replace(
            trial, result=result, hosts=end.hosts, started=end.started, ended=end.ended)  # fmt: skip
        self.done += 1
        head = f"trial {trial.number} {trial.candidate.key}"
        count, most = sum(t.result is not None for t in self.trials.values()), len(self.found.candidates)
        most = min(most, self._setup.args.max_trials or most) + self._setup.args.confirm
        self._say(f"{head}: {self._worth(self.trials[trial.number])}; {count} of at most {most} trials")

    def _worth(self, trial: Trial) -> str:
        """What came of a trial, in a sentence; nothing is called better that lies within the noise."""
        result, objective, best = trial.result, self._objective, self.ranked
        assert result is not None, "it has ended"
        one = next((one for one in best if one.candidate.key == trial.candidate.key), None)
        if trial.step_s is None or one is None:
            return f"{result.said}: {result.reason or 'but other trials of it failed'}; {self._job(trial).folder}"
        said = written(cost(trial.step_s, trial.candidate, objective), objective)
        if one.apart is not None:
            said += f", measured {len(one.runs)} times, {100 * one.apart:.1f} % apart"
        if len(best) > 1:
            noise, other = noise_of(layouts_of(self.trials.values())), best[0] if one is not best[0] else best[1]
            first, second = (one, other) if one is best[0] else (other, one)
            behind = 100 * (second.cost(objective) / first.cost(objective) - 1)
            said += " (the best so far" if one is first else f" ({behind:.1f} % dearer than the best, {first.numbers}"
            said += f"; {second.numbers} within the noise)" if within_noise(second, first, noise, objective) else ")"
        return said + (f"; {result.notes}" if result.notes else "")


def _prior(candidates: Sequence[Candidate], objective: str) -> list[float]:
    """log(cost) of each by the planner."""
    return [math.log(cost(c.step_s, c, objective)) for c in candidates if c.step_s is not None]


def _check_identity(setup: Setup) -> None:
    """Raises ConfigError that names the first thing in which a search differs from that of its folder."""
    path, now = setup.out / _IDENTITY, setup.identity()
    if not path.exists():
        setup.out.mkdir(parents=True, exist_ok=True)
        write_json(path, now)
        return
    there = read_json(path, _MOST_BYTES, error=ConfigError)
    for name, value in now.items():
        if not isinstance(there, dict) or there.get(name) != value:
            was = there.get(name) if isinstance(there, dict) else None
            raise ConfigError(f"{path} is of another search: {name} was {was}, now it is {value}. Give the same again "
                              "to go on with it, or another --out to begin anew")  # fmt: skip


_KINDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("started", "ended", "step_s", "spread", "tokens_per_s", "tokens_per_s_per_device", "model_tflops",
                     "hardware_tflops"), RECORD["time"]),
    **dict.fromkeys(("key", "by", "status", "kind", "reason", "notes"), RECORD["event"]),
    **dict.fromkeys(("steady", "memory_bytes", "skipped", "nan"), is_count), "values": RECORD["config"],
    **dict.fromkeys(("flags", "hosts"), lambda value: isinstance(value, list)),
}  # fmt: skip


def read_trials(out: Path, by_key: Mapping[str, Candidate], steps: int) -> list[Trial]:
    """Read the trials of a search's folder, by number. Raises ConfigError for a file that no tuner wrote, and for a
    trial that would run with other flags now."""
    found = list[Trial]()
    for folder in sorted((out / "trials").glob("[0-9]*")):
        if not (folder / POINT).exists():
            continue  # killed before it was written
        try:
            point, ended = read_beside(folder / POINT, _KINDS), read_beside(folder / RESULT, _KINDS)
            key, by, flags, number = point["key"], point["by"], point["flags"], int(folder.name)
            result = Result(**{f.name: ended[f.name] for f in fields(Result) if f.name in ended}) if ended else None
        except (DataError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{folder}: {POINT} or {RESULT} is none that a tuner wrote ({error}): put it right, or "
                              "give another --out") from error  # fmt: skip
        # One that is none here, such as with fewer nodes, stays and is not run again.
        candidate = by_key.get(key) or Candidate(-1, key, point.get("values") or {}, (), 0, 1, 1)
        now = [str(candidate.processes), *trial_flags(candidate.flags, steps)]
        if candidate.processes and now != (then := [str(point.get("world")), *flags]):
            differ = " ".join(sorted({*map(str, then)} ^ {*now}))
            raise ConfigError(f"{folder}: trial {number}, {key}, ran with other settings ({differ}): go on with the "
                              "machine, the nodes and the version that it began with, or give another --out")
        found.append(Trial(number, candidate, by, result, tuple(map(str, ended.get("hosts") or ())),
                           ended.get("started"), ended.get("ended")))  # fmt: skip
    return found


# -- before it ---------------------------------------------------------------------------------------------------------


def _dry_run(setup: Setup, found: Enumeration) -> None:
    """Print which layouts there are, what the planner says of them, and what they may cost."""
    space, args, candidates = setup.space, setup.args, found.candidates
    print(f"{space.name}: {space.title}" + (f"\nsource: {space.source}" if space.source else ""))
    by = f", described by {setup.cluster.name}" if setup.cluster is not None else ""
    print(f"on {setup.machine.max_nodes} node(s) of {setup.machine.processes_per_node} process(es){by}; searched by "
          f"{setup.searched_by}\nflags of all: {shlex.join(found.flags)}")  # fmt: skip
    looked = "" if found.looked == space.combinations else f", of which {found.looked:,} were looked at (a sample)"
    print(f"{space.combinations:,} combinations{looked}: {len(candidates):,} layouts can be tried")
    if setup.cluster is not None and setup.machine.capacity_bytes is not None:
        print(f"they fit into {setup.machine.capacity_bytes / GIB:.1f} of {setup.cluster.memory_gib:.1f} GiB of a "
              "device by the planner's figures")  # fmt: skip
    print_table(Table("what varies", ("parameter", "values"),
                      [(p.name, ", ".join(map(value_text, p.values))) for p in space.parameters]))  # fmt: skip
    if found.rejections:
        print_table(report.rejections(found))
    if not candidates:
        print("Nothing can be tried: the table above says why.")
        return
    prior = _prior(candidates, args.objective)
    first = sorted(candidates, key=lambda c: (prior[c.index] if prior else 0.0, c.index))
    print_table(Table(
        "best by the planner, none of it measured" if prior else "the first of them (no machine, no estimates)",
        ("layout", "nodes", "tokens a step", "GiB", "s/step", "value"),
        [(c.key, f"{c.nodes:,}", f"{c.tokens:,}", f"{(c.memory_bytes or 0) / GIB:.2f}" if prior else "",
          f"{c.step_s:.3g}" if c.step_s else "", written(math.exp(prior[c.index]), args.objective) if prior else "")
         for c in first[:_SHOWN]],
    ))  # fmt: skip
    print("a trial of the first is, on each of its processes:\n    pretrain_gpt.py "
          + shlex.join(trial_flags(first[0].flags, setup.steps)))  # fmt: skip
    count = min(args.max_trials or len(first), len(first))
    dearest = sorted((c.nodes * setup.limit_s(c) / 3600 for c in first), reverse=True)[:count]
    again = args.confirm if count > 1 else 0  # of a single layout there is nothing to confirm
    more = f" and {again:,} more that measure the leading ones again" if again else ""
    print(f"at most {count:,} trials of {setup.warm_up} + {setup.iterations} steps{more}, none longer than "
          f"{show_duration(max(map(setup.limit_s, first)))}: at most {sum(dearest) + again * dearest[0]:,.1f} "
          "node-hours")  # fmt: skip
    if prior:
        hours = sum(c.nodes * (c.step_s or 0.0) * setup.steps for c in first[:count]) / 3600
        print(f"the steps of the planner's first {count:,} take {hours:,.2f} node-hours by its estimates, start-up not "
              "counted")  # fmt: skip
