"""Training with a loss mask, on any layout, against plain torch with masks made by hand."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron import pretrain
from megatron.config import Config
from megatron.data.datasets import build_datasets
from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.data.sampler import make_micro_batch
from megatron.metrics_file import read_records
from megatron.model.gpt import build_chunks
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Layout, Topology
from tests.helpers.processes import run_processes

pytestmark = pytest.mark.slow
BATCH, STEPS = 8, 4
FIELDS: dict[str, Any] = dict(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=2,
    seq_length=8,
    max_position_embeddings=8,
    vocab_size=40,
    make_vocab_size_divisible_by=8,
    micro_batch_size=1,
    global_batch_size=BATCH,
    train_iters=STEPS,
    num_workers=0,
    log_interval=1,
    eval_iters=0,
    split="1",
    lr=1e-2,
    lr_decay_style="constant",
    adam_eps=1e-4,
    init_method_std=0.3,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    distributed_timeout_minutes=1.0,
    loss_mask="required",
)


def run(rank: int, fields: dict[str, Any]) -> None:
    pretrain(Config.create(**{**FIELDS, **fields}, world_size=int(os.environ["WORLD_SIZE"])))


def in_loss(ids: torch.Tensor) -> torch.Tensor:
    """Return the mask of labels, which depends on the id, so that it is known without the file."""
    return ((ids % 4 == 0) & (ids < 20)).float()


def by_hand(config: Config) -> list[float]:
    """Return the losses of the run's steps: each global batch is one micro-batch."""
    topology = Topology.from_layout(Layout(), 0, device=torch.device("cpu"))
    (model,) = build_chunks(config, topology).values()
    o = config.optimizer
    groups = [
        {"params": [p], "weight_decay": o.weight_decay if sharding_of(p).decay else 0.0}
        for p in model.parameters()
    ]
    betas = (o.adam_beta1, o.adam_beta2)
    optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=betas, eps=o.adam_eps)
    dataset, losses, counts = build_datasets(config, BATCH * STEPS, 0, 0).train, [], []
    assert dataset is not None
    for step in range(STEPS):
        tokens = np.stack([dataset[BATCH * step + i] for i in range(BATCH)])
        batch = make_micro_batch(tokens)
        batch = dataclasses.replace(batch, loss_mask=in_loss(batch.labels))
        counts += batch.loss_mask.sum(1).tolist()
        loss = model(batch, None)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), o.clip_grad)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert min(counts) == 0 and max(counts) > 3, "ranks have very different numbers of tokens"
    return losses


@pytest.mark.parametrize(
    ("processes", "fields"),
    [
        (1, dict(micro_batch_size=4)),
        (2, dict()),
        (2, dict(pipeline_model_parallel_size=2)),
        (2, dict(context_parallel_size=2)),
        (4, dict(tensor_model_parallel_size=2, sequence_parallel=True, micro_batch_size=2)),
    ],
)
def test_each_marked_token_of_a_global_batch_counts_equally(
    tmp_path: Path, processes: int, fields: dict[str, Any]
) -> None:
    random = np.random.RandomState(3)
    tokens = [random.randint(at, at + 20, 11) for at in (0, 20) * 30]
    for name, dtype in (("data", np.uint16), ("data_mask", np.uint8)):
        with IndexedDatasetWriter(tmp_path / name, dtype) as writer:
            for ids in tokens:
                marks = in_loss(torch.from_numpy(ids)).numpy()
                writer.add_document(ids if name == "data" else marks.astype(int))
    fields = {**fields, "data_path": (str(tmp_path / "data"),)}
    run_processes(processes, run, {**fields, "save": str(tmp_path / "run")})
    records = read_records(tmp_path / "run" / "metrics.jsonl")
    losses = [record["lm_loss"] for record in records if record["event"] == "iteration"]
    expected = by_hand(Config.create(**{**FIELDS, "data_path": fields["data_path"]}))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert abs(expected[0] - expected[-1]) > 0.01
