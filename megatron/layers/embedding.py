"""Token and position embeddings; the token table is cut over the tensor-parallel group along the
vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kernels.ops.embedding import add_rows_, reference_
from megatron.layers.context import Fill, LayerContext
from megatron.parallel.collectives import reduce_from_tensor_region, split_first
from megatron.parallel.sink import sink_of

WORD_EMBEDDINGS = "embedding.word_embeddings.weight"
POSITION_EMBEDDINGS = "embedding.position_embeddings.weight"


def word_embedding_weight(
    context: LayerContext,
    vocab_size: int,
    padded: int,
    hidden: int,
    fill: Fill,
    *,
    name: str = WORD_EMBEDDINGS,
    tied: bool = False,
) -> torch.nn.Parameter:
    """Make the table [vocab_size, hidden], padded to `padded` rows and cut over the ranks; padding
    rows are zero.
    """
    return context.parameters.create(name, (vocab_size, hidden), 0, fill, padded=padded, tied=tied)


class _LookUp(torch.autograd.Function):
    """Look-up in a table whose gradient has a sink: only gradients of the rows in use are added to
    it.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rows: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(rows)
        return F.embedding(rows, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        (rows,) = ctx.saved_tensors
        sink = sink_of(ctx.weight)
        assert sink is not None, (
            "the sink of a table was removed between a forward and its backward pass"
        )
        # In a fixed order: a resumed run must repeat the bits of one that was not interrupted.
        total = sink.complete()
        faster = total.device.type == "cpu" and total.dtype == torch.float32  # torch's index_add_
        add = reference_ if faster else add_rows_
        add(total, rows.reshape(-1), gradient.reshape(-1, gradient.shape[-1]))
        sink.done()
        return None, None


def look_up(weight: torch.nn.Parameter, rows: Tensor) -> Tensor:
    """Return rows of the weight [n, h] for ids [..]: [.., h]."""
    return F.embedding(rows, weight) if sink_of(weight) is None else _LookUp.apply(weight, rows)


class VocabParallelEmbedding(torch.nn.Module):
    """Token embedding: [b, s] -> [s(/tp), b, h]. A rank looks up the tokens of its rows; their sum
    has all.
    """

    def __init__(self, context: LayerContext, weight: torch.nn.Parameter) -> None:
        super().__init__()
        self.context, self.weight = context, weight

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.t()  # [s, b]
        if self.context.tensor.size == 1:
            return look_up(self.weight, tokens)
        first = self.context.tensor.rank * self.weight.shape[0]
        local = tokens - first
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        found = look_up(self.weight, local.masked_fill(elsewhere, 0))
        # [s, b, h], zero where another rank has the row
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return reduce_from_tensor_region(found, self.context.tensor, self.context.sequence_parallel)


class PositionEmbedding(torch.nn.Module):
    """Learned position embedding: [s(/tp), 1 or b, h], to be added to the token embeddings."""

    def __init__(self, context: LayerContext, positions: int, hidden: int, fill: Fill) -> None:
        super().__init__()
        self.context = context
        self.weight = context.parameters.create(
            POSITION_EMBEDDINGS, (positions, hidden), None, fill
        )

    def forward(self, sequence: int, position_ids: Tensor | None) -> Tensor:
        if position_ids is None:
            position_ids = torch.arange(sequence, device=self.weight.device).unsqueeze(0)
        ids = position_ids.t()  # [s, b]
        if self.context.sequence_parallel:
            ids = split_first(ids, self.context.tensor)
        return look_up(self.weight, ids)
