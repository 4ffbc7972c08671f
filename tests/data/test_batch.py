"""Micro-batches against a loop over positions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megatron.data.batch import make_micro_batch
from megatron.errors import DataError

EOD = 3


@given(
    tokens=hnp.arrays(np.int64, st.tuples(st.integers(1, 3), st.integers(2, 12)), elements=st.integers(0, 3)),
    reset_position_ids=st.booleans(),
    reset_attention_mask=st.booleans(),
    eod_mask_loss=st.booleans(),
)
def test_against_loop(
    tokens: np.ndarray, reset_position_ids: bool, reset_attention_mask: bool, eod_mask_loss: bool
) -> None:
    batch = make_micro_batch(
        tokens.copy(),
        eod=EOD,
        reset_position_ids=reset_position_ids,
        reset_attention_mask=reset_attention_mask,
        eod_mask_loss=eod_mask_loss,
        first_sample=17,
        vocab_size=4,
    )
    samples, length = tokens.shape[0], tokens.shape[1] - 1
    for b in range(samples):
        position = document = 0
        for j in range(length):
            token = int(tokens[b, j])
            assert batch.tokens[b, j] == token
            assert batch.labels[b, j] == tokens[b, j + 1]
            assert batch.loss_mask[b, j] == (0.0 if eod_mask_loss and token == EOD else 1.0)
            assert batch.position_ids[b, j] == (position if reset_position_ids else j)
            if reset_attention_mask:
                assert batch.document_ids is not None and batch.document_ids[b, j] == document
            position += 1
            if token == EOD:
                position, document = 0, document + 1
    assert (batch.document_ids is None) == (not reset_attention_mask)
    assert batch.first_sample == 17
    for tensor in (batch.tokens, batch.labels, batch.position_ids):
        assert tensor.dtype == torch.int64 and tensor.is_contiguous() and tensor.shape == (samples, length)
    assert batch.loss_mask.dtype == torch.float32


@pytest.mark.parametrize("samples", [1, 2])
def test_does_not_share_memory_with_samples(samples: int) -> None:
    tokens = np.arange(4 * samples, dtype=np.int64).reshape(samples, 4)
    batch = make_micro_batch(tokens)
    tokens[:] = 0
    assert batch.tokens[0].tolist() == [0, 1, 2] and batch.labels[0].tolist() == [1, 2, 3]
    batch.tokens.zero_()
    assert batch.labels[0].tolist() == [1, 2, 3]


def test_refuses() -> None:
    tokens = np.array([[0, 1, 9]], np.int64)
    with pytest.raises(DataError, match=r"sample 5 .*ids 0\.\.9, but the vocabulary has 9"):
        make_micro_batch(tokens, vocab_size=9, first_sample=5)
    with pytest.raises(DataError, match="end-of-document"):
        make_micro_batch(tokens, eod_mask_loss=True)
