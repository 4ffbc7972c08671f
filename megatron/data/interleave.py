"""The order in which the samples of the sources of a blend alternate."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron.data import indexed_dataset
from megatron.data.arrays import Int64Array

MOST_POSITIONS = 1 << 51


class Interleaving:
    """An endless order of the samples of sources, without memory of what came before.

    With weights w_a that sum to 1, sample j of source a has the time (j + 1/2) / w_a; samples are
    ordered by time, at equal times by the number of their source. Among the first n samples of S
    sources, source a has n w_a, give or take (1 + S w_a) / 2. Times are the doubles nearest to
    these numbers, so the order is the same on every machine; positions are below MOST_POSITIONS.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        assert len(weights) and min(weights) > 0, "expected weights above 0"
        self.weights = np.array(weights, np.float64) / math.fsum(weights)

    def counts(self, samples: int) -> Int64Array:
        """Return how many of the first `samples` samples each source gives, [S]."""
        first, sources, _ = self._around(samples, samples)
        rest = sources[: samples - int(first.sum())]
        return first + np.bincount(rest, minlength=len(first))

    def find(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the source of each position, [n], and the number of its sample there, [n].

        Neighbours in the order are fastest to find if they are neighbours among the positions.
        """
        if indexed_dataset.compiled is not None:
            result: tuple[Int64Array, Int64Array]
            result = indexed_dataset.compiled.interleave(self.weights, positions)
            return result
        steps = np.diff(positions)
        sources = np.empty(len(positions), np.int64)
        numbers = np.empty(len(positions), np.int64)
        jumps = np.flatnonzero((steps < 0) | (steps > len(self.weights))) + 1
        for run in np.split(np.arange(len(positions)), jumps) if len(positions) else ():
            here = positions[run]
            first, all_sources, all_numbers = self._around(int(here[0]), int(here[-1]) + 1)
            places = here - first.sum()
            sources[run] = all_sources[places]
            numbers[run] = all_numbers[places]
        return sources, numbers

    def _before(self, time: float) -> Int64Array:
        """Return how many samples of each source have a time below `time`, [S]."""
        numbers = np.maximum(np.ceil(time * self.weights - 0.5), 0)
        # the product may have been rounded to the other side of a sample
        numbers -= (numbers > 0) & ((numbers - 0.5) / self.weights >= time)
        numbers += (numbers + 0.5) / self.weights < time
        return numbers.astype(np.int64)

    def _around(self, start: int, stop: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return samples in order that include positions start to stop - 1.

        The result is how many samples of each source come before them, [S], and for each of them
        the source and the number there.
        """
        # Each source is at most half a sample off its share, rounding apart.
        margin = len(self.weights)
        first = self._before(start - margin)
        last = self._before(stop + margin)
        assert first.sum() <= start and stop <= last.sum(), "positions beyond 2^51"
        lengths = last - first
        sources = np.repeat(np.arange(len(lengths)), lengths)
        ends = np.cumsum(lengths)
        numbers = np.arange(ends[-1]) + np.repeat(last - ends, lengths)
        order = np.argsort((numbers + 0.5) / self.weights[sources], kind="stable")
        return first, sources[order], numbers[order]
