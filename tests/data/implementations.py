"""Functions of the index loops with short arrays, requests for an index, and documents."""

from contextlib import contextmanager

import numpy as np
import pytest

from megatron.data import indexed_dataset
from megatron.data.gpt_dataset import IndexRequest


def call(function, *arguments, int32_max=2**31 - 1):
    """Call a function of indexed_dataset, whose loop is compiled for short arrays too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_dataset, "_FEW", 0)
        patch.setattr(indexed_dataset, "INT32_MAX", int32_max)
        return getattr(indexed_dataset, function)(*arguments)


@contextmanager
def without_extension():
    """Take the C++ extension away for a while, as in a checkout where it was not built."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_dataset, "compiled", None)
        yield


def ascending(sizes, first_token=0):
    """Return documents of these sizes with ascending tokens, so that a token tells its position."""
    stops = (first_token + np.cumsum(sizes)).tolist()
    return [list(range(stop - size, stop)) for size, stop in zip(sizes, stops, strict=True)]


def request_for(indexed, num_samples, seq_length, seed=1, bounds=None):
    """Return the request for training samples of these sequences, or of all."""
    start, stop = bounds or (0, len(indexed))
    tokens = indexed.tokens_between(start, stop)
    sizes = indexed.sizes
    return IndexRequest(
        indexed.prefix, "train", "1", start, stop, tokens, num_samples, seq_length, seed, sizes
    )


def names(folder):
    """Return the names of a folder's files in order."""
    return sorted(path.name for path in folder.iterdir())
