"""Model families of Hugging Face, each one table that is read in both directions.

A table says which fields of config.json are which settings here, and which of their tensors make up
each of our parameters. A new family is one more entry of FAMILIES. Needs no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from megatron.config import Config
from megatron.config.model import ModelConfig
from megatron.config.option import MOST_POSITIONS
from megatron.errors import CheckpointError, ConfigError
from megatron.untrusted import read_json

CONFIG, TOKENIZER_CONFIG = "config.json", "tokenizer_config.json"
GENERATION = "generation_config.json"
_CONFIG_LIMIT_BYTES = 1 << 24

# Far beyond any model: a small file must not ask for hours of work.
_MOST_LAYERS = 1 << 12
_MOST_EXPERTS = 1 << 18  # of all layers

Fields = Mapping[str, Any]
"""Fields of a config.json."""

_ONLY: Fields = {
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "per_layer_config": None,
    "pruned_heads": None,
    "rope_interleaved": False,
    "use_mrope": False,
}
"""Fields that would change a model of any family, and their only value that is supported."""
_WITHOUT_EFFECT = frozenset(
    # names, versions and formats; ids of tokens, which are read with the tokenizer
    """
    _name_or_path name_or_path architectures model_type auto_map transformers_version torch_dtype
    dtype quantization_config tokenizer_class bos_token_id eos_token_id pad_token_id unk_token_id
    sep_token_id decoder_start_token_id prefix is_llama_config transformers.js_config
    unsloth_fixed unsloth_version
    """
    # how a model is computed or trained there, or what it returns
    """
    _attn_implementation _attn_implementation_autoset attn_implementation attention_probs_dropout_prob
    attention_softmax_in_fp32 bias_dropout_fusion cache_implementation chunk_size_feed_forward
    classifier_dropout gradient_checkpointing hidden_dropout_prob initializer_range is_decoder
    masked_softmax_fusion offset_alibi output_attentions output_hidden_states output_router_logits
    pretraining_tp reorder_and_upcast_attn return_dict router_aux_loss_coef skip_bias_add
    skip_bias_add_qkv slow_but_exact tie_encoder_decoder tie_last_hidden_states torchscript
    use_bfloat16 use_cache
    """
    # other tasks
    """
    _num_labels finetuning_task id2label label2id num_labels predict_special_tokens problem_type
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    task_specific_params
    """
    # other names of the longest sequence
    """
    max_sequence_length n_ctx
    """
    # generation of text
    """
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
    forced_eos_token_id length_penalty max_length max_new_tokens min_length no_repeat_ngram_size
    num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
    """.split()
)
"""Fields that no family reads, and that do not change what the model computes."""


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

    A field that is neither here nor in _WITHOUT_EFFECT is refused.
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
    def known(self) -> set[str]:
        """Return the fields that are read."""
        older = {*self.older, *self.older.values()}
        return {*self.fields.values(), *self.absent, *self.only, *_ONLY, *older}

    def may_be_null(self, name: str) -> bool:
        """Return whether null is a value of a field."""
        derived = {"num_key_value_heads", "n_inner"}
        caps = {"attn_logit_softcapping", "final_logit_softcapping"}
        return name in derived | caps or (name == "head_dim" and self.absent[name] is None)

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


def _number(fields: Fields, name: str, kind: type = float) -> Any:
    """Return a field that has to be a number; of kind int: of something."""
    value = fields[name]
    kinds = int if kind is int else (int, float)
    most = MOST_POSITIONS if kind is int else 1e30
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < most:
        raise ValueError(f"{name} is {value!r:.60}, expected a number from 0 to below {most}")
    return value


def _layers(fields: Fields, name: str = "num_hidden_layers") -> range:
    """Return the layers, before anything is done for each."""
    layers: int = _number(fields, name, int)
    if not 1 <= layers <= _MOST_LAYERS:
        raise ValueError(f"{name} is {layers}, expected a number from 1 to {_MOST_LAYERS}")
    return range(layers)


def _check_type(ours: str, theirs: str, fields: Fields) -> None:
    """Raise ValueError where a field cannot be the value of a setting."""
    kind = str(ModelConfig.__dataclass_fields__[ours].type)
    if ours == "num_layers":
        _layers(fields, theirs)
    elif "bool" in kind:
        _flag(fields, theirs)
    else:
        _number(fields, theirs, float if "float" in kind else int)


_TIED = Rule(
    lambda f: {"untie_embeddings_and_output_weights": not _flag(f, "tie_word_embeddings")},
    lambda m: {"tie_word_embeddings": not m.untie_embeddings_and_output_weights},
)


def _gelu(name: str) -> Rule:
    """Return the rule of a field that names a form of GELU."""
    forms = {"gelu": True, "gelu_new": False, "gelu_fast": False, "gelu_pytorch_tanh": False}

    def read(fields: Fields) -> dict[str, Any]:
        if not isinstance(fields[name], str) or fields[name] not in forms:
            raise _unsupported(name, fields[name])
        return {"exact_gelu": forms[fields[name]]}

    return Rule(read, lambda m: {name: "gelu" if m.exact_gelu else "gelu_new"})


def _biases(fields: Fields) -> dict[str, Any]:
    attention, mlp = _flag(fields, "attention_bias"), _flag(fields, "mlp_bias")
    if attention != mlp:
        raise ValueError(f"attention_bias {attention} with mlp_bias {mlp} is not supported")
    return {"add_bias_linear": attention}


_BIASES = Rule(_biases, lambda m: dict.fromkeys(("attention_bias", "mlp_bias"), m.add_bias_linear))

# Fields of a kind of RoPE scaling, and the settings.
_ROPE_SCALING: Mapping[str, Mapping[str, str]] = {
    "default": {},
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


def _rope(base: str = "rope_theta", share: str = "") -> Rule:
    """Return the rule of the rotary embedding.

    base, share   fields of the base and of the rotated part of a head; no share: heads are rotated
                  as a whole

    transformers 5 writes rope_parameters, which has all of it; older versions, which 5 reads too,
    write single fields and rope_scaling. Of several places for a value, the one that counts is that
    of transformers 5.23.
    """

    def read(fields: Fields) -> dict[str, Any]:
        rope = fields["rope_scaling"] or fields["rope_parameters"] or {}
        if not isinstance(rope, dict):
            raise ValueError(f"rope_parameters is {rope!r:.60}, expected an object")
        rope = dict(rope)
        kind = rope.pop("rope_type", rope.get("type", "default"))
        rope.pop("type", None)
        rope = {base: fields[base], "partial_rotary_factor": fields.get(share, 1.0)} | {
            base if name == "rope_theta" else name: value
            for name, value in rope.items()
            if value is not None
        }
        found: dict[str, Any] = {
            "rotary_base": _number(rope, base),
            "rotary_percent": _number(rope, "partial_rotary_factor"),
        }
        del rope[base], rope["partial_rotary_factor"]
        if found["rotary_percent"] != 1.0 and not share:
            raise _unsupported("partial_rotary_factor", found["rotary_percent"])
        if kind not in _ROPE_SCALING:
            raise _unsupported("rope_type", kind)
        if kind in ("llama3", "yarn"):
            positions = "original_max_position_embeddings"
            rope.setdefault(positions, fields["max_position_embeddings"])
            if fields[positions] is not None:
                rope[positions] = fields[positions]
        if kind == "yarn" and rope.pop("truncate", True) is not True:
            raise _unsupported("truncate", False)
        if unknown := sorted(rope.keys() - _ROPE_SCALING[kind].keys()):
            raise _unsupported(f"{unknown[0]} of rope_type {kind}", rope[unknown[0]])
        needed = ["factor"] if kind == "yarn" else _ROPE_SCALING[kind]
        if missing := sorted(set(needed) - rope.keys()):
            raise ValueError(f"{missing[0]} of rope_type {kind} is missing")
        for name in rope:
            _number(rope, name)
        if kind == "default":
            return found
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
    layers, types = _layers(fields), fields["layer_types"]
    if types is None:
        return [usual(layer) for layer in layers]
    kinds = {"sliding_attention": True, "full_attention": False}
    names = isinstance(types, list) and all(isinstance(t, str) and t in kinds for t in types)
    if not names or len(types) != len(layers):
        raise ValueError(
            f"layer_types does not have one of {', '.join(kinds)} for each of num_hidden_layers "
            f"{len(layers)}"
        )
    if "sliding_attention" in types and not fields["sliding_window"]:
        raise ValueError(
            "layer_types has windows, but sliding_window is null or use_sliding_window false"
        )
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


def _window_by_layer(windowed: Callable[[int, int], bool]) -> Rule:
    """Return the rule of a window; `windowed`: (layer, max_window_layers) -> without layer_types."""

    def read(fields: Fields) -> dict[str, Any]:
        used = _flag(fields, "use_sliding_window")
        fields = fields if used else {**fields, "sliding_window": None}
        most = _number(fields, "max_window_layers", int)
        types = _layer_types(fields, lambda layer: used and windowed(layer, most))
        return _window(fields["sliding_window"], types)

    return Rule(read, _write_window_of_last)


def _write_window_of_last(model: ModelConfig) -> dict[str, Any]:
    without = [size is None for size in windows_of(model)]
    return {
        "use_sliding_window": not all(without),
        "max_window_layers": [*without, False].index(False),
        **_windows_by_layer(model),
    }


_WINDOW_OF_LAST = _window_by_layer(lambda layer, most: layer >= most)
_WINDOW_OF_FIRST = _window_by_layer(lambda layer, most: layer % 2 == 0 and layer < most)
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
        experts = _number(fields, count, int)
        most = _MOST_EXPERTS // max(len(_layers(fields)), 1)
        if not 2 <= experts <= most:
            raise ValueError(f"{count} is {experts}, expected a number from 2 to {most}")
        over_all = normalised is not None and not _flag(fields, normalised)
        return {
            "num_experts": experts,
            "moe_router_topk": _number(fields, "num_experts_per_tok", int),
            "moe_router_pre_softmax": over_all,
        }

    def write(model: ModelConfig) -> dict[str, Any]:
        found = {count: model.num_experts, "num_experts_per_tok": model.moe_router_topk}
        return (
            found if normalised is None else found | {normalised: not model.moe_router_pre_softmax}
        )

    return Rule(read, write)


def _layers_with_experts(fields: Fields) -> dict[str, Any]:
    dense = fields["mlp_only_layers"] or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise ValueError(f"mlp_only_layers is {dense!r:.60}, expected a list of layers")
    step = _number(fields, "decoder_sparse_step", int)
    if not step:
        raise _unsupported("decoder_sparse_step", step)
    without = set(dense)
    which = [int(layer not in without and (layer + 1) % step == 0) for layer in _layers(fields)]
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


def _scales(fields: Fields) -> dict[str, Any]:
    scalar, width = _number(fields, "query_pre_attn_scalar"), _number(fields, "hidden_size", int)
    if not scalar:
        raise _unsupported("query_pre_attn_scalar", scalar)
    return {"softmax_scale": 1.0 / math.sqrt(scalar), "embedding_scale": math.sqrt(width)}


_SCALES = Rule(  # Gemma's: of the scores by a number of its own, of the embeddings by the width
    _scales,
    lambda m: {
        "query_pre_attn_scalar": m.kv_channels
        if m.softmax_scale is None
        else round(m.softmax_scale**-2)
    },
)
_LENGTH = Rule(  # without positions to learn or to scale; old files have it for information
    lambda f: {"seq_length": _number(f, "seq_length", int)},
    lambda m: {"seq_length": m.seq_length},
)


def _dropout_of_embedding(fields: Fields) -> dict[str, Any]:
    if fields["embd_pdrop"] != fields["resid_pdrop"]:
        raise ValueError(
            f"embd_pdrop {fields['embd_pdrop']!r:.60} other than resid_pdrop is not supported"
        )
    return {}


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
_ROPE = {
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rope_parameters": None,
    "original_max_position_embeddings": None,
}
_USUAL = {"num_key_value_heads": None, "head_dim": None, "attention_dropout": 0.0, **_ROPE}
_WINDOWS = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
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
            Rule(_dropout_of_embedding, lambda m: {"embd_pdrop": m.hidden_dropout}),
        ),
        {
            "n_inner": None,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "attn_pdrop": 0.1,
            "resid_pdrop": 0.1,
            "embd_pdrop": 0.1,
            "tie_word_embeddings": True,
        },
        {
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        },
        {
            "n_layer": "num_hidden_layers",
            "n_embd": "hidden_size",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
        },
        "transformer.",
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
        {
            **_USUAL,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
            "sliding_window": 4096,
        },
        {"hidden_act": "silu"},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        {**_GATED, "add_qkv_bias": True},
        _GROUPED | _HEAD_DIM,
        _LLAMA_MODULES,
        (_TIED, _rope(), _WINDOW_OF_LAST),
        {**_USUAL, **_WINDOWS, "num_key_value_heads": 32, "tie_word_embeddings": False},
        {"hidden_act": "silu"},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        {**_GATED, "qk_layernorm": True},
        _GROUPED | _HEAD_DIM,
        _LLAMA_MODULES | _QK_NORMS,
        (_TIED, _rope(), _WINDOW_OF_LAST),
        {
            **_USUAL,
            **_WINDOWS,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "tie_word_embeddings": False,
        },
        {"hidden_act": "silu", **_NO_BIAS},
    ),
    "olmo2": Family(
        "Olmo2ForCausalLM",
        {**_GATED, "qk_layernorm": True, "qk_layernorm_over": "all", "norm_position": "post"},
        _GROUPED | _HEAD_DIM,
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
        {
            **_USUAL,
            "num_key_value_heads": 8,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
            "sliding_window": None,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
        },
        # it also scales what the experts get, which no setting here does
        {"hidden_act": "silu", "router_jitter_noise": 0.0},
        {"num_local_experts": "num_experts"},
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        {**_GATED, "qk_layernorm": True, "qk_layernorm_over": "all"},
        _EXPERTS_ALONE | _HEAD_DIM,
        _LLAMA_MODULES | _QK_NORMS | _expert_modules(),
        (_TIED, _rope(), _experts("num_experts")),
        {
            **_USUAL,
            "tie_word_embeddings": False,
            "norm_topk_prob": False,
            "num_experts_per_tok": 8,
            "num_experts": 64,
        },
        {"hidden_act": "silu", "clip_qkv": None, **_NO_BIAS},
        {"num_experts": "num_local_experts"},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        {**_GATED, "qk_layernorm": True},
        _EXPERTS_TOO | _HEAD_DIM,
        _LLAMA_MODULES | _QK_NORMS | _expert_modules(),
        (_TIED, _rope(), _WINDOW_IF_USED, _experts("num_experts"), _LAYERS_WITH_EXPERTS),
        {
            **_USUAL,
            **_SPARSE,
            **{name: value for name, value in _WINDOWS.items() if name != "layer_types"},
            "num_key_value_heads": 4,
            "tie_word_embeddings": False,
            "num_experts_per_tok": 8,
            "num_experts": 128,
        },
        {"hidden_act": "silu", **_NO_BIAS},
        {"num_experts": "num_local_experts"},
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        {**_GATED, "add_qkv_bias": True, "moe_shared_expert_gate": True},
        {
            **_EXPERTS_TOO,
            **_HEAD_DIM,
            "moe_shared_expert_intermediate_size": "shared_expert_intermediate_size",
        },
        _LLAMA_MODULES | _expert_modules() | _SHARED_EXPERTS,
        (_TIED, _rope(), _WINDOW_OF_FIRST, _experts("num_experts"), _LAYERS_WITH_EXPERTS),
        {
            **_USUAL,
            **_SPARSE,
            **_WINDOWS,
            "num_key_value_heads": 16,
            "tie_word_embeddings": False,
            "num_experts_per_tok": 4,
            "num_experts": 60,
        },
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
        {
            **_USUAL,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "layer_types": None,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
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
            _rope("rotary_emb_base", "rotary_pct"),
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
            **_ROPE,
            "rotary_emb_base": 10000.0,
            "rotary_pct": 0.25,
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
        older={
            "n_head": "num_attention_heads",
            "n_layer": "num_hidden_layers",
            "hidden_size": "n_embed",
        },
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
    names = {
        **FAMILIES[kind].fields,
        "window_size": "sliding_window",
        "moe_router_topk": "num_experts_per_tok",
    }
    try:
        return kind, Config.create(**{n: v for n, v in settings.items() if v is not None}).model
    except ConfigError as error:
        text = str(error)
        for ours in sorted(names, key=len, reverse=True):
            text = text.replace(f"--{ours.replace('_', '-')}", names[ours])
        raise CheckpointError(f"{where}: {text}") from error


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
    known = {**_ONLY, **family.only, **family.absent, **older, **fields}
    settings = dict(family.settings)
    try:
        for new, old in family.older.items():
            if old in fields and fields[old] is None and fields.get(new) is None:
                raise ValueError(f"{old} is null")
            if None not in (fields.get(new), fields.get(old)) and fields[new] != fields[old]:
                raise ValueError(
                    f"{old} {fields[old]!r:.60} and {new} {fields[new]!r:.60} are one field"
                )
        for name, value in {**_ONLY, **family.only}.items():
            if (known[name] or None) != (value or None):
                raise _unsupported(name, known[name])
        unknown = fields.keys() - family.known - _WITHOUT_EFFECT
        if unknown := {name for name in unknown if fields[name] is not None}:
            raise ValueError(
                f"{', '.join(sorted(unknown)[:8]):.200} of {kind} is not known here: if it does not "
                "change the model, remove it from the file"
            )
        for ours, theirs in family.fields.items():
            settings[ours] = known[theirs]
            if known[theirs] is not None or not family.may_be_null(theirs):
                _check_type(ours, theirs, known)
        for rule in family.rules:
            settings |= rule.read(known)
    except KeyError as error:
        raise CheckpointError(f"{where} has no {error.args[0]}") from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        text = str(error)
        for new, old in family.older.items():
            if new not in fields and old in fields:
                text = re.sub(rf"\b{new}\b", old, text)
        raise CheckpointError(f"{where}: {text}") from error
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


def end_tokens(folder: Path) -> tuple[int, ...]:
    """Return the tokens that end a text, as transformers reads them from a folder: none or several.

    Raises CheckpointError for files or fields that are wrong.
    """
    for name in (GENERATION, CONFIG):
        if not (folder / name).is_file():
            continue
        found = read_json(folder / name, _CONFIG_LIMIT_BYTES, error=CheckpointError)
        ids = found.get("eos_token_id")
        ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
        if any(type(i) is not int or i < 0 for i in ids):
            raise CheckpointError(f"{folder / name}: eos_token_id is {ids!r:.60}, expected ids")
        return tuple(ids)
    return ()


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
