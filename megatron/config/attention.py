"""Settings of attention: options, derived values, checks and rules.

A new variant of attention adds its settings here; its layer is a file in megatron/layers, which
layers/transformer.py chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.config.checks import Problems, Resolved, Unresolved, check, multiple
from megatron.config.option import (
    FACTOR,
    FFN_WIDTH,
    FREQUENCY,
    LAYERS,
    MOST_POSITIONS,
    POSITIONS,
    POSITIVE_RATE,
    RATE,
    SHARE,
    WIDTH,
    Range,
    option,
)

CONFLICTS = """
    add_qkv_bias attention_bias
    qk_layernorm qk_l2_norm
    qk_clip qk_layernorm: it scales weights, which has no effect before the norm
    qk_clip qk_l2_norm: it scales weights, which has no effect before the norm
    multi_latent_attention attention_output_gate: it has no gate
    multi_latent_attention qk_l2_norm: its latents have the norms of --qk-layernorm
    multi_latent_attention add_qkv_bias: its projections have no biases
    multi_latent_attention attention_bias: its projections have no biases
    multi_latent_attention clip_qkv: its queries, keys and values are not clipped
    multi_latent_attention qk_clip: a key of all heads cannot be scaled for one
    multi_latent_attention use_mup: muP has no rules for its latents
    experimental_attention_variant use_mup: muP has no rules for linear attention
    multi_latent_attention qk_layernorm_over=all: its norms are those of the latents
    experimental_attention_variant qk_clip: linear attention has no logits
    experimental_attention_variant context_parallel_size: linear attention needs all earlier tokens
    rope_scaling=linear rope_original_positions: only dynamic, llama3 and yarn depend on this length
"""
ASCENDING = "yarn_beta_slow yarn_beta_fast"
NEEDED = """
    experimental_attention_variant  linear_attention_freq linear_conv_kernel_dim
    experimental_attention_variant  linear_key_head_dim linear_value_head_dim
    experimental_attention_variant  linear_num_key_heads linear_num_value_heads
    qk_layernorm=true  qk_layernorm_over
    multi_latent_attention=true  q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    position_embedding_type=rope  rotary_interleaved rope_scaling no_rope_freq rotary_local_base
    rope_scaling  rope_scaling_factor rope_original_positions
    rope_scaling=llama3  rope_low_freq_factor rope_high_freq_factor
    rope_scaling=yarn  yarn_beta_fast yarn_beta_slow yarn_attention_factor
    rope_scaling=yarn  yarn_mscale yarn_mscale_all_dim yarn_truncate
    window_size  window_attn_skip_freq rotary_local_base
"""


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes of the transformer, and settings that attention shares with other parts."""

    num_layers: int = option(
        None, "Number of transformer layers.", LAYERS, flags="--num-layers --encoder-num-layers"
    )
    hidden_size: int = option(None, "Hidden size of the transformer.", WIDTH)
    ffn_hidden_size: int = option(
        None,
        "Hidden size of the MLP.",
        FFN_WIDTH,
        derived="4 x hidden-size; with a gated unit, such as --swiglu, 8/3 x hidden-size, rounded down to a "
        "multiple of 64",
    )
    num_attention_heads: int = option(None, "Number of attention heads.", WIDTH)
    kv_channels: int = option(
        None, "Size of each attention head.", WIDTH, derived="hidden-size / num-attention-heads"
    )
    num_key_value_heads: int = option(
        None,
        "Number of key and value heads (grouped-query attention).",
        WIDTH,
        flags="--num-key-value-heads --num-query-groups",
        derived="num-attention-heads",
    )
    seq_length: int = option(
        None, "Sequence length in tokens.", POSITIONS, flags="--seq-length --encoder-seq-length"
    )
    max_position_embeddings: int = option(
        None,
        "Number of learned position embeddings.",
        POSITIONS,
        derived="seq-length",
        flags="--max-position-embeddings --max-absolute-position-embeddings",
    )
    position_embedding_type: str = option(
        "learned_absolute",
        "Position encoding.",
        choices="learned_absolute rope none alibi",
        value_names="absolute=learned_absolute rotary=rope",
        shortcuts="--use-rotary-position-embeddings=rope --use-alibi-position-embeddings=alibi",
        weak_shortcuts="--no-position-embedding=none",
    )
    add_bias_linear: bool = option(
        True, "Add biases to the linear layers.", off_flags="--disable-bias-linear"
    )

    def has(self, name: str, layer: int) -> bool:
        """Return whether a layer, counted as in `window`, has the feature of a frequency.

        A list has a number for each layer. Of a single N, the first of N layers has experts, every
        N-th layer has no RoPE, and all but every N-th have the other features. Unset, or 0: all.
        """
        freq: tuple[int, ...] = getattr(self, name) or (0,)
        if len(freq) > 1:
            return bool(freq[min(layer, len(freq) - 1)]) != (name == "no_rope_freq")
        layer = min(layer, self.num_layers - 1)
        if name == "moe_layer_freq":
            return layer % freq[0] == 0
        return not freq[0] or (layer + 1) % freq[0] != 0


