"""The training loop."""

from __future__ import annotations

import dataclasses
import gc
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron.config.duration import show_duration
from megatron.data.gpt_dataset import TokenDataset
from megatron.data.sampler import MicroBatch
from megatron.errors import TrainingError
from megatron.parallel import collectives
from megatron.parallel.flight import FlightState
from megatron.parallel.topology import Topology
from megatron.training.report.events import (
    ComputeTimes,
    DataTaken,
    End,
    Iteration,
    StepRecord,
    TaskEvaluated,
    Timeline,
    Validation,
)
from megatron.training.report.metrics import TokenWeights, counted, local_loss, summarise
from megatron.training.run.data import Stream, open_stream
from megatron.training.run.host import peak_memory_bytes, reserved_memory_bytes
from megatron.training.run.state import Run, Skips, StepUnderWay
from megatron.training.run.stopping import Stop
from megatron.training.run.tasks import evaluate_task
from megatron.training.safety.bad_steps import (
    Spike,
    count_skip,
    find_spike,
    loss_over_ranks,
    roll_back,
)

_ASKED = "because a signal, or the end of the job or of --exit-duration-in-mins, asks to end"


def train(run: Run) -> Stop | None:
    """Train to the last iteration or to a reason to stop, which is returned.

    Measures, reports and saves on the way. Raises CheckpointError at the end when the last
    checkpoint could not be written.
    """
    progress, stop = run.progress, None
    if run.watchdog is not None:
        run.watchdog.start()
    if not run.config.training.skip_train:
        if progress.iteration >= run.total_iterations:
            run.reporter.say(
                f" nothing left to train: iteration {progress.iteration} of {run.total_iterations}"
            )
        where = partial(micro_batch_under_way, run)
        with (
            run.topology.flight.phase("training"),
            saving_what_is_under_way(run),
            run.reporter.console.doing("step", run.total_iterations, progress.iteration, where),
            garbage_collection(automatic=not run.config.training.manual_gc),
        ):
            stop = train_steps(run)
        report(run)
        save(run, last=True)
        if run.wall_time is not None:
            run.wall_time.saved = True
        account_data(run)
    if stop is None:
        final_evaluations(run)
    else:
        run.reporter.say(stop.reason)
    energy_j = run.interval.used_j
    if energy_j > 0:  # not NaN
        run.reporter.say(f" energy of this job on all nodes: {energy_j / 3.6e6:.3g} kWh")
    run.reporter.publish(
        End(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            skipped_iterations=progress.skipped_iterations,
            reason=stop.reason if stop else "done",
            energy_j=energy_j,
        )
    )
    if run.saves is not None:
        with run.topology.flight.phase("saving"):
            run.saves.close()
        run.saves.check()
    if run.config.checkpoint.save_hf is not None:
        export(run, Path(run.config.checkpoint.save_hf), stop)
    call_back(run, "on_end")
    return stop


