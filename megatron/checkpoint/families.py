"""Model families of Hugging Face, each one table that is read in both directions.

A table says which fields of config.json are which settings here, and which of their tensors make up
each of our parameters. A new family is one more entry of FAMILIES. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config import Config
from megatron.config.model import ModelConfig
from megatron.errors import CheckpointError, ConfigError
from megatron.untrusted import read_json

CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
_CONFIG_LIMIT_BYTES = 1 << 24

Fields = Mapping[str, Any]
"""Fields of a config.json."""


class Rule(NamedTuple):
    """Settings that are not single fields with the same value.

    `read` returns settings from fields and `write` fields of a model. `read` raises LookupError,
    TypeError or ValueError for what is not supported here.
    """

    read: Callable[[Fields], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]


@dataclass(frozen=True)
class Theirs:
    """Modules of theirs that hold the rows of one of our matrices, one after the other.

    by_head      their rows are all queries, all keys, all values; ours are [group][queries, key,
                 value] (SelfAttention)
    transposed   their weights are [in, out]
    by_expert    each expert has these modules, with its number in the second place
    """

    modules: tuple[str, ...]
    by_head: bool = False
    transposed: bool = False
    by_expert: bool = False


@dataclass(frozen=True)
class Family:
    """A family of models.

    architecture   its class in transformers, the only one that is supported
    settings       what all its models have in common, by our names
    fields         our settings, and their fields of the same value
    modules        our modules, and theirs; {} is the number of the layer. Each has a weight, a
                   bias, or both
    rules          see Rule
    absent         values of fields that config.json may leave out
    only           fields that would change the model, and their only value that is supported here
    older          names of fields, and others that some published files have in their place
    prefix         beginning of their names, which some published files leave out
    """

    architecture: str
    settings: Mapping[str, Any]
    fields: Mapping[str, str]
    modules: Mapping[str, Theirs]
    rules: tuple[Rule, ...] = ()
    absent: Fields = field(default_factory=dict)
    only: Fields = field(default_factory=dict)
    older: Mapping[str, str] = field(default_factory=dict)
    prefix: str = "model."

    @property
    def experts(self) -> bool:
        """Return whether its models have experts."""
        return any(theirs.by_expert for theirs in self.modules.values())

    def theirs(self, parameter: str, experts: int = 1) -> tuple[Theirs, tuple[str, ...]]:
        """Return where one of our parameters is, and the names of those tensors.

        experts   how many it has, where it is one of experts

        Raises CheckpointError where this family has no such parameter.
        """
        module, _, kind = parameter.rpartition(".")
        head, _, rest = module.partition(".")
        number, _, part = rest.partition(".")
        known = f"layers.{{}}.{part}" if head == "layers" else module
        if known not in self.modules:
            raise CheckpointError(f"{self.architecture} has no parameter like {parameter}")
        found = self.modules[known]
        return found, tuple(
            f"{name.format(number, expert)}.{kind}"
            for expert in range(experts if found.by_expert else 1)
            for name in found.modules
        )


# ---- rules


def _flag(fields: Fields, name: str) -> bool:
    value = fields[name]
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r:.60}, expected true or false")
    return value


def _unsupported(name: str, value: Any) -> ValueError:
    return ValueError(f"{name} {value!r:.60} is not supported")


_TIED = Rule(
    lambda f: {"untie_embeddings_and_output_weights": not _flag(f, "tie_word_embeddings")},
    lambda m: {"tie_word_embeddings": not m.untie_embeddings_and_output_weights},
)


def _gelu(name: str) -> Rule:
    """Return the rule of a field that names a form of GELU."""
    forms = {"gelu": True, "gelu_new": False, "gelu_fast": False, "gelu_pytorch_tanh": False}

    def read(fields: Fields) -> dict[str, Any]:
        if fields[name] not in forms:
            raise _unsupported(name, fields[name])
        return {"exact_gelu": forms[fields[name]]}

    return Rule(read, lambda m: {name: "gelu" if m.exact_gelu else "gelu_new"})


def _biases(fields: Fields) -> dict[str, Any]:
    attention, mlp = _flag(fields, "attention_bias"), _flag(fields, "mlp_bias")
    if attention != mlp:
        raise ValueError("biases of attention without those of the MLP are not supported")
    return {"add_bias_linear": attention}


_BIASES = Rule(_biases, lambda m: dict.fromkeys(("attention_bias", "mlp_bias"), m.add_bias_linear))

# Fields of a kind of RoPE scaling, and the settings.
_ROPE_SCALING: Mapping[str, Mapping[str, str]] = {
    "linear": {"factor": "rope_scaling_factor"},
    "llama3": {
        "factor": "rope_scaling_factor",
        "original_max_position_embeddings": "rope_original_positions",
        "low_freq_factor": "rope_low_freq_factor",
        "high_freq_factor": "rope_high_freq_factor",
    },
    "yarn": {
        "factor": "rope_scaling_factor",
        "original_max_position_embeddings": "rope_original_positions",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
        "attention_factor": "yarn_attention_factor",
    },
}


def _rope(base: str = "rope_theta", share: str = "", usual_share: float = 1.0) -> Rule:
    """Return the rule of the rotary embedding.

    base, share   fields of the base and of the rotated part of a head; no share: heads are rotated
                  as a whole

    transformers 5 writes rope_parameters, which has all of it; older versions, which 5 reads too,
    write single fields and rope_scaling.
    """

    def read(fields: Fields) -> dict[str, Any]:
        given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
        rope = dict(given)
        kind = rope.pop("rope_type", rope.get("type", "default"))
        rope.pop("type", None)
        found: dict[str, Any] = {
            "rotary_base": rope.pop("rope_theta", fields.get(base, 10000.0)),
            "rotary_percent": rope.pop(
                "partial_rotary_factor", fields.get(share, usual_share) if share else 1.0
            ),
        }
        if found["rotary_percent"] != 1.0 and not share:
            raise _unsupported("partial_rotary_factor", found["rotary_percent"])
        if kind == "default":
            return found
        if kind not in _ROPE_SCALING:
            raise _unsupported("rope_type", kind)
        if kind in ("llama3", "yarn"):
            rope.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
        if kind == "yarn" and rope.pop("truncate", True) is not True:
            raise _unsupported("truncate", False)
        rope = {name: value for name, value in rope.items() if value is not None}
        if unknown := sorted(rope.keys() - _ROPE_SCALING[kind].keys()):
            raise _unsupported(f"{unknown[0]} of rope_type {kind}", rope[unknown[0]])
        if kind != "yarn" and (missing := sorted(_ROPE_SCALING[kind].keys() - rope.keys())):
            raise ValueError(f"{missing[0]} of rope_type {kind} is missing")
        settings = {_ROPE_SCALING[kind][name]: value for name, value in rope.items()}
        return found | {"rope_scaling": kind} | settings

    def write(model: ModelConfig) -> dict[str, Any]:
        found: dict[str, Any] = {base: model.rotary_base}
        if share:
            found[share] = model.rotary_percent
        if model.rope_scaling is not None:
            named = {
                name: getattr(model, setting)
                for name, setting in _ROPE_SCALING[model.rope_scaling].items()
            }
            found["rope_scaling"] = {"rope_type": model.rope_scaling} | {
                name: value for name, value in named.items() if value is not None
            }
        return found

    return Rule(read, write)


def windows_of(model: ModelConfig) -> list[int | None]:
    """Return ModelConfig.window of all layers."""
    return [model.window(layer) for layer in range(model.num_layers)]


def _window(size: Any, windowed: list[bool]) -> dict[str, Any]:
    """Return the settings of a window of `size` tokens, itself included, in some layers."""
    if size is None or not any(windowed):
        return {}
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"sliding_window is {size!r:.60}, expected a number of tokens")
    if all(windowed):
        return {"window_size": (size - 1, 0)}
    first = windowed.index(False) + 1  # the number of the first layer without it
    every = [number % first != 0 for number in range(1, len(windowed) + 1)]
    skip = (first,) if windowed == every else tuple(int(one) for one in windowed)
    return {"window_size": (size - 1, 0), "window_attn_skip_freq": skip}


def _layer_types(fields: Fields, usual: Callable[[int], bool]) -> list[bool]:
    """Return which layers have a window: by layer_types, or where config.json leaves it out."""
    layers, types = fields["num_hidden_layers"], fields.get("layer_types")
    if types is None:
        return [usual(layer) for layer in range(min(int(layers), 1 << 20))]
    kinds = {"sliding_attention": True, "full_attention": False}
    if not isinstance(types, list) or len(types) != layers or any(t not in kinds for t in types):
        raise ValueError(f"layer_types does not have one of {', '.join(kinds)} for each layer")
    return [kinds[one] for one in types]


def _window_size(model: ModelConfig) -> dict[str, Any]:
    """Return the field of the window, which counts the token itself, too."""
    sizes = [size for size in windows_of(model) if size is not None]
    return {"sliding_window": sizes[0] + 1 if sizes else None}


def _windows_by_layer(model: ModelConfig) -> dict[str, Any]:
    names = [
        "full_attention" if size is None else "sliding_attention" for size in windows_of(model)
    ]
    return {**_window_size(model), "layer_types": names}


_WINDOW_OF_ALL = Rule(lambda f: _window(f["sliding_window"], [True]), _window_size)


def _window_of_last(fields: Fields) -> dict[str, Any]:
    if not _flag(fields, "use_sliding_window"):
        return {}
    first = fields["max_window_layers"]
    return _window(fields["sliding_window"], _layer_types(fields, lambda layer: layer >= first))


def _write_window_of_last(model: ModelConfig) -> dict[str, Any]:
    without = [size is None for size in windows_of(model)]
    return {
        "use_sliding_window": not all(without),
        "max_window_layers": [*without, False].index(False),
        **_windows_by_layer(model),
    }


_WINDOW_OF_LAST = Rule(_window_of_last, _write_window_of_last)
_WINDOW_OF_EVERY_OTHER = Rule(
    lambda f: _window(f["sliding_window"], _layer_types(f, lambda layer: layer % 2 == 0)),
    _windows_by_layer,
)


def _experts(count: str, normalised: str | None = "norm_topk_prob") -> Rule:
    """Return the rule of experts and their router.

    count        field of their number
    normalised   field that says whether the weights of the chosen experts add up to one; None:
                 they do. A softmax over all experts, divided by its sum over some of them, is a
                 softmax over these
    """

    def read(fields: Fields) -> dict[str, Any]:
        if not isinstance(fields[count], int) or fields[count] < 2:
            raise _unsupported(count, fields[count])
        over_all = normalised is not None and not _flag(fields, normalised)
        return {
            "num_experts": fields[count],
            "moe_router_topk": fields["num_experts_per_tok"],
            "moe_router_pre_softmax": over_all,
        }

    def write(model: ModelConfig) -> dict[str, Any]:
        found = {count: model.num_experts, "num_experts_per_tok": model.moe_router_topk}
        return (
            found if normalised is None else found | {normalised: not model.moe_router_pre_softmax}
        )

    return Rule(read, write)


def _layers_with_experts(fields: Fields) -> dict[str, Any]:
    dense, step = fields["mlp_only_layers"] or [], fields["decoder_sparse_step"]
    layers = range(min(int(fields["num_hidden_layers"]), 1 << 20))
    which = [int(layer not in dense and (layer + 1) % step == 0) for layer in layers]
    return {"moe_layer_freq": (1,) if all(which) else tuple(which)}


_LAYERS_WITH_EXPERTS = Rule(
    _layers_with_experts,
    lambda m: {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(m.num_layers) if not m.has_experts(i)],
    },
)
_WINDOW_IF_USED = Rule(
    lambda f: _window(f["sliding_window"], [True]) if _flag(f, "use_sliding_window") else {},
    lambda m: {"use_sliding_window": m.window_size is not None, **_window_size(m)},
)
_SCALES = Rule(  # Gemma's: of the scores by a number of its own, of the embeddings by the width
    lambda f: {
        "softmax_scale": 1.0 / math.sqrt(f["query_pre_attn_scalar"]),
        "embedding_scale": math.sqrt(f["hidden_size"]),
    },
    lambda m: {
        "query_pre_attn_scalar": m.kv_channels
        if m.softmax_scale is None
        else round(m.softmax_scale**-2)
    },
)
_LENGTH = Rule(  # without positions to learn or to scale; old files have it for information
    lambda f: {"seq_length": f["seq_length"]}, lambda m: {"seq_length": m.seq_length}
)


# ---- tables


def _one(**modules: str) -> dict[str, Theirs]:
    """Return entries for modules that are the same here; keys have __ for a dot."""
    return {ours.replace("__", "."): Theirs((theirs,)) for ours, theirs in modules.items()}


def _layer(**modules: str) -> dict[str, Theirs]:
    return {f"layers.{{}}.{ours}": theirs for ours, theirs in _one(**modules).items()}


_WIDTHS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
    "attention_dropout": "attention_dropout",
}
_GROUPED = {
    **_WIDTHS,
    "num_key_value_heads": "num_key_value_heads",
    "layernorm_epsilon": "rms_norm_eps",
}
_HEAD_DIM = {"kv_channels": "head_dim"}
_USUAL = {"num_key_value_heads": None, "head_dim": None, "attention_dropout": 0.0}
_NO_BIAS = {"attention_bias": False}
_GATED = {
    "normalization": "rmsnorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
}
_QKV = tuple(f"model.layers.{{}}.self_attn.{name}_proj" for name in "qkv")
_GATE_UP = tuple(f"model.layers.{{}}.mlp.{name}_proj" for name in ("gate", "up"))
_LLAMA_MODULES = {
    **_one(
        embedding__word_embeddings="model.embed_tokens",
        final_layernorm="model.norm",
        output_layer="lm_head",
    ),
    **_layer(
        input_layernorm="model.layers.{}.input_layernorm",
        post_attention_layernorm="model.layers.{}.post_attention_layernorm",
        self_attention__dense="model.layers.{}.self_attn.o_proj",
        mlp__dense_4h_to_h="model.layers.{}.mlp.down_proj",
    ),
    "layers.{}.self_attention.query_key_value": Theirs(_QKV, by_head=True),
    "layers.{}.mlp.dense_h_to_4h": Theirs(_GATE_UP),
}
_QK_NORMS = _layer(
    self_attention__q_layernorm="model.layers.{}.self_attn.q_norm",
    self_attention__k_layernorm="model.layers.{}.self_attn.k_norm",
)
_NORMS_AFTER = _layer(
    post_self_attn_layernorm="model.layers.{}.post_attention_layernorm",
    post_mlp_layernorm="model.layers.{}.post_feedforward_layernorm",
)
_EXPERTS_ALONE = _GROUPED | {"moe_ffn_hidden_size": "intermediate_size"}
_EXPERTS_TOO = _GROUPED | {"moe_ffn_hidden_size": "moe_intermediate_size"}
_SPARSE = {"mlp_only_layers": None, "decoder_sparse_step": 1, "norm_topk_prob": False}


def _expert_modules(block: str = "mlp", names: str = "gate_proj up_proj down_proj") -> Any:
    """Return the entries of a router and its experts; `names`: of gate, value and output."""
    gate, up, down = (f"model.layers.{{}}.{block}.experts.{{}}.{name}" for name in names.split())
    return {
        **_layer(mlp__router=f"model.layers.{{}}.{block}.gate"),
        "layers.{}.mlp.experts.dense_h_to_4h": Theirs((gate, up), by_expert=True),
        "layers.{}.mlp.experts.dense_4h_to_h": Theirs((down,), by_expert=True),
    }


_SHARED_EXPERTS = _layer(
    mlp__shared_experts__dense_4h_to_h="model.layers.{}.mlp.shared_expert.down_proj",
    mlp__shared_experts__gate="model.layers.{}.mlp.shared_expert_gate",
) | {
    "layers.{}.mlp.shared_experts.dense_h_to_4h": Theirs(
        tuple(f"model.layers.{{}}.mlp.shared_expert.{name}_proj" for name in ("gate", "up"))
    )
}
_MEGATRONS = {  # GPT-NeoX and BLOOM keep Megatron's matrices
    "mlp__dense_h_to_4h": "mlp.dense_h_to_4h",
    "mlp__dense_4h_to_h": "mlp.dense_4h_to_h",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
}


def _megatrons(prefix: str, attention: str) -> dict[str, Theirs]:
    own = {
        "self_attention__query_key_value": f"{attention}.query_key_value",
        "self_attention__dense": f"{attention}.dense",
    }
    return _layer(**{ours: prefix + theirs for ours, theirs in (_MEGATRONS | own).items()})


FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        {"position_embedding_type": "learned_absolute"},
        {
            "num_layers": "n_layer",
            "hidden_size": "n_embd",
            "ffn_hidden_size": "n_inner",
            "num_attention_heads": "n_head",
            "vocab_size": "vocab_size",
            "max_position_embeddings": "n_positions",
            "layernorm_epsilon": "layer_norm_epsilon",
            "attention_dropout": "attn_pdrop",
            "hidden_dropout": "resid_pdrop",
        },
        {
            **_one(
                embedding__word_embeddings="transformer.wte",
                embedding__position_embeddings="transformer.wpe",
                final_layernorm="transformer.ln_f",
                output_layer="lm_head",
            ),
            **_layer(
                input_layernorm="transformer.h.{}.ln_1",
                post_attention_layernorm="transformer.h.{}.ln_2",
            ),
            "layers.{}.self_attention.query_key_value": Theirs(
                ("transformer.h.{}.attn.c_attn",), by_head=True, transposed=True
            ),
            **{
                f"layers.{{}}.{ours}": Theirs((f"transformer.h.{{}}.{theirs}",), transposed=True)
                for ours, theirs in (
                    ("self_attention.dense", "attn.c_proj"),
                    ("mlp.dense_h_to_4h", "mlp.c_fc"),
                    ("mlp.dense_4h_to_h", "mlp.c_proj"),
                )
            },
        },
        (
            _TIED,
            _gelu("activation_function"),
            Rule(lambda f: {}, lambda m: {"embd_pdrop": m.hidden_dropout}),
        ),
        {
            "n_inner": None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "attn_pdrop": 0.1,
            "resid_pdrop": 0.1,
            "tie_word_embeddings": True,
        },
        {
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
        prefix="transformer.",
    ),
    "llama": Family(
        "LlamaForCausalLM",
        {name: value for name, value in _GATED.items() if name != "add_bias_linear"},
        _GROUPED | _HEAD_DIM,
        _LLAMA_MODULES,
        (_TIED, _rope(), _BIASES),
        {**_USUAL, "tie_word_embeddings": False, "mlp_bias": False, **_NO_BIAS},
        {"hidden_act": "silu"},
    ),
    "mistral": Family(
        "MistralForCausalLM",
        _GATED,
        _GROUPED | _HEAD_DIM,
        _LLAMA_MODULES,
        (_TIED, _rope(), _WINDOW_OF_ALL),
        {**_USUAL, "tie_word_embeddings": False, "sliding_window": None},
        {"hidden_act": "silu"},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {**_GATED, "add_qkv_bias": True},
        _GROUPED,
        _LLAMA_MODULES,
        (_TIED, _rope(), _WINDOW_OF_LAST),
        {**_USUAL, "tie_word_embeddings": False, "use_sliding_window": False},
        {"hidden_act": "silu"},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {**_GATED, "qk_layernorm": True},
        _GROUPED | _HEAD_DIM,
        _LLAMA_MODULES | _QK_NORMS,
        (_TIED, _rope(), _WINDOW_OF_LAST),
        {**_USUAL, "head_dim": 128, "tie_word_embeddings": False, "use_sliding_window": False},
        {"hidden_act": "silu", **_NO_BIAS},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {**_GATED, "qk_layernorm": True, "qk_layernorm_over": "all", "norm_position": "post"},
        _GROUPED,
        _LLAMA_MODULES | _QK_NORMS | _NORMS_AFTER,
        (_TIED, _rope()),
        {**_USUAL, "tie_word_embeddings": False},
        {"hidden_act": "silu", **_NO_BIAS},
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        _GATED,
        _EXPERTS_ALONE | _HEAD_DIM,
        _LLAMA_MODULES | _expert_modules("block_sparse_moe", "w1 w3 w2"),
        (_TIED, _rope(), _WINDOW_OF_ALL, _experts("num_local_experts", None)),
        {**_USUAL, "tie_word_embeddings": False, "sliding_window": None},
        {"hidden_act": "silu"},
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {**_GATED, "qk_layernorm": True, "qk_layernorm_over": "all"},
        _EXPERTS_ALONE,
        _LLAMA_MODULES | _QK_NORMS | _expert_modules(),
        (_TIED, _rope(), _experts("num_experts")),
        {**_USUAL, "tie_word_embeddings": False, "norm_topk_prob": False},
        {"hidden_act": "silu", "clip_qkv": None, **_NO_BIAS},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {**_GATED, "qk_layernorm": True},
        _EXPERTS_TOO | _HEAD_DIM,
        _LLAMA_MODULES | _QK_NORMS | _expert_modules(),
        (_TIED, _rope(), _WINDOW_IF_USED, _experts("num_experts"), _LAYERS_WITH_EXPERTS),
        {**_USUAL, **_SPARSE, "tie_word_embeddings": False, "use_sliding_window": False},
        {"hidden_act": "silu", **_NO_BIAS},
        {"num_experts": "num_local_experts"},
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {**_GATED, "add_qkv_bias": True, "moe_shared_expert_gate": True},
        {**_EXPERTS_TOO, "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size"},
        _LLAMA_MODULES | _expert_modules() | _SHARED_EXPERTS,
        (_TIED, _rope(), _WINDOW_OF_LAST, _experts("num_experts"), _LAYERS_WITH_EXPERTS),
        {**_USUAL, **_SPARSE, "tie_word_embeddings": False, "use_sliding_window": False},
        {"hidden_act": "silu", "qkv_bias": True},
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        {
            "normalization": "rmsnorm",
            "apply_layernorm_1p": True,
            "geglu": True,
            "add_bias_linear": False,
            "position_embedding_type": "rope",
            "hidden_dropout": 0.0,
            "norm_position": "both",
        },
        {
            **_GROUPED,
            **_HEAD_DIM,
            "attention_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        {
            **_LLAMA_MODULES,
            **_NORMS_AFTER,
            **_layer(post_attention_layernorm="model.layers.{}.pre_feedforward_layernorm"),
        },
        (_TIED, _rope(), _WINDOW_OF_EVERY_OTHER, _SCALES),
        {**_USUAL, "head_dim": 256, "tie_word_embeddings": True, "query_pre_attn_scalar": 256},
        {"hidden_activation": "gelu_pytorch_tanh", "use_bidirectional_attention": None, **_NO_BIAS},
        {"hidden_activation": "hidden_act"},
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        {"position_embedding_type": "rope"},
        {**_WIDTHS, "hidden_dropout": "hidden_dropout", "layernorm_epsilon": "layer_norm_eps"},
        {
            **_one(
                embedding__word_embeddings="gpt_neox.embed_in",
                final_layernorm="gpt_neox.final_layer_norm",
                output_layer="embed_out",
            ),
            **_megatrons("gpt_neox.layers.{}.", "attention"),
        },
        (
            _TIED,
            _gelu("hidden_act"),
            _rope("rotary_emb_base", "rotary_pct", 0.25),
            Rule(
                lambda f: {
                    "parallel_residual": "two_norms" if _flag(f, "use_parallel_residual") else None
                },
                lambda m: {"use_parallel_residual": m.parallel_residual == "two_norms"},
            ),
        ),
        {
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu",
            "tie_word_embeddings": False,
            "use_parallel_residual": True,
        },
        {"attention_bias": True},
        prefix="gpt_neox.",
    ),
    "bloom": Family(
        "BloomForCausalLM",
        {"position_embedding_type": "alibi", "embedding_layernorm": True},
        {
            "num_layers": "n_layer",
            "hidden_size": "hidden_size",
            "num_attention_heads": "n_head",
            "vocab_size": "vocab_size",
            "layernorm_epsilon": "layer_norm_epsilon",
            "attention_dropout": "attention_dropout",
            "hidden_dropout": "hidden_dropout",
            "apply_residual_connection_post_layernorm": "apply_residual_connection_post_layernorm",
        },
        {
            **_one(
                embedding__word_embeddings="transformer.word_embeddings",
                embedding_layernorm="transformer.word_embeddings_layernorm",
                final_layernorm="transformer.ln_f",
                output_layer="lm_head",
            ),
            **_megatrons("transformer.h.{}.", "self_attention"),
        },
        (_TIED, _LENGTH),
        {
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            "layer_norm_epsilon": 1e-5,
            "apply_residual_connection_post_layernorm": False,
            "tie_word_embeddings": True,
            "seq_length": 2048,
        },
        older={"n_head": "num_attention_heads", "hidden_size": "n_embed"},
        prefix="transformer.",
    ),
}
"""Families by model_type. Of several that are the same function, the first is written."""


# ---- both directions


def model_of(fields: Fields, where: str) -> tuple[str, ModelConfig]:
    """Return (model_type, our settings of the model) from the fields of a config.json.

    Raises CheckpointError, naming the file `where`, for models that are not supported here.
    """
    kind, settings = _settings_of(fields, where)
    try:
        return kind, Config.create(**{n: v for n, v in settings.items() if v is not None}).model
    except ConfigError as error:
        raise CheckpointError(f"{where}: {error}") from error


def _settings_of(fields: Fields, where: str) -> tuple[str, dict[str, Any]]:
    kind = fields.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise CheckpointError(
            f"{where} has model_type {kind!r:.60}; supported are {', '.join(FAMILIES)}"
        )
    classes = fields.get("architectures")
    if classes is not None and classes != [family.architecture]:
        raise CheckpointError(
            f"{where} is of {classes!r:.100}; of {kind} only {family.architecture} is supported"
        )
    if fields.get("quantization_config") is not None:
        raise CheckpointError(f"{where} is of a quantized model: take the one it was made from")
    older = {new: fields[old] for new, old in family.older.items() if old in fields}
    known = {**family.only, **family.absent, **older, **fields}
    settings = dict(family.settings)
    try:
        for name, value in family.only.items():
            if (known[name] or None) != (value or None):
                raise _unsupported(name, known[name])
        for ours, theirs in family.fields.items():
            settings[ours] = known[theirs]
        for rule in family.rules:
            settings |= rule.read(known)
    except KeyError as error:
        raise CheckpointError(f"{where} has no {error.args[0]}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {error}") from error
    settings.setdefault("seq_length", settings.get("max_position_embeddings"))
    return str(kind), settings


def write_fields(kind: str, model: ModelConfig) -> dict[str, Any]:
    """Return the fields of a config.json for a model of this family."""
    family = FAMILIES[kind]
    fields: dict[str, Any] = {"architectures": [family.architecture], "model_type": kind}
    fields |= family.only
    fields |= {theirs: getattr(model, ours) for ours, theirs in family.fields.items()}
    for rule in family.rules:
        fields |= rule.write(model)
    return fields


# ---- folders


def is_huggingface(folder: Path) -> bool:
    """Return whether a folder has a config.json that is not of a checkpoint of ours."""
    return (folder / CONFIG).is_file() and not (folder / "manifest.json").exists()


def read_config(folder: Path) -> dict[str, Any]:
    """Return the fields of the config.json in a folder. Raises CheckpointError."""
    found: dict[str, Any] = read_json(folder / CONFIG, _CONFIG_LIMIT_BYTES, error=CheckpointError)
    return found


def read_model(folder: Path) -> tuple[str, ModelConfig]:
    """Return model_type and our settings of the model in a folder. Raises CheckpointError."""
    return model_of(read_config(folder), str(folder / CONFIG))


def tokenizer_settings(folder: Path, at: Path | None = None) -> dict[str, Any]:
    """Return our settings of the tokenizer in a folder of Hugging Face; empty without one.

    at   where its files will be; by default where they are

    Raises CheckpointError for a damaged file.
    """
    at = folder if at is None else at
    if (folder / "tokenizer.json").is_file():
        return {"tokenizer_type": "HFTokenizer", "tokenizer_model": str(at)}
    if (folder / "tokenizer.model").is_file():
        path, fields = folder / TOKENIZER_CONFIG, {}
        if path.is_file():
            limit = _CONFIG_LIMIT_BYTES
            fields = read_json(path, limit, error=CheckpointError, bits=128)
        begins, extra = fields.get("add_bos_token", True), {}
        kind = "Llama2Tokenizer" if begins else "GPTSentencePieceTokenizer"
        if fields.get("eos_token") == "<EOD>":  # with the tokens that Megatron appends
            kind = "SentencePieceTokenizer"
            extra["vocab_extra_ids"] = str(fields.get("added_tokens_decoder")).count("<extra_id_")
        return {"tokenizer_type": kind, "tokenizer_model": str(at / "tokenizer.model"), **extra}
    files = {"vocab_file": "vocab.json", "merge_file": "merges.txt"}
    if all((folder / name).is_file() for name in files.values()):
        return {"tokenizer_type": "GPT2BPETokenizer"} | {n: str(at / f) for n, f in files.items()}
    return {}