@dataclass(frozen=True)
class SoftmaxAttentionConfig(TransformerConfig):
    """Settings without effect in layers of linear attention."""

    add_qkv_bias: bool = option(
        False,
        "Add biases to queries, keys and values, even with --disable-bias-linear.",
        flags="--add-qkv-bias --add-qkv-bias-linear",
    )
    attention_bias: str | None = option(
        None,
        "Biases of attention: off, qkv (queries, keys and values), or all (the output projection's "
        "too).",
        choices="off qkv all",
        derived="all; with --disable-bias-linear off, or with --add-qkv-bias qkv",
    )
    qk_layernorm: bool = option(False, "Normalize queries and keys.")
    qk_layernorm_over: str = option(
        "head",
        "Scope of --qk-layernorm: each head (Qwen 3), or all heads together (OLMo 2).",
        choices="head all",
    )
    qk_l2_norm: bool = option(
        False,
        "Divide queries and keys by the root mean square of each head, without weights (Llama 4).",
    )
    clip_qkv: float | None = option(
        None,
        "Limit queries, keys and values to the range from -X to X (OLMoE).",
        FACTOR,
        metavar="X",
    )
    attention_output_gate: bool = option(
        False,
        "Multiply the output of attention by the sigmoid of a gate, which is a part of the query "
        "projection (Qwen3-Next).",
    )
    softmax_type: str = option(
        "vanilla",
        "Attention sinks, terms that are added to the denominator of the softmax. off-by-one: 1. "
        "learnable: exp of a parameter for each head (gpt-oss).",
        choices="vanilla off-by-one learnable",
    )
    softmax_scale: float | None = option(
        None, "Factor applied to the attention scores.", FACTOR, derived="1 / sqrt(kv-channels)"
    )
    attention_logit_softcapping: float | None = option(
        None,
        "Limit attention scores x to c tanh(x / c) (Gemma 2).",
        FACTOR,
        flags="--attention-logit-softcapping --attn-logit-softcapping",
        metavar="C",
    )
    multi_latent_attention: bool = option(
        False,
        "Multi-head latent attention (DeepSeek-V2 and V3): keys and values are projections of one "
        "latent vector. With --qk-layernorm, latents are normalized.",
    )
    q_lora_rank: int | None = option(
        None, "Size of the latent vector of the queries.", WIDTH, derived="none", none_word=True
    )
    kv_lora_rank: int = option(32, "Size of the latent vector of keys and values.", WIDTH)
    qk_head_dim: int = option(
        128, "Latent attention: entries of a query or key without positions.", WIDTH
    )
    qk_pos_emb_head_dim: int = option(
        64, "Latent attention: further entries of a query or key, which RoPE rotates.", WIDTH
    )
    v_head_dim: int = option(128, "Latent attention: entries of a value.", WIDTH)
    window_size: tuple[int, ...] | None = option(
        None,
        "Sliding-window attention: a token sees itself and LEFT tokens before it; -1: all of them. "
        "The second value, the number of tokens after it, must be 0.",
        Range(-1, MOST_POSITIONS),
        metavar="LEFT[,0]",
    )
    window_attn_skip_freq: tuple[int, ...] | None = option(
        None,
        "Layers without the window: every N-th layer, or those with 0 in a list of zeros and ones, "
        "one for each layer.",
        FREQUENCY,
        metavar="N",
        derived="all layers have the window",
    )
    no_rope_freq: tuple[int, ...] | None = option(
        None,
        "Layers without RoPE: every N-th layer, or those with 1 in a list of zeros and ones, one "
        "for each layer.",
        FREQUENCY,
        metavar="N",
        derived="all layers have RoPE",
        none_word=True,
    )
    rotary_percent: float = option(
        1.0, "Fraction of each head to which RoPE is applied.", Range(above=0, at_most=1)
    )
    rotary_base: float = option(
        10000.0,
        "Base of the RoPE frequencies.",
        Range(above=1, at_most=1e15),
        flags="--rotary-base --rotary-position-embeddings-theta --rotary-theta --rope-theta",
    )
    rotary_local_base: float | None = option(
        None,
        "Base of the RoPE frequencies in layers with a sliding window, where they are not scaled "
        "(Gemma 3: 10000).",
        Range(above=1, at_most=1e15),
        derived="as in other layers",
    )
    rotary_interleaved: bool = option(
        False,
        "Rotate pairs of neighbouring entries of a head (GPT-J) instead of pairing its two halves.",
    )
    rope_scaling: str | None = option(
        None,
        "Scaling of the RoPE frequencies for sequences longer than those of the original training.",
        choices="linear dynamic llama3 yarn",
        shortcuts="--use-rope-scaling=llama3",
    )
    rope_scaling_factor: float = option(
        8.0,
        "Ratio of the longest sequence to that of the original training.",
        Range(1, 1e6),
        flags="--rope-scaling-factor --rotary-scaling-factor --yarn-rotary-scaling-factor",
    )
    rope_original_positions: int = option(
        8192,
        "Longest sequence of the original training.",
        POSITIONS,
        flags="--rope-original-positions --original-max-position-embeddings "
        "--yarn-original-max-position-embeddings",
    )
    rope_low_freq_factor: float = option(
        1.0, "Llama 3.1: wavelengths above rope-original-positions / X are scaled in full.", FACTOR
    )
    rope_high_freq_factor: float = option(
        4.0, "Llama 3.1: wavelengths below rope-original-positions / X are not scaled.", FACTOR
    )
    yarn_beta_fast: float = option(
        32.0,
        "YaRN: frequencies with more than X rotations in the original longest sequence are not "
        "scaled.",
        FACTOR,
    )
    yarn_beta_slow: float = option(
        1.0,
        "YaRN: frequencies with fewer than X rotations in the original longest sequence are scaled "
        "in full.",
        FACTOR,
    )
    yarn_attention_factor: float | None = option(
        None,
        "YaRN: factor applied to cosines and sines.",
        POSITIVE_RATE,
        derived="(0.1 x mscale x ln(rope-scaling-factor) + 1) / (the same with mscale-all-dim)",
    )
    yarn_mscale: float = option(
        1.0, "YaRN: see --yarn-attention-factor.", RATE, flags="--mscale --yarn-mscale"
    )
    yarn_mscale_all_dim: float = option(
        0.0,
        "YaRN: see --yarn-attention-factor.",
        RATE,
        flags="--mscale-all-dim --yarn-mscale-all-dim",
    )
    yarn_truncate: bool = option(
        True,
        "YaRN: round the bounds of the scaled frequencies outwards to whole pairs.",
        flags="--yarn-truncate --yarn-correction-range-round-to-int",
        off_flags="--no-yarn-correction-range-round-to-int",
    )


