"""Experts from the MLPs of a dense checkpoint (--moe-use-upcycling).

He et al., arXiv 2410.07524: each expert begins with its layer's MLP or, of experts that are G times
narrower, with one of its G parts; G such experts in a row share the row of the router with which
they begin (Router), so that a token chooses all parts. Where the weights of the chosen experts add
up to one, the model then computes what the dense one did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from megatron.checkpoint.settings import EXPERTS
from megatron.checkpoint.tensors import Shards
from megatron.config import Config
from megatron.config.model import ModelConfig
from megatron.config.option import options_of

Pairs = list[tuple[str, Shards]]
"""Names in a checkpoint, and what is filled from them; a name may occur several times."""


def dense(config: Config) -> Config:
    """Return the configuration without experts."""
    unset = {o.name: o.default for o in options_of(ModelConfig) if o.name in EXPERTS}
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **unset))


def dense_name(name: str) -> str | None:
    """Return the name of a parameter's source in the dense model; None for a router.

    >>> dense_name("layers.0.mlp.experts.dense_h_to_4h.weight")
    'layers.0.mlp.dense_h_to_4h.weight'
    """
    return None if ".mlp.router." in name else name.replace(".mlp.experts.", ".mlp.")


def from_dense(tensors: Mapping[str, Shards], model: ModelConfig) -> Pairs:
    """Return the tensors of the dense model that fill `tensors`; routers stay as they are."""
    pairs: Pairs = []
    for name, shards in tensors.items():
        source = dense_name(name)
        if source == name:
            pairs.append((name, shards))
        elif source is not None:
            pairs += [
                (source, one) for one in _by_expert(name, shards, model.upcycling_granularity)
            ]
    return pairs


def _by_expert(name: str, shards: Shards, parts: int) -> list[Shards]:
    """Return each expert's pieces of a tensor, at their place in the dense MLP."""
    shape = list(shards.shape[1:])
    up = "dense_h_to_4h" in name
    bias = name.endswith(".bias")
    cut = None if bias and not up else len(shape) - (2 if up and not bias else 1)
    found = []
    width = 0 if cut is None else shape[cut]
    if cut is not None:
        shape[cut] *= parts
    for (first, *rest), view in shards.pieces.items():
        for expert, values in enumerate(view, first):
            offset = list(rest)
            if cut is not None:
                offset[cut] += expert % parts * width
            found.append(Shards(tuple(shape), {tuple(offset): values}))
    return found


def scale_outputs(tensors: Mapping[str, Shards], model: ModelConfig) -> None:
    """Multiply the experts' output matrices and biases, so that the sum over those of a token is whole.

    The weights of its experts add up to one, before their factor; those of a softmax over all
    experts nearly to the share of the chosen ones.
    """
    assert model.num_experts is not None, "the model has experts"
    total = model.moe_router_topk_scaling_factor or 1.0
    if model.moe_router_pre_softmax:
        total *= model.moe_router_topk / model.num_experts
    for name, shards in tensors.items():
        if ".mlp.experts.dense_4h_to_h." in name:
            parts = 1 if name.endswith(".bias") else model.upcycling_granularity
            for view in shards.pieces.values():
                if parts != total:
                    view.detach().mul_(parts / total)
