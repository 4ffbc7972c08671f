"""Routers: the choice of experts for each token, and the losses that balance their load.

Routers compute in fp32. With sequence parallelism each tensor rank scores its own tokens and
gathers the scores from all ranks: losses and capacities apply to the full micro-batch.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config import ModelConfig
from megatron.errors import KernelError
from megatron.layers.context import (
    CallContext,
    Experts,
    Fill,
    LayerContext,
    change_initial,
    constant,
)
from megatron.layers.expert_dispatch import count_choices
from megatron.parallel.autograd import Context, Node
from megatron.parallel.collectives import gather_first, split_first
from megatron.parallel.deferred_gradients import WeightGradients
from megatron.parallel.gradient_accumulator import deliver, within_backward
from megatron.parallel.keyed_random import Site, placed_noise
from megatron.parallel.topology import Group


def shared_by(context: LayerContext) -> Experts:
    """Return the state that layers with experts share, by default that of a single process."""
    return context.experts or Experts()


class _Gather(Node):
    """Gathered scores: [s/n, b, E] -> [s, b, E].

    Each rank has the full gradients for all tokens, so it only takes its slice of them.

    tensor  whether the group is the tensor-parallel group, for engine/gradients.py
    """

    @staticmethod
    def forward(ctx: Context, scores: Tensor, group: Group, tensor: bool) -> Tensor:
        ctx.group = group
        if tensor:
            ctx.partial_gradient = True
        return gather_first(scores, group)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        return split_first(gradient, ctx.group).contiguous(), None, None


class Scores(Node):
    """x [.., h] times a few rows of weights [n, h], computed in `dtype`; x is kept in its own.

    queue  the queue for the weights' gradient if a schedule defers it
    """

    @staticmethod
    def forward(
        ctx: Context, x: Tensor, weight: Tensor, dtype: torch.dtype, queue: WeightGradients
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight  # not saved: see layers/linear.py
        ctx.version = weight._version
        ctx.dtype = dtype
        ctx.queue = queue
        return F.linear(x.to(dtype), weight.detach().to(dtype))

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        if ctx.version != weight._version:
            raise KernelError(
                "the weight of a router or gate was changed in place between forward and backward "
                "pass"
            )
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = (gradient @ weight.detach().to(ctx.dtype)).to(x.dtype)
        if ctx.needs_input_grad[1]:
            compute = partial(_weight_gradient, weight, gradient, x.detach())
            if ctx.queue.deferring:
                ctx.queue.add(lambda: deliver(weight, compute()))
            else:
                dw = compute()
        return dx, dw, None, None


@torch.no_grad()
def _weight_gradient(weight: Tensor, gradient: Tensor, x: Tensor) -> Tensor:
    """Return gradient^T x, computed in the gradient's dtype, in that of the weight."""
    wide = x.to(gradient.dtype).flatten(0, -2)
    return (gradient.flatten(0, -2).t() @ wide).to(weight.dtype)


class _WithLoss(Node):
    """x, with a loss attached to it, whose gradient is `experts.loss_scale`."""

    @staticmethod
    def forward(ctx: Context, x: Tensor, loss: Tensor, experts: Experts) -> Tensor:
        ctx.experts = experts
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        one = torch.ones((), dtype=torch.float32, device=gradient.device)
        return gradient, one * ctx.experts.loss_scale, None


def balancing_loss(scores: Tensor, load: Tensor, real: Tensor | None = None) -> Tensor:
    """Return E sum_i f_i P_i for E experts: 1 if the load is even (fp32, a scalar).

    Fedus et al., arXiv 2101.03961, eq. 4 to 6.

    scores  normalised scores of tokens; P is their mean  # [.., E]
    load    how often each expert is chosen; f is its share of the total. No gradient flows through
            it.  # [E]
    real    1 for tokens that are not padding, 0 for padding; None: no padding  # [tokens]
    """
    share = load / load.sum().clamp(min=1)
    return len(load) * (share * mean_over(scores.flatten(0, -2), real)).sum()


def mean_over(values: Tensor, real: Tensor | None) -> Tensor:
    """Return the mean of the values [n, ..] for which `real` [n] is 1; None: the mean of all."""
    return values.mean(0) if real is None else real @ values / real.sum().clamp(min=1)


