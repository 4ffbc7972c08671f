"""One transformer layer: attention and MLP with their norms, dropout and residual.

By default the norm comes before and the MLP follows attention; --norm-position and
--parallel-residual change that.
"""

from __future__ import annotations

import importlib
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.choose import AttentionFeatures, choose_attention
from megatron.kernels.ops import elementwise
from megatron.kernels.ops.elementwise import activate, bias_activation, wider
from megatron.kernels.ops.norm import add_norm, norm
from megatron.layers.attention import SelfAttention
from megatron.layers.context import (
    CallContext,
    Fill,
    LayerContext,
    constant,
    normal,
    xavier_uniform,
)
from megatron.layers.linear import Again, ColumnParallelLinear, RowParallelLinear, one_token
from megatron.parallel.autograd import Context, Node
from megatron.parallel.collectives import all_reduce, reduce_from_tensor_region
from megatron.parallel.gradient_accumulator import wide
from megatron.parallel.keyed_random import WHOLE, Place, Site
from megatron.parallel.sharding import Rows
from megatron.parallel.topology import Group

if TYPE_CHECKING:
    from megatron.config import Config, ModelConfig


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm: [.., h] -> [.., h].

    Ba et al., arXiv 1607.06450; Zhang and Sennrich, arXiv 1910.07467. The result has the dtype of
    the weight; statistics are in fp32. With `one_plus` the stored weight is the gain minus one.
    With a `part`, this rank's of h, the tensor ranks have one each, and statistics are of the whole.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        hidden: int,
        kind: str,
        epsilon: float,
        one_plus: bool = False,
        part: Rows | None = None,
    ) -> None:
        super().__init__()
        make = context.parameters.create
        dim = None if part is None else 0
        self.group = context.tensor if part is not None and context.tensor.size > 1 else None
        self.epsilon = epsilon
        self.one_plus = one_plus
        self.rms = kind == "rmsnorm"
        self.fused = context.fusions.rms_norm if self.rms else context.fusions.layer_norm
        self.apex: Any = None
        if context.fusions.apex_norm:
            self.apex = importlib.import_module("apex.normalization.fused_layer_norm")
        start = constant(0.0 if one_plus else 1.0)
        self.weight = make(f"{name}.weight", (hidden,), dim, start, rows=part, decay=False)
        self.bias: torch.nn.Parameter | None = None
        if not self.rms:
            zero = constant(0.0)
            self.bias = make(f"{name}.bias", (hidden,), dim, zero, rows=part, decay=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.group is not None:
            weight = wide(self.weight)
            bias = None if self.bias is None else wide(self.bias)
            return _NormOverRanks.apply(
                x, weight, bias, self.epsilon, float(self.one_plus), self.group
            ).to(self.weight.dtype)
        weight = self.weight
        if self.fused and x.dtype == weight.dtype:
            bias = self.bias
            bias = None if bias is None else wide(bias)
            return norm(x, wide(weight), bias, self.epsilon, self.one_plus, self.rms)
        if self.apex is not None and x.dtype == weight.dtype:
            return self._by_apex(x)
        return self._by_torch(x)

    def fuses(self, x: Tensor, residual: Tensor) -> bool:
        """Return whether the kernel adds x and the residual in its pass, by `add`."""
        return self.fused and x.dtype == residual.dtype == self.weight.dtype

    def add(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + bias + residual), x + bias + residual) in one pass.

        `bias`: of the layer that made x.
        """
        shift, of_norm = (None if each is None else wide(each) for each in (bias, self.bias))
        rest = self.epsilon, self.one_plus, self.rms
        return add_norm(x, shift, residual, wide(self.weight), of_norm, *rest)

    def _by_torch(self, x: Tensor) -> Tensor:
        if one_token(x) and x.dtype == self.weight.dtype and not self.one_plus:
            shape = self.weight.shape
            bias = self.bias
            if bias is None:
                return F.rms_norm(x, shape, self.weight, self.epsilon)
            return F.layer_norm(x, shape, self.weight, bias, self.epsilon)
        dtype = self.weight.dtype
        gain = wide(self.weight)
        # A residual stream in fp32 with bf16 weights: normalise in the wider type, return the
        # narrower one.
        x = x.to(torch.promote_types(x.dtype, gain.dtype))
        gain = gain.to(x.dtype) + 1.0 if self.one_plus else gain.to(x.dtype)
        if self.bias is None:
            return F.rms_norm(x, gain.shape, gain, self.epsilon).to(dtype)
        return F.layer_norm(x, gain.shape, gain, wide(self.bias).to(x.dtype), self.epsilon).to(
            dtype
        )

    def _by_apex(self, x: Tensor) -> Tensor:
        gain = self.weight + 1.0 if self.one_plus else self.weight
        normed: Tensor
        if self.bias is None:
            normed = self.apex.fused_rms_norm_affine(x, gain, gain.shape, eps=self.epsilon)
        else:
            normed = self.apex.fused_layer_norm_affine(
                x, gain, self.bias, gain.shape, eps=self.epsilon
            )
        return normed


def norm_of(
    context: LayerContext, model: ModelConfig, name: str, width: int, part: Rows | None = None
) -> Norm:
    """Make a norm of the model's kind."""
    kind = model.normalization
    epsilon = model.layernorm_epsilon
    one_plus = model.apply_layernorm_1p
    return Norm(context, name, width, kind, epsilon, one_plus, part)


