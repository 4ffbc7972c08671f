"""Parameters, FLOPs and message sizes of a GPT, computed from its configuration alone.

The built-in model needs no torch for this; user-defined layers and models do.

Only the operations of matrix products are counted, a multiplication and an addition for each term:
2 m n k for [m, k] x [k, n]. Norms, activations, softmax and dropout are left out, as in the papers
whose figures these are compared with.

Letters: h hidden size, f MLP size, n heads, g key and value heads, d head size, s sequence length,
V vocabulary, L layers, B global batch size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from megatron.config import Config
from megatron.config.model import ModelConfig
from megatron.config.parallel import RecomputeConfig

_TERA = 1e12

# Dense peak of the matrix units in fp32, fp16 and bf16, TFLOP/s, from the vendors' data sheets, by
# part of the device name; the first match counts. 0: none in this dtype. Devices are counted as in
# torch: each of the two dies of an MI250X or MI250 is one.
_PEAKS = """
    MI355X     157.3  2516.6  2516.6
    MI350X     144.2  2306.9  2306.9
    MI325X     163.4  1307.4  1307.4
    MI300X     163.4  1307.4  1307.4
    MI300A     122.6   980.6   980.6
    MI250X      47.9   191.5   191.5
    MI250       45.3   181.0   181.0
    MI210       45.3   181.0   181.0
    MI100       46.1   184.6    92.3
    H100 PCIe   51.2   756.0   756.0
    H100 NVL    60.0   835.0   835.0
    H100        66.9   989.4   989.4
    H200        66.9   989.4   989.4
    A100        19.5   312.0   312.0
    V100        15.7   125.0       0
"""


def layer_matrices(model: ModelConfig, layer: int = 0, active: bool = False) -> int:
    """Return the number of entries in a layer's weight matrices, routers included.

    A gated MLP has three matrices, another one has two. `active`: count only the experts that a
    token passes through.
    """
    h = model.hidden_size
    n = model.num_attention_heads
    d = model.kv_channels
    if model.layer_kind(layer).experimental_attention_variant:
        states = model.linear_num_value_heads
        # keys and queries; values, gates and output; betas and decays
        rows = 2 * model.linear_num_key_heads * model.linear_key_head_dim
        attention = h * (rows + states * (3 * model.linear_value_head_dim + 2))
    elif model.multi_latent_attention:
        rank = model.q_lora_rank
        latent = model.kv_lora_rank
        queries = h * n * d if rank is None else rank * (h + n * d)
        keys = h * (latent + model.qk_pos_emb_head_dim) + latent * n * model.qk_head_dim
        attention = queries + keys + n * model.v_head_dim * (latent + h)
    else:
        # queries, gates and output; keys and values
        attention = h * d * (model.query_heads + n + 2 * model.num_key_value_heads)
    return attention + h * _mlp_rows(model, layer, active)


def _attention_vectors(model: ModelConfig, layer: int) -> int:
    """Return the number of parameters of a layer's attention that are not in matrices."""
    if model.layer_kind(layer).experimental_attention_variant:
        keys = 2 * model.linear_num_key_heads * model.linear_key_head_dim
        states = model.linear_num_value_heads
        width = model.linear_value_head_dim
        return (keys + states * width) * model.linear_conv_kernel_dim + 2 * states + width
    heads = model.num_attention_heads
    groups = model.num_key_value_heads
    total = int(model.attention_output_bias) * model.hidden_size
    total += int(model.softmax_type == "learnable") * heads
    total += int(model.qkv_bias) * (model.query_heads + 2 * groups) * model.kv_channels
    if model.qk_layernorm:
        entries = model.kv_channels
        entries *= 2 if model.qk_layernorm_over == "head" else heads + groups
        if model.multi_latent_attention:
            entries = model.kv_lora_rank + (model.q_lora_rank or 0)
        total += (2 if model.normalization == "layernorm" else 1) * entries
    return total


def _experts(model: ModelConfig, layer: int, active: bool) -> tuple[int, int]:
    """Return the number of MLPs in a layer, and their width."""
    if model.num_experts is None or not model.has_experts(layer):
        return 1, model.ffn_hidden_size
    assert model.moe_ffn_hidden_size is not None, "it is derived if there are experts"
    return model.moe_router_topk if active else model.num_experts, model.moe_ffn_hidden_size


def _mlp_rows(model: ModelConfig, layer: int, active: bool) -> int:
    """Return the number of entries in the matrices of a layer's MLP or experts, divided by h."""
    count, width = _experts(model, layer, active)
    width *= count
    router = 0
    if model.num_experts is not None and model.has_experts(layer):
        width += model.moe_shared_expert_intermediate_size or 0
        router = model.num_experts + int(model.moe_shared_expert_gate)
    return (3 if model.gated else 2) * width + router


