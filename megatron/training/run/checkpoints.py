"""Checkpoints of a run: when it saves, and from which checkpoint it resumes.

Training continues after a failed save.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.checkpoint.find import CheckpointChoice, chosen_checkpoint, left_behind
from megatron.checkpoint.shared_errors import decided_by_first
from megatron.config import Config
from megatron.config.io import hugging_face_folder
from megatron.data.history import is_history
from megatron.data.interleave import MOST_POSITIONS
from megatron.data.ledger import is_consumed
from megatron.data.order import are_ranges
from megatron.engine.engine import Engine
from megatron.errors import CheckpointError
from megatron.parallel.topology import Topology
from megatron.training.report.events import (
    CheckpointFailed,
    CheckpointRejected,
    CheckpointSaved,
    Event,
    Record,
)
from megatron.training.report.reporter import Reporter
from megatron.training.run.schedules import Progress
from megatron.training.run.stopping import Agreement
from megatron.untrusted import is_count

if TYPE_CHECKING:  # both are slow to import, because of torch's checkpoints
    from megatron.checkpoint.load import LoadedState
    from megatron.checkpoint.save import Saved, Saver

_DUE = "save"
_WRITING = "writing"
# between a failed save and the next try: trying at every step would slow training and fill the log
_RETRY_S = 60.0


@dataclass(frozen=True)
class Failure:
    """A failed save: its iteration, the reason, and the time on the clock of `Saves`."""

    iteration: int
    reason: str
    at_s: float


@dataclass(eq=False)
class Saves:
    """Implements --save-interval, --save-interval-minutes and --async-save with this rank's Saver.

    All ranks call every method. Rank 0 decides when the minutes have passed, when to try again after
    a failure, and whether --save-trigger-file exists; `agreement` shares this decision, and whether
    any rank is still writing, with all ranks. `saved_iteration` is the iteration of the last
    checkpoint that this job has saved to the --save folder or loaded from it; None before that.
    `last_s` is the time on `clock` from which the minutes count: the beginning of the last save or,
    before the first, of the run. Each function in `after_save` is called with the seconds that a save
    took.
    """

    config: Config
    saver: Saver
    agreement: Agreement
    reporter: Reporter
    engine: Engine
    provenance: Callable[[int], Record] = lambda iteration: {}
    saved_iteration: int | None = None
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._settings = self.config.checkpoint
        self.last_s = self.clock()
        self.after_save: list[Callable[[float], object]] = []
        self._started: int | None = None  # the iteration of a save in the background
        self.elapsed_s: float | None = None  # seconds of the last save that this job completed
        self.failure: Failure | None = None  # of the last save
        trigger = self._settings.save_trigger_file
        self._trigger = None if trigger is None else Path(trigger)
        self._triggered = False  # whether this rank has seen the file since the last save
        by_time = self._settings.save_interval_minutes is not None or trigger is not None
        self.agreement.add_first(_DUE, self._is_time, lambda: by_time or self.failure is not None)
        self.agreement.add(
            _WRITING, lambda: int(not self.saver.written), lambda: self.saver.pending
        )

    @property
    def in_progress(self) -> bool:
        """Return whether a save is incomplete; between steps it can only be a background save."""
        return self._started is not None

    def is_due(self, iteration: int, agreed: Mapping[str, int]) -> bool:
        """Return whether to save after `iteration`, given the ranks' agreement."""
        return iteration not in (self.saved_iteration, self._started) and (
            self.at_interval(iteration) or bool(agreed.get(_DUE))
        )

    def at_interval(self, iteration: int) -> bool:
        """Return whether --save-interval falls on `iteration`."""
        interval = self._settings.save_interval
        return interval is not None and iteration % interval == 0

    def ahead(self, iteration: int, steps: int = 1) -> int:
        """Return the number of saves if the run ends after `steps` more steps.

        Counts the last save, those that are due and one in progress. Valid on rank 0 only, whose
        clock decides.
        """
        due = sum(self.at_interval(iteration + i) for i in range(steps))
        return 1 + int(self.in_progress) + max(due, int(self._is_time()))

    def save(self, iteration: int, state: dict[str, object], *, last: bool = False) -> None:
        """Save the model, the optimizer and `state`, the run's counters, after `iteration` steps.

        With --async-save this continues in the background, except for the `last` save of a run.
        Waits for an earlier save that is still being written. Does nothing if this iteration has
        been saved already. A failed save is reported, not raised; see `check`.
        """
        if self._started is not None and (last or self._started != iteration):
            self.settle()
        if iteration in (self.saved_iteration, self._started):
            return
        background = self._settings.async_save and not last
        self.reporter.say(f"saving checkpoint at iteration {iteration:7d} to {self._settings.save}")
        self.last_s = self.clock()
        self._started = iteration
        self._remove_trigger()
        try:
            saved = self.saver.start(
                iteration, self.engine, state, self.provenance(iteration), background
            )
        except CheckpointError as error:
            self._started = None
            self._failed(iteration, error, last)
            return
        if saved is not None:
            self._started = None
            self._succeeded(saved, background)

    def _remove_trigger(self) -> None:
        if self._trigger is None or not self._triggered:
            return
        self._triggered = False
        try:
            self._trigger.unlink(missing_ok=True)
        except OSError as error:
            self.reporter.say(
                f"WARNING: {self._trigger} cannot be removed ({error}) and is not looked at again"
            )
            self._trigger = None

    def commit_written(self, agreed: Mapping[str, int]) -> None:
        """Continue a save in the background if every rank has ended its task for it."""
        if not agreed.get(_WRITING, True):
            self._complete(self.saver.advance)

    def settle(self) -> None:
        """Wait for and complete a save in the background, if any."""
        self._complete(self.saver.finish)

    def close(self) -> None:
        """Complete a save in progress, and wait until old checkpoints are removed."""
        self.settle()
        self.saver.finish()

    def check(self) -> None:
        """Raise CheckpointError if the last save failed.

        Called at the end of the run; after a failed save the run is incomplete.
        """
        if self.failure is None:
            return
        raise CheckpointError(
            f"training up to iteration {self.failure.iteration} is not saved (last good "
            f"checkpoint: {self._last_good}): {self.failure.reason}"
        )

    @property
    def _last_good(self) -> str:
        return "none" if self.saved_iteration is None else f"iteration {self.saved_iteration}"

    def _is_time(self) -> bool:
        if self._trigger is not None and self._trigger.exists():
            self._triggered = True
            return True
        now = self.clock()  # rank 0's clock
        if self.failure is not None and now - self.failure.at_s >= _RETRY_S:
            return True
        minutes = self._settings.save_interval_minutes
        return minutes is not None and now - self.last_s >= 60.0 * minutes

    def _complete(self, complete: Callable[[], Saved | None]) -> None:
        iteration = self._started
        if iteration is None:
            return
        try:
            saved = complete()
        except CheckpointError as error:
            self._started = None
            self._failed(iteration, error)
            return
        if saved is not None:
            self._started = None
            self._succeeded(saved, background=True)

    def _succeeded(self, saved: Saved, background: bool) -> None:
        say = self.reporter.say
        iteration = saved.iteration
        seconds = max(saved.elapsed_s, 1e-9)
        say(f"  successfully saved checkpoint at iteration {iteration:7d} to {self._settings.save}")
        say(
            f"Checkpoint Save GB: {saved.bytes / 1e9:.3f}, GB/Sec: "
            f"{saved.bytes / 1e9 / seconds:.2f}, Latency(second): {saved.elapsed_s:.3f}"
            + (f", stall(second): {saved.stall_s:.3f}" if background else "")
        )
        self.reporter.publish(
            CheckpointSaved(
                iteration=iteration,
                folder=str(saved.folder),
                size_bytes=saved.bytes,
                elapsed_s=saved.elapsed_s,
                stall_s=saved.stall_s,
                background=background,
            )
        )
        self.failure = None
        self.saved_iteration = iteration
        self.elapsed_s = saved.elapsed_s
        for call in self.after_save:
            call(saved.elapsed_s)

    def _failed(self, iteration: int, error: CheckpointError, last: bool = False) -> None:
        self.failure = Failure(iteration, str(error), self.clock())
        self.reporter.say(
            f" ERROR: the checkpoint of iteration {iteration} could not be saved: {error}"
        )
        if not last:
            self.reporter.say(
                " ERROR: training continues and will try again; until then a failure of the job "
                f"costs everything since the last good checkpoint ({self._last_good})"
            )
        self.reporter.publish(CheckpointFailed(iteration=iteration, reason=str(error)))


