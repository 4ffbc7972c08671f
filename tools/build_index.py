#!/usr/bin/env python
"""Build the data set indices of a training run before it starts. Runs on a login node, without GPUs.

    python tools/build_index.py --world-size 1024 --data-path data/corpus_text_document --data-cache-path cache ...

Give the flags of pretrain_gpt.py exactly as in the run. The batch size, the length of the run and
its evaluations determine the lengths of the indices, and the data paths, as written, their names.
`python pretrain_gpt.py --help` lists the flags. In addition:

    --world-size N   processes of the run; optional with --global-batch-size
    --workers N      data sets to index at the same time; memory grows with N (default: 1)

With --load, the indices are those of the resumed run. Existing indices are kept. If another process
is building an index, this one waits for it. Exit code 2 for an error, such as missing data.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.checkpoint.settings import settings_to_take
from megatron.config import Config, parse_args
from megatron.config.option import Parser, integer
from megatron.errors import ConfigError
from megatron.training.run.process import as_tool, leave, run_guarded


def split_arguments(argv: Sequence[str]) -> tuple[int, list[str]]:
    """Return the number of workers and the flags of pretrain_gpt.py.

    Raises ConfigError for an invalid number of workers.
    """
    parser = Parser(add_help=False)
    parser.add_argument("--workers", type=integer(1, 1024), default=1)
    arguments, flags = parser.parse_known_args(list(argv))
    return arguments.workers, flags


def read_config(flags: Sequence[str]) -> Config:
    """Return the run's configuration.

    Raises ConfigError for invalid flags, or if they leave the batch size unknown.
    """
    config = parse_args(flags, checkpoint=settings_to_take)
    guessed = [
        name
        for name in ("world_size", "global_batch_size")
        if config.origin(name).startswith("derived")
    ]
    if len(guessed) == 2:
        raise ConfigError(
            "the batch size of the run, which determines the length of its indices, is unknown: "
            "give --world-size, the run's number of processes, or --global-batch-size"
        )
    return config


def build(config: Config, workers: int) -> None:
    """Build the indices that the run reads, from its start or from the checkpoint of --load."""
    from megatron.data import index_cache
    from megatron.data.datasets import Datasets, Reading, build_datasets
    from megatron.training.report.reporter import Reporter
    from megatron.training.run.resume import with_checkpoint_settings
    from megatron.training.run.resume_data import continued_data, with_data_order
    from megatron.training.run.schedules import (
        BatchSchedule,
        planned_samples,
        total_iterations,
    )
    from megatron.training.run.setup import extended
    from megatron.training.run.stored import stored_progress, stored_to_load

    say = partial(print, flush=True)
    stored = stored_to_load(config)
    config = with_checkpoint_settings(config, stored, Reporter(config, rank=1))
    progress = stored_progress(stored, config)
    config = with_data_order(config, stored, progress)
    continued = continued_data(config, stored, progress)
    batches = BatchSchedule.from_config(config)
    planned = planned_samples(config, batches)
    listed = ", ".join(
        f"{name} {count}" for name, count in zip(("train", "valid", "test"), planned, strict=True)
    )
    say(f"global batch {batches.global_batch_size_at_end}, samples: {listed}")

    messages = list[str]()

    def report(message: str) -> None:
        messages.append(message)
        say(message)

    def prepare(train: int, valid: int, test: int) -> Datasets:
        reading = Reading(verify=True, workers=workers)
        with index_cache.forwarded_messages(report):
            return build_datasets(config, train, valid, test, reading=reading, continued=continued)

    datasets = prepare(*planned)
    end = total_iterations(config, batches, progress)
    extended(config, datasets, prepare, planned, progress.samples_at(batches, end))
    if not messages and config.data.data_order == "stream":
        say("this data needs no index: streams of fewer than 2^20 documents are not indexed")
    # ru_maxrss is in KiB on Linux
    say(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code."""
    if "--help" in argv or "-h" in argv:
        print(__doc__)
        return 0

    def body() -> None:
        workers, flags = split_arguments(argv)
        build(read_config(flags), workers)

    return run_guarded(body, 0, "error")


def command() -> None:
    """Run as a program that exits without waiting for threads of libraries."""
    leave(main())


if __name__ == "__main__":
    command()
