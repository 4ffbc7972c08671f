"""Evaluation: validation and test losses, and tasks, as callbacks of the loop."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import torch

from megatron.config import Config
from megatron.data.datasets import Datasets
from megatron.data.gpt_dataset import TokenDataset
from megatron.data.sampler import MicroBatch, MicroBatchStream
from megatron.parallel import collectives
from megatron.parallel.topology import Topology
from megatron.protocols import Callback
from megatron.training.report.events import TaskEvaluated, Validation
from megatron.training.run.data import open_stream
from megatron.training.run.schedules import BatchSchedule
from megatron.training.run.state import Run
from megatron.training.run.step import finish_step
from megatron.training.run.tasks import EvaluationTask, evaluate_task

_ASKED = "because a signal, the end of the job or --exit-duration-in-mins asks the run to end"


class Tasks(Callback):
    """Evaluates the tasks of --eval-tasks, until a signal or a time limit asks the run to end.

    At the end of the run they are not evaluated again if no step was taken since their last
    evaluation.
    """

    def __init__(self, tasks: Sequence[EvaluationTask]) -> None:
        self._tasks = tasks
        self._iteration: int | None = None  # of the last evaluation

    def on_evaluation(self, run: Run, last: bool) -> None:
        iteration = run.progress.iteration
        if last and (self._iteration == iteration or run.stop.must_leave(run.agreement.now())):
            return
        finish_step(run)
        self._iteration = iteration
        run.first_time("evaluation")
        with run.aside("evaluation"):
            run.chunks.eval()
            try:
                self._evaluate(run)
            finally:
                run.chunks.train()

    def _evaluate(self, run: Run) -> None:
        for number, task in enumerate(self._tasks):
            if number and interrupted(run):
                run.reporter.say(f" note: further tasks are left out, {_ASKED}")
                return
            start = time.perf_counter()
            size = run.config.batch.micro_batch_size
            with run.reporter.console.doing(f"task {task.name}"):
                figures = evaluate_task(run, task, micro_batch_size=size)
            run.no_first_time()  # true for every rank, since all ranks took part
            seconds = time.perf_counter() - start
            run.reporter.publish(
                TaskEvaluated(iteration=run.progress.iteration, elapsed_s=seconds, **figures)
            )
            if run.wall_time is not None:
                run.wall_time.task_s[task.name] = seconds


class Losses(Callback):
    """Measures the losses on validation data and, at the end of the run, on test data.

    The evaluation before the first step uses the same samples as the next one, so a run needs as
    many samples as in Megatron. Validation losses measured after the last step are not measured
    again at the end. If a signal or a time limit asks the run to end before the last evaluation,
    that evaluation is left out: everything is saved by then.
    """

    def __init__(self) -> None:
        self._iteration: int | None = None  # of the last validation

    def on_evaluation(self, run: Run, last: bool) -> None:
        finish_step(run)
        iteration = run.progress.iteration
        sets = {"validation": run.datasets.valid}
        if last:
            sets["test"] = run.datasets.test
        if last and self._iteration == iteration:
            del sets["validation"]
        for label, dataset in sets.items():
            prefix = f"iteration {iteration}"
            if last and run.stop.must_leave(run.agreement.now()):
                run.reporter.say(f" note: no evaluation on {label} data, {_ASKED}")
            elif label == "validation" and run.datasets.corpora:
                if evaluate_corpora(run, prefix):
                    self._iteration = iteration
            elif dataset is not None:
                if last:
                    prefix += f" on {run.eval_samples}-sample draw from {label} set"
                name = "test" if label == "test" else "valid"
                advance = not last and iteration > 0
                if evaluate(run, name, dataset, prefix, advance=advance) is not None:
                    self._iteration = iteration


def evaluate_corpora(run: Run, prefix: str) -> bool:
    """Measure and report the loss on each named validation corpus, and the mean of these losses.

    Returns False if the evaluation was interrupted.
    """
    start = time.perf_counter()
    measured = list[list[float]]()
    for name, dataset in run.datasets.corpora.items():
        losses = evaluate(run, "valid", dataset, f"{prefix} on {name}", advance=False, corpus=name)
        if losses is None:
            return False
        if losses:
            measured.append(losses)
    if not measured:
        return True
    samples = sum(min(run.eval_samples, len(one)) for one in run.datasets.corpora.values())
    means = [sum(each) / len(measured) for each in zip(*measured, strict=True)]
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
    """Measure and report the loss on eval_iters global batches of 'valid' or 'test'.

    `prefix` names the iteration and data in the log. 'valid' begins where the last evaluation with
    `advance` ended or, if that was at this iteration, where it began. 'test' begins at its first
    sample, and so does 'valid' if too few samples are left. A named `corpus` is evaluated on the
    same samples every time, each at most once, and the loss is the mean over tokens. Returns the
    loss, and with --eval-ema the loss of the averaged weights; an empty list if no token is in the
    loss, None if the evaluation was interrupted.
    """
    progress = run.progress
    start = time.perf_counter()
    samples = run.eval_samples if corpus is None else min(run.eval_samples, len(dataset))
    position = progress.consumed_valid_samples if name == "valid" and corpus is None else 0
    interval = run.config.training.eval_interval
    if not advance and progress.iteration and progress.iteration % interval == 0:
        # An earlier job has evaluated these weights already: use the same samples.
        position = max(dataset.readable_from, position - samples)
    if position + samples > dataset.available:
        position = 0  # at the end of the data set, start again from its beginning
    run.first_time("evaluation")
    variants = 1 + run.config.training.eval_ema
    batches = variants * -(-samples // run.batches.global_batch_size_at_end)
    what = f"evaluation on {corpus or name} data: batch"
    with run.aside("evaluation"), run.reporter.console.doing(what, batches):
        if run.config.training.manual_gc:
            gc.collect()
        each = partial(measure, run, dataset, range(position, position + samples), corpus)
        measured = each()
        if measured and variants > 1:
            with run.engine.averaged_weights():
                measured += each()
        if len(measured) < variants:
            run.reporter.say(f" note: the evaluation at {prefix} was interrupted, {_ASKED}")
            return None
        if advance:
            progress.consumed_valid_samples = position + samples
        seconds = time.perf_counter() - start
        counted = [one for one in measured if one[1]]
        losses = [one[0] for one in counted]
        if losses:
            report_validation(run, prefix, name, losses, samples, seconds, corpus, counted[0][2:])
        else:
            run.reporter.say(
                f"WARNING: no loss at {prefix}: none of the {samples} samples of the "
                f"{corpus or name} data has a token in the loss"
            )
        if run.wall_time is not None and corpus is None:
            run.wall_time.after_evaluation(seconds)
    return losses


def measure(
    run: Run, dataset: TokenDataset, samples: range, corpus: str | None
) -> list[tuple[float, ...]]:
    """Return [mean_loss(...)] for these samples; an empty list if the evaluation is interrupted."""

    def forward(micro_batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        losses = run.executor.evaluate(micro_batches)
        # the first time, wait until all stages have done a pass
        if run.watchdog is not None and run.watchdog.patient:
            collectives.all_reduce(
                torch.zeros((), device=run.topology.device), run.topology.world
            ).item()
            run.no_first_time()
        run.reporter.console.advance()
        return losses

    # cyclic, because the last micro-batches of a corpus may reach beyond its end
    stream = open_stream(
        run.config,
        run.topology,
        dataset,
        samples.start,
        run.tokenizer,
        cyclic=corpus is not None,
    )
    run.chunks.eval()
    try:
        measured = mean_loss(
            forward,
            batches_of(run, stream, len(samples)),
            run.topology,
            per_token=run.config.batch.calculate_per_token_loss or corpus is not None,
            interrupted=lambda: interrupted(run),
            components=len(run.config.pieces.loss_components),
        )
    finally:
        stream.close()
        run.chunks.train()
    return [] if measured is None else [measured]


def report_validation(
    run: Run,
    prefix: str,
    dataset: str,
    losses: Sequence[float],
    samples: int,
    seconds: float,
    corpus: str | None = None,
    components: Sequence[float] = (),
) -> None:
    """Report the `losses` of `evaluate` on `samples` samples of the 'valid' or 'test' data set.

    `corpus` is the name of a validation corpus; None for the whole set. `components` are those of
    the first loss, if they were measured.
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
            components=dict(zip(run.config.loss_components, components, strict=False)) or None,
            loss_name=run.config.loss_name,
            ema_loss=losses[1] if len(losses) > 1 else None,
            samples=samples,
            elapsed_s=seconds,
            where=prefix,
        )
    )


