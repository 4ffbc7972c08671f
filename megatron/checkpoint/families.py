"""Hugging Face model families. Each is a table that is read in both directions.

A table maps fields of config.json to our settings, and our parameters to Hugging Face tensors. A
new family is one more entry of FAMILIES. Needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megatron.checkpoint import family_rules as rules
from megatron.checkpoint.family_rules import Fields, Rule
from megatron.config.option import pairs
from megatron.errors import CheckpointError


def _values(text: str) -> dict[str, Any]:
    """Return the NAME=VALUE words of a text, by name; a VALUE is JSON, or else text.

    >>> _values("rope_theta=1e6 head_dim=null hidden_act=silu")
    {'rope_theta': 1000000.0, 'head_dim': None, 'hidden_act': 'silu'}
    """

    def value(word: str) -> Any:
        try:
            return json.loads(word)
        except ValueError:
            return word

    return {name: value(word) for name, word in pairs(text).items()}


ONLY: Fields = _values(
    "add_cross_attention=false is_encoder_decoder=false per_layer_config=null "
    "pruned_heads=null rope_interleaved=false use_mrope=false"
)
"""Fields that would change a model of any family, each with its only supported value."""


@dataclass(frozen=True)
class HFModules:
    """Hugging Face modules that hold the rows of one of our matrices, one after another.

    modules      their names; {} is the layer number
    by_head      whether their rows are all queries, then all keys, then all values; ours are
                 [group][queries, key, value] (SelfAttention), or as in GatedDeltaNet
    transposed   whether their weights are [in, out]
    by_expert    whether each expert has these modules; the second {} is then the expert's number,
                 in brackets if it is an index into a tensor of all experts
    interleaved  whether rows of gate and value alternate
    convolution  whether their weights are [rows, 1, columns]
    constants    tensors without dimensions that their files may also have, and their values
    """

    modules: tuple[str, ...]
    by_head: bool = False
    transposed: bool = False
    by_expert: bool = False
    interleaved: bool = False
    convolution: bool = False
    constants: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """A family of models.

    architecture   the family's class in transformers, the only supported one
    settings       settings that all models of the family share, by our names
    fields         our settings, and the fields of config.json with the same value
    modules        our modules, and the Hugging Face modules for each; {} is the layer number. Each
                   has a weight, a bias, or both. Or one of our tensors, and the name of theirs
    rules          conversions of settings that have no single field with the same value
    absent         default values of the fields that config.json may omit
    only           fields that would change the model, each with its only supported value
    older          names of fields, and the names that some published files use instead
    prefix         prefix of tensor names, which some published files omit
    unread         regular expression of tensors that transformers does not read, such as those of
                   multi-token prediction; its group, if any, is a number of at least num_layers

    Other fields that are not null are refused, unless ONLY has them or they have no effect
    (huggingface_config.py).
    """

    architecture: str
    settings: Mapping[str, object]
    fields: Mapping[str, str]
    modules: Mapping[str, HFModules]
    rules: tuple[Rule, ...] = ()
    absent: Fields = field(default_factory=dict)
    only: Fields = field(default_factory=dict)
    older: Mapping[str, str] = field(default_factory=dict)
    prefix: str = "model."
    unread: str | None = None

    @property
    def experts(self) -> bool:
        """Return whether the family's models have experts."""
        return any(entry.by_expert for entry in self.modules.values())

    def hf_tensors(self, parameter: str, experts: int = 1) -> tuple[HFModules, tuple[str, ...]]:
        """Return the Hugging Face modules and tensor names that hold one of our parameters.

        experts   number of experts, for a parameter that belongs to experts

        Raises CheckpointError if this family has no such parameter.
        """
        module, _, kind = parameter.rpartition(".")
        head, _, rest = module.partition(".")
        number, _, name_in_layer = rest.partition(".")
        known = f"layers.{{}}.{name_in_layer}" if head == "layers" else module
        tensor = f"{known}.{kind}"
        ending = "" if tensor in self.modules else f".{kind}"
        entry = self.modules.get(tensor) or self.modules.get(known)
        if entry is None:
            raise CheckpointError(f"{self.architecture} has no parameter like {parameter}")
        return entry, tuple(
            name.format(number, expert) + ending
            for expert in range(experts if entry.by_expert else 1)
            for name in entry.modules
        )


