"""Cost of start-up, a step and a checkpoint in Python in a job of thousands of ranks.

    python benchmarks/scale.py [--only schedule] [--repeat 3]

One process plays one rank of a large job (or, if the table says so, the rank with the most work).
Process groups are torch's fake ones, which do nothing: the figures exclude network time, and
include only computation and memory of every rank, or of rank 0. The job is the 1T-parameter model
(128 layers of 25,600) with tensor 8 and pipeline 64: with data 6 it has 3072 ranks, with data 147
the 75,264 of a full Frontier (9,408 nodes of 8). Each item runs in a separate process, which
reports seconds (the minimum of its repeats) and the memory that it added, in MiB: at the end, and at
the peak.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shared import ROOT, parser

if TYPE_CHECKING:
    from megatron.parallel.sharding import Sharding

TENSOR = 8
PIPELINE = 64
LAYERS = 128
VOCABULARY = 51200
DATA = (6, 147)
MICRO_BATCHES = 1600
Row = tuple[str, float, float, float]  # what, seconds, MiB kept, MiB at the peak


def _memory_mb(field: str) -> float:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) / 1024


def measured(what: str, action: Callable[[], Any], repeat: int = 1) -> tuple[Row, Any]:
    """Return (row, result): the least time of `repeat` calls, and memory that the first added."""
    before = _memory_mb("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    start = time.perf_counter()
    result = action()
    seconds = time.perf_counter() - start
    retained = _memory_mb("VmRSS") - before
    peak = _memory_mb("VmHWM") - before
    for _ in range(repeat - 1):
        start = time.perf_counter()
        action()
        seconds = min(seconds, time.perf_counter() - start)
    return (what, seconds, max(0.0, retained), max(0.0, peak)), result


def fake_groups(data: int) -> None:
    """Initialize torch.distributed as a rank in the middle of a job; collectives do nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = TENSOR * PIPELINE * data
    dist.init_process_group("fake", store=FakeStore(), rank=world // 2, world_size=world)


def topology(data: int, repeat: int) -> list[Row]:
    """Time making the process groups and printing the layout."""
    import torch.distributed as dist

    from megatron.parallel.layout import Layout
    from megatron.parallel.topology import Topology

    layout = Layout(TENSOR, PIPELINE, data)
    rank = layout.world_size // 2
    first, _ = measured("torch's world group", lambda: fake_groups(data))
    second, made = measured("the other groups", lambda: Topology.create(TENSOR, PIPELINE))
    third, _ = measured("this rank's view", lambda: Topology.from_layout(layout, rank), repeat)
    devices = [f"frontier{r // 8:05d}:cuda:{r % 8}" for r in range(layout.world_size)]
    fourth, _ = measured("printing the layout", lambda: made.describe(devices), repeat)
    dist.destroy_process_group()
    return [first, second, third, fourth]


def schedule(data: int, repeat: int) -> list[Row]:
    """Time building one rank's instructions of a step."""
    from megatron.pipeline.schedule import build_rank_schedule

    rows = []
    for name, chunks in (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1)):
        build = lambda name=name, chunks=chunks: build_rank_schedule(  # noqa: E731
            name, PIPELINE, chunks, MICRO_BATCHES, PIPELINE // 2
        )
        rows.append(measured(f"{name}, {MICRO_BATCHES} micro-batches", build, repeat)[0])
    return rows


def executor(data: int, repeat: int) -> list[Row]:
    """Time a step's Python code, with tiny computations and messages that are dropped."""
    import torch

    from megatron.parallel.topology import Topology
    from megatron.pipeline.executor import Executor

    fake_groups(data)
    made = Topology.create(TENSOR, PIPELINE)
    weight = torch.ones(4, requires_grad=True)
    stage = made.pipeline.rank

    def forward(_: Any, hidden: Any) -> Any:
        return hidden * weight

    run = Executor(made, {stage: forward}, "1f1b", ((4,), torch.float32))
    micro_batches = list(range(MICRO_BATCHES))
    first, _ = measured(
        f"first step of {MICRO_BATCHES} micro-batches", lambda: run.train(micro_batches)
    )
    later, _ = measured("a later step", lambda: run.train(micro_batches), repeat)
    return [first, later]