def batches_of(run: Run, stream: MicroBatchStream, samples: int) -> Iterator[list[MicroBatch]]:
    """Yield this rank's micro-batches of each global batch over the next `samples` samples.

    Samples beyond these, which fill the last micro-batches, are padding, on every stage.
    """
    stop = stream.consumed_samples + samples
    batches = run.batches
    shape = run.config.batch.micro_batch_size, run.config.model.seq_length
    while (left := stop - stream.consumed_samples) > 0:
        micro_batches = stream.take(
            -(-min(left, batches.global_batch_size_at_end) // batches.replica_batch_size)
        )
        for i, batch in enumerate(micro_batches):
            over = batch.first_sample + shape[0] - stop
            if over > 0:
                micro_batches[i] = batch.without_last(min(over, shape[0]), shape)
        yield micro_batches


def mean_loss(
    forward: Callable[[Sequence[MicroBatch]], list[torch.Tensor]],
    batches: Iterable[Sequence[MicroBatch]],
    topology: Topology,
    *,
    per_token: bool = False,
    interrupted: Callable[[], bool] = lambda: False,
    components: int = 0,
) -> tuple[float, ...] | None:
    """Return the mean loss over `batches`, the sum of the weights, and means of its components.

    Each of `batches` has this data-parallel rank's micro-batches, as many as on every other rank.
    `forward` maps them to their losses on the last pipeline stage and to an empty list on other
    stages. All micro-batches with an unmasked token have equal weight; with `per_token` each is
    weighted by its number of unmasked tokens, so that the result is the mean over tokens. If there
    is no unmasked token at all, the weight is 0 and the loss NaN.

    `interrupted` is called on all ranks before each item of `batches` except the first; once it
    returns True, the result is None. All ranks call this and get the result.
    """
    total = torch.zeros(2 + components, dtype=torch.float64, device=topology.device)
    for number, micro_batches in enumerate(batches):
        if number and interrupted():
            return None
        losses = forward(micro_batches)
        if not losses or topology.tensor.rank != 0:
            continue  # all tensor ranks have the same losses: only the first one adds them
        values = torch.stack(losses).double().view(len(losses), -1).t()  # [1 + k, micro-batches]
        weights = torch.stack([batch.loss_mask.sum() for batch in micro_batches]).to(values)
        if not per_token:
            weights = (weights > 0).to(values)
        weights /= topology.context.size  # context-parallel ranks share sequences
        total += torch.cat([weights.sum().view(1), (values * weights).sum(-1)])
    weight, *sums = collectives.all_reduce(total, topology.world).tolist()
    loss, *others = (total / weight if weight else math.nan for total in sums)
    return loss, weight, *others


def interrupted(run: Run) -> bool:
    """Return whether a signal or a time limit asks the run to end, and post the next agreement.

    With several ranks the answer is that of the agreement posted last. Called between two global
    batches or tasks of an evaluation.
    """
    answer = run.stop.must_leave(run.agreement.read())
    run.agreement.post()
    return answer


def evaluation_iterations(config: Config, batches: BatchSchedule, datasets: Datasets) -> int:
    """Return the number of global batches in an evaluation, counting corpora and --eval-ema."""
    size = batches.global_batch_size_at_end
    iterations = config.training.eval_iters
    corpora = [min(iterations, -(-len(one) // size)) for one in datasets.corpora.values()]
    return (1 + config.training.eval_ema) * (sum(corpora) if corpora else iterations)