# ---- tables


def _modules(layer: str, table: str) -> dict[str, HFModules]:
    """Parse a table: each line has our module, the Hugging Face modules and their properties.

    Names that begin with a dot are within a layer, whose name in Hugging Face is `layer`. NAME=X is
    a constant.
    """

    def full_name(name: str, before: str) -> str:
        return before + name if name.startswith(".") else name

    modules = {}
    for line in table.strip().splitlines():
        our_name, *words = line.split()
        facts: dict[str, Any] = dict.fromkeys(HFModules.__dataclass_fields__.keys() & words, True)
        named = [full_name(word, layer) for word in words if word not in facts]
        hf_names = tuple(name for name in named if "=" not in name)
        values = (name.split("=") for name in named if "=" in name)
        facts["constants"] = {name: float(value) for name, value in values}
        modules[full_name(our_name, "layers.{}")] = HFModules(hf_names, **facts)
    return modules


_WIDTHS = pairs(
    "num_layers=num_hidden_layers hidden_size=hidden_size ffn_hidden_size=intermediate_size "
    "num_attention_heads=num_attention_heads vocab_size=vocab_size "
    "max_position_embeddings=max_position_embeddings attention_dropout=attention_dropout"
)
_GROUPED = _WIDTHS | pairs("num_key_value_heads=num_key_value_heads layernorm_epsilon=rms_norm_eps")
_ROPE = _values(
    "rope_theta=1e4 rope_scaling=null rope_parameters=null original_max_position_embeddings=null"
)
_USUAL = (
    _values(
        "num_key_value_heads=null head_dim=null attention_dropout=0.0 tie_word_embeddings=false"
    )
    | _ROPE
)
_WINDOW = _values("use_sliding_window=false sliding_window=4096 max_window_layers=28")
_WINDOWS = {**_WINDOW, "layer_types": None}
_SILU = {"hidden_act": "silu"}
_NO_BIAS = {"attention_bias": False}
_LAYERS_AFTER_ALL = r"model\.layers\.(\d+)\..*"
_NO_BIASES = {"mlp_bias": False, **_NO_BIAS}
_GATED = _values(
    "normalization=rmsnorm swiglu=true add_bias_linear=false "
    "position_embedding_type=rope hidden_dropout=0.0"
)
_LAYER = "model.layers.{}"
_LLAMA_MODULES = _modules(
    _LAYER,
    """
    embedding.word_embeddings        model.embed_tokens
    final_layernorm                  model.norm
    output_layer                     lm_head
    .input_layernorm                 .input_layernorm
    .post_attention_layernorm        .post_attention_layernorm
    .self_attention.query_key_value  .self_attn.q_proj .self_attn.k_proj .self_attn.v_proj by_head
    .self_attention.dense            .self_attn.o_proj
    .mlp.dense_h_to_4h               .mlp.gate_proj .mlp.up_proj
    .mlp.dense_4h_to_h               .mlp.down_proj
    """,
)
_QK_NORMS = _modules(
    _LAYER,
    """
    .self_attention.q_layernorm  .self_attn.q_norm
    .self_attention.k_layernorm  .self_attn.k_norm
    """,
)
_NORMS_AFTER = _modules(
    _LAYER,
    """
    .post_self_attn_layernorm  .post_attention_layernorm
    .post_mlp_layernorm        .post_feedforward_layernorm
    """,
)
_EXPERT_MODULES = _modules(
    _LAYER,
    """
    .mlp.router                 .mlp.gate
    .mlp.experts.dense_h_to_4h  .mlp.experts.{}.gate_proj .mlp.experts.{}.up_proj by_expert
    .mlp.experts.dense_4h_to_h  .mlp.experts.{}.down_proj by_expert
    """,
)
_SHARED_EXPERTS = _modules(
    _LAYER,
    """
    .mlp.shared_experts.dense_h_to_4h  .mlp.shared_expert.gate_proj .mlp.shared_expert.up_proj
    .mlp.shared_experts.dense_4h_to_h  .mlp.shared_expert.down_proj
    .mlp.shared_experts.gate           .mlp.shared_expert_gate
    """,
)
_ROUTED_EXPERTS = _EXPERT_MODULES | _modules(
    _LAYER,
    """
    .mlp.router.expert_bias            .mlp.gate.e_score_correction_bias
    .mlp.shared_experts.dense_h_to_4h  .mlp.shared_experts.gate_proj .mlp.shared_experts.up_proj
    .mlp.shared_experts.dense_4h_to_h  .mlp.shared_experts.down_proj
    """,
)
_LATENT_ATTENTION = _modules(
    f"{_LAYER}.self_attn",
    """
    .self_attention.query           .q_proj
    .self_attention.query_down      .q_a_proj
    .self_attention.q_layernorm     .q_a_layernorm
    .self_attention.query_up        .q_b_proj
    .self_attention.key_value_down  .kv_a_proj_with_mqa
    .self_attention.kv_layernorm    .kv_a_layernorm
    .self_attention.key_value_up    .kv_b_proj
    """,
)
# GPT-NeoX and BLOOM keep these names from Megatron.
_MEGATRONS = """
    .input_layernorm           .input_layernorm
    .post_attention_layernorm  .post_attention_layernorm
    .mlp.dense_h_to_4h         .mlp.dense_h_to_4h
    .mlp.dense_4h_to_h         .mlp.dense_4h_to_h
    """
