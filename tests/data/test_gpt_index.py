"""Document, sample and shuffle index: limits of their types.

The order itself is compared with megatron-core's in test_megatron_core.py, the samples with a plain
reading of the format in test_gpt_dataset.py, and the loops with their definitions in
test_index_helpers.py.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from megatron.data import gpt_dataset, indexed_dataset
from megatron.data.gpt_dataset import IndexRequest, build_index
from tests.data.implementations import IMPLEMENTATIONS


def build(
    module: ModuleType, sizes: list[int], request: IndexRequest, uint32_limit: int = 2**32 - 2
) -> dict[str, Any]:
    raw = np.zeros(4 * len(sizes) + 2, np.uint8)
    unaligned: npt.NDArray[np.int32] = raw[2:].view(np.int32)  # as in an .idx file
    unaligned[:] = sizes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(indexed_dataset, "compiled", module)
        patch.setattr(indexed_dataset, "_FEW", 0)  # the compiled shuffle for short arrays too
        patch.setattr(gpt_dataset, "_UINT32_LIMIT", uint32_limit)
        return build_index(dataclasses.replace(request, sizes=unaligned))


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_shuffle_index_of_more_samples_than_uint32(module: ModuleType) -> None:
    """Numbers need 64 bits from 2^32 - 2 on, as in Megatron; the order stays the same."""
    request = IndexRequest("p", "train", "1", 0, 3, 9001, 9000, 1, 3, np.empty(0, np.int32))
    narrow = build(module, [4000, 5000, 1], request, uint32_limit=9001)
    wide = build(module, [4000, 5000, 1], request, uint32_limit=9000)
    assert len(narrow["shuffle_idx"]) == 9000
    assert narrow["shuffle_idx"].dtype == np.uint32 and wide["shuffle_idx"].dtype == np.int64
    assert narrow["shuffle_idx"].tolist() == wide["shuffle_idx"].tolist()
    assert np.iinfo(np.uint32).max - 1 == gpt_dataset._UINT32_LIMIT  # as in Megatron's source
