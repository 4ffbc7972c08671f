"""Process of benchmarks/overlap.py: run steps under delays, and record computations and waits.

    RANK=0 WORLD_SIZE=2 ... python benchmarks/overlap_worker.py JOB.json RESULT.json

The job is a dictionary with "kind" ("sleeps" or "program"), "delays" as [latency in seconds,
gigabytes per second or null] pairs, "rounds", and what the kind needs. A window is recorded for
each delay in each round, one delay after the other, so that disturbances of the machine affect all
of them.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

import delayed_links  # noqa: E402

from megatron.parallel.deferred_gradients import WeightGradients  # noqa: E402
from megatron.parallel.topology import Topology  # noqa: E402
from megatron.pipeline import executor as executor_module  # noqa: E402
from megatron.pipeline import schedule as schedule_module  # noqa: E402
from megatron.pipeline.executor import Exchange, Executor  # noqa: E402
from megatron.pipeline.orders import Instruction  # noqa: E402


def record(
    job: dict[str, Any], step: Callable[[], None], computed: list[Any]
) -> list[dict[str, Any]]:
    """Run every window of the job; `step` is a training step, `computed` collects its spans."""
    windows = []
    for latency_s, gigabytes_per_s in job["delays"] * job["rounds"]:
        dist.barrier()
        computed.clear()
        links = delayed_links.install(
            latency_s, math.inf if gigabytes_per_s is None else gigabytes_per_s
        )
        started = time.monotonic()
        for _ in range(job["steps"]):
            step()
        ended = time.monotonic()
        links.uninstall()
        known = [message for message in links.messages if message.known.wait(60)]
        windows.append(
            {
                "delay": [latency_s, gigabytes_per_s],
                "started": started,
                "ended": ended,
                "computed": list(computed),
                "messages": [
                    [
                        m.kind,
                        m.link,
                        m.size_bytes,
                        m.posted,
                        m.begun,
                        m.departs,
                        m.arrives,
                        m.waited,
                    ]
                    for m in known
                ],
            }
        )
    return windows


class Sleeper(torch.autograd.Function):
    """A layer whose passes take their time and nothing else."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, pipeline: SleepingPipeline, index: int, stage: int
    ) -> torch.Tensor:
        ctx.of = pipeline, index, stage
        pipeline.compute("F", index, stage)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        pipeline, index, stage = ctx.of
        if pipeline.queue.deferring:
            pipeline.compute("I", index, stage)
            pipeline.queue.add(lambda: pipeline.compute("W", index, stage))
        else:
            pipeline.compute("B", index, stage)
        return gradients[0], None, None, None


class SleepingPipeline:
    """Stages that sleep for the job's times of F, B, I and W."""

    def __init__(self, job: dict[str, Any], topology: Topology) -> None:
        self.queue = WeightGradients()
        self.computed: list[tuple[str, float, float]] = []
        self._seconds = job["seconds"]
        self._first = torch.zeros(job["numel"], requires_grad=True)
        size, rank = topology.pipeline.size, topology.pipeline.rank
        self._last = size * job["chunks"] - 1
        stages = {c * size + rank: self.stage(c * size + rank) for c in range(job["chunks"])}
        self.executor = Executor(
            topology,
            stages,
            job["schedule"],
            ((job["numel"],), torch.float32),
            self.queue,
        )
        self._micro_batches = list(range(job["micro_batches"]))

    def compute(self, op: str, micro_batch: int, stage: int) -> None:
        started = time.monotonic()
        until = started + self._seconds[op]
        time.sleep(self._seconds[op])
        self.computed.append((f"{op}{micro_batch}", started, max(until, time.monotonic())))

    def stage(self, stage: int) -> Callable[[int, torch.Tensor | None], torch.Tensor]:
        def run(index: int, hidden: torch.Tensor | None) -> torch.Tensor:
            output: torch.Tensor = Sleeper.apply(
                self._first if hidden is None else hidden, self, index, stage
            )
            return output.sum() if stage == self._last else output

        return run

    def step(self) -> None:
        self.executor.train(self._micro_batches)
        dist.barrier()


class PostedAtNeed(Exchange):
    """Post receives when the message is needed, as a reference for posting ahead."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._wanted: dict[Instruction, tuple[Any, ...]] = {}

    def receive(self, instruction: Instruction, *of: Any) -> None:
        self._wanted[instruction] = of

    def take(self, instruction: Instruction) -> torch.Tensor:
        super().receive(instruction, *self._wanted.pop(instruction))
        return super().take(instruction)


def sleeps(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Build a pipeline of sleeping stages; without "ahead", messages are posted late as in `late`."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    topology = Topology.create(1, dist.get_world_size())
    with mock.patch.object(
        executor_module, "Exchange", PostedAtNeed if job["late"] == "at need" else Exchange
    ):
        if job["late"] == "other order":
            with mock.patch.object(schedule_module, "planned_latency", nominal):
                return run_sleeps(job, topology)
        return run_sleeps(job, topology)


def nominal(chunks: int) -> float:
    """The sequence of messages of a step in which they take no time."""
    return 0.0


def run_sleeps(job: dict[str, Any], topology: Topology) -> list[dict[str, Any]]:
    pipeline = SleepingPipeline(job, topology)
    pipeline.step()
    return record(job, pipeline.step, pipeline.computed)


class Paced(TorchDispatchMode):
    """Make products sleep for their time at this many GFLOP/s, without using a core."""

    def __init__(self, gflops_per_s: float) -> None:
        super().__init__()
        self._rate = gflops_per_s * 1e9

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        started = time.monotonic()
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in PRODUCTS:
            matrices = [x for x in args if isinstance(x, torch.Tensor)][-2:]
            flops = 2 * matrices[0].numel() * matrices[1].shape[-1]
            time.sleep(max(0.0, flops / self._rate - (time.monotonic() - started)))
        return result


PRODUCTS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_"}


def program(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Run pretrain_gpt.py with the job's arguments step by step, with paced products if requested."""
    from megatron.config import parse_args
    from megatron.parallel.launch import detect_launch
    from megatron.parallel.layout import DEFAULT_ORDER
    from megatron.parallel.rendezvous import connect
    from megatron.training.run.host import share_cores
    from megatron.training.run.process import Signals
    from megatron.training.run.setup import assemble, connect_groups
    from megatron.training.run.step import train_step

    launch = detect_launch()
    config = parse_args(job["arguments"], launch.world_size)
    timeout = timedelta(seconds=120)
    rendezvous = connect(launch, timeout, config.parallel.distributed_backend)
    share_cores(rendezvous.device, launch.local_world_size)
    topology = connect_groups(config, rendezvous, timeout, DEFAULT_ORDER)
    run = assemble(config, topology, Signals(enabled=False))
    with Paced(job["gflops_per_s"]) if job["gflops_per_s"] else nullcontext():
        for _ in range(2):
            train_step(run)
        return record(job, lambda: train_step(run), [])


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(sys.argv[1]).read_text())
    windows = {"sleeps": sleeps, "program": program}[job["kind"]](job)
    Path(sys.argv[2]).write_text(json.dumps(windows))
    dist.barrier()


if __name__ == "__main__":
    main()