_ROUTED = _GROUPED | pairs("num_experts=num_experts moe_router_topk=num_experts_per_tok")
_EXPERTS_ALONE = _ROUTED | {"moe_ffn_hidden_size": "intermediate_size"}
_EXPERTS_TOO = _ROUTED | {"moe_ffn_hidden_size": "moe_intermediate_size"}
_LOCAL_EXPERTS = _EXPERTS_ALONE | {"num_experts": "num_local_experts"}
_MANY_EXPERTS = _EXPERTS_TOO | {"num_experts": "n_routed_experts"}
_GEMMA = _values("apply_layernorm_1p=true swiglu=false geglu=true norm_position=both")
_GEMMA_USUAL = _NO_BIAS | _values(
    "num_key_value_heads=4 head_dim=256 tie_word_embeddings=true "
    "query_pre_attn_scalar=256 sliding_window=4096 layer_types=null"
)
_GEMMA_ONLY = _values("hidden_activation=gelu_pytorch_tanh use_bidirectional_attention=null")
_GEMMA_MODULES = (
    _LLAMA_MODULES
    | _NORMS_AFTER
    | _modules(_LAYER, ".post_attention_layernorm .pre_feedforward_layernorm")
)
_CAPPED = _GROUPED | pairs(
    "attention_logit_softcapping=attn_logit_softcapping "
    "final_logit_softcapping=final_logit_softcapping"
)
_SPARSE = _values("mlp_only_layers=null decoder_sparse_step=1 norm_topk_prob=false")
_EXPERTS = {"num_experts": "num_local_experts"}
_SHARED_WIDTH = {"moe_shared_expert_intermediate_size": "shared_expert_intermediate_size"}
_LINEAR = _values(
    "linear_conv_kernel_dim=4 linear_key_head_dim=128 linear_value_head_dim=128 "
    "linear_num_key_heads=16 linear_num_value_heads=32"
)
_PLAIN_ROPE = rules.rope()


def _llama(
    architecture: str,
    settings: Mapping[str, object],
    rest: tuple[Rule, ...],
    absent: Fields,
    modules: Mapping[str, HFModules] = _LLAMA_MODULES,
    fields: Mapping[str, str] = _GROUPED,
    only: Fields = _SILU,
    older: Mapping[str, str] = MappingProxyType({}),
    rope: Rule = _PLAIN_ROPE,
    unread: str | None = None,
) -> Family:
    """Return a family that is similar to Llama.

    `settings`, `rest` and `absent` are added to the settings, rules and defaults that all these
    families share; the other arguments replace Llama's entries.
    """
    return Family(
        architecture,
        {**_GATED, **settings},
        {**fields, "kv_channels": "head_dim"},
        modules,
        (rules.TIED, rope, *rest),
        {**_USUAL, **absent},
        only,
        older,
        unread=unread,
    )


