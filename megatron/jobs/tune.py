"""Search for the best layout by running trials, and report on the search (tools/tune.py).

The state of a search is kept in its trials' folders, as for experiments: point.json, written
when a trial starts, metrics.jsonl, and result.json, written when it ends. A killed search resumes
from there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import math
import shlex
import statistics
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from megatron.config.command_line import parse_args
from megatron.config.duration import duration_s, show_duration
from megatron.data.file_lock import FolderClaim
from megatron.drawing import pyplot, save
from megatron.errors import ConfigError, DataError
from megatron.jobs.candidate_layouts import LOSS, Candidate, Enumeration, enumerate_candidates
from megatron.jobs.result import (
    DONE,
    INVALID,
    RUNNING,
    STOPPED,
    Result,
    earlier,
    read_result,
    valid_losses,
)
from megatron.jobs.runner import (
    TIME,
    Attempt,
    Job,
    JobSource,
    Runner,
    Say,
    slurm_time_left_s,
    time_left,
    write_json,
)
from megatron.jobs.scaling import METRICS, POINT
from megatron.jobs.search import Halving, History, propose
from megatron.jobs.setup import Setup, make_setup
from megatron.jobs.space import known_spaces
from megatron.jobs.trial_statistics import (
    CONFIRM,
    MeasuredCandidate,
    Trial,
    in_turn,
    measured,
    noise_of,
    ranked,
    rivals,
    ruled_out,
    value_of,
    written,
)
from megatron.metrics_file import Kinds, is_text, read_beside, read_records
from megatron.pipeline.schedule import check_clock
from megatron.planner.cluster import GIB
from megatron.planner.progress import SearchProgress
from megatron.planner.search.output import rejection_table
from megatron.planner.table import Table, print_table
from megatron.untrusted import read_json, write_text

EXHAUSTED = "all layouts were tried"
BUDGET = "the trial budget is used up"
NODES = "too few nodes remain"
_IDENTITY = "search.json"
_MOST_BYTES = 1 << 24  # size limit for search.json
_RESERVE_S = 120.0  # kept free at an allocation's end to stop trials and write the report
_SHOWN = 10
_KINDS: Kinds = {is_text: ("key", "by")}


def run(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Run the tool with these arguments; return the exit code. Raises ConfigError."""
    if args.list_spaces:
        for name, title in known_spaces().items():
            print(f"{name:20} {title}")
        return 0
    setup = make_setup(args, flags)
    if args.report_only and not any((setup.out / "trials").glob("*")):
        raise ConfigError(f"--report-only: {setup.out} has no trials to report on")
    known = setup.machine.cluster is not None
    if known:
        check_clock()
    with SearchProgress() as progress:
        enumeration = enumerate_candidates(
            setup.space, setup.flags, setup.machine, predict=known, progress=progress
        )
    if args.dry_run:
        _dry_run(setup, enumeration)
        return 0
    if args.report_only:
        return 0 if _report(TuningSearch(setup, enumeration)) else 1
    if not enumeration.candidates:
        raise ConfigError(
            "no layout of the space is valid and fits on this machine (--dry-run lists the reasons)"
        )
    claim = FolderClaim(setup.out, f"--out {setup.out}")
    claim.take(lambda text: _say(text.strip()))
    try:
        return _search(setup, enumeration)
    finally:
        claim.release()


def _say(text: str) -> None:
    print(f" tune: {text}", flush=True)


def _search(setup: Setup, enumeration: Enumeration) -> int:
    _say(
        f"{len(enumeration.candidates):,} layouts of {setup.space.combinations:,} combinations, "
        f"searched by {setup.searched_by}; {setup.out}"
    )
    search = TuningSearch(setup, enumeration, _say)
    walltime_s = duration_s(setup.args.walltime or "")
    left_s = time_left(walltime_s, slurm_time_left_s, _RESERVE_S)
    runner = Runner(setup.target, _say, left_s=left_s)
    why = runner.run(search) or search.why
    goes_on = why not in (EXHAUSTED, BUDGET)
    _say(
        f"{'interrupted by ' if runner.signal else ''}{why}: {len(search.finished)} trial(s) finished "
        "since the start" + (f"; the same command resumes from {setup.out}" if goes_on else "")
    )
    has_best = _report(search)
    if goes_on:
        return 4 if why == TIME and not search.finished else 3
    return 0 if has_best else 1


