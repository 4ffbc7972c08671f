"""Rules that convert between fields of a Hugging Face config.json and our settings.

They cover settings that do not correspond to a single field with the same value. The tables in
megatron.checkpoint.families refer to them. This module needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from megatron.config.model import ModelConfig
from megatron.config.option import MOST_POSITIONS, pairs

# Far beyond any model: a small file must not cause hours of work.
_MOST_LAYERS = 1 << 12
_MOST_EXPERTS = 1 << 18  # in all layers together

Fields = Mapping[str, Any]
"""Fields of a config.json."""
Values = dict[str, Any]
"""Settings or fields, by name."""


class Rule(NamedTuple):
    """Conversion of settings that do not correspond to single fields with the same value.

    `read` returns settings from fields, `write` the fields for a model, `names` has the fields of
    settings for messages. `read` raises LookupError, TypeError or ValueError for unsupported values.
    """

    read: Callable[[Fields], Values]
    write: Callable[[ModelConfig], Values]
    names: Mapping[str, str] = MappingProxyType({})


def flag(fields: Fields, name: str) -> bool:
    value = fields[name]
    if not isinstance(value, bool):
        raise ValueError(f"{name} is {value!r:.60}, expected true or false")
    return value


def unsupported(name: str, value: object) -> ValueError:
    return ValueError(f"{name} {value!r:.60} is not supported")


def _number(fields: Fields, name: str, kind: type = float) -> Any:
    """Return a field that must be a number; with `kind` int, a count."""
    value = fields[name]
    kinds = int if kind is int else (int, float)
    most = MOST_POSITIONS if kind is int else 1e30
    if isinstance(value, bool) or not isinstance(value, kinds) or not 0 <= value < most:
        what = "an integer" if kind is int else "a number"
        raise ValueError(f"{name} is {value!r:.60}, expected {what} of at least 0, below {most}")
    return value


def _object(fields: Fields, name: str) -> Values:
    """Return a copy of a field that is an object, or null or missing: {}."""
    value = fields.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {value!r:.60}, expected an object")
    return dict(value)


def _scaling(fields: Fields) -> Values:
    """Return a copy of the scaling of RoPE; if both fields are there, rope_scaling counts."""
    return _object(fields, "rope_scaling") or _object(fields, "rope_parameters")


def _positive(fields: Fields, name: str, kind: type = float) -> Any:
    """Return a field that must be a positive number."""
    if not (value := _number(fields, name, kind)):
        raise unsupported(name, value)
    return value


def _layers(fields: Fields, name: str = "num_hidden_layers") -> range:
    """Return the range of layers; their number is checked before any work is done per layer."""
    layers: int = _number(fields, name, int)
    if not 1 <= layers <= _MOST_LAYERS:
        raise ValueError(f"{name} is {layers}, expected a number from 1 to {_MOST_LAYERS}")
    return range(layers)


def check_type(name: str, hf_name: str, fields: Fields) -> None:
    """Raise ValueError if a field cannot be the value of a setting."""
    kind = str(ModelConfig.__dataclass_fields__[name].type)
    if name == "num_layers":
        _layers(fields, hf_name)
    elif "bool" in kind:
        flag(fields, hf_name)
    else:
        number = _number(fields, hf_name, float if "float" in kind else int)
        if name == "num_experts":
            most = _MOST_EXPERTS // len(_layers(fields))
            if not 2 <= number <= most:
                raise ValueError(f"{hf_name} is {number}, expected a number from 2 to {most}")


def switch(name: str, setting: str, on: object, off: object) -> Rule:
    """Return the rule for a field that is true if a setting is `on`, and false if it is `off`."""
    return Rule(
        lambda f: {setting: on if flag(f, name) else off},
        lambda m: {name: getattr(m, setting) == on},
    )


TIED = switch("tie_word_embeddings", "untie_embeddings_and_output_weights", False, True)
# Whether the weights of the chosen experts add up to one. (A softmax over all experts, divided by
# its sum over the chosen ones, is a softmax over the chosen ones.)
NORMALISED = switch("norm_topk_prob", "moe_router_pre_softmax", False, True)


def gelu(name: str) -> Rule:
    """Return the rule for a field that names a form of GELU."""

    def read(fields: Fields) -> Values:
        if fields[name] not in ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"):
            raise unsupported(name, fields[name])
        return {"exact_gelu": fields[name] == "gelu"}

    return Rule(read, lambda m: {name: "gelu" if m.exact_gelu else "gelu_new"})


def biases(
    of_mlp: str | bool = False, of_attention: str = "attention_bias", kind: str = "all"
) -> Rule:
    """Return the rule for biases of attention and MLP.

    of_mlp         name of the field for the MLP's, or its value if there is none
    of_attention   name of the field for attention's
    kind           our attention_bias if this field is true
    """

    def read(fields: Fields) -> Values:
        mlp = of_mlp if isinstance(of_mlp, bool) else flag(fields, of_mlp)
        attention = kind if flag(fields, of_attention) else "off"
        if attention == "qkv" and not mlp:
            return {"add_bias_linear": False, "add_qkv_bias": True}
        usual = attention == ("all" if mlp else "off")
        return {"add_bias_linear": mlp, "attention_bias": None if usual else attention}

    def write(model: ModelConfig) -> Values:
        fields = {} if isinstance(of_mlp, bool) else {of_mlp: model.add_bias_linear}
        return fields | {of_attention: model.qkv_bias}

    return Rule(read, write)


# For each kind of RoPE scaling, its fields and our settings.
_ROPE_SCALING: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "linear": pairs("factor=rope_scaling_factor"),
    "dynamic": pairs(
        "factor=rope_scaling_factor original_max_position_embeddings=rope_original_positions"
    ),
    "llama3": pairs(
        "factor=rope_scaling_factor original_max_position_embeddings=rope_original_positions "
        "low_freq_factor=rope_low_freq_factor high_freq_factor=rope_high_freq_factor"
    ),
    "yarn": pairs(
        "factor=rope_scaling_factor original_max_position_embeddings=rope_original_positions "
        "beta_fast=yarn_beta_fast beta_slow=yarn_beta_slow attention_factor=yarn_attention_factor "
        "mscale=yarn_mscale mscale_all_dim=yarn_mscale_all_dim truncate=yarn_truncate"
    ),
}


def rope(
    base: str = "rope_theta",
    share: str = "",
    kinds: Container[str] = _ROPE_SCALING,
    usual: Fields = MappingProxyType({}),
) -> Rule:
    """Return the rule for the rotary embedding.

    base, share   names of the fields for the base and for the rotated fraction of a head; without
                  `share`, whole heads are rotated
    kinds         the kinds of scaling that the family has
    usual         scaling of files that describe none

    transformers 5 writes rope_parameters, which holds all values; older versions, whose files
    transformers 5 still reads, write separate fields and rope_scaling. If a value is in several
    fields, the precedence is the same as in transformers 5.23.
    """

    def read(fields: Fields) -> Values:
        rope = _scaling(fields) or dict(usual)
        kind = rope.pop("rope_type", rope.get("type", "default"))
        rope.pop("type", None)
        rope = {name: value for name, value in rope.items() if value is not None}
        partial = "partial_rotary_factor"
        values: Values = {
            "rotary_base": _number({base: rope.pop("rope_theta", fields[base])}, base),
            "rotary_percent": _number(
                {partial: rope.pop(partial, fields.get(share, 1.0))}, partial
            ),
        }
        if values["rotary_percent"] != 1.0 and not share:
            raise unsupported(partial, values["rotary_percent"])
        if kind not in _ROPE_SCALING or kind not in kinds:
            raise unsupported("rope_type", kind)
        positions = "original_max_position_embeddings"
        if kind == "dynamic":  # transformers does not read the other field
            rope[positions] = fields["max_position_embeddings"]
        if kind in ("llama3", "yarn"):
            rope.setdefault(positions, fields["max_position_embeddings"])
            if fields[positions] is not None:
                rope[positions] = fields[positions]
        if bool(rope.get("mscale")) != bool(rope.get("mscale_all_dim")):
            raise ValueError("one of mscale and mscale_all_dim without the other is not supported")
        if unknown := sorted(rope.keys() - _ROPE_SCALING[kind].keys()):
            raise unsupported(f"{unknown[0]} of rope_type {kind}", rope[unknown[0]])
        needed = ["factor"] if kind == "yarn" else _ROPE_SCALING[kind]
        if missing := sorted(set(needed) - rope.keys()):
            raise ValueError(f"{missing[0]} of rope_type {kind} is missing")
        for name in rope:
            check_type(_ROPE_SCALING[kind][name], name, rope)
        if kind == "default":
            return values
        settings = {_ROPE_SCALING[kind][name]: value for name, value in rope.items()}
        return values | {"rope_scaling": kind} | settings

    def write(model: ModelConfig) -> Values:
        fields: Values = {base: model.rotary_base}
        if share:
            fields[share] = model.rotary_percent
        if model.rope_scaling is not None or usual:
            kind = model.rope_scaling or "default"
            named = {name: getattr(model, setting) for name, setting in _ROPE_SCALING[kind].items()}
            if model.rope_scaling == "dynamic":
                fields["max_position_embeddings"] = named.pop("original_max_position_embeddings")
            if not model.yarn_mscale_all_dim:
                named |= {"mscale": None, "mscale_all_dim": None}
            if model.yarn_truncate:
                named["truncate"] = None
            fields["rope_scaling"] = {"rope_type": kind} | {
                name: value for name, value in named.items() if value is not None
            }
        return fields

    return Rule(read, write, {"rotary_base": base, "rotary_percent": "partial_rotary_factor"})


def rope_by_window(windows: Rule, local: str | float) -> Rule:
    """Return the rule for windows, and for a rotary embedding that is not scaled under a window.

    windows   rule for the windows
    local     name of the field for the base in layers with a window, in files that have no
              rope_parameters, or that base if they have no field for it either

    transformers 5 writes rope_parameters with one object for each type of layer.
    """
    full = rope()

    def read(fields: Fields) -> Values:
        objects = _object(fields, "rope_parameters")
        by_type = [_object(objects, kind) for kind in _LAYER_TYPES]
        if unknown := sorted(objects.keys() - set(_LAYER_TYPES)):
            raise unsupported(f"{unknown[0]} of rope_parameters", objects[unknown[0]])
        # transformers does not read the last of these fields for such models
        unset = ("rope_parameters", "rope_scaling", "original_max_position_embeddings")
        plain = {**fields, **dict.fromkeys(unset)}
        base = local if isinstance(local, float) else fields[local]
        near = full.read({**plain, "rope_parameters": by_type[0], "rope_theta": base})
        if "rope_scaling" in near:
            raise unsupported(f"rope_type of {_LAYER_TYPES[0]}", near["rope_scaling"])
        scaled = {"rope_type": "default"} | by_type[1] | _object(fields, "rope_scaling")
        values = full.read({**plain, "rope_parameters": scaled}) | windows.read(fields)
        if "window_size" in values:
            values["rotary_local_base"] = near["rotary_base"]
        return values

    def write(model: ModelConfig) -> Values:
        fields = full.write(model)
        types = {"rope_type": "default", "rope_theta": model.rotary_base}
        base = model.rotary_local_base or model.rotary_base
        near = {"rope_type": "default", "rope_theta": base}
        objects = dict(
            zip(_LAYER_TYPES, (near, types | fields.get("rope_scaling", {})), strict=True)
        )
        older = {} if isinstance(local, float) else {local: base}
        return {**fields, **older, "rope_parameters": objects, **windows.write(model)}

    return Rule(read, write, {**full.names, **windows.names})


def windows_of(model: ModelConfig) -> list[int | None]:
    """Return the attention window of each layer, from ModelConfig.window."""
    return [model.window(layer) for layer in range(model.num_layers)]


def _window(size: object, windowed: list[bool]) -> Values:
    """Return the settings of a window in the layers for which `windowed` is true.

    size   tokens that a token attends to, itself included; None: no window
    """
    if size is None or not any(windowed):
        return {}
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"sliding_window is {size!r:.60}, expected a number of tokens")
    if all(windowed):
        return {"window_size": (size - 1, 0)}
    first = windowed.index(False) + 1  # number, from 1, of the first layer without a window
    every = [number % first != 0 for number in range(1, len(windowed) + 1)]
    skip = (first,) if windowed == every else tuple(int(one) for one in windowed)
    return {"window_size": (size - 1, 0), "window_attn_skip_freq": skip}


_LAYER_TYPES = ("sliding_attention", "full_attention")


def _layer_types(
    fields: Fields, usual: list[bool], kinds: tuple[str, str] = _LAYER_TYPES
) -> list[bool]:
    """Return which layers are of the first kind, by default those that have a window.

    According to layer_types or, if it is null, to `usual`.
    """
    types = fields["layer_types"]
    if types is None:
        return usual
    if (
        not isinstance(types, list)
        or len(types) != len(usual)
        or any(t not in kinds for t in types)
    ):
        raise ValueError(
            f"layer_types does not have one of {', '.join(kinds)} for each layer: "
            f"num_hidden_layers is {len(usual)}"
        )
    if _LAYER_TYPES[0] in types and not fields["sliding_window"]:
        raise ValueError(
            "layer_types has windows, but sliding_window is null or use_sliding_window is false"
        )
    return [kind == kinds[0] for kind in types]


def _all_but(fields: Fields, every: int | str) -> list[bool]:
    """Return false for every N-th layer and true for others; `every` is N, or its field's name."""
    n = every if isinstance(every, int) else _positive(fields, every, int)
    return [(layer + 1) % n != 0 for layer in _layers(fields)]


