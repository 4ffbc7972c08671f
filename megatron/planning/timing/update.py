"""The optimizer's step: norm of the gradients, update, weights in the format of computation."""
from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.model import formulas
from megatron.planning.memory import sized_model
from megatron.planning.timing.shape import Kernels
from megatron.planning.timing.stage import stages_of

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.planning.rates import Rates


def bytes_per_element(config: Config, kernels: Kernels) -> float:
    """Read and written for each element of the master weights (engine/zero.py, kernels/ops/optimizer.py)."""
    norm = gradient = float(config.precision.gradient_bytes)
    # Weight and momentum, or two moments, in and out; the gradient in.
    update = gradient + (16.0 if config.optimizer.optimizer == "sgd" else 24.0)
    if config.precision.dtype_name == "float32":
        return norm + update
    same_pass = kernels.fusions.optimizer and config.precision.bf16 and config.optimizer.optimizer == "adam"
    return norm + update + (2.0 if same_pass else 6.0)


def most_elements(config: Config) -> float:
    """Elements that the device with the most of them updates."""
    parallel, stages = config.parallel, stages_of(config)
    model, t = sized_model(config), parallel.tensor_model_parallel_size
    vocabulary = model.padded_vocab_size(t)
    each = {
        stage: formulas.stage_parameters(
            model, stage.layers, first=stage.first, last=stage.last, tensor_size=t, vocab_size=vocabulary
        )
        for stage in set(stages)
    }
    size = parallel.pipeline_model_parallel_size
    most = max(sum(each[stage] for stage in stages[rank::size]) for rank in range(size))
    return most / (parallel.data_parallel_size if config.engine.zero_stage else 1)


def update_seconds(config: Config, kernels: Kernels, rates: Rates) -> float:
    """Of the pipeline rank with the most parameters, which all others wait for."""
    return rates.update_s(most_elements(config), bytes_per_element(config, kernels))
