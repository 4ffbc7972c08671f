"""How much of each source the training has taken: samples, tokens and epochs of every data set of the blend.

A function of the samples consumed, counted as they are: nothing is counted twice, and a resumed run goes on from what
its checkpoint holds, also when the blend has changed since.
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

_BLOCK = 1 << 20  # so many samples are looked up at once
_SHOWN = 6  # so many sources are listed in a line


@dataclass
class Consumed:
    """What has been taken of one source. Tokens are those trained on, without padding; an epoch is all of its tokens
    in this split, so that epochs grow by fractions. `left_out` are samples that the training went around."""

    samples: int = 0
    tokens: int = 0
    epochs: float = 0.0
    left_out: int = 0

    @property
    def epoch(self) -> int:
        """Number of the epoch that the last sample was in, from 1; 0 before the first."""
        return math.ceil(self.epochs - 1e-9)


class Ledger:
    """Counts what a data set gives by source: the prefix of its files.

    `carried` is the record of a checkpoint at `consumed_samples`; without one, the samples before are counted in the
    data set as it is now.
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
        """Count up to `consumed_samples`; the sources that came to a second or later epoch, with its number."""
        before = {name: count.epoch for name, count in self.counts.items()}
        while self._position < consumed_samples:
            stop = min(self._position + _BLOCK, consumed_samples)
            for source, samples in self._by_source(self._order.indices(np.arange(self._position, stop))):
                self._add(source, samples)
            self._position = stop
        begun = {name: count.epoch for name, count in self.counts.items() if count.epoch > max(before[name], 1)}
        short = short_names(self.counts) if begun else {}
        return [(short[name], epoch) for name, epoch in begun.items()]

    def rolled_back(
        self, order: SampleOrder, consumed_samples: int, carried: Mapping[str, Mapping[str, Any]],
        left_out: npt.NDArray[np.int64],
    ) -> Ledger:
        """The ledger of a run that went back to `consumed_samples`, where its checkpoint holds `carried`, and leaves
        out these samples of the data set beside those that it left out before."""
        back = Ledger(self._dataset, order, consumed_samples, carried)
        for name, count in self.counts.items():
            back.counts.setdefault(name, Consumed()).left_out = count.left_out
        for source, samples in self._by_source(left_out):
            back.counts[source.name].left_out += len(samples)
        return back

    def record(self) -> dict[str, dict[str, Any]]:
        """{source: {samples, tokens, epochs}}, and left_out where there is any, for checkpoint and metrics file."""
        records = {name: dataclasses.asdict(count) for name, count in self.counts.items()}
        for record in records.values():
            if not record["left_out"]:
                del record["left_out"]
        return records

    def epochs(self) -> dict[str, float]:
        """How often each source has been gone through, by its short name."""
        short = short_names(self.counts)
        return {short[name]: count.epochs for name, count in self.counts.items()}

    def line(self) -> str:
        """The epochs of each source, the furthest first; of many only the first ones and the range of the rest."""
        listed = sorted(self.epochs().items(), key=lambda item: -item[1])
        parts = [f"{name} {epochs:.3f}" for name, epochs in listed[:_SHOWN]]
        rest = [epochs for _, epochs in listed[_SHOWN:]]
        if rest:
            parts.append(f"{len(rest)} more {rest[-1]:.3f} to {rest[0]:.3f}")
        tokens = sum(count.tokens for count in self.counts.values())
        left_out = sum(count.left_out for count in self.counts.values())
        end = f"; {left_out} samples left out" if left_out else ""
        return f" data: {tokens} tokens, epochs of each source: {', '.join(parts)}{end}"

    def _by_source(self, indices: npt.NDArray[np.int64]) -> Iterator[tuple[Source, npt.NDArray[np.int64]]]:
        """The samples of a data set, by the source that they are of and as it numbers them."""
        # What a checkpoint without a record consumed may go beyond the data set of a run that has nothing left to do.
        indices = indices[indices < len(self._dataset)]
        if not isinstance(self._dataset, BlendedDataset):
            yield self._dataset, indices
            return
        which, samples = self._dataset.locate(indices)
        by_source = np.argsort(which, kind="stable")
        ends = np.cumsum(np.bincount(which, minlength=len(self._dataset.datasets)))
        for source, part in zip(self._dataset.datasets, np.split(samples[by_source], ends[:-1]), strict=True):
            if len(part):
                yield source, part

    def _add(self, source: Source, samples: npt.NDArray[np.int64]) -> None:
        count, carried = self.counts[source.name], self._carried[source.name]
        count.samples += len(samples)
        count.tokens += source.tokens_in(samples)
        if carried.epochs == carried.tokens / source.tokens_per_epoch:  # rounded once, however often it was resumed
            count.epochs = count.tokens / source.tokens_per_epoch
        else:
            count.epochs = carried.epochs + (count.tokens - carried.tokens) / source.tokens_per_epoch


def is_consumed(record: Any) -> bool:
    """Whether this is what `Ledger.record` writes for one source."""
    names = {field.name for field in dataclasses.fields(Consumed)}
    return isinstance(record, dict) and record.keys() | {"left_out"} == names and all(
        isinstance(value, int | float) and 0 <= value < math.inf for value in record.values()
    )


def sources(dataset: Source | BlendedDataset) -> tuple[Source, ...]:
    """The data sets that a data set draws from; itself when it is not a blend."""
    return dataset.datasets if isinstance(dataset, BlendedDataset) else (dataset,)


def short_names(prefixes: Iterable[str]) -> dict[str, str]:
    """The file names of prefixes; where two have the same one, the whole prefixes."""
    names = {prefix: os.path.basename(prefix) for prefix in prefixes}
    return names if len(set(names.values())) == len(names) else {prefix: prefix for prefix in names}
