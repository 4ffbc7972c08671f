"""The optimizer's step: norm of the gradients, update, weights in the format of computation."""
from __future__ import annotations

from typing import TYPE_CHECKING

from megatron.engine.optimizer_state import has_kernel, optimizer_state
from megatron.kernels.choose import assumed_fusions, choose_fusions
from megatron.planner.stage import owners, parameters_of, stages_of
from megatron.planner.trace import trace

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.planner.rates import Rates


def bytes_per_element(config: Config, device: str) -> float:
    """Read and written for each element of the master weights (engine/zero.py, kernels/ops/optimizer.py)."""
    norm = gradient = float(config.precision.gradient_bytes)
    update = optimizer_state(config).traffic_bytes(gradient)
    if config.precision.dtype_name == "float32":
        return norm + update
    kernels, dtype_name = config.kernels, config.precision.dtype_name
    on_cpu = device == "cpu"
    fusions = choose_fusions(kernels, None, dtype_name) if on_cpu else assumed_fusions(kernels, device, dtype_name)
    same_pass = fusions.optimizer and config.precision.bf16 and has_kernel(config)
    return norm + update + (2.0 if same_pass else 6.0)


def most_elements(config: Config, device: str) -> float:
    """Elements that the device with the most of them updates."""
    stages, traced = stages_of(config), trace(config, device)
    each = {stage: parameters_of(traced, stage) for stage in set(stages)}
    size = config.parallel.pipeline_model_parallel_size
    most = max(sum(each[stage] for stage in stages[rank::size]) for rank in range(size))
    return most / owners(config)


def update_seconds(config: Config, device: str, rates: Rates) -> float:
    """Of the pipeline rank with the most parameters, which all others wait for."""
    return rates.update_s(most_elements(config, device), bytes_per_element(config, device))
