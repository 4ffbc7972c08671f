"""The training loop."""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from megatron.config.duration import show_duration
from megatron.errors import TrainingError
from megatron.parallel.flight import FlightState
from megatron.training.report.events import End
from megatron.training.run.host import peak_memory_bytes, reserved_memory_bytes
from megatron.training.run.state import Run
from megatron.training.run.step import finish_step, skip_iterations, train_step
from megatron.training.run.stopping import Stop
from megatron.training.safety.bad_steps import Spike, roll_back


def train(run: Run) -> Stop | None:
    """Train until the last iteration or a reason to stop; return that reason, or None.

    Measures, reports and saves along the way. With --skip-train, only evaluates. Raises
    CheckpointError at the end if the last checkpoint, or the model for --save-hf, could not be
    written.
    """
    progress = run.progress
    stop = None
    if run.watchdog is not None:
        run.watchdog.start()
    if not run.config.training.skip_train:
        if progress.iteration >= run.total_iterations:
            run.reporter.say(
                f" nothing left to train: iteration {progress.iteration} of {run.total_iterations}"
            )
        where = partial(micro_batch_in_progress, run)
        with (
            run.topology.flight.phase("training"),
            saving_work_in_progress(run),
            run.reporter.console.doing("step", run.total_iterations, progress.iteration, where),
            garbage_collection(automatic=not run.config.training.manual_gc),
        ):
            stop = train_steps(run)
        report(run)
        with saving_work_in_progress(run):
            save(run, last=True)
        if run.wall_time is not None:
            run.wall_time.saved = True
    if stop is None:
        evaluate(run, last=True)
        run.agreement.read()  # ends the one in progress
    else:
        run.reporter.say(stop.reason)
    run.reporter.publish(
        End(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            skipped_iterations=progress.skipped_iterations,
            reason=stop.reason if stop else "done",
            energy_j=run.interval.used_j,
        )
    )
    if run.local_saves is not None:
        run.local_saves.close()
    if run.saves is not None:
        with run.topology.flight.phase("saving"):
            run.saves.close()
        run.saves.check()
    if run.config.checkpoint.save_hf is not None:
        export(run, Path(run.config.checkpoint.save_hf), stop)
    for callback in run.callbacks:
        callback.on_end(run)
    return stop


def train_steps(run: Run) -> Stop | None:
    """Take steps until the last iteration or a reason to stop; return that reason, or None."""
    training = run.config.training
    progress = run.progress
    for callback in run.callbacks:
        callback.on_start(run)
    stop = run.stop.check_at_start(progress.iteration, run.agreement.now())  # a signal in set-up
    if stop is None and progress.iteration == 0 and training.eval_at_start:
        evaluate(run)  # the loss that training starts from
        stop = run.stop.check_at_start(progress.iteration, run.agreement.now())
    run.watch.lap()
    run.first_time("step")  # may compile, or connect thousands of ranks
    while stop is None and progress.iteration < run.total_iterations:
        if skip_iterations(run):
            stop = between_steps(run)
            continue
        start = time.perf_counter()
        spike = train_step(run)
        sys.audit("megatron.run.step", progress.iteration)
        for callback in run.callbacks:
            callback.after_step(run)
        run.no_first_time()
        if spike is not None and go_back(run, spike):
            continue
        if progress.iteration % run.config.logging.log_interval == 0:
            report(run)
        watch_the_end(run, time.perf_counter() - start)
        if progress.iteration % training.eval_interval == 0:
            evaluate(run)
        interval = training.manual_gc_interval if training.manual_gc else 0
        if interval and progress.iteration % interval == 0:
            gc.collect()
        stop = between_steps(run)
    run.agreement.read()  # ends the one in progress
    return stop


def between_steps(run: Run) -> Stop | None:
    """Do what the ranks agreed on during the last step, then start the next agreement.

    They may have agreed to complete a background save, to start a save, or to stop.
    """
    iteration = run.progress.iteration
    agreed = run.agreement.read()
    stop = run.stop.check(iteration, agreed)
    if run.saves is not None:
        if run.saves.in_progress:
            with run.aside("saving"):
                run.saves.commit_written(agreed)
        if stop is None and run.saves.is_due(iteration, agreed):  # a run that ends saves anyway
            save(run)
    if run.local_saves is not None:
        save_locally(run, agreed, last=stop is not None)
    if stop is None:
        run.agreement.post()
    return stop


def save_locally(run: Run, agreed: Mapping[str, int], *, last: bool) -> None:
    """Continue a local save, and start one that is due unless this was the `last` step."""
    saves = run.local_saves
    assert saves is not None, "the run saves to memory"
    iteration = run.progress.iteration
    saves.complete(agreed)
    if last or not saves.is_due(iteration):
        return
    finish_step(run)
    for callback in run.callbacks:
        callback.on_state(run)
    with run.aside("saving"):
        saves.save(iteration, dataclasses.asdict(run.progress))