def windows(usual: Callable[[Fields], list[bool]] | None = None, switched: bool = False) -> Rule:
    """Return the rule for attention windows.

    usual      returns which layers have the window if layer_types is null; None: all layers have
               it, and there is no such field
    switched   whether use_sliding_window must be true for windows
    """

    def read(fields: Fields) -> Values:
        size = fields["sliding_window"]
        if switched and not flag(fields, "use_sliding_window"):
            size = None
        if usual is None:
            return _window(size, [True])
        return _window(size, _layer_types({**fields, "sliding_window": size}, usual(fields)))

    def write(model: ModelConfig) -> Values:
        sizes = windows_of(model)
        fields: Values = {"sliding_window": next((n + 1 for n in sizes if n is not None), None)}
        if usual is not None:
            fields["layer_types"] = [_LAYER_TYPES[size is None] for size in sizes]
        if switched:
            fields["use_sliding_window"] = fields["sliding_window"] is not None
        return fields

    return Rule(read, write, {"window_size": "sliding_window"})


def window_except(every: int | str) -> Rule:
    """Return the rule for a window in all layers but every N-th one: N, or the field with N."""
    return windows(lambda fields: _all_but(fields, every))


def _window_by_number(windowed: Callable[[int, int], bool]) -> Rule:
    """Return the rule for a window where `windowed(layer, max_window_layers)` is true."""

    def usual(fields: Fields) -> list[bool]:
        most = _number(fields, "max_window_layers", int)
        return [windowed(layer, most) for layer in _layers(fields)]

    def write(model: ModelConfig) -> Values:
        without = [size is None for size in windows_of(model)]
        return {**rule.write(model), "max_window_layers": [*without, False].index(False)}

    rule = windows(usual, switched=True)
    return rule._replace(write=write)


