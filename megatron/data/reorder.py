"""Samples that are repeated or skipped where a run goes on in another order of its data.

A run counts the samples that it has consumed and goes on behind them. In another order (of more
samples, by another seed, from another blend) the samples before that place are not those that were
consumed: some of these come again, and others never.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from megatron.data.gpt_dataset import Spans, TokenDataset
from megatron.data.sampler import SampleOrder
from megatron.parallel.keyed_random import GOLDEN

_BLOCK = 1 << 20  # samples looked up at once
_MOST = 1 << 24  # samples compared; of longer runs those that begin in a part of the text
_PART_BITS = 20  # such parts are chosen by a hash
_NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Ordered:
    """A data set and the order in which its samples are consumed."""

    dataset: TokenDataset
    order: SampleOrder


@dataclass(frozen=True)
class Reordered:
    """Samples of one source that a change of the order concerns.

    repeated  still to come, though consumed before
    skipped   not consumed, and not to come where they were due: the new order counts them as
              consumed
    exact     whether all samples were compared
    """

    repeated: int
    skipped: int
    exact: bool


def reordered(
    before: Ordered | None, after: Ordered, consumed: int, end: int, others: Collection[str] = ()
) -> dict[str, Reordered]:
    """Return what happens to each source of `after` between `consumed` and `end` samples.

    `consumed` samples were taken in the order `before`; None where it is unknown. `others` are
    sources of `before` with other content under the same name.
    """
    share = min(1.0, _MOST / max(1, 2 * consumed + end))
    old = {} if before is None else _take(before, 0, consumed, share)
    new = _take(after, 0, consumed, share)
    rest = _take(after, consumed, end, share)
    found = {}
    for name in dict.fromkeys(source.name for source in after.dataset.sources):
        taken, counted, coming = (
            part.get(name, _Taken()) for part in ({} if name in others else old, new, rest)
        )
        again, missing = _compare([taken.joined(), counted.joined(), coming.joined()])
        compared = counted.compared + coming.compared
        scale = (counted.samples + coming.samples) / max(1, compared)
        found[name] = Reordered(round(again * scale), round(missing * scale), share == 1)
    return found


@dataclass
class _Taken:
    """Samples of a source in a part of an order, and the tokens to compare."""

    spans: list[Spans] = field(default_factory=list)
    compared: int = 0
    samples: int = 0

    def joined(self) -> Spans:
        starts, lengths = zip((_NOTHING, _NOTHING), *self.spans, strict=True)
        return np.concatenate(starts), np.concatenate(lengths)


def _take(data: Ordered, start: int, stop: int, share: float) -> dict[str, _Taken]:
    found: dict[str, _Taken] = {}
    for first in range(start, stop, _BLOCK):
        indices = data.order.indices(np.arange(first, min(first + _BLOCK, stop)))
        for source, samples in data.dataset.by_source(indices):
            starts, lengths = source.spans(samples)
            if share < 1:
                number = (starts >> _PART_BITS).astype(np.uint64) * np.uint64(GOLDEN)
                chosen = number >> np.uint64(32) < share * 2**32
                starts = starts[chosen]
                lengths = lengths[chosen]
            taken = found.setdefault(source.name, _Taken())
            taken.spans.append((starts, lengths))
            taken.compared += int(lengths.sum())
            taken.samples += len(samples)
    return found


def _compare(spans: list[Spans]) -> tuple[int, int]:
    """Return the tokens that are repeated and those that are skipped.

    `spans` are those taken, those that the new order has before this place, and those after it.
    """
    places = np.concatenate([end for starts, length in spans for end in (starts, starts + length)])
    sizes = [len(starts) for starts, _ in spans]
    kind = np.repeat(np.arange(6), np.repeat(sizes, 2))  # a start and an end of each of the three
    changes = np.zeros((len(places), 3), np.int64)
    changes[np.arange(len(places)), kind // 2] = 1 - 2 * (kind % 2)
    sort = np.argsort(places, kind="stable")
    taken, counted, coming = np.cumsum(changes[sort], axis=0).T[:, :-1]
    widths = np.diff(places[sort])
    again = np.minimum(coming, np.maximum(taken - counted, 0))
    return int((again * widths).sum()), int((np.maximum(counted - taken, 0) * widths).sum())
