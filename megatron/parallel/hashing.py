"""Hashes of integers: SplitMix64, for numbers that must be the same on every machine."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy.typing as npt

GOLDEN = 0x9E3779B97F4A7C15
"""Increment of SplitMix64."""
_MASK = (1 << 64) - 1

_Bits = TypeVar("_Bits", int, npt.NDArray[Any])


def scramble(bits: _Bits) -> _Bits:
    """Apply SplitMix64's finalizer (Steele et al., OOPSLA 2014) to a number of 64 bits, or many."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _MASK
    bits ^= bits >> 31
    return bits


def mix(*values: int) -> int:
    """Return a well-distributed 63-bit hash of the values: SplitMix64, chained over the values."""
    state = 0
    for value in values:
        state = scramble((state + GOLDEN + (value & _MASK)) & _MASK)
    return state >> 1
