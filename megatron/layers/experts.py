"""A layer of experts in place of an MLP: router, balancing losses, experts, shared expert.

A router scores all experts for each token; the token passes through the best k, and their outputs
are added with weights (Shazeer et al., arXiv 1701.06538). Nothing is padded: an expert multiplies as
many rows as it gets.

With expert parallelism, a layer's experts are distributed over some of the data-parallel ranks. A
token is sent once to each rank with experts of its choice, multiplied there by all of these, and
the sum of their weighted outputs returns: messages have as many rows as there are such pairs, and
two small ones before them have their numbers and choices. Over several nodes, it is sent once to
each node, and there to the ranks; results are summed on the node (X-MoE, arXiv 2508.13337). The
host waits for the device once in a layer's forward pass, for the numbers of rows.

A token's weights and choices are the same on any layout: routers compute in fp32, and with sequence
parallelism each tensor rank scores its own tokens and gets the scores of all, so that losses and
capacities are of the whole micro-batch. Tensor parallelism divides the hidden size of each expert,
as that of an MLP.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from megatron.kernels.host_copy import HostCopy
from megatron.kernels.library import once_and_again
from megatron.kernels.ops.elementwise import activate, bias_activation, wider
from megatron.kernels.ops.experts import (
    RowCounts,
    grouped_product,
    permute,
    permute_reference,
    unpermute,
    unpermute_reference,
)
from megatron.kernels.work import recomputed
from megatron.layers.context import (
    CallContext,
    Experts,
    Fill,
    LayerContext,
    constant,
    draw,
)
from megatron.parallel.collectives import (
    all_reduce,
    all_to_all,
    all_to_all_async,
    gather_first,
    reduce_from_tensor_region,
    reduce_scatter_first,
    split_first,
)
from megatron.parallel.gradient_accumulator import wide, within_backward
from megatron.parallel.keyed_random import Site, placed_noise
from megatron.parallel.sharding import shard
from megatron.parallel.topology import Group, Topology

if TYPE_CHECKING:
    from megatron.config import ModelConfig


class Operators(NamedTuple):
    """The operators that move rows: kernels or torch's."""

    permute: Callable[[Tensor, Tensor, Tensor], Tensor]
    unpermute: Callable[[Tensor, Tensor, Tensor], Tensor]


KERNELS = Operators(permute, unpermute)
REFERENCES = Operators(permute_reference, unpermute_reference)


def shared_by(context: LayerContext) -> Experts:
    """Return what layers of experts share; of one process where nothing was given."""
    return context.experts or Experts()


# -- messages of the tensor-parallel region --------------------------------------------------------


class _Enter(torch.autograd.Function):
    """Tokens that each tensor rank's part of all experts gets; their gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: LayerContext) -> Tensor:
        ctx.context = context
        ctx.partial_gradient = context.sequence_parallel  # for engine/gradients.py
        return gather_first(x, context.tensor) if context.sequence_parallel else x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        group = ctx.context.tensor
        if ctx.context.sequence_parallel:
            return reduce_scatter_first(dx, group), None
        return all_reduce(dx.contiguous().clone(), group), None


class _Whole(torch.autograd.Function):
    """Weights of choices, whose gradients are sums over the tensor ranks' parts of the experts."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.partial_gradient = group, False
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient.contiguous().clone(), ctx.group), None


class _Gather(torch.autograd.Function):
    """Scores [s/n, b, E] of all ranks: [s, b, E]. Each rank has the gradients of all.

    tensor  whether these are the tensor ranks, for engine/gradients.py
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, group: Group, tensor: bool) -> Tensor:
        ctx.group = group
        if tensor:
            ctx.partial_gradient = True
        return gather_first(scores, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return split_first(gradient, ctx.group).contiguous(), None, None


# -- routers ---------------------------------------------------------------------------------------


class _Scores(torch.autograd.Function):
    """x [.., h] times the router's fp32 weights [E, h], in fp32; x is kept in its own type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(wider(x), wider(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        rows = gradient.flatten(0, -2)
        dw = rows.t() @ wider(x).flatten(0, -2)
        return (gradient @ wider(weight)).to(x.dtype), dw.to(weight.dtype)