class Router(torch.nn.Module):
    """The choice of experts: x [s(/tp), b, h] -> weights and experts [s b, k] for all tokens.

    Weights are fp32, experts int64; a dropped choice has weight 0 and expert -1, and so have the
    choices of padding, which does not count toward any load, loss, capacity or statistic.

    load         how often each expert was chosen since the last step, before drops, by the tokens
                 of all tensor ranks together  # [E], fp32

    Sums since the last log line (take_figures): `passes`, the number of micro-batches, without
    those of padding alone; `losses`, each balancing loss without its coefficient, then the z-loss;
    and only if `measured`
    (--moe-per-layer-logging): `interval`, like `load`; `dropped`, the number of dropped choices;
    and `entropy`, of each token's normalised scores.

    expert_bias  added to the scores for the choice only; adjusted to the load after each step
                 (Wang et al., arXiv 2408.15664)  # [E], fp32; None: no bias
    last_load    load of all tokens in the last step, for the balancing loss over the global batch
                 # [E], fp32; None: no such loss
    """

    def __init__(
        self, context: LayerContext, name: str, config: ModelConfig, layer: int, fill: Fill
    ) -> None:
        super().__init__()
        self.layer = layer
        assert config.num_experts is not None, "a layer with a router has experts"
        self.name = name
        self.context = context
        self.config = config
        self.experts = config.num_experts
        shape = self.experts, config.hidden_size
        self.weight = context.parameters.create(f"{name}.weight", shape, None, fill, fp32=True)
        self.bias: torch.nn.Parameter | None = None
        if config.moe_router_bias:
            self.bias = context.parameters.create(
                f"{name}.bias", shape[:1], None, constant(0.0), decay=False, fp32=True
            )
        if config.moe_use_upcycling:  # experts made from one MLP begin with the same scores

            def repeat(values: Tensor) -> None:
                groups = values.unflatten(0, (-1, config.upcycling_granularity))
                groups[:, 1:] = groups[:, :1]

            change_initial(self.weight, repeat)
        kinds = zip(config.moe_router_load_balancing_type, config.moe_aux_loss_coeff, strict=True)
        self.balancing = {kind: factor for kind, factor in kinds if factor}
        z = [config.moe_z_loss_coeff] if config.moe_z_loss_coeff else []
        factors = [*self.balancing.values(), *z]
        # Plain attributes: as buffers, they would be rounded together with the weights.
        zeros = torch.zeros(self.experts, device=context.parameters.device)
        self.factors = zeros.new_tensor(factors)
        self.load = zeros
        self.interval = zeros.clone()
        self.last_load = zeros.clone() if "global_aux_loss" in self.balancing else None
        self.losses = zeros.new_zeros(len(self.balancing) + 1)
        self.dropped = zeros.new_zeros(())
        self.entropy = zeros.new_zeros(())
        self.passes = zeros.new_zeros(())
        self.expert_bias = zeros.clone() if config.moe_router_enable_expert_bias else None
        self.measured = False

    def persistent_tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are saved in addition to the weights, by global name."""
        names = ("expert_bias", "last_load")
        tensors = {f"{self.name}.{name}": getattr(self, name) for name in names}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def forward(self, x: Tensor, call: CallContext) -> tuple[Tensor, Tensor]:
        config = self.config
        context = self.context
        if config.moe_input_jitter_eps and call.dropout is not None:
            x = x * self._noise(x, config.moe_input_jitter_eps, Site.ROUTER, call, context)
        dtype = torch.promote_types(x.dtype, torch.float32)
        logits = Scores.apply(x, self.weight, dtype, context.weight_gradients)
        if self.bias is not None:
            logits = logits + self.bias
        if config.use_mup:
            logits = logits * config.router_scale
        if context.sequence_parallel:
            logits = _Gather.apply(logits, context.tensor, True)
        drawn: Tensor | None = None
        if config.moe_router_force_load_balancing and call.dropout is not None:
            # every tensor rank has all tokens here
            noise = self._noise(logits.detach(), 1.0, Site.CHOICE, call, context.alone())
            drawn = noise.flatten(0, 1)
        weights, experts = self.choose(logits.flatten(0, 1), drawn)
        if (padding := call.padding) is not None:
            padding = context.cut(padding).t().reshape(-1, 1)
            weights = weights.masked_fill(padding, 0.0)
            experts = experts.masked_fill(padding, -1)
        counts = torch.is_grad_enabled() and not within_backward()
        if torch.is_grad_enabled() and self.training:
            real = None if padding is None else padding.logical_not().float().view(-1, x.shape[1])
            weights = self._with_losses(logits, weights, experts, real, counts)
        within = self._within_capacity(weights, experts, x.shape[1])
        if counts and self.training:
            with torch.no_grad():
                self.passes += 1 if call.padding is None else call.padding.all().logical_not()
                self.load += (load := self._count(experts))
                if self.measured:
                    self.interval += load
                    chosen = experts >= 0
                    entropies = torch.xlogy(p := self.shares(logits), p).sum(-1).flatten()
                    self.entropy -= (entropies * chosen[:, 0]).sum()
                    self.dropped += 0 if within is None else (chosen & ~within).sum()
        if within is not None:
            weights = weights.masked_fill(~within, 0.0)
            experts = experts.masked_fill(~within, -1)
        return weights, experts

    def _noise(
        self, like: Tensor, most: float, site: Site, call: CallContext, context: LayerContext
    ) -> Tensor:
        """Return noise from U(1 - most, 1 + most) for the tokens of `like`, [s(/tp), b, ..]."""
        seed, row_layout = call.hidden_mask(like, self.layer, site, context)
        assert seed is not None, "in training, masks have a key"
        layouts = row_layout if isinstance(row_layout, list) else [row_layout]
        both = zip(like.chunk(len(layouts)), layouts, strict=True)
        return torch.cat([placed_noise(chunk, most, seed, at) for chunk, at in both])

    def choose(self, logits: Tensor, drawn: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return weights and experts [t, k] for logits [t, E], best first.

        drawn  numbers by which experts are chosen instead of scores; weights are still by score
        """
        config = self.config
        k = config.moe_router_topk
        softmax = config.moe_router_score_function == "softmax"
        if not softmax:
            scores = logits.sigmoid()
        else:
            scores = logits.softmax(-1) if config.moe_router_pre_softmax else logits
        with torch.no_grad():
            biased = scores if self.expert_bias is None else scores + self.expert_bias
            if drawn is not None:
                biased = drawn
            if config.moe_router_num_groups is not None:
                biased = self._within_groups(biased)
            experts = biased.topk(k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if softmax and not config.moe_router_pre_softmax:
            weights = weights.softmax(-1)
        elif not softmax and k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        factor = config.moe_router_topk_scaling_factor
        return weights if factor is None else weights * factor, experts

    def _within_groups(self, scores: Tensor) -> Tensor:
        """Return the scores, with -inf outside each token's best groups.

        DeepSeek-AI, arXiv 2412.19437, section 2.1.2.
        """
        groups = self.config.moe_router_num_groups
        chosen = self.config.moe_router_group_topk
        assert groups is not None and chosen is not None, "they are given together"
        cut = scores.unflatten(-1, (groups, -1))
        best = cut.topk(self.config.router_group_scores, dim=-1).values.sum(-1)
        outside = torch.ones_like(best, dtype=torch.bool).scatter_(
            -1, best.topk(chosen, dim=-1).indices, False
        )
        within: Tensor = cut.masked_fill(outside.unsqueeze(-1), -math.inf).flatten(-2)
        return within

    def shares(self, logits: Tensor) -> Tensor:
        """Return scores [.., E] that sum to one over all experts, for losses and statistics."""
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
        """Return the weights, with the losses of the logits [s, b, E] attached (_WithLoss).

        real  see balancing_loss  # [s, b]
        """
        losses = list[Tensor]()
        forced = self.config.moe_router_force_load_balancing
        if (
            context_parallel := self.context.context_parallel
        ) is not None:  # losses cover full sequences
            logits = _Gather.apply(logits, context_parallel.group, False)
            if forced:
                experts = gather_first(experts, context_parallel.group)
            else:
                experts = self.choose(logits.detach().flatten(0, 1))[1]
            real = None if real is None else gather_first(real, context_parallel.group)
        shares = self.shares(logits) if self.balancing else logits
        limited = self.expert_bias is not None or self.config.moe_router_num_groups is not None
        if self.balancing and limited and not forced:
            # Losses use choices without bias or group limit (arXiv 2412.19437, eq. 18).
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
            losses.append(mean_over(logits.logsumexp(-1).square().flatten(), of_all))
        if not losses:
            return weights
        values = torch.stack(losses)
        if counts:
            with torch.no_grad():
                self.losses[: len(values)] += values
        return _WithLoss.apply(weights, values @ self.factors, shared_by(self.context))

    @torch.no_grad()
    def _within_capacity(self, weights: Tensor, experts: Tensor, samples: int) -> Tensor | None:
        """Return which choices [t, k] are within their expert's capacity; None: all."""
        tokens, k = experts.shape
        context_parallel = self.context.context_parallel
        config = self.config
        factor = config.moe_eval_capacity_factor
        if self.training:
            factor = config.moe_expert_capacity_factor
        if factor is None:
            return None
        if context_parallel is not None:
            # The capacity is for full sequences: [b k, s/c] -> [b k, s], ordered by position.
            tokens *= context_parallel.size
            weights, experts = (
                context_parallel.gather(y.view(-1, samples * k).t()).t().reshape(tokens, k)
                for y in (weights, experts)
            )
        capacity = math.ceil(tokens * k / self.experts * factor)
        if capacity >= tokens:
            return None
        # The capacity depends on the number of tokens without padding, which is on the device only.
        limit = ((experts[:, 0] >= 0).sum().double() * k / self.experts * factor).ceil()
        columns = experts + 1  # the first column is for choices for padding
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
        if context_parallel is None:
            return inside
        positions = context_parallel.positions(tokens // samples, experts.device)
        return inside.view(-1, samples, k)[positions].flatten(0, 1)
