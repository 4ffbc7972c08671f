"""One transformer layer: attention and MLP, each with norm before, dropout and residual after."""

from __future__ import annotations

import importlib
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.choose import choose_attention
from megatron.kernels.ops import elementwise
from megatron.kernels.ops.elementwise import bias_activation
from megatron.kernels.ops.norm import norm
from megatron.layers.attention import SelfAttention
from megatron.layers.context import (
    CallContext,
    Fill,
    LayerContext,
    constant,
    normal,
    xavier_uniform,
)
from megatron.layers.linear import Again, ColumnParallelLinear, RowParallelLinear
from megatron.parallel.sharding import WHOLE, Place, Site, wide

if TYPE_CHECKING:
    from megatron.config import Config, ModelConfig


class Norm(torch.nn.Module):
    """LayerNorm or RMSNorm: [.., h] -> [.., h].

    Ba et al., arXiv 1607.06450; Zhang and Sennrich, arXiv 1910.07467. The result has the dtype of
    the weight; statistics are in fp32. With `one_plus` the stored weight is the gain minus one.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        hidden: int,
        kind: str,
        epsilon: float,
        one_plus: bool = False,
    ) -> None:
        super().__init__()
        make = context.parameters.create
        self.epsilon, self.one_plus, self.rms = epsilon, one_plus, kind == "rmsnorm"
        self.fused = context.fusions.rms_norm if self.rms else context.fusions.layer_norm
        self.apex: Any = None
        if context.fusions.apex_norm:
            self.apex = importlib.import_module("apex.normalization.fused_layer_norm")
        start = constant(0.0 if one_plus else 1.0)
        self.weight = make(f"{name}.weight", (hidden,), None, start, decay=False)
        self.bias = (
            None if self.rms else make(f"{name}.bias", (hidden,), None, constant(0.0), decay=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.fused and x.dtype == self.weight.dtype:
            return self._by_kernel(x, None)[0]
        if self.apex is not None and x.dtype == self.weight.dtype:
            return self._by_apex(x)
        return self._by_torch(x)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual); one pass with the kernel."""
        if self.fused and x.dtype == residual.dtype == self.weight.dtype:
            return self._by_kernel(x, residual)
        total = residual + x
        return self(total), total

    def _by_kernel(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        weight, bias = wide(self.weight), None if self.bias is None else wide(self.bias)
        return norm(x, residual, weight, bias, self.epsilon, self.one_plus, self.rms)

    def _by_torch(self, x: Tensor) -> Tensor:
        dtype, gain = self.weight.dtype, wide(self.weight)
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


def activate(x: Tensor, kind: str) -> Tensor:
    """Apply the activation: [.., ffn] -> [.., ffn].

    For 'swiglu' [.., 2 ffn], gate before value, -> [.., ffn].

    'gelu' is the tanh form (Hendrycks and Gimpel, arXiv 1606.08415, section 2), which GPT-2 and
    Megatron's fused kernel use; 'openai_gelu' names the same function. 'swiglu': Shazeer, arXiv
    2002.05202. 'squared_relu': So et al., arXiv 2109.08668.
    """
    if kind == "swiglu":
        gate, value = x.chunk(2, dim=-1)
        return F.silu(gate) * value
    if kind == "squared_relu":
        return F.relu(x).square()
    assert kind in ("gelu", "openai_gelu"), f"unknown activation {kind}"
    return F.gelu(x, approximate="tanh")


class MLP(torch.nn.Module):
    """MLP, h -> ffn -> h: [s(/tp), b, h] -> ([s(/tp), b, h], bias or None).

    activation_again  recompute the output of the activation function in the backward pass instead
                      of keeping it
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        config: ModelConfig,
        fill: Fill,
        output_fill: Fill,
        activation_again: bool = False,
    ) -> None:
        super().__init__()
        hidden, ffn = config.hidden_size, config.ffn_hidden_size
        self.activation, self.fused = config.activation, context.fusions.bias_activation
        self.activation_again = activation_again
        up = (2, ffn, hidden) if self.activation == "swiglu" else (ffn, hidden)
        bias = config.add_bias_linear
        self.dense_h_to_4h = ColumnParallelLinear(context, f"{name}.dense_h_to_4h", up, fill, bias)
        self.dense_4h_to_h = RowParallelLinear(
            context, f"{name}.dense_4h_to_h", (hidden, ffn), output_fill, bias
        )

    def forward(self, x: Tensor, again: Again = None) -> tuple[Tensor, Tensor | None]:
        """Compute the MLP of x; `again` recomputes x."""
        up, bias = (
            self.dense_h_to_4h.apart(x, again)
            if self.fused
            else (self.dense_h_to_4h(x, again), None)
        )
        activated = self._activate(up, bias)
        # The gradient of the activation function keeps `up` anyway.
        recompute = partial(self._activate, up.detach(), bias) if self.activation_again else None
        result: tuple[Tensor, Tensor | None] = self.dense_4h_to_h(activated, recompute)
        return result

    def _activate(self, up: Tensor, bias: Tensor | None) -> Tensor:
        return (
            bias_activation(up, bias, self.activation)
            if self.fused
            else activate(up, self.activation)
        )


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    probability: float,
    seed: int | None,
    fused: bool = False,
    place: Place = WHOLE,
) -> Tensor:
    """Return residual + dropout(x + bias), in the residual's dtype.

    Without the kernel if x has another dtype.
    """
    if seed is None:
        probability = 0.0
    if bias is not None:
        bias = wide(bias)
    if (
        fused
        and x.dtype == residual.dtype
        and probability < 1.0
        and (bias is not None or probability > 0.0)
    ):
        return elementwise.bias_dropout_add(x, bias, residual, probability, seed or 0, place)
    if bias is not None:
        x = x + bias
    return (residual + elementwise.keyed_dropout(x, probability, seed, place=place)).to(
        residual.dtype
    )


def weight_fills(config: ModelConfig) -> tuple[Fill, Fill]:
    """Return the initial distributions of weights, and of those that write to the residual stream.

    N(0, std^2), and N(0, std^2 / 2L) for the second kind (Radford et al., GPT-2, section 2.3), or
    Xavier's for all.
    """
    if config.init_method_xavier_uniform:
        return xavier_uniform(), xavier_uniform()
    std = config.init_method_std
    return normal(std), normal(std / math.sqrt(2.0 * config.num_layers))


class TransformerLayer(torch.nn.Module):
    """A transformer layer: [s(/tp), b, h] -> [s(/tp), b, h]; `index` counts from 0 over the model.

    With selective recomputation those of core_attn, mlp_act and layernorm that the configuration
    names are recomputed in the backward pass instead of being kept.
    """

    def __init__(self, context: LayerContext, config: Config, index: int) -> None:
        super().__init__()
        model, name = config.model, f"layers.{index}"
        selective = config.recompute.recompute_granularity == "selective"
        again = config.recompute.recompute_modules if selective else ()
        fill, output_fill = weight_fills(model)

        def make_norm(part: str) -> Norm:
            return Norm(
                context,
                f"{name}.{part}",
                model.hidden_size,
                model.normalization,
                model.layernorm_epsilon,
                model.apply_layernorm_1p,
            )

        self.index, self.dropout = index, model.hidden_dropout
        self.fused_dropout, self.context = context.fusions.bias_dropout, context
        self.residual_after_norm = model.apply_residual_connection_post_layernorm
        # The residual stream would keep the norm's output anyway.
        self.norms_again = "layernorm" in again and not self.residual_after_norm
        self.input_layernorm = make_norm("input_layernorm")
        rotary = None
        if model.position_embedding_type == "rope":
            turned = 2 * int(model.kv_channels * model.rotary_percent / 2)
            rotary = context.rotary(turned, model.rotary_base)
        attention = choose_attention(
            config.kernels,
            context.parameters.device,
            config.precision.dtype_name,
            model.seq_length,
            drops=model.attention_dropout > 0.0,
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
        )
        self.post_attention_layernorm = make_norm("post_attention_layernorm")
        self.mlp = MLP(context, f"{name}.mlp", model, fill, output_fill, "mlp_act" in again)

    def forward(self, x: Tensor, call: CallContext) -> Tensor:
        normed = self.input_layernorm(x)
        residual = normed if self.residual_after_norm else x
        out, bias = self.self_attention(normed, call, self._again(self.input_layernorm, x))
        drops = call.dropout is not None and self.dropout > 0.0
        if bias is None and not drops and not self.residual_after_norm:
            # one kernel if there is one
            normed, x = self.post_attention_layernorm.add(out, residual)
        else:
            x = self._add(out, bias, residual, call, Site.ATTENTION_OUTPUT)
            normed = self.post_attention_layernorm(x)
        residual = normed if self.residual_after_norm else x
        out, bias = self.mlp(normed, self._again(self.post_attention_layernorm, x))
        return self._add(out, bias, residual, call, Site.MLP_OUTPUT)

    def _again(self, norm: Norm, x: Tensor) -> Again:
        """Return how to recompute norm(x), if configured; the norm's gradient keeps x anyway."""
        return partial(norm, x.detach()) if self.norms_again else None

    def _add(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, call: CallContext, site: Site
    ) -> Tensor:
        """Return residual + dropout(x + bias)."""
        seed, place = call.hidden_mask(x, self.index, site, self.context)
        return bias_dropout_add(x, bias, residual, self.dropout, seed, self.fused_dropout, place)
