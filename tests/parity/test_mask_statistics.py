"""Dropout masks on real tensor-parallel ranks: equal where the tensor is replicated, independent where it is cut."""
from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from megatron.config import Config
from megatron.model.gpt import build_chunks
from megatron.parallel.random import Site
from tests.helpers.groups import join
from tests.helpers.processes import run_processes
from tests.helpers.training import BASE, batches

P = 0.25
RANKS = 2
FIELDS = {
    **BASE, "hidden_dropout": P, "attention_dropout": P, "hidden_size": 64, "num_attention_heads": 8, "num_layers": 2,
    "micro_batch_size": 8,
}


def masks(rank, sequence_parallel):
    topology = join(tensor=RANKS)
    config = Config.create(
        **FIELDS, tensor_model_parallel_size=RANKS, sequence_parallel=sequence_parallel, world_size=RANKS
    )
    chunk = build_chunks(config, topology)["0"].train()
    (batch,) = batches(config, 0)
    call = chunk._call_context(batch)
    hidden = (chunk._embed(batch, call) != 0).numpy()
    # Equal scores and one-hot values: the output shows which attention weights were dropped.
    s, heads = 16, 8 // RANKS
    zeros = torch.zeros(s, 8, heads, s)
    values = torch.eye(s).view(s, 1, 1, s).expand(s, 8, heads, s)
    attention = chunk.layers[1].self_attention
    weights = attention._core(None, call.dropout.at(1, Site.ATTENTION, attention.sharded), zeros, zeros, values)
    return hidden, (weights[-1] != 0).numpy()  # the last position sees all others: [b, heads, s]


def both(rank):
    return [masks(rank, sequence_parallel) for sequence_parallel in (False, True)]


def correlation(a, b):
    return abs(np.corrcoef(a.ravel().astype(float), b.ravel().astype(float))[0, 1])


@pytest.mark.slow
def test_masks_of_tensor_ranks():
    for sequence_parallel, ranks in enumerate(zip(*run_processes(RANKS, both), strict=True)):
        for mask in itertools.chain(*ranks):
            error = (P * (1 - P) / mask.size) ** 0.5
            assert abs(mask.mean() - (1 - P)) < 5 * error
        for (hidden_a, attention_a), (hidden_b, attention_b) in itertools.combinations(ranks, 2):
            assert correlation(attention_a, attention_b) < 5 / attention_a.size**0.5
            if sequence_parallel:
                assert correlation(hidden_a, hidden_b) < 5 / hidden_a.size**0.5
            else:
                assert np.array_equal(hidden_a, hidden_b)
        heads = ranks[0][1]
        assert correlation(heads[:, 0], heads[:, 1]) < 5 / heads[:, 0].size ** 0.5