def go_back(run: Run, spike: Spike) -> bool:
    """Go back to the checkpoint before a loss spike; return whether there was a checkpoint."""
    report(run)
    run.agreement.read()  # ends the one in progress
    with run.aside("loading"):
        returned = roll_back(run, spike)
        if returned and run.local_saves is not None:
            run.local_saves.clear()
    return returned


def evaluate(run: Run, *, last: bool = False) -> None:
    """Run the evaluations, which are callbacks; `last` is true at the end of the run."""
    for callback in run.callbacks:
        callback.on_evaluation(run, last)


def report(run: Run) -> None:
    """Reduce the figures of the interval over the ranks and report them.

    Does nothing if no step was taken since the last report.
    """
    unfinished = [] if run.loop.in_progress is None else [run.loop.in_progress.step]
    if not unfinished and not run.interval.steps:
        return
    device = run.topology.device
    losses, memory = run.interval.reduce(
        peak_memory_bytes(device), reserved_memory_bytes(device), unfinished
    )
    finish_step(run)  # does not wait: `reduce` has already waited for the device
    elapsed_s = run.watch.lap()
    measured: dict[str, Any] = {}
    scalars: dict[str, float] = {}
    for callback in run.callbacks:
        measured |= callback.figures(run)
        scalars |= measured.pop("scalars", {})
    measured["scalars"] = scalars or None
    figures = run.interval.report(losses, run.total_iterations, elapsed_s, memory, **measured)
    run.reporter.publish(figures)
    for callback in run.callbacks:
        callback.on_log(run, figures)


def watch_the_end(run: Run, seconds: float) -> None:
    """Record the time of a step, and the numbers of evaluations and saves before the run can end.

    Does nothing if the run has no time limit.
    """
    if run.wall_time is None:
        return
    iteration = run.progress.iteration
    ahead = run.wall_time.steps_ahead
    interval = run.config.training.eval_interval
    evaluations = sum((iteration + i) % interval == 0 for i in range(1, ahead + 1))
    saves = run.saves.ahead(iteration, ahead) if run.saves is not None else 0
    # host time will do: on average the host runs as fast as the device
    run.wall_time.after_step(seconds, evaluations=evaluations, saves_ahead=saves)


def save(run: Run, *, last: bool = False) -> None:
    """Save the current state, unless there is no --save folder or the state has been saved.

    The `last` save of a run is complete when this returns; others may continue in the background.
    """
    saves = run.saves
    iteration = run.progress.iteration
    if saves is not None:
        finish_step(run)
        if saves.saved_iteration != iteration:
            for callback in run.callbacks:
                callback.on_state(run)
            for callback in run.callbacks:
                callback.before_save(run)
        last_s = saves.elapsed_s
        known = "" if last_s is None else f" (the last one took {show_duration(last_s)})"
        shown = run.reporter.console.doing(f"saving checkpoint {iteration}{known}")
        with run.aside("saving"), shown:
            if run.config.training.manual_gc:
                gc.collect()
            saves.save(iteration, dataclasses.asdict(run.progress), last=last)
    for callback in run.callbacks:
        callback.after_save(run)


def export(run: Run, folder: Path, stop: Stop | None) -> None:
    """Write the model for --save-hf, unless training ended early. Raises CheckpointError."""
    if stop is not None:
        run.reporter.say(f" the model is not written to {folder}: training stopped early")
        return
    from megatron.checkpoint.huggingface_save import export as write  # slow to import

    finish_step(run)
    shown = run.reporter.console.doing(f"writing the model to {folder}")
    with run.aside("saving"), shown:
        start = time.perf_counter()
        average = run.config.checkpoint.save_hf_ema
        with run.engine.averaged_weights() if average else nullcontext():
            size = write(
                folder,
                run.config,
                run.topology,
                run.chunks,
                run.topology.flight.alive,
                run.engine.arriving,
                on_all=run.config.engine.zero_stage == 3,
            )
    run.reporter.say(
        f" wrote the model to {folder}: {size / 1e9:.3f} GB in {time.perf_counter() - start:.2f} s"
    )


@contextmanager
def saving_work_in_progress(run: Run) -> Iterator[None]:
    """Complete the save in progress after a TrainingError, which all ranks raise together."""
    try:
        yield
    except TrainingError:
        if run.saves is not None:
            run.saves.settle()
        raise


@contextmanager
def garbage_collection(automatic: bool) -> Iterator[None]:
    """Exclude objects made before the block from Python's garbage collections.

    Automatic collections are off inside the block unless `automatic`. A full collection over the
    objects that torch and DeepSpeed create takes up to half a second, at a different time on each
    rank.
    """
    before = gc.isenabled()
    gc.collect()
    gc.freeze()
    if not automatic:
        gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if before:
            gc.enable()


def micro_batch_in_progress(run: Run) -> str:
    """Return this rank's position in its step as text; "" outside the schedule."""
    state = FlightState.read(run.topology.flight.buffer)
    if state is None or not state.instruction:
        return ""
    of = run.batches.num_micro_batches(run.progress.consumed_samples)
    return f"{state.instruction.lower()} of {of}"
