"""The configuration in a checkpoint, its comparison with the run's, and a checkpoint's size.

This module needs no torch, except for the size with an optimizer that needs full parameters or is
the user's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.checkpoint import huggingface_config
from megatron.checkpoint.files import CONFIG, read_manifest
from megatron.checkpoint.find import find_folder, read_tracker
from megatron.checkpoint.folder import tagged_name
from megatron.config.io import TokenizerConfig, hugging_face_folder
from megatron.config.model import ModelConfig
from megatron.config.option import options_of
from megatron.config.pieces import PLAIN, Pieces, load_pieces
from megatron.config.settings import all_options
from megatron.engine.optimizer_state import optimizer_state, wants_full_parameters
from megatron.errors import CheckpointError, ConfigError
from megatron.model.formulas import ModelSizes

if TYPE_CHECKING:
    from megatron.config import Config

_OF_TRAINING = frozenset(
    """
    seq_length max_position_embeddings make_vocab_size_divisible_by logit_z_loss attention_dropout
    hidden_dropout fp32_residual_connection apply_query_key_layer_scaling attention_softmax_in_fp32
    weight_decay_on_xielu_alphas mtp_loss_scaling_factor init_method_std init_method_xavier_uniform
    mup_attn_scale_power moe_use_upcycling
    moe_shared_expert_overlap moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff
    moe_router_bias_update_rate moe_input_jitter_eps moe_expert_capacity_factor
    moe_eval_capacity_factor moe_token_drop_policy moe_router_force_load_balancing
    freeze lora_rank lora_alpha lora_target
    """.split()
)
ARCHITECTURE = [o.name for o in options_of(ModelConfig) if o.name not in _OF_TRAINING]
"""Settings of the model that determine which weights exist, or their meaning."""
EXPERTS = [name for name in ARCHITECTURE if name.startswith(("num_experts", "moe_"))]
"""Settings of the architecture that a model without experts does not have."""


_LORA = ("lora_rank", "lora_alpha", "lora_target")
# Settings that add parameters, and may differ if --load-missing names these.
_ADDITIONS = frozenset(
    "qk_layernorm add_qkv_bias embedding_layernorm untie_embeddings_and_output_weights "
    "mtp_num_layers".split()
)
# Settings beyond the architecture that --use-checkpoint-args takes, as in Megatron-LM.
_INHERITED = (
    *"seq_length max_position_embeddings attention_dropout hidden_dropout".split(),
    *_LORA,
)


def settings_to_take(
    explicit: Mapping[str, Any],
) -> tuple[str, dict[str, object], dict[str, object]]:
    """Return the settings that --use-checkpoint-args takes from the checkpoint to load.

    For --load hf:FOLDER they come from that folder, and for --model-from, where none must be
    equal, from its config.json.

    explicit   settings that the user gave, by name; "load" or "model_from" is among them

    Returns the file, the settings that must equal the checkpoint's, and the settings that apply
    unless `explicit` has others. Every rank reads the file itself, and opens no other checkpoint if
    the one that --load-tag or the tracker names can be read. `load` later checks the architecture
    of the checkpoint that rank 0 chooses. Raises CheckpointError.
    """
    new = explicit.get("model_from")
    source = hugging_face_folder(explicit["load"]) if new is None else Path(new)
    if source is None:
        file, stored = _stored(explicit["load"], explicit.get("load_tag"))
        model = stored.get("model")
        tokenizer = stored.get("tokenizer", {})
    else:
        file = source if source.suffix == ".json" else source / huggingface_config.CONFIG
        source = file.parent
        tokenizer = huggingface_config.tokenizer_settings(source)
        fields = huggingface_config.read_config(file)
        if new is not None:
            fields.pop("quantization_config", None)  # describes weights, which are not read
        model = plain(huggingface_config.model_of(fields, str(file))[1])
    if not (isinstance(model, dict) and isinstance(tokenizer, dict)):
        raise CheckpointError(f"{file} does not hold the settings of a run")
    fixed = {name: model[name] for name in ARCHITECTURE if name in model}
    if explicit.get("moe_use_upcycling") and fixed.get("num_experts") is None:
        fixed = {name: value for name, value in fixed.items() if name not in EXPERTS}
    defaults = {name: model[name] for name in _INHERITED if name in model}
    if explicit.get("load_missing"):
        defaults |= {name: fixed.pop(name) for name in _ADDITIONS & fixed.keys()}
    if model.get("position_embedding_type") == "learned_absolute":
        fixed["max_position_embeddings"] = defaults.pop("max_position_embeddings", None)
    files = "vocab_file" in explicit and "merge_file" in explicit
    kind = explicit.get("tokenizer_type", "GPT2BPETokenizer" if files else None)
    if kind in (None, tokenizer.get("tokenizer_type")):
        kind = tokenizer.get("tokenizer_type")
        defaults |= {o.name: tokenizer.get(o.name) for o in options_of(TokenizerConfig)}
    if kind == "NullTokenizer" and isinstance(fixed.get("vocab_size"), int):
        fixed["vocab_size"] -= 1  # NullTokenizer adds one id
    elif kind not in (None, "HFTokenizer"):  # models with one often have more rows than it has ids
        fixed.pop("vocab_size", None)  # the tokenizer determines it
    if new is not None:
        # fields that a trained model does not need
        defaults["init_method_std"] = fields.get("initializer_range")
        defaults["mtp_num_layers"] = fields.get("num_nextn_predict_layers")
        return str(file), {}, {**fixed, **defaults}
    return str(file), fixed, defaults


def _stored(directory: str, tag: str | None) -> tuple[Path, dict[str, Any]]:
    """Return the file with a checkpoint's settings, and its content."""
    tracked = read_tracker(directory).iteration if tag is None else tag
    with contextlib.suppress(CheckpointError):
        if tracked is not None:
            path = Path(directory, tagged_name(str(tracked)), CONFIG)
            return path, read_manifest(path.parent).read_json(CONFIG)
    folder = find_folder(directory, tag)
    return folder / CONFIG, read_manifest(folder).read_json(CONFIG)


