"""Step time of Muon beside Adam's in one run, and the share of Muon's messages that overlaps.

    python benchmarks/muon_step.py [--hidden 512] [--layers 4] [--ranks 2] [--steps 8]
    python benchmarks/muon_step.py --delayed --hidden 128 --layers 12 [--latency-ms 2]

The first form trains the same model with both optimizers on data-parallel ranks, a step of one after
a step of the other, and prints the median of each. Before, it predicts the difference from
Newton-Schulz steps, messages and AdamW that are timed alone.

The second form measures the overlap on tensor 2 x data 2 ranks. A message is complete when a slow
link would have delivered it (a rank has one link for each of its groups), and the work on a matrix
is a sleep as long as a device of this rate would compute, so that the figures do not depend on this
machine's load. Before, it predicts the time as the planner does, from work and messages alone.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing  # noqa: E402

from megatron.config import Config  # noqa: E402
from megatron.data.sampler import MicroBatch  # noqa: E402
from megatron.engine import whole  # noqa: E402
from megatron.engine.engine import Engine, build_executor  # noqa: E402
from megatron.engine.gradients import Bucket  # noqa: E402
from megatron.engine.optimizers import coefficients, newton_schulz  # noqa: E402
from megatron.model.gpt import build_chunks, layer_context  # noqa: E402
from megatron.parallel.collectives import Started  # noqa: E402
from megatron.parallel.sharding import attach, shard  # noqa: E402
from megatron.parallel.topology import Topology  # noqa: E402


def matrices(hidden: int, layers: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of the matrices of GPT-2's layers, queries, keys and values apart."""
    kinds = {
        "q": (hidden, hidden),
        "k": (hidden, hidden),
        "v": (hidden, hidden),
        "dense": (hidden, hidden),
        "up": (4 * hidden, hidden),
        "down": (hidden, 4 * hidden),
    }
    return {f"layers.{i}.{kind}": shape for i in range(layers) for kind, shape in kinds.items()}


def operations(shape: tuple[int, ...], steps: int = 5) -> float:
    """Return the operations of Newton-Schulz steps on a matrix of m x n, m <= n."""
    m, n = sorted(shape)
    return steps * (4.0 * m * m * n + 2.0 * m**3)


