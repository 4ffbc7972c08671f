"""Batches of documents, against a search through all positions."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from megatron.layers.positions import group_documents


def cut(draw):
    """Draw lengths of documents in 1 to 3 samples of equal length."""
    samples = draw(st.integers(1, 3))
    s = draw(st.integers(1, 60))
    starts = draw(st.sets(st.integers(0, samples * s - 1))) | {i * s for i in range(samples)}
    return np.diff(sorted(starts), append=samples * s), samples


@given(case=st.composite(cut)())
def test_each_document_is_read_in_order_and_put_back(case):
    lengths, samples = case
    groups = group_documents(lengths, samples)
    s = lengths.sum() // samples
    document = np.repeat(np.arange(len(lengths)), lengths).reshape(samples, s)
    rows = [(i, row) for i in range(s) for row in range(samples)]  # of [s, b]
    at = 0
    order = []
    for n, longest in groups.shapes:
        for _ in range(n):
            read = [rows[k] for k in groups.gather[at : at + longest].tolist()]
            number = document[read[0][1], read[0][0]]
            positions = [
                (i, row) for row in range(samples) for i in range(s) if document[row, i] == number
            ]
            assert read[: len(positions)] == positions
            back = [groups.scatter[rows.index(position)].item() for position in positions]
            assert back == list(range(at, at + len(positions)))
            assert longest <= max(1.25 * len(positions), 4), "filled up by more than a quarter"
            order.append(number)
            at += longest
    assert sorted(order) == list(range(len(lengths))) and at == len(groups.gather)
    assert all(n > 0 for n, _ in groups.shapes)


def test_few_batches_for_many_documents():
    lengths = np.arange(1, 2049)
    shapes = group_documents(lengths, 1).shapes
    assert len(shapes) <= 28
    assert group_documents(np.full(500, 7), 5).shapes == ((500, 7),)
