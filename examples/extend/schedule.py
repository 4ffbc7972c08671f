"""Custom schedule: GPipe (Huang et al., arXiv 1811.06965): all forward passes come first."""

from __future__ import annotations

from megatron.errors import ConfigError
from megatron.pipeline.orders import Instruction, Op


def gpipe(pipeline_size: int, chunks: int, micro_batches: int, rank: int) -> list[Instruction]:
    if chunks > 1:
        raise ConfigError(f"GPipe has one chunk for each rank, not {chunks}")
    forward = [Instruction(Op.FORWARD, rank, i) for i in range(micro_batches)]
    return forward + [Instruction(Op.BACKWARD, rank, i) for i in reversed(range(micro_batches))]


PIECES = {"schedule": gpipe}