def seconds(work: Callable[[], Any], times: int = 5) -> float:
    """Return the median time of a call."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


# -- beside Adam -----------------------------------------------------------------------------------


def beside(rank: int, args: argparse.Namespace) -> None:
    """Predict, then measure, steps of both optimizers on rank `rank` of --ranks."""
    runs = {}
    for name in ("adam", "muon"):
        config = Config.create(
            num_layers=args.layers,
            hidden_size=args.hidden,
            num_attention_heads=args.hidden // 64,
            seq_length=128,
            vocab_size=1024,
            micro_batch_size=1,
            global_batch_size=args.ranks,
            lr=1e-3,
            world_size=args.ranks,
            optimizer=name,
            **({"muon_fp32_matmul_prec": "high"} if name == "muon" else {}),
        )
        topology = Topology.create()
        chunks = build_chunks(config, topology, layer_context(config, topology))
        engine = Engine(config, topology, chunks)
        runs[name] = engine, build_executor(config, topology, chunks, engine)
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(0, 1024, (1, 129), generator=generator)
    ones, places = torch.ones(1, 128), torch.arange(128).expand(1, 128)
    batch = MicroBatch(tokens[:, :-1], tokens[:, 1:], ones, places, None, rank)

    shapes = matrices(args.hidden, args.layers)
    steps = coefficients("quintic", 5)
    alone = {
        shape: seconds(partial(newton_schulz, torch.randn(shape), steps))
        for shape in set(shapes.values())
    }
    elements = sum(a * b for a, b in shapes.values()) // args.ranks
    sent, got = torch.zeros(elements), torch.zeros(elements)
    message = seconds(lambda: dist.all_to_all_single(got, sent)) if args.ranks > 1 else 0.0
    p = torch.nn.Parameter(torch.zeros(elements))
    p.grad = torch.ones(elements)
    adam = torch.optim.AdamW([p], fused=True)
    update = seconds(adam.step)
    copies = seconds(lambda: got.copy_(sent))
    work = sum(alone[shape] for shape in shapes.values()) / args.ranks
    # AdamW has seven passes over its tensors; Muon about six of its own and eight of messages.
    predicted = work + 2 * message + 14 * copies / 2 - update
    if rank == 0:
        print(
            f"predicted: a step of Muon takes {1e3 * predicted:.1f} ms more than Adam's "
            f"(Newton-Schulz {1e3 * work:.1f}, messages {2e3 * message:.1f}, AdamW of the same "
            f"weights {1e3 * update:.1f})",
            flush=True,
        )
    times: dict[str, list[float]] = {name: [] for name in runs}
    for step in range(args.steps + 2):
        for name, (engine, executor) in runs.items():
            if args.ranks > 1:
                dist.barrier()
            start = time.perf_counter()
            executor.train([batch], loss_scale=1.0)
            engine.step(1e-3)
            engine.wait_for_weights()
            if step > 1:
                times[name].append(time.perf_counter() - start)
    if rank == 0:
        medians = {name: statistics.median(found) for name, found in times.items()}
        for name, found in times.items():
            print(
                f"measured: {name} {1e3 * medians[name]:.1f} ms ({1e3 * min(found):.1f} to "
                f"{1e3 * max(found):.1f})"
            )
        print(f"measured: {1e3 * (medians['muon'] - medians['adam']):.1f} ms more", flush=True)


# -- overlap ---------------------------------------------------------------------------------------


class SlowLinks:
    """Replaces whole.start: messages that a slow link delivers. seconds: their sum."""

    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        self.latency_s, self.bytes_per_s = latency_s, bytes_per_s
        self.free: dict[str, float] = {}
        self.seconds, self.count = 0.0, 0

    def start(self, call: bytes, group: Any, size_bytes: int, *args: Any) -> Any:
        work = START(call, group, size_bytes, *args)
        own = size_bytes * (group.size - 1) / group.size / self.bytes_per_s
        self.free[group.kind] = max(self.free.get(group.kind, 0.0), time.perf_counter()) + own
        self.seconds += own + self.latency_s
        self.count += 1
        return _Delivered(work, self.free[group.kind] + self.latency_s)


class _Delivered:
    def __init__(self, work: Started, due: float) -> None:
        self.work, self.due = work, due

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.due - time.perf_counter()))


START = whole.start


def overlap(rank: int, args: argparse.Namespace) -> None:
    """Predict, then measure, the time of all matrices on tensor 2 x data 2 ranks."""
    topology = Topology.create(2)
    tensor = topology.tensor
    shapes = matrices(args.hidden, args.layers)
    parameters = [
        attach(
            torch.nn.Parameter(torch.zeros(rows // 2, columns)),
            shard(name, (rows, columns), 0, tensor.rank, 2),
            2,
        )
        for name, (rows, columns) in shapes.items()
    ]
    flat = torch.zeros(sum(p.numel() for p in parameters))
    bucket = Bucket(parameters, flat, flat.clone(), topology.shards)
    with patch.object(whole, "ROUND", 4 * args.hidden**2):  # rounds as of large matrices
        wholes = whole.WholeParameters([bucket], topology)
    worked = [0.0]

    def sleep(name: str, x: torch.Tensor) -> torch.Tensor:
        worked[0] += (took := operations(x.shape) / (1e9 * args.gflops))
        time.sleep(took)
        return x

    def run() -> tuple[float, SlowLinks]:
        links = SlowLinks(args.latency_ms / 1e3, 1e9 * args.gigabytes_per_s)
        dist.barrier()
        worked[0], start = 0.0, time.perf_counter()
        with patch.object(whole, "start", links.start):
            wholes([bucket.own_weights], sleep)
        dist.barrier()
        return time.perf_counter() - start, links

    def slowest(x: float) -> float:
        value = torch.tensor(x, dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        return float(value)

    links = run()[1]  # counts the messages
    work, messages = slowest(worked[0]), slowest(links.seconds)
    rounds = links.count // 4
    if rank == 0:
        each = messages / rounds
        predicted = max(work, (rounds - 1) * each) + each
        print(
            f"predicted: {1e3 * predicted:.0f} ms (work {1e3 * work:.0f}, messages "
            f"{1e3 * messages:.0f} in {rounds} rounds; {1e3 * (work + messages):.0f} if nothing "
            "overlaps)",
            flush=True,
        )
    took = statistics.median(run()[0] for _ in range(args.steps))
    if rank == 0:
        share = (work + messages - took) / min(work, messages)
        print(f"measured: {1e3 * took:.0f} ms; {100 * share:.0f} % of the shorter part overlaps")


def worker(rank: int, args: argparse.Namespace, port: int, ranks: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks
    )
    (overlap if args.delayed else beside)(rank, args)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--delayed", action="store_true")
    parser.add_argument("--latency-ms", type=float, default=2.0)
    parser.add_argument("--gigabytes-per-s", type=float, default=0.005)
    parser.add_argument("--gflops", type=float, default=1.0)
    args = parser.parse_args()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    ranks = 4 if args.delayed else args.ranks
    torch.multiprocessing.spawn(worker, (args, port, ranks), ranks)


if __name__ == "__main__":
    main()