WINDOW_OF_LAST = _window_by_number(lambda layer, most: layer >= most)
WINDOW_OF_FIRST = _window_by_number(lambda layer, most: layer % 2 == 0 and layer < most)


_LINEAR_TYPES = ("linear_attention", "full_attention")


def _linear_attention(fields: Fields) -> Values:
    linear = _layer_types(fields, _all_but(fields, "full_attention_interval"), _LINEAR_TYPES)
    if any(linear) == all(linear):
        raise ValueError(
            f"layer_types has no {_LINEAR_TYPES[any(linear)]}: models of this family have both"
        )
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": tuple(map(int, linear)),
    }


def _linear_layers(model: ModelConfig) -> Values:
    kinds = map(model.layer_kind, range(model.num_layers))
    types = [_LINEAR_TYPES[kind.experimental_attention_variant is None] for kind in kinds]
    return {"layer_types": types}


LINEAR_ATTENTION = Rule(_linear_attention, _linear_layers)


def repeated(sources: str, values: Callable[[Fields], Values]) -> Rule:
    """Return the rule for fields that must be null or have values that `sources` determine."""

    def read(fields: Fields) -> Values:
        for name, value in values(fields).items():
            if fields[name] not in (None, value):
                raise ValueError(f"{name} is {fields[name]!r:.60}, but {sources} give {value}")
        return {}

    return Rule(read, lambda m: {})


