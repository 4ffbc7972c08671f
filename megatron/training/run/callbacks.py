"""Callbacks for the optional parts of the training loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron.data import history
from megatron.data.ledger import Ledger
from megatron.data.order import sample_order
from megatron.data.stream import StreamDataset
from megatron.errors import TrainingError
from megatron.parallel.membership import Membership
from megatron.protocols import Callback
from megatron.training.report import events
from megatron.training.report.metrics import Profiler, summarise
from megatron.training.report.timeline import Timeline
from megatron.training.run.evaluation import Losses, Tasks
from megatron.training.run.schedules import RunCosts
from megatron.training.run.state import Run
from megatron.training.run.step import finish_step, skipped_until
from megatron.training.run.tasks import EvaluationTask

_SLOW_REPORTS = 3  # log lines in a row at which a rank is slow before it is replaced
_NAMED = 8  # largest number of slow ranks in a message


@dataclass(eq=False)
class Recorder(Callback):
    """Records the profile of --profile and, for the timeline, the phases of some steps."""

    profiler: Profiler
    timeline: Timeline
    _drawn: events.TimelineRecorded | None = None  # published after the next log line

    def before_step(self, run: Run) -> None:
        self.profiler.step(run.progress.iteration)
        run.timers.begin(run.progress.iteration + 1)

    def figures(self, run: Run) -> Mapping[str, object]:
        recording = run.timers.recording
        run.timers.recording = None
        save_s = run.watch.paused_s.pop("saving", 0.0) / len(run.interval.steps)
        if recording is None:
            return {}
        phases, self._drawn = self.timeline.report(recording, save_s)
        return {"phases": phases}

    def on_log(self, run: Run, figures: events.Iteration) -> None:
        drawn = self._drawn
        self._drawn = None
        if drawn is not None:
            run.reporter.publish(drawn)

    def close(self) -> None:
        self.profiler.close()
        self.timeline.write()


class Routers(Callback):
    """Adds the balance of the experts to a log line."""

    def figures(self, run: Run) -> Mapping[str, object]:
        from megatron.layers.expert_load import take_figures  # other models do not need it

        return take_figures(run.engine.routers, run.config.model, run.topology)


class SameCopies(Callback):
    """Compares the copies of weights that several ranks hold.

    It does this after the first step that moved the weights, also after a rollback, at the interval
    of --check-weight-hash-across-dp-replicas-interval, and before a save, which writes one of the
    copies. Raises the errors of check_copies on every rank: TrainingError if copies differ, and
    ConfigError if a gradient of the first step is a term of a sum over the tensor ranks but is
    treated as whole, or the other way round.
    """

    def __init__(self) -> None:
        # whether compared since the weights were first moved after they were loaded
        self._checked = False

    def after_step(self, run: Run) -> None:
        if not self._checked:
            finish_step(run)
            due = run.engine.has_moved
        else:
            interval = run.config.training.check_weight_hash_across_dp_replicas_interval
            due = interval is not None and run.progress.iteration % interval == 0
        if due:
            self.before_save(run)

    def before_save(self, run: Run) -> None:
        finish_step(run)
        with run.topology.flight.phase("copies"):
            run.engine.check_copies(f"after iteration {run.progress.iteration}")
        self._checked |= run.engine.has_moved
        if run.local_saves is not None:
            run.local_saves.copies_compared(run.progress.iteration)

    def on_rollback(self, run: Run, samples: range) -> None:
        self._checked = False


@dataclass(eq=False)
class DataLedger(Callback):
    """Counts and reports how much is taken from each source of the training data.

    It also reports phases of the data that begin; the job began at position `_first`, and the phases
    from position `_unrecorded` on are not in the metrics file yet.
    """

    _ledger: Ledger
    _iteration: int  # of the last report
    _first: int
    _unrecorded: int

    def on_advance(self, run: Run) -> None:
        progress = run.progress
        new = self._begun(run)
        phases = self._phases(run)
        for phase in (phase for phase in new if phase.start > self._first):
            past = phases[: phases.index(phase)]
            texts = "; ".join(history.shown(history.changes(past, phase)))
            run.reporter.say(
                f" data: from sample {phase.start} on, after {history.tokens_before(past, phase.start)} "
                f"tokens, in iteration {progress.iteration}: {texts}"
            )
        trained = skipped_until(run.config, progress.iteration) == 0
        for source, epoch in self._ledger.advance(progress.consumed_samples, trained=trained):
            run.reporter.say(
                f" data: {source} begins epoch {epoch} at iteration {progress.iteration}"
            )
        if any(phase.start for phase in new):
            self._record(run)

    def _phases(self, run: Run) -> history.DataPhases:
        train = run.datasets.train
        return train.phases if isinstance(train, StreamDataset) else ()

    def _begun(self, run: Run) -> list[history.DataPhase]:
        """Return the phases that have begun and are not in the metrics file yet."""
        now = run.progress.position()
        return [phase for phase in self._phases(run) if self._unrecorded <= phase.start < now]

    def _record(self, run: Run) -> None:
        phases = self._phases(run)
        new = [history.summary(phases, phase) for phase in self._begun(run)]
        progress = run.progress
        self._unrecorded = progress.position()
        run.reporter.publish(
            events.DataTaken(
                iteration=progress.iteration,
                consumed_samples=progress.consumed_samples,
                consumed_tokens=progress.consumed_tokens,
                sources=self._ledger.record(),
                phases=new or (),
            )
        )

    def figures(self, run: Run) -> Mapping[str, object]:
        return {"sources": self._ledger.by_short_name()}

    def on_evaluation(self, run: Run, last: bool) -> None:
        if run.config.training.eval_iters and not last:
            self.after_save(run)

    def on_state(self, run: Run) -> None:
        run.progress.sources = self._ledger.record()
        splits = {"train": run.datasets.train, "valid": run.datasets.valid}
        former = run.progress.history
        run.progress.history = {
            # a split that this job does not read stays where it is
            name: former[name] if dataset is None else history.to_record(dataset.begun(position))
            for name, dataset in splits.items()
            for position in [run.progress.position(name)]
            if isinstance(dataset, StreamDataset) or (dataset is None and name in former)
        }

    def after_save(self, run: Run) -> None:
        progress = run.progress
        if self._iteration == progress.iteration:
            return
        self._iteration = progress.iteration
        train = run.datasets.train
        to_come = {}
        if isinstance(train, StreamDataset):
            end = progress.samples_at(run.batches, run.total_iterations)
            to_come = train.epochs(progress.position(), progress.position(consumed=end))
        run.reporter.say(self._ledger.line(to_come))
        self._record(run)

    def on_rollback(self, run: Run, samples: range) -> None:
        progress = run.progress
        for split, dataset in (("train", run.datasets.train), ("valid", run.datasets.valid)):
            if isinstance(dataset, StreamDataset):
                dataset.go_back(progress.past(split), progress.position(split))
        self._ledger = self._ledger.rolled_back(
            progress.left_out, progress.consumed_samples, progress.sources, samples
        )
        self._iteration = progress.iteration
        self._unrecorded = progress.position()
        progress.sources = self._ledger.record()


class TimeLeft(Callback):
    """Reports once how long the rest of the run will take at the speed in the first log line."""

    def __init__(self, costs: RunCosts) -> None:
        self._costs: RunCosts | None = costs

    def on_log(self, run: Run, figures: events.Iteration) -> None:
        if self._costs is not None and run.progress.iteration < run.total_iterations:
            left = self._costs.at(figures.tokens_per_s, figures.consumed_tokens)
            run.reporter.say(f" at this speed: {left.time} for the rest of the run")
            self._costs = None


class EmptySteps(Callback):
    """Reports the steps of an interval that had no token in the loss.

    Raises TrainingError on all ranks after --max-consecutive-skips of them in a row.
    """

    def __init__(self) -> None:
        self._in_a_row = 0

    def on_log(self, run: Run, figures: events.Iteration) -> None:
        limit = run.config.training.max_consecutive_skips
        steps = list(zip(figures.steps, figures.step_losses, strict=True))
        if figures.empty:
            effect = "weights and optimizer are unchanged"
            if any(step.grad_norm for step, loss in steps if loss is None):
                effect = "only balancing losses of the experts moved the weights"
            run.reporter.say(
                f"WARNING: {figures.empty} of the {len(figures.steps)} steps up to iteration "
                f"{figures.iteration} had no token in the loss: the loss mask marks none in their "
                f"samples, so they are excluded from means, and {effect}"
            )
        for step, loss in steps:
            self._in_a_row = 0 if loss is not None else self._in_a_row + 1
            if limit and self._in_a_row >= limit:
                raise TrainingError(
                    f"no token was in the loss in {self._in_a_row} steps in a row, up to iteration "
                    f"{step.iteration} (--max-consecutive-skips {limit}): look at the loss mask of "
                    "the data. Prompts may fill all of --seq-length "
                    f"{run.config.model.seq_length}, so that answers are cut off"
                )


class ReportsProgress(Callback):
    """Reports completed steps and saves to this process's supervisor, for --max-restarts."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    def on_step(self, run: Run, step: events.StepRecord) -> None:
        self._membership.reached(step.iteration)

    def on_save(self, run: Run) -> None:
        self._membership.saved()


