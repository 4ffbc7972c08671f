"""Token and position embeddings whose gradients have an accumulator, against autograd's dense gradients."""

import pytest
import torch

from megatron.layers.context import LayerContext, normal
from megatron.layers.vocabulary import (
    WORD_EMBEDDINGS,
    PositionEmbedding,
    VocabParallelEmbedding,
)
from tests.helpers.gradient_accumulators import attach_accumulator
from tests.helpers.operators import OperatorWatch

S = 6
B = 3
H = 4
V = 20


def data():
    g = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, V, (B, S), generator=g)
    tokens[0, :3] = 7  # a row that occurs several times
    return tokens, torch.randn(S, B, H, generator=g)


def table(context, rows, padded):
    create = context.parameters.create
    return create(WORD_EMBEDDINGS, (rows, H), 0, normal(1.0), padded=padded)


def modules(context):
    words = VocabParallelEmbedding(context, table(context, V, 24))
    return words, PositionEmbedding(context, S, H, normal(1.0))


def run(words, places, tokens, target, position_ids):
    ((words(tokens) + places(S, position_ids)) * target).sum().backward()


RESTARTING = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 0, 0]])


@pytest.mark.parametrize("position_ids", [None, RESTARTING])
def test_rows_in_sinks_equal_dense_gradients(position_ids):
    tokens, target = data()
    dense = modules(LayerContext.single())
    run(*dense, tokens, target, position_ids)
    sunk = modules(LayerContext.single())
    accumulators = [attach_accumulator(m.weight) for m in sunk]
    for passes in (1, 2):
        run(*sunk, tokens, target, position_ids)
        for (accumulator, done), module, other in zip(accumulators, sunk, dense, strict=True):
            assert module.weight.grad is None and done == [module.weight] * passes
            # Sums of up to 9 numbers in fp32, perhaps in another order.
            torch.testing.assert_close(
                accumulator.total, passes * other.weight.grad, rtol=1e-5, atol=1e-6
            )


def test_nothing_of_the_tables_size_is_made():
    context = LayerContext.single()
    words = VocabParallelEmbedding(context, table(context, 1000, 1000))
    accumulator, _ = attach_accumulator(words.weight)
    tokens, target = data()
    known = [x.untyped_storage().data_ptr() for x in (words.weight, accumulator.total)]
    made = []

    def look(name, args, returned):
        made.extend(x.numel() for x in returned if x.untyped_storage().data_ptr() not in known)

    with OperatorWatch(look):
        (words(tokens) * target).sum().backward()
    assert max(made) == S * B * H
