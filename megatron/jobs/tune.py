"""Search for the best layout by trials, as tools/tune.py asks, and write a report of it.

What is known of a search lies in the folders of its trials, as those of experiments: point.json
when one is started, result.json when it has ended, metrics.jsonl. A search that was killed goes on
from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import shlex
import statistics
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from megatron.config.command_line import parse_args
from megatron.config.duration import show_duration
from megatron.data.file_lock import FolderClaim
from megatron.drawing import pyplot, save
from megatron.errors import ConfigError, DataError
from megatron.jobs.candidates import GIB, Candidate, Enumeration, enumerate_candidates, trial_flags
from megatron.jobs.measured import (
    CONFIRM,
    Measured,
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
from megatron.jobs.result import CRASH, DONE, FAILED, RUNNING, Result, read_result
from megatron.jobs.runner import (
    TIME,
    Attempt,
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
from megatron.jobs.space import known_spaces
from megatron.metrics_file import Kinds, is_text, read_beside
from megatron.planner.table import Table, print_table
from megatron.untrusted import read_json, write_text

EXHAUSTED, BUDGET, NODES = (
    "nothing is left to try",
    "the trials are used up",
    "too few nodes are left",
)
_IDENTITY = "search.json"
_MOST_BYTES = 1 << 24  # of a file of the folder
_RESERVE_S = 120.0  # of an allocation, to stop what runs and to write the report
_SHOWN = 10
_KINDS: Kinds = {is_text: ("key", "by", "status", "kind", "reason")}


def run(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Run the tool with these words; return the exit code. Raises ConfigError."""
    if args.list_spaces:
        for name, title in known_spaces().items():
            print(f"{name:20} {title}")
        return 0
    setup = make_setup(args, flags)
    if args.report_only and not any((setup.out / "trials").glob("*")):
        raise ConfigError(f"--report-only: {setup.out} has no trials to report on")
    found = enumerate_candidates(
        setup.space, setup.flags, setup.machine, predict=setup.cluster is not None
    )
    if args.dry_run:
        _dry_run(setup, found)
        return 0
    if args.report_only:
        return 0 if _report(Search(setup, found)) else 1
    if not found.candidates:
        raise ConfigError(
            "nothing can be tried: no layout of the space is valid and fits here (--dry-run says "
            "why)"
        )
    claim = FolderClaim(setup.out, f"--out {setup.out}")
    claim.take(lambda text: _say(text.strip()))
    try:
        return _search(setup, found)
    finally:
        claim.release()


def _say(text: str) -> None:
    print(f" tune: {text}", flush=True)


def _search(setup: Setup, found: Enumeration) -> int:
    _say(
        f"{len(found.candidates):,} layouts of {setup.space.combinations:,} combinations, searched "
        f"by {setup.searched_by}; {setup.out}"
    )
    search = Search(setup, found, _say)
    runner = Runner(
        setup.place, _say, left_s=time_left(setup.walltime_s, slurm_time_left_s, _RESERVE_S)
    )
    why = runner.run(search) or search.why
    goes_on = why not in (EXHAUSTED, BUDGET)
    _say(
        f"{'interrupted by ' if runner.signal else ''}{why}: {search.done} trial(s) ended in this "
        "start" + (f"; the same command goes on from {setup.out}" if goes_on else "")
    )
    has_best = _report(search)
    if goes_on:
        return 4 if why == TIME and not search.done else 3
    return 0 if has_best else 1


def _report(search: Search) -> bool:
    """Write the report and print what matters of it; return whether there is a best layout."""
    for line in [*summary(search), *(f"wrote {path}" for path in write_report(search))]:
        _say(line)
    if search.ranked:
        _say(f"the best: {command(search)}")
    return bool(search.ranked)


# -- a search --------------------------------------------------------------------------------------


