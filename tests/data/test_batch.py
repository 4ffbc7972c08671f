"""Micro-batches against a loop over positions."""

import functools
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from megatron.config.io import DataConfig
from megatron.data.sampler import Separation, make_micro_batch
from megatron.errors import DataError

EOD = 3


def check_documents(batch, bounds):
    """Check cu_seqlens and the values on the host that follow from it."""
    if bounds is None:
        assert batch.cu_seqlens is None and batch.document_lengths is None
        return
    assert batch.cu_seqlens is not None and batch.document_lengths is not None
    assert batch.cu_seqlens.dtype == torch.int32 and batch.cu_seqlens.tolist() == bounds
    lengths = [end - start for start, end in pairwise(bounds)]
    assert batch.document_lengths.dtype == np.int64 and batch.document_lengths.tolist() == lengths


@given(
    tokens=hnp.arrays(
        np.int64, st.tuples(st.integers(1, 3), st.integers(2, 12)), elements=st.integers(0, 3)
    ),
    reset_position_ids=st.booleans(),
    reset_attention_mask=st.booleans(),
    eod_mask_loss=st.booleans(),
)
def test_against_loop(tokens, reset_position_ids, reset_attention_mask, eod_mask_loss):
    batch = make_micro_batch(
        tokens.copy(),
        separation=Separation(EOD, reset_position_ids, reset_attention_mask, eod_mask_loss),
        first_sample=17,
    )
    samples = tokens.shape[0]
    length = tokens.shape[1] - 1
    bounds = []
    for b in range(samples):
        position = 0
        starts = [0]
        for j in range(length):
            token = int(tokens[b, j])
            assert batch.tokens[b, j] == token
            assert batch.labels[b, j] == tokens[b, j + 1]
            assert batch.loss_mask[b, j] == (0.0 if eod_mask_loss and token == EOD else 1.0)
            assert batch.position_ids[b, j] == (position if reset_position_ids else j)
            position += 1
            if token == EOD:
                position = 0
                starts.append(j + 1)
        bounds += [b * length + start for start in starts if start < length]
    check_documents(batch, [*bounds, samples * length] if reset_attention_mask else None)
    assert batch.first_sample == 17
    for tensor in (batch.tokens, batch.labels, batch.position_ids):
        assert (
            tensor.dtype == torch.int64
            and tensor.is_contiguous()
            and tensor.shape == (samples, length)
        )
    assert batch.loss_mask.dtype == torch.float32


@st.composite
def packed(draw):
    """Draw s and, for each sample, the lengths of pieces that fill at most s + 1 tokens."""
    length = draw(st.integers(1, 12))
    samples = []
    for _ in range(draw(st.integers(1, 3))):
        filled = draw(st.integers(0, length + 1))
        inner = draw(st.sets(st.integers(1, filled - 1))) if filled > 1 else set()
        samples.append([end - start for start, end in pairwise(sorted(inner | {0, filled}))])
    return length, samples


@given(case=packed(), eod_mask_loss=st.booleans(), seed=st.integers(0, 9))
def test_pieces_against_loop(case, eod_mask_loss, seed):
    length, samples = case
    tokens = np.random.RandomState(seed).randint(0, 5, (len(samples), length + 1))
    segments = [np.array(lengths, np.int64) for lengths in samples]
    batch = make_micro_batch(
        tokens, segments=segments, separation=Separation(EOD, eod_mask_loss=eod_mask_loss)
    )
    bounds = []
    for b, lengths in enumerate(samples):
        # Piece of each of the s + 1 tokens and its position there; padding is in none and counts
        # from its own start.
        owner = [(piece, k) for piece, n in enumerate(lengths) for k in range(n)]
        owner += [(-1, k) for k in range(length + 1 - len(owner))]
        for j in range(length):
            piece, position = owner[j]
            assert batch.tokens[b, j] == tokens[b, j] and batch.labels[b, j] == tokens[b, j + 1]
            assert batch.position_ids[b, j] == position
            counts = piece == owner[j + 1][0] != -1 and not (eod_mask_loss and tokens[b, j] == EOD)
            assert batch.loss_mask[b, j] == float(counts)
            assert (batch.padding is not None and batch.padding[b, j]) == (piece == -1)
            if position == 0:
                bounds.append(b * length + j)
    check_documents(batch, [*bounds, len(samples) * length])
    filled = [sum(lengths) for lengths in samples]
    padded = make_micro_batch(tokens, lengths=filled)
    padding = np.arange(length) >= np.array(filled)[:, None]
    np.testing.assert_array_equal(padded.loss_mask == 0, padding)
    np.testing.assert_array_equal(padding & (padded.padding is not None), padding)
    assert padded.padding is None or np.array_equal(padded.padding, padding)


def test_refuses():
    tokens = np.array([[0, 1, 9]], np.int64)
    for options in ({}, {"segments": [np.array([3])]}):
        with pytest.raises(DataError, match="--eod-mask-loss"):
            make_micro_batch(tokens, separation=Separation(eod_mask_loss=True), **options)
    for lengths in ([2, 2], [4, -1]):
        with pytest.raises(DataError, match=r"sample 5: .*\[\d, -?\d\].* 3\b"):
            make_micro_batch(tokens, segments=[np.array(lengths)], first_sample=5)


def test_the_goldfish_loss_forgets_the_same_tokens_of_a_passage_wherever_it_is():
    """The hash is computed again with integers of any size."""
    k, h = 4, 3

    def scrambled(x):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ x >> shift) * factor % 2**64
        return x ^ x >> 31

    tokens = np.random.default_rng(1).integers(0, 1000, (3, 401))
    tokens[1, 100:160] = tokens[0, 7:67]
    batch = make_micro_batch(tokens, separation=Separation(goldfish=(k, h)))
    forgotten = (batch.loss_mask == 0).numpy()
    for row in range(3):
        for j in range(400):
            before = tokens[row, max(0, j - h + 1) : j + 1].tolist()
            value = 0
            for token in before:
                value = (value * 0x9E3779B97F4A7C15 + scrambled(token)) % 2**64
            expected = len(before) == h and scrambled(value) < 2**64 // k
            assert forgotten[row, j] == expected, (row, j)
    assert (forgotten[1, 102:160] == forgotten[0, 9:67]).all() and forgotten[0, 9:67].any()
    assert forgotten.mean() == pytest.approx(1 / k, abs=4 * (3 / 16 / forgotten.size) ** 0.5)
    of = functools.partial(Separation.of, DataConfig(goldfish_loss=True), None)
    assert of(training=True).goldfish == (50, 50) and of().goldfish is None
