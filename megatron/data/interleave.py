"""Order in which the samples of several sources alternate, in a closed form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.data.arrays import Int64Array


class Interleaving:
    """Order of the samples of sources with these weights."""

    def __init__(self, weights: Sequence[float]) -> None:
        shares = np.array(weights, np.float64)
        self._weights = shares / shares.sum()

    def _before(self, time: float) -> Int64Array:
        """Return how many samples of each source have a time below `time`."""
        w = self._weights
        number = np.maximum(np.floor(time * w - 0.5), 0).astype(np.int64)
        number -= (number > 0) & ((number - 0.5) / w >= time)
        number += (number + 0.5) / w < time
        number += (number + 0.5) / w < time
        return number

    def _block(self, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
        margin = len(self._weights) / 2 + 1
        first = self._before(max(start - margin, 0.0))
        counts = self._before(stop + margin) - first
        which = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        numbers = first[which] + within
        order = np.argsort((numbers + 0.5) / self._weights[which], kind="stable")
        chosen = order[start - int(first.sum()) :][: stop - start]
        return which[chosen], numbers[chosen]

    def counts(self, samples: int) -> Int64Array:
        """Return how many of the first `samples` samples each source gives."""
        margin = len(self._weights) / 2 + 1
        first = self._before(max(samples - margin, 0.0))
        left = samples - int(first.sum())
        which, _ = self._block(samples - left, samples)
        return first + np.bincount(which, minlength=len(first))

    def find(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the source of each position, and the number of the sample within it."""
        if not len(positions):
            return positions, positions
        start = int(positions[0])
        stop = int(positions[-1]) + 1
        if stop - start > 4 * len(positions) + 4096:
            middle = len(positions) // 2
            halves = [self.find(half) for half in (positions[:middle], positions[middle:])]
            if middle:
                return np.concatenate([h[0] for h in halves]), np.concatenate(
                    [h[1] for h in halves]
                )
        which, numbers = self._block(start, stop)
        return which[positions - start], numbers[positions - start]
