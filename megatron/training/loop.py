"""The training loop."""
from __future__ import annotations

import gc
import time
from collections.abc import Sequence

import torch

from megatron.data.batch import MicroBatch
from megatron.data.gpt_dataset import TokenDataset
from megatron.parallel import collectives
from megatron.training.devices import peak_memory_bytes
from megatron.training.evaluate import mean_loss
from megatron.training.metrics import StepRecord, local_loss
from megatron.training.run import Run
from megatron.training.streams import open_stream


def train(run: Run) -> None:
    """Train to the last iteration or to a reason to stop; measure, report and save on the way."""
    progress, reason = run.progress, None
    if not run.config.training.skip_train:
        with run.stop:  # a signal neither ends the evaluation before the first step nor the save after the last
            if progress.iteration == 0:
                validate(run)  # the loss that training starts from
            if progress.iteration >= run.total_iterations:
                run.reporter.say(f" nothing left to train: iteration {progress.iteration} of {run.total_iterations}")
            run.reporter.console.begin(progress.iteration, run.total_iterations)
            reason = train_steps(run)
            run.reporter.console.end()
            if len(run.interval):
                report(run)
            save(run)
            run.account_data()
    if reason is None:
        final_evaluations(run)
    else:
        run.reporter.say(reason)
    run.reporter.metrics.write(
        "end", iteration=progress.iteration, consumed_samples=progress.consumed_samples,
        skipped_iterations=progress.skipped_iterations, reason=reason or "done",
    )  # fmt: skip


def train_steps(run: Run) -> str | None:
    """Steps up to the last iteration; the reason when it ends before."""
    training, save_interval = run.config.training, run.config.checkpoint.save_interval
    if training.manual_gc:
        gc.disable()
    run.watch.lap()
    while run.progress.iteration < run.total_iterations:
        train_step(run)
        iteration = run.progress.iteration
        if iteration % run.config.logging.log_interval == 0:
            report(run)
        if iteration % training.eval_interval == 0:
            validate(run)
        if save_interval and iteration % save_interval == 0:
            save(run)
        if training.manual_gc and training.manual_gc_interval and iteration % training.manual_gc_interval == 0:
            gc.collect()
        reason = run.stop.check(iteration)
        if reason is not None:
            return reason
    return None


def train_step(run: Run) -> None:
    """One global batch: forward and backward through the pipeline, then the optimizer."""
    progress, batches = run.progress, run.batches
    run.profile_step()
    with run.timers("data-wait"):
        micro_batches = run.train_stream.take(batches.num_micro_batches(progress.consumed_samples))
    weights = token_weights(run, micro_batches)
    with run.timers("forward-backward"):
        losses = run.executor.train(micro_batches, loss_scale=run.engine.loss_scale, loss_weights=weights)
    at = progress.schedule_position
    lr, weight_decay = run.learning_rate.lr(*at), run.weight_decay.weight_decay(*at)
    with run.timers("optimizer"):
        result = run.engine.step(lr, weight_decay)
    samples = batches.global_batch_size(progress.consumed_samples)
    progress.advance(samples, run.config.model.seq_length, skipped=result.skipped)
    run.count_data()
    run.interval.add(
        StepRecord(
            progress.iteration, progress.consumed_samples, progress.consumed_tokens, samples, lr,
            local_loss(losses, weights, run.topology), result.skipped, result.loss_scale, result.grad_norm,
            result.num_zeros, result.params_norm,
        )
    )  # fmt: skip
    run.reporter.console.update(progress.iteration)


def token_weights(run: Run, micro_batches: Sequence[MicroBatch]) -> list[float] | None:
    """Weights by which every unmasked token of the global batch counts alike; None where micro-batches count alike.

    The mean over data-parallel ranks of the weighted sums is the sum over all tokens divided by their number.
    """
    topology = run.topology
    if not run.config.batch.calculate_per_token_loss or not topology.pipeline.is_last:
        return None
    counts = torch.stack([batch.loss_mask.sum() for batch in micro_batches]).double()
    total = collectives.all_reduce(counts.sum(), topology.data).clamp(min=1.0)
    weights: list[float] = (counts * topology.data.size / total).tolist()
    return weights


def report(run: Run) -> None:
    """Reduce the figures of the interval over the ranks and write them down."""
    losses = run.interval.reduce_losses()  # waits for the device
    elapsed_s = run.watch.lap()
    times_ms = run.timers.collect(len(run.interval))
    memory = peak_memory_bytes(run.topology.device)
    epochs = None if run.ledger is None else run.ledger.epochs()
    run.reporter.iteration(run.interval.report(losses, run.total_iterations, elapsed_s, memory), times_ms, epochs)


def validate(run: Run) -> None:
    """The validation loss inside the loop. The evaluation before the first step takes the samples that the first one
    in the loop takes again, so that the number of samples a run needs stays Megatron's."""
    if run.datasets.valid is None or not run.config.training.eval_iters:
        return
    prefix = f"iteration {run.progress.iteration}"
    evaluate(run, "valid", run.datasets.valid, prefix, advance=run.progress.iteration > 0)
    run.account_data()


def final_evaluations(run: Run) -> None:
    """Validation and test loss at the end of the run."""
    if not run.config.training.eval_iters:
        return
    for name, label, dataset in (
        ("valid", "validation", run.datasets.valid), ("test", "test", run.datasets.test)
    ):  # fmt: skip
        if dataset is not None:
            prefix = f"iteration {run.progress.iteration} on {run.eval_samples}-sample draw from {label} set"
            evaluate(run, name, dataset, prefix, advance=False)


def evaluate(run: Run, name: str, dataset: TokenDataset, prefix: str, *, advance: bool) -> None:
    """Measure and report the loss on the next eval_iters global batches of a data set, 'valid' or 'test'."""
    progress, start = run.progress, time.perf_counter()
    position = progress.consumed_valid_samples if name == "valid" else 0
    if position + run.eval_samples > len(dataset):
        position = 0  # a longer run than the data set was made for begins it anew
    with run.watch.paused():
        if run.config.training.manual_gc:
            gc.collect()
        stream = open_stream(run.config, run.topology, dataset, position, run.eod)
        run.chunks.eval()
        try:
            loss = mean_loss(
                run.executor.evaluate, stream, run.topology, run.config.training.eval_iters,
                run.batches.eval_micro_batches, per_token=run.config.batch.calculate_per_token_loss,
            )  # fmt: skip
        finally:
            stream.close()
            run.chunks.train()
        if advance:
            progress.consumed_valid_samples = position + run.eval_samples
        seconds = time.perf_counter() - start
        run.reporter.validation(prefix, progress, name, loss, run.eval_samples, seconds)


def save(run: Run) -> None:
    """Write a checkpoint, unless there is no --save folder or this iteration is saved already."""
    with run.watch.paused():
        if run.save_checkpoint():
            run.account_data()
