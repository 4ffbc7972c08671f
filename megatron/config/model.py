"""Settings of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from megatron.config.attention import AttentionConfig
from megatron.config.option import (
    COUNT,
    FACTOR,
    FFN_WIDTH,
    FREQUENCY,
    LAYERS,
    LEAST_NORMAL,
    MOST_WIDTH,
    RATE,
    SHARE,
    WIDTH,
    Range,
    option,
)

EVEN_CHOICES = (
    "a benchmark: --moe-router-force-load-balancing draws the experts of each token at random"
)
"""Remark on a run and on everything reported about it."""
GATES = tuple("swiglu geglu quick_geglu reglu liglu".split())
"""Settings that choose a gated unit."""
ACTIVATIONS = (*GATES, "squared_relu", "xielu", "exact_gelu", "openai_gelu")
"""Settings that choose the activation function of the MLP."""
ADAPTERS = (".lora_a", ".lora_b")
"""Ends of the names of LoRA's parameters: A [rank, in] and B [.., out, rank]."""

NOTHING_BEFORE = "^"
"""Pattern that matches no name. In a LayerKind it says that nothing trains before the layer."""


def matches(pattern: str, name: str) -> bool:
    """Return whether parts of a dotted name, one after another, match those of a pattern.

    >>> matches("layers.[01]", "layers.1.mlp.dense_h_to_4h.weight")
    True
    >>> matches("layers.1", "layers.10.mlp.dense_h_to_4h.weight")
    False
    """
    words = name.split(".")
    globs = pattern.split(".")
    starts = range(len(words) - len(globs) + 1)
    return any(all(map(fnmatchcase, words[at:], globs)) for at in starts)


def may_be_missing(name: str, patterns: Sequence[str]) -> bool:
    """Return whether a model to load may lack a parameter, given the patterns of --load-missing."""
    return name.endswith(ADAPTERS) or any(matches(pattern, name) for pattern in patterns)


class LayerKind(NamedTuple):
    """Values of those settings of a ModelConfig in which its layers may differ, for one layer."""

    window_size: tuple[int, ...] | None
    num_experts: int | None
    position_embedding_type: str
    rotary_base: float
    rope_scaling: str | None
    experimental_attention_variant: str | None
    freeze: tuple[str, ...]
    lora_target: tuple[str, ...]


