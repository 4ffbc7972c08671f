"""The ledger against a count by hand of every sample's source."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.gpt_dataset import BlendedDataset, GPTDataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.ledger import Consumed, Ledger
from megatron.data.order import sample_order
from tests.data.implementations import request_for
from tests.helpers.indexed import write_documents

SEQ_LENGTH = 8


def source(folder, name, tokens, token, num_samples):
    """Return documents of 10 tokens, all with the same id."""
    indexed = IndexedDataset(write_documents(folder / name, [[token] * 10] * (tokens // 10)))
    return GPTDataset(indexed, request_for(indexed, num_samples, SEQ_LENGTH))


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    """Return a blend of 60 samples: a third of 'a' with 100 tokens, two thirds of 'b' with 300."""
    folder = tmp_path_factory.mktemp("ledger")
    return BlendedDataset(
        [source(folder, "a", 100, 1, 21), source(folder, "b", 300, 2, 41)], [1, 2], 60
    )


def by_hand(blend, order, consumed):
    return Counter(int(blend[i][0]) for i in order.indices(np.arange(consumed)).tolist())


STEPS = st.lists(st.tuples(st.integers(0, 15), st.booleans()), max_size=8)


@given(kind=st.sampled_from(["single", "cyclic"]), steps=STEPS)
def test_counts(blend, kind, steps):
    """Counts are the same whether the run continues or restarts from its record."""
    order = sample_order(kind, len(blend))
    consumed = 0
    counted = Ledger(blend, order)
    for step, anew in steps:
        consumed = min(consumed + step, len(blend) if kind == "single" else 10**9)
        counted.advance(consumed)
        counted = Ledger(blend, order, consumed, counted.record()) if anew else counted
    sample_counts = by_hand(blend, order, consumed)
    for dataset, token, size in ((blend.sources[0], 1, 100), (blend.sources[1], 2, 300)):
        tokens = sample_counts[token] * SEQ_LENGTH
        assert counted.counts[dataset.name] == Consumed(
            sample_counts[token], tokens, pytest.approx(tokens / size)
        )
