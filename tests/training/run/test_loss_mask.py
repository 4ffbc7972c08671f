"""Training with a loss mask, on any layout, against plain torch with masks made by hand."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
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
from megatron.errors import MegatronError
from megatron.metrics_file import read_records
from megatron.model.gpt import build_chunks
from megatron.parallel.layout import Layout
from megatron.parallel.sharding import sharding_of
from megatron.parallel.topology import Topology
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


class Marked:
    """Samples of which some have no token in the loss; `marked` has one entry for each.

    `seeds` of the tokens: by default the index of the sample.
    """

    def __init__(self, marked: Sequence[bool], seeds: Sequence[int] | None = None) -> None:
        self.marked, self.seeds = marked, seeds or range(len(marked))

    def __len__(self) -> int:
        return len(self.marked)

    def __getitem__(self, index: int) -> np.ndarray:
        return np.random.RandomState(self.seeds[index]).randint(0, FIELDS["vocab_size"], 9)

    def loss_tokens(self, index: int) -> np.ndarray:
        return np.arange(9) % 2 * self.marked[index]


def run_on(rank: int, fields: dict[str, Any], train: list[bool], valid: list[bool]) -> str:
    """Return the message of the error that ends the run."""
    every = {**FIELDS, **dict(loss_mask=None, log_interval=2, lr=1e-12), **fields}
    config = Config.create(**every, world_size=int(os.environ["WORLD_SIZE"]))
    try:
        pretrain(config, datasets=lambda *_: (Marked(train), Marked(valid), None))
    except MegatronError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("per_token", [False, True])
def test_steps_without_a_token_in_the_loss_are_in_no_mean(tmp_path: Path, per_token: bool) -> None:
    """The weights do not move, so each sample has the loss of the first step."""
    steps = [(1, 1), (0, 0), (0, 1), (0, 0), (0, 0), (0, 0), (1, 1), (1, 1)]
    marked = [bool(x) for step in steps for x in step]
    fields = dict(
        global_batch_size=2,
        train_iters=len(steps),
        calculate_per_token_loss=per_token,
        max_consecutive_skips=3,
        loss_spike_factor=2.0,
        loss_spike_window=2,
        save=str(tmp_path),
        load=str(tmp_path),
        eval_iters=1,
        eval_interval=2,
    )
    ended = run_processes(2, run_on, fields, marked, [False] * 20)
    assert all(text.startswith("TrainingError") and " 6 " in text for text in ended), ended
    topology = Topology.from_layout(Layout(), 0, device=torch.device("cpu"))
    config = Config.create(**{**FIELDS, "loss_mask": None})
    (model,) = build_chunks(config, topology).values()
    data, losses = Marked([True] * 6), list[float]()
    for index in (0, 1, 5):
        batch = make_micro_batch(data[index][None], loss_tokens=[data.loss_tokens(index)])
        losses.append(model(batch, None).item())
    records = read_records(tmp_path / "metrics.jsonl")
    found = [(r["lm_loss"], r.get("empty", 0)) for r in records if r["event"] == "iteration"]
    expected = [((losses[0] + losses[1]) / 2, 1), (losses[2], 1), (None, 2)]
    assert [empty for _, empty in found] == [empty for _, empty in expected]
    assert found[2][0] is None
    np.testing.assert_allclose([x for x, _ in found[:2]], [x for x, _ in expected[:2]], rtol=1e-5)
    assert not [r for r in records if r["event"] in ("validation", "loss_spike")]


def test_data_without_a_token_in_the_loss_are_refused(tmp_path: Path) -> None:
    ended = run_processes(2, run_on, dict(train_iters=3), [False] * 24, [True] * 8)
    assert all(text.startswith("DataError") and "24 of 24" in text for text in ended), ended


def run_samples(rank: int, fields: dict[str, Any], marked: list[bool], seeds: list[int]) -> None:
    world = int(os.environ["WORLD_SIZE"])
    steps = dict(global_batch_size=2, train_iters=len(seeds) // 2, loss_mask=None)
    config = Config.create(**{**FIELDS, **steps, **fields}, world_size=world)
    pretrain(config, datasets=lambda *_: (Marked(marked, seeds), None, None))


@pytest.mark.parametrize(
    ("processes", "fields"),
    [
        (1, dict(optimizer="muon")),
        (2, dict(zero_stage=3, bf16=True)),
        (2, dict(pipeline_model_parallel_size=2, num_experts=2, moe_aux_loss_coeff=(0.0,))),
    ],
)
def test_a_step_without_a_token_in_the_loss_leaves_weights_and_optimizer(
    tmp_path: Path, processes: int, fields: dict[str, Any]
) -> None:
    """The run takes the other steps as if the data were without these samples, also the first."""
    runs = []
    for empty in ((0, 1, 4, 5), ()):
        seeds = [i for i in range(10) if empty or i not in (0, 1, 4, 5)]
        save = dict(save=str(tmp_path / str(len(empty))), log_params_norm=True)
        marked = [i not in empty for i in seeds]
        run_processes(processes, run_samples, {**fields, **save}, marked, seeds)
        records = read_records(Path(save["save"]) / "metrics.jsonl", "iteration")
        runs.append([(r["lm_loss"], r["grad_norm"], r["params_norm"]) for r in records])
    with_empty, without = runs
    assert [norm for _, norm, _ in with_empty].count(0.0) == 2
    assert [step for step in with_empty if step[0] is not None] == without