@contextmanager
def garbage_collection(automatic: bool) -> Iterator[None]:
    """Keep Python's garbage collections away from what was made before the block.

    They are off inside the block unless `automatic`. One of all objects of torch and DeepSpeed
    takes up to half a second, at another time on each rank.
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


def train_steps(run: Run) -> Stop | None:
    """Take steps up to the last iteration; return why to stop where training ends earlier."""
    training, progress = run.config.training, run.progress
    call_back(run, "on_start")
    stop = run.stop.check_at_start(progress.iteration, run.agreement.now())  # signals during set-up
    if stop is None and progress.iteration == 0 and training.eval_at_start:
        validate(run)  # the loss that training starts from
        stop = run.stop.check_at_start(progress.iteration, run.agreement.now())
    run.watch.lap()
    done_before(run, False)  # a first step may compile, or connect thousands of ranks
    while stop is None and progress.iteration < run.total_iterations:
        start = time.perf_counter()
        spike = train_step(run)
        sys.audit("megatron.run.step", progress.iteration)
        if copies_are_due(run):
            check_copies(run)
        done_before(run, True)
        if spike is not None:
            report(run)
            run.agreement.read()  # discarded
            with run.watch.paused(), run.topology.flight.phase("loading"):
                went_back = roll_back(run, spike)
            if went_back:
                continue
        iteration = progress.iteration
        if iteration % run.config.logging.log_interval == 0:
            report(run)
        if run.wall_time is not None:  # on average the host is as fast as the device
            ahead = run.wall_time.steps_ahead
            evaluations = sum(
                (iteration + i) % training.eval_interval == 0 for i in range(1, ahead + 1)
            )
            saves = run.saves.ahead(iteration, ahead) if run.saves is not None else 0
            run.wall_time.after_step(
                time.perf_counter() - start, evaluations=evaluations, saves_ahead=saves
            )
        if iteration % training.eval_interval == 0:
            validate(run)
        if (
            training.manual_gc
            and training.manual_gc_interval
            and iteration % training.manual_gc_interval == 0
        ):
            gc.collect()
        stop = between_steps(run)
    run.agreement.read()  # discarded
    return stop


def call_back(run: Run, event: str, *figures: Any) -> None:
    """Call the callbacks of the run: "on_start" and others of megatron.protocols.Callback."""
    for callback in run.config.pieces.callbacks:
        getattr(callback, event)(run, *figures)


def micro_batch_under_way(run: Run) -> str:
    """Return where this rank is in its step; "" outside of the schedule."""
    state = FlightState.read(run.topology.flight.buffer)
    if state is None or not state.instruction:
        return ""
    of = run.batches.num_micro_batches(run.progress.consumed_samples)
    return f"{state.instruction.lower()} of {of}"


def done_before(run: Run, before: bool) -> None:
    """Set whether the following work was done before: the first time may take longer."""
    if run.watchdog is not None:
        run.watchdog.patient = not before


def count_data(run: Run) -> None:
    """Count the samples of the last step in the ledger, and report sources that begin an epoch."""
    if run.ledger is not None:
        for source, epoch in run.ledger.advance(run.progress.consumed_samples):
            run.reporter.say(
                f" data: {source} begins epoch {epoch} at iteration {run.progress.iteration}"
            )


def account_data(run: Run) -> None:
    """Report what was taken of each source since the last report, if anything."""
    progress = run.progress
    if run.ledger is not None and run.accounted_iteration != progress.iteration:
        run.reporter.say(run.ledger.line())
        run.reporter.publish(
            DataTaken(
                iteration=progress.iteration,
                consumed_samples=progress.consumed_samples,
                sources=run.ledger.record(),
            )
        )
        run.accounted_iteration = progress.iteration


def between_steps(run: Run) -> Stop | None:
    """Do what was agreed on during the last step, then start the next agreement.

    That is to complete a save in the background, to save, or to stop.
    """
    iteration, agreed = run.progress.iteration, run.agreement.read()
    stop = run.stop.check(iteration, agreed)
    if run.saves is not None:
        if run.saves.under_way:
            with run.watch.paused("save"), run.topology.flight.phase("saving"):
                run.saves.commit_written(agreed)
        if stop is None and run.saves.is_due(iteration, agreed):  # a run that ends saves anyway
            save(run)
    if stop is None:
        run.agreement.post()
    return stop


def copies_are_due(run: Run) -> bool:
    """Return whether to compare copies of weights after this step.

    Due after the first step that moved the weights, and at the flag's interval.
    """
    if not run.copies_checked:
        finish_step(run)
        return run.engine.has_moved
    interval = run.config.training.check_weight_hash_across_dp_replicas_interval
    return interval is not None and run.progress.iteration % interval == 0


def check_copies(run: Run) -> None:
    """Compare the copies of weights on several ranks.

    Where they differ, raises TrainingError or ConfigError on every rank, after a save under way is
    complete.
    """
    finish_step(run)
    with saving_what_is_under_way(run), run.topology.flight.phase("copies"):
        run.engine.check_copies(f"after iteration {run.progress.iteration}")
    run.copies_checked |= run.engine.has_moved


@contextmanager
def saving_what_is_under_way(run: Run) -> Iterator[None]:
    """Complete the save under way after a TrainingError, which all ranks raise together."""
    try:
        yield
    except TrainingError:
        if run.saves is not None:
            run.saves.settle()
        raise


def train_step(run: Run) -> Spike | None:
    """Train on one global batch, forward, backward and optimizer; return its loss spike.

    The host does not wait for the step: `finish_step` reads its figures when they are needed, at
    the latest before the optimizer's next step, whose learning rate depends on whether this one was
    skipped.
    """
    progress, batches = run.progress, run.batches
    run.topology.flight.step(progress.iteration)
    run.profiler.step(progress.iteration)
    run.timers.begin(progress.iteration + 1)
    with run.timers("data"):
        micro_batches = run.train_stream.take(batches.num_micro_batches(progress.consumed_samples))
    per_token = run.config.batch.calculate_per_token_loss and run.topology.pipeline.is_last
    weights = TokenWeights(micro_batches, run.topology.data) if per_token else None
    with run.timers("forward-backward"):
        losses = run.executor.train(
            micro_batches, loss_scale=run.engine.loss_scale, loss_weights=weights
        )
    finish_step(run)  # the previous one
    values = run.schedules.at(progress)
    with run.timers("optimizer"):
        run.engine.start_step(values)
    loss = local_loss(losses, None if weights is None else weights.tensor, run.topology)
    samples = batches.global_batch_size(progress.consumed_samples)
    progress.advance(samples, run.config.model.seq_length)
    count_data(run)
    taken = StepRecord(
        progress.iteration,
        progress.consumed_samples,
        progress.consumed_tokens,
        samples,
        values.lr,
        loss,
        counted=counted(micro_batches, weights, run.topology),
    )
    run.under_way = StepUnderWay(taken, micro_batches, losses, weights)
    run.reporter.console.advance(progress.iteration, samples * run.config.model.seq_length)
    if run.config.training.loss_spike_factor is None:
        return None
    # The host waits here, once: the decision must be known before the next step.
    over_ranks = loss_over_ranks(run, taken)
    step = finish_step(run)
    assert step is not None, "it has just been taken"
    return find_spike(run, step, over_ranks)


def finish_step(run: Run) -> StepRecord | None:
    """Count the last step, skipped or not, add it to the interval, and return it.

    None if that was done already. All ranks call this; waits for the device.
    """
    under_way, run.under_way = run.under_way, None
    if under_way is None:
        return None
    result = run.engine.finish_step()
    step = dataclasses.replace(under_way.step, **vars(result))
    if step.skipped:
        count_skip(run, under_way, result)
    else:
        run.skips = Skips()
    run.progress.count(step.global_batch_size, run.config.model.seq_length, skipped=step.skipped)
    run.interval.steps.append(step)
    call_back(run, "on_step", step)
    return step


def report(run: Run) -> None:
    """Reduce the figures of the interval over the ranks and report them, if there are any."""
    unfinished = [] if run.under_way is None else [run.under_way.step]
    if not unfinished and not run.interval.steps:
        return
    device = run.topology.device
    losses, memory = run.interval.reduce(
        peak_memory_bytes(device), reserved_memory_bytes(device), unfinished
    )
    finish_step(run)  # behind the wait for the losses
    elapsed_s = run.watch.lap()
    steps = len(run.interval.steps)
    recording, run.timers.recording = run.timers.recording, None
    save_s = run.watch.paused_s.pop("save", 0.0) / steps
    phases, drawn = run.timeline.report(recording, save_s) if recording else ({}, None)
    balance: dict[str, Any] = {}
    if run.config.model.num_experts is not None:
        from megatron.layers.expert_load import take_figures  # no part of other models

        balance = take_figures(run.engine.routers, run.config.model, run.topology)
    figures = run.interval.report(
        losses,
        run.total_iterations,
        elapsed_s,
        memory,
        phases,
        sources={} if run.ledger is None else run.ledger.by_short_name(),
        **balance,
    )
    run.reporter.publish(figures)
    if drawn is not None:
        run.reporter.publish(Timeline(**drawn))
    if run.costs is not None and run.progress.iteration < run.total_iterations:
        done = figures.consumed_samples * figures.seq_length
        left = run.costs.at(figures.tokens_per_s, done)
        run.reporter.say(f" at this speed: {left.time} for the rest of the run")
        run.costs = None
    call_back(run, "on_log", figures)
    check_for_loss(run, figures)
    if phases and run.config.logging.straggler_report:
        computing = zip(*(phases[of] for of in ("forward", "backward", "recompute")), strict=True)
        seconds = [sum(of_rank) / 1000 for of_rank in computing]
        found = summarise(seconds, run.topology.layout, run.timeline.places)
        run.reporter.publish(ComputeTimes(iteration=run.progress.iteration, **found))


def check_for_loss(run: Run, figures: Iteration) -> None:
    """Report the steps of an interval that had no token in the loss.

    Raises TrainingError after --max-consecutive-skips of them in a row; all ranks call this.
    """
    limit = run.config.training.max_consecutive_skips
    steps = list(zip(figures.steps, figures.step_losses, strict=True))
    if figures.empty:
        effect = "weights and optimizer stay as they were"
        if any(step.grad_norm for step, loss in steps if loss is None):
            effect = "only balancing losses of the experts moved the weights"
        run.reporter.say(
            f"WARNING: {figures.empty} of the {len(figures.steps)} steps up to iteration "
            f"{figures.iteration} had no token in the loss: the loss mask marks none in their "
            f"samples, so they are in no mean, and {effect}"
        )
    for step, loss in steps:
        run.empty_steps = 0 if loss is not None else run.empty_steps + 1
        if limit and run.empty_steps >= limit:
            raise TrainingError(
                f"no token was in the loss in {run.empty_steps} steps in a row, up to iteration "
                f"{step.iteration} (--max-consecutive-skips {limit}): look at the loss mask of the "
                f"data. Prompts may fill all of --seq-length {run.config.model.seq_length}, so that "
                "answers are cut off"
            )


def validate(run: Run) -> None:
    """Measure the validation loss inside the loop, and evaluate tasks.

    The evaluation before the first step and the next one use the same samples, so a run needs as
    many samples as in Megatron.
    """
    if run.tasks:
        finish_step(run)
        evaluate_tasks(run)
    if not run.config.training.eval_iters:
        return
    finish_step(run)
    prefix = f"iteration {run.progress.iteration}"
    done = False
    if run.datasets.corpora:
        done = evaluate_corpora(run, prefix)
    elif (dataset := run.datasets.valid) is not None:
        advance = run.progress.iteration > 0
        done = evaluate(run, "valid", dataset, prefix, advance=advance) is not None
    if done:
        run.validated_iteration = run.progress.iteration
    account_data(run)


def final_evaluations(run: Run) -> None:
    """Measure validation and test loss at the end of the run, and evaluate tasks.

    What was evaluated after the last step is not evaluated again.

    Skipped if a signal or the end of the time asks to end: everything is saved by then.
    """
    asked = run.tasks and run.tasks_iteration != run.progress.iteration
    if asked and not run.stop.must_leave(run.agreement.now()):
        evaluate_tasks(run)
    sets = (
        ("valid", "validation", run.datasets.valid),
        ("test", "test", run.datasets.test),
    )
    for name, label, dataset in sets if run.config.training.eval_iters else ():
        prefix = f"iteration {run.progress.iteration}"
        if name == "valid" and run.validated_iteration == run.progress.iteration:
            continue
        if run.stop.must_leave(run.agreement.now()):
            run.reporter.say(f" note: no evaluation on {label} data, {_ASKED}")
        elif name == "valid" and run.datasets.corpora:
            evaluate_corpora(run, prefix)
        elif dataset is not None:
            prefix += f" on {run.eval_samples}-sample draw from {label} set"
            evaluate(run, name, dataset, prefix, advance=False)
    run.agreement.read()  # discarded


def evaluate_corpora(run: Run, prefix: str) -> bool:
    """Measure and report the loss on each named validation corpus, and their unweighted mean.

    Returns whether this was not interrupted.
    """
    start, found = time.perf_counter(), list[list[float]]()
    for name, dataset in run.datasets.corpora.items():
        losses = evaluate(run, "valid", dataset, f"{prefix} on {name}", advance=False, corpus=name)
        if losses is None:
            return False
        if losses:
            found.append(losses)
    if not found:
        return True
    samples = sum(min(run.eval_samples, len(one)) for one in run.datasets.corpora.values())
    means = [sum(each) / len(found) for each in zip(*found, strict=True)]
    seconds = time.perf_counter() - start
    report_validation(run, prefix, "valid", means, samples, seconds)
    if run.wall_time is not None:
        run.wall_time.after_evaluation(seconds)
    return True


def evaluate(
    run: Run,
    name: str,
    dataset: TokenDataset,
    prefix: str,
    *,
    advance: bool,
    corpus: str | None = None,
) -> list[float] | None:
    """Measure and report the loss on the next eval_iters global batches of 'valid' or 'test'.

    For a named `corpus` these are the same every time, at most its samples, each once, and the loss
    is the mean over tokens. Returns the loss, and with --eval-ema that of the averaged weights;
    nothing where no token is in the loss, None if a signal interrupted.
    """
    progress, start = run.progress, time.perf_counter()
    samples = run.eval_samples if corpus is None else min(run.eval_samples, len(dataset))
    position = progress.consumed_valid_samples if name == "valid" and corpus is None else 0
    interval = run.config.training.eval_interval
    if not advance and progress.iteration and progress.iteration % interval == 0:
        # A job before this one has evaluated these weights already: on the same samples.
        position = max(0, position - samples)
    if position + samples > len(dataset):
        position = 0  # a run longer than the data set was made for starts from its beginning

    def forward(micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        losses = run.executor.evaluate(micro_batches)
        # until all stages have done this once
        if run.watchdog is not None and run.watchdog.patient:
            collectives.all_reduce(
                torch.zeros((), device=run.topology.device), run.topology.world
            ).item()
            done_before(run, True)
        console.advance()
        return losses

    def measure() -> list[tuple[float, float]]:
        """Return the loss and its weight; nothing if a signal interrupted."""
        # cyclic, because the last micro-batches of a corpus may reach beyond its end
        stream = open_stream(
            run.config, run.topology, dataset, position, run.eod, cyclic=corpus is not None
        )
        run.chunks.eval()
        try:
            measured = mean_loss(
                forward,
                batches_of(run, stream, samples),
                run.topology,
                per_token=run.config.batch.calculate_per_token_loss or corpus is not None,
                interrupted=lambda: interrupted(run),
            )
        finally:
            stream.close()
            run.chunks.train()
        return [] if measured is None else [measured]

    if not run.evaluated:
        run.evaluated = True
        done_before(run, False)
    wanted = 1 + run.config.training.eval_ema
    batches = wanted * -(-samples // run.batches.global_batch_size_at_end)
    console = run.reporter.console
    progress_line = console.doing(f"evaluation on {corpus or name} data: batch", batches)
    with run.watch.paused(), run.topology.flight.phase("evaluation"), progress_line:
        if run.config.training.manual_gc:
            gc.collect()
        measured = measure()
        if measured and wanted > 1:
            with run.engine.averaged_weights():
                measured += measure()
        if len(measured) < wanted:
            run.reporter.say(f" note: the evaluation at {prefix} was interrupted, {_ASKED}")
            return None
        if advance:
            progress.consumed_valid_samples = position + samples
        seconds = time.perf_counter() - start
        losses = [loss for loss, weight in measured if weight]
        if losses:
            report_validation(run, prefix, name, losses, samples, seconds, corpus)
        else:
            run.reporter.say(
                f"WARNING: no validation loss at {prefix}: none of the {samples} samples of the "
                f"{corpus or name} data has a token in the loss"
            )
        if run.wall_time is not None and corpus is None:
            run.wall_time.after_evaluation(seconds)
    return losses


def evaluate_tasks(run: Run) -> None:
    """Evaluate and report the tasks of --eval-tasks, until a signal asks to end."""
    progress = run.progress
    if not run.tasks:
        return
    run.tasks_iteration = progress.iteration
    if not run.evaluated:
        run.evaluated = True
        done_before(run, False)
    with run.watch.paused(), run.topology.flight.phase("evaluation"):
        run.chunks.eval()
        try:
            for number, task in enumerate(run.tasks):
                if number and interrupted(run):
                    run.reporter.say(f" note: further tasks are left out, {_ASKED}")
                    return
                start, size = time.perf_counter(), run.config.batch.micro_batch_size
                with run.reporter.console.doing(f"task {task.name}"):
                    figures = evaluate_task(run, task, micro_batch_size=size)
                done_before(run, True)  # all ranks have, as the figures are of all
                seconds = time.perf_counter() - start
                run.reporter.publish(
                    TaskEvaluated(iteration=progress.iteration, elapsed_s=seconds, **figures)
                )
                if run.wall_time is not None:
                    run.wall_time.task_s[task.name] = seconds
        finally:
            run.chunks.train()


def report_validation(
    run: Run,
    prefix: str,
    dataset: str,
    losses: Sequence[float],
    samples: int,
    seconds: float,
    corpus: str | None = None,
) -> None:
    """Report the `losses` of `evaluate` on `samples` samples of the 'valid' or 'test' data set.

    `corpus` is the name of a validation corpus; None for the whole set.
    """
    progress = run.progress
    run.reporter.publish(
        Validation(
            iteration=progress.iteration,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_tokens,
            dataset=dataset,
            corpus=corpus,
            lm_loss=losses[0],
            ema_loss=losses[1] if len(losses) > 1 else None,
            samples=samples,
            elapsed_s=seconds,
            where=prefix,
        )
    )


def batches_of(run: Run, stream: Stream, samples: int) -> Iterator[list[MicroBatch]]:
    """Yield global batches of the next `samples` samples; the loss of others is masked."""
    stop, batches = stream.consumed_samples + samples, run.batches
    while (left := stop - stream.consumed_samples) > 0:
        found = stream.take(
            -(-min(left, batches.global_batch_size_at_end) // batches.replica_batch_size)
        )
        for i, batch in enumerate(found):
            over = batch.first_sample + len(batch.loss_mask) - stop
            if over > 0:
                mask = batch.loss_mask.clone()
                mask[-over:] = 0.0
                padding = torch.zeros_like(mask, dtype=torch.bool)
                if batch.padding is not None:
                    padding |= batch.padding
                padding[-over:] = True
                found[i] = dataclasses.replace(batch, loss_mask=mask, padding=padding)
        yield found


def mean_loss(
    forward: Callable[[Sequence[MicroBatch]], list[torch.Tensor]],
    batches: Iterable[Sequence[MicroBatch]],
    topology: Topology,
    *,
    per_token: bool = False,
    interrupted: Callable[[], bool] = lambda: False,
) -> tuple[float, float] | None:
    """Return the mean loss over `batches`, micro-batches of this data rank, and their weight.

    All ranks have as many. `forward` maps micro-batches to their losses on the last pipeline stage
    and to an empty list elsewhere. Micro-batches with an unmasked token have equal weight; with
    `per_token` each is weighted by these tokens, so that the result is the mean over tokens. Without
    any, the weight is 0 and the loss NaN. `interrupted` is
    called on all ranks before each item of `batches` except the first; once it returns True the
    result is None. A collective call of the world; every rank gets the result.
    """
    total = torch.zeros(2, dtype=torch.float64, device=topology.device)
    for number, micro_batches in enumerate(batches):
        if number and interrupted():
            return None
        losses = forward(micro_batches)
        if not losses or topology.tensor.rank != 0:
            continue  # every tensor rank has the same losses: the first one counts
        values = torch.stack(losses).double()
        weights = torch.stack([batch.loss_mask.sum() for batch in micro_batches]).to(values)
        if not per_token:
            weights = (weights > 0).to(values)
        weights /= topology.context.size  # the ranks have parts of the same sequences
        total += torch.stack([(values * weights).sum(), weights.sum()])
    sum_, weight = collectives.all_reduce(total, topology.world).tolist()
    return sum_ / weight if weight else math.nan, weight


def interrupted(run: Run) -> bool:
    """Return whether a signal or the end of the time had asked to end at the previous call.

    Called between two iterations of an evaluation.
    """
    answer = run.stop.must_leave(run.agreement.read())
    run.agreement.post()
    return answer


def save(run: Run, *, last: bool = False) -> None:
    """Save the current state, unless there is no --save folder or it is saved already.

    The `last` save of a run is complete when this returns; others may continue in the background.
    """
    if run.saves is None:
        return
    finish_step(run)
    if run.saves.saved_iteration != run.progress.iteration:
        check_copies(run)  # a checkpoint keeps one of the copies
    last_s = run.saves.elapsed_s
    known = "" if last_s is None else f" (the last one took {show_duration(last_s)})"
    shown = run.reporter.console.doing(f"saving checkpoint {run.progress.iteration}{known}")
    with run.watch.paused("save"), run.topology.flight.phase("saving"), shown:
        if run.config.training.manual_gc:
            gc.collect()
        run.saves.save(run.progress.iteration, run.state(), last=last)
        account_data(run)


def export(run: Run, folder: Path, stop: Stop | None) -> None:
    """Write the model for --save-hf, unless training ended early. Raises CheckpointError."""
    if stop is not None:
        run.reporter.say(f" the model is not written to {folder}: training has not ended")
        return
    from megatron.checkpoint.huggingface_save import export as write  # takes long to import

    finish_step(run)
    shown = run.reporter.console.doing(f"writing the model to {folder}")
    with run.watch.paused("save"), run.topology.flight.phase("saving"), shown:
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
