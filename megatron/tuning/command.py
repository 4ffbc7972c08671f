"""tools/tune.py: from its words to the search, the report and the exit code."""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.data.folder_claim import FolderClaim
from megatron.errors import ConfigError, MegatronError
from megatron.model.formulas import device_unit
from megatron.planning.experiments.runner import slurm_time_left_s
from megatron.planning.search.show import Show
from megatron.tuning.candidates import Enumeration, enumerate_candidates
from megatron.tuning.combination import make_request
from megatron.tuning.dry_run import dry_run
from megatron.tuning.journal import NAME, Journal, check_identity, read_journal
from megatron.tuning.live import Live, best_table, make_console, outcome
from megatron.tuning.report.context import ReportContext
from megatron.tuning.report.tables import summary
from megatron.tuning.report.write import write_report
from megatron.tuning.search.optimizer import make_optimizer
from megatron.tuning.session import ALLOCATION, BUDGET, EXHAUSTED, NODES, SIGNAL, TIME, Ending, Plan, Session, time_of
from megatron.tuning.setup import Setup, make_setup
from megatron.tuning.space_file import known_spaces
from megatron.tuning.trial_runner import TrialRunner
from megatron.tuning.types import Trial, prior_of
from megatron.untrusted import read_text

EXIT_NONE, EXIT_AGAIN, EXIT_NO_TIME = 1, 3, 4
_RESERVE_S = 120.0  # of an allocation, to stop what runs and to write the report
_MOST_SEARCHERS = 8
_TOP, _FEW = 10, 3


class _Interrupted(Exception):
    """A signal came outside of the session, which has its own way to end."""


def run(args: argparse.Namespace, flags: Sequence[str]) -> int:
    """Do what the words say; returns the exit code. Raises ConfigError."""
    if args.list_spaces:
        for name, title in known_spaces().items():
            print(f"{name:20} {title}")
        return 0
    if args.dry_run and args.report_only:
        raise ConfigError("--dry-run beside --report-only: give one of them")
    setup = make_setup(args, flags)
    try:
        with _interruptible():
            return _run(setup, args)
    except _Interrupted as error:
        print(f" tune: interrupted by {error}; the same command goes on from {setup.out}", flush=True)
        return EXIT_AGAIN


def _run(setup: Setup, args: argparse.Namespace) -> int:
    live = Live(setup.objective, str(setup.out), device=device_unit(setup.cluster.device if setup.cluster else ""))
    if args.dry_run:
        dry_run(setup, _enumerate(setup, live), Show(markdown=False))
        return 0
    journal_path = setup.out / NAME
    there = read_journal(journal_path)
    if args.report_only and not there.trials:
        raise ConfigError(f"--report-only: {journal_path} has no trials to report on")
    if there.identity:
        check_identity(journal_path, there.identity, setup.identity())
    if args.report_only:
        trials = [there.trials[number] for number in sorted(there.trials)]
        return _report(setup, _enumerate(setup, live), trials, args.update_cluster)
    claim = FolderClaim(setup.out, f"--out {setup.out}")
    claim.take(lambda text: live.note(text.strip()))
    try:
        return _search(setup, args, live)
    finally:
        claim.release()


def _enumerate(setup: Setup, live: Live) -> Enumeration:
    """The layouts of the space."""
    cores = min(_MOST_SEARCHERS, len(os.sched_getaffinity(0)))
    return enumerate_candidates(
        setup.space, setup.flags, setup.machine, predict=setup.cluster is not None, processes=cores, seed=setup.seed,
        tell=live.progress,
    )  # fmt: skip


def _search(setup: Setup, args: argparse.Namespace, live: Live) -> int:
    found = _enumerate(setup, live)
    prior = prior_of(found.candidates, setup.objective) if setup.prior else None
    if setup.prior and prior is None:
        raise ConfigError("the planner has no estimate for some of the layouts: search without it, --no-prior")
    plan = Plan(found.candidates, setup.space.parameters, setup.objective, setup.max_trials, prior, args.retry_failed,
                setup.confirm)  # fmt: skip
    if not plan.candidates:
        raise ConfigError("nothing can be tried: no layout of the space is valid and fits here (--dry-run says why)")
    runner = TrialRunner(setup.out, setup.place, setup.trial_settings(), say=live.note)
    journal = Journal.open(setup.out, setup.identity(), setup.settings())
    allocation_s = slurm_time_left_s if setup.place.launcher == "slurm" else lambda: None
    left_s = time_of(setup.walltime_s, allocation_s, reserve_s=_RESERVE_S)
    live.note(f"{len(found.candidates):,} layouts of {found.combinations:,} combinations, searched by "
              f"{setup.search_in_words}; {setup.out}")
    if journal.trials:
        live.note(f"going on: {len(journal.ended)} of {len(journal.trials)} trials have ended")
    with _unhurried():
        with live:
            ending = Session(plan, make_optimizer(setup.search, setup.seed), runner, journal, live, left_s=left_s).run()
        trials = journal.trials
        journal.close(ending.why)
        live.note(_said(ending, setup))
        code = exit_code(ending)
        try:
            _report(setup, found, trials, args.update_cluster)
        except (MegatronError, OSError) as error:
            if code not in (EXIT_AGAIN, EXIT_NO_TIME):
                raise
            live.note(f"error: {error}")  # which is no reason not to go on
    return code