def check_save_folder(config: Config, topology: Topology, reporter: Reporter) -> None:
    """Report checkpoints in the --save folder that this start does not continue.

    Raises CheckpointError if only a settings file names the folder: the user probably means to
    continue, or to use another folder.
    """
    save = config.checkpoint.save
    if (newest := decided_by_first(topology, partial(left_behind, config))) is not None:
        reporter.say(
            f" note: --save {save} has checkpoints up to iteration {newest}, which this start does "
            f"not continue and may replace: --load {save} continues"
        )


def checkpoint_to_load(
    config: Config, topology: Topology, reporter: Reporter | None = None
) -> Path | None:
    """Return the newest good checkpoint in the --load folder, or the one that --load-tag names.

    Returns None without --load, with hf:FOLDER, or if the folder has no checkpoint at all.

    Rank 0 searches for all ranks. Broken checkpoints and a wrong tracker file are reported. Raises
    CheckpointError if all checkpoints are broken, if the one that --load-tag names is missing or
    broken, or if there is none although --use-checkpoint-args or --exit-on-missing-checkpoint needs
    one.
    """
    choice = decided_by_first(topology, partial(chosen_checkpoint, config))
    if reporter is not None:
        report_choice(choice, reporter.say, reporter.publish)
    return choice.folder


