"""One transformer layer: attention and MLP with their norms, dropout and residual.

By default norms precede attention and MLP, and the MLP follows attention; --norm-position and
--parallel-residual change this.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.config import Config
from megatron.kernels.ops import elementwise
from megatron.layers.attention import SelfAttention
from megatron.layers.context import CallContext, LayerContext, weight_fills
from megatron.layers.gated_delta_net import GatedDeltaNet
from megatron.layers.latent_attention import LatentAttention
from megatron.layers.linear import RecomputeInput, one_token
from megatron.layers.mlp import MLP
from megatron.layers.norm import Norm, norm_of
from megatron.parallel.collectives import reduce_from_tensor_region
from megatron.parallel.gradient_accumulator import wide
from megatron.parallel.keyed_random import ALL_ROWS, RowLayout, Site


def bias_dropout_add(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor,
    probability: float,
    seed: int | None,
    fused: bool = False,
    row_layout: RowLayout | list[RowLayout] = ALL_ROWS,
) -> Tensor:
    """Return residual + dropout(x + bias), in the residual's dtype.

    x and residual [s(/tp), b, h], bias [h]. With `fused` the kernel is used if it supports the
    arguments; for example, x and the residual must have the same dtype. Without a seed nothing is
    dropped. `row_layout`: see keyed_dropout.
    """
    if seed is None:
        probability = 0.0
    if probability == 0.0:
        row_layout = ALL_ROWS
    if bias is not None:
        bias = wide(bias)
    fused = fused and x.dtype == residual.dtype
    if (
        fused
        and not isinstance(row_layout, list)
        and probability < 1.0
        and (bias is not None or probability > 0.0)
    ):
        return elementwise.bias_dropout_add(x, bias, residual, probability, seed or 0, row_layout)
    if bias is not None:
        x = x + bias
    with_kernel = fused and isinstance(row_layout, list)  # masks like the kernel's, not torch's
    return (residual + elementwise.keyed_dropout(x, probability, seed, with_kernel, row_layout)).to(
        residual.dtype
    )


class TransformerLayer(nn.Module):
    """A transformer layer: [s(/tp), b, h] -> [s(/tp), b, h]; `index` counts from 0 over the model.

    With selective recomputation, the backward pass recomputes those of core_attn, mlp_act,
    layernorm, moe_act and moe that --recompute-modules lists.
    """

    def __init__(self, context: LayerContext, config: Config, index: int) -> None:
        super().__init__()
        model = config.model
        name = f"layers.{index}"
        selective = config.recompute.recompute_granularity == "selective"
        recompute = config.recompute.recompute_modules if selective else ()
        summed = model.parallel_residual is None

        def norm_if_any(norm_name: str) -> Norm | None:
            has = norm_name in model.layer_norms
            return (
                norm_of(context, model, f"{name}.{norm_name}", model.hidden_size) if has else None
            )

        self.index = index
        self.dropout = model.hidden_dropout
        self.scale = model.residual_scale if model.residual_scale != 1.0 else None
        self.fused_dropout = context.fusions.bias_dropout
        self.context = context
        self.residual_after_norm = model.apply_residual_connection_post_layernorm
        self.parallel = not summed
        # With the residual after the norm, the residual stream keeps the norm's output anyway.
        self.recomputes_norms = "layernorm" in recompute and not self.residual_after_norm
        self.input_layernorm = norm_if_any("input_layernorm")
        attention: Any = SelfAttention
        if model.layer_kind(index).experimental_attention_variant is not None:
            attention = GatedDeltaNet
        elif model.multi_latent_attention:
            attention = LatentAttention
        self.self_attention = attention(
            context,
            f"{name}.self_attention",
            config,
            index,
            "core_attn" in recompute,
            summed,
        )
        if config.optimizer.qk_clip and isinstance(self.self_attention, SelfAttention):
            heads = model.num_attention_heads // context.tensor.size
            self.self_attention.core.largest = torch.zeros(heads, device=context.parameters.device)
        self.post_self_attn_layernorm = norm_if_any("post_self_attn_layernorm")
        self.post_attention_layernorm = norm_if_any("post_attention_layernorm")
        self.experts = model.has_experts(index)
        self.mlp: nn.Module
        if self.experts:
            from megatron.layers.experts import ExpertMLP  # not needed by other models

            self.mlp = ExpertMLP(
                context,
                f"{name}.mlp",
                model,
                index,
                "moe_act" in recompute,
                "moe" in recompute,
                summed,
            )
        else:
            fills = weight_fills(model)
            self.mlp = MLP(context, f"{name}.mlp", model, *fills, "mlp_act" in recompute, summed)
        # whether the MLP's output is summed over the tensor ranks, as attention's in a parallel layer
        # is not
        self.mlp_summed = summed or (self.experts and self.mlp.summed)
        self.post_mlp_layernorm = norm_if_any("post_mlp_layernorm")

    def forward(self, x: Tensor, call: CallContext) -> Tensor:
        if self.parallel:
            return self._parallel(x, call)
        normed = self._before(self.input_layernorm, x)
        residual = normed if self.residual_after_norm else x
        out, bias = self._after(
            self.post_self_attn_layernorm,
            *self.self_attention(normed, call, self._recompute_norm(self.input_layernorm, x)),
        )
        drops = call.dropout is not None and self.dropout > 0.0
        norm = self.post_attention_layernorm
        alone = drops or self.residual_after_norm  # the sum needs a separate pass
        if norm is not None and not alone and norm.fuses(out, residual):
            normed, x = norm.add(out, bias, residual)
        else:
            x = self._add(out, bias, residual, call, Site.ATTENTION_OUTPUT)
            normed = self._before(norm, x)
        residual = normed if self.residual_after_norm else x
        out, bias = self._after(self.post_mlp_layernorm, *self._mlp(norm, x, normed, call))
        return self._add(out, bias, residual, call, Site.MLP_OUTPUT)

    def _parallel(self, x: Tensor, call: CallContext) -> Tensor:
        """Return x + attention + MLP; one reduction and one dropout mask serve both layers."""
        first = self.input_layernorm
        second = self.post_attention_layernorm
        normed = self._before(first, x)
        attention, bias = self.self_attention(normed, call, self._recompute_norm(first, x))
        if second is None:
            second = first
        else:
            normed = second(x)
        out, more = self._mlp(second, x, normed, call)
        group = self.context.tensor
        terms = attention if self.mlp_summed else attention + out
        total = reduce_from_tensor_region(terms, group, self.context.sequence_parallel)
        out = total + out if self.mlp_summed else total
        if bias is None or more is None:
            bias = more if bias is None else bias
        else:
            bias = wide(bias) + wide(more)
        out, bias = self._after(None, out, bias)
        return self._add(out, bias, x, call, Site.MLP_OUTPUT)

    def _mlp(
        self, norm: Norm | None, x: Tensor, normed: Tensor, call: CallContext
    ) -> tuple[Tensor, Tensor | None]:
        """Return output and bias for `normed`, which is norm(x); with experts the bias is None."""
        if self.experts:
            return self.mlp(normed, call), None
        result: tuple[Tensor, Tensor | None] = self.mlp(normed, self._recompute_norm(norm, x))
        return result

    def _before(self, norm: Norm | None, x: Tensor) -> Tensor:
        """Return norm(x); without a norm, x in the dtype of the weights."""
        return x.to(self.self_attention.dense.weight.dtype) if norm is None else norm(x)

    def _after(
        self, norm: Norm | None, x: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Return norm(x + bias) and no bias; without a norm, x and bias.

        The results are multiplied by the factor of muP or --residual-multiplier.
        """
        if norm is not None:
            x = norm(x if bias is None else x + wide(bias))
            bias = None
        if self.scale is None:
            return x, bias
        return x * self.scale, None if bias is None else wide(bias) * self.scale

    def _recompute_norm(self, norm: Norm | None, x: Tensor) -> RecomputeInput:
        """Return a function that recomputes norm(x); None if that is not configured.

        It takes no memory for x, which the norm's backward pass needs anyway.
        """
        return partial(norm, x.detach()) if self.recomputes_norms and norm is not None else None

    def _add(
        self, x: Tensor, bias: Tensor | None, residual: Tensor, call: CallContext, site: Site
    ) -> Tensor:
        """Return residual + dropout(x + bias)."""
        seed: int | None = None
        row_layout: RowLayout | list[RowLayout] = ALL_ROWS
        if self.dropout > 0.0:
            seed, row_layout = call.hidden_mask(x, self.index, site, self.context)
        fused = self.fused_dropout and not one_token(x)
        return bias_dropout_add(x, bias, residual, self.dropout, seed, fused, row_layout)