def exit_code(ending: Ending) -> int:
    """Of a search that ended so."""
    if ending.why in (SIGNAL, ALLOCATION, NODES):
        return EXIT_AGAIN
    if ending.why == TIME:
        return EXIT_AGAIN if ending.ended else EXIT_NO_TIME
    assert ending.why in (EXHAUSTED, BUDGET)
    return EXIT_NONE if ending.best is None else 0


def _said(ending: Ending, setup: Setup) -> str:
    how = f"{ending.why} by {ending.signal}" if ending.signal else ending.why
    again = f"; the same command goes on from {setup.out}" if ending.why in (TIME, SIGNAL, ALLOCATION, NODES) else ""
    out = ""
    if ending.ruled_out:
        out = f"; {ending.ruled_out:,} layout(s) need, by the planner, no less memory than one that ran out of it"
    return f"{how}: {ending.ended} trial(s) ended in this start{out}{again}"


# -- at the end --------------------------------------------------------------------------------------------------------


def _report(setup: Setup, found: Enumeration, trials: Sequence[Trial], update: Path | None) -> int:
    """Write the report and print what matters of it. Returns the exit code of --report-only."""
    by_key = {candidate.key: candidate for candidate in found.candidates}
    trials = [dataclasses.replace(t, candidate=by_key.get(t.candidate.key, t.candidate)) for t in trials]
    context = ReportContext(
        setup.space.name, setup.space.title, setup.space.parameters, trials, found.candidates, setup.objective,
        setup.search_in_words, found.combinations, found.rejections, found.sampled, setup.cluster,
        setup.machine.capacity_bytes, setup.place.launcher, setup.place.tasks_per_node,
        make_request(setup.space, setup.flags, setup.machine).flags,
    )  # fmt: skip
    paths = write_report(setup.out, context)
    _print_best(context, setup.out, paths)
    if update is not None and context.best is None:
        print(f"--update-cluster {update}: not written, for no layout has valid figures", flush=True)
    elif update is not None:
        from megatron.tuning.report.recalibrate import metrics_of, update_cluster

        assert setup.cluster is not None, "make_setup asks for it"
        print(update_cluster(setup.cluster.path, metrics_of(setup.out, trials), update, setup.warm_up))
    return EXIT_NONE if context.best is None else 0


def _print_best(context: ReportContext, out: Path, paths: Sequence[Path]) -> None:
    def say(line: str) -> None:
        console.print(line, soft_wrap=True)

    console = make_console()
    if context.best is not None:
        unit = device_unit(context.cluster.device if context.cluster else "")
        console.print(best_table(context.trials, context.objective, _TOP, console.width, unit))
    for line in summary(context):
        say(f" tune: {line}")
    for trial in context.trials[:_FEW] if context.best is None else ():
        say(f"   trial {trial.number} {trial.candidate.key}: {outcome(trial, context.objective)}; {out}/{trial.folder}")
    for path in paths:
        if path.name == "trials.md":
            say(f" tune: wrote {path}")
        elif path.name == "best.txt":
            say(f" tune: wrote {path}:")
            say(f"   {read_text(path, 1 << 20, error=ConfigError).strip()}")


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Signals of a batch system end what is done before and after the session, too: nothing is lost by that."""

    def stop(number: int, _frame: object) -> None:
        raise _Interrupted(signal.Signals(number).name)

    with _handled((signal.SIGUSR1, signal.SIGTERM, signal.SIGINT), stop):
        yield


@contextlib.contextmanager
def _unhurried() -> Iterator[None]:
    """A batch system may say several times that the end is near; the report is written before it. The session, which
    runs in here, has handlers of its own."""
    with _handled((signal.SIGUSR1, signal.SIGTERM), signal.SIG_IGN):
        yield


@contextlib.contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Any) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, its in before.items():
            signal.signal(number, its)