NAMES_OF_GPT_OSS = repeated(
    "num_experts_per_tok and rope_scaling",
    lambda f: {
        "experts_per_token": f["num_experts_per_tok"],
        "initial_context_length": _scaling(f).get("original_max_position_embeddings", 4096),
    },
)
LATENT = repeated(
    "qk_rope_head_dim and qk_nope_head_dim",
    lambda f: {
        "head_dim": f["qk_rope_head_dim"],
        "qk_head_dim": f["qk_rope_head_dim"] + f["qk_nope_head_dim"],
    },
)


def _rotated(fields: Fields) -> list[bool]:
    """Return which layers have RoPE."""
    rotated = fields["no_rope_layers"]  # 1 for layers with RoPE
    if rotated is None:
        return _all_but(fields, "no_rope_layer_interval")
    layers = len(_layers(fields))
    if not isinstance(rotated, list) or len(rotated) != layers or not set(rotated) <= {0, 1}:
        raise ValueError(
            f"no_rope_layers is {rotated!r:.60}, expected 0 or 1 for each of num_hidden_layers "
            f"{layers}"
        )
    return list(map(bool, rotated))


LAYERS_WITHOUT_ROPE = Rule(
    lambda f: {} if all(_rotated(f)) else {"no_rope_freq": tuple(int(not r) for r in _rotated(f))},
    lambda m: {
        "no_rope_layers": [
            int(m.layer_kind(layer).position_embedding_type == "rope")
            for layer in range(m.num_layers)
        ]
    },
)
WINDOW_WITHOUT_ROPE = windows(lambda f: [not r for r in _rotated(f)], switched=True)  # SmolLM3


