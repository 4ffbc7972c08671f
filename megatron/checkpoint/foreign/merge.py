"""Tensor-parallel parts of a parameter into the whole one, in our order of rows."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.checkpoint.foreign.names import OUTPUT_LAYER, WORD_EMBEDDINGS
from megatron.errors import CheckpointError


@dataclass(frozen=True)
class Rules:
    """How parts are laid out.

    version      Megatron's checkpoint_version: the order of the rows of query_key_value
    head_dim     width of an attention head
    vocab_size   entries without padding
    swiglu       dense_h_to_4h holds gate and value
    """

    version: float
    head_dim: int
    vocab_size: int
    swiglu: bool


def merge(name: str, parts: Sequence[torch.Tensor], rules: Rules) -> torch.Tensor:
    """The global tensor of parameter `name` (ours) from its parts, in order of tensor ranks.

    Of what every tensor rank holds whole, the first is taken. Raises CheckpointError when the parts do not fit.
    """
    try:
        return _merged(name, parts, rules)
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise CheckpointError(
            f"the parts of {name} do not fit together ({shapes}): {str(error).splitlines()[0]}. Is the number of "
            f"tensor-parallel ranks {len(parts)}?"
        ) from error


def is_replicated(name: str) -> bool:
    """Whether every tensor rank holds the whole parameter."""
    return not (
        name in (WORD_EMBEDDINGS, OUTPUT_LAYER)
        or "query_key_value." in name
        or "dense_h_to_4h." in name
        or name.endswith(("self_attention.dense.weight", "dense_4h_to_h.weight"))
    )


def _merged(name: str, parts: Sequence[torch.Tensor], rules: Rules) -> torch.Tensor:
    if is_replicated(name):
        return parts[0]
    if "query_key_value." in name:
        return _joined([_ordered(part, rules) for part in parts], 0)
    if "dense_h_to_4h." in name:
        # Each rank has [gate; value] of its own columns; here the two are matrices side by side.
        row = parts[0].shape[-1:] if name.endswith(".weight") else ()
        return _joined([part.reshape(2, -1, *row) for part in parts], 1) if rules.swiglu else _joined(parts, 0)
    if name in (WORD_EMBEDDINGS, OUTPUT_LAYER):
        whole = _joined(parts, 0)
        if len(whole) < rules.vocab_size:
            raise CheckpointError(
                f"{name} has {len(whole)} rows, fewer than the vocabulary of {rules.vocab_size}: correct --vocab-size"
            )
        return whole[: rules.vocab_size]
    return _joined(parts, 1)


def _ordered(part: torch.Tensor, rules: Rules) -> torch.Tensor:
    """Rows of one rank's query_key_value in the order [head][query, key, value][head dimension] of version 2.0.

    Version 0 has [query, key, value][head][head dimension], version 1.0 [head][head dimension][query, key, value].
    """
    if rules.version >= 2.0:
        return part
    rest = part.shape[1:]
    if rules.version == 0:
        return part.view(3, -1, rules.head_dim, *rest).transpose(0, 1).reshape(part.shape)
    return part.view(-1, rules.head_dim, 3, *rest).transpose(1, 2).reshape(part.shape)


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)