class Search:
    """The source of a runner's jobs: proposals become trials, trials become better proposals, until
    the budget is used. When the search has ended, the layouts that may be the best are measured
    again.

    trials  all of them, by number; found: the list that is searched; done: how many ended in this
            start; why: with what it ends, once nothing more can be started
    Raises ConfigError where the folder has another search's trials.
    """

    def __init__(
        self, setup: Setup, found: Enumeration, say: Callable[[str], object] = lambda text: None
    ) -> None:
        self.setup, self.found, self._say = setup, found, say
        self._objective, self._took_s = setup.args.objective, list[float]()
        self._running = set[int]()
        self._held: Trial | None = None
        self.trials, self.done, self.why = dict[int, Trial](), 0, EXHAUSTED
        folders = sorted((setup.out / "trials").glob("[0-9]*"))
        self._last = max((int(folder.name) for folder in folders), default=0)
        if not setup.args.report_only:
            _check_identity(setup)
        by_key = {candidate.key: candidate for candidate in found.candidates}
        for folder in folders:
            self._read(folder, by_key)
        if self.trials:
            ended = sum(bool(trial.result.status) for trial in self.trials.values())
            say(f"going on: {ended} of {len(self.trials)} trials have ended")
        self._waiting = [trial for trial in self.trials.values() if not trial.result.status]

    @property
    def layouts(self) -> list[Measured]:
        """Return all layouts that were tried."""
        return measured(self.trials.values(), self._objective)

    @property
    def ranked(self) -> list[Measured]:
        """Return layouts with figures, the best first."""
        return ranked(self.layouts)

    def written(self, cost: float) -> str:
        """Write a cost as users read it."""
        return written(cost, self._objective)

    def _read(self, folder: Path, by_key: dict[str, Candidate]) -> None:
        """Take over a trial of an earlier start. Raises ConfigError for a file that no tuner
        wrote.
        """
        try:
            point, result = (
                read_beside(folder / POINT, _KINDS),
                read_beside(folder / RESULT, _KINDS),
            )
            complete = is_complete(folder, self.setup.steps)
        except DataError as error:
            raise ConfigError(f"{folder}: {error}: put it right, or give another --out") from error
        candidate = by_key.get(point.get("key", ""))
        # killed before it was written, or none here, such as with fewer nodes
        if candidate is None:
            return
        trial = Trial(int(folder.name), candidate, point.get("by", ""))
        found = self._figures(self._job(trial)) if complete else RUNNING
        if result.get("status") == FAILED:
            found = Result(FAILED, result.get("kind"), result.get("reason"))
        again = self.setup.args.retry_failed and found.status != DONE
        self.trials[trial.number] = dataclasses.replace(trial, result=RUNNING if again else found)

    # -- what is next ------------------------------------------------------------------------------

    def next(self, runner: Runner) -> Job | None:
        if not runner.room(min(c.nodes for c in self.found.candidates)):
            return None
        # nodes died meanwhile
        if self._held is None or not runner.ever(self._held.candidate.nodes):
            self._held = self._choose(runner)
        trial, left_s = self._held, runner.left_s()
        if trial is None:
            return None
        if left_s is not None and self._took_s and left_s <= statistics.median(self._took_s):
            self.why = TIME
            return None
        # The first in the queue is not overtaken by smaller ones, which would keep it waiting for
        # ever.
        if not runner.room(trial.candidate.nodes):
            return None
        self._held, self.trials[trial.number] = None, trial
        self._waiting = [other for other in self._waiting if other.number != trial.number]
        self._running.add(trial.number)
        candidate = trial.candidate
        expected = (
            "" if candidate.step_s is None else f", {candidate.step_s:.3g} s a step predicted"
        )
        how = "to confirm what was found" if trial.by == CONFIRM else f"chosen by {trial.by}"
        self._say(
            f"trial {trial.number} {candidate.key}: {candidate.processes} process(es), "
            f"{how}{expected}"
        )
        return self._job(trial)

    def _choose(self, runner: Runner) -> Trial | None:
        """Return the trial that is to be started next; None where there is none, and `why` says why
        the search ends.
        """
        args, trials, number = (
            self.setup.args,
            list(self.trials.values()),
            max([self._last, *self.trials]) + 1,
        )
        searched = [
            t.number
            for t in trials
            if t.by != CONFIRM and (t.result.status or t.number in self._running)
        ]
        over = args.max_trials is not None and len(searched) >= args.max_trials
        self.why, lacking = BUDGET if over else EXHAUSTED, False
        waiting = [trial for trial in self._waiting if trial.by == CONFIRM or not over]
        for trial in waiting:
            if runner.ever(trial.candidate.nodes):
                return trial
        if not over:
            history = self._history()
            able = [
                index for index in history.open if runner.ever(self.found.candidates[index].nodes)
            ]
            lacking = len(able) < len(history.open)
            if able:
                count = sum(trial.by != CONFIRM for trial in trials)
                index, by = propose(
                    self.setup.search, args.seed, dataclasses.replace(history, open=able), count
                )
                return Trial(number, self.found.candidates[index], by)
        confirmed = sum(
            trial.by == CONFIRM and trial.number > max(searched, default=0) for trial in trials
        )
        if not (waiting or lacking or self._running & set(searched)) and confirmed < args.confirm:
            # Where nodes died the first in turn may have too few: their turn stays theirs, for
            # others measured more often instead would be named on better evidence.
            turn = in_turn(trials, self._objective)
            for candidate in turn:
                if runner.ever(candidate.nodes):
                    return Trial(number, candidate, CONFIRM)
            lacking = bool(turn)
        self.why = NODES if waiting or lacking else self.why
        return None

    def _history(self) -> History:
        """Collect all that the next proposal depends on."""
        candidates, trials = self.found.candidates, list(self.trials.values())
        # A lost rank says nothing of the layout.
        seen = {
            one.candidate.index: math.log(one.cost) if one.cost < math.inf else None
            for one in self.layouts
            if one.failures or one.cost < math.inf
        }
        pending = {
            self.trials[n].candidate.index for n in self._running if self.trials[n].by != CONFIRM
        }
        out = {trial.candidate.index for trial in trials} | ruled_out(candidates, trials)
        prior = [math.log(c.cost(c.step_s, self._objective)) for c in candidates if c.step_s]
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
        setup, candidate = self.setup, trial.candidate
        flags = trial_flags(candidate.flags, setup.steps)
        point = {
            "name": f"{trial.number:04d} {candidate.key}",
            "by": trial.by,
            "world": candidate.processes,
            "nodes": candidate.nodes,
            "iterations": setup.iterations,
            "warm_up": setup.warm_up,
            "flags": flags,
            "key": candidate.key,
            "values": dict(candidate.values),
        }
        return Job(
            f"trial-{trial.number}",
            setup.out / f"trials/{trial.number:04}",
            point,
            flags,
            candidate.processes,
            candidate.nodes,
            setup.steps,
            setup.limit_s(candidate),
            setup.args.stall,
            candidate.step_s,
        )

    def _figures(self, job: Job) -> Result:
        return read_result(
            job.folder / METRICS, parse_args(job.flags, job.processes), self.setup.warm_up
        )

    def ended(self, end: Attempt) -> None:
        """Note how a trial ended and say what it is worth."""
        trial = self.trials[int(end.job.folder.name)]
        head = f"trial {trial.number} {trial.candidate.key}"
        self._running.discard(trial.number)
        if end.interrupted:
            self._say(f"{head}: {end.interrupted}: it is run again")
            self._waiting.insert(0, trial)
            return
        result = (
            self._figures(end.job)
            if end.complete
            else Result(
                FAILED, end.why.kind if end.why else CRASH, end.why.reason if end.why else None
            )
        )
        end.note(dataclasses.asdict(result))
        self.trials[trial.number] = trial = dataclasses.replace(trial, result=result)
        self._took_s.append(end.ended - end.started)
        self.done += 1
        said, best = f"{result.said}: {result.reason}; {end.job.folder}", self.ranked
        if result.step_s:
            said = self.written(trial.candidate.cost(result.step_s, self._objective))
        if best:
            near = "".join(
                f", {one.numbers} within the noise" for one in rivals(best, noise_of(self.layouts))
            )
            said += f"; best so far: {best[0].numbers} ({best[0].spread}){near}"
        self._say(
            f"{head}: {said}; {sum(bool(t.result.status) for t in self.trials.values())} trials "
            "have ended"
        )


