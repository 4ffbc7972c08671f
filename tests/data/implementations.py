"""The two implementations of the index loops, C++ and numpy, for tests of what both must give."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from megatron.data import indexed_dataset
from tests.data import numpy_loops

NEEDS_COMPILED = pytest.mark.skipif(
    indexed_dataset.compiled is None, reason="the C++ extension is not built: pip install -e ."
)
IMPLEMENTATIONS = [
    pytest.param(numpy_loops, id="numpy"),
    pytest.param(indexed_dataset.compiled, id="compiled", marks=NEEDS_COMPILED),
]


def call(module: ModuleType, function: str, *arguments: Any, int32_max: int = 2**31 - 1) -> Any:
    """A function of indexed_dataset with one of them, for short arrays too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_dataset, "compiled", module)
        patch.setattr(indexed_dataset, "_FEW", 0)
        patch.setattr(indexed_dataset, "INT32_MAX", int32_max)
        return getattr(indexed_dataset, function)(*arguments)
