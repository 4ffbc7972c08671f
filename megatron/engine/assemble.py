"""An executor for a GPT and its engine."""
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from megatron.engine.engine import Engine
from megatron.model.gpt import hidden_dtype, hidden_shape, stages_of
from megatron.parallel.topology import Topology
from megatron.pipeline.executor import Executor

if TYPE_CHECKING:
    from megatron.config import Config


def build_executor(config: Config, topology: Topology, chunks: torch.nn.ModuleDict, engine: Engine) -> Executor:
    """Runs the schedule of `config` on `chunks` (from build_chunks); gradients add up where `engine` wants them."""
    some: Any = next(iter(chunks.values()))
    return Executor(
        topology, stages_of(chunks), config.schedule, config.parallel.num_chunks, hidden_shape(config),
        hidden_dtype(config), some.context.weight_gradients, before_training=engine.begin,
    )  # fmt: skip