def _report(search: TuningSearch) -> bool:
    """Write the report and print its summary; return whether there is a best layout."""
    for line in [*summary(search), *(f"wrote {path}" for path in write_report(search))]:
        _say(line)
    if search.ranked:
        _say(f"best: {command(search)}")
    return bool(search.ranked)


# -- a search --------------------------------------------------------------------------------------


class TuningSearch(JobSource):
    """A search: proposes trials and learns from them until the budget is used up.

    At the end of the search, the layouts that may be the best are measured again.

    setup        settings of the search
    enumeration  candidates to search
    say          called with one line for each event
    why          why the search ended, once no more trials can be started

    Raises ConfigError if the folder contains trials from another search.
    """

    def __init__(
        self, setup: Setup, enumeration: Enumeration, say: Say = lambda text: None
    ) -> None:
        super().__init__(say)
        self.setup = setup
        self.enumeration = enumeration
        self._took_s = list[float]()
        self._queued: Trial | None = None
        self._trials = list[Trial]()
        self.why = EXHAUSTED
        space = setup.space
        searches = space.tokens and space.halving and not setup.args.report_only
        self._halving = Halving(space.halving, space.evaluations) if searches else None
        folders = sorted((setup.out / "trials").glob("[0-9]*"))
        self._last = max((int(folder.name) for folder in folders), default=0)
        if not setup.args.report_only:
            path = setup.out / _IDENTITY
            now = setup.identity()
            if not path.exists():
                setup.out.mkdir(parents=True, exist_ok=True)
                write_json(path, now)
            saved = read_json(path, _MOST_BYTES, error=ConfigError)
            for name, value in now.items():
                if saved.get(name) != value:
                    raise ConfigError(
                        f"{path} belongs to another search: {name} was {saved.get(name)}, now it "
                        f"is {value}. Give the old value to resume it, or another --out to start "
                        "a new one"
                    )
        by_key = {candidate.key: candidate for candidate in enumeration.candidates}
        for folder in folders:
            self._read(folder, by_key)
        if self.trials:
            ended = sum(bool(trial.result.status) for trial in self.trials.values())
            say(f"resuming: {ended} of {len(self.trials)} trials are finished")
        self._waiting = [trial for trial in self.trials.values() if not trial.result.status]

    @property
    def trials(self) -> dict[int, Trial]:
        """Return all trials with their results, by number."""
        return {
            trial.number: dataclasses.replace(trial, result=self.results.get(trial.name, RUNNING))
            for trial in self._trials
        }

    @property
    def layouts(self) -> list[MeasuredCandidate]:
        """Return all layouts that have a finished trial."""
        return measured(self.trials.values(), self.objective)

    @property
    def ranked(self) -> list[MeasuredCandidate]:
        """Return layouts with a cost, best first."""
        return ranked(self.layouts)

    @property
    def objective(self) -> str:
        """Return the objective, one of OBJECTIVES (trial_statistics.py)."""
        return str(self.setup.args.objective)

    def _read(self, folder: Path, by_key: dict[str, Candidate]) -> None:
        """Load a trial from an earlier start. Raises ConfigError for invalid files."""
        try:
            point = read_beside(folder / POINT, _KINDS)
            candidate = by_key.get(point.get("key", ""))
            # killed before point.json was written, or not a candidate now, for example with fewer
            # nodes
            if candidate is None:
                return
            before = earlier(folder, self.setup.steps(candidate))
            if self._halving is not None and before.kind == STOPPED:
                self._halving.stops(int(folder.name), valid_losses(read_records(folder / METRICS)))
        except DataError as error:
            raise ConfigError(f"{folder}: {error}: repair it, or give another --out") from error
        trial = Trial(int(folder.name), candidate, point.get("by", ""))
        if before.status == DONE:
            before = self.figures(self._job(trial))
        repeated = self.setup.args.retry_failed and before.status != DONE and before.kind != STOPPED
        self._trials.append(trial)
        self.results[trial.name] = RUNNING if repeated else before

    # -- the next trial ----------------------------------------------------------------------------

    def next(self, runner: Runner) -> Job | None:
        if not runner.room(min(c.nodes for c in self.enumeration.candidates)):
            return None
        # too many nodes may have died since the trial was queued
        if self._queued is None or not runner.ever(self._queued.candidate.nodes):
            self._queued = self._choose(runner)
        trial = self._queued
        left_s = runner.left_s()
        if trial is None:
            return None
        if left_s is not None and self._took_s and left_s <= statistics.median(self._took_s):
            self.why = TIME
            return None
        # Smaller trials must not overtake the queued trial, or it could wait forever.
        if not runner.room(trial.candidate.nodes):
            return None
        self._queued = None
        if trial.number not in self.trials:
            self._trials.append(trial)
        self._waiting = [other for other in self._waiting if other.number != trial.number]
        candidate = trial.candidate
        expected = (
            "" if candidate.step_s is None else f", predicted {candidate.step_s:.3g} s per step"
        )
        how = "confirms a leading layout" if trial.by == CONFIRM else f"chosen by {trial.by}"
        self.say(
            f"trial {trial.number} {candidate.key}: {candidate.processes} process(es), "
            f"{how}{expected}"
        )
        return self._job(trial)

    def _choose(self, runner: Runner) -> Trial | None:
        """Return the next trial to start; if there is none, set `why` and return None."""
        args = self.setup.args
        trials = list(self.trials.values())
        number = max([self._last, *self.trials]) + 1
        searched = [t for t in trials if t.by != CONFIRM and t not in self._waiting]
        over = args.max_trials is not None and len(searched) >= args.max_trials
        self.why = BUDGET if over else EXHAUSTED
        lacking = False
        waiting = [trial for trial in self._waiting if trial.by == CONFIRM or not over]
        for trial in waiting:
            if runner.ever(trial.candidate.nodes):
                return trial
        if not over:
            history = self._history()
            able = [
                index
                for index in history.open
                if runner.ever(self.enumeration.candidates[index].nodes)
            ]
            lacking = len(able) < len(history.open)
            if able:
                count = sum(trial.by != CONFIRM for trial in trials)
                index, by = propose(
                    self.setup.search, args.seed, dataclasses.replace(history, open=able), count
                )
                return Trial(number, self.enumeration.candidates[index], by)
        last = max((t.number for t in searched), default=0)
        confirmed = sum(trial.by == CONFIRM and trial.number > last for trial in trials)
        runs = any(not t.result.status for t in searched)
        if not (waiting or lacking or runs) and confirmed < args.confirm:
            # After nodes have died, too few may be left for every layout in turn. Do not go on with
            # other layouts: they would be measured more often and win on more evidence.
            turn = in_turn(trials, self.objective)
            for candidate in turn:
                if runner.ever(candidate.nodes):
                    return Trial(number, candidate, CONFIRM)
            lacking = bool(turn)
        self.why = NODES if waiting or lacking else self.why
        return None

    def _history(self) -> History:
        """Collect the state on which the next proposal depends."""
        candidates = self.enumeration.candidates
        trials = list(self.trials.values())
        # Layouts whose trials only lost ranks are left out: the layout does not cause this.
        seen = {
            one.candidate.index: math.log(one.cost) if one.cost < math.inf else None
            for one in self.layouts
            if one.failures or one.cost < math.inf
        }
        running = [t for t in trials if not t.result.status and t not in self._waiting]
        pending = {t.candidate.index for t in running if t.by != CONFIRM}
        out = {trial.candidate.index for trial in trials} | ruled_out(candidates, trials)
        prior = [math.log(c.cost(c.step_s, self.objective)) for c in candidates if c.step_s]
        open_ = [index for index in range(len(candidates)) if index not in out]
        return History(
            candidates,
            self.setup.space.parameters,
            seen,
            open_,
            frozenset(pending),
            prior if self.setup.prior else None,
        )

    # -- a trial -----------------------------------------------------------------------------------

    def _job(self, trial: Trial) -> Job:
        setup = self.setup
        candidate = trial.candidate
        flags = setup.trial(candidate)
        steps = setup.steps(candidate)
        point = {
            "name": f"{trial.number:04d} {candidate.key}",
            "by": trial.by,
            "world": candidate.processes,
            "nodes": candidate.nodes,
            "iterations": steps - setup.space.warm_up,
            "warm_up": setup.space.warm_up,
            "flags": flags,
            "key": candidate.key,
            "values": dict(candidate.values),
        }
        return Job(
            f"trial-{trial.number}",
            setup.out / "trials" / trial.name,
            point,
            flags,
            candidate.processes,
            candidate.nodes,
            steps,
            setup.limit_s(candidate),
            setup.args.stall,
            candidate.step_s,
            None if self._halving is None else partial(self._halving.stops, trial.number),
        )

    def figures(self, job: Job) -> Result:
        metrics = job.folder / METRICS
        result = read_result(
            metrics, parse_args(job.flags, job.processes), self.setup.space.warm_up
        )
        if not self.setup.space.tokens or result.status != DONE:
            return result
        losses = valid_losses(read_records(metrics))
        if self._halving is not None:
            self._halving.stops(int(job.folder.name), losses)  # for comparison with other trials
        if len(losses) < self.setup.space.evaluations:
            return Result(INVALID, None, f"{len(losses)} validation losses: is there enough data?")
        return dataclasses.replace(result, loss=losses[-1])

    def report(self, end: Attempt, result: Result) -> None:
        trial = self.trials[int(end.job.folder.name)]
        head = f"trial {trial.number} {trial.candidate.key}"
        if not result.status:
            self.say(f"{head}: {end.interrupted}: it will run again")
            self._waiting.insert(0, trial)
            return
        self._took_s.append(end.ended - end.started)
        outcome = f"{result.outcome}: {result.reason}; {end.job.folder}"
        best = self.ranked
        if result.figure:
            outcome = written(trial.candidate.cost(result.figure, self.objective), self.objective)
        if best:
            near = "".join(
                f", {one.numbers} within the noise" for one in rivals(best, noise_of(self.layouts))
            )
            outcome += f"; best so far: {best[0].numbers} ({best[0].spread}){near}"
        finished = sum(bool(one.status) for one in self.results.values())
        self.say(f"{head}: {outcome}; {finished} trials finished")