def _layers_with_experts(fields: Fields) -> Values:
    dense = fields["mlp_only_layers"] or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        raise ValueError(f"mlp_only_layers is {dense!r:.60}, expected a list of layer numbers")
    skipped = _all_but(fields, "decoder_sparse_step")
    which = [int(layer not in dense and not skip) for layer, skip in enumerate(skipped)]
    if not any(which):
        raise ValueError(
            f"mlp_only_layers and decoder_sparse_step {fields['decoder_sparse_step']} leave no layer "
            f"of num_hidden_layers {len(which)} for experts"
        )
    return {"moe_layer_freq": (1,) if all(which) else tuple(which)}


LAYERS_WITH_EXPERTS = Rule(
    _layers_with_experts,
    lambda m: {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in range(m.num_layers) if not m.has_experts(i)],
    },
)


_GROUPS = pairs("moe_router_num_groups=n_group moe_router_group_topk=topk_group")


def routed_experts(score: str) -> Rule:
    """Return the rule for experts as in DeepSeek-V2 ("softmax"), and V3 and GLM-4.5 ("sigmoid").

    With "sigmoid", the weights of several chosen experts add up to the scaling factor, and a group
    is ranked by its best two scores, otherwise by its best score.
    """
    sigmoid = score == "sigmoid"

    def read(fields: Fields) -> Values:
        layers = len(_layers(fields))
        topk = fields["num_experts_per_tok"]
        dense = min(_number(fields, "first_k_dense_replace", int), layers)
        if dense == layers:
            raise ValueError(
                f"first_k_dense_replace leaves no layer of num_hidden_layers {layers} for experts"
            )
        shared = _positive(fields, "n_shared_experts", int)
        method = "noaux_tc" if sigmoid else fields["topk_method"]
        if sigmoid and flag(fields, "norm_topk_prob") != (topk > 1):
            raise ValueError(
                f"norm_topk_prob {fields['norm_topk_prob']} with num_experts_per_tok {topk} is not "
                "supported"
            )
        if method not in ("noaux_tc", "greedy", "group_limited_greedy"):
            raise unsupported("topk_method", method)
        values = {
            "moe_router_topk_scaling_factor": _positive(fields, "routed_scaling_factor"),
            "moe_shared_expert_intermediate_size": shared
            * _positive(fields, "moe_intermediate_size", int),
            "moe_layer_freq": (0,) * dense + (1,) * (layers - dense) if dense else (1,),
        }
        if method == "greedy" or fields["n_group"] == fields["topk_group"]:
            return values
        values |= {ours: _positive(fields, theirs, int) for ours, theirs in _GROUPS.items()}
        return values | {"moe_router_group_top_scores": 2 if sigmoid else 1}

    def write(model: ModelConfig) -> Values:
        shared = model.moe_shared_expert_intermediate_size or 0
        sparse = list(map(model.has_experts, range(model.num_layers)))
        fields: Values = {
            "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
            "n_shared_experts": shared // (model.moe_ffn_hidden_size or 1),
            "first_k_dense_replace": sparse.index(True) if any(sparse) else model.num_layers,
            "norm_topk_prob": sigmoid and model.moe_router_topk > 1,
            **{theirs: getattr(model, ours) or 1 for ours, theirs in _GROUPS.items()},
        }
        if not sigmoid:
            limited = model.moe_router_num_groups
            fields["topk_method"] = "group_limited_greedy" if limited else "greedy"
        return fields

    return Rule(read, write, _GROUPS)