@dataclass(frozen=True)
class AttentionConfig(SoftmaxAttentionConfig):
    """Settings of attention."""

    experimental_attention_variant: str | None = option(
        None,
        "Linear attention in place of softmax attention in the layers of --linear-attention-freq: "
        "Gated DeltaNet (Yang et al., arXiv 2412.06464; Qwen3-Next).",
        choices="gated_delta_net",
        flags="--experimental-attention-variant --linear-attention-type",
    )
    linear_attention_freq: tuple[int, ...] | None = option(
        None,
        "Layers with linear attention: all but every N-th layer, or those with 1 in a list of "
        "zeros and ones, one for each layer.",
        FREQUENCY,
        metavar="N",
        derived="all layers",
    )
    linear_conv_kernel_dim: int = option(
        4, "Linear attention: tokens that a causal convolution of its inputs covers.", WIDTH
    )
    linear_key_head_dim: int = option(
        128, "Linear attention: size of each head of queries and keys.", WIDTH
    )
    linear_value_head_dim: int = option(
        128, "Linear attention: size of each head of values.", WIDTH
    )
    linear_num_key_heads: int = option(
        16, "Linear attention: number of heads of queries and keys.", WIDTH
    )
    linear_num_value_heads: int = option(32, "Linear attention: number of value heads.", WIDTH)
    attention_dropout: float = option(0.1, "Dropout probability of attention weights.", SHARE)
    apply_query_key_layer_scaling: bool = option(
        False,
        "Divide attention scores by the layer number, and multiply them by it again in the "
        "softmax.",
        inert="it would not change the result, and attention is computed so that scores cannot "
        "overflow",
        off_flags="--no-query-key-layer-scaling",
    )
    attention_softmax_in_fp32: bool = option(
        False,
        "Compute the attention softmax in fp32.",
        inert="the softmax is always computed in fp32",
    )

    @property
    def qkv_bias(self) -> bool:
        """Return whether queries, keys and values have biases."""
        usual = (self.add_bias_linear and not self.multi_latent_attention) or self.add_qkv_bias
        return usual if self.attention_bias is None else self.attention_bias != "off"

    @property
    def attention_output_bias(self) -> bool:
        """Return whether the output projection of attention has a bias."""
        usual = self.add_bias_linear
        return usual if self.attention_bias is None else self.attention_bias == "all"

    @property
    def query_heads(self) -> int:
        """Return the number of heads that the query projection has, including gates."""
        return self.num_attention_heads * (2 if self.attention_output_gate else 1)

    @property
    def rotated_entries(self) -> int:
        """Return the number of entries of a query or key that RoPE rotates."""
        latent = self.multi_latent_attention
        width = self.qk_pos_emb_head_dim if latent else self.kv_channels
        return 2 * int(width * self.rotary_percent / 2)

    @property
    def value_channels(self) -> int:
        """Return the size of a value of each head."""
        return self.v_head_dim if self.multi_latent_attention else self.kv_channels

    def window(self, layer: int) -> int | None:
        """Return how many earlier keys a query in `layer` (counted from 0) sees; None: all.

        Layers of multi-token prediction, which follow the last one, are like it.
        """
        size = (self.window_size or (-1,))[0]
        return size if size >= 0 and self.has("window_attn_skip_freq", layer) else None