# -- before a search ------------------------------------------------------------------------------


def _dry_run(setup: Setup, enumeration: Enumeration) -> None:
    """Print the layouts with their predictions, and the estimated cost of the search."""
    space = setup.space
    args = setup.args
    candidates = enumeration.candidates
    print(
        f"{space.name}: {space.title}\n{space.combinations:,} combinations: {len(candidates):,} "
        f"valid layouts on {setup.machine.max_nodes} node(s) of "
        f"{setup.machine.processes_per_node} process(es)"
    )
    print_table(rejection_table(enumeration.rejections, "Rejected combinations"))
    if not candidates:
        print("No layout is left to try: the table above lists the reasons.")
        return
    first = sorted(candidates, key=lambda c: c.cost(c.step_s or 0.0, args.objective))
    print_table(
        Table(
            "the first layouts, best predictions first; memory and time are predicted if the "
            "machine is described",
            ("layout", "nodes", "GiB", "s/step", "value"),
            [
                (
                    c.key,
                    f"{c.nodes:,}",
                    f"{c.memory_bytes / GIB:.2f}" if c.memory_bytes else "",
                    f"{c.step_s:.3g}" if c.step_s else "",
                    written(c.cost(c.step_s, args.objective), args.objective)
                    if c.step_s and args.objective != LOSS
                    else "",
                )
                for c in first[:_SHOWN]
            ],
        )
    )
    print(
        "each process of the first layout's trial runs:\n    pretrain_gpt.py "
        + shlex.join(setup.trial(first[0]))
    )
    trial = f"{space.warm_up} + {space.iterations} steps"
    if space.tokens:
        trial = f"{space.tokens:,} tokens with {space.evaluations} evaluations"
    count = min(args.max_trials or len(first), len(first))
    confirmations = args.confirm if count > 1 else 0  # a single layout needs no confirmation
    dearest = sorted((c.nodes * setup.limit_s(c) / 3600 for c in first), reverse=True)[:count]
    print(
        f"at most {count:,} trials of {trial}, and {confirmations} to "
        "measure the leading layouts again, each taking at most "
        f"{show_duration(max(map(setup.limit_s, first)))}: at most "
        f"{sum(dearest) + confirmations * dearest[0]:,.1f} node-hours"
    )


