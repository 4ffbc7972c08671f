"""The ledger against a count by hand of every sample's source."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.data.gpt_dataset import BlendedDataset, GPTDataset, MockDataset
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.ledger import Consumed, Ledger, is_consumed
from megatron.data.order import SampleOrder, sample_order
from megatron.data.packed_dataset import PackedDataset
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


def test_the_blend_changes_in_between(blend, tmp_path):
    """The blend changes, and nothing is lost or counted twice.

    'a' stays, 'b' goes, and 'c' comes with more tokens to an epoch.
    """
    before = Ledger(blend, SampleOrder(60), 30).record()
    a, b = (dataset.name for dataset in blend.sources)
    new = BlendedDataset([blend.sources[0], source(tmp_path, "c", 500, 3, 31)], [1, 1], 60)
    after = Ledger(new, SampleOrder(60), 30, before)
    assert after.record()[b] == before[b] and after.counts[str(tmp_path / "c")] == Consumed()
    after.advance(50)
    assert after.record()[b] == before[b]
    assert after.counts[a].samples == before[a]["samples"] + 10
    assert after.counts[str(tmp_path / "c")] == Consumed(10, 80, pytest.approx(80 / 500))
    assert after.counts[a].epochs == pytest.approx(before[a]["epochs"] + 80 / 100)


def test_packed_samples_count_what_is_predicted(tmp_path):
    """Every token but the first of a piece is predicted once, and padding never.

    An epoch contains every sample once.
    """
    random = np.random.RandomState(5)
    sizes = random.randint(1, 30, 40).tolist()
    indexed = IndexedDataset(write_documents(tmp_path / "x", [[7] * size for size in sizes]))
    packed = PackedDataset(indexed, request_for(indexed, 100, SEQ_LENGTH))
    counted = Ledger(packed, SampleOrder(len(packed)))
    by_hand = 0
    epochs = []
    for i in range(len(packed)):
        epochs += [(i, epoch) for _, epoch in counted.advance(i + 1)]
        by_hand += int((packed[i] == 7).sum()) - len(packed.segments(i))
        assert counted.counts[packed.name].tokens == by_hand
    assert epochs == [
        (packed.num_bins * k, k + 1) for k in range(1, len(packed) // packed.num_bins)
    ]
    assert counted.counts[packed.name].epochs == pytest.approx(len(packed) / packed.num_bins)


def test_the_ledger_counts_what_is_left_out_and_keeps_it_over_a_roll_back():
    datasets = [MockDataset("train", 80, 4, 50, seed=2) for _ in range(2)]
    for dataset, name in zip(datasets, "ab", strict=True):
        dataset.name = name
    blend = BlendedDataset(datasets, [1, 3], 80)
    ledger = Ledger(blend, sample_order("single", 80), 48)

    def samples_of(positions):
        located = blend.by_source(np.array(positions, np.int64))
        return {source.name: len(numbers) for source, numbers in located}

    at_16 = Ledger(blend, sample_order("single", 80), 16).record()
    ranges = [(40, 48)]
    back = ledger.rolled_back(ranges, 16, at_16, range(40, 48))
    assert {name: count.left_out for name, count in back.counts.items()} == samples_of(
        range(40, 48)
    )
    back.advance(64)
    expected = {
        name: samples_of(range(40))[name] + samples_of(range(48, 72))[name] for name in at_16
    }
    assert {name: count.samples for name, count in back.counts.items()} == expected
    rolled = back.rolled_back([*ranges, (60, 64)], 16, at_16, range(52, 56))
    assert sum(count.left_out for count in rolled.counts.values()) == 12
    record = rolled.record()
    assert all(map(is_consumed, record.values())) and not is_consumed({**at_16["a"], "left": 1})
    carried = Ledger(blend, sample_order("single", 80, [*ranges, (60, 64)]), 16, record)
    assert carried.counts == {name: Consumed(**fields) for name, fields in record.items()}
