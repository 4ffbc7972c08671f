"""Token and position embeddings; the token table is cut over the tensor-parallel group along the vocabulary."""
from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.layers.context import LayerContext
from megatron.layers.parameters import Fill
from megatron.parallel.collectives import split_first
from megatron.parallel.mappings import reduce_from_tensor_region

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
POSITION_EMBEDDINGS = "embedding.position_embeddings.weight"


def word_embedding_weight(
    context: LayerContext, vocab_size: int, padded: int, hidden: int, fill: Fill, *, name: str = WORD_EMBEDDINGS,
    tied: bool = False,
) -> torch.nn.Parameter:
    """The table [vocab_size, hidden], padded to `padded` rows and cut over the ranks; padding rows are zero."""
    return context.parameters.create(name, (vocab_size, hidden), 0, fill, padded=padded, tied=tied)


class VocabParallelEmbedding(torch.nn.Module):
    """tokens [b, s] -> [s(/tp), b, h]. A rank looks up the tokens of its rows; the sum over the ranks has them all."""

    def __init__(self, context: LayerContext, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.context, self.weight = context, weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        tokens = tokens.t()  # [s, b]
        if self.context.tensor.size == 1:
            return F.embedding(tokens, self.weight)
        first = self.context.tensor.rank * self.weight.shape[0]
        local = tokens - first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        found = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)  # [s, b, h], zero where another rank has the row
        return reduce_from_tensor_region(found, self.context.tensor, self.context.sequence_parallel)


class PositionEmbedding(torch.nn.Module):
    """Learned positions: [s(/tp), 1 or b, h], to be added to the token embeddings."""

    def __init__(self, context: LayerContext, positions: int, hidden: int, fill: Fill) -> None:
        super().__init__()
        self.context = context
        self.weight = context.parameters.create(
            POSITION_EMBEDDINGS, (positions, hidden), None, fill, partial_gradient=context.sequence_parallel
        )

    def forward(self, sequence: int, position_ids: torch.Tensor | None) -> torch.Tensor:
        if position_ids is None:
            position_ids = torch.arange(sequence, device=self.weight.device).unsqueeze(0)
        ids = position_ids.t()  # [s, b]
        if self.context.sequence_parallel:
            ids = split_first(ids, self.context.tensor)
        return F.embedding(ids, self.weight)
