"""Bytes of a checkpoint, from the configuration alone. Needs no torch."""
from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.engine.optimizer_state import optimizer_state
from megatron.model.formulas import parameters_of

if TYPE_CHECKING:
    from megatron.config import Config


def checkpoint_bytes(config: Config) -> int:
    """Bytes of a checkpoint: an fp32 number for each weight and, with the optimizer, for each of its state."""
    state = 0 if config.checkpoint.no_save_optim else optimizer_state(config).bytes
    return (4 + state) * parameters_of(config)