class _WithLoss(torch.autograd.Function):
    """The first argument, with a loss that gets the gradient `experts.loss_scale`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, experts: Experts) -> Tensor:
        ctx.experts = experts
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        one = torch.ones((), dtype=torch.float32, device=gradient.device)
        return gradient, one * ctx.experts.loss_scale, None


def balancing_loss(scores: Tensor, load: Tensor, real: Tensor | None = None) -> Tensor:
    """Return E sum_i f_i P_i, of E experts: 1 where the load is even (fp32, a scalar).

    Fedus et al., arXiv 2101.03961, eq. 4 to 6.

    scores  normalised scores of tokens; P is their mean  # [.., E]
    load    choices of each expert; f is its share in all. No gradient flows through it.  # [E]
    real    which tokens are no padding, 0 or 1; None: all  # [tokens]
    """
    share = load / load.sum().clamp(min=1)
    return len(load) * (share * mean_over(scores.flatten(0, -2), real)).sum()


def mean_over(values: Tensor, real: Tensor | None) -> Tensor:
    """Return the mean of values [n, ..] over those that `real` [n] marks by 1; None: over all."""
    return values.mean(0) if real is None else real @ values / real.sum().clamp(min=1)


class Router(torch.nn.Module):
    """The choice of experts: x [s(/tp), b, h] -> weights and experts [s b, k], of all tokens.

    Weights are fp32, experts int64; a choice that is dropped has the weight 0 and the expert -1. So
    have the choices of padding, which enters no load, loss, capacity or figure.

    load         choices of each expert since the last step, before drops  # [E], fp32

    Sums since the last log line (take_figures): `passes`, the number of micro-batches; `losses`,
    each balancing loss without its coefficient, then the z-loss; and only if `measured`:
    `interval`, as `load`; `dropped`, the choices that were dropped; and `entropy` of each token's
    normalised scores.

    expert_bias  a term of the scores for the choice alone; moves after each step with the load
                 (Wang et al., arXiv 2408.15664)  # [E], fp32; None without
    last_load    load of the last step, for the balancing loss of the global batch  # [E]
    """

    def __init__(
        self, context: LayerContext, name: str, config: ModelConfig, layer: int, fill: Fill
    ) -> None:
        super().__init__()
        self.layer = layer
        assert config.num_experts is not None, "the layer has experts"
        self.name, self.context, self.config, self.experts = (
            name,
            context,
            config,
            config.num_experts,
        )
        shape = self.experts, config.hidden_size
        self.weight = context.parameters.create(f"{name}.weight", shape, None, fill, fp32=True)
        if config.moe_use_upcycling:  # the parts of one MLP begin with the same scores
            groups = self.weight.detach().unflatten(0, (-1, config.upcycling_granularity))
            groups[:, 1:] = groups[:, :1]
        kinds = zip(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff, strict=True)
        self.balancing = {kind: factor for kind, factor in kinds if factor}
        z = [config.moe_z_loss_coeff] if config.moe_z_loss_coeff else []
        factors = [*self.balancing.values(), *z]
        # Plain attributes: buffers would be rounded with the weights.
        zeros = torch.zeros(self.experts, device=context.parameters.device)
        self.factors = zeros.new_tensor(factors)
        self.load, self.interval = zeros, zeros.clone()
        self.last_load = zeros.clone() if "global_aux_loss" in self.balancing else None
        self.losses = zeros.new_zeros(len(self.balancing) + 1)
        self.dropped, self.entropy = zeros.new_zeros(()), zeros.new_zeros(())
        self.passes = 0
        self.expert_bias = zeros.clone() if config.moe_router_enable_expert_bias else None
        self.measured = False

    def kept(self) -> dict[str, Tensor]:
        """Return what is saved beside the weights, by global name."""
        names = ("expert_bias", "last_load")
        found = {f"{self.name}.{name}": getattr(self, name) for name in names}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def forward(self, x: Tensor, call: CallContext) -> tuple[Tensor, Tensor]:
        config, context = self.config, self.context
        if config.moe_input_jitter_eps and call.dropout is not None:
            seed, place = call.hidden_mask(x, self.layer, Site.ROUTER, context)
            assert seed is not None, "in training, masks have a key"
            places = place if isinstance(place, list) else [place]
            both = zip(x.chunk(len(places)), places, strict=True)
            eps = config.moe_input_jitter_eps
            x = x * torch.cat([placed_noise(part, eps, seed, at) for part, at in both])
        logits: Tensor = _Scores.apply(x, self.weight)  # type: ignore[no-untyped-call]
        if config.use_mup:
            logits = logits * config.router_scale
        if context.sequence_parallel:
            logits = _Gather.apply(logits, context.tensor, True)  # type: ignore[no-untyped-call]
        weights, experts = self.choose(logits.flatten(0, 1))
        if (padding := call.padding) is not None:
            padding = padding if context.parts is None else context.parts.cut(padding)
            padding = padding.t().reshape(-1, 1)
            weights, experts = weights.masked_fill(padding, 0.0), experts.masked_fill(padding, -1)
        counts = torch.is_grad_enabled() and not within_backward()
        if torch.is_grad_enabled() and self.training:
            real = None if padding is None else padding.logical_not().float().view(-1, x.shape[1])
            weights = self._with_losses(logits, weights, experts, real, counts)
        kept = self._kept(weights, experts, x.shape[1])
        if counts and self.training:
            self.passes += 1
            with torch.no_grad():
                self.load += (load := self._count(experts))
                if self.measured:
                    self.interval += load
                    chosen = experts >= 0
                    entropies = torch.xlogy(p := self.shares(logits), p).sum(-1).flatten()
                    self.entropy -= (entropies * chosen[:, 0]).sum()
                    self.dropped += 0 if kept is None else (chosen & ~kept).sum()
        if kept is not None:
            weights = weights.masked_fill(~kept, 0.0)
            experts = experts.masked_fill(~kept, -1)
        return weights, experts

    def choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and experts [t, k] of logits [t, E], the best first."""
        config = self.config
        k, softmax = config.moe_router_topk, config.moe_router_score_function == "softmax"
        if not softmax:
            scores = logits.sigmoid()
        else:
            scores = logits.softmax(-1) if config.moe_router_pre_softmax else logits
        with torch.no_grad():
            wanted = scores if self.expert_bias is None else scores + self.expert_bias
            if config.moe_router_num_groups is not None:
                wanted = self._within_groups(wanted)
            experts = wanted.topk(k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if softmax and not config.moe_router_pre_softmax:
            weights = weights.softmax(-1)
        elif not softmax and k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        factor = config.moe_router_topk_scaling_factor
        return weights if factor is None else weights * factor, experts

    def _within_groups(self, scores: Tensor) -> Tensor:
        """Return the scores with -inf outside of the best groups of each token.

        DeepSeek-AI, arXiv 2412.19437, section 2.1.2.
        """
        groups, chosen = self.config.moe_router_num_groups, self.config.moe_router_group_topk
        assert groups is not None and chosen is not None, "they are given together"
        cut = scores.unflatten(-1, (groups, -1))
        best = cut.topk(self.config.moe_router_topk // chosen, dim=-1).values.sum(-1)
        outside = torch.ones_like(best, dtype=torch.bool).scatter_(
            -1, best.topk(chosen, dim=-1).indices, False
        )
        within: Tensor = cut.masked_fill(outside.unsqueeze(-1), -math.inf).flatten(-2)
        return within

    def shares(self, logits: Tensor) -> Tensor:
        """Return scores over all experts that add up to one, for losses [.., E]."""
        if self.config.moe_router_score_function == "softmax":
            return logits.softmax(-1)
        scores = logits.sigmoid()
        return scores / (scores.sum(-1, keepdim=True) + 1e-20)

    def _count(self, experts: Tensor) -> Tensor:
        return count_choices(experts, torch.zeros_like(self.load))

    def _with_losses(
        self,
        logits: Tensor,
        weights: Tensor,
        experts: Tensor,
        real: Tensor | None,
        counts: bool,
    ) -> Tensor:
        """Return the weights, through whose gradient that of the losses of logits [s, b, E] flows.

        real  see balancing_loss  # [s, b]
        """
        losses = list[Tensor]()
        if (parts := self.context.parts) is not None:  # losses are of whole sequences
            logits = _Gather.apply(logits, parts.group, False)  # type: ignore[no-untyped-call]
            experts = self.choose(logits.detach().flatten(0, 1))[1]
            real = None if real is None else gather_first(real, parts.group)
        shares = self.shares(logits) if self.balancing else logits
        if self.balancing and (
            self.expert_bias is not None or self.config.moe_router_num_groups is not None
        ):
            # Losses are of the scores, without bias and groups (arXiv 2412.19437, eq. 18).
            experts = shares.detach().topk(self.config.moe_router_topk, dim=-1).indices
        experts = experts.view(*logits.shape[:2], -1)
        if real is not None:
            experts = experts.masked_fill(real.unsqueeze(-1) == 0, -1)
        of_all = None if real is None else real.flatten()
        for kind in self.balancing:
            if kind == "aux_loss":
                loss = balancing_loss(shares, self._count(experts), of_all)
            elif kind == "seq_aux_loss":
                each = [
                    balancing_loss(
                        shares[:, i],
                        self._count(experts[:, i]),
                        None if real is None else real[:, i],
                    )
                    for i in range(shares.shape[1])
                ]
                with_text = None if real is None else real.amax(0)
                loss = mean_over(torch.stack(each), with_text)
            else:  # before the first step the load counts as even
                assert self.last_load is not None, "made for this loss"
                even = self.last_load.sum() == 0
                loss = balancing_loss(shares, torch.where(even, 1.0, self.last_load), of_all)
            losses.append(loss)
        if self.config.moe_z_loss_coeff:  # Zoph et al., arXiv 2202.08906, eq. 5
            squares = logits.logsumexp(-1).square().flatten()
            losses.append(mean_over(squares, of_all))
        if not losses:
            return weights
        found = torch.stack(losses)
        if counts:
            with torch.no_grad():
                self.losses[: len(found)] += found
        shared, total = shared_by(self.context), found @ self.factors
        return _WithLoss.apply(weights, total, shared)  # type: ignore[no-untyped-call, no-any-return]

    @torch.no_grad()
    def _kept(self, weights: Tensor, experts: Tensor, samples: int) -> Tensor | None:
        """Return which choices [t, k] are within their expert's capacity; None: all."""
        (tokens, k), parts, config = experts.shape, self.context.parts, self.config
        factor = config.moe_eval_capacity_factor
        if self.training:
            factor = config.moe_expert_capacity_factor
        if factor is None:
            return None
        if parts is not None:
            # The capacity is of whole sequences: [b k, s/c] -> [b k, s], and the order by position.
            tokens *= parts.size
            weights, experts = (
                parts.gather(y.view(-1, samples * k).t()).t().reshape(tokens, k)
                for y in (weights, experts)
            )
        capacity = math.ceil(tokens * k / self.experts * factor)
        if capacity >= tokens:
            return None
        # The capacity is that of the tokens without padding, whose number the host does not know.
        real = (experts[:, 0] >= 0).sum().double()
        limit = (real * k / self.experts * factor).ceil()
        columns = experts + 1  # the first one takes the choices of padding
        table = weights.new_full((tokens, self.experts + 1), -1.0)
        if config.moe_token_drop_policy == "probs":
            best = table.scatter_(1, columns, weights).topk(capacity, dim=0).indices
            within = (torch.arange(capacity, device=limit.device) < limit).unsqueeze(1)
            inside = torch.zeros_like(table, dtype=torch.bool).scatter_(
                0, best, within.expand_as(best)
            )
        else:
            chosen = torch.zeros_like(table, dtype=torch.int32).scatter_(1, columns, 1)
            inside = chosen.cumsum(0) <= limit
        inside[:, 0] = False
        inside = inside.gather(1, columns)
        if parts is None:
            return inside
        positions = parts.positions(tokens // samples, experts.device)
        return inside.view(-1, samples, k)[positions].flatten(0, 1)


# -- experts ---------------------------------------------------------------------------------------


class _Grouped(torch.nn.Module):
    """Matrices [E, *shape] of this rank's experts; `dim` of `shape` is cut over the tensor ranks.

    bias   whether there are biases, [E, *shape without the last dimension]
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
        self.context = context
        self.weight = self._make(f"{name}.weight", experts, shape, dim, fill)
        self.bias: torch.nn.Parameter | None = None
        # of a matrix that is cut along its input: on all tensor ranks, each of which adds a part
        self.divided = dim == len(shape) - 1
        if bias:
            whole = None if self.divided else dim
            self.bias = self._make(f"{name}.bias", experts, shape[:-1], whole, constant(0.0))

    def _make(
        self, name: str, experts: int, shape: tuple[int, ...], dim: int | None, fill: Fill
    ) -> torch.nn.Parameter:
        """Draw each expert by itself, so that it is the same wherever it is."""
        factory, group = self.context.parameters, shared_by(self.context).group
        cut, decay = None if dim is None else dim + 1, not name.endswith(".bias")
        sharding = shard(name, (experts, *shape), cut, factory.rank, factory.size, decay=decay)
        local = (experts // group.size, *sharding.extent[1:])
        first, base = group.rank * local[0], factory.base_shapes.get(name)
        sharding = replace(
            sharding,
            offset=(first, *sharding.offset[1:]),
            extent=local,
            experts=True,
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
                            factory.rank,
                            factory.size,
                            base_shape=base and base[1:],
                        ),
                        local[1:],
                        fill,
                        factory.seed,
                        factory.device,
                    )
                    for e in range(first, first + local[0])
                ]
            )

        return factory.make(sharding, local, values)

    def forward(self, rows: Tensor, counts: RowCounts) -> Tensor:
        """Return each expert's rows [n, in], `counts` of them, times its matrix: [n, out]."""
        y = grouped_product(rows, self.weight, counts, self.context.weight_gradients)
        if self.bias is None:
            return y
        bias, size = wide(self.bias).flatten(1), self.context.tensor.size
        if self.divided and size > 1:
            bias = _Part.apply(bias, size)  # type: ignore[no-untyped-call]
        row = torch.arange(len(y), dtype=counts.ends.dtype, device=y.device)
        expert = torch.bucketize(row, counts.ends, right=True)
        return y + F.embedding(expert, bias).to(y.dtype)


class _Part(torch.autograd.Function):
    """The part of a bias that each of `size` tensor ranks adds. Its gradient is whole on each."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, size: int) -> Tensor:
        ctx.partial_gradient = False
        return bias / size

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class ExpertMLP(torch.nn.Module):
    """Router, experts and shared expert: [s(/tp), b, h] -> [s(/tp), b, h].

    mlp               makes the shared expert: the class MLP
    activation_again  recompute the output of the activation function in the backward pass
    again             recompute the whole layer, messages included
    summed            see RowParallelLinear
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        config: ModelConfig,
        index: int,
        fill: Fill,
        output_fill: Fill,
        mlp: Callable[..., torch.nn.Module],
        activation_again: bool = False,
        again: bool = False,
        summed: bool = True,
    ) -> None:
        super().__init__()
        self.context, self.summed = context, summed
        self.operators = KERNELS if context.fusions.permute else REFERENCES
        self.group, self.overlap = shared_by(context).group, config.moe_shared_expert_overlap
        self.hops = shared_by(context).hops or (self.group,) if self.group.size > 1 else ()
        factors = config.moe_expert_capacity_factor, config.moe_eval_capacity_factor
        self.dropless = self.group.size == 1 and factors == (None, None)
        self.activation, self.fused = config.activation, context.fusions.bias_activation
        self.activation_again, self.again = activation_again, again
        self.router = Router(context, f"{name}.router", config, index, fill)
        hidden, ffn, experts = config.hidden_size, config.moe_ffn_hidden_size, config.num_experts
        assert ffn is not None and experts is not None, "they are derived where there are experts"
        up, of_up = ((2, ffn, hidden), 1) if config.gated else ((ffn, hidden), 0)
        of = f"{name}.experts"
        bias = config.add_bias_linear
        self.dense_h_to_4h = _Grouped(
            context, f"{of}.dense_h_to_4h", experts, up, of_up, fill, bias
        )
        self.dense_4h_to_h = _Grouped(
            context, f"{of}.dense_4h_to_h", experts, (hidden, ffn), 1, output_fill, bias
        )
        self.shared: torch.nn.Module | None = None
        self.gate: torch.nn.Parameter | None = None
        if config.moe_shared_expert_intermediate_size is not None:
            of = f"{name}.shared_experts"
            width = replace(config, ffn_hidden_size=config.moe_shared_expert_intermediate_size)
            # within the region that the experts enter: without messages of its own
            self.shared = mlp(context.alone(), of, width, fill, output_fill, activation_again)
            if config.moe_shared_expert_gate:
                make = context.parameters.create
                self.gate = make(f"{of}.gate.weight", (1, hidden), None, fill)

    def forward(self, x: Tensor, call: CallContext) -> Tensor:
        if not self.again or not torch.is_grad_enabled():
            return self._forward(x, call)
        y: Tensor = checkpoint(
            self._forward,
            x,
            call,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=once_and_again,
        )
        return y

    def _forward(self, x: Tensor, call: CallContext) -> Tensor:
        context, group = self.context, self.context.tensor
        weights, experts = self.router(x, call)
        if group.size > 1:
            weights = _Whole.apply(weights, group)  # type: ignore[no-untyped-call]
            x = _Enter.apply(x, context)  # type: ignore[no-untyped-call]
        tokens, choices = x.flatten(0, 1), (weights, experts)
        numbers, trips = self._numbers(experts, call), list[Trip]()
        # The device has something to do while the host waits for the numbers.
        shared = None if self.hops and self.overlap else self._shared(x)
        each, at = self.dense_h_to_4h.weight.shape[0] * self.group.size, 0
        for hop in self.hops:
            each //= hop.size
            trips.append(Trip(choices[1], each, hop, self.operators, numbers, at))
            at += 2 * hop.size
            choices = trips[-1].send_choices(*choices)
        for trip in trips:
            tokens, arrival = trip.send(tokens)
            if self.overlap and trip is trips[0]:
                # Its place in the graph decides: in the backward pass, it is computed while the
                # gradients of the tokens return.
                shared = self._shared(x)
            tokens = arrival.wait(tokens)
        dropless = self.dropless and call.padding is None
        rows = self._experts(tokens, *choices, lambda: numbers()[at:], dropless)
        for trip in reversed(trips):
            rows = trip.back(rows)
        out = rows.view_as(x)
        if shared is not None:
            out = out + shared
        if not self.summed:
            return out
        return reduce_from_tensor_region(out, group, context.sequence_parallel)

    def _shared(self, x: Tensor) -> Tensor | None:
        """Return this tensor rank's term of the shared expert's output, if there is one."""
        if self.shared is None:
            return None
        out: Tensor = self.shared(x)[0]
        if self.gate is None:
            return out
        return out * (F.linear(x, self.gate) * self.router.config.router_scale).sigmoid()

    def _numbers(self, experts: Tensor, call: CallContext) -> Numbers:
        """Return what reads the numbers of rows; a recomputation has those of the first pass."""
        layer, each = self.router.layer, self.dense_h_to_4h.weight.shape[0]
        if not within_backward() or layer not in call.numbers:
            call.numbers[layer] = HostCopy(exchange_numbers(experts, self.hops, each))
        return partial(read_numbers, call.numbers[layer], experts.shape, self.hops, each)

    def _experts(
        self, tokens: Tensor, weights: Tensor, experts: Tensor, sizes: Numbers, dropless: bool
    ) -> Tensor:
        """Return the sum over the choices [t, k] of weight times expert's output of tokens [t, h].

        dropless  whether each choice is of one of these experts, so that the host need not wait
        """
        order, places, ends = sorted_choices(experts, self.dense_h_to_4h.weight.shape[0])
        counts = RowCounts(ends, sizes)
        if not dropless:
            order = order[: sum(sizes())]
        rows = self.operators.permute(tokens, order, places)  # [n, h]
        up = self.dense_h_to_4h(rows, counts)
        activated = self._activate(up)
        with self._recomputed(activated, up.detach()):
            y = self.dense_4h_to_h(activated, counts)
        return self.operators.unpermute(y, places, weights)

    def _activate(self, up: Tensor) -> Tensor:
        kind = self.activation
        return bias_activation(up, None, kind) if self.fused else activate(up, kind)

    def _recomputed(self, activated: Tensor, up: Tensor) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which operators keep `up` for `activated`, if configured."""
        if not self.activation_again or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        place, kept = activated.data_ptr(), activated.shape

        def pack(x: Tensor) -> Tensor | None:
            return None if x.data_ptr() == place and x.shape == kept else x

        def unpack(x: Tensor | None) -> Tensor:
            if x is not None:
                return x
            with recomputed(), torch.no_grad():
                return self._activate(up)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def sorted_choices(experts: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the token of each row, the row of each choice, and the last row of each expert.

    Rows are sorted by expert, those of one by token. After them come choices without a row. The last
    row is excluded, [count], int32.

    experts  the expert of each choice, of `count`; -1: none  # [t, k], int64
    """
    flat = experts.flatten()
    none = flat < 0
    by_row, by_expert = flat.masked_fill(none, count).sort(stable=True)
    every = torch.arange(max(len(flat), count), device=flat.device)
    ends = torch.searchsorted(by_row, every[:count], right=True, out_int32=True)
    places = torch.empty_like(flat)
    places[by_expert] = every[: len(flat)]
    places = places.masked_fill(none, -1).view_as(experts)
    return by_expert // experts.shape[1], places, ends


def count_choices(experts: Tensor, none: Tensor) -> Tensor:
    """Return how many choices each expert has, [E] in fp32; `none` are zeros of this shape.

    -1 is no expert.

    Unlike torch.bincount, this needs no wait. On a CPU it is faster in fp32 than in integers.
    """
    flat = experts.flatten()
    return none.scatter_add(0, flat.clamp(min=0), (flat >= 0).to(none.dtype))


# -- messages between expert-parallel ranks --------------------------------------------------------


Numbers = Callable[[], list[int]]
"""Returns numbers of rows on the host, which waits for them the first time."""


def members_chosen(experts: Tensor, each: int, members: int) -> Tensor:
    """Return of each token which members have experts of its choice, `each` a member; [t, members].

    experts  -1: none  # [t, k]
    """
    chosen = torch.zeros(len(experts), members + 1, dtype=torch.bool, device=experts.device)
    return chosen.scatter_(1, experts.div(each, rounding_mode="floor") + 1, True)[:, 1:]


def exchange_numbers(experts: Tensor, hops: Sequence[Group], each: int) -> Tensor:
    """Return all numbers of rows that the host needs for a layer, on the device.

    They are, for each hop, the rows sent to each member and those received, then the rows of each
    of this rank's experts. Each hop has one message, of as many numbers for every member.

    experts  of this rank's tokens, -1: none  # [t, k]
    each     experts of a rank
    """
    count = each * math.prod(hop.size for hop in hops)
    levels, members = list[Tensor](), 1  # what each member of a hop, and then each expert, gets
    for hop in hops:
        members *= hop.size
        levels.append(members_chosen(experts, count // members, members).sum(0))
    levels.append(count_choices(experts, torch.zeros(count, device=experts.device)).long())
    found = list[Tensor]()
    for hop in hops:
        mine = torch.cat([level.view(hop.size, -1) for level in levels], dim=1)
        even = [1] * hop.size
        theirs = all_to_all(mine, hop, even, even)
        found += [mine[:, 0], theirs[:, 0]]
        widths = [len(level) // hop.size for level in levels]
        levels = list(theirs.sum(0).split(widths)[1:])
    return torch.cat([*found, *levels])


def read_numbers(
    numbers: HostCopy, choices: Sequence[int], hops: Sequence[Group], each: int
) -> list[int]:
    """Return the numbers of `exchange_numbers`, which had `choices` [t, k].

    The planner, which has no data, replaces this.
    """
    return numbers.read()


class Trip:
    """The way of tokens to the members of a group with their experts, and of the results back.

    Over several nodes, one trip brings tokens to nodes, and the next to ranks: the group of the
    first has the rank with the same place on each node.

    experts    of this rank's tokens, -1: none  # [t, k]
    each       experts of each member, the others of its node included
    operators  move the rows
    numbers    has from the place `at` on the rows sent to each member, and those received
    """

    def __init__(
        self,
        experts: Tensor,
        each: int,
        group: Group,
        operators: Operators,
        numbers: Numbers,
        at: int,
    ) -> None:
        self.group, self.each, self.operators, size = group, each, operators, group.size
        chosen = members_chosen(experts, each, size).t()  # [ranks, t]
        flat = chosen.flatten()
        where, absent = flat.cumsum(0) - 1, flat.logical_not()  # by rank, then by token
        self.places = where.masked_fill(absent, -1).view_as(chosen).t().contiguous()  # [t, ranks]
        pairs = where.new_empty(len(flat) + 1)  # the last one takes those that were not chosen
        every = torch.arange(len(flat), device=flat.device)
        pairs.scatter_(0, where.masked_fill(absent, len(flat)), every)
        self.sent, self.received = numbers()[at : at + size], numbers()[at + size : at + 2 * size]
        pairs = pairs[: sum(self.sent)]
        self.rank_of, self.order = pairs // len(experts), pairs % len(experts)

    def send(self, tokens: Tensor) -> tuple[Tensor, Arrival]:
        """Start to send tokens [t, h]; the rows of other ranks may be read after their arrival."""
        arrival = Arrival(self.group, self.received, self.sent)
        rows = self.operators.permute(tokens, self.order, self.places)
        sent: Tensor = _Send.apply(rows, arrival)  # type: ignore[no-untyped-call]
        return sent, arrival

    def send_choices(self, weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and experts [n, k] of the rows that other ranks sent, see Trip.

        Experts count from this rank's first; -1: another rank's.
        """
        local = experts[self.order] - (self.rank_of * self.each).unsqueeze(1)
        local = local.masked_fill((local < 0) | (local >= self.each), -1)
        found: tuple[Tensor, Tensor] = _SendChoices.apply(  # type: ignore[no-untyped-call]
            weights[self.order], local, self
        )
        return found

    def back(self, rows: Tensor) -> Tensor:
        """Return results [n, h] to the ranks of their tokens, and their sum in fp32, [t, h]."""
        arrival = Arrival(self.group, self.sent, self.received)
        arrived = arrival.wait(_Send.apply(rows, arrival))  # type: ignore[no-untyped-call]
        total: Tensor = _Sum.apply(arrived, self)  # type: ignore[no-untyped-call]
        return total


class Arrival:
    """A message under way in one direction, and its gradient in the other.

    The two ends are different nodes of the graph, and what stands between them in the forward pass
    is computed while the message is under way, in both passes.
    """

    def __init__(self, group: Group, received: list[int], sent: list[int]) -> None:
        self.group, self.received, self.sent = group, received, sent
        self.work: Any = None
        self.gradient: Tensor | None = None

    def wait(self, rows: Tensor) -> Tensor:
        """Return the rows, which have arrived."""
        arrived: Tensor = _Arrive.apply(rows, self)  # type: ignore[no-untyped-call]
        return arrived


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Arrival) -> Tensor:
        ctx.way = way
        found, way.work = all_to_all_async(rows, way.group, way.sent, way.received)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, None]:
        gradient, ctx.way.gradient = ctx.way.gradient, None
        ctx.way.work.wait()
        return gradient, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Arrival) -> Tensor:
        ctx.way = way
        way.work.wait()
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        way = ctx.way
        found = all_to_all_async(gradient.contiguous(), way.group, way.received, way.sent)
        way.gradient, way.work = found
        return gradient, None  # of the shape that autograd expects; _Send has the other one


class _Sum(torch.autograd.Function):
    """The sum of each token's rows. Its gradient needs no rows, as that of a weighted sum does."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        ones = torch.ones(trip.places.shape, dtype=torch.float32, device=rows.device)
        return trip.operators.unpermute(rows, trip.places, ones)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        trip = ctx.trip
        return trip.operators.permute(gradient, trip.order, trip.places), None


class _SendChoices(torch.autograd.Function):
    """Weights and experts [n, k] of the rows that are sent: those of the rows received."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, experts: Tensor, trip: Trip) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        both = torch.cat([weights.float().view(torch.int32), experts.int()], dim=1)
        found = all_to_all(both, trip.group, trip.sent, trip.received)
        weights, experts = found.chunk(2, dim=1)
        experts = experts.long()
        ctx.mark_non_differentiable(experts)
        return weights.contiguous().view(torch.float32), experts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor, None, None]:
        trip = ctx.trip
        gradient = gradient.contiguous()
        return all_to_all(gradient, trip.group, trip.received, trip.sent), None, None


# -- load ------------------------------------------------------------------------------------------


def routers(model: torch.nn.Module) -> list[Router]:
    """Return the routers of a model, in order."""
    return [module for module in model.modules() if isinstance(module, Router)]


@torch.no_grad()
def move_biases(found: Sequence[Router], data: Group, counts: Tensor) -> None:
    """Sum the load of a step over all tokens, and move the experts' biases by it.

    data    the ranks with other tokens and the same routers, which all call this
    counts  whether the step counts, a scalar on the device; otherwise nothing moves
    """
    loads = all_reduce(torch.stack([router.load for router in found]), data)
    for router, load in zip(found, loads, strict=True):
        if router.expert_bias is not None:
            step = (load.mean() - load).sign() * router.config.moe_router_bias_update_rate
            router.expert_bias += torch.where(counts, step, 0.0)
        if router.last_load is not None:
            router.last_load.copy_(torch.where(counts, load, router.last_load))
        router.load.zero_()


LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Megatron-LM's names of balancing losses in its log, by type."""


@torch.no_grad()
def take_figures(found: Sequence[Router], model: ModelConfig, topology: Topology) -> dict[str, Any]:
    """Return the figures of routers since the last call, as an Iteration event has them.

    All ranks call it, with their routers. One message.
    """
    kinds = zip(model.moe_router_load_balancing_type, model.moe_aux_loss_coeff, strict=True)
    names = [LOSS_NAMES[kind] for kind, factor in kinds if factor] + ["z_loss"]
    experts, layers = model.num_experts or 0, model.num_layers
    table = torch.zeros(
        layers, experts + len(names) + 3, dtype=torch.float64, device=topology.device
    )
    for router in found:
        values = router.losses, router.dropped.view(1), router.entropy.view(1)
        if topology.tensor.is_first:  # the others have the same tokens
            row = torch.cat([router.interval, *values]).double()
            table[router.layer, :-1], table[router.layer, -1] = row, router.passes
        for value in (router.interval, *values):
            value.zero_()
        router.passes = 0
    all_reduce(table, topology.world)
    rows = {layer: row for layer, row in enumerate(table.tolist()) if row[-1]}
    means = (
        sum(row[experts + i] / row[-1] for row in rows.values()) / max(1, len(rows))
        for i in range(len(names))
    )
    balancing = dict(zip(names, means, strict=True))
    if not model.moe_z_loss_coeff:
        del balancing["z_loss"]
    shown: dict[str, Any] = {}
    for layer, row in rows.items():
        tokens, (dropped, entropy) = row[:experts], row[-3:-1]
        if total := sum(tokens):
            shown[str(layer)] = {
                "imbalance": max(tokens) * experts / total,
                "entropy": entropy * model.moe_router_topk / (total * math.log(experts)),
                "dropped": dropped / total,
                "tokens": tokens,
            }
    return {"balancing": balancing or None, "experts": shown or None}
