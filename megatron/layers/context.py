"""What layers are given: at construction a LayerContext, at each call a CallContext."""
from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron.kernels.choose import NONE, Fusions
from megatron.layers.documents import Documents
from megatron.layers.masks import Alibi, alibi_slopes
from megatron.layers.parameters import ParameterFactory
from megatron.layers.rotary import RotaryEmbedding
from megatron.parallel.random import WHOLE, DropoutKey, Place, Site
from megatron.parallel.sink import WeightGradients
from megatron.parallel.topology import Group


@dataclass(frozen=True)
class LayerContext:
    """How a layer is distributed.

    tensor             the tensor-parallel group
    parameters         makes this rank's shard of each parameter
    sequence_parallel  activations between the tensor-parallel regions are [s/tp, b, h]
    overlap            the input gradient of a column-parallel layer is reduced behind its weight gradient
    chunks             pieces into which products are cut so that the message of one travels behind the next; 1: uncut
    weight_gradients   the queue that zero-bubble schedules use
    fusions            which operators go through the fused kernels; none unless somebody chose them
    alibis, rotaries   what alibi() and rotary() have made
    """

    tensor: Group
    parameters: ParameterFactory
    sequence_parallel: bool = False
    overlap: bool = True
    chunks: int = 1
    weight_gradients: WeightGradients = field(default_factory=WeightGradients)
    fusions: Fusions = NONE
    alibis: dict[int, Alibi] = field(default_factory=dict)
    rotaries: dict[tuple[int, float], RotaryEmbedding] = field(default_factory=dict)

    def alibi(self, heads: int) -> Alibi:
        """ALiBi for this rank's part of `heads` heads: one object for all layers."""
        if heads not in self.alibis:
            slopes = alibi_slopes(heads).chunk(self.tensor.size)[self.tensor.rank]
            self.alibis[heads] = Alibi(slopes.to(self.parameters.device))
        return self.alibis[heads]

    def rotary(self, dimension: int, base: float) -> RotaryEmbedding:
        """The rotary embedding of this many entries of a head: one object for all layers."""
        key = dimension, base
        if key not in self.rotaries:
            self.rotaries[key] = RotaryEmbedding(dimension, base, self.fusions.rotary)
        return self.rotaries[key]

    @classmethod
    def single(cls, seed: int = 1234, device: str | torch.device = "cpu") -> LayerContext:
        """One process, no parallelism."""
        return cls(Group((0,), 0), ParameterFactory(seed, 0, 1, torch.device(device)))


@dataclass(frozen=True)
class CallContext:
    """What one forward pass over a micro-batch depends on beside its input.

    position_ids   [b, s] when positions restart inside a sequence, else None (0 ... s-1)
    documents      when attention must not cross documents, else None
    dropout        the key of this micro-batch's masks; None switches dropout off
    """

    position_ids: torch.Tensor | None = None
    documents: Documents | None = None
    dropout: DropoutKey | None = None

    def hidden_mask(self, x: torch.Tensor, layer: int, site: Site, context: LayerContext) -> tuple[int | None, Place]:
        """Seed and place of the mask of x [s(/tp), b, h], the residual stream's; no seed where dropout is off."""
        if self.dropout is None:
            return None, WHOLE
        part = (context.tensor.rank, context.tensor.size) if context.sequence_parallel else (0, 1)
        return self.dropout.at(layer, site), self.dropout.hidden(x, *part)