# -- after a search -------------------------------------------------------------------------------

FOLDER = "report"


def summary(search: TuningSearch) -> list[str]:
    """Summarize a search in sentences, treating layouts within the noise as equal."""
    trials = search.trials.values()
    layouts = search.layouts
    best = search.ranked
    kinds = Counter(t.result.outcome for t in trials if t.result.status and not t.result.figure)
    confirmations = sum(trial.by == CONFIRM for trial in trials)
    lines = list[str]()
    if best:
        noise = noise_of(layouts)
        near = ", ".join(f"{one.candidate.key} ({one.numbers})" for one in rivals(best, noise))
        lines += [
            f"Best: {best[0].candidate.key} ({best[0].numbers}, {best[0].spread}): "
            f"{written(best[0].cost, search.objective)}"
            + ("." if search.setup.space.tokens else f", {best[0].step_s:.4g} s per step."),
            "Equally good within the noise (trials of a layout scatter by about "
            f"{100 * noise:.1f} %): {near or 'none'}.",
        ]
    return [
        *lines,
        f"{len(layouts)} of {len(search.enumeration.candidates):,} layouts were tried, searched by "
        f"{search.setup.searched_by}; {confirmations} trial(s) repeated leading ones. Without "
        f"valid figures: {', '.join(f'{n} {kind}' for kind, n in kinds.most_common()) or 'none'}.",
    ]


