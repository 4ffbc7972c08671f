"""Order in which a job consumes the samples of a data set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron.data.arrays import Int64Array
from megatron.data.permutation import permute
from megatron.errors import DataError

Range = tuple[int, int]


def merged(ranges: Iterable[Sequence[int]]) -> tuple[Range, ...]:
    """Return the same positions as ascending disjoint ranges [start, stop).

    The returned ranges do not touch, and empty ones are dropped.

    >>> merged([(8, 12), (0, 2), (10, 14), (14, 15)])
    ((0, 2), (8, 15))
    """
    result: list[Range] = []
    for start, stop in sorted((int(start), int(stop)) for start, stop in ranges):
        if start >= stop:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], stop))
        else:
            result.append((start, stop))
    return tuple(result)


def around(positions: Int64Array, ranges: Sequence[Range]) -> Int64Array:
    """Return entries `positions` of the sequence 0, 1, 2, ... without the numbers in `ranges`.

    `ranges` come from `merged`.

    >>> around(np.arange(5), [(1, 2), (4, 6)]).tolist()
    [0, 2, 3, 6, 7]
    """
    starts, stops = np.array(ranges, np.int64).reshape(-1, 2).T
    # numbers left out before each range, and after the last one
    missing = np.concatenate(([0], np.cumsum(stops - starts)))
    # `starts - missing[:-1]` is the position of the first entry after each range.
    return positions + missing[np.searchsorted(starts - missing[:-1], positions, side="right")]


def are_ranges(value: object) -> bool:
    """Return whether this is a list of [start, stop], as in a checkpoint.

    Both are whole numbers with 0 <= start < stop < 2^62.
    """
    return isinstance(value, list | tuple) and all(
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(type(number) is int for number in pair)
        and 0 <= pair[0] < pair[1] < 1 << 62
        for pair in value
    )


@dataclass(frozen=True)
class SampleOrder:
    """The order in which a job consumes a data set.

    It depends only on the number of samples consumed, so that every layout, micro-batch size and
    number of workers reads the same samples.

    total     number of samples before the end of the data
    cyclic    repeat the data set, each epoch in a different order, keyed by its number; otherwise
              one pass in the original order
    left_out  ranges of positions to skip, from `merged`. The run needs as many samples as before:
              at the end of a single pass, the first samples are read again to replace those left
              out
    """

    total: int
    cyclic: bool = False
    left_out: tuple[Range, ...] = ()

    def check(self, stop: int) -> None:
        """Raise DataError if the order ends before position `stop`."""
        if self.cyclic:
            if not self.total:
                raise DataError(
                    "the data set has no samples: give more data, or a shorter --seq-length"
                )
        elif stop > self.total:
            raise DataError(
                f"the data set has {self.total} samples and the run needs sample {stop - 1}: train "
                "for fewer samples, or start a new run with the number of samples you want"
            )
        elif stop and around(np.zeros(1, np.int64), self.left_out)[0] >= self.total:
            raise DataError(
                f"all {self.total} samples of the data set are left out: start a new run with "
                "other data"
            )

    def position(self, consumed_samples: int) -> int:
        """Return the number of samples, those left out included, before the next one."""
        return int(around(np.array([consumed_samples]), self.left_out)[0])

    def indices(self, positions: Int64Array) -> Int64Array:
        """Return the samples at these positions; position n is consumed after n others."""
        samples = around(positions, self.left_out)
        if not self.cyclic:
            while self.left_out and (beyond := samples >= self.total).any():
                samples[beyond] = around(samples[beyond] - self.total, self.left_out)
            return samples
        epochs = samples // self.total
        for epoch in np.unique(epochs).tolist():
            inside = epochs == epoch
            samples[inside] = permute(samples[inside] - epoch * self.total, self.total, epoch)
        return samples


def sample_order(
    dataloader_type: str | None, total: int, left_out: Iterable[Sequence[int]] = ()
) -> SampleOrder:
    """Return the order of --dataloader-type (None: single) over `total` samples.

    It skips the positions in the ranges `left_out`.
    """
    return SampleOrder(total, dataloader_type == "cyclic", merged(left_out))