class _NormOverRanks(Node):
    """The norm of x [.., h/tp], a part of each row, in x's dtype; without bias an RMS norm."""

    @staticmethod
    def forward(
        ctx: Context,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        epsilon: float,
        plus: float,
        group: Group,
    ) -> Tensor:
        whole = x.shape[-1] * group.size
        centred = wider(x)
        mean = None
        if bias is not None:
            mean = all_reduce(centred.sum(-1, keepdim=True), group) / whole
            centred = centred - mean
        squares = all_reduce(centred.square().sum(-1, keepdim=True), group)
        rstd = (squares / whole + epsilon).rsqrt()
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.plus = plus
        ctx.group = group
        y = centred * rstd * (wider(weight) + plus)
        return (y if bias is None else y + wider(bias)).to(x.dtype)

    @staticmethod
    def backward(ctx: Context, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = ctx.saved_tensors
        dy = wider(dy)
        normed = (wider(x) if mean is None else wider(x) - mean) * rstd
        dweight = (dy * normed).sum_to_size(weight.shape).to(weight.dtype)
        dbias = None if mean is None else dy.sum_to_size(weight.shape).to(weight.dtype)
        g = dy * (wider(weight) + ctx.plus)
        sums = torch.stack(((g * normed).sum(-1), g.sum(-1))[: 1 if mean is None else 2])
        sums = all_reduce(sums, ctx.group).unsqueeze(-1) / (x.shape[-1] * ctx.group.size)
        g = g - normed * sums[0]
        if mean is not None:
            g = g - sums[1]
        return (rstd * g).to(x.dtype), dweight, dbias, None, None, None


class MLP(torch.nn.Module):
    """MLP, h -> ffn -> h: [s(/tp), b, h] -> ([s(/tp), b, h], bias or None).

    activation_again  recompute the output of the activation function in the backward pass instead
                      of keeping it
    summed            see RowParallelLinear
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        config: ModelConfig,
        fill: Fill,
        output_fill: Fill,
        activation_again: bool = False,
        summed: bool = True,
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        ffn = config.ffn_hidden_size
        self.activation = config.activation
        self.fused = context.fusions.bias_activation
        self.activation_again = activation_again
        up = (2, ffn, hidden) if config.gated else (ffn, hidden)
        bias = config.add_bias_linear
        self.dense_h_to_4h = ColumnParallelLinear(context, f"{name}.dense_h_to_4h", up, fill, bias)
        self.dense_4h_to_h = RowParallelLinear(
            context, f"{name}.dense_4h_to_h", (hidden, ffn), output_fill, bias, summed
        )

    def forward(self, x: Tensor, again: Again = None) -> tuple[Tensor, Tensor | None]:
        """Compute the MLP of x; `again` recomputes x."""
        fused = self.fused and not one_token(x)
        up, bias = (
            self.dense_h_to_4h.apart(x, again) if fused else (self.dense_h_to_4h(x, again), None)
        )
        activated = self._activate(up, bias, fused)
        # The gradient of the activation function keeps `up` anyway.
        recompute = None
        if self.activation_again:
            recompute = partial(self._activate, up.detach(), bias, fused)
        result: tuple[Tensor, Tensor | None] = self.dense_4h_to_h(activated, recompute)
        return result

    def _activate(self, up: Tensor, bias: Tensor | None, fused: bool) -> Tensor:
        kind = self.activation
        return bias_activation(up, bias, kind) if fused else activate(up, kind)


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    probability: float,
    seed: int | None,
    fused: bool = False,
    place: Place | list[Place] = WHOLE,
) -> Tensor:
    """Return residual + dropout(x + bias), in the residual's dtype.

    Without the kernel if x has another dtype. `place`: of the mask, see keyed_dropout.
    """
    if seed is None:
        probability = 0.0
    if probability == 0.0:
        place = WHOLE
    if bias is not None:
        bias = wide(bias)
    fused = fused and x.dtype == residual.dtype
    if (
        fused
        and not isinstance(place, list)
        and probability < 1.0
        and (bias is not None or probability > 0.0)
    ):
        return elementwise.bias_dropout_add(x, bias, residual, probability, seed or 0, place)
    if bias is not None:
        x = x + bias
    with_kernel = fused and isinstance(place, list)  # whose masks are not torch's
    return (residual + elementwise.keyed_dropout(x, probability, seed, with_kernel, place)).to(
        residual.dtype
    )


def weight_fills(config: ModelConfig) -> tuple[Fill, Fill]:
    """Return the initial distributions of weights, and of those that write to the residual stream.

    N(0, std^2), and N(0, std^2 / 2L) for the second kind (Radford et al., GPT-2, section 2.3), or
    Xavier's for all. In muP they are those of the base model, whose L layers count.
    """
    if config.init_method_xavier_uniform:
        return xavier_uniform(), xavier_uniform()
    std = config.init_method_std
    layers = config.mup_base_num_layers or config.num_layers
    return normal(std), normal(std / math.sqrt(2.0 * layers))


class TransformerLayer(torch.nn.Module):
    """A transformer layer: [s(/tp), b, h] -> [s(/tp), b, h]; `index` counts from 0 over the model.

    With selective recomputation those of core_attn, mlp_act and layernorm that the configuration
    names are recomputed in the backward pass instead of being kept.
    """

    def __init__(self, context: LayerContext, config: Config, index: int) -> None:
        super().__init__()
        model = config.model
        name = f"layers.{index}"
        selective = config.recompute.recompute_granularity == "selective"
        again = config.recompute.recompute_modules if selective else ()
        fill, output_fill = weight_fills(model)

        make_norm = partial(norm_of, context, model)

        def norm_if_any(part: str) -> Norm | None:
            has = part in model.layer_norms
            return make_norm(f"{name}.{part}", model.hidden_size) if has else None

        self.index = index
        self.dropout = model.hidden_dropout
        self.scale = model.residual_scale if model.use_mup else None
        self.fused_dropout = context.fusions.bias_dropout
        self.context = context
        self.residual_after_norm = model.apply_residual_connection_post_layernorm
        self.parallel = model.parallel_residual is not None
        # The residual stream would keep the norm's output anyway.
        self.norms_again = "layernorm" in again and not self.residual_after_norm
        self.input_layernorm = norm_if_any("input_layernorm")
        rotary = None
        if model.position_embedding_type == "rope":
            turned = 2 * int(model.kv_channels * model.rotary_percent / 2)
            rotary = context.rotary(turned, model.rotary_base, model)
        attention = choose_attention(
            config.kernels,
            context.parameters.device,
            config.precision.dtype_name,
            model.seq_length,
            AttentionFeatures.of_layer(config, index),
        )
        self.self_attention = SelfAttention(
            context,
            f"{name}.self_attention",
            model,
            index,
            fill,
            output_fill,
            rotary,
            "core_attn" in again,
            attention,
            make_norm if model.qk_layernorm else None,
            summed=not self.parallel,
        )
        if config.optimizer.qk_clip:
            heads = model.num_attention_heads // context.tensor.size
            self.self_attention.core.largest = torch.zeros(heads, device=context.parameters.device)
        self.post_self_attn_layernorm = norm_if_any("post_self_attn_layernorm")
        self.post_attention_layernorm = norm_if_any("post_attention_layernorm")
        self.experts = model.has_experts(index)
        self.mlp: torch.nn.Module
        if self.experts:
            from megatron.layers.experts import ExpertMLP  # no part of other models

            self.mlp = ExpertMLP(
                context,
                f"{name}.mlp",
                model,
                index,
                fill,
                output_fill,
                MLP,
                activation_again="moe_act" in again,
                again="moe" in again,
                summed=not self.parallel,
            )
        else:
            self.mlp = MLP(
                context,
                f"{name}.mlp",
                model,
                fill,
                output_fill,
                "mlp_act" in again,
                summed=not self.parallel,
            )
        self.post_mlp_layernorm = norm_if_any("post_mlp_layernorm")

    def forward(self, x: Tensor, call: CallContext) -> Tensor:
        if self.parallel:
            return self._parallel(x, call)
        normed = self._before(self.input_layernorm, x)
        residual = normed if self.residual_after_norm else x
        out, bias = self._after(
            self.post_self_attn_layernorm,
            *self.self_attention(normed, call, self._again(self.input_layernorm, x)),
        )
        drops = call.dropout is not None and self.dropout > 0.0
        norm = self.post_attention_layernorm
        alone = drops or self.residual_after_norm  # the sum needs a pass of its own
        if norm is not None and not alone and norm.fuses(out, residual):
            normed, x = norm.add(out, bias, residual)
        else:
            x = self._add(out, bias, residual, call, Site.ATTENTION_OUTPUT)
            normed = self._before(norm, x)
        residual = normed if self.residual_after_norm else x
        out, bias = self._after(self.post_mlp_layernorm, *self._mlp(norm, x, normed, call))
        return self._add(out, bias, residual, call, Site.MLP_OUTPUT)

    def _parallel(self, x: Tensor, call: CallContext) -> Tensor:
        """Return x + attention + MLP, whose sum has one message and one dropout mask."""
        first = self.input_layernorm
        second = self.post_attention_layernorm
        normed = self._before(first, x)
        attention, bias = self.self_attention(normed, call, self._again(first, x))
        if second is None:
            second = first
        else:
            normed = second(x)
        out, more = self._mlp(second, x, normed, call)
        group = self.context.tensor
        scatters = self.context.sequence_parallel
        out = reduce_from_tensor_region(attention + out, group, scatters)
        if bias is not None and more is not None:
            bias = wide(bias) + wide(more)
        out, bias = self._after(None, out, bias)
        return self._add(out, bias, x, call, Site.MLP_OUTPUT)

    def _mlp(
        self, norm: Norm | None, x: Tensor, normed: Tensor, call: CallContext
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and bias of the MLP, or of the experts, of `normed`, which is norm(x)."""
        if self.experts:
            return self.mlp(normed, call), None
        result: tuple[Tensor, Tensor | None] = self.mlp(normed, self._again(norm, x))
        return result

    def _before(self, norm: Norm | None, x: Tensor) -> Tensor:
        """Return norm(x), or x in the type of the weights."""
        return x.to(self.self_attention.dense.weight.dtype) if norm is None else norm(x)

    def _after(
        self, norm: Norm | None, x: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return norm(x + bias), without a bias; x and bias if there is no norm.

        In muP times the factor of the depth.
        """
        if norm is not None:
            x = norm(x if bias is None else x + wide(bias))
            bias = None
        if self.scale is None:
            return x, bias
        return x * self.scale, None if bias is None else wide(bias) * self.scale

    def _again(self, norm: Norm | None, x: Tensor) -> Again:
        """Return how to recompute norm(x), if configured; the norm's gradient keeps x anyway."""
        return partial(norm, x.detach()) if self.norms_again and norm is not None else None

    def _add(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, call: CallContext, site: Site
    ) -> Tensor:
        """Return residual + dropout(x + bias)."""
        seed: int | None = None
        place: Place | list[Place] = WHOLE
        if self.dropout > 0.0:
            seed, place = call.hidden_mask(x, self.index, site, self.context)
        fused = self.fused_dropout and not one_token(x)
        return bias_dropout_add(x, bias, residual, self.dropout, seed, fused, place)
