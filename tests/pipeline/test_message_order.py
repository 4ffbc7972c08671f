"""Order in which the executor posts messages and lets gradients be summed.

There is one process, with a made-up neighbour.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.parallel.flight import FlightRecorder
from megatron.pipeline import executor as executor_module
from megatron.pipeline.executor import Executor
from megatron.pipeline.orders import COMPUTE
from megatron.pipeline.schedule import build_schedule


class Recorder:
    """Stand-in for StageMessages that logs what is posted and awaited; all tensors received are ones."""

    log: list[Any]

    def __init__(self, pipeline):
        pass

    def send(self, instruction, tensor):
        self.log.append(instruction)

    def receive(self, instruction, *_):
        self.log.append(instruction)

    def take(self, instruction):
        self.log.append(("take", instruction))
        return torch.ones(3)

    def finish(self):
        self.log.append("finish")


@pytest.mark.parametrize(
    "name, chunks, rank", [("1f1b", 1, 1), ("interleaved", 2, 0), ("interleaved", 2, 3)]
)
def test_messages_are_posted_in_the_order_of_the_schedule(name, chunks, rank, monkeypatch):
    """Messages are posted in the order of the schedule.

    The log of a rank of four equals its schedule without the computations.
    """
    log = []
    monkeypatch.setattr(executor_module, "StageMessages", Recorder)
    monkeypatch.setattr(Recorder, "log", log, raising=False)
    weight = torch.nn.Parameter(torch.ones(3))
    last = 4 * chunks - 1

    def stage(number):
        def run(_, hidden):
            output = weight * (torch.ones(3) if hidden is None else hidden)
            return output.sum() if number == last else output

        return run

    topology = SimpleNamespace(
        pipeline=SimpleNamespace(size=4, rank=rank),
        data=SimpleNamespace(size=1),
        device=torch.device("cpu"),
        flight=FlightRecorder(),
    )
    stages = {c * 4 + rank: stage(c * 4 + rank) for c in range(chunks)}
    Executor(topology, stages, name, ((3,), torch.float32)).train(list(range(8)))
    expected = [
        *(i for i in build_schedule(name, 4, chunks, 8)[rank] if i.op not in COMPUTE),
        "finish",
    ]
    assert [
        entry for entry in log if not (isinstance(entry, tuple) and entry[0] == "take")
    ] == expected
