"""Runs of a tiny GPT through `pretrain`, and what they record."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from megatron.config import Config
from megatron.metrics_file import read_records
from megatron.parallel.layout import Layout
from megatron.parallel.topology import Topology

MODEL: dict[str, Any] = dict(
    num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=8, vocab_size=24
)
RUN: dict[str, Any] = dict(
    **MODEL,
    make_vocab_size_divisible_by=8,
    micro_batch_size=1,
    global_batch_size=4,
    num_workers=0,
    train_iters=6,
    lr=1e-2,
    log_interval=1,
    eval_iters=0,
    hidden_dropout=0.2,
    attention_dropout=0.0,
    distributed_timeout_minutes=1.0,
)
INTERLEAVED = dict(
    num_layers=4, pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1
)

LINEAR: dict[str, Any] = dict(
    experimental_attention_variant="gated_delta_net",
    linear_attention_freq=(2,),
    linear_conv_kernel_dim=3,
    linear_key_head_dim=6,
    linear_value_head_dim=5,
    linear_num_key_heads=4,
    linear_num_value_heads=8,
)


def tiny(**fields: Any) -> Config:
    """Return RUN with other fields, on random tokens unless a field names data."""
    mock = not any(
        name.endswith(("data_path", "data_file_list", "blend_schedule")) for name in fields
    )
    return Config.create(**{**RUN, "mock_data": mock, **fields})


def run(rank: int, fields: dict[str, Any], **components: Any) -> None:
    """Train in one rank of run_processes."""
    from megatron.program import pretrain

    pretrain(tiny(**fields, world_size=int(os.environ["WORLD_SIZE"])), **components)


def rank_topology(rank: int = 0, **layout: Any) -> Topology:
    """Return a rank's topology of a layout, of one process by default, without process groups."""
    return Topology.from_layout(Layout(**layout), rank, device=torch.device("cpu"))


def one_stage(config: Config) -> Any:
    """Return the whole model in one process."""
    from megatron.model.gpt import build_chunks

    return build_chunks(config, rank_topology())["0"]


def records(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the records of a run's metrics file by event."""
    events: dict[str, list[dict[str, Any]]] = {}
    for record in read_records(folder / "metrics.jsonl"):
        events.setdefault(record["event"], []).append(record)
    return events


def values(events: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(event[name] for name in names) for event in events]
