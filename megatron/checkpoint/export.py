"""Selection of the Hugging Face family that describes a model. Needs no torch."""

from __future__ import annotations

import dataclasses
import math

from megatron.checkpoint.families import FAMILIES
from megatron.checkpoint.family_rules import Values, windows_of
from megatron.checkpoint.huggingface_config import model_of, write_fields
from megatron.checkpoint.settings import ARCHITECTURE
from megatron.config.model import ModelConfig
from megatron.config.pieces import Pieces
from megatron.errors import CheckpointError, ConfigError


def export_problem(model: ModelConfig, pieces: Pieces) -> str:
    """Return why --save-hf could not write a model; "" if it could."""
    for name in ("layer", "model"):
        if getattr(pieces, name) is not None:
            return f"it cannot write your own {name}: Hugging Face has no names for its parts"
    try:
        # Every family has a vocabulary size; a tokenizer may supply it later.
        family_of(dataclasses.replace(model, vocab_size=model.vocab_size or 1))
    except ConfigError as error:
        return str(error)
    return ""


def family_of(model: ModelConfig, preferred: str | None = None) -> str:
    """Return the model_type that describes a model: the preferred one, or the first suitable one.

    A family describes a model if its config.json, read back, gives the same model, apart from
    layers of multi-token prediction, which transformers does not read. Raises ConfigError naming
    the settings in which the nearest family differs.
    """
    model = dataclasses.replace(without_mup(model), mtp_num_layers=0)
    sparse = model.num_experts is not None
    order = [kind for kind, family in FAMILIES.items() if family.experts == sparse]
    if preferred in order:
        order.insert(0, preferred)
    differences: dict[str, list[str]] = {}
    for kind in order:
        differences[kind] = _differences(kind, model)
        if not differences[kind]:
            return kind
    nearest = min(order, key=lambda kind: len(differences[kind]))
    raise ConfigError(
        f"none of the Hugging Face families {', '.join(FAMILIES)} has this model; {nearest} is the "
        "nearest, but differs: "
        f"{'; '.join(differences[nearest])}"
    )


def _differences(kind: str, model: ModelConfig) -> list[str]:
    """Return the settings that differ after `model` is written as family `kind` and read back."""
    try:
        back = _effective(model_of(write_fields(kind, model), kind)[1])
    except CheckpointError as error:
        return [str(error)]
    return [
        f"{name} {back.get(name)!r} instead of {value!r}"
        for name, value in _effective(model).items()
        if not _same(back.get(name), value)
    ]


def _same(one: object, other: object) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-12)
    return bool(one == other)


def _effective(model: ModelConfig) -> Values:
    """Return the architecture of a model, without the settings that have no effect on it."""
    settings = {name: getattr(model, name) for name in ARCHITECTURE if name != "openai_gelu"}
    settings["add_qkv_bias"] = model.qkv_bias
    settings["attention_bias"] = model.attention_output_bias
    settings["window_size"] = windows_of(model)
    settings["moe_router_topk_scaling_factor"] = model.moe_router_topk_scaling_factor or 1.0
    settings["moe_router_group_top_scores"] = model.router_group_scores
    kinds = list(map(model.layer_kind, range(model.num_layers)))
    sparse = [kind.num_experts is not None for kind in kinds]
    settings["moe_layer_freq"] = sparse
    settings["no_rope_freq"] = [
        (kind.rotary_base, kind.rope_scaling) if kind.position_embedding_type == "rope" else None
        for kind in kinds
    ]
    settings["linear_attention_freq"] = [kind.experimental_attention_variant for kind in kinds]
    settings["softmax_scale"] = model.softmax_scale or 1.0 / math.sqrt(model.kv_channels)
    for name in ("embedding_scale", "residual_multiplier", "logits_scaling"):
        settings[name] = settings[name] or 1.0
    if model.position_embedding_type == "learned_absolute":
        settings["max_position_embeddings"] = model.max_position_embeddings
    # Settings of features that a model lacks have their defaults (NEEDED in megatron/config),
    # except these.
    names = [
        "window_attn_skip_freq",
        "rotary_local_base",
        *(["ffn_hidden_size"] if all(sparse) else []),
    ]
    if model.position_embedding_type != "rope":
        names += ["rotary_base", "rotary_percent"]
    for name in names:
        del settings[name]
    return settings


def without_mup(model: ModelConfig) -> ModelConfig:
    """Return settings without muP that, with parameters from `take_up`, give the same outputs.

    `take_up` (huggingface_save.py) multiplies the parameters by the factors of muP.
    """
    if not model.use_mup:
        return model
    unset: Values = dict.fromkeys(n for n in ARCHITECTURE if n.startswith("mup_"))
    unset |= {"use_mup": False, "mup_embedding_mult": 1.0, "softmax_scale": None}
    return dataclasses.replace(model, **unset)