def _scales(fields: Fields) -> Values:
    scalar = _positive(fields, "query_pre_attn_scalar")
    width = _number(fields, "hidden_size", int)
    return {"softmax_scale": 1.0 / math.sqrt(scalar), "embedding_scale": math.sqrt(width)}


SCALES = Rule(  # Gemma: query_pre_attn_scalar for scores, root of the hidden size for embeddings
    _scales,
    lambda m: {
        "query_pre_attn_scalar": m.kv_channels
        if m.softmax_scale is None
        else round(m.softmax_scale**-2)
    },
)


def dropout(*names: str) -> Rule:
    """Return the rule for fields that must be equal, since we have one dropout for all of them."""

    def read(fields: Fields) -> Values:
        rates = [_number(fields, name) for name in names]
        if len(set(rates)) > 1:
            raise ValueError(f"{' and '.join(names)} are {rates}: only equal ones are supported")
        return {"hidden_dropout": rates[0]}

    return Rule(read, lambda m: dict.fromkeys(names, m.hidden_dropout))


_MULTIPLIERS = pairs(
    "embedding_scale=embedding_multiplier softmax_scale=attention_multiplier "
    "residual_multiplier=residual_multiplier logits_scaling=logits_scaling"
)
MULTIPLIERS = Rule(  # Granite
    lambda f: {ours: _positive(f, theirs) for ours, theirs in _MULTIPLIERS.items()},
    lambda m: {
        theirs: getattr(m, ours) or (m.kv_channels**-0.5 if ours == "softmax_scale" else 1.0)
        for ours, theirs in _MULTIPLIERS.items()
    },
)


def groups_of(model: ModelConfig, name: str) -> tuple[int, tuple[int, ...]]:
    """Return the number of groups of a parameter of attention, and the rows of each part of them.

    Gates count as heads of queries.
    """
    keys = model.linear_key_head_dim
    groups = model.linear_num_key_heads
    each = model.linear_num_value_heads // groups
    values = each * model.linear_value_head_dim
    if "in_proj" in name:
        return groups, (2 * keys + 2 * values, 2 * each)
    if "conv1d" in name:
        return groups, (keys, keys, values)
    d = model.kv_channels
    groups = model.num_key_value_heads
    return groups, (model.query_heads // groups * d, d, d)