def plain(value: object) -> Any:
    """Return a configuration as dicts, lists, numbers and strings."""
    if isinstance(value, Pieces):
        return value.describe()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: plain(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if not f.name.startswith("_")
        }
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def pieces_of_model(
    stored: Mapping[str, Any], pieces: Pieces | str | None, where: object
) -> Pieces:
    """Return the user's own layer and model, of which the model in a checkpoint is built.

    stored  the checkpoint's settings; it is at `where`
    pieces  the user's pieces, or the file that lists them

    Raises ConfigError unless these are the kinds of pieces with which it was trained.
    """
    user = load_pieces(pieces) if isinstance(pieces, str) else pieces or PLAIN
    recorded = stored.get("pieces", {})
    for name in ("layer", "model"):
        if name in recorded and getattr(user, name) is None:
            raise ConfigError(
                f"{where} was trained with your own {name} ({recorded[name]}): give the file that "
                "lists it in PIECES with --pieces FILE, or load_model(..., pieces=FILE)"
            )
        if name not in recorded and getattr(user, name) is not None:
            raise ConfigError(
                f"{where} was trained without a {name} of your own: use it without "
                f"{user.describe()[name]} in --pieces"
            )
    return user.architecture


def check_architecture(stored: dict[str, Any], config: Config, where: str) -> None:
    """Raise CheckpointError listing every architecture flag that differs from the checkpoint's.

    A checkpoint that is older than a flag is taken to have the flag's default. Adapters, and what
    --load-missing names, may be added to a model without them.
    """
    saved = stored.get("model", {})
    current = plain(config.model)
    fields = list(ARCHITECTURE)
    if current.get("position_embedding_type") == "learned_absolute":
        fields.append("max_position_embeddings")
    if saved.get("lora_rank") is not None:
        fields += _LORA
    if config.checkpoint.load_missing:
        fields = [name for name in fields if name not in _ADDITIONS]
    defaults = {option.name: plain(option.default) for option in options_of(ModelConfig)}
    different = [
        f"--{name.replace('_', '-')} is {saved_value!r} in the checkpoint and {current[name]!r} here"
        for name in fields
        if name in current and (saved_value := saved.get(name, defaults[name])) != current[name]
    ]
    if different:
        raise CheckpointError(
            f"{where} has another architecture: {'; '.join(different)}. Use the checkpoint's "
            "settings (--use-checkpoint-args) or another checkpoint"
        )


def check_optimizer(stored: dict[str, Any], config: Config, where: str) -> None:
    """Raise CheckpointError if the checkpoint was written with another --optimizer.

    Nothing is compared if either run has an optimizer of the user's own.
    """
    saved = stored.get("optimizer", {}).get("optimizer")
    current = config.optimizer.optimizer
    custom = config.pieces.optimizer is not None or stored.get("pieces", {}).get("optimizer")
    if saved is not None and saved != current and not custom:
        raise CheckpointError(
            f"{where} has the optimizer state of --optimizer {saved}, with which {current} cannot "
            "continue: use --no-load-optim, which loads the weights and starts a new state"
        )


def check_benchmark(stored: dict[str, Any], config: Config, where: str) -> None:
    """Raise CheckpointError if only one of the runs draws experts instead of choosing by score.

    Either would continue with routers that do not fit: after a benchmark they have learned nothing,
    and in one the experts of a trained model get the tokens of all the others.
    """
    name = "moe_router_force_load_balancing"
    before = bool(stored.get("model", {}).get(name))
    if before != getattr(config.model, name):
        flag = all_options()[name].flag
        with_it, remedy = ("with", "add") if before else ("without", "remove")
        raise CheckpointError(
            f"{where} was trained {with_it} {flag}, and a benchmark cannot continue a training, nor a "
            f"training a benchmark: {remedy} this flag, or start anew from the weights with --finetune"
        )


def checkpoint_bytes(config: Config, sizes: ModelSizes) -> int:
    """Return the size of a checkpoint's tensors in bytes.

    A checkpoint has 4 bytes for each weight and, without --no-save-optim, the optimizer's state of
    those that train.
    """
    total = 4 * sizes.parameters()
    if config.checkpoint.no_save_optim:
        return total
    state = optimizer_state(config)
    wants = wants_full_parameters(config)
    for name, shape in sizes.shapes.items():
        if config.model.trains(name):
            in_full = wants is not None and wants(name, shape)
            total += state.of(in_full).bytes * math.prod(shape)
    return total
