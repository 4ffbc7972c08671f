"""Records of what the jobs of a run read: every sample of every rank, counted by token.

Token n of the data is the id n, so that an id tells its place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.data.sampler import MicroBatch, MicroBatchStream
from tests.helpers.fault_points import strike
from tests.helpers.tiny import run

Sample = tuple[list[int], list[int], list[bool]]
"""Inputs, labels, and which of them are in the loss."""


def write_numbered(prefix: Path, sizes: Sequence[int], first: int = 0) -> str:
    """Write documents of these sizes whose tokens are numbered from `first` on."""
    with IndexedDatasetWriter(prefix, "int32") as writer:
        writer.add_batch(np.arange(first, first + sum(sizes)), list(sizes), [1] * len(sizes))
    return str(prefix)


def record(
    rank: int,
    folder: Path,
    fields: dict[str, Any],
    kill: Sequence[Any] = (),
    spike: int | None = None,
) -> None:
    """Train in one rank of run_processes, and write down what it reads.

    kill   arguments of `strike`
    spike  iteration that counts as a loss spike the first time
    """
    from megatron.training.run import evaluation, setup, step
    from megatron.training.safety import bad_steps

    with open(folder / f"{rank}.jsonl", "w", buffering=1) as file:

        def wrapped(split: str, open_stream: Any) -> Any:
            def opened(*arguments: Any, **options: Any) -> MicroBatchStream:
                stream: MicroBatchStream = open_stream(*arguments, **options)
                print(json.dumps([split, stream.consumed_samples, None]), file=file)
                take = stream.take

                def taken(n: int) -> list[MicroBatch]:
                    batches = take(n)
                    for batch in batches:
                        for number, sample in enumerate(samples_of(batch)):
                            print(
                                json.dumps([split, batch.first_sample + number, sample]), file=file
                            )
                    return batches

                stream.take = taken  # type: ignore[method-assign]
                return stream

            return opened

        for module, split in ((setup, "train"), (bad_steps, "train"), (evaluation, "valid")):
            module.open_stream = wrapped(split, module.open_stream)  # type: ignore[attr-defined]
        find = bad_steps.find_spike
        spikes = [spike]

        def found(run: Any, record: Any, loss: float | None) -> Any:
            if record.iteration not in spikes:
                return find(run, record, loss)
            spikes.clear()
            stop = record.consumed_samples
            return bad_steps.Spike(
                record.iteration, 9.0, 1.0, stop - record.global_batch_size, stop
            )

        step.find_spike = found  # type: ignore[attr-defined,assignment]
        if kill:
            strike(*kill)
        run(rank, fields)


def samples_of(batch: MicroBatch) -> list[Sample]:
    """Return the samples of a micro-batch; none if it has no content."""
    rows = (
        zip(batch.tokens, batch.labels, batch.loss_mask, strict=True)
        if batch.tokens.numel()
        else ()
    )
    return [(t.tolist(), label.tolist(), (mask > 0).tolist()) for t, label, mask in rows]


class Reading:
    """The samples of one split that remain after all jobs so far, by the number consumed before.

    A job that begins, or a run that goes back after a loss spike, reads the later ones anew.
    """

    def __init__(self, split: str) -> None:
        self._split = split
        self.samples: dict[int, Sample] = {}

    def add(self, folder: Path) -> None:
        """Add what the ranks of a job have read. Ranks that read the same sample must agree."""
        kept = self.samples
        added = dict[int, Sample]()
        for file in sorted(folder.glob("*.jsonl")):
            new = dict[int, Sample]()
            lines = [line for line in file.read_text().splitlines(True) if line.endswith("\n")]
            for split, number, sample in map(json.loads, lines):
                if split != self._split:
                    continue
                if sample is None:
                    kept, new = (
                        {n: s for n, s in some.items() if n < number} for some in (kept, new)
                    )
                else:
                    new[number] = sample
            assert all(new[n] == added[n] for n in new.keys() & added.keys())
            added |= new
        self.samples = kept | added


class Count:
    """Counts of how often each token of the sources was an input in the loss.

    `sources` has the first token of each and the sizes of its documents. The predictions after the
    last tokens of documents depend on the packing.
    """

    def __init__(self, sources: Mapping[Any, tuple[int, Sequence[int]]]) -> None:
        bounds = {name: first + np.cumsum([0, *sizes]) for name, (first, sizes) in sources.items()}
        self._ends = {int(stop) - 1 for stops in bounds.values() for stop in stops[1:]}
        self._begins = {int(start) for starts in bounds.values() for start in starts[:-1]}
        self._inner = {
            name: np.array([n for n in range(stops[0], stops[-1]) if n not in self._ends])
            for name, stops in bounds.items()
        }
        self._all = {name: slice(stops[0], stops[-1]) for name, stops in bounds.items()}
        size = max(stops[-1] for stops in bounds.values())
        self.counts = np.zeros(size, int)
        self._left_out = np.zeros(size, int)

    def add(self, sample: Sample, *, trained: bool) -> None:
        """Count a sample. Each token of a source is read once before another is read twice."""
        inputs = list[int]()
        for token, label, in_loss in zip(*sample, strict=True):
            if in_loss:
                inputs.append(token)
                follows = label == token + 1
                assert follows or (token in self._ends and label in self._begins), (token, label)
        np.add.at(self.counts, inputs, 1)
        np.add.at(self._left_out, inputs, int(not trained))
        for name, inner in self._inner.items():
            counts = self.counts[inner]
            assert counts.max() - counts.min() <= 1, name

    def trained(self, name: object) -> int:
        """Return the number of tokens of a source that were trained on."""
        of_source = self._all[name]
        return int((self.counts - self._left_out)[of_source].sum())
