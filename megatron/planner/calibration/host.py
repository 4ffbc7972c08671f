"""Seconds that Python and torch take for a layer's pass and for a step, beside the work on the data, by tiny models."""
from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron.config import Config
from megatron.data.batch import MicroBatch
from megatron.engine.engine import Engine, build_executor
from megatron.model.gpt import build_chunks
from megatron.parallel.topology import Layout, Topology

FEW, MANY = 1, 5
SEQUENCE = 16
_KIND = (
    "swiglu", "squared_relu", "openai_gelu", "normalization", "add_bias_linear", "position_embedding_type",
    "untie_embeddings_and_output_weights", "bf16", "fp16", "fp32_residual_connection", "attention_backend",
)  # fmt: skip


class HostSeconds(NamedTuple):
    """Seconds of one layer's forward and backward pass, of a micro-batch without layers, and of the rest of a step."""

    forward: float
    backward: float
    micro_batch: float
    step: float


def tiny(config: Config, layers: int) -> Config:
    """The same kind of model with hardly any data."""
    kind = {name: config.given[name] for name in _KIND if name in config.given}
    return Config.create(
        num_layers=layers, hidden_size=32, num_attention_heads=2, ffn_hidden_size=64, seq_length=SEQUENCE,
        vocab_size=64, attention_dropout=0.0, hidden_dropout=0.0, global_batch_size=1, world_size=1, **kind,
    )  # fmt: skip


def host_seconds(config: Config, device: torch.device, seconds: float) -> HostSeconds:
    """Measure in a process that is alone in its job, for about `seconds`.

    On a GPU these are the times after which the host may go on, without those of the device.
    """
    few, many = (_times(tiny(config, layers), device, seconds / 2) for layers in (FEW, MANY))
    forward, backward = (max(0.0, many[i] - few[i]) / (MANY - FEW) for i in (0, 1))
    return HostSeconds(forward, backward, max(0.0, few[3] - FEW * (forward + backward)), few[4])


def _times(config: Config, device: torch.device, seconds: float) -> list[float]:
    """Median seconds of a forward and a backward pass, of forgetting its gradients, of a micro-batch by the executor,
    and of the optimizer's step."""
    topology = Topology.from_layout(Layout(1, 1, 1), 0, device=device)
    chunks = build_chunks(config, topology)
    engine = Engine(config, topology, chunks)
    executor, chunk = build_executor(config, topology, chunks, engine), next(iter(chunks.values())).train()
    tokens = torch.zeros(1, SEQUENCE, dtype=torch.long, device=device)
    batch = MicroBatch(
        tokens=tokens, labels=tokens, loss_mask=torch.ones(1, SEQUENCE, device=device),
        position_ids=torch.arange(SEQUENCE, device=device).unsqueeze(0), cu_seqlens=None, first_sample=0,
    )  # fmt: skip
    passed = list[torch.Tensor]()
    pieces: tuple[Callable[[], object], ...] = (
        lambda: passed.append(chunk(batch, None, late_loss=True)), lambda: passed.pop().backward(),
        engine.clear_gradients, lambda: executor.train([batch], loss_scale=engine.loss_scale),
        lambda: engine.step(1e-4),
    )  # fmt: skip
    begin, found = time.perf_counter(), [list[float]() for _ in pieces]
    while time.perf_counter() - begin < seconds or len(found[0]) < 5:
        for piece, took in zip(pieces, found, strict=True):
            start = time.perf_counter()
            piece()
            took.append(time.perf_counter() - start)
    return [statistics.median(took[1:]) for took in found]  # the first is a warm-up
