"""The index loops: C++, numpy and a walk over single tokens must agree."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data import index_helpers
from megatron.data.splits import samples_of_part

IMPLEMENTATIONS = [
    pytest.param(None, id="numpy"),
    pytest.param(
        index_helpers.compiled,
        id="compiled",
        marks=pytest.mark.skipif(
            index_helpers.compiled is None, reason="the C++ extension is not built: pip install -e ."
        ),
    ),
]


def walk(sizes: list[int], document_index: list[int], seq_length: int, num_samples: int) -> list[tuple[int, int]]:
    """Where token i * seq_length lies, found by listing the place of every token."""
    places = [(p, offset) for p, document in enumerate(document_index) for offset in range(sizes[document])]
    return [(0, 0)] + [places[i * seq_length] for i in range(1, num_samples + 1)]


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@given(data=st.data())
def test_sample_index(module: ModuleType | None, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    documents = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=12))
    seq_length = data.draw(st.integers(1, 7))
    tokens = sum(sizes[d] for d in documents)
    num_samples = data.draw(st.integers(0, max(0, (tokens - 1) // seq_length)))
    rows = build_samples(module, sizes, documents, seq_length, num_samples)
    assert rows.dtype == np.int32 and rows.shape == (num_samples + 1, 2)
    assert [tuple(row) for row in rows.tolist()] == walk(sizes, documents, seq_length, num_samples)


def build_samples(
    module: ModuleType | None, sizes: list[int], documents: list[int], seq_length: int, num_samples: int
) -> npt.NDArray[np.int32]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_helpers, "compiled", module)
        return index_helpers.build_sample_index(
            np.array(sizes, np.int32), np.array(documents, np.int32), seq_length, num_samples
        )


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_sample_index_refuses_too_few_tokens(module: ModuleType | None) -> None:
    assert build_samples(module, [5], [0], 4, 1).tolist() == [[0, 0], [0, 4]]
    with pytest.raises(ValueError, match="too few tokens"):
        build_samples(module, [5], [0], 5, 1)


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_sample_index_of_unaligned_sizes(module: ModuleType | None) -> None:
    raw = np.zeros(2 + 8, np.uint8)
    sizes = raw[2:].view(np.int32)
    sizes[:] = [3, 4]
    rows = build_samples(module, sizes, [1, 0], 2, 3)  # type: ignore[arg-type]
    assert rows.tolist() == [[0, 0], [0, 2], [1, 0], [1, 2]]


@pytest.mark.skipif(index_helpers.compiled is None, reason="the C++ extension is not built: pip install -e .")
def test_compiled_int64_and_bad_documents() -> None:
    compiled = index_helpers.compiled
    assert compiled is not None
    sizes, documents = np.array([3, 4], np.int32), np.array([1, 0], np.int32)
    rows = compiled.build_sample_index_int64(sizes, documents, 2, 3)
    assert rows.dtype == np.int64 and rows.tolist() == [[0, 0], [0, 2], [1, 0], [1, 2]]
    with pytest.raises(ValueError, match="sizes does not have"):
        compiled.build_sample_index_int64(sizes, np.array([2], np.int32), 2, 3)


def build_blend(module: ModuleType | None, weights: list[float], size: int) -> tuple[npt.NDArray, npt.NDArray]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_helpers, "compiled", module)
        return index_helpers.build_blend_index(np.array(weights) / np.sum(weights), size)


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
@given(weights=st.lists(st.floats(0.01, 100), min_size=1, max_size=8), size=st.integers(0, 300))
def test_blend_index(module: ModuleType | None, weights: list[float], size: int) -> None:
    which, sample = build_blend(module, weights, size)
    assert which.dtype == np.uint8 and sample.dtype == np.int64
    shares = [w / float(np.sum(weights)) for w in weights]
    taken = [0] * len(weights)
    for k in range(size):  # the definition, one data set at a time
        errors = [share * max(k, 1) - count for share, count in zip(shares, taken, strict=True)]
        chosen = errors.index(max(errors))
        assert (which[k], sample[k]) == (chosen, taken[chosen])
        taken[chosen] += 1
    for share, count in zip(shares, taken, strict=True):
        assert count <= samples_of_part(size, share)


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_blend_index_by_hand(module: ModuleType | None) -> None:
    # weights 1/2 1/4 1/4; errors for k=0: .5 .25 .25 -> 0; 1: -.5 .25 .25 -> 1; 2: 0 -.5 .5 -> 2; 3: .5 -.25 -.25 -> 0
    which, sample = build_blend(module, [2, 1, 1], 4)
    assert which.tolist() == [0, 1, 2, 0] and sample.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_blend_of_many(module: ModuleType | None) -> None:
    which, sample = build_blend(module, [1.0] * 300, 300)
    assert which.dtype == np.int32 and sorted(which.tolist()) == list(range(300)) and not sample.any()