def _check_identity(setup: Setup) -> None:
    """Raises ConfigError that names the first thing in which a search differs from that of its
    folder.
    """
    path, now = setup.out / _IDENTITY, setup.identity()
    if not path.exists():
        setup.out.mkdir(parents=True, exist_ok=True)
        write_json(path, now)
    there = read_json(path, _MOST_BYTES, error=ConfigError)
    for name, value in now.items():
        if there.get(name) != value:
            raise ConfigError(
                f"{path} is of another search: {name} was {there.get(name)}, now it is {value}. "
                "Give the same again to go on with it, or another --out to begin anew"
            )


# -- before it -------------------------------------------------------------------------------------


def _dry_run(setup: Setup, found: Enumeration) -> None:
    """Print which layouts there are, what the planner says of them, and what they may cost."""
    space, args, candidates = setup.space, setup.args, found.candidates
    print(
        f"{space.name}: {space.title}\n{space.combinations:,} combinations: {len(candidates):,} "
        f"layouts can be tried on {setup.machine.max_nodes} node(s) of "
        f"{setup.machine.processes_per_node} process(es)"
    )
    counted = sorted(found.rejections.items(), key=lambda item: -item[1][0])
    rows = [(f"{count:,}", reason, example) for reason, (count, example) in counted]
    print_table(Table("Combinations that are no layouts", ("how many", "why", "for example"), rows))
    if not candidates:
        print("Nothing can be tried: the table above says why.")
        return
    first = sorted(candidates, key=lambda c: c.cost(c.step_s or 0.0, args.objective))
    print_table(
        Table(
            "the first of them, by the planner where it knows the machine; none of it measured",
            ("layout", "nodes", "GiB", "s/step", "value"),
            [
                (
                    c.key,
                    f"{c.nodes:,}",
                    f"{c.memory_bytes / GIB:.2f}" if c.memory_bytes else "",
                    f"{c.step_s:.3g}" if c.step_s else "",
                    written(c.cost(c.step_s, args.objective), args.objective) if c.step_s else "",
                )
                for c in first[:_SHOWN]
            ],
        )
    )
    print(
        "a trial of the first is, on each of its processes:\n    pretrain_gpt.py "
        + shlex.join(trial_flags(first[0].flags, setup.steps))
    )
    count = min(args.max_trials or len(first), len(first))
    again = args.confirm if count > 1 else 0  # of a single layout there is nothing to confirm
    dearest = sorted((c.nodes * setup.limit_s(c) / 3600 for c in first), reverse=True)[:count]
    print(
        f"at most {count:,} trials of {setup.warm_up} + {setup.iterations} steps, and {again} that "
        "measure the leading ones again, none longer than "
        f"{show_duration(max(map(setup.limit_s, first)))}: at most "
        f"{sum(dearest) + again * dearest[0]:,.1f} node-hours"
    )


