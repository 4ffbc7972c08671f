"""The loss on data that is not trained on."""
from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron.data.batch import MicroBatch
from megatron.parallel import collectives
from megatron.parallel.topology import Topology
from megatron.training.run.data import Stream

Forward = Callable[[Sequence[MicroBatch]], list[torch.Tensor]]


def mean_loss(
    forward: Forward,
    stream: Stream,
    topology: Topology,
    iterations: int,
    micro_batches: int,
    *,
    per_token: bool = False,
    interrupted: Callable[[], bool] = lambda: False,
) -> float | None:
    """The mean loss over `iterations` x `micro_batches` micro-batches of every data-parallel rank.

    `forward` maps micro-batches to their losses on the last pipeline stage and to an empty list elsewhere.
    Micro-batches count alike; with `per_token` each counts by its unmasked tokens, so that the result is the loss of a
    token.
    `interrupted` is asked before each iteration but the first, on all ranks; once it says yes the result is None.
    A collective call of the world; every rank gets the result.
    """
    total = torch.zeros(2, dtype=torch.float64, device=topology.device)
    for iteration in range(iterations):
        if iteration and interrupted():
            return None
        batches = stream.take(micro_batches)
        losses = forward(batches)
        if not losses or topology.tensor.rank != 0:
            continue  # every tensor rank has the same losses: the first one counts
        values = torch.stack(losses).double()
        weights = torch.ones_like(values)
        if per_token:
            weights = torch.stack([batch.loss_mask.sum() for batch in batches]).to(values)
        total += torch.stack([(values * weights).sum(), weights.sum()])
    sum_, count = collectives.all_reduce(total, topology.world).tolist()
    return float(sum_ / max(count, 1.0))
