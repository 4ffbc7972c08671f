"""Permutations of any length whose values are computed independently."""

from __future__ import annotations

import math

import numpy as np

from megatron.data import indexed_dataset
from megatron.data.arrays import Int64Array
from megatron.parallel.hashing import GOLDEN, scramble

# 4 rounds suffice for a large table; with few entries, orders become equally likely only after 8
_ROUNDS = 8


def permute(positions: Int64Array, size: int, key: int) -> Int64Array:
    """Return the values at `positions` of permutation number `key` of 0..size-1.

    Each value is computed independently: no memory or time is spent on shuffling 10^9 samples.
    `positions` and `key` are not negative. A Feistel network permutes the numbers r * columns + c
    of the smallest nearly square table with `size` cells or more: each round adds a hash of one
    coordinate to the other, which is invertible (Black and Rogaway, "Ciphers with arbitrary finite
    domains", CT-RSA 2002, section 5); a result of `size` or more passes through the network again
    (section 4). The hash is the finaliser of SplitMix64 (megatron.parallel.hashing.scramble).
    C++ gives the same numbers, for one position in a microsecond.
    """
    if indexed_dataset.compiled is not None:
        result: Int64Array = indexed_dataset.compiled.permute(positions, size, key)
        return result
    assert size > 0 and (not len(positions) or 0 <= positions.min() <= positions.max() < size), (
        "positions out of range"
    )
    width = math.isqrt(size - 1) + 1
    columns = np.uint64(width)
    rows = np.uint64(-(-size // width))
    golden = np.uint64(GOLDEN)
    # An array of one element: numpy warns if scalars overflow, which a hash does on purpose.
    number = scramble(np.array([key], np.uint64) + golden)
    keys = scramble(number + golden * np.arange(_ROUNDS, dtype=np.uint64))
    result = np.empty(len(positions), np.int64)
    waiting = np.arange(len(positions))
    values = positions.astype(np.uint64)
    while len(waiting):
        row = values // columns
        column = values % columns
        for i in range(0, _ROUNDS, 2):
            column = (column + scramble(row + keys[i]) % columns) % columns
            row = (row + scramble(column + keys[i + 1]) % rows) % rows
        values = row * columns + column
        result[waiting] = values
        outside = values >= size
        waiting = waiting[outside]
        values = values[outside]
    return result
