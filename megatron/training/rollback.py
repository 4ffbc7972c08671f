"""Back to the last good checkpoint after a loss spike, and around the samples that it came from."""
from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron.checkpoint.find import Found, find
from megatron.data.sampler import around, merged, sample_order
from megatron.errors import TrainingError
from megatron.training.progress import Progress
from megatron.training.resume import load_checkpoint, say_found
from megatron.training.spikes import Spike
from megatron.training.streams import open_stream

if TYPE_CHECKING:
    from megatron.training.run import Run

MOST = 5
"""So often a run goes back to one checkpoint. Each time the samples of one more step are left out; a loss that jumps
again after that comes from the weights, and no choice of samples will help."""


def roll_back(run: Run, spike: Spike) -> bool:
    """Put `run` where its newest good checkpoint from before the spike stands, and leave the samples of the step out.

    Weights, optimizer, counters, ledger and the stream of samples are as if a run had been resumed from that checkpoint
    with the samples in `Progress.left_out`; later checkpoints hold them. Returns False, and changes nothing but the
    log, where there is no such checkpoint. All ranks call it, between two steps, after `spike` was agreed on.

    Raises TrainingError when the run went back to the same checkpoint MOST times already, CheckpointError when none can
    be loaded.
    """
    run.reporter.say(f"WARNING: {spike}")
    if run.saves is not None:
        run.saves.settle()  # what is being written is from before the spike
    folder = _folder_before(run, spike)
    if folder is None:
        run.reporter.say("WARNING: there is no checkpoint from before it to go back to: training goes on")
        run.reporter.metrics.write("loss_spike", **_figures(spike), folder=None)
        return False
    progress = _load(run, folder)
    _count(run, spike, progress.iteration)
    _go_around(run, spike, progress)
    return True


def _folder_before(run: Run, spike: Spike) -> Path | None:
    """The newest good checkpoint that this run wrote or started from, of an iteration before the spike."""
    directory, newest = run.config.checkpoint.save, run.saves.saved_iteration if run.saves is not None else None
    if directory is None or newest is None:
        return None
    before = min(spike.iteration, newest + 1)  # later ones in the folder are of another run

    from megatron.checkpoint.together import decided_by_first  # with torch's checkpoints, which take long to import

    def look() -> Found:
        return find(directory, before=before)

    found = decided_by_first(run.topology, look)
    say_found(found, run.reporter.say, run.reporter.metrics)
    return found.folder


def _load(run: Run, folder: Path) -> Progress:
    """Load all of a checkpoint, whatever was left aside of the one that the run began with."""
    config = run.config.replace(
        load=run.config.checkpoint.save, load_tag=None, finetune=False, no_load_optim=False, reset_iteration=False
    )
    return load_checkpoint(config, run.topology, run.engine, folder, run.reporter)


def _count(run: Run, spike: Spike, iteration: int) -> None:
    run.spikes.went_back[iteration] += 1
    if run.spikes.went_back[iteration] > MOST:
        raise TrainingError(
            f"{spike}, after the run went back to the checkpoint of iteration {iteration} {MOST} times and left out "
            f"the samples of as many steps: go back further with --load-tag, lower --lr, or raise --loss-spike-factor "
            f"{run.config.training.loss_spike_factor}"
        )


def _go_around(run: Run, spike: Spike, progress: Progress) -> None:
    """Begin again at `progress`, the counters of the checkpoint that was loaded, without the samples of the spike."""
    before, kind = run.progress.left_out, run.config.data.dataloader_type
    ranges = merged(before)
    first, last = around(np.array([spike.start, spike.stop - 1], np.int64), ranges).tolist()
    left_out = merged([*ranges, (first, last + 1)])
    sources = progress.sources
    for field in dataclasses.fields(Progress):  # in place: others hold it, and the list of losses
        value = getattr(progress, field.name)
        if isinstance(value, list):
            getattr(run.progress, field.name)[:] = value
        else:
            setattr(run.progress, field.name, value)
    run.progress.left_out[:] = [list(pair) for pair in left_out]
    dataset, consumed = run.datasets.train, progress.consumed_samples
    assert dataset is not None, "a run that trains has training data"
    total = len(dataset)
    if run.ledger is not None:
        samples = sample_order(kind, total, ranges).indices(np.arange(spike.start, spike.stop, dtype=np.int64))
        run.ledger = run.ledger.rolled_back(sample_order(kind, total, left_out), consumed, sources, samples)
    run.train_stream.close()
    run.train_stream = open_stream(run.config, run.topology, dataset, consumed, run.eod, left_out)
    run.accounted_iteration = progress.iteration
    run.skips.reset()
    if run.saves is not None:
        run.saves.saved_iteration = progress.iteration
    run.reporter.say(
        f"WARNING: back to iteration {progress.iteration}; samples {first} to {last} of the data order are left out "
        f"from now on ({sum(stop - start for start, stop in left_out)} in all)"
    )
    run.reporter.metrics.write(
        "loss_spike", **_figures(spike), back_to_iteration=progress.iteration, samples=[first, last + 1],
        left_out=run.progress.left_out, sources=None if run.ledger is None else run.ledger.record(),
    )  # fmt: skip


def _figures(spike: Spike) -> dict[str, object]:
    return {"iteration": spike.iteration, "lm_loss": spike.loss, "median": spike.median}