def total_parameters(model: ModelConfig, active: bool = False) -> int:
    """Return the number of parameters of the model; a tied embedding is counted once.

    `active`: count only the experts that a token passes through.
    """
    h = model.hidden_size
    bias = int(model.add_bias_linear)
    width = 2 if model.normalization == "layernorm" else 1  # vectors per norm
    layer = len(model.layer_norms) * width * h
    words = _vocab(model) * h * (2 if model.untie_embeddings_and_output_weights else 1)
    learned = model.position_embedding_type == "learned_absolute"
    total = words + (model.max_position_embeddings * h if learned else 0)
    total += (2 if model.embedding_layernorm else 1) * width * h
    total += model.mtp_num_layers * (2 * h * h + 3 * width * h)  # projection and norms
    for i in range(model.num_layers + model.mtp_num_layers):
        count, outputs = _experts(model, i, active)
        biases = count * ((2 if model.gated else 1) * outputs + h)
        total += layer + layer_matrices(model, i, active) + bias * biases
        total += _attention_vectors(model, i)
        if model.num_experts is not None and model.has_experts(i) and model.moe_router_bias:
            total += model.num_experts
    total += 2 * int(model.xielu) * (model.num_layers + model.mtp_num_layers)
    return total


def parameters_of(config: Config) -> int:
    """Return the number of parameters of a configuration's model.

    If it has user-defined pieces or adapters, it is built without allocating memory.
    """
    model = config.model
    if config.pieces.layer is None and config.pieces.model is None and model.lora_rank is None:
        return total_parameters(model)
    from megatron.model.gpt import global_shapes

    return sum(math.prod(shape) for shape in global_shapes(config).values())


def flops_per_token_of(config: Config) -> float:
    """Return model_flops_per_token of a configuration's model.

    Each parameter of user-defined pieces beyond those of the built-in model counts as one
    multiplication and one addition per token in the forward pass, and as two of each in the
    backward pass; so do adapters. Attention counts as in the built-in layer.
    """
    more = parameters_of(config) - total_parameters(config.model)
    saved = _saved_flops(config) if config.model.trains_in_part else 0.0
    return model_flops_per_token(config.model) + 6.0 * more - saved


def _saved_flops(config: Config) -> float:
    """Return the FLOPs per token of a full training that frozen parameters save.

    They have no weight gradients, and layers have no backward pass if nothing trains in or before
    them. The first layer that trains counts as if its input needed a gradient.
    """
    from megatron.model.gpt import global_shapes
    from megatron.parallel.sharding import kind_of

    model = config.model
    shapes = global_shapes(config)
    saved = 0.0
    for name, shape in shapes.items():
        tied = name.endswith("word_embeddings.weight")
        tied = tied and not model.untie_embeddings_and_output_weights
        if not model.trains(name) and (tied or kind_of(name, shape) in ("hidden", "output")):
            used = model.moe_router_topk / (model.num_experts or 1) if ".experts." in name else 1.0
            saved += 2.0 * used * math.prod(shape)
    first = min(
        (
            0 if n.startswith("embedding") else int(n.split(".")[1])
            for n in shapes
            if model.trains(n) and n.startswith(("embedding", "layers."))
        ),
        default=model.num_layers,
    )
    for layer in range(first):
        saved += layer_flops(model, layer) + attention_score_flops(model, layer)
    return saved


def _vocab(model: ModelConfig) -> int:
    assert model.vocab_size is not None, (
        "the vocabulary size is not known yet: read the tokenizer first"
    )
    return model.vocab_size


# -- operations ------------------------------------------------------------------------------------


def attention_score_flops(model: ModelConfig, layer: int = 0) -> float:
    """Return the forward FLOPs per token of a layer's scores and weighted values: 4 s n d.

    Values that have another size than keys have it in the second half of these.

    All pairs are counted, including those that a causal mask hides. For a layer with a
    sliding window, the keys of a full window are counted: 4 (LEFT + 1) n d. For linear attention:
    the three products of a vector with each head's state, token by token.
    """
    if model.layer_kind(layer).experimental_attention_variant:
        state = model.linear_key_head_dim * model.linear_value_head_dim
        return 6.0 * model.linear_num_value_heads * state
    window = model.window(layer)
    keys = model.seq_length if window is None else min(window + 1, model.seq_length)
    both = model.kv_channels + model.value_channels
    return 2.0 * keys * model.num_attention_heads * both


def layer_flops(model: ModelConfig, layer: int = 0) -> float:
    """Return the forward FLOPs per token of a layer; layers are numbered from 0."""
    return 2.0 * layer_matrices(model, layer, active=True) + attention_score_flops(model, layer)


def _last_product_flops(model: ModelConfig, layer: int) -> float:
    """Return the forward FLOPs per token of a layer's last matrix product.

    0 if more than additions follow it.
    """
    if model.has_experts(layer) or "post_mlp_layernorm" in model.layer_norms:
        return 0.0
    return 2.0 * model.hidden_size * model.ffn_hidden_size


def _mean_over_layers(model: ModelConfig, flops: Callable[[ModelConfig, int], float]) -> float:
    """Return the FLOPs of a layer, averaged over all layers."""
    kinds = Counter(map(model.layer_kind, range(model.num_layers)))
    total = math.fsum(n * flops(model.of_kind(kind), 0) for kind, n in kinds.items())
    return total / model.num_layers


