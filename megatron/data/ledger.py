"""Ledger of consumed data: samples, tokens and epochs of each source."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.data.gpt_dataset import TokenDataset
from megatron.data.history import short_names
from megatron.data.order import SampleOrder, merged

Records = Mapping[str, Mapping[str, Any]]  # from Ledger.record
_BLOCK = 1 << 20  # samples that the ledger looks up at once
_SHOWN = 6  # sources listed in a line


@dataclass
class Consumed:
    """Counts for one source.

    Only tokens that are trained on are counted, without padding. An epoch is all tokens of the
    source in this split; `epochs` may be fractional. `left_out` counts the samples that training
    skipped.
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
    """Counter of the samples, tokens and epochs consumed from each source.

    A source is identified by its name: for data files, their prefix. The counts depend only on the
    samples consumed: nothing is counted twice, and a resumed run continues from the counts of its
    checkpoint, even if the blend has changed.

    `carried` is the record of a checkpoint at `consumed_samples`; without one, earlier samples are
    counted in the current data set.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        order: SampleOrder,
        consumed_samples: int = 0,
        carried: Records | None = None,
    ) -> None:
        self._dataset = dataset
        self._order = order
        self.counts = {name: Consumed(**fields) for name, fields in (carried or {}).items()}
        for source in dataset.sources:
            self.counts.setdefault(source.name, Consumed())
        self._carried = {name: dataclasses.replace(count) for name, count in self.counts.items()}
        self._position = consumed_samples if carried else 0
        self.advance(consumed_samples)

    def advance(self, consumed_samples: int, *, trained: bool = True) -> list[tuple[str, int]]:
        """Count up to `consumed_samples`, as left out unless they were trained on.

        Returns (short name, number of the epoch) of each source that began a second or later epoch.
        """
        before = {name: max(count.epoch, 1) for name, count in self.counts.items()}
        while self._position < consumed_samples:
            stop = min(self._position + _BLOCK, consumed_samples)
            indices = self._order.indices(np.arange(self._position, stop))
            for source, samples in self._dataset.by_source(indices):
                count = self.counts[source.name]
                if not trained:
                    count.left_out += len(samples)
                    continue
                carried = self._carried[source.name]
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
        ranges: Iterable[Sequence[int]],
        consumed_samples: int,
        carried: Records,
        positions: range,
    ) -> Ledger:
        """Return the ledger of a run that rolled back to the checkpoint at `consumed_samples`.

        The checkpoint has the record `carried`. The run leaves out all `ranges` from now on; the
        samples at `positions` of its previous order are counted as newly left out.
        """
        order = dataclasses.replace(self._order, left_out=merged(ranges))
        back = Ledger(self._dataset, order, consumed_samples, carried)
        for name, count in self.counts.items():
            back.counts.setdefault(name, Consumed()).left_out = count.left_out
        left_out = self._order.indices(np.array(positions, np.int64))
        for source, samples in self._dataset.by_source(left_out):
            back.counts[source.name].left_out += len(samples)
        return back

    def record(self) -> dict[str, dict[str, Any]]:
        """Return {source: {samples, tokens, epochs}} for the checkpoint and the metrics file.

        Sources of which samples were left out also have left_out.
        """
        records = {name: dataclasses.asdict(count) for name, count in self.counts.items()}
        for record in records.values():
            if not record["left_out"]:
                del record["left_out"]
        return records

    def by_short_name(self) -> dict[str, dict[str, Any]]:
        """Return the record, with the short names of the sources."""
        short = short_names(self.counts)
        return {short[name]: record for name, record in self.record().items()}

    def line(self, to_come: Mapping[str, float] | None = None) -> str:
        """Return a log line with all tokens consumed, and the epochs of each source.

        The sources with the most epochs are listed, in descending order; for the others, the line
        has only how many they are and the range of their epochs. `to_come` has the epochs of the
        sources in the rest of the run, if they are known.
        """
        short = short_names(self.counts)
        ahead = {short[name]: epochs for name, epochs in (to_come or {}).items()}
        epochs_of = {name: record["epochs"] for name, record in self.by_short_name().items()}
        listed = sorted(epochs_of.items(), key=lambda item: -item[1])
        texts = [
            f"{name} {epochs:.3f}" + (f" of {epochs + ahead[name]:.3f}" if ahead.get(name) else "")
            for name, epochs in listed[:_SHOWN]
        ]
        rest = [epochs for _, epochs in listed[_SHOWN:]]
        if rest:
            texts.append(f"{len(rest)} more {rest[-1]:.3f} to {rest[0]:.3f}")
        tokens = sum(count.tokens for count in self.counts.values())
        left_out = sum(count.left_out for count in self.counts.values())
        end = f"; {left_out} samples left out" if left_out else ""
        return f" data: {tokens} tokens, epochs of each source: {', '.join(texts)}{end}"


def is_consumed(record: object) -> bool:
    """Return whether this is a record of one source, as `Ledger.record` writes it."""
    names = {field.name for field in dataclasses.fields(Consumed)}
    return (
        isinstance(record, dict)
        and record.keys() | {"left_out"} == names
        and all(
            isinstance(value, int | float) and 0 <= value < math.inf for value in record.values()
        )
    )
