"""ZeRO stages of this engine beside torch's FSDP2 and DeepSpeed's ZeRO-3, on the same model.

    python benchmarks/sharded.py [--hidden 512] [--layers 6] [--tokens 512] [--steps 6] [--rounds 3]

Two processes train a Llama in fp32 with AdamW on the same tokens: with stages 1, 2 and 3 here, with
torch.distributed.fsdp.fully_shard on each layer, and with DeepSpeed's engine. In a round each side
is started once, in turn. Prints, as medians over rounds, the time of a step, the growth of a
process's largest resident memory from before the model is built, and the bytes that pass the
loopback device in a step: run it alone (`unshare -n`), or these count other programs, too.

Least bytes of a step over both ranks with n parameters, of which each rank sends half: gradients
once, 4 n, for each micro-batch with stages 2 and 3; weights 4 n in stages 1 and 2, and 8 n in stage
3 for each micro-batch, for the forward and the backward pass. The output layer's weights stay
between the two, so that they move once, and the token table is not needed in a backward pass.

Predicted before measuring, for a micro-batch of 512 tokens: stage 3 takes 1.1 times stage 1 (12 n
bytes in place of 8 n, of which most pass while products are computed), and as much as FSDP2, whose
messages are the same; DeepSpeed's takes 1.5 times ours, since it reduces each gradient as it
appears.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing  # noqa: E402

from megatron.config import Config  # noqa: E402
from megatron.data.sampler import MicroBatch  # noqa: E402
from megatron.engine.deepspeed_engine import import_deepspeed  # noqa: E402
from megatron.engine.engine import Engine, build_executor  # noqa: E402
from megatron.model.gpt import GPTChunk, build_chunks, layer_context  # noqa: E402
from megatron.parallel.layout import Layout  # noqa: E402
from megatron.parallel.sharding import sharding_of  # noqa: E402
from megatron.parallel.topology import Topology  # noqa: E402

RANKS, VOCABULARY = 2, 1024
SIDES = ("stage 1", "stage 2", "stage 3", "FSDP2", "DeepSpeed ZeRO-3")
Step = Callable[[], None]


def configured(args: argparse.Namespace, **fields: Any) -> Config:
    """Return a Llama of the given size."""
    return Config.create(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_attention_heads=args.hidden // 64,
        position_embedding_type="rope",
        normalization="rmsnorm",
        swiglu=True,
        add_bias_linear=False,
        untie_embeddings_and_output_weights=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        seq_length=args.tokens,
        max_position_embeddings=args.tokens,
        vocab_size=VOCABULARY,
        micro_batch_size=1,
        global_batch_size=RANKS * args.micro_batches,
        clip_grad=0.0,
        lr=1e-3,
        **fields,
    )


def batches(args: argparse.Namespace, rank: int) -> Iterator[list[MicroBatch]]:
    """Yield the micro-batches of each step."""
    draw, places = torch.Generator().manual_seed(rank), torch.arange(args.tokens).unsqueeze(0)
    while True:
        found = []
        for _ in range(args.micro_batches):
            tokens = torch.randint(0, VOCABULARY, (1, args.tokens + 1), generator=draw)
            mask = torch.ones(1, args.tokens)
            found.append(MicroBatch(tokens[:, :-1], tokens[:, 1:], mask, places, None, 0))
        yield found


def ours(args: argparse.Namespace, rank: int, stage: int) -> Step:
    """Return the function that takes a step with this engine."""
    config = configured(args, world_size=RANKS, zero_stage=stage)
    topology = Topology.create()
    chunks = build_chunks(config, topology, layer_context(config, topology, late=stage == 3))
    engine = Engine(config, topology, chunks)
    executor, data = build_executor(config, topology, chunks, engine), batches(args, rank)

    def step() -> None:
        executor.train(next(data))
        engine.step(config.optimizer.lr)

    return step


def one_chunk(args: argparse.Namespace) -> tuple[GPTChunk, Config]:
    """Return the whole model, which communicates by itself over no rank."""
    config = configured(args, world_size=RANKS)
    alone = Topology.from_layout(Layout(), 0, device=torch.device("cpu"))
    chunk = build_chunks(config, alone)["0"]
    assert isinstance(chunk, GPTChunk)
    return chunk.train(), config


def with_fsdp(args: argparse.Namespace, rank: int) -> Step:
    """Return the function that takes a step with torch's fully_shard."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    chunk, config = one_chunk(args)
    sharding = sharding_of(chunk.output_weight)

    def mark(module: Any, _: Any) -> None:  # torch's own parameters do not have it
        module.output_weight.sharding = sharding

    chunk.register_forward_pre_hook(mark)
    shard = functools.partial(fully_shard, mesh=init_device_mesh("cpu", (RANKS,)))
    for layer in chunk.layers:
        shard(layer)
    shard(chunk)
    optimizer = torch.optim.AdamW(chunk.parameters(), lr=config.optimizer.lr, fused=True)
    data = batches(args, rank)

    def step() -> None:
        for batch in next(data):
            (chunk(batch, None) / args.micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def with_deepspeed(args: argparse.Namespace, rank: int) -> Step:
    """Return the function that takes a step with DeepSpeed's ZeRO-3."""
    os.environ |= {"LOCAL_RANK": "0", "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    deepspeed = import_deepspeed()
    chunk, config = one_chunk(args)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": args.micro_batches,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 10**4},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(chunk.parameters(), lr=config.optimizer.lr, fused=True)
    engine, *_ = deepspeed.initialize(model=chunk, optimizer=optimizer, config=settings)
    data = batches(args, rank)

    def step() -> None:
        for batch in next(data):
            engine.backward(engine(batch, None))
            engine.step()

    return step


def passed() -> int:
    """Return the bytes that the loopback device has sent."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))


def worker(rank: int, args: argparse.Namespace, side: str, port: int, path: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kind, _, stage = side.partition(" ")
    make = {"FSDP2": with_fsdp, "DeepSpeed": with_deepspeed}.get(kind)
    step = ours(args, rank, int(stage)) if make is None else make(args, rank)
    seconds, sent = [], []
    for _ in range(args.steps):
        dist.barrier()
        start, first = time.perf_counter(), passed()
        step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
        sent.append(passed() - first)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    if rank == 0:
        found = dict(
            step_s=statistics.median(seconds[2:]),
            memory=grown * 1024,
            sent=statistics.median(sent[2:]),
        )
        Path(path).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    defaults = dict(hidden=512, layers=6, tokens=512, micro_batches=1, steps=6, rounds=3)
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--sides", nargs="+", default=SIDES, choices=SIDES)
    args = parser.parse_args()
    chunk, _ = one_chunk(args)
    n = sum(p.numel() for p in chunk.parameters())
    print(f"{n / 1e6:.1f} M parameters, {args.micro_batches} micro-batches of {args.tokens} tokens")
    found: dict[str, list[dict[str, float]]] = {}
    path = Path(f"/tmp/sharded-{time.time_ns()}.json")
    for index in range(args.rounds):
        for side in args.sides[:: 1 if index % 2 == 0 else -1]:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            given = (args, side, port, str(path))
            torch.multiprocessing.spawn(worker, given, nprocs=RANKS)  # type: ignore[no-untyped-call]
            found.setdefault(side, []).append(json.loads(path.read_text()))
    path.unlink()
    print(f"{'':18} {'s a step':>9} {'of stage 3':>11} {'memory, MB':>11} {'sent / 4 n':>11}")
    for side, runs in found.items():
        times, thirds = (
            [run["step_s"] for run in found.get(name, runs)] for name in (side, "stage 3")
        )
        ratio = statistics.median(a / b for a, b in zip(times, thirds, strict=True))
        memory, sent = (statistics.median(run[key] for run in runs) for key in ("memory", "sent"))
        print(
            f"{side:18} {statistics.median(times):9.3f} {ratio:11.2f} {memory / 1e6:11.0f} "
            f"{sent / 4 / n:11.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
