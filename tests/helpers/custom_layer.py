"""User-defined layer with every kind of parameter, whose partial gradients a test declares."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from megatron.layers.context import CallContext, LayerContext, constant, normal
from megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron.layers.transformer import Norm
from megatron.parallel.sharding import attach, sharding_of


class Heads(torch.nn.Module):
    """Feed-forward layer of heads, each of which is normalized separately."""

    def __init__(self, context: LayerContext, name: str, hidden: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.norm = Norm(context, f"{name}.norm", hidden, "layernorm", 1e-5)
        self.up = ColumnParallelLinear(
            context, f"{name}.up", (hidden, hidden), normal(0.1), bias=True
        )
        self.head_norm = Norm(context, f"{name}.head_norm", head_dim, "rmsnorm", 1e-5)
        # None: not sharded
        self.gain = context.parameters.create(f"{name}.gain", (head_dim,), None, constant(1.0))
        self.down = RowParallelLinear(
            context, f"{name}.down", (hidden, hidden), normal(0.1), bias=True
        )

    def forward(self, x: torch.Tensor, call: CallContext) -> torch.Tensor:
        heads = self.up(self.norm(x))  # [s, b, h/tp]: all tokens, this rank's heads
        heads = heads.unflatten(-1, (-1, self.head_dim))  # [s, b, heads/tp, head_dim]
        out, bias = self.down((torch.tanh(self.head_norm(heads)) * self.gain).flatten(-2))
        return x + out + bias  # [s(/tp), b, h]


def put(patch: Any, where: Any, declared: Mapping[str, bool], forward: Any = None) -> None:
    """Make `where`.build_chunks put the layer in place of the last layer of each chunk.

    declared  {end of a parameter's name: its partial_gradient}
    forward   replaces the layer's own, if given
    """
    plain, layer = (
        where.build_chunks,
        Heads if forward is None else type("Heads", (Heads,), {"forward": forward}),
    )

    def build(config: Any, topology: Any, context: Any = None) -> torch.nn.ModuleDict:
        chunks = plain(config, topology, context)
        for stage, chunk in chunks.items():
            model = chunk.config.model
            chunk.layers[-1] = layer(
                chunk.context, f"heads.{stage}", model.hidden_size, model.kv_channels
            )
        for p in chunks.parameters():
            sharding = sharding_of(p)
            for end, partial in declared.items():
                if sharding.name.startswith("heads.") and sharding.name.endswith(end):
                    attach(
                        p,
                        dataclasses.replace(sharding, partial_gradient=partial),
                        topology.tensor.size,
                    )
        return chunks

    patch.setattr(where, "build_chunks", build)