def write_report(search: TuningSearch) -> list[Path]:
    """Write a report on the search so far to its folder; return the files.

    An earlier report is replaced. Without matplotlib, trials.md says why there is no plot. Raises
    ConfigError if the folder is not writable.
    """
    folder = search.setup.out / FOLDER
    sections = [f"# {search.setup.space.title}"]
    sections.append("\n".join(f"- {line}" for line in summary(search)))
    files = list[Path]()
    for name in ("best.txt", "trajectory.png"):
        with contextlib.suppress(OSError):  # the write below reports the error
            (folder / name).unlink()
    if search.ranked:
        line = command(search)
        files.append(write_text(folder / "best.txt", line + "\n", choose="another --out folder"))
        sections.append(f"The best layout for a real run:\n\n```\n{line}\n```")
        try:
            files.append(_picture(search, folder / "trajectory.png"))
            sections.append("![trajectory](trajectory.png)")
        except ConfigError as error:
            sections.append(f"No plot: {error}")
    text = "\n\n".join([*sections, _table(search).markdown()]) + "\n"
    return [write_text(folder / "trials.md", text, choose="another --out folder"), *files]


def _table(search: TuningSearch) -> Table:
    """Tabulate layouts with figures, best first, followed by trials without figures."""
    rows = [
        (
            one.numbers.partition(" ")[2],
            one.candidate.key,
            written(one.cost, search.objective),
            one.spread,
            f"{statistics.median(t.result.step_s for t in one.trials if t.result.step_s):.4g}",
            f"{one.candidate.step_s or 0:.4g}",
            f"{max(t.result.memory_bytes or 0 for t in one.trials) / GIB:.2f}",
            one.trials[0].by,
        )
        for one in search.ranked
    ]
    for trial in search.trials.values():
        if trial.result.status and not trial.result.figure:
            reason = " ".join((trial.result.reason or "").split()).replace("|", "/")
            layout = trial.candidate.key
            outcome = trial.result.outcome
            rows.append((str(trial.number), layout, outcome, reason, "", "", "", trial.by))
    return Table(
        "",
        ("trials", "layout", "value", "measured", "s/step", "planner's s/step", "GiB", "chosen by"),
        rows,
    )


def _picture(search: TuningSearch, path: Path) -> Path:
    """Draw the values of all trials with figures in order, and the best value so far."""
    plot = pyplot()
    objective = search.objective
    done = [trial for trial in search.trials.values() if trial.result.figure]
    numbers = [trial.number for trial in done]
    costs = [trial.candidate.cost(trial.result.figure or 0.0, objective) for trial in done]
    figure, axes = plot.subplots(layout="constrained")
    for marker, those in (("o", costs), ("-", itertools.accumulate(costs, min))):
        axes.plot(numbers, [value_of(cost, objective)[0] for cost in those], marker)
    axes.set(xlabel="trial", ylabel=value_of(costs[0], objective)[1])
    return save(figure, path)


def command(search: TuningSearch) -> str:
    """Return a shell command that runs the best layout.

    It uses torchrun, or under Slurm srun, with devices bound as in the launch scripts.
    """
    candidate = search.ranked[0].candidate
    cluster = search.setup.machine.cluster
    program = ["pretrain_gpt.py", *candidate.flags]
    if search.setup.target.launcher != "slurm":
        return f"torchrun --nproc-per-node={candidate.processes} {shlex.join(program)}"
    each = candidate.processes // candidate.nodes
    step = f"srun -N {candidate.nodes} -n {candidate.processes} --ntasks-per-node={each}"
    if cluster is not None:
        step += f" -c {cluster.cpus_per_task}"
        if cluster.device_type == "cuda":
            step += " --gpus-per-task=1 --gpu-bind=closest"
    return f"{step} python -u {shlex.join(program)}"
