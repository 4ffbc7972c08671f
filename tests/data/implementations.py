"""C++ and numpy implementations of the index loops, for tests that both must pass."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from megatron.data import indexed_dataset
from megatron.data.gpt_dataset import IndexRequest
from megatron.data.indexed_dataset import IndexedDataset
from tests.data import numpy_loops

NEEDS_COMPILED = pytest.mark.skipif(
    indexed_dataset.compiled is None, reason="the C++ extension is not built: pip install -e ."
)
IMPLEMENTATIONS = [
    pytest.param(numpy_loops, id="numpy"),
    pytest.param(indexed_dataset.compiled, id="compiled", marks=NEEDS_COMPILED),
]


def call(module: ModuleType, function: str, *arguments: Any, int32_max: int = 2**31 - 1) -> Any:
    """Return a function of indexed_dataset with one of them, for short arrays too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_dataset, "compiled", module)
        patch.setattr(indexed_dataset, "_FEW", 0)
        patch.setattr(indexed_dataset, "INT32_MAX", int32_max)
        return getattr(indexed_dataset, function)(*arguments)


def request_for(
    indexed: IndexedDataset,
    num_samples: int,
    seq_length: int,
    seed: int = 1,
    bounds: tuple[int, int] | None = None,
) -> IndexRequest:
    """Return the request for training samples of these sequences, or of all."""
    start, stop = bounds or (0, len(indexed))
    tokens, sizes = indexed.tokens_between(start, stop), indexed.sizes
    return IndexRequest(
        indexed.prefix, "train", "1", start, stop, tokens, num_samples, seq_length, seed, sizes
    )