class SlowRanks(Callback):
    """Compares the computing times of the ranks in a recorded step, for --straggler-report.

    locations  "node:device" of every rank; needed on rank 0 only
    announce   asks for a restart without the nodes of ranks that stay slow, given the reason and
               the ranks, for --replace-slow-ranks; None: there is no spare node
    """

    def __init__(self, locations: Sequence[str]) -> None:
        self._locations = locations
        self.announce: Callable[[str, Sequence[int]], object] | None = None
        self._in_a_row = Counter[int]()  # log lines at which a rank was slow

    def on_log(self, run: Run, figures: events.Iteration) -> None:
        if not figures.times_ms:
            return
        phases = (figures.times_ms[name] for name in ("forward", "backward", "recompute"))
        seconds = [sum(of_rank) / 1000 for of_rank in zip(*phases, strict=True)]
        compared = summarise(seconds, run.topology.layout, self._locations)
        run.reporter.publish(events.ComputeTimes(iteration=run.progress.iteration, **compared))
        factor = run.config.training.replace_slow_ranks
        if factor is None or self.announce is None:
            return
        slow = {one["rank"]: one for one in compared["slow"] if one["ratio"] >= factor}
        self._in_a_row = Counter({rank: self._in_a_row[rank] + 1 for rank in slow})
        lasting = [rank for rank, times in self._in_a_row.items() if times >= _SLOW_REPORTS]
        if lasting:
            self._in_a_row.clear()
            named = ", ".join(
                f"rank {rank} ({slow[rank]['place']}) takes {slow[rank]['ratio']:.2f} times the median"
                for rank in lasting[:_NAMED]
            )
            self.announce(f"slow ranks: {named}", lasting)