def model_flops_per_token(model: ModelConfig) -> float:
    """Return the FLOPs of one token's forward and backward pass, without recomputation.

    The backward pass takes twice as many as the forward pass. The logits take 2 h V of the latter,
    and so they do again in each layer of multi-token prediction, with a projection of 4 h h.
    """
    head = 2.0 * model.hidden_size * _vocab(model)
    layers = model.num_layers * _mean_over_layers(model, layer_flops)
    projection = 4.0 * model.hidden_size * model.hidden_size
    later = layer_flops(model, model.num_layers) + projection + head
    return 3.0 * (layers + head + model.mtp_num_layers * later)


def recompute_flops_per_token(
    model: ModelConfig, recompute: RecomputeConfig, groups: Sequence[int]
) -> float:
    """Return the FLOPs per token that recomputation adds.

    groups   sizes of the groups of layers that are fully recomputed, in all stages. A group's last
             matrix product is not repeated, since no gradient needs its result

    With selective recomputation, attention cores and experts are counted; activation functions and
    norms are never counted.
    """
    added = math.fsum(groups) * _mean_over_layers(model, layer_flops)
    added -= len(groups) * _mean_over_layers(model, _last_product_flops)
    modules = recompute.recompute_modules if recompute.recompute_granularity == "selective" else ()
    if "core_attn" in modules:
        added += model.num_layers * _mean_over_layers(model, attention_score_flops)
    for layer in filter(model.has_experts, range(model.num_layers)) if "moe" in modules else ():
        added += 2.0 * model.hidden_size * _mlp_rows(model, layer, active=True)
    return added


def paper_flops(
    global_batch_size: int,
    seq_length: int,
    num_layers: int,
    hidden_size: int,
    vocab_size: int,
    *,
    checkpointing: bool = True,
) -> float:
    """Return the FLOPs of an iteration of a GPT with f = 4h and g = n, as in Dash et al.

    The formula (arXiv 2312.12705) is

        24 k B s L h^2 (1 + s / (6 h) + V / (16 L h)),  k = 4 with activation checkpointing and 3
        without.

    The vocabulary term is exact for k = 4 and logits that are not recomputed (Narayanan et al.,
    arXiv 2104.04473, section 5.1); with k = 3 it is a quarter too small.
    """
    k = 4 if checkpointing else 3
    h = hidden_size
    per_layer = 24.0 * k * global_batch_size * seq_length * num_layers * h * h
    return per_layer * (1.0 + seq_length / (6.0 * h) + vocab_size / (16.0 * num_layers * h))


def peak_tflops(device_name: str, dtype_name: str) -> float | None:
    """Return the peak of a device's matrix units in TFLOP/s (dense; fp32 without TF32).

    `device_name` is the result of torch.cuda.get_device_name, `dtype_name` 'float32', 'bfloat16' or
    'float16'. None for a CPU, and for a device or dtype that is not in the table.

    >>> peak_tflops("AMD Instinct MI250X", "bfloat16")
    191.5
    """
    rows = (row.rsplit(maxsplit=3) for row in _PEAKS.strip().splitlines())
    peaks = next((p for name, *p in rows if name.strip().lower() in device_name.lower()), "000")
    by_dtype = dict(zip(("float32", "float16", "bfloat16"), map(float, peaks), strict=True))
    return by_dtype.get(dtype_name) or None


def device_unit(device_name: str) -> str:
    """Return the unit for per-device figures: a GCD for the MI250, otherwise a device.

    Programs see each half of an MI250 as a device.

    >>> device_unit("AMD Instinct MI250X"), device_unit("NVIDIA H100")
    ('GCD', 'device')
    """
    return "GCD" if "MI250" in device_name else "device"


def achieved_tflops(flops: float, seconds: float, devices: int) -> float:
    """Return the TFLOP/s per device if `devices` devices take `seconds` for `flops`."""
    return flops / (seconds * devices * _TERA)


def utilization(flops: float, seconds: float, devices: int, peak: float | None) -> float | None:
    """Return the used fraction of the peak (TFLOP/s per device).

    It is the MFU for model FLOPs and the HFU for hardware FLOPs. None if the peak is unknown. A
    value above 1 means that the FLOPs, the time or the peak is wrong.
    """
    return None if peak is None else achieved_tflops(flops, seconds, devices) / peak


# -- messages --------------------------------------------------------------------------------------


def ring_bytes(message_bytes: float, ranks: int, collective: str = "all_reduce") -> float:
    """Return the bytes that each rank sends in a ring collective over a tensor of `message_bytes`.

    `collective` is "all_reduce" (2 (n-1)/n of the tensor), "all_gather" or "reduce_scatter"
    ((n-1)/n).
    """
    factor = 2.0 if collective == "all_reduce" else 1.0
    return factor * message_bytes * (ranks - 1) / ranks
