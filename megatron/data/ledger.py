"""Samples, tokens and epochs that training has consumed of each data set of a blend.

The counts depend only on the samples consumed: nothing is counted twice, and a resumed run
continues from the counts of its checkpoint, even if the blend has changed.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.gpt_dataset import BlendedDataset, Source
from megatron.data.sampler import SampleOrder

_BLOCK = 1 << 20  # samples looked up at once
_SHOWN = 6  # sources listed in a line


@dataclass
class Consumed:
    """The counts of one source.

    Tokens are those trained on, without padding. An epoch is all tokens of the source in this
    split, so epochs are fractions. `left_out` counts the samples that training skipped.
    """

    samples: int = 0
    tokens: int = 0
    epochs: float = 0.0
    left_out: int = 0

    @property
    def epoch(self) -> int:
        """Return the number of the epoch of the last sample, from 1; 0 before the first."""
        return math.ceil(self.epochs - 1e-9)


class Ledger:
    """Counts the samples of a data set by source, which is the prefix of its files.

    `carried` is the record of a checkpoint at `consumed_samples`; without one, earlier samples are
    counted in the current data set.
    """

    def __init__(
        self,
        dataset: Source | BlendedDataset,
        order: SampleOrder,
        consumed_samples: int = 0,
        carried: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._dataset, self._order = dataset, order
        self.counts = {name: Consumed(**fields) for name, fields in (carried or {}).items()}
        for source in sources(dataset):
            self.counts.setdefault(source.name, Consumed())
        self._carried = {name: dataclasses.replace(count) for name, count in self.counts.items()}
        self._position = consumed_samples if carried else 0
        self.advance(consumed_samples)

    def advance(self, consumed_samples: int) -> list[tuple[str, int]]:
        """Count up to `consumed_samples`; return the sources that began a second or later epoch,
        with its number.
        """
        before = {name: max(count.epoch, 1) for name, count in self.counts.items()}
        while self._position < consumed_samples:
            stop = min(self._position + _BLOCK, consumed_samples)
            indices = self._order.indices(np.arange(self._position, stop))
            for source, samples in self._by_source(indices):
                count, carried = self.counts[source.name], self._carried[source.name]
                count.samples += len(samples)
                count.tokens += source.tokens_in(samples)
                # Rounded once, however often the run was resumed.
                exact = carried.epochs == carried.tokens / source.tokens_per_epoch
                start = Consumed() if exact else carried
                epochs = (count.tokens - start.tokens) / source.tokens_per_epoch
                count.epochs = start.epochs + epochs
            self._position = stop
        short = short_names(self.counts)
        return [
            (short[name], count.epoch)
            for name, count in self.counts.items()
            if count.epoch > before[name]
        ]

    def rolled_back(
        self,
        order: SampleOrder,
        consumed_samples: int,
        carried: Mapping[str, Mapping[str, Any]],
        left_out: npt.NDArray[np.int64],
    ) -> Ledger:
        """Return the ledger of a run that went back to the checkpoint at `consumed_samples`, with
        the record `carried`.

        The run skips the samples `left_out` in addition to those that it skipped before.
        """
        back = Ledger(self._dataset, order, consumed_samples, carried)
        for name, count in self.counts.items():
            back.counts.setdefault(name, Consumed()).left_out = count.left_out
        for source, samples in self._by_source(left_out):
            back.counts[source.name].left_out += len(samples)
        return back

    def record(self) -> dict[str, dict[str, Any]]:
        """Return {source: {samples, tokens, epochs}} for checkpoint and metrics file, with left_out
        if not 0.
        """
        records = {name: dataclasses.asdict(count) for name, count in self.counts.items()}
        for record in records.values():
            if not record["left_out"]:
                del record["left_out"]
        return records

    def epochs(self) -> dict[str, float]:
        """Return the epochs of each source, by its short name."""
        short = short_names(self.counts)
        return {short[name]: count.epochs for name, count in self.counts.items()}

    def line(self) -> str:
        """Return a log line: the epochs of the first sources in descending order, and the range of
        the rest.
        """
        listed = sorted(self.epochs().items(), key=lambda item: -item[1])
        parts = [f"{name} {epochs:.3f}" for name, epochs in listed[:_SHOWN]]
        rest = [epochs for _, epochs in listed[_SHOWN:]]
        if rest:
            parts.append(f"{len(rest)} more {rest[-1]:.3f} to {rest[0]:.3f}")
        tokens = sum(count.tokens for count in self.counts.values())
        left_out = sum(count.left_out for count in self.counts.values())
        end = f"; {left_out} samples left out" if left_out else ""
        return f" data: {tokens} tokens, epochs of each source: {', '.join(parts)}{end}"

    def _by_source(
        self, indices: npt.NDArray[np.int64]
    ) -> Iterator[tuple[Source, npt.NDArray[np.int64]]]:
        """Yield each source with the numbers, in the source, of the samples that come from it."""
        # A checkpoint without a record may have consumed more than the data set of a run with
        # nothing left to do.
        indices = indices[indices < len(self._dataset)]
        if not isinstance(self._dataset, BlendedDataset):
            yield self._dataset, indices
            return
        which, samples = self._dataset.locate(indices)
        for number in np.unique(which).tolist():
            yield self._dataset.datasets[number], samples[which == number]


def is_consumed(record: Any) -> bool:
    """Return whether this is a record of one source, as `Ledger.record` writes it."""
    names = {field.name for field in dataclasses.fields(Consumed)}
    return (
        isinstance(record, dict)
        and record.keys() | {"left_out"} == names
        and all(
            isinstance(value, int | float) and 0 <= value < math.inf for value in record.values()
        )
    )


def sources(dataset: Source | BlendedDataset) -> tuple[Source, ...]:
    """Return the data sets of a blend, or the data set itself."""
    return dataset.datasets if isinstance(dataset, BlendedDataset) else (dataset,)


def short_names(prefixes: Iterable[str]) -> dict[str, str]:
    """Return the file names of prefixes, or the whole prefixes if two have the same name."""
    names = {prefix: os.path.basename(prefix) for prefix in prefixes}
    return names if len(set(names.values())) == len(names) else {prefix: prefix for prefix in names}
