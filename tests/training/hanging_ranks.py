"""Ranks that train a toy over each kind of group and hang in different ways, with a watchdog."""
from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

from megatron.errors import LaunchError
from megatron.parallel.collectives import all_reduce
from megatron.parallel.launch import connect, detect_launch
from megatron.parallel.rendezvous import Rendezvous
from megatron.parallel.topology import Topology
from megatron.pipeline.executor import Executor
from megatron.training import watchdog
from megatron.training.watchdog import Watchdog

TIMEOUT_S = 3.0
SHAPE = (2, 4)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def loop() -> None:
    endless_loop()


def endless_loop() -> None:
    while True:
        pass


def hold_interpreter() -> None:
    """A call of C that keeps the interpreter's lock for days."""
    sum(range(10**14))


def stop_for_good() -> None:
    """As on a node that lost its network: no neighbour can end this process. It ends after the others."""
    wait = f"for p in {os.environ['OTHERS']}; do while [ -e /proc/$(cat $p) ]; do sleep 0.1; done; done"
    subprocess.Popen(["sh", "-c", f"{wait}; kill -KILL {os.getpid()}"])
    stop()


WAYS: dict[str, Callable[[], None]] = {"stop": stop, "loop": loop, "hold": hold_interpreter, "node": stop_for_good}


class Toy:
    """One step: forward and backward through the pipeline, a sum over the tensor group in each pass, a sum of the
    gradient over the data-parallel group, a sum over the world."""

    def __init__(self, topology: Topology, victim: bool, way: str) -> None:
        self.topology, self.victim, self.way = topology, victim, way
        self.weight = torch.nn.Parameter(torch.ones(SHAPE[1]))
        stage, last = topology.pipeline.rank, topology.pipeline.size - 1

        def chunk(micro_batch: int, hidden: torch.Tensor | None) -> torch.Tensor:
            if self.victim and self.step == 3 and micro_batch == 1 and self.way in WAYS:
                WAYS[self.way]()
            x = torch.ones(SHAPE) if hidden is None else hidden
            all_reduce(torch.ones(8), topology.tensor)
            y = x * self.weight
            return y.mean() if stage == last else y

        self.step = 0
        self.executor = Executor(topology, {stage: chunk}, "1f1b", 1, SHAPE, torch.float32)

    def run(self, step: int) -> None:
        self.step = step
        self.topology.flight.step(step)
        self.executor.train([0, 1, 2])
        if not (self.way == "skip" and self.victim and step == 3):
            all_reduce(torch.ones(16), self.topology.data)
        all_reduce(torch.ones(4), self.topology.world)


def train_on_two_nodes(rank: int, victims: tuple[int, ...], way: str, folder: str) -> str:
    """Four data-parallel ranks on two nodes, which share no flight file."""
    os.environ.update(SLURMD_NODENAME=f"node{rank // 2}", LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    numbers = [os.path.join(folder, f"process-{other}") for other in range(4)]
    Path(numbers[rank]).write_text(str(os.getpid()))
    os.environ["OTHERS"] = " ".join(number for other, number in enumerate(numbers) if other not in victims)
    return train(rank, 1, 1, rank if rank in victims else -1, way, folder)


def train(rank: int, tensor: int, pipeline: int, victim: int, way: str, folder: str) -> str:
    """Returns "done" only where nothing hung."""
    torch.set_num_threads(1)
    watchdog._ANSWER_S, watchdog._NODE_S = 3.0, 0.5
    with connect(detect_launch(), timedelta(seconds=180)) as meeting:
        topology = Topology.create(tensor, pipeline, timeout=timedelta(seconds=180), flight=meeting.flight)
        try:
            steps(Toy(topology, rank == victim, way), meeting, Path(folder))
        except (LaunchError, RuntimeError) as error:  # as training.setup does: the watchdog knows more
            raise meeting.explain(error) from error
    return "done"


def steps(toy: Toy, meeting: Rendezvous, folder: Path) -> None:
    topology = toy.topology
    toy.run(0)
    watch = Watchdog(topology.flight, meeting, topology, TIMEOUT_S, folder, first_s=1000.0)
    watch.start()
    watch.patient = False
    for step in range(1, 6):
        toy.run(step)
    if toy.way == "slow" and toy.victim:  # longer than the limit, but with signs of life
        for _ in range(8):
            time.sleep(TIMEOUT_S / 3)
            topology.flight.alive()
    if toy.way == "first":  # for the first time, and so without signs of life
        watch.patient = True
        time.sleep(2 * TIMEOUT_S if toy.victim else 0)
    all_reduce(torch.ones(1), topology.world)
    watch.stop()
