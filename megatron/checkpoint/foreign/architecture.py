"""The arguments that Megatron keeps in a checkpoint, as our settings."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config import Config
from megatron.errors import CheckpointError, ConfigError

_MODEL = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "seq_length",
    "max_position_embeddings", "make_vocab_size_divisible_by", "apply_layernorm_1p", "swiglu", "squared_relu",
    "openai_gelu", "add_bias_linear", "untie_embeddings_and_output_weights", "rotary_percent",
    "apply_residual_connection_post_layernorm", "fp32_residual_connection", "attention_dropout", "hidden_dropout",
    "init_method_std",
)  # fmt: skip
_RUN = (
    "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_warmup_fraction", "lr_warmup_iters",
    "lr_warmup_samples", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style", "weight_decay",
    "adam_beta1", "adam_beta2", "adam_eps", "clip_grad", "train_iters", "train_samples", "seed", "fp16", "bf16",
    "global_batch_size", "micro_batch_size",
)  # fmt: skip
# What has another meaning here, or none: (name, values that mean it is off).
_UNKNOWN = (
    ("num_experts", (None, 0, 1, [1], (1,))), ("multi_latent_attention", (None, False)),
    ("qk_layernorm", (None, False)), ("embed_layernorm", (None, False)),
    ("rotary_interleaved", (None, False)), ("use_rope_scaling", (None, False)),
    ("rotary_scaling_factor", (None, 1, 1.0)), ("rotary_seq_len_interpolation_factor", (None, 1, 1.0)),
    ("num_residual_layers_per_attention", (None, 1)), ("use_mup", (None, False)), ("mtp_num_layers", (None, 0)),
)  # fmt: skip


def settings_of(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """(our settings, by their flat names; notes) from Megatron's arguments, of which any may be missing.

    Raises CheckpointError, naming them, for parts that this program's model does not have.
    """
    strange = [f"{name}={arguments[name]!r}" for name, off in _UNKNOWN if arguments.get(name) not in off]
    positions = _positions(arguments)
    if positions not in (None, "learned_absolute", "rope", "none", "alibi"):
        strange.append(f"position_embedding_type={positions!r}")
    if strange:
        raise CheckpointError(f"the checkpoint's model has parts that this program has not: {', '.join(strange)}")
    found = {name: arguments[name] for name in (*_MODEL, *_RUN) if _is_plain(arguments.get(name))}
    found["vocab_size"] = arguments.get("vocab_size")
    found["position_embedding_type"] = positions
    if arguments.get("group_query_attention") is not False:
        groups = arguments.get("num_query_groups") if "num_query_groups" in arguments else None
        found["num_key_value_heads"] = arguments.get("num_key_value_heads") or groups
    found["layernorm_epsilon"] = arguments.get("layernorm_epsilon", arguments.get("norm_epsilon"))
    found["rotary_base"] = arguments.get("rotary_base", arguments.get("rotary_position_embeddings_theta"))
    if isinstance(arguments.get("normalization"), str):
        found["normalization"] = arguments["normalization"].lower()
    notes = []
    gelu = not (arguments.get("swiglu") or arguments.get("squared_relu") or arguments.get("openai_gelu"))
    if arguments and gelu and arguments.get("bias_gelu_fusion") is False:
        notes.append("it was trained without fused bias and GELU, perhaps with the exact GELU; here it is tanh's form")
    return {name: value for name, value in found.items() if value is not None}, notes


def _positions(arguments: Mapping[str, Any]) -> Any:
    """How positions enter, of the three ways in which it is said."""
    if arguments.get("use_rotary_position_embeddings"):
        return "rope"
    if isinstance(arguments.get("position_embedding_type"), str):
        return arguments["position_embedding_type"]
    if arguments.get("use_alibi_position_embeddings"):
        return "alibi"
    return "none" if arguments.get("add_position_embedding") is False else None


def _is_plain(value: Any) -> bool:
    return isinstance(value, (bool, int, float, str))


def configure(settings: Mapping[str, Any], chosen: Mapping[str, Any]) -> tuple[Config, list[str]]:
    """(configuration, notes) of the checkpoint's settings, over which go those that the user has chosen.

    Raises CheckpointError naming what neither says, and ConfigError for what cannot be.
    """
    values = {**settings, **chosen}
    needed = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "vocab_size")
    missing = [f"--{name.replace('_', '-')}" for name in needed if values.get(name) is None]
    if missing:
        raise CheckpointError(
            f"the checkpoint does not say {', '.join(missing)}: add these flags with the values that it was trained "
            f"with (the vocabulary as its tokenizer has it, without padding)"
        )
    try:
        return Config.create(**values), []
    except ConfigError as error:
        model = {name: value for name, value in values.items() if name not in _RUN or name in chosen}
        config = Config.create(**model)
        problems = " ".join(str(error).split())
        return config, [f"the settings of its training are not taken over, only those of the model: {problems}"]