def derive(s: Unresolved) -> None:
    """Derive the size of a head; for latent attention also what _derive_latent does."""
    v = s.values
    used = "qk_head_dim", "qk_pos_emb_head_dim", "rope_scaling_factor", "yarn_mscale_all_dim"
    if v["multi_latent_attention"] and s.usable(*used):
        _derive_latent(s)
    if s.usable("hidden_size", "num_attention_heads"):
        width, remainder = divmod(v["hidden_size"], v["num_attention_heads"])
        if remainder == 0:
            s.fill("kv_channels", width, "derived from hidden-size and num-attention-heads")


def _derive_latent(s: Unresolved) -> None:
    """Derive the size of a head and the softmax's factor, and YaRN as in Megatron-LM.

    There, latent attention has YaRN by default, which changes nothing if its factor is 1. The
    softmax's factor also has the square of YaRN's (DeepSeek-V3's code).
    """
    v = s.values
    origin = "derived from multi-latent-attention"
    width = v["qk_head_dim"] + v["qk_pos_emb_head_dim"]
    if v["kv_channels"] not in (None, width):
        s.notices.append(
            f"{s.written('kv_channels')} has no effect: --qk-head-dim sets the size of a head"
        )
    s.derive("kv_channels", width, origin)
    for name in ("rope_scaling_factor", "yarn_mscale", "yarn_mscale_all_dim"):
        # a stored model has all settings, also those without an effect
        stored = s.origins[name].startswith(("argument", "checkpoint"))
        chosen = s.changed(name) or (name in s.explicit and not stored)
        if v["rope_scaling"] is None and chosen:
            s.notices.append(
                f"{s.written(name)} means --rope-scaling yarn with --multi-latent-attention"
            )
            s.fill("rope_scaling", "yarn", origin)
    for name, value in (("rope_scaling_factor", 1.0), ("rope_original_positions", 4096)):
        if v["rope_scaling"] == "yarn" and name not in s.explicit:
            s.derive(name, value, origin)
    if v["rope_scaling"] == "yarn" and v["yarn_mscale_all_dim"]:
        scale = 0.1 * v["yarn_mscale_all_dim"] * math.log(v["rope_scaling_factor"]) + 1.0
        s.fill("softmax_scale", scale**2 / math.sqrt(width), origin)


@check("hidden_size", "num_attention_heads", "num_key_value_heads")
def _heads(config: Resolved) -> Problems:
    if config.get("kv_channels") is None:
        remedy = ", or give the width of a head with --kv-channels"
        yield from multiple(config, "hidden_size", "num_attention_heads", remedy)
    yield from multiple(config, "num_attention_heads", "num_key_value_heads")