# -- after it --------------------------------------------------------------------------------------

FOLDER = "report"
_FILES = ("trials.md", "best.txt", "trajectory.png")


def summary(search: Search) -> list[str]:
    """Say in sentences what came of a search. No layout is called better than another within the
    noise.
    """
    trials, layouts, best = search.trials.values(), search.layouts, search.ranked
    kinds = Counter(t.result.said for t in trials if t.result.status and not t.result.step_s)
    again, lines = sum(trial.by == CONFIRM for trial in trials), list[str]()
    if best:
        noise = noise_of(layouts)
        near = ", ".join(f"{one.candidate.key} ({one.numbers})" for one in rivals(best, noise))
        lines += [
            f"Best: {best[0].candidate.key} ({best[0].numbers}, {best[0].spread}): "
            f"{search.written(best[0].cost)}, {best[0].step_s:.4g} s a step.",
            "As good as it within the noise, for trials of one layout scatter by some "
            f"{100 * noise:.1f} %: {near or 'none'}.",
        ]
    return [
        *lines,
        f"{len(layouts)} of {len(search.found.candidates):,} layouts were tried, searched by "
        f"{search.setup.searched_by}; {again} trial(s) measured leading ones again. Without valid "
        f"figures: {', '.join(f'{n} {kind}' for kind, n in kinds.most_common()) or 'none'}.",
    ]


