"""Gated DeltaNet: linear attention by a gated delta rule (Yang et al., arXiv 2412.06464).

A head's state is a matrix S [d_k, d_v], which maps keys to values. Token t lets it decay by
exp(g_t), and moves the value of its key towards its own value by a share beta_t:

    S_t = e^(g_t) S_(t-1) + k_t beta_t (v_t - e^(g_t) S_(t-1)^T k_t)^T,    o_t = S_t^T q_t

The state takes the place of cached keys and values: it does not grow with the sequence.
"""

from __future__ import annotations

import importlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.config import Config
from megatron.kernels.choose import linear_attention
from megatron.kernels.library import recompute_later
from megatron.kernels.ops.elementwise import wider
from megatron.layers.context import CallContext, LayerContext, constant, weight_fills
from megatron.layers.linear import ColumnParallelLinear, RecomputeInput, RowParallelLinear
from megatron.layers.norm import Norm
from megatron.parallel.gradient_accumulator import wide

CHUNK = 64
"""Tokens whose updates of the state are computed together."""


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    documents: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs o [b, n, s, d_v] and the last state [b, n, d_k, d_v], in chunks.

    q, k [b, n, s, d_k]; v [b, n, s, d_v]; decay (g) and beta [b, n, s]. `documents` [b, s] numbers
    the document of each token in ascending order: each begins with an empty state. `state`: the one
    before the first token, if it is not empty.

    Within a chunk that begins with the state S, c is the sum of decays up to each token. The
    updates U, with one row for each token, solve a triangular system (section 3.3 of the paper)

        (I + L) U = beta (V - e^c K S),    L_ij = beta_i e^(c_i - c_j) k_i k_j  for j < i

    and with the same factors for j <= i, O = e^c Q S + (e^(c_i - c_j) q_i k_j) U.
    """
    length = q.shape[2]
    size = min(CHUNK, length)
    more = -length % size
    q, k, v = (F.pad(x, (0, 0, 0, more)).unflatten(2, (-1, size)) for x in (q, k, v))
    decay, beta = (F.pad(x, (0, more)).unflatten(2, (-1, size)) for x in (decay, beta))
    total = decay.cumsum(-1)  # [b, n, chunks, size]
    hidden = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
    read = total.exp()  # factor on what a token reads from the state before its chunk
    written = (total[..., -1:] - total).exp()  # factor on its update in the state after its chunk
    remaining = read[..., -1]
    if documents is not None:
        numbers = F.pad(documents, (0, more), value=-1).unflatten(1, (-1, size)).unsqueeze(1)
        last = numbers[..., -1:].clone()
        last[:, :, -1] = documents[:, None, -1:]
        before = torch.cat((numbers[:, :, :1, :1], last[:, :, :-1]), 2)
        hidden = hidden | (numbers.unsqueeze(-1) != numbers.unsqueeze(-2))
        read = read * (numbers == before)
        written = written * (numbers == last)
        remaining = remaining * (before == last).squeeze(-1)
    apart = total.unsqueeze(-1) - total.unsqueeze(-2)
    factors = apart.masked_fill(hidden, -math.inf).exp()
    share = beta.unsqueeze(-1)
    system = share * (k @ k.transpose(-1, -2)) * factors
    right = torch.cat((v, k * read.unsqueeze(-1)), -1) * share
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, keys = solved.split((v.shape[-1], k.shape[-1]), -1)
    scores = (q @ k.transpose(-1, -2)) * factors
    q = q * read.unsqueeze(-1)
    k = (k * written.unsqueeze(-1)).transpose(-1, -2)
    remaining = remaining[..., None, None]
    if state is None:
        state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1])
    outputs = []
    # The gradient of unbind is one tensor; slices would need, for each chunk, one as large as all.
    chunks = (x.unbind(2) for x in (q, k, values, keys, scores, remaining))
    for q_i, k_i, values_i, keys_i, scores_i, remaining_i in zip(*chunks, strict=True):
        update = values_i - keys_i @ state
        outputs.append(q_i @ state + scores_i @ update)
        state = state * remaining_i + k_i @ update
    return torch.cat(outputs, 2)[:, :, :length], state


def causal_convolution(x: Tensor, weight: Tensor, documents: Tensor | None) -> Tensor:
    """Return the sums over w tokens of each channel: x [w - 1 + s, b, c], weight [c, w].

    The first w - 1 tokens of x come before the results, [s, b, c]. A token sees none of another
    document; `documents` [b, s].
    """
    width = weight.shape[1]
    length = len(x) - width + 1
    out = x[width - 1 :] * weight[:, -1]
    for back in range(1, width):
        seen = x[width - 1 - back :][:length]
        if documents is not None:
            same = documents[:, back:] == documents[:, : max(length - back, 0)]
            seen = seen * F.pad(same, (min(back, length), 0)).t().unsqueeze(2)
        out = out + seen * weight[:, -1 - back]
    return out


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet in place of attention: [s(/tp), b, h] -> ([s(/tp), b, h], None).

    Queries, keys and values pass a causal convolution over a few tokens. Queries and keys have
    length 1; the output of each head is normalized, and multiplied by silu of a gate. Each key head
    serves several value heads, each of which has a state.

    The rows of in_proj are ordered [key head][query, key, values, gates, betas, decays], and those
    of conv1d [key head][query, key, values], so that splitting them gives every tensor rank whole
    heads. layer, recompute and summed: see SelfAttention.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        config: Config,
        layer: int,
        recompute: bool = False,
        summed: bool = True,
    ) -> None:
        super().__init__()
        model = config.model
        self.layer = layer
        self.recompute = recompute
        heads = model.linear_num_key_heads
        states = model.linear_num_value_heads
        self.each = states // heads  # value heads for each key head
        self.key_width = model.linear_key_head_dim
        self.value_width = model.linear_value_head_dim
        self.heads = heads // context.tensor.size
        # a token's state is read by the key, updated, and read by the query
        context.core_flops[layer] += 6 * states * self.key_width * self.value_width
        values = self.each * self.value_width
        self.channels = 2 * self.key_width + values  # of a key head
        device = context.parameters.device
        kind = "cpu" if device is None else device.type
        self.fused = linear_attention(kind, config.precision.dtype_name).usable
        fill, output_fill = weight_fills(model)
        make = context.parameters.create
        rows = heads * (self.channels + values + 2 * self.each)
        self.in_proj = ColumnParallelLinear(
            context, f"{name}.in_proj", (rows, model.hidden_size), fill, False
        )
        width = model.linear_conv_kernel_dim

        def uniform(block: Tensor, generator: torch.Generator, _: tuple[int, ...]) -> None:
            block.uniform_(-(width**-0.5), width**-0.5, generator=generator)

        def logarithms(block: Tensor, generator: torch.Generator, _: tuple[int, ...]) -> None:
            block.uniform_(1.0, 16.0, generator=generator).log_()

        shape = heads * self.channels, width
        self.convolution = make(f"{name}.conv1d.weight", shape, 0, uniform)
        self.log_rate = make(f"{name}.A_log", (states,), 0, logarithms, decay=False)
        self.bias = make(f"{name}.dt_bias", (states,), 0, constant(1.0), decay=False)
        epsilon = model.layernorm_epsilon
        self.out_norm = Norm(context, f"{name}.out_norm", self.value_width, "rmsnorm", epsilon)
        self.dense = RowParallelLinear(
            context,
            f"{name}.out_proj",
            (model.hidden_size, states * self.value_width),
            output_fill,
            False,
            summed,
        )

    def forward(
        self, x: Tensor, call: CallContext, recompute_input: RecomputeInput = None
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the layer for x; `recompute_input` recomputes x in the backward pass."""
        mixed = self.in_proj(x, recompute_input).unflatten(2, (self.heads, -1))
        values = self.each * self.value_width
        sizes = self.channels, values, self.each, self.each
        channels, gate, beta, rate = mixed.split(sizes, dim=3)
        inputs = call, channels.flatten(2), beta.flatten(2), rate.flatten(2)
        if self.recompute and torch.is_grad_enabled() and call.cache is None:
            out = recompute_later(self._core, *inputs)
        else:
            out = self._core(*inputs)
        normed = self.out_norm(out) * F.silu(gate.reshape(out.shape))
        result: tuple[Tensor, Tensor | None] = self.dense(normed.flatten(2))
        return result

    def _core(self, call: CallContext, channels: Tensor, beta: Tensor, rate: Tensor) -> Tensor:
        """Return the outputs; with a cache, continue from what it has of earlier tokens."""
        cache = call.cache
        before = self.convolution.shape[1] - 1
        state = None
        tail = channels.new_zeros(channels.shape[1], before, channels.shape[2])
        if cache is not None:
            state, tail = cache.states.get(self.layer, (None, tail))
        earlier = torch.cat((tail.transpose(0, 1), channels))
        out, state = self._states(call, earlier, beta, rate, state)
        if cache is not None:
            ends = torch.full((channels.shape[1],), len(channels), device=channels.device)
            if call.padding is not None:
                ends = call.padding.logical_not().sum(1)
            rows = ends + torch.arange(before, device=ends.device).unsqueeze(1)  # [w - 1, b]
            tail = earlier[rows, torch.arange(len(ends), device=ends.device)].transpose(0, 1)
            cache.states[self.layer] = state, tail
        return out

    def _states(
        self, call: CallContext, channels: Tensor, beta: Tensor, rate: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs [s, b, value heads/tp, d_v] and the last state.

        channels [w - 1 + s, b, ..], with the tokens before; beta and rate [s, b, value heads/tp].
        Padding does not change the state.
        """
        documents = None if call.documents is None else call.documents.numbers
        convolved = causal_convolution(wider(channels), wider(wide(self.convolution)), documents)
        active = F.silu(convolved).unflatten(2, (self.heads, -1))
        q, k, v = active.split((self.key_width, self.key_width, self.each * self.value_width), 3)
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        q, k = (x.repeat_interleave(self.each, 2) for x in (q, k))
        v = v.reshape(*v.shape[:2], -1, self.value_width)
        beta = wider(beta).sigmoid()
        rate = F.softplus(wider(rate) + wider(wide(self.bias)))
        decay = -wider(wide(self.log_rate)).exp() * rate
        if call.padding is not None:
            padding = call.padding.t().unsqueeze(2)
            beta, decay = (x.masked_fill(padding, 0.0) for x in (beta, decay))
        if self.fused and documents is None and state is None:
            fla = importlib.import_module("fla.ops.gated_delta_rule")
            narrow = [x.transpose(0, 1).to(channels.dtype) for x in (q, k, v)]
            factors = [x.transpose(0, 1) for x in (decay, beta)]
            out, state = fla.chunk_gated_delta_rule(*narrow, *factors, output_final_state=True)
            return out.transpose(0, 1), state
        q, k, v = (x.permute(1, 2, 0, 3) for x in (q * self.key_width**-0.5, k, v))
        decay, beta = (x.permute(1, 2, 0) for x in (decay, beta))
        out, state = gated_delta_rule(q, k, v, decay, beta, documents, state)
        return out.permute(2, 0, 1, 3).to(channels.dtype), state
