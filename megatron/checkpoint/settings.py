"""The configuration in a checkpoint, its comparison with another one, and a checkpoint's size.

Needs no torch.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from megatron.config.pieces import Pieces
from megatron.engine.optimizer_state import optimizer_state
from megatron.errors import CheckpointError
from megatron.model.formulas import parameters_of

if TYPE_CHECKING:
    from megatron.config import Config

ARCHITECTURE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "kv_channels",
    "num_key_value_heads",
    "vocab_size",
    "normalization",
    "apply_layernorm_1p",
    "layernorm_epsilon",
    "swiglu",
    "squared_relu",
    "openai_gelu",
    "add_bias_linear",
    "untie_embeddings_and_output_weights",
    "position_embedding_type",
    "rotary_percent",
    "rotary_base",
    "apply_residual_connection_post_layernorm",
)
"""Fields of config.model that determine which weights exist or what they mean."""


def plain(value: Any) -> Any:
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


def check_architecture(stored: dict[str, Any], config: Config, where: str) -> None:
    """Raise CheckpointError listing every architecture flag that differs from the checkpoint's."""
    theirs, ours = stored.get("model", {}), plain(config.model)
    fields = list(ARCHITECTURE)
    if ours.get("position_embedding_type") == "learned_absolute":
        fields.append("max_position_embeddings")
    different = [
        f"--{name.replace('_', '-')} is {theirs[name]!r} in the checkpoint and {ours[name]!r} here"
        for name in fields
        if name in theirs and name in ours and theirs[name] != ours[name]
    ]
    if different:
        raise CheckpointError(
            f"{where} has another architecture: {'; '.join(different)}. Use the checkpoint's "
            "settings (--use-checkpoint-args) or another checkpoint"
        )


def checkpoint_bytes(config: Config) -> int:
    """Return the size of a checkpoint in bytes.

    It has 4 bytes for each weight and, with the optimizer, its state.
    """
    state = 0 if config.checkpoint.no_save_optim else optimizer_state(config).bytes
    return (4 + state) * parameters_of(config)