@dataclass(frozen=True)
class ModelConfig(AttentionConfig):
    """Sizes and architecture of the GPT."""

    make_vocab_size_divisible_by: int = option(
        128, "Pad the vocabulary to a multiple of this value times the tensor-parallel size.", WIDTH
    )
    vocab_size: int | None = option(
        None,
        "Vocabulary size before padding. Needed only without a tokenizer or with NullTokenizer, "
        "which adds an end-of-document token.",
        COUNT,
    )
    layernorm_epsilon: float = option(
        1e-5,
        "Epsilon of the normalization layers.",
        Range(LEAST_NORMAL, 1),
        flags="--layernorm-epsilon --norm-epsilon",
    )
    normalization: str = option(
        "layernorm",
        "Normalization layer.",
        choices="layernorm rmsnorm",
        shortcuts="--RMSNorm=rmsnorm",
    )
    apply_layernorm_1p: bool = option(False, "Store norm weights as their difference from one.")
    swiglu: bool = option(False, "Use SwiGLU instead of GELU in the MLP.")
    geglu: bool = option(False, "Use GELU-gated linear units instead of GELU in the MLP.")
    quick_geglu: bool = option(
        False,
        "Use linear units gated by x sigmoid(1.702 x), a fast form of GELU, instead of GELU in the "
        "MLP (gpt-oss).",
    )
    reglu: bool = option(False, "Use ReLU-gated linear units instead of GELU in the MLP.")
    liglu: bool = option(
        False, "Use bilinear units, whose gate has no activation, instead of GELU in the MLP."
    )
    activation_func_clamp_value: float | None = option(
        None,
        "Limit the gate of a gated unit to at most X, and its value to -X to X (gpt-oss).",
        FACTOR,
        metavar="X",
        derived="no limits",
    )
    glu_linear_offset: float = option(
        0.0, "Number added to the value of a gated unit (gpt-oss: 1).", Range(-1e3, 1e3)
    )
    xielu: bool = option(
        False,
        "Use xIELU, which has two learned parameters in each layer, instead of GELU in the MLP "
        "(Apertus).",
    )
    weight_decay_on_xielu_alphas: bool = option(
        False, "Apply weight decay to the parameters of xIELU."
    )
    squared_relu: bool = option(False, "Use squared ReLU instead of GELU in the MLP.")
    exact_gelu: bool = option(False, "Compute GELU exactly, with erf, instead of its tanh form.")
    openai_gelu: bool = option(
        False,
        "Use the tanh approximation of GELU, as in GPT-2.",
        inert="GELU is computed in its tanh form unless --exact-gelu is given",
    )
    norm_position: str = option(
        "pre",
        "Norms of each layer: before attention and MLP, after them on their outputs (OLMo 2), or "
        "both (Gemma 2).",
        choices="pre post both",
    )
    embedding_layernorm: bool = option(
        False, "Normalize the embeddings (BLOOM).", flags="--embed-layernorm --embedding-layernorm"
    )
    parallel_residual: str | None = option(
        None,
        "Compute attention and MLP from the same input, and add both to the residual stream, with "
        "one norm for both (GPT-J) or one each (GPT-NeoX).",
        choices="one_norm two_norms",
    )
    final_logit_softcapping: float | None = option(
        None, "Limit output scores x to c tanh(x / c) (Gemma 2).", FACTOR, metavar="C"
    )
    logit_z_loss: float = option(
        0.0,
        "Coefficient of the z-loss, the squared logarithm of the softmax's denominator.",
        RATE,
        flags="--logit-z-loss --z-loss-strength",
    )
    mtp_num_layers: int = option(
        0,
        "Multi-token prediction: number of layers after the last one, each of which also learns to "
        "predict a token one position later (DeepSeek-V3). Only training uses them.",
        Range(0, 64),
        flags="--mtp-num-layers --num-nextn-predict-layers",
    )
    mtp_loss_scaling_factor: float = option(
        0.1, "Factor applied to the mean of the losses of multi-token prediction.", RATE
    )
    untie_embeddings_and_output_weights: bool = option(
        False, "Give the output layer its own weights."
    )
    embedding_scale: float | None = option(
        None,
        "Factor applied to the word embeddings (Gemma: sqrt(hidden-size)).",
        FACTOR,
        flags="--embedding-scale --input-embeddings-multiplier",
    )
    residual_multiplier: float | None = option(
        None,
        "Factor applied to the outputs of attention and MLP on the residual stream (Granite).",
        FACTOR,
        derived="1",
    )
    logits_scaling: float | None = option(
        None, "Divisor of the output scores (Granite).", FACTOR, derived="1"
    )
    apply_residual_connection_post_layernorm: bool = option(
        False, "Take the residual connection after the norm instead of before it."
    )
    fp32_residual_connection: bool = option(False, "Keep the residual stream in fp32.")
    hidden_dropout: float = option(0.1, "Dropout probability of the hidden states.", SHARE)
    init_method_std: float = option(
        0.02, "Standard deviation of the initial weights.", Range(above=0, at_most=100)
    )
    init_method_xavier_uniform: bool = option(False, "Initialize weights with Xavier uniform.")
    freeze: tuple[str, ...] = option(
        (),
        "Do not train the parameters whose names match one of these patterns, such as embedding, "
        "'layers.[0-3]' or '*layernorm*'. A pattern matches whole parts of a name, between dots.",
        metavar="PATTERN ...",
    )
    lora_rank: int | None = option(
        None,
        "Train low-rank adapters of linear layers (LoRA) with this rank; all other parameters are "
        "frozen.",
        WIDTH,
        derived="no adapters",
        none_word=True,
    )
    lora_alpha: float = option(
        None,
        "The adapters' outputs are multiplied by lora-alpha / lora-rank.",
        FACTOR,
        derived="2 x lora-rank",
    )
    lora_target: tuple[str, ...] = option(
        ("self_attention",),
        "Linear layers with adapters: patterns of their names, as in --freeze.",
        metavar="PATTERN ...",
    )
    use_mup: bool = option(
        False,
        "Use muP: learning rates, epsilon and initial weights that were tuned for a small base "
        "model also fit this one. Give the sizes of the base model.",
        flags="--use-mup --mup",
    )
    mup_base_hidden_size: int = option(
        None, "muP: hidden size of the base model.", WIDTH, derived="hidden-size"
    )
    mup_base_num_layers: int = option(
        None, "muP: transformer layers of the base model.", LAYERS, derived="num-layers"
    )
    mup_base_ffn_hidden_size: int = option(
        None,
        "muP: hidden size of the base model's MLP.",
        FFN_WIDTH,
        derived="as ffn-hidden-size if that is derived, otherwise in proportion to hidden-size",
    )
    mup_base_head_dim: int | None = option(
        None,
        "muP: size of each attention head of the base model. The factor applied to attention "
        "scores is sqrt(mup-base-head-dim) / kv-channels, or 1 / kv-channels without this flag "
        "(with the default of --mup-attn-scale-power).",
        WIDTH,
    )
    mup_base_num_attention_heads: int = option(
        None,
        "muP: attention heads of the base model.",
        WIDTH,
        derived="from the size of all heads together, in proportion to hidden-size",
    )
    mup_base_num_key_value_heads: int = option(
        None,
        "muP: key and value heads of the base model.",
        WIDTH,
        flags="--mup-base-num-key-value-heads --mup-base-num-query-groups",
        derived="in proportion to the attention heads, or a smaller divisor of their number",
    )
    mup_embedding_mult: float = option(
        1.0, "muP: factor applied to the embeddings, tuned on the base model.", FACTOR
    )
    mup_output_mult: float = option(
        None,
        "muP: factor applied to the output scores.",
        FACTOR,
        derived="mup-base-hidden-size / hidden-size",
    )
    mup_attn_scale_power: float = option(
        1.0, "muP: power of kv-channels in the factor applied to attention scores.", Range(0, 2)
    )
    num_experts: int | None = option(
        None,
        "Number of experts in each mixture-of-experts layer. 0 or 1: no experts.",
        Range(0, MOST_WIDTH),
        none_word=True,
    )
    moe_layer_freq: tuple[int, ...] = option(
        (1,),
        "Layers with experts: every N-th layer, beginning with the first, or those with 1 in a "
        "list of zeros and ones, one for each layer, such as ([0]*1+[1]*23).",
        FREQUENCY,
        metavar="N",
    )
    moe_ffn_hidden_size: int | None = option(
        None, "Hidden size of each expert.", FFN_WIDTH, derived="ffn-hidden-size"
    )
    moe_shared_expert_intermediate_size: int | None = option(
        None,
        "Total hidden size of the shared experts, through which all tokens pass.",
        FFN_WIDTH,
        derived="no shared expert",
    )
    moe_use_upcycling: bool = option(
        False,
        "Make the experts from the MLPs of the dense checkpoint of --load, and start at iteration "
        "0. A checkpoint that has experts is loaded as usual.",
        one_start=True,
    )
    moe_shared_expert_gate: bool = option(
        False, "Multiply the output of the shared expert by a learned sigmoid for each token."
    )
    moe_shared_expert_overlap: bool = option(
        False, "Compute the shared expert while tokens are sent to their experts."
    )
    moe_router_topk: int = option(
        2, "Number of experts for each token.", WIDTH, flags="--moe-router-topk --topk"
    )
    moe_router_score_function: str = option(
        "softmax", "Function that computes the router's scores.", choices="softmax sigmoid"
    )
    moe_router_pre_softmax: bool = option(
        False,
        "Apply the softmax over all experts, before choosing, instead of over the chosen experts.",
    )
    moe_router_bias: bool = option(False, "Add a learned bias to the routers' scores (gpt-oss).")
    moe_router_topk_scaling_factor: float | None = option(
        None, "Factor applied to the weights of the chosen experts.", FACTOR, derived="1"
    )
    moe_router_num_groups: int | None = option(
        None,
        "Number of equally large groups of experts. Each token chooses experts from "
        "--moe-router-group-topk of the groups.",
        WIDTH,
    )
    moe_router_group_topk: int | None = option(
        None,
        "Number of groups from which each token chooses: those with the largest sums of their best "
        "scores.",
        WIDTH,
    )
    moe_router_group_top_scores: int | None = option(
        None,
        "Number of best scores whose sum ranks a group (DeepSeek-V2: 1, V3: 2).",
        WIDTH,
        derived="moe-router-topk / moe-router-group-topk",
    )
    moe_router_force_load_balancing: bool = option(
        False,
        "For benchmarks: in training, draw each token's experts at random, all equally likely, "
        "instead of choosing them by score. The model does not learn which experts to choose.",
    )
    moe_router_load_balancing_type: tuple[str, ...] = option(
        ("aux_loss",),
        "Balancing loss of the routers. aux_loss: over each micro-batch. seq_aux_loss: over each "
        "sequence. global_aux_loss: with the load of the last global batch. Several may be given.",
        choices="aux_loss seq_aux_loss global_aux_loss none",
        metavar="TYPE ...",
    )
    moe_aux_loss_coeff: tuple[float, ...] = option(
        (0.0,),
        "Coefficient of the balancing loss; with several types of loss, one for each.",
        Range(0, 1e6),
        metavar="X ...",
        flags="--moe-aux-loss-coeff --moe-loss-coeff",
    )
    moe_z_loss_coeff: float | None = option(
        None, "Coefficient of the routers' z-loss.", Range(0, 1e6), derived="0"
    )
    moe_router_enable_expert_bias: bool = option(
        False,
        "Balance without a loss. Each expert has a bias, which is used only for choosing. After "
        "each step it is lowered if the expert's load is above the mean, and raised if the load is "
        "below. Needs sigmoid scores.",
    )
    moe_router_bias_update_rate: float = option(
        1e-3, "Amount by which the bias of an expert changes in a step.", RATE
    )
    moe_input_jitter_eps: float | None = option(
        None,
        "In training, multiply the routers' input by random numbers from 1 - X to 1 + X.",
        SHARE,
        derived="0",
    )
    moe_expert_capacity_factor: float | None = option(
        None,
        "In training, drop the choices beyond this multiple of an expert's even share of the "
        "choices in a micro-batch.",
        FACTOR,
        flags="--moe-expert-capacity-factor --moe-train-capacity-factor",
        derived="nothing is dropped",
    )
    moe_eval_capacity_factor: float | None = option(
        None,
        "The same limit in evaluation, tasks and generation. Their results then depend on the "
        "batch.",
        FACTOR,
        derived="nothing is dropped",
    )
    moe_token_drop_policy: str = option(
        "probs",
        "Choices that are kept. probs: those with the largest weights. position: the first ones in "
        "the sequences.",
        choices="probs position",
    )

    @property
    def trains_in_part(self) -> bool:
        """Return whether settings freeze parameters."""
        return bool(self.freeze) or self.lora_rank is not None

    def trains(self, name: str) -> bool:
        """Return whether the settings let a parameter train."""
        if self.lora_rank is not None and not name.endswith(ADAPTERS):
            return False
        return not any(matches(pattern, name) for pattern in self.freeze)

    def adapter(self, name: str) -> tuple[int, float] | None:
        """Return rank and factor of the adapter of a linear layer; None without one."""
        rank = self.lora_rank
        if rank is None or not any(matches(pattern, name) for pattern in self.lora_target):
            return None
        return rank, self.lora_alpha / rank

    @property
    def activation(self) -> str:
        """Return 'exact_geglu', one of ACTIVATIONS or 'gelu'.

        'openai_gelu' is the same function as 'gelu'.
        """
        if self.geglu and self.exact_gelu:
            return "exact_geglu"
        return next((name for name in ACTIVATIONS if getattr(self, name)), "gelu")

    @property
    def gated(self) -> bool:
        """Return whether the MLP multiplies two projections of its input."""
        return self.activation.endswith("glu")

    @property
    def layer_norms(self) -> tuple[str, ...]:
        """Return the names of a layer's norms on the residual stream."""
        before = ("input_layernorm", "post_attention_layernorm")
        after = ("post_self_attn_layernorm", "post_mlp_layernorm")
        if self.parallel_residual == "one_norm":
            return before[:1]
        return {"pre": before, "post": after, "both": before + after}[self.norm_position]

    @property
    def residual_scale(self) -> float:
        """Return the factor for the outputs of attention and MLP on the residual stream.

        With muP, it is the depth of the base model divided by that of this model (Dey et al., arXiv
        2505.01618, table 1, alpha = 1); without muP, it is residual_multiplier.
        """
        if self.use_mup:
            return self.mup_base_num_layers / self.num_layers
        return self.residual_multiplier or 1.0

    @property
    def key_value_scale(self) -> float:
        """Return the factor for the initial weights of keys and values; 1 without muP.

        If keys and values have fewer outputs than inputs, as in multi-query attention, their
        weights are smaller: sqrt(outputs / inputs) times the weights of a square matrix. Outputs
        and inputs are counted relative to the base model (Yang et al., arXiv 2310.17813, section
        3). Without this factor, the gradients through keys and values would dominate all others.
        """
        if not self.use_mup:
            return 1.0
        base = self.mup_base()
        rows = self.num_key_value_heads * self.kv_channels
        outputs = rows / (base.num_key_value_heads * base.kv_channels)
        return math.sqrt(min(1.0, outputs * base.hidden_size / self.hidden_size))

    @property
    def router_scale(self) -> float:
        """Return the factor for the scores of routers and gates; 1 without muP.

        It is the default factor of the output layer: routers and gates are also matrices whose
        number of outputs does not grow with the width (Yang et al., arXiv 2203.03466, table 8).
        """
        return self.mup_base_hidden_size / self.hidden_size if self.use_mup else 1.0

    @property
    def router_group_scores(self) -> int:
        """Return the number of best scores by which a group of experts is ranked."""
        even = self.moe_router_topk // (self.moe_router_group_topk or 1)
        return self.moe_router_group_top_scores or even

    def mup_base(self) -> ModelConfig:
        """Return muP's base model with this model's depth, and with experts scaled like the MLP."""
        moe, shared = (
            width and width * self.mup_base_ffn_hidden_size // (self.ffn_hidden_size or 1)
            for width in (self.moe_ffn_hidden_size, self.moe_shared_expert_intermediate_size)
        )
        return replace(
            self,
            moe_ffn_hidden_size=moe,
            moe_shared_expert_intermediate_size=shared,
            use_mup=False,
            hidden_size=self.mup_base_hidden_size,
            ffn_hidden_size=self.mup_base_ffn_hidden_size,
            kv_channels=self.mup_base_head_dim or self.kv_channels,
            num_attention_heads=self.mup_base_num_attention_heads,
            num_key_value_heads=self.mup_base_num_key_value_heads,
        )

    @property
    def embeds_on_last_stage(self) -> bool:
        """Return whether the last stage needs the word embedding, as output layer or input."""
        return not self.untie_embeddings_and_output_weights or self.mtp_num_layers > 0

    def has_experts(self, layer: int) -> bool:
        """Return whether a layer, counted as in `window`, has experts instead of an MLP."""
        return self.num_experts is not None and self.has("moe_layer_freq", layer)

    def layer_kind(self, layer: int) -> LayerKind:
        """Return the settings of a layer, counted as in `window`, that may differ between layers.

        --no-rope-freq and --rotary-local-base change RoPE in some layers.
        """
        windowed = self.window(layer) is not None
        base = self.rotary_local_base if windowed else None
        turned = self.has("no_rope_freq", layer)
        linear = self.has("linear_attention_freq", layer)
        return LayerKind(
            window_size=self.window_size if windowed else None,
            num_experts=self.num_experts if self.has_experts(layer) else None,
            position_embedding_type=self.position_embedding_type if turned else "none",
            rotary_base=base or self.rotary_base,
            rope_scaling=None if base else self.rope_scaling,
            experimental_attention_variant=(
                self.experimental_attention_variant if linear else None
            ),
            freeze=self.freeze,
            lora_target=self.lora_target,
        )

    def of_kind(self, kind: LayerKind) -> ModelConfig:
        """Return this model with all layers of one kind."""
        return replace(
            self,
            **kind._asdict(),
            window_attn_skip_freq=None,
            moe_layer_freq=(1,),
            no_rope_freq=None,
            rotary_local_base=None,
            linear_attention_freq=None,
        )

    @property
    def upcycling_granularity(self) -> int:
        """Return the number of experts that together are as wide as the dense MLP."""
        assert self.ffn_hidden_size and self.moe_ffn_hidden_size, "both are derived"
        return self.ffn_hidden_size // self.moe_ffn_hidden_size

    @property
    def expert_layers(self) -> int:
        """Return the number of layers with experts."""
        return sum(map(self.has_experts, range(self.num_layers)))

    def padded_vocab_size(self, tensor_parallel_size: int) -> int:
        """Return vocab_size, padded as make_vocab_size_divisible_by requires."""
        assert self.vocab_size is not None, "unknown until the tokenizer has been read"
        multiple = self.make_vocab_size_divisible_by * tensor_parallel_size
        return -(-self.vocab_size // multiple) * multiple
