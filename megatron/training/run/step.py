"""One training step: starting it, and reading its figures later."""

from __future__ import annotations

import dataclasses

from megatron.config import Config
from megatron.config.phases import parse_iterations
from megatron.training.report.events import StepRecord
from megatron.training.report.metrics import TokenWeights, counted, local_loss
from megatron.training.run.state import Run, Skips, StepInProgress
from megatron.training.safety.bad_steps import Spike, count_skip, find_spike, loss_over_ranks


def train_step(run: Run) -> Spike | None:
    """Run forward, backward and optimizer on one global batch; return its loss spike, if any.

    Until a step has changed the weights, the host waits for each step. Afterwards this call waits
    for its step only with --loss-spike-factor, or if the optimizer cannot skip on the device; with
    a dynamic loss scale, the next call waits for it before its passes. Otherwise `finish_step`
    reads the figures of the step when they are needed, at the latest before the next optimizer
    step, whose learning rate depends on whether this step was skipped.
    """
    progress = run.progress
    batches = run.batches
    length = run.lengths.at(progress.iteration + 1)
    run.topology.flight.step(progress.iteration)
    for callback in run.callbacks:
        callback.before_step(run)
    with run.timers("data"):
        number = batches.num_micro_batches(progress.consumed_samples)
        micro_batches = run.loop.train_stream.take(number)
    per_token = run.config.batch.calculate_per_token_loss and run.topology.has_last_stage
    weights = TokenWeights(micro_batches, run.topology.data) if per_token else None
    with run.timers("forward-backward"):
        losses = run.executor.train(
            micro_batches, loss_scale=run.engine.loss_scale, loss_weights=weights
        )
    finish_step(run)  # the previous one
    values = run.schedules.at(progress)
    samples = batches.global_batch_size(progress.consumed_samples)
    deepspeed = run.engine.deepspeed  # it has no notion of resumed runs or batch-size schedules
    deepspeed.global_steps = progress.iteration
    deepspeed.global_samples = progress.consumed_samples + samples - deepspeed.train_batch_size()
    with run.timers("optimizer"):
        run.engine.start_step(values)
    loss = local_loss(losses, None if weights is None else weights.tensor, run.topology)
    progress.advance(samples, length)
    for callback in run.callbacks:
        callback.on_advance(run)
    step = StepRecord(
        progress.iteration,
        progress.consumed_samples,
        progress.consumed_tokens,
        samples,
        values.lr,
        loss,
        counted=counted(micro_batches, weights, run.topology),
        seq_length=length,
        decoupled_learning_rate=values.decoupled_lr,
    )
    run.loop.in_progress = StepInProgress(step, micro_batches, losses, weights)
    run.reporter.console.advance(progress.iteration, samples * length)
    if run.config.training.loss_spike_factor is None:
        return None
    # The host waits here: the decision must be known before the next step.
    over_ranks = loss_over_ranks(run, step)
    finished = finish_step(run)
    assert finished is not None, "it has just been taken"
    return find_spike(run, finished, over_ranks)


def finish_step(run: Run) -> StepRecord | None:
    """Count the last step, skipped or not, add it to the interval, and return it.

    Returns None if every step has been counted already. All ranks call this; it may wait for the
    device. Raises the TrainingError of count_skip.
    """
    in_progress = run.loop.in_progress
    run.loop.in_progress = None
    if in_progress is None:
        return None
    result = run.engine.finish_step()
    step = dataclasses.replace(in_progress.step, **vars(result))
    if step.skipped:
        count_skip(run, in_progress, result)
    else:
        run.loop.skips = Skips()
    assert step.seq_length is not None, "train_step gives it"
    run.progress.count(step.global_batch_size, step.seq_length, skipped=step.skipped)
    run.interval.steps.append(step)
    for callback in run.callbacks:
        callback.on_step(run, step)
    return step


def skipped_until(config: Config, iteration: int) -> int:
    """Return the last iteration of the skipped range that has this one; 0 if none has it."""
    ranges = parse_iterations(config.training.skip_train_iteration_range or ())
    return max((last for first, last in ranges if first <= iteration <= last), default=0)


def skip_iterations(run: Run) -> bool:
    """Consume the data of the next iterations if they are to be skipped; return whether they are.

    As in Megatron-LM they count as iterations and their samples as consumed, and the schedules stay
    where they are.
    """
    progress = run.progress
    first = progress.iteration + 1
    last = min(skipped_until(run.config, first), run.total_iterations)
    if not last:
        return False
    finish_step(run)
    progress.skipped_iterations += last - progress.iteration
    before = progress.consumed_samples
    for length, number, samples in run.lengths.stretches(
        run.batches, progress.iteration, before, last
    ):
        progress.advance(samples, length, number)
    samples = progress.consumed_samples - before
    run.loop.train_stream.skip(samples)
    for callback in run.callbacks:
        callback.on_advance(run)
    run.reporter.say(
        f" iterations {first} to {last} are skipped (--skip-train-iteration-range): {samples} samples "
        "are consumed without training"
    )
    return True