@check("seq_length", "max_position_embeddings", "position_embedding_type")
def _positions(config: Resolved) -> Problems:
    model: AttentionConfig = config.model
    if (
        model.position_embedding_type == "learned_absolute"
        and model.seq_length > model.max_position_embeddings
    ):
        yield (
            f"--seq-length {model.seq_length} is longer than --max-position-embeddings "
            f"{model.max_position_embeddings}: learned positions must cover the sequence; raise "
            "the latter or use --position-embedding-type rope"
        )


@check("position_embedding_type", "kv_channels", "rotary_percent")
def _rotary_width(config: Resolved) -> Problems:
    model: AttentionConfig = config.model
    if model.position_embedding_type == "rope":
        name = "--kv-channels (by default --hidden-size / --num-attention-heads)"
        head = model.kv_channels
        if model.multi_latent_attention:
            name, head = "--qk-pos-emb-head-dim", model.qk_pos_emb_head_dim
        width = int(head * model.rotary_percent)
        least = 4 if model.rope_scaling == "dynamic" else 2
        if width < least or width % 2:
            yield (
                f"RoPE rotates pairs, but --rotary-percent {model.rotary_percent:g} of {name} {head} "
                f"is {width}: it must be even and at least {least}"
            )


@check("rope_original_positions", "rope_low_freq_factor", "rope_high_freq_factor")
def _rope_scaling(config: Resolved) -> Problems:
    model: AttentionConfig = config.model
    low = model.rope_low_freq_factor
    if model.rope_scaling == "llama3" and low >= model.rope_high_freq_factor:
        yield (
            f"--rope-low-freq-factor {low:g} must be less than --rope-high-freq-factor "
            f"{model.rope_high_freq_factor:g}: frequencies between them are partly scaled"
        )


@check("num_attention_heads", "num_key_value_heads")
def _latent_attention(config: Resolved) -> Problems:
    model: AttentionConfig = config.model
    if not model.multi_latent_attention:
        return
    if model.num_key_value_heads != model.num_attention_heads:
        yield (
            f"--multi-latent-attention and {config.written('num_key_value_heads')} contradict each "
            f"other: each of {config.written('num_attention_heads')} has a key and a value"
        )
    width = model.qk_head_dim + model.qk_pos_emb_head_dim
    if model.v_head_dim > width:
        yield (
            f"--v-head-dim {model.v_head_dim} is more than --qk-head-dim {model.qk_head_dim} and "
            f"--qk-pos-emb-head-dim {model.qk_pos_emb_head_dim} together: use at most {width}"
        )


@check()
def _window(config: Resolved) -> Problems:
    size = config.get("window_size")
    if size is not None and (size[1:] not in ((), (0,)) or not size):
        yield (
            f"{config.written('window_size')} is not LEFT or LEFT,0: attention is causal, so a token "
            "sees no later ones"
        )


@check("num_layers", "moe_layer_freq")
def _frequencies(config: Resolved) -> Problems:
    model: AttentionConfig = config.model
    layers = model.num_layers
    for name, feature in (
        ("window_attn_skip_freq", "window_size"),
        ("moe_layer_freq", "num_experts"),
        ("linear_attention_freq", "experimental_attention_variant"),
        ("no_rope_freq", "position_embedding_type"),
    ):
        freq = config.get(name)
        if freq is None:
            continue
        written = config.written(name)
        if not any(freq) if len(freq) <= 1 else len(freq) != layers or not set(freq) <= {0, 1}:
            yield (
                f"{written} is neither a number of at least 1 nor a list of {layers} entries 0 or "
                "1, one for each layer: give one of them"
            )
        elif config.get(feature) is not None and not any(
            model.has(name, layer) for layer in range(layers)
        ):
            yield (
                f"{written} leaves no layer for {config.written(feature)}: leave the former out "
                "for all layers, or both out for none"
            )


@check("num_layers")
def _linear_attention(config: Resolved) -> Problems:
    model: AttentionConfig = config.model
    if model.experimental_attention_variant is None:
        return
    variant = config.written("experimental_attention_variant")
    yield from multiple(config, "linear_num_value_heads", "linear_num_key_heads")
    yield from multiple(config, "linear_num_key_heads", "tensor_model_parallel_size")
    useless = [*filter(config.changed, SoftmaxAttentionConfig.__annotations__)]
    if model.position_embedding_type in ("rope", "alibi"):
        useless.append("position_embedding_type")
    if useless and all(model.has("linear_attention_freq", i) for i in range(model.num_layers)):
        yield (
            f"{', '.join(map(config.written, useless))}: no effect on {variant}, which all layers "
            "have: leave them out, or give --linear-attention-freq for layers with softmax attention"
        )
