"""Configurations on a layout, for tests of placement and messages."""

from __future__ import annotations

from typing import Any

from megatron.config import Config


def made(tensor: int, pipeline: int, data: int, chunks: int = 1, **fields: Any) -> Config:
    """Return a GPT-3 of 13B on this layout, with 2 layers a chunk and sequence parallelism."""
    layers = max(8, 2 * pipeline * chunks)
    virtual = (
        {"num_layers_per_virtual_pipeline_stage": layers // pipeline // chunks}
        if chunks > 1
        else {}
    )
    settings: dict[str, Any] = dict(
        num_layers=layers,
        hidden_size=5120,
        num_attention_heads=40,
        seq_length=2048,
        vocab_size=51200,
        bf16=True,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        world_size=tensor * pipeline * data,
        global_batch_size=8 * pipeline * data,
        sequence_parallel=tensor > 1,
        **virtual,
    )
    return Config.create(**settings | fields)