def engine(data: int, repeat: int) -> list[Row]:
    """Time engine and optimizer of a stage of 2 small layers, over fake groups: the overhead."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch

    from megatron.config import Config
    from megatron.engine.engine import Engine
    from megatron.model.gpt import build_chunks
    from megatron.parallel.sharding import sharding_of
    from megatron.parallel.topology import Topology

    fake_groups(data)
    made = Topology.create(TENSOR, PIPELINE)
    config = Config.create(
        num_layers=LAYERS,
        hidden_size=64,
        num_attention_heads=8,
        seq_length=16,
        max_position_embeddings=16,
        vocab_size=512,
        micro_batch_size=1,
        global_batch_size=MICRO_BATCHES * data,
        lr=1e-4,
        tensor_model_parallel_size=TENSOR,
        pipeline_model_parallel_size=PIPELINE,
        world_size=made.world.size,
        train_iters=1,
    )
    chunks = build_chunks(config, made)
    for p in chunks.parameters():  # no pass will show how to sum their gradients
        p.sharding = replace(sharding_of(p), partial_gradient=False)  # type: ignore[attr-defined]
    first, of_stage = measured("making the engine", lambda: Engine(config, made, chunks))

    def step() -> None:
        for p in chunks.parameters():
            p.grad = torch.zeros_like(p)
        of_stage.step(1e-4)

    step()
    return [first, measured("a step of the optimizer", step, repeat)[0]]


def rendezvous(data: int, repeat: int) -> list[Row]:
    """Time rank 0 comparing what every rank wrote to the store, which is in this process."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from megatron.parallel.launch import Launch
    from megatron.parallel.rendezvous import Rendezvous

    world = TENSOR * PIPELINE * data
    first = Rendezvous(Launch(rank=0, world_size=world), torch.device("cpu"), timedelta(seconds=60))
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    first.store = dist.PrefixStore("job", store)
    for rank in range(world):
        participant = {
            "node": f"frontier{rank // 8:05d}",
            "pid": 1,
            "device": "cuda:0",
            "identity": str(rank % 8),
            "backend": "gloo",
            "alike": {"settings": "a", "files": "b"},
            "number": None,
            "address": (),
            "near": (),
        }
        first.store.set(f"participant/{rank}", json.dumps(participant))
    judge = lambda: first._judge(time.monotonic() + 60)  # noqa: E731
    row, verdict = measured("rank 0 compares all ranks", judge, repeat)
    assert "error" not in verdict, verdict
    return [row]


@functools.cache
def stage_parameters(tensor: int, stage: int) -> list[Sharding]:
    """List the records of a rank's parameters; allocates no memory."""
    import torch

    from megatron.config import Config
    from megatron.model.gpt import build_chunks
    from megatron.parallel.layout import Layout
    from megatron.parallel.sharding import sharding_of
    from megatron.parallel.topology import Topology

    layout = Layout(TENSOR, PIPELINE)
    sizes = dict(tensor_model_parallel_size=TENSOR, pipeline_model_parallel_size=PIPELINE)
    config = Config.create("gpt-1t", **sizes, vocab_size=VOCABULARY, world_size=layout.world_size)
    rank = layout.rank(tensor=tensor, data=0, pipeline=stage)
    topology = Topology.from_layout(layout, rank, device=torch.device("meta"))
    records = [sharding_of(p) for p in build_chunks(config, topology).parameters()]
    return [s for s in records if not s.tied or stage == 0]  # the last stage has a copy


