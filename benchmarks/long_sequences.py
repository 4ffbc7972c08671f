"""Context parallelism beside tensor parallelism on long sequences, in one run.

    python benchmarks/long_sequences.py [--length 8192] [--hidden 256] [--layers 2] [--steps 5]

Two processes train the same model on the same sequence: over tensor-parallel ranks with sequence
parallelism, and over context-parallel ranks by ring, also in blocks, and by all-to-all; a step of
one after a step of the others. Prints the median time of each and its ratio to the first, the bytes
that a rank sends for attention, and the bytes that the layers of a rank keep for the backward pass,
also for half of the sequence on one process: with context parallelism these stay the same.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing  # noqa: E402

from megatron.config import Config  # noqa: E402
from megatron.data.sampler import MicroBatch  # noqa: E402
from megatron.engine.engine import Engine, build_executor  # noqa: E402
from megatron.model.gpt import build_chunks, layer_context  # noqa: E402
from megatron.parallel.layout import Layout, Sizes  # noqa: E402
from megatron.parallel.topology import Topology  # noqa: E402

VOCABULARY, RANKS = 512, 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "TP2, sequence-parallel": dict(tensor_model_parallel_size=2, sequence_parallel=True),
    "CP2, ring": dict(context_parallel_size=2),
    "CP2, ring in blocks": dict(context_parallel_size=2, attention_backend="blocked"),
    "CP2, all-to-all": dict(context_parallel_size=2, cp_comm_type="a2a"),
}


def configured(args: argparse.Namespace, length: int, world_size: int, **layout: Any) -> Config:
    """Return a Llama of the given size for sequences of `length` tokens."""
    return Config.create(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(2, args.hidden // 256),
        position_embedding_type="rope",
        normalization="rmsnorm",
        swiglu=True,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        seq_length=length,
        max_position_embeddings=length,
        vocab_size=VOCABULARY,
        micro_batch_size=1,
        global_batch_size=1,
        lr=1e-3,
        world_size=world_size,
        **layout,
    )


def batch_of(length: int) -> MicroBatch:
    """Return one sequence of random tokens."""
    tokens = torch.randint(0, VOCABULARY, (1, length + 1), generator=torch.Generator())
    places = torch.arange(length).unsqueeze(0)
    return MicroBatch(tokens[:, :-1], tokens[:, 1:], torch.ones(1, length), places, None, 0)


def kept(chunks: torch.nn.ModuleDict, length: int) -> int:
    """Return the bytes that a forward pass keeps besides the parameters."""
    own = {p.untyped_storage().data_ptr() for p in chunks.parameters()}
    found: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        chunks["0"](batch_of(length), None, late_loss=True)
    return sum(found.values())


def attention_bytes(config: Config) -> float:
    """Return the bytes that a context rank sends for attention, forward and backward."""
    m, ranks = config.model, config.parallel.context_parallel_size
    rows, e = m.seq_length / ranks, 4
    queries, keys = m.num_attention_heads * m.kv_channels, m.num_key_value_heads * m.kv_channels
    if config.parallel.ring_places > 1:
        return m.num_layers * (ranks - 1) * rows * 2 * keys * (e + e + 4)
    return m.num_layers * 2 * (ranks - 1) / ranks * rows * 2 * (queries + keys) * e


def beside(rank: int, args: argparse.Namespace) -> None:
    """Measure steps of all layouts, one after another."""
    runs, bytes_kept, sent = {}, {}, {}
    for name, layout in LAYOUTS.items():
        config = configured(args, args.length, RANKS, **layout)
        topology = Topology.create(sizes=Sizes.of(config))
        chunks = build_chunks(config, topology, layer_context(config, topology))
        bytes_kept[name] = kept(chunks, args.length)
        if config.parallel.context_parallel_size > 1:
            sent[name] = attention_bytes(config)
        engine = Engine(config, topology, chunks)
        runs[name] = engine, build_executor(config, topology, chunks, engine)
    batch, times = batch_of(args.length), {name: list[float]() for name in runs}
    for step in range(args.steps + 1):
        for name, (engine, executor) in runs.items():
            dist.barrier()
            start = time.perf_counter()
            executor.train([batch], loss_scale=1.0)
            engine.step(1e-3)
            engine.wait_for_weights()
            if step:
                times[name].append(time.perf_counter() - start)
    if rank:
        return
    half = configured(args, args.length // RANKS, 1)
    alone = Topology.from_layout(Layout(), 0, device=torch.device("cpu"))
    chunks = build_chunks(half, alone, layer_context(half, alone))
    print(
        f"one process, {args.length // RANKS} tokens: keeps "
        f"{kept(chunks, args.length // RANKS) / 2**20:.1f} MiB"
    )
    first = statistics.median(next(iter(times.values())))
    fastest = min(next(iter(times.values())))
    for name, found in times.items():
        median = statistics.median(found)
        message = f", sends {sent[name] / 2**20:.1f} MiB for attention" if name in sent else ""
        print(
            f"{name}, {args.length} tokens: {1e3 * median:.0f} ms ({1e3 * min(found):.0f} to "
            f"{1e3 * max(found):.0f}), {median / first:.2f} times the first (fastest steps: "
            f"{min(found) / fastest:.2f}), keeps "
            f"{bytes_kept[name] / 2**20:.1f} MiB{message}",
            flush=True,
        )


def work(rank: int, port: int, args: argparse.Namespace) -> None:
    """Run one of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    beside(rank, args)
    dist.destroy_process_group()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (("length", 8192), ("hidden", 256), ("layers", 2), ("steps", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    torch.multiprocessing.spawn(work, (port, args), nprocs=RANKS)


if __name__ == "__main__":
    main()
