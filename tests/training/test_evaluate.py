"""The validation loss is the mean over all micro-batches of all replicas, whatever part of them a rank sees."""
from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from megatron.data.batch import MicroBatch
from megatron.parallel.topology import Layout, Topology
from megatron.training.evaluate import mean_loss
from megatron.training.streams import PlaceholderStream
from tests.helpers.groups import join
from tests.helpers.processes import run_processes

ITERATIONS, MICRO_BATCHES = 3, 2


def loss_of(first_sample: int) -> float:
    return 1.0 + 0.37 * first_sample**1.5


def tokens_of(first_sample: int) -> int:
    return 1 + first_sample % 5


class MaskedStream(PlaceholderStream):
    """Placeholders with a loss mask of as many ones as tokens_of says."""

    def take(self, n: int) -> list[MicroBatch]:
        masks = torch.arange(5)
        return [
            dataclasses.replace(b, loss_mask=(masks < tokens_of(b.first_sample)).float()) for b in super().take(n)
        ]


def evaluate_in_process(rank: int) -> tuple[float, float]:
    topology = join(2, 2)  # and data 2

    def forward(batches: Sequence[MicroBatch]) -> list[torch.Tensor]:
        return [torch.tensor(loss_of(b.first_sample)) for b in batches] if topology.pipeline.is_last else []

    def measure(per_token: bool) -> float:
        stream = MaskedStream(3, topology.data.rank, topology.data.size, consumed_samples=12)
        loss = mean_loss(forward, stream, topology, ITERATIONS, MICRO_BATCHES, per_token=per_token)
        assert loss is not None
        return loss

    return measure(False), measure(True)


def test_mean_over_micro_batches_and_replicas() -> None:
    results = run_processes(8, evaluate_in_process)
    # Micro-batches of 3 samples from sample 12 on; two replicas take turns.
    firsts = [12 + 3 * i for i in range(ITERATIONS * MICRO_BATCHES * 2)]
    losses = np.array([loss_of(f) for f in firsts])
    tokens = np.array([tokens_of(f) for f in firsts])
    for plain, per_token in results:
        np.testing.assert_allclose(plain, losses.mean(), rtol=1e-6)
        np.testing.assert_allclose(per_token, (losses * tokens).sum() / tokens.sum(), rtol=1e-6)


def test_an_evaluation_is_left_between_two_iterations() -> None:
    asked: list[int] = []

    def interrupted() -> bool:
        asked.append(stream.consumed_samples)
        return len(asked) == 2

    topology, stream = Topology.from_layout(Layout(), 0, device=torch.device("cpu")), MaskedStream(3, 0, 1)
    forward = [torch.tensor(1.0)] * MICRO_BATCHES
    assert mean_loss(lambda _: forward, stream, topology, 5, MICRO_BATCHES, interrupted=interrupted) is None
    assert asked == [3 * MICRO_BATCHES, 2 * 3 * MICRO_BATCHES]