def written(tensor: int, stage: int, data_rank: int, data: int) -> dict[str, Any]:
    """Return the shards in one rank's file: ZeRO divides each flat parameter group equally."""
    from megatron.checkpoint.shards import Shard
    from megatron.engine.optimizer import boxes

    rank = (stage * data + data_rank) * TENSOR + tensor
    parameters = stage_parameters(tensor, stage)
    stored: dict[str, Any] = {}
    at_byte = 0
    for decays in (True, False):
        group = [s for s in parameters if s.decay == decays]
        each = -(-sum(s.elements for s in group) // data)
        low = data_rank * each
        at = 0
        for s in group:
            size = s.elements
            local_boxes = boxes(
                min(max(low - at, 0), size), min(max(low + each - at, 0), size), s.shape
            )
            at += size
            if not local_boxes or (s.dim is None and tensor):
                continue
            for kind in ("master", "exp_avg", "exp_avg_sq"):
                rows = []
                for offset, sizes in local_boxes:
                    offsets = tuple(map(add, s.offset, offset))
                    length = 4 * math.prod(sizes) + 1200
                    rows.append(
                        Shard(
                            offsets, sizes, f"__{rank}_0.distcp", at_byte, length, f"{at_byte:032x}"
                        )
                    )
                    at_byte += length
                shards = {"shape": s.global_shape, "dtype": "float32", "boxes": rows}
                stored[f"{kind}.{s.name}"] = shards
    return stored


def _all_written(data: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the shards of each data-parallel group, in model-parallel order."""
    for stage in range(PIPELINE):
        for tensor in range(TENSOR):
            yield [written(tensor, stage, d, data) for d in range(data)]


def checkpoint(data: int, repeat: int) -> list[Row]:
    """Time handling shards: a rank, a data group's first rank, rank 0, and a loading rank.

    The time of data sent over the network is that of pickling.
    """
    import pickle

    from megatron.checkpoint import shards
    from megatron.checkpoint.files import read_manifest
    from megatron.checkpoint.save import METADATA_MAX_RANKS

    world = TENSOR * PIPELINE * data
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [
            measured("save: a rank's own list", lambda: written(3, 31, data // 2, data), repeat)[0]
        ]
        wire = [pickle.dumps(stored) for stored in next(_all_written(data))]
        row, _ = measured(
            "save: first of a data group, all it does",
            lambda: _lead(folder, [pickle.loads(p) for p in wire]),
            repeat,
        )
        rows.append(row)
        without_metadata = world > METADATA_MAX_RANKS
        parts_of_all = []
        for number, lists in enumerate(_all_written(data)):
            stored = shards.merged(lists)
            named = shards.write_piece(folder, number, stored)
            parts_of_all.append(
                pickle.dumps((named, shards.totals(stored), {} if without_metadata else stored))
            )
        rows.append(
            measured(
                "save: rank 0, all it does",
                lambda: _finish(folder, parts_of_all, without_metadata),
                repeat,
            )[0]
        )
        size = sum(p.stat().st_size for p in folder.iterdir()) / 2**20
        rows.append((f"files of boxes: {len(list(folder.iterdir()))}, MiB in all", 0.0, size, size))
        names = [
            f"{kind}.{s.name}"
            for kind in ("master", "exp_avg", "exp_avg_sq")
            for s in stage_parameters(3, 31)
        ]
        row, _ = measured(
            "load: a rank reads where its boxes are",
            lambda: shards.read_stored(read_manifest(folder), names),
        )
        rows.append(row)
    return rows


def _lead(folder: Path, lists: list[dict[str, Any]]) -> None:
    from megatron.checkpoint import shards

    stored = shards.merged(lists)
    shards.write_piece(folder, 0, stored)
    shards.totals(stored)


def _finish(folder: Path, received: list[bytes], without_metadata: bool) -> None:
    import pickle

    from megatron.checkpoint import shards
    from megatron.checkpoint.files import METADATA, write_manifest

    pieces_of_groups = [pickle.loads(message) for message in received]
    shards.check_complete([totals for _, totals, _ in pieces_of_groups])
    known = dict(named for named, _, _ in pieces_of_groups)
    known.update([shards.write_index(folder, [totals for _, totals, _ in pieces_of_groups])])
    if not without_metadata:
        shards.write_metadata(folder, shards.merged(stored for _, _, stored in pieces_of_groups))
    write_manifest(folder, [*known, *([] if without_metadata else [METADATA])], known)


ITEMS = {f.__name__: f for f in (topology, schedule, executor, engine, rendezvous, checkpoint)}


def in_own_process(item: str, data: int, repeat: int) -> list[Row]:
    """Return the rows of an item, or one with the reason why there are none."""
    words = ["--item", item, "--data", str(data), "--repeat", str(repeat)]
    command = [sys.executable, __file__, *words]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return [(f"did not run: {reason[:90]}", math.nan, math.nan, math.nan)]
    return [tuple(row) for row in json.loads(done.stdout.strip().splitlines()[-1])]


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--only", nargs="+", choices=ITEMS, default=[*ITEMS], help="default: all")
    made.add_argument(
        "--repeat", type=int, default=3, help="number of calls, of which the fastest counts"
    )
    sizes = "data-parallel sizes of the jobs"
    made.add_argument("--sizes", type=int, nargs="+", default=DATA, help=sizes)
    made.add_argument("--item", choices=ITEMS, help=argparse.SUPPRESS)
    made.add_argument("--data", type=int, help=argparse.SUPPRESS)
    args = made.parse_args()
    if args.item:
        print(json.dumps(ITEMS[args.item](args.data, args.repeat)))
        return
    worlds = [TENSOR * PIPELINE * data for data in args.sizes]
    print(f"{'':54}" + "".join(f"{f'{world} ranks':>32}" for world in worlds) + f"{'growth':>9}")
    print(f"{'':54}" + f"{'s':>14}{'MiB':>9}{'peak':>9}" * len(worlds) + f"{'of s':>9}")
    for item in args.only:
        items = [in_own_process(item, data, args.repeat) for data in args.sizes]
        print(item)
        for rows in zip(*items, strict=False):
            cells = "".join(f"{s:14.5f}{retained:9.1f}{peak:9.1f}" for _, s, retained, peak in rows)
            growth = f"{rows[-1][1] / rows[0][1]:9.1f}" if rows[0][1] else ""
            print(f"  {rows[0][0]:52}{cells}{growth}", flush=True)


if __name__ == "__main__":
    main()
