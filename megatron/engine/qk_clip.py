"""QK-clip: after a step, shrinks query and key weights of heads with large attention logits.

Kimi Team, arXiv 2507.20534, section 2.1. A head whose largest logit S exceeds the threshold t gets
eta = t / S: its queries are multiplied by eta^alpha, its keys by eta^(1 - alpha), which would make
that logit t. If several heads share a key, the key gets the smallest of their factors, and each
query gets the remaining factor of its own eta. Thus no head's logits ever change because of another
head.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.config.training import OptimizerConfig
from megatron.layers.attention import SelfAttention
from megatron.parallel.collectives import all_reduce
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Topology


class ParameterSlice(NamedTuple):
    """Elements of a parameter, starting at `first`, that this rank's optimizer holds.

    master   their master weights
    weights  the same elements of the weights that forward and backward passes use
    """

    parameter: nn.Parameter
    first: int
    master: Tensor
    weights: Tensor


class QKClip:
    """QK-clip for the attention layers in `chunks` that record `core.largest`.

    slices  this rank's slices of all parameters
    """

    def __init__(
        self,
        settings: OptimizerConfig,
        topology: Topology,
        chunks: nn.Module,
        slices: Iterable[ParameterSlice],
    ) -> None:
        self._settings = settings
        self._topology = topology
        layers = [m for m in chunks.modules() if isinstance(m, SelfAttention)]
        self._layers = [(m, x) for m in layers if (x := m.core.largest) is not None]
        self._slices: dict[nn.Parameter, list[ParameterSlice]] = {}
        for owned in slices:
            self._slices.setdefault(owned.parameter, []).append(owned)

    @torch.no_grad()
    def apply(self, counts: Tensor) -> None:
        """Clip according to the logits of a step; all ranks call this.

        counts  whether the step counts; a boolean scalar on the device

        The master weights are scaled, and their rounded values written to this rank's shard of the
        weights that forward and backward passes use.
        """
        if not self._layers:
            return
        largest = torch.stack([logits for _, logits in self._layers])  # [layers, heads/tp]
        all_reduce(largest, self._topology.data, dist.ReduceOp.MAX)
        eta = (self._settings.qk_clip_threshold / largest).clamp(max=1.0)
        eta = torch.where(counts & eta.isfinite() & (eta > 0.0), eta, 1.0)
        first, _ = self._layers[0]
        groups = first.groups
        smallest = eta.unflatten(1, (groups, -1)).amin(2)  # [layers, groups/tp]
        shared = first.query_key_value.weight_shared
        if shared is not None:
            # every `copies` neighbouring tensor ranks share a key
            tensor = self._topology.tensor
            copies = sharding_of(shared).copies
            table = smallest.new_ones(tensor.size // copies, *smallest.shape)
            table[tensor.rank // copies] = smallest
            smallest = all_reduce(table, tensor, dist.ReduceOp.MIN)[tensor.rank // copies]
        of_keys = smallest ** (1.0 - self._settings.qk_clip_alpha)
        of_queries = eta.unflatten(1, (groups, -1)) / of_keys.unsqueeze(2)
        if first.gated:
            of_queries = torch.stack((of_queries, torch.ones_like(of_queries)), -1).flatten(2)
        for (layer, layer_largest), q, k in zip(self._layers, of_queries, of_keys, strict=True):
            projection = layer.query_key_value
            ones = torch.ones_like(k).unsqueeze(1)
            both = [k.unsqueeze(1), ones]  # keys and values
            fused = [q] if shared is not None else [q, *both]
            for p in (projection.weight, projection.bias):
                self._scale(p, torch.cat(fused, dim=1), layer.head_dim)
            for p in (projection.weight_shared, projection.bias_shared):
                self._scale(p, torch.cat(both, dim=1), layer.head_dim)
            layer_largest.zero_()

    def _scale(self, p: nn.Parameter | None, heads: Tensor, head_dim: int) -> None:
        """Multiply each head's rows of a parameter by the head's factor."""
        for owned in self._slices.get(p, ()) if p is not None else ():
            factors = heads.flatten().to(owned.master.device).repeat_interleave(head_dim)  # of rows
            columns = owned.parameter.numel() // len(factors)
            end = owned.first + len(owned.master)
            rows = slice(owned.first // columns, -(-end // columns))
            start = owned.first - rows.start * columns
            of_all = factors[rows].repeat_interleave(columns)
            owned.master.mul_(of_all[start : start + len(owned.master)])
            if owned.weights.dtype != owned.master.dtype:
                owned.weights.copy_(owned.master)
