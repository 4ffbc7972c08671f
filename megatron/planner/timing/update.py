"""The optimizer's step: norm of the gradients, update, weights in the format of computation."""
from __future__ import annotations

from megatron.config import Config
from megatron.engine.optimizer_state import has_kernel, optimizer_state
from megatron.kernels.choose import assumed_fusions, choose_fusions
from megatron.planner.rates import Rates
from megatron.planner.stage import owners, parameters_of, stages_of
from megatron.planner.trace import trace


def bytes_per_element(config: Config, device: str) -> float:
    """Bytes read and written per element of the master weights (engine/deepspeed_internals.py)."""
    norm = gradient = float(config.precision.gradient_bytes)
    update = optimizer_state(config).traffic_bytes(gradient)
    kernels, dtype_name = config.kernels, config.precision.dtype_name
    if dtype_name == "float32":
        return norm + update
    on_cpu = device == "cpu"
    fusions = choose_fusions(kernels, None, dtype_name) if on_cpu else assumed_fusions(kernels, device, dtype_name)
    same_pass = fusions.optimizer and config.precision.bf16 and has_kernel(config)
    return norm + update + (2.0 if same_pass else 6.0)


def update_seconds(config: Config, device: str, rates: Rates) -> float:
    """Time the device with the most elements, which all others wait for."""
    stages, traced = stages_of(config), trace(config, device)
    size = config.parallel.pipeline_model_parallel_size
    most = max(sum(parameters_of(traced, stage) for stage in stages[rank::size]) for rank in range(size))
    return rates.update_s(most / owners(config), bytes_per_element(config, device))
