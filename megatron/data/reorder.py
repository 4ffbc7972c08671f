"""Samples that are repeated or skipped when a run continues with its data in another order.

A run counts the samples that it has consumed and continues at that position. In another order (with
more samples, another seed or another blend) the samples before the position are not those that were
consumed: some consumed samples are repeated, and some samples are never used.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from megatron.data.gpt_dataset import Spans, TokenDataset
from megatron.data.order import SampleOrder
from megatron.parallel.hashing import GOLDEN

_BLOCK = 1 << 20  # samples looked up at once
_MOST = 1 << 24  # samples compared; in longer runs, only those that begin in some blocks of text
_CHUNK_BITS = 20  # log2 of the size in tokens of these blocks, which a hash chooses
_NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Ordered:
    """A data set and the order in which its samples are consumed."""

    dataset: TokenDataset
    order: SampleOrder


@dataclass(frozen=True)
class Reordered:
    """Numbers of samples of one source that are affected by a change of order.

    repeated  samples still to come, though consumed before
    skipped   samples neither consumed nor to come: the new order counts them as consumed
    exact     whether all samples were compared
    """

    repeated: int
    skipped: int
    exact: bool


def reordered(
    before: Ordered | None, after: Ordered, consumed: int, end: int, changed: Collection[str] = ()
) -> dict[str, Reordered]:
    """Return how each source is affected if `after` continues from `consumed` to `end` samples.

    `consumed` samples were taken in the order `before`, which is None if it is unknown. `changed`
    names the sources in `before` whose content has changed under the same name.
    """
    share = min(1.0, _MOST / max(1, 2 * consumed + end))
    old = {} if before is None else _collect(before, 0, consumed, share)
    new = _collect(after, 0, consumed, share)
    rest = _collect(after, consumed, end, share)
    result = {}
    for name in dict.fromkeys(source.name for source in after.dataset.sources):
        former, counted, coming = (
            by_source.get(name, _Consumption())
            for by_source in ({} if name in changed else old, new, rest)
        )
        repeated, missing = _compare([former.joined(), counted.joined(), coming.joined()])
        compared = counted.compared + coming.compared
        scale = (counted.samples + coming.samples) / max(1, compared)
        result[name] = Reordered(round(repeated * scale), round(missing * scale), share == 1)
    return result


@dataclass
class _Consumption:
    """Samples of a source in a range of an order.

    spans      tokens to compare
    compared   number of these tokens
    samples    number of samples in the range, compared or not
    """

    spans: list[Spans] = field(default_factory=list)
    compared: int = 0
    samples: int = 0

    def joined(self) -> Spans:
        starts, lengths = zip((_NOTHING, _NOTHING), *self.spans, strict=True)
        return np.concatenate(starts), np.concatenate(lengths)


def _collect(data: Ordered, start: int, stop: int, share: float) -> dict[str, _Consumption]:
    by_source: dict[str, _Consumption] = {}
    for first in range(start, stop, _BLOCK):
        indices = data.order.indices(np.arange(first, min(first + _BLOCK, stop)))
        for source, samples in data.dataset.by_source(indices):
            starts, lengths = source.spans(samples)
            if share < 1:
                number = (starts >> _CHUNK_BITS).astype(np.uint64) * np.uint64(GOLDEN)
                chosen = number >> np.uint64(32) < share * 2**32
                starts = starts[chosen]
                lengths = lengths[chosen]
            consumption = by_source.setdefault(source.name, _Consumption())
            consumption.spans.append((starts, lengths))
            consumption.compared += int(lengths.sum())
            consumption.samples += len(samples)
    return by_source


def _compare(spans: list[Spans]) -> tuple[int, int]:
    """Return the number of tokens that are repeated, and of those that are skipped.

    `spans` has three entries: the spans that were consumed, and those that the new order has before
    and after the position at which the run continues.
    """
    bounds = np.concatenate([end for starts, length in spans for end in (starts, starts + length)])
    sizes = [len(starts) for starts, _ in spans]
    kind = np.repeat(np.arange(6), np.repeat(sizes, 2))  # starts and ends of each of the three
    changes = np.zeros((len(bounds), 3), np.int64)
    changes[np.arange(len(bounds)), kind // 2] = 1 - 2 * (kind % 2)
    sort = np.argsort(bounds, kind="stable")
    former, counted, coming = np.cumsum(changes[sort], axis=0).T[:, :-1]
    widths = np.diff(bounds[sort])
    repeated = np.minimum(coming, np.maximum(former - counted, 0))
    return int((repeated * widths).sum()), int((np.maximum(counted - former, 0) * widths).sum())
