"""An evaluation that is asked to end, in one process; what it measures is in test_among_ranks.py."""
from __future__ import annotations

import torch

from megatron.parallel.topology import Layout, Topology
from megatron.training.evaluate import mean_loss
from megatron.training.streams import PlaceholderStream


def test_an_evaluation_is_left_between_two_iterations() -> None:
    asked: list[int] = []

    def interrupted() -> bool:
        asked.append(stream.consumed_samples)
        return len(asked) == 2

    topology, stream = Topology.from_layout(Layout(), 0, device=torch.device("cpu")), PlaceholderStream(3, 0, 1)
    losses = [torch.tensor(1.0)] * 2
    assert mean_loss(lambda _: losses, stream, topology, 5, 2, interrupted=interrupted) is None
    assert asked == [3 * 2, 2 * 3 * 2]