def report_choice(
    choice: CheckpointChoice | LoadedState,
    say: Callable[[str], object],
    publish: Callable[[Event], object],
) -> None:
    """Report why a checkpoint was chosen, and which ones are broken."""
    for note in choice.notes:
        say(f" note: {note}")
    for one in choice.rejected:
        instead = "no checkpoint" if choice.folder is None else str(choice.folder)
        say(f"WARNING: broken checkpoint {one}\nWARNING: {instead} is loaded instead")
        folder = str(one.folder)
        publish(CheckpointRejected(folder=folder, reason=one.reason, instead=instead))


def load_checkpoint(
    config: Config, topology: Topology, engine: Engine, folder: Path | None, reporter: Reporter
) -> Progress:
    """Load the result of `checkpoint_to_load`, or hf:FOLDER, into the engine; return the progress.

    Raises CheckpointError.
    """
    settings = config.checkpoint
    start = time.perf_counter()
    if (source := hugging_face_folder(settings.load)) is not None:
        from megatron.checkpoint.huggingface_load import load_engine

        for note in load_engine(source, engine, topology, config, topology.flight.alive):
            reporter.say(f" note: {note}")
        reporter.say(f" loaded model {source} in {time.perf_counter() - start:.2f} s")
        return Progress()
    if folder is None:
        if settings.load:
            frozen = "; those frozen stay random" if config.model.trains_in_part else ""
            reporter.say(
                f" no checkpoint in {settings.load} yet: starting from initial weights{frozen}"
            )
        return Progress()
    assert settings.load is not None, "a folder was found in it"
    from megatron.checkpoint.load import load

    loaded = load(settings.load, engine, topology, config, folder, topology.flight.alive)
    assert loaded.folder is not None, "it raises when there is nothing to load"
    report_choice(loaded, reporter.say, reporter.publish)
    asked = [
        f"--{name.replace('_', '-')}"
        for name in ("no_load_optim", "finetune", "reset_iteration")
        if getattr(settings, name)
    ]
    reporter.say(
        f" loaded checkpoint {loaded.folder} in {time.perf_counter() - start:.2f} s"
        + ("" if loaded.optimizer else ", without optimizer state")
        + (f" ({', '.join(asked)})" if asked else "")
        + (
            ": each expert begins as a copy of its layer's MLP, or of a slice of it"
            if loaded.dense
            else ""
        )
    )
    if settings.finetune or settings.reset_iteration or loaded.dense:
        return Progress()
    return progress_from(loaded.state, loaded.folder)


def progress_from(state: Record, folder: Path) -> Progress:
    """Return a run's saved counters. Raises CheckpointError if they are missing or damaged."""
    lists = ("sources", "left_out", "history", "recent_losses")  # older checkpoints have none
    names = {field.name for field in dataclasses.fields(Progress)} - set(lists)
    missing = sorted(name for name in names if not is_count(state.get(name)))
    if missing:
        raise CheckpointError(
            f"{folder} does not contain the progress of its run ({', '.join(missing)} missing or "
            "not a count): load it with --finetune"
        )
    sources = state.get("sources", {})
    left_out = state.get("left_out", [])
    history = state.get("history", {})
    losses = state.get("recent_losses", [])
    if not (
        isinstance(sources, dict)
        and all(is_consumed(record) for record in sources.values())
        and are_ranges(left_out)
        and is_history(history)
        and isinstance(losses, list)
        and all(isinstance(loss, float) for loss in losses)
    ):
        raise CheckpointError(
            f"{folder} has a damaged list of data sources, left-out samples, phases of the data or losses: load "
            "another checkpoint with --load-tag"
        )
    progress = Progress(
        **{name: state[name] for name in names},
        sources=sources,
        left_out=left_out,
        history=history,
        recent_losses=losses,
    )
    train, valid = (progress.position(split) for split in ("train", "valid"))
    if max(train, valid) >= MOST_POSITIONS or (
        history and (train > 0) != bool(history.get("train"))
    ):
        raise CheckpointError(
            f"{folder} has read {train} samples of training data and {valid} of validation data, "
            "which cannot be with its phases of the data: load another checkpoint with --load-tag"
        )
    return progress
