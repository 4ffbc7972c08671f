"""Ranges [start, stop) of positions that an order of samples goes around."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Range = tuple[int, int]


def merged(ranges: Iterable[Sequence[int]]) -> tuple[Range, ...]:
    """The same positions as ranges that ascend and do not touch; empty ones are dropped.

    >>> merged([(8, 12), (0, 2), (10, 14), (14, 15)])
    ((0, 2), (8, 15))
    """
    found: list[Range] = []
    for start, stop in sorted((int(start), int(stop)) for start, stop in ranges):
        if start >= stop:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], stop))
        else:
            found.append((start, stop))
    return tuple(found)


def around(positions: npt.NDArray[np.int64], ranges: Sequence[Range]) -> npt.NDArray[np.int64]:
    """Where one comes to who counts on to these positions and does not count what is in the ranges (merged ones).

    >>> around(np.arange(5), [(1, 2), (4, 6)]).tolist()
    [0, 2, 3, 6, 7]
    """
    if not ranges:
        return positions
    starts, stops = np.array(ranges, np.int64).T
    missing = np.concatenate(([0], np.cumsum(stops - starts)))  # before the range, and after the last one
    # Counted around the ranges before it, a range begins at this position.
    return positions + missing[np.searchsorted(starts - missing[:-1], positions, side="right")]


def are_ranges(value: Any) -> bool:
    """Whether this is a list of [start, stop] as a checkpoint holds it: whole numbers, 0 <= start < stop."""

    def is_range(pair: Any) -> bool:
        whole = isinstance(pair, list | tuple) and len(pair) == 2 and all(type(n) is int for n in pair)
        return whole and 0 <= pair[0] < pair[1]

    return isinstance(value, list | tuple) and all(map(is_range, value))
