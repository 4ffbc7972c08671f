"""Memory of embeddings; their values and gradients: tests/checkpoint/test_float64.py, tests/parity."""

import torch

from megatron.layers.context import LayerContext, normal
from megatron.layers.vocabulary import WORD_EMBEDDINGS, VocabParallelEmbedding
from tests.helpers.gradient_accumulators import attach_accumulator
from tests.helpers.operators import OperatorWatch

S, B, H = 6, 3, 4


def test_nothing_of_the_tables_size_is_made():
    context = LayerContext.single()
    table = context.parameters.create(WORD_EMBEDDINGS, (1000, H), 0, normal(1.0))
    words = VocabParallelEmbedding(context, table)
    accumulator, _ = attach_accumulator(words.weight)
    known = [x.untyped_storage().data_ptr() for x in (words.weight, accumulator.total)]
    made = []

    def look(name, args, returned):
        made.extend(x.numel() for x in returned if x.untyped_storage().data_ptr() not in known)

    with OperatorWatch(look):
        words(torch.arange(S * B).view(B, S)).square().sum().backward()
    assert max(made) == S * B * H
