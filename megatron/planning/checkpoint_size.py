"""Bytes of a checkpoint, from the configuration alone. Needs no torch."""
from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.model import formulas

if TYPE_CHECKING:
    from megatron.config import Config

MOMENTS = {"adam": 2, "sgd": 1}
"""Tensors that the optimizer keeps for each weight, as large as it; megatron.engine.optimizer has their names."""


def checkpoint_bytes(config: Config) -> int:
    """Bytes of a checkpoint: an fp32 number for each weight and, with the optimizer, for each of its moments."""
    moments = 0 if config.checkpoint.no_save_optim else MOMENTS[config.optimizer.optimizer]
    return 4 * (1 + moments) * formulas.total_parameters(config.model)
