"""Overlap of tensor-parallel messages with products, measured on delayed links and predicted.

    python benchmarks/tensor_overlap.py [--chunks 1 2 4 8] [--product-ms 40] [--message-ms 36] [--latency-ms 2]
    python benchmarks/tensor_overlap.py --real --hidden 1024 --tokens 1024 --dtype bfloat16

Two processes run forward and backward through a feed-forward block (column parallel, row parallel:
six products), with and without sequence parallelism, in several numbers of chunks. By default a
product is a sleep of --product-ms in total, so that other processes on the machine do not matter;
with --real it is computed by one thread, at the rate measured with one chunk and no delay.
--message-ms is the time of one gathering or scattering of the block's tokens on the modelled link;
an all-reduce takes twice as long.
"""

from __future__ import annotations

import argparse
import itertools
import os
import socket
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from delayed_links import install
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.layers import linear
from megatron.layers.context import LayerContext, ParameterFactory, normal
from megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron.parallel.topology import Topology

TP = 2
SEQUENCE_PARALLEL = (True, False)


class Sleeping(TorchDispatchMode):
    """Make every matrix product take its time on a device with this rate of products per rank."""

    def __init__(self, seconds_per_flop: float) -> None:
        super().__init__()
        self.seconds_per_flop = seconds_per_flop

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.mm:
            a, b = args[:2]
            time.sleep(2 * a.shape[0] * a.shape[1] * b.shape[1] * self.seconds_per_flop)
        return func(*args, **(kwargs or {}))


def predicted_s(
    chunks: int, product_s: float, message_s: float, latency_s: float, sequence_parallel: bool
) -> float:
    """Predict the seconds of forward and backward with a queue of products and one of messages."""
    clock, link, arrivals = 0.0, 0.0, []  # now, link free, arrival of each message
    t, m = product_s / chunks, message_s / chunks

    def product(seconds: float) -> None:
        nonlocal clock
        clock += seconds

    def send(seconds: float) -> int:
        nonlocal link
        link = max(link, clock) + seconds
        arrivals.append(link + latency_s)
        return len(arrivals) - 1

    def wait(*messages: int) -> None:
        nonlocal clock
        clock = max(clock, *(arrivals[i] for i in messages))

    def gathered() -> None:
        if not sequence_parallel:
            return product(product_s)
        following = send(m)
        for i in range(chunks):
            arrived, following = following, send(m) if i + 1 < chunks else -1
            wait(arrived)
            product(t)

    def summed() -> list[int]:
        sent = []
        for _ in range(chunks):
            product(t)
            sent.append(send(m if sequence_parallel else 2 * m))
        return sent

    gathered()  # forward of the column-parallel layer
    wait(*summed())  # and of the row-parallel one
    gathered()  # backward: dx of the row-parallel layer,
    product(product_s)  # its dW,
    whole = [send(message_s)] if sequence_parallel else []
    sums = summed()  # dx of the column-parallel layer
    if whole:
        wait(*whole)
    product(product_s)
    wait(*sums)
    return clock


def _blocks(
    topology: Topology, options: argparse.Namespace, chunks: int, sequence_parallel: bool
) -> Any:
    parameters = ParameterFactory(1, topology.tensor.rank, TP, topology.device)
    context = LayerContext(topology.tensor, parameters, sequence_parallel, chunks=chunks)
    hidden, dtype = options.hidden, getattr(torch, options.dtype)
    up = ColumnParallelLinear(context, "up", (4 * hidden, hidden), normal(0.02), bias=False).to(
        dtype
    )
    down = RowParallelLinear(context, "down", (hidden, 4 * hidden), normal(0.02), bias=False).to(
        dtype
    )
    rows = options.tokens // TP if sequence_parallel else options.tokens
    x = torch.randn(rows, 1, hidden, dtype=dtype, requires_grad=True)
    return lambda: down(up(x))[0].sum().backward()


def _time(step: Any) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def _rank(rank: int, port: int, options: argparse.Namespace) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(TP),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    topology = Topology.create(TP, 1)
    flops = 2 * options.tokens * options.hidden * 4 * options.hidden // TP  # of a product of a rank
    product_s = options.product_ms / 1e3
    if options.real:
        step = _blocks(topology, options, 1, True)
        product_s = min(_time(step) for _ in range(5)) / 6
    else:
        linear.LEAST_TOKENS = 1
    message_s, latency_s = options.message_ms / 1e3, options.latency_ms / 1e3
    element = torch.empty(0, dtype=getattr(torch, options.dtype)).element_size()
    wire = options.tokens * options.hidden * element * (TP - 1) / TP
    install(latency_s, wire / message_s / 1e9)
    cases = list(itertools.product(SEQUENCE_PARALLEL, options.chunks))
    steps = [_blocks(topology, options, chunks, sp) for sp, chunks in cases]
    times: list[list[float]] = [[] for _ in cases]
    with Sleeping(product_s / flops) if not options.real else torch.enable_grad():
        for _ in range(options.repeats):
            for step, found in zip(steps, times, strict=True):
                found.append(_time(step))
    if rank == 0:
        print("\n".join(_table(cases, times, product_s, message_s, latency_s)))
    dist.destroy_process_group()


def _table(
    cases: list[tuple[bool, int]],
    times: list[list[float]],
    product_s: float,
    message_s: float,
    latency_s: float,
) -> Iterator[str]:
    yield (
        f"product {1e3 * product_s:.1f} ms, message {1e3 * message_s:.1f} ms, latency "
        f"{1e3 * latency_s:.1f} ms"
    )
    yield "sequence parallel  chunks  predicted ms  measured ms (median)  min"
    for (sp, chunks), found in zip(cases, times, strict=True):
        forecast = predicted_s(chunks, product_s, message_s, latency_s, sp)
        yield (
            f"{'yes' if sp else 'no':<17}  {chunks:6}  {1e3 * forecast:12.1f}  "
            f"{1e3 * statistics.median(found):20.1f}  {1e3 * min(found):.1f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument(
        "--product-ms", type=float, default=40.0, help="time of one whole product, if it is a sleep"
    )
    parser.add_argument("--message-ms", type=float, default=36.0)
    parser.add_argument("--latency-ms", type=float, default=2.0)
    parser.add_argument("--real", action="store_true", help="compute the products")
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(_rank, (port, options), nprocs=TP)


if __name__ == "__main__":
    main()
