"""Makes experts from the MLPs of a dense checkpoint (--moe-use-upcycling).

He et al., arXiv 2410.07524: each expert begins as the MLP of its layer or, if experts are G times
narrower, as one of G slices of the MLP. G consecutive experts begin with the same row of the
router's matrix (expert_router.py), so that a token chooses all slices. The model then computes the
same results as the dense one if the weights of the chosen experts add up to a constant
(scale_outputs).
"""

from __future__ import annotations

import dataclasses

from megatron.checkpoint.settings import EXPERTS
from megatron.checkpoint.tensors import LocalShards, Tensors
from megatron.config import Config
from megatron.config.model import ModelConfig
from megatron.config.option import options_of

Pairs = list[tuple[str, LocalShards]]
"""Names in a checkpoint, and the shards filled from them; a name may occur several times."""


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


def from_dense(tensors: Tensors, model: ModelConfig) -> Pairs:
    """Return the tensors of the dense model that fill `tensors`; routers are not filled."""
    pairs: Pairs = []
    granularity = model.upcycling_granularity
    for name, shards in tensors.items():
        source = dense_name(name)
        if source == name:
            pairs.append((name, shards))
        if source == name or source is None:
            continue
        # each expert's views, at their offset in the dense MLP
        shape = list(shards.shape[1:])
        up = "dense_h_to_4h" in name
        bias = name.endswith(".bias")
        cut = len(shape) - (2 if up and not bias else 1)
        divided = up or not bias
        width = shape[cut] if divided else 0
        shape[cut] += width * (granularity - 1)
        for (first, *rest), view in shards.views.items():
            for expert, values in enumerate(view, first):
                offset = list(rest)
                offset[cut] += expert % granularity * width
                pairs.append((source, LocalShards(tuple(shape), {tuple(offset): values})))
    return pairs


def scale_outputs(tensors: Tensors, model: ModelConfig) -> None:
    """Scale the experts' output matrices and biases so that their outputs add up to the MLP's.

    The weights of a token's experts add up to moe_router_topk_scaling_factor (1 if unset) or, for a
    softmax over all experts, to about this factor times the fraction of experts that are chosen.
    """
    assert model.num_experts is not None, "the model has experts"
    total = model.moe_router_topk_scaling_factor or 1.0
    if model.moe_router_pre_softmax:
        total *= model.moe_router_topk / model.num_experts
    for name, shards in tensors.items():
        if ".mlp.experts.dense_4h_to_h." in name:
            slices = 1 if name.endswith(".bias") else model.upcycling_granularity
            for view in shards.views.values():
                if slices != total:
                    view.detach().mul_(slices / total)
