"""A layer of experts in place of an MLP: router, balancing losses, experts and shared expert.

A router scores all experts for each token; the token passes through the best k, and their weighted
outputs are summed (Shazeer et al., arXiv 1701.06538). Nothing is padded: an expert processes
exactly the rows it receives. With expert parallelism, a layer's experts are distributed over ranks
of the stage. Expert tensor parallelism divides the FFN size of each expert, as in an MLP.

A token's weights and choices are the same on any layout.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import ModelConfig
from megatron.errors import ConfigError
from megatron.kernels.choose import fuses_activation
from megatron.kernels.cost import recomputed
from megatron.kernels.host_copy import HostCopy
from megatron.kernels.library import recompute_later
from megatron.kernels.ops.experts import RowCounts, grouped_product
from megatron.layers.context import CallContext, Fill, LayerContext, constant, draw, weight_fills
from megatron.layers.expert_dispatch import (
    KERNELS,
    REFERENCES,
    Dispatch,
    Numbers,
    exchange_numbers,
    read_numbers,
    sorted_choices,
)
from megatron.layers.expert_region import ExpertRegion
from megatron.layers.expert_router import Router, Scores, shared_by
from megatron.layers.mlp import MLP, activation_of
from megatron.parallel.autograd import Context, Node
from megatron.parallel.gradient_accumulator import wide, within_backward
from megatron.parallel.sharding import shard


class _ExpertWeights(nn.Module):
    """Matrices [E, *shape] of this rank's experts; `dim` of `shape` is split over `tensor` ranks.

    experts  number of experts in the layer, on all ranks
    bias     whether there are biases, [E, *shape without the last dimension]
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        experts: int,
        shape: tuple[int, ...],
        dim: int,
        fill: Fill,
        bias: bool,
    ) -> None:
        super().__init__()
        if context.adapter(name) is not None:
            raise ConfigError(
                f"--lora-target matches {name}, but experts have no adapters: choose patterns that "
                "do not match it"
            )
        self.context = context
        self.tensor = ExpertRegion(context).experts
        self.weight = self._make(f"{name}.weight", experts, shape, dim, fill)
        self.bias: nn.Parameter | None = None
        # If a matrix is split along its input, all these ranks hold the bias, and each adds a
        # share.
        self.divided = dim == len(shape) - 1
        if bias:
            bias_dim = None if self.divided else dim
            self.bias = self._make(f"{name}.bias", experts, shape[:-1], bias_dim, constant(0.0))

    def _make(
        self, name: str, experts: int, shape: tuple[int, ...], dim: int | None, fill: Fill
    ) -> nn.Parameter:
        """Make a parameter. Each expert is drawn separately: the layout does not affect values."""
        factory = self.context.parameters
        part = self.tensor.rank, self.tensor.size
        group = shared_by(self.context).group
        cut = None if dim is None else dim + 1
        decay = not name.endswith(".bias")
        sharding = shard(name, (experts, *shape), cut, *part, decay=decay)
        local = (experts // group.size, *sharding.extent[1:])
        first = group.rank * local[0]
        base = factory.base_shapes.get(name)
        sharding = replace(
            sharding,
            shape=local,
            offset=(first, *sharding.offset[1:]),
            extent=local,
            experts=True,
            partial_gradient=None if cut is not None else False,  # see _BiasShare
            base_shape=base,
        )

        def values() -> Tensor:
            return torch.stack(
                [
                    draw(
                        shard(
                            f"{name}.{e}",
                            shape,
                            dim,
                            *part,
                            base_shape=base and base[1:],
                        ),
                        fill,
                        factory.seed,
                        factory.device,
                    )
                    for e in range(first, first + local[0])
                ]
            )

        return factory.make(sharding, values)

    def forward(self, rows: Tensor, counts: RowCounts) -> Tensor:
        """Multiply rows [n, in], sorted by expert, by their expert's matrix, and add its bias.

        Returns [n, out]. `counts`: the number of rows of each expert.
        """
        y = grouped_product(rows, self.weight, counts, self.context.weight_gradients)
        if self.bias is None:
            return y
        bias = wide(self.bias).flatten(1)
        size = self.tensor.size
        if self.divided and size > 1:
            bias = _BiasShare.apply(bias, size)
        row = torch.arange(len(y), dtype=counts.ends.dtype, device=y.device)
        return y + F.embedding(torch.bucketize(row, counts.ends, right=True), bias).to(y.dtype)


class _BiasShare(Node):
    """Share of a bias that each of `size` ranks adds. Each rank gets the full gradient."""

    @staticmethod
    def forward(ctx: Context, bias: Tensor, size: int) -> Tensor:
        ctx.partial_gradient = False
        return bias / size

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class ExpertMLP(nn.Module):
    """Router, experts and shared expert: [s(/tp), b, h] -> [s(/tp), b, h].

    index                 index of the layer in the model
    recompute_activation  recompute the output of the activation function in the backward pass
    recompute             recompute the whole layer, messages included (but not the row counts)
    summed                see RowParallelLinear; always, if experts are divided over other ranks than
                          attention
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        config: ModelConfig,
        index: int,
        recompute_activation: bool = False,
        recompute: bool = False,
        summed: bool = True,
    ) -> None:
        super().__init__()
        fills = weight_fills(config)
        self.context = context
        self._region = ExpertRegion(context)
        self.summed = summed or self.region.folded
        self.operators = KERNELS if context.fusions.permute else REFERENCES
        self.group = shared_by(context).group
        self.overlap = config.moe_shared_expert_overlap
        self.hops = shared_by(context).hops or (self.group,) if self.group.size > 1 else ()
        factors = config.moe_expert_capacity_factor, config.moe_eval_capacity_factor
        self.dropless = self.group.size == 1 and factors == (None, None)
        self.activation = activation_of(config)
        self.fused = context.fusions.bias_activation and fuses_activation(config)
        self.recompute_activation = recompute_activation
        self.recompute = recompute
        self.router = Router(context, f"{name}.router", config, index, fills[0])
        hidden = config.hidden_size
        ffn = config.moe_ffn_hidden_size
        experts = config.num_experts
        assert ffn is not None and experts is not None, "needed by a layer with experts"
        up, of_up = ((2, ffn, hidden), 1) if config.gated else ((ffn, hidden), 0)
        of = f"{name}.experts"
        bias = config.add_bias_linear
        self.dense_h_to_4h = _ExpertWeights(
            context, f"{of}.dense_h_to_4h", experts, up, of_up, fills[0], bias
        )
        self.dense_4h_to_h = _ExpertWeights(
            context, f"{of}.dense_4h_to_h", experts, (hidden, ffn), 1, fills[1], bias
        )
        self.shared: nn.Module | None = None
        self.gate: nn.Parameter | None = None
        if config.moe_shared_expert_intermediate_size is not None:
            of = f"{name}.shared_experts"
            width = replace(config, ffn_hidden_size=config.moe_shared_expert_intermediate_size)
            # If its ranks also divide the experts, the shared expert is in their region and sends no
            # messages.
            place = context if self.region.folded else context.alone()
            self.shared = MLP(place, of, width, *fills, recompute_activation)
            if config.moe_shared_expert_gate:
                make = context.parameters.create
                self.gate = make(f"{of}.gate.weight", (1, hidden), None, fills[0])

    @property
    def region(self) -> ExpertRegion:
        """The ranks that divide each expert; generation of text sets another context."""
        if self._region.context is not self.context:
            self._region = ExpertRegion(self.context)
        return self._region

    def forward(self, x: Tensor, call: CallContext) -> Tensor:
        if not self.recompute or not torch.is_grad_enabled():
            return self._forward(x, call)
        return recompute_later(self._forward, x, call)

    def _forward(self, x: Tensor, call: CallContext) -> Tensor:
        region = self.region
        inside, weights, experts = region.enter(x, *self.router(x, call))
        of_shared = x if region.folded else inside
        tokens = inside.flatten(0, 1)
        choices = (weights, experts)
        numbers = self._numbers(experts, call)
        dispatches = list[Dispatch]()
        # Unless the shared expert overlaps with messages, it runs here, to keep the device busy while
        # the host waits for the row counts.
        shared = None if self.hops and self.overlap else self._shared(of_shared)
        each = self.dense_h_to_4h.weight.shape[0] * self.group.size
        at = 0
        for hop in self.hops:
            each //= hop.size
            dispatches.append(Dispatch(choices[1], each, hop, self.operators, numbers, at))
            at += 2 * hop.size
            choices = dispatches[-1].send_choices(*choices)
        for dispatch in dispatches:
            tokens, arrival = dispatch.send(tokens)
            if self.overlap and dispatch is dispatches[0]:
                # The shared expert's position in the graph matters: its backward pass runs while
                # the tokens' gradients are sent back.
                shared = self._shared(of_shared)
            tokens = arrival.wait(tokens)
        # tokens of other replicas may be padding even if this rank has none
        alone = region.inputs.size == 1 and not region.masks
        dropless = self.dropless and call.padding is None and alone
        rows = self._experts(tokens, *choices, lambda: numbers()[at:], dropless)
        for dispatch in reversed(dispatches):
            rows = dispatch.back(rows)
        out = rows.view_as(inside)
        if region.folded:
            out = region.leave(out)
        if shared is not None:
            out = out + shared
        return region.leave(out) if self.summed and not region.folded else out

    def _shared(self, x: Tensor) -> Tensor | None:
        """Return the shared expert's output, if there is one.

        In the experts' region, it is this tensor rank's term of the output.
        """
        if self.shared is None:
            return None
        out: Tensor = self.shared(x)[0]
        if self.gate is None:
            return out
        scores = Scores.apply(x, self.gate, x.dtype, self.context.weight_gradients)
        return out * (scores * self.router.config.router_scale).sigmoid()

    def _numbers(self, experts: Tensor, call: CallContext) -> Numbers:
        """Return a reader of the row counts; recomputation reads those of the forward pass."""
        layer = self.router.layer
        each = self.dense_h_to_4h.weight.shape[0]
        if not within_backward() or layer not in call.numbers:
            call.numbers[layer] = HostCopy(exchange_numbers(experts, self.hops, each))
        choices = self.region.sent(len(experts)), experts.shape[1]
        return partial(read_numbers, call.numbers[layer], choices, self.hops, each)

    def _experts(
        self, tokens: Tensor, weights: Tensor, experts: Tensor, sizes: Numbers, dropless: bool
    ) -> Tensor:
        """Return, for tokens [t, h], the sums over choices [t, k] of weight times expert output.

        sizes     returns the number of rows of each expert
        dropless  whether every choice is one of these experts; if so, the host need not wait for
                  the sizes
        """
        order, positions, ends = sorted_choices(experts, self.dense_h_to_4h.weight.shape[0])
        counts = RowCounts(ends, sizes)
        if not dropless:
            order = order[: sum(sizes())]
        rows = self.operators.permute(tokens, order, positions)  # [n, h]
        up = self.dense_h_to_4h(rows, counts)
        activated = self.activation(up, None, self.fused)
        with self._recomputed(activated, up.detach()):
            y = self.dense_4h_to_h(activated, counts)
        return self.operators.unpermute(y, positions, weights)

    def _recomputed(self, activated: Tensor, up: Tensor) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which operators save `up` instead of `activated`, if configured."""
        if not self.recompute_activation or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        address = activated.data_ptr()
        shape = activated.shape

        def pack(x: Tensor) -> Tensor | None:
            return None if x.data_ptr() == address and x.shape == shape else x

        def unpack(x: Tensor | None) -> Tensor:
            if x is not None:
                return x
            with recomputed(), torch.no_grad():
                return self.activation(up, None, self.fused)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
