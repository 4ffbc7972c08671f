"""An order at random that is computed place by place, so that 10^9 samples need no memory and no time to shuffle.

A Feistel network over the numbers r * columns + c of a table that just holds the size: every round adds a hash of one
coordinate to the other, which can be undone, so that no two places meet (Black and Rogaway, "Ciphers with arbitrary
finite domains", CT-RSA 2002, methods of section 5; a number past the size goes through the network again, section 4).
The hash is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

_ROUNDS = 8  # four are enough for a large table; in one of a few numbers the orders are evenly drawn only after eight
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def permute(positions: npt.NDArray[np.int64], size: int, key: int) -> npt.NDArray[np.int64]:
    """What stands at these places of permutation number `key` of 0..size-1. `positions` and `key` are not negative."""
    assert size > 0 and (not len(positions) or 0 <= positions.min() <= positions.max() < size), "places out of range"
    width = math.isqrt(size - 1) + 1
    columns, rows = np.uint64(width), np.uint64(-(-size // width))
    # An array of one: numpy warns when single numbers wrap around, which is what a hash is made of.
    number = _mix(np.array([key], np.uint64) + _GOLDEN)
    keys = _mix(number + _GOLDEN * np.arange(_ROUNDS, dtype=np.uint64))
    found = np.empty(len(positions), np.int64)
    waiting = np.arange(len(positions))
    values = positions.astype(np.uint64)
    while len(waiting):
        row, column = values // columns, values % columns
        for i in range(0, _ROUNDS, 2):
            column = (column + _mix(row + keys[i]) % columns) % columns
            row = (row + _mix(column + keys[i + 1]) % rows) % rows
        values = row * columns + column
        found[waiting] = values
        outside = values >= size
        waiting, values = waiting[outside], values[outside]
    return found


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