def keep_state(callbacks: Iterable[object]) -> bool:
    """Return whether some of the user's callbacks may not be as they were before training.

    Those with neither attributes nor a `close` of their own are.
    """
    return any(
        getattr(each, "__dict__", None) != {}
        or getattr(type(each), "close", None) is not Callback.close
        for each in callbacks
    )


def build_callbacks(
    run: Run, locations: Sequence[str], tasks: Sequence[EvaluationTask], costs: RunCosts
) -> Iterator[Callback]:
    """Yield the project's callbacks and the user's, in the order in which a run calls them."""
    config = run.config
    progress = run.progress
    say = run.reporter.say
    train = run.datasets.train
    steps = range(progress.iteration, run.total_iterations)
    path = None if config.metrics_path is None else config.metrics_path.with_name("timeline.json")
    profiler = Profiler(config, run.topology.rank, say, steps, run.topology.device.type)
    yield Recorder(profiler, Timeline(run.topology, run.executor, path, say, locations))
    if config.model.num_experts is not None:
        yield Routers()
    yield SameCopies()
    if tasks:
        yield Tasks(tasks)
    if config.training.eval_iters:
        yield Losses()
    if train is not None and not config.training.skip_train:
        order = sample_order(config.data.dataloader_type, train.available, progress.left_out)
        ledger = Ledger(train, order, progress.consumed_samples, progress.sources)
        position = progress.position()
        yield DataLedger(ledger, progress.iteration, position, position)
    yield TimeLeft(costs)
    if config.engine.extra:
        from megatron.training.run.deepspeed_reports import DeepSpeedReports

        yield DeepSpeedReports(run)
    yield from config.pieces.callbacks
    yield EmptySteps()
    if config.logging.straggler_report:
        yield SlowRanks(locations)