def write_report(search: Search) -> list[Path]:
    """Write the report of a search as far as it went into FOLDER, in place of an earlier one; the
    files. Without matplotlib or Optuna trials.md says why there is no picture. Raises ConfigError
    where nothing can be written."""
    folder, parts = search.setup.out / FOLDER, [f"# {search.setup.space.title}"]
    parts.append("\n".join(f"- {line}" for line in summary(search)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder}: {error.strerror or error}: choose another --out folder"
        ) from error
    files = list[Path]()
    if search.ranked:
        line = command(search)
        files.append(write_text(folder / "best.txt", line + "\n", choose="another --out folder"))
        parts.append(f"The best layout for a real run:\n\n```\n{line}\n```")
        try:
            files.append(_picture(search, folder / "trajectory.png"))
            parts.append("![trajectory](trajectory.png)")
        except (ConfigError, ImportError, RuntimeError, ValueError) as error:
            parts.append(f"No picture: {error}")
    text = "\n\n".join([*parts, _table(search).markdown()]) + "\n"
    return [write_text(folder / "trials.md", text, choose="another --out folder"), *files]


def _table(search: Search) -> Table:
    """Make a table of layouts with figures, the best first, and of trials without."""
    rows = [
        (
            one.numbers.partition(" ")[2],
            one.candidate.key,
            search.written(one.cost),
            one.spread,
            f"{one.step_s:.4g}",
            f"{one.candidate.step_s or 0:.4g}",
            f"{max(t.result.memory_bytes or 0 for t in one.trials) / GIB:.2f}",
            one.trials[0].by,
        )
        for one in search.ranked
    ]
    for trial in search.trials.values():
        if trial.result.status and not trial.result.step_s:
            reason = " ".join((trial.result.reason or "").split()).replace("|", "/")
            rows.append(
                (
                    str(trial.number),
                    trial.candidate.key,
                    trial.result.said,
                    reason,
                    "",
                    "",
                    "",
                    trial.by,
                )
            )
    return Table(
        "",
        ("trials", "layout", "value", "measured", "s/step", "planner's s/step", "GiB", "chosen by"),
        rows,
    )


def _picture(search: Search, path: Path) -> Path:
    """Draw every trial in its order with the best so far."""
    plot = pyplot(install="'megatron-frontier[tune]'")
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    objective, unit = search.setup.args.objective, ""
    study = optuna.create_study(direction="minimize" if objective == "node_hours" else "maximize")
    for trial in search.trials.values():
        if trial.result.step_s:
            value, unit = value_of(trial.candidate.cost(trial.result.step_s, objective), objective)
            study.add_trial(optuna.trial.create_trial(value=value))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Optuna calls it experimental
        optuna.visualization.matplotlib.plot_optimization_history(study, target_name=unit)
    return save(plot.gcf(), path)


def command(search: Search) -> str:
    """Return one line for a shell that runs the best layout: by torchrun, or as a step of a Slurm
    job, its devices bound to tasks as in the launch scripts."""
    candidate, cluster = search.ranked[0].candidate, search.setup.cluster
    program = ["pretrain_gpt.py", *candidate.flags]
    if search.setup.place.launcher != "slurm":
        return shlex.join(["torchrun", f"--nproc-per-node={candidate.processes}", *program])
    each = candidate.processes // candidate.nodes
    words = [
        "srun",
        "-N",
        str(candidate.nodes),
        "-n",
        str(candidate.processes),
        f"--ntasks-per-node={each}",
    ]
    if cluster is not None:
        words += ["-c", str(cluster.cpus_per_task)]
        words += (
            ["--gpus-per-task=1", "--gpu-bind=closest"] if cluster.device_type == "cuda" else []
        )
    return shlex.join([*words, "python", "-u", *program])
