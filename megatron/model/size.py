"""Parameters and FLOPs of the model of a configuration: by formula, with pieces of one's own by what these make."""
from __future__ import annotations

import math

from megatron.config import Config
from megatron.model import formulas


def total_parameters(config: Config) -> int:
    """All parameters of the model, a tied embedding counted once. Needs torch with pieces of one's own only."""
    if config.pieces.layer is None and config.pieces.model is None:
        return formulas.total_parameters(config.model)
    from megatron.model.gpt import global_shapes

    return sum(math.prod(shape) for shape in global_shapes(config).values())


def model_flops_per_token(config: Config) -> float:
    """Count as formulas does. For a model with pieces of one's own: a product forward and two backward with each
    parameter that these have more, and attention as that of the project's own layer."""
    more = total_parameters(config) - formulas.total_parameters(config.model)
    return formulas.model_flops_per_token(config.model) + 6.0 * more