def _deepseek(
    architecture: str,
    score: str,
    settings: Mapping[str, object],
    fields: Mapping[str, str],
    absent: Fields,
    only: Fields,
    unread: str | None = None,
) -> Family:
    """Return a family with latent attention, and experts as in rules.routed_experts(score).

    The other arguments are added to what these families share.
    """
    return Family(
        architecture,
        {**_GATED, **_values("multi_latent_attention=true qk_layernorm=true"), **settings},
        _MANY_EXPERTS
        | pairs(
            "q_lora_rank=q_lora_rank kv_lora_rank=kv_lora_rank qk_head_dim=qk_nope_head_dim "
            "qk_pos_emb_head_dim=qk_rope_head_dim v_head_dim=v_head_dim"
        )
        | dict(fields),
        _LLAMA_MODULES | _LATENT_ATTENTION | _ROUTED_EXPERTS,
        (rules.TIED, _PLAIN_ROPE, rules.LATENT, rules.routed_experts(score)),
        {**_USUAL, "qk_head_dim": None, **absent},
        {
            **_SILU,
            **_NO_BIAS,
            "scoring_func": score,
            "moe_layer_freq": 1,
            "rms_norm_eps": 1e-6,  # norms of latents have no other one in transformers
            **only,
        },
        unread=unread,
    )


FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        {"position_embedding_type": "learned_absolute"},
        pairs(
            "num_layers=n_layer hidden_size=n_embd ffn_hidden_size=n_inner "
            "num_attention_heads=n_head vocab_size=vocab_size max_position_embeddings=n_positions "
            "layernorm_epsilon=layer_norm_epsilon attention_dropout=attn_pdrop"
        ),
        _modules(
            "transformer.h.{}",
            """
            embedding.word_embeddings        transformer.wte
            embedding.position_embeddings    transformer.wpe
            final_layernorm                  transformer.ln_f
            output_layer                     lm_head
            .input_layernorm                 .ln_1
            .post_attention_layernorm        .ln_2
            .self_attention.query_key_value  .attn.c_attn by_head transposed
            .self_attention.dense            .attn.c_proj transposed
            .mlp.dense_h_to_4h               .mlp.c_fc transposed
            .mlp.dense_4h_to_h               .mlp.c_proj transposed
            """,
        ),
        (
            rules.TIED,
            rules.gelu("activation_function"),
            rules.dropout("resid_pdrop", "embd_pdrop"),
        ),
        _values(
            "n_inner=null activation_function=gelu_new layer_norm_epsilon=1e-5 attn_pdrop=0.1 "
            "resid_pdrop=0.1 embd_pdrop=0.1 tie_word_embeddings=true"
        ),
        _values("scale_attn_weights=true scale_attn_by_inverse_layer_idx=false"),
        pairs(
            "n_layer=num_hidden_layers n_embd=hidden_size n_head=num_attention_heads "
            "n_positions=max_position_embeddings"
        ),
        "transformer.",
    ),
    "llama": _llama("LlamaForCausalLM", {}, (rules.biases("mlp_bias"),), _NO_BIASES),
    "mistral": _llama(
        "MistralForCausalLM",
        {},
        (rules.windows(),),
        _values("num_key_value_heads=8 sliding_window=4096"),
    ),
    "qwen2": _llama(
        "Qwen2ForCausalLM",
        {"add_qkv_bias": True},
        (rules.WINDOW_OF_LAST,),
        {**_WINDOWS, "num_key_value_heads": 32},
    ),
    "qwen3": _llama(
        "Qwen3ForCausalLM",
        {"qk_layernorm": True},
        (rules.WINDOW_OF_LAST, rules.biases()),
        _WINDOWS | _values("num_key_value_heads=32 head_dim=128") | _NO_BIAS,
        _LLAMA_MODULES | _QK_NORMS,
    ),
    "olmo2": _llama(
        "Olmo2ForCausalLM",
        _values("qk_layernorm=true qk_layernorm_over=all norm_position=post"),
        (rules.biases(),),
        _NO_BIAS,
        _LLAMA_MODULES | _QK_NORMS | _NORMS_AFTER,
    ),
    "mixtral": _llama(
        "MixtralForCausalLM",
        {},
        (rules.windows(),),
        _values(
            "num_key_value_heads=8 rope_theta=1e6 sliding_window=null "
            "num_experts_per_tok=2 num_local_experts=8"
        ),
        _LLAMA_MODULES
        | _modules(
            f"{_LAYER}.block_sparse_moe",
            """
            .mlp.router                 .gate
            .mlp.experts.dense_h_to_4h  .experts.{}.w1 .experts.{}.w3 by_expert
            .mlp.experts.dense_4h_to_h  .experts.{}.w2 by_expert
            """,
        ),
        _LOCAL_EXPERTS,
        # transformers applies this noise to the inputs of the experts, too; no setting of ours does
        {**_SILU, "router_jitter_noise": 0.0},
        {"num_local_experts": "num_experts"},
    ),
    "olmoe": _llama(
        "OlmoeForCausalLM",
        _values("qk_layernorm=true qk_layernorm_over=all"),
        (rules.NORMALISED, rules.biases()),
        _values("norm_topk_prob=false num_experts_per_tok=8 num_experts=64 clip_qkv=null")
        | _NO_BIAS,
        _LLAMA_MODULES | _QK_NORMS | _EXPERT_MODULES,
        _EXPERTS_ALONE | {"clip_qkv": "clip_qkv"},
        older=_EXPERTS,
    ),
    "qwen3_moe": _llama(
        "Qwen3MoeForCausalLM",
        {"qk_layernorm": True},
        (
            rules.windows(switched=True),
            rules.NORMALISED,
            rules.LAYERS_WITH_EXPERTS,
            rules.biases(),
        ),
        _SPARSE
        | _WINDOW
        | _NO_BIAS
        | _values("num_key_value_heads=4 num_experts_per_tok=8 num_experts=128"),
        _LLAMA_MODULES | _QK_NORMS | _EXPERT_MODULES,
        _EXPERTS_TOO,
        older=_EXPERTS,
    ),
    "qwen2_moe": _llama(
        "Qwen2MoeForCausalLM",
        {"moe_shared_expert_gate": True},
        (
            rules.WINDOW_OF_FIRST,
            rules.NORMALISED,
            rules.LAYERS_WITH_EXPERTS,
            rules.biases(of_attention="qkv_bias", kind="qkv"),
        ),
        _SPARSE
        | _WINDOWS
        | _values("qkv_bias=true num_key_value_heads=16 num_experts_per_tok=4 num_experts=60"),
        _LLAMA_MODULES | _EXPERT_MODULES | _SHARED_EXPERTS,
        _EXPERTS_TOO | _SHARED_WIDTH,
    ),
    "qwen3_next": _llama(
        "Qwen3NextForCausalLM",
        _values(
            "qk_layernorm=true apply_layernorm_1p=true attention_output_gate=true "
            "moe_shared_expert_gate=true"
        ),
        (
            rules.LINEAR_ATTENTION,
            rules.NORMALISED,
            rules.LAYERS_WITH_EXPERTS,
            rules.biases(),
        ),
        _SPARSE
        | _NO_BIAS
        | _LINEAR
        | _values(
            "layer_types=null full_attention_interval=4 num_key_value_heads=2 head_dim=256 "
            "partial_rotary_factor=0.25 norm_topk_prob=true num_experts_per_tok=10 "
            "num_experts=512"
        ),
        _LLAMA_MODULES
        | _QK_NORMS
        | _EXPERT_MODULES
        | _SHARED_EXPERTS
        | _modules(
            _LAYER,
            """
            .self_attention.in_proj   .linear_attn.in_proj_qkvz .linear_attn.in_proj_ba by_head
            .self_attention.conv1d    .linear_attn.conv1d by_head convolution
            .self_attention.A_log     .linear_attn.A_log
            .self_attention.dt_bias   .linear_attn.dt_bias
            .self_attention.out_norm  .linear_attn.norm
            .self_attention.out_proj  .linear_attn.out_proj
            """,
        ),
        _EXPERTS_TOO | _SHARED_WIDTH | {name: name for name in _LINEAR},
        {**_SILU, "use_sliding_window": False},
        older=_EXPERTS,
        rope=rules.rope(share="partial_rotary_factor"),
    ),
    "gpt_oss": _llama(
        "GptOssForCausalLM",
        _values(
            "swiglu=false quick_geglu=true glu_linear_offset=1.0 softmax_type=learnable "
            "moe_router_bias=true"
        ),
        (
            rules.window_except(2),
            rules.biases(of_mlp=True),
            rules.NAMES_OF_GPT_OSS,
        ),
        _values(
            "attention_bias=true num_key_value_heads=8 head_dim=64 sliding_window=128 "
            "layer_types=null rope_theta=1.5e5 num_experts_per_tok=4 num_local_experts=128 "
            "swiglu_limit=7.0 experts_per_token=null initial_context_length=null"
        ),
        _LLAMA_MODULES
        | _modules(
            _LAYER,
            """
            .self_attention.softmax_offset     .self_attn.sinks
            .mlp.router                        .mlp.router
            .mlp.experts.dense_h_to_4h.weight  .mlp.experts.gate_up_proj[{}] by_expert transposed interleaved
            .mlp.experts.dense_h_to_4h.bias    .mlp.experts.gate_up_proj_bias[{}] by_expert interleaved
            .mlp.experts.dense_4h_to_h.weight  .mlp.experts.down_proj[{}] by_expert transposed
            .mlp.experts.dense_4h_to_h.bias    .mlp.experts.down_proj_bias[{}] by_expert
            """,
        ),
        _LOCAL_EXPERTS | {"activation_func_clamp_value": "swiglu_limit"},
        {**_SILU, "swiglu_alpha": 1.702},
        {"num_local_experts": "num_experts"},
        rules.rope(
            usual=_values(
                "rope_type=yarn factor=32.0 beta_fast=32.0 beta_slow=1.0 truncate=false "
                "original_max_position_embeddings=4096"
            )
        ),
    ),
    "apertus": _llama(
        "ApertusForCausalLM",
        _values("swiglu=false xielu=true qk_layernorm=true"),
        (rules.biases(),),
        {**_NO_BIAS, "rope_theta": 12e6},
        _LLAMA_MODULES
        | _QK_NORMS
        | _modules(
            _LAYER,
            """
            .input_layernorm           .attention_layernorm
            .post_attention_layernorm  .feedforward_layernorm
            .mlp.dense_h_to_4h         .mlp.up_proj
            .mlp.activation.alpha_p    .mlp.act_fn.alpha_p
            .mlp.activation.alpha_n    .mlp.act_fn.alpha_n .mlp.act_fn.beta=0.5 .mlp.act_fn.eps=-1e-6
            """,
        ),
        only={"hidden_act": "xielu"},
        rope=rules.rope(
            usual=_values(
                "rope_type=llama3 rope_theta=12e6 factor=8.0 "
                "original_max_position_embeddings=8192 low_freq_factor=1.0 high_freq_factor=4.0"
            )
        ),
    ),
    "glm4_moe": _llama(
        "Glm4MoeForCausalLM",
        _values("moe_router_score_function=sigmoid moe_router_enable_expert_bias=true"),
        (rules.biases(kind="qkv"), rules.routed_experts("sigmoid")),
        _NO_BIAS
        | _values(
            "num_key_value_heads=8 use_qk_norm=false partial_rotary_factor=0.5 "
            "num_experts_per_tok=8 n_shared_experts=1 n_routed_experts=128 "
            "routed_scaling_factor=1.0 n_group=1 topk_group=1 first_k_dense_replace=1 "
            "norm_topk_prob=true num_nextn_predict_layers=null"
        ),
        _LLAMA_MODULES | _QK_NORMS | _ROUTED_EXPERTS,
        _MANY_EXPERTS | {"qk_layernorm": "use_qk_norm"},
        rope=rules.rope(share="partial_rotary_factor"),
        unread=_LAYERS_AFTER_ALL,
    ),
    "deepseek_v2": _deepseek(
        "DeepseekV2ForCausalLM",
        "softmax",
        _values("moe_router_pre_softmax=true rotary_interleaved=true"),
        {},
        absent=_values(
            "first_k_dense_replace=0 n_group=null topk_group=null topk_method=greedy "
            "routed_scaling_factor=1.0 n_shared_experts=2 n_routed_experts=64 "
            "num_experts_per_tok=null"
        ),
        only=_values("mlp_bias=false norm_topk_prob=false"),
    ),
    "deepseek_v3": _deepseek(
        "DeepseekV3ForCausalLM",
        "sigmoid",
        _values("moe_router_score_function=sigmoid moe_router_enable_expert_bias=true"),
        {"rotary_interleaved": "rope_interleave"},
        absent=_values(
            "num_key_value_heads=128 first_k_dense_replace=3 n_group=8 topk_group=4 "
            "norm_topk_prob=true routed_scaling_factor=2.5 n_shared_experts=1 "
            "n_routed_experts=256 num_experts_per_tok=8 rope_interleave=true "
            "num_nextn_predict_layers=null"
        ),
        only={"topk_method": "noaux_tc"},
        unread=_LAYERS_AFTER_ALL,
    ),
    "gemma2": _llama(
        "Gemma2ForCausalLM",
        _GEMMA,
        (rules.window_except(2), rules.SCALES, rules.biases()),
        _GEMMA_USUAL | _values("attn_logit_softcapping=50.0 final_logit_softcapping=30.0"),
        _GEMMA_MODULES,
        _CAPPED,
        _GEMMA_ONLY,
        {"hidden_activation": "hidden_act"},
    ),
    "gemma3_text": _llama(
        "Gemma3ForCausalLM",
        {**_GEMMA, "qk_layernorm": True},
        (rules.SCALES, rules.biases()),
        _GEMMA_USUAL  # transformers writes, and does not read, _sliding_window_pattern
        | _values(
            "sliding_window_pattern=6 _sliding_window_pattern=null rope_theta=1e6 "
            "rope_local_base_freq=1e4 attn_logit_softcapping=null "
            "final_logit_softcapping=null"
        ),
        _GEMMA_MODULES | _QK_NORMS,
        _CAPPED,
        _GEMMA_ONLY,
        rope=rules.rope_by_window(
            rules.window_except("sliding_window_pattern"), "rope_local_base_freq"
        ),
    ),
    "olmo3": _llama(
        "Olmo3ForCausalLM",
        _values("qk_layernorm=true qk_layernorm_over=all norm_position=post"),
        (rules.biases(),),
        _NO_BIAS | _values("sliding_window=4096 layer_types=null rope_theta=5e5"),
        _LLAMA_MODULES | _QK_NORMS | _NORMS_AFTER,
        rope=rules.rope_by_window(rules.window_except(4), 5e5),
    ),
    "smollm3": _llama(
        "SmolLM3ForCausalLM",
        {},
        (rules.biases("mlp_bias"), rules.LAYERS_WITHOUT_ROPE, rules.WINDOW_WITHOUT_ROPE),
        _NO_BIASES
        | _values(
            "num_key_value_heads=4 rope_theta=2e6 use_sliding_window=false "
            "sliding_window=null no_rope_layers=null no_rope_layer_interval=4 layer_types=null "
            "tie_word_embeddings=true"
        ),
    ),
    "granite": _llama(
        "GraniteForCausalLM",
        {},
        (rules.biases("mlp_bias"), rules.MULTIPLIERS),
        _NO_BIASES
        | _values(
            "embedding_multiplier=1.0 attention_multiplier=1.0 residual_multiplier=1.0 "
            "logits_scaling=1.0"
        ),
    ),
    "phi3": _llama(
        "Phi3ForCausalLM",
        {},
        (rules.windows(), rules.dropout("resid_pdrop", "embd_pdrop")),
        _values(
            "sliding_window=null resid_pdrop=0.0 embd_pdrop=0.0 "
            "original_max_position_embeddings=4096 partial_rotary_factor=1.0"
        ),
        _LLAMA_MODULES
        | _modules(
            _LAYER,
            """
            .self_attention.query_key_value  .self_attn.qkv_proj by_head
            .mlp.dense_h_to_4h               .mlp.gate_up_proj
            """,
        ),
        rope=rules.rope(share="partial_rotary_factor", kinds=("default",)),
    ),
    "starcoder2": _llama(
        "Starcoder2ForCausalLM",
        _values("normalization=layernorm swiglu=false"),
        (
            rules.windows(),
            rules.gelu("hidden_act"),
            rules.dropout("residual_dropout", "embedding_dropout"),
        ),
        _values(
            "num_key_value_heads=2 norm_epsilon=1e-5 hidden_act=gelu_pytorch_tanh "
            "sliding_window=null residual_dropout=0.0 embedding_dropout=0.0 use_bias=true "
            "tie_word_embeddings=true"
        ),
        _LLAMA_MODULES
        | _modules(_LAYER, ".mlp.dense_h_to_4h .mlp.c_fc\n.mlp.dense_4h_to_h .mlp.c_proj"),
        _GROUPED | _values("layernorm_epsilon=norm_epsilon add_bias_linear=use_bias"),
        {},
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        {"position_embedding_type": "rope"},
        _WIDTHS | _values("hidden_dropout=hidden_dropout layernorm_epsilon=layer_norm_eps"),
        _modules(
            "gpt_neox.layers.{}",
            """
            embedding.word_embeddings        gpt_neox.embed_in
            final_layernorm                  gpt_neox.final_layer_norm
            output_layer                     embed_out
            .self_attention.query_key_value  .attention.query_key_value
            .self_attention.dense            .attention.dense
            """,
        )
        | _modules("gpt_neox.layers.{}", _MEGATRONS),
        (
            rules.TIED,
            rules.gelu("hidden_act"),
            rules.rope("rotary_emb_base", "rotary_pct"),
            rules.switch("use_parallel_residual", "parallel_residual", "two_norms", None),
            rules.biases(of_mlp=True),
        ),
        _values("attention_dropout=0.0 hidden_dropout=0.0 layer_norm_eps=1e-5")
        | _ROPE
        | _values(
            "rotary_emb_base=1e4 rotary_pct=0.25 hidden_act=gelu tie_word_embeddings=false "
            "use_parallel_residual=true attention_bias=true"
        ),
        prefix="gpt_neox.",
    ),
    "bloom": Family(
        "BloomForCausalLM",
        _values("position_embedding_type=alibi embedding_layernorm=true"),
        pairs(
            "num_layers=n_layer hidden_size=hidden_size num_attention_heads=n_head "
            "vocab_size=vocab_size seq_length=seq_length layernorm_epsilon=layer_norm_epsilon "
            "attention_dropout=attention_dropout hidden_dropout=hidden_dropout "
            "apply_residual_connection_post_layernorm=apply_residual_connection_post_layernorm"
        ),
        _modules(
            "transformer.h.{}",
            """
            embedding.word_embeddings        transformer.word_embeddings
            embedding_layernorm              transformer.word_embeddings_layernorm
            final_layernorm                  transformer.ln_f
            output_layer                     lm_head
            .self_attention.query_key_value  .self_attention.query_key_value
            .self_attention.dense            .self_attention.dense
            """,
        )
        | _modules("transformer.h.{}", _MEGATRONS),
        (rules.TIED,),
        _values(
            "attention_dropout=0.0 hidden_dropout=0.0 layer_norm_epsilon=1e-5 "
            "apply_residual_connection_post_layernorm=false tie_word_embeddings=true "
            "seq_length=2048"
        ),
        older=pairs("n_head=num_attention_heads n_layer=num_hidden_layers hidden_size=n_embed"),
        prefix="transformer.",
    ),
}
"""Families by model_type. If several describe a model, `family_of` prefers the first."""
