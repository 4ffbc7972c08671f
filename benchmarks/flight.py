"""Cost of the flight recorder: each kind of write, and all writes as a share of a step.

    python -m benchmarks.flight [--hidden 256] [--layers 8] [--sequence 256] [--steps 5]

The writes go to a mapped file as in a run; times are the minimum of several rounds. The step is
that of one rank of tensor 2 x data 2, in one thread of this CPU, over fake process groups that do
nothing. It has no network time, so the share is larger than in a real run, and it is larger for
smaller models.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import timeit
from collections import Counter
from pathlib import Path
from typing import Any

from megatron.parallel.flight import FlightFile, FlightRecorder
from megatron.parallel.launch import Launch

WRITES = {
    "enter": "flight.enter(b'all_reduce', 'tensor', 4096)",
    "enter a wait": "flight.enter(b'all_reduce', 'tensor', 4096, sequence=3)",
    "enter a message": "flight.enter(b'receive', 'pipeline', 4096, peer=3)",
    "leave": "flight.leave()",
    "instruction": "flight.instruction(b'FORWARD', 3, 4)",
    "computed": "flight.computed()",
    "step": "flight.step(4)",
    "alive": "flight.alive()",
}


def seconds_of_writes(rounds: int = 7, number: int = 50_000) -> dict[str, float]:
    """Seconds of each kind of write."""
    with tempfile.TemporaryDirectory() as folder:
        file = FlightFile(Launch(job="benchmark"), Path(folder))
        scope = {"flight": file.recorder}
        times = {
            name: min(timeit.repeat(call, globals=scope, repeat=rounds, number=number)) / number
            for name, call in WRITES.items()
        }
        file.close()
    return times


class Counting(FlightRecorder):
    """Counts its writes by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __getattribute__(self, name: str) -> Any:
        if name in WRITES:
            self.counts[name] += 1
        return super().__getattribute__(name)


def writes_and_seconds_of_a_step(arguments: argparse.Namespace) -> tuple[Counter[str], float]:
    """Return the writes of one step, and the shortest time of a step."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    import megatron

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    config = megatron.Config.create(
        num_layers=arguments.layers,
        hidden_size=arguments.hidden,
        num_attention_heads=4,
        vocab_size=1000,
        seq_length=arguments.sequence,
        max_position_embeddings=arguments.sequence,
        micro_batch_size=1,
        global_batch_size=8,
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        world_size=4,
    )
    counting, plain = Counting(), FlightRecorder()
    found: dict[str, float] = {}
    counts: Counter[str] = Counter()
    for name, flight in (("counted", counting), ("timed", plain)):
        topology = megatron.Topology.create(2, 1, flight=flight)
        chunks = megatron.build_chunks(config, topology)
        engine = megatron.Engine(config, topology, chunks)
        executor = megatron.build_executor(config, topology, chunks, engine)
        tokens = torch.randint(0, 1000, (4, 1, arguments.sequence + 1)).numpy()
        batches = [megatron.make_micro_batch(t, first_sample=i) for i, t in enumerate(tokens)]
        best = float("inf")
        for _ in range(1 + arguments.steps if name == "timed" else 2):
            counting.counts.clear()
            start = time.perf_counter()
            flight.step(1)
            executor.train(batches, loss_scale=engine.loss_scale)
            engine.step(lr=1e-4)
            best = min(best, time.perf_counter() - start)
        found[name] = best
        counts = counts or Counter(counting.counts)
    dist.destroy_process_group()
    return counts, found["timed"]


def main() -> None:
    parser = argparse.ArgumentParser(description="The cost of the flight recorder.")
    for name, value in (("hidden", 256), ("layers", 8), ("sequence", 256), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    times = seconds_of_writes()
    counts, step_s = writes_and_seconds_of_a_step(arguments)
    print(f"{'write':<16}{'us':>8}{'in a step':>12}")
    for name, seconds in times.items():
        print(f"{name:<16}{1e6 * seconds:>8.2f}{counts[name]:>12}")
    total = sum(times[name] * count for name, count in counts.items())
    print(
        f"all of a step: {1e6 * total:.0f} us of {1e3 * step_s:.1f} ms, {100 * total / step_s:.3f} "
        "%"
    )


if __name__ == "__main__":
    main()
