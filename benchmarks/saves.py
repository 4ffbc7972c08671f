"""Cost of checkpoints beside torch.distributed.checkpoint (DCP) and a plain copy of the same bytes.

    python benchmarks/saves.py [--sizes tiny 30M] [--ranks 1 2] [--parts save] [--folder /dev/shm]

Each size and number of ranks is a job of its own, which trains a GPT by the real loop (train_step,
between_steps) with ZeRO-1 over data-parallel ranks. Its sides take turns, in the opposite order in
each second round. All have the same bytes of fp32 weights and moments: ours the engine's state, DCP
tensors divided along their first dimension (DTensor, as fully_shard has them), the copy the bytes
of our shards, in one write for each and one file for each rank, then fsync. Times are those of the
slowest rank. Files of earlier turns are removed, and the disk is synced, before the clock starts.

save         training waits until the checkpoint is complete
background   steps without a save, then a save in the background and steps until it is complete.
             Stall: the time that training does not spend in steps. Cost: the stall, and the time by
             which the steps meanwhile are longer
load         into the engine or DCP's tensors, by `read` into memory that exists. Files are dropped
             from the page cache first where the file system has one (not in /dev/shm)
fixed        the first save of the job, and where the time of later ones goes, of a tiny model:
             number and time of fsyncs and of collectives, on rank 0

DCP's settings: "default"; "threads": thread_count=2, per_thread_copy_ahead=2^28 and a cached plan;
"many files": these and single_file_per_rank=False; "no sync": these and sync_files=False, which may
lose the checkpoint in a power failure. In the background "reused": one stager for all saves, whose
memory is thus allocated once; "process": also in a process of its own.

Expected before the first measurement, for 125M parameters (1.49 GB) in memory, one process on 2
cores of an AMD EPYC: the copy 0.45 s (3.3 GB/s); our save 0.52 s, DCP's 0.8 s, as it computes
CRC-32; our stall 0.1 s, the copy in memory at 15 GB/s; DCP's 0.6 s, as it allocates its copy anew,
reused 0.15 s; our load 0.4 s, DCP's 0.8 s, plain reading 0.3 s. On a disk of 280 MB/s all saves take
5.5 s. Fixed: ours 10 ms with one rank and 30 ms with four in memory, 50 and 80 ms on the disk, of
which 9 fsyncs are the most; DCP 10 and 30 ms, as it syncs only 2 files. The first save of a job
takes half a second more, for imports. Steps are longer by a third while a thread writes, on 2 cores
that both train.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import shared
from benchmarks.shared import ROOT, Record, Table, markdown, parser
from megatron.planner.subprocesses import environment

if TYPE_CHECKING:
    import torch

    from megatron.checkpoint.tensors import Tensors
    from megatron.training.run.state import Run

SHAPES = {  # layers, hidden size, heads, vocabulary, sequence length
    "tiny": (2, 32, 4, 100, 16),
    "2M": (4, 192, 4, 2000, 128),
    "30M": (6, 512, 8, 20_000, 256),
    "125M": (12, 768, 12, 50_257, 512),
}
PARTS = ("save", "background", "load", "fixed")
THREADS = 2
AHEAD = 1 << 28
QUIET_STEPS = 4  # steps without a save before each save in the background
LIMIT_S = 600.0
Results = dict[str, dict[str, list[Record]]]  # for each part and side, a record of each round


def arguments(size: str, ranks: int, save: Path) -> list[str]:
    """Return the flags of a training."""
    layers, hidden, heads, vocabulary, sequence = SHAPES[size]
    return (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --seq-length "
        f"{sequence} --max-position-embeddings {sequence} --vocab-size {vocabulary} --bf16 "
        f"--micro-batch-size 1 --global-batch-size {ranks} --train-iters 1000000 --lr 1e-4 "
        "--lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --eval-iters 0 "
        f"--num-workers 0 --log-interval 1000000 --hang-timeout 0 --save {save}"
    ).split()


# ---- sides ---------------------------------------------------------------------------------------


@dataclass
class Job:
    """This rank's training, and the folder in which the sides save."""

    run: Run
    folder: Path

    def shards(self) -> Tensors:
        from megatron.checkpoint.tensors import tensors_to_save

        return tensors_to_save(self.run.engine, self.run.topology, optimizer=True)

    def step(self) -> tuple[float, float]:
        """Take a step; return its seconds, and those of what the loop does after it."""
        import torch

        from megatron.training.run.loop import between_steps
        from megatron.training.run.step import finish_step, train_step

        start = time.perf_counter()
        train_step(self.run)
        finish_step(self.run)
        if self.run.topology.device.type == "cuda":
            torch.cuda.synchronize()
        end = time.perf_counter()
        between_steps(self.run)
        return end - start, time.perf_counter() - end

    def slowest(self, seconds: float) -> float:
        """Return the largest number of all ranks, which thereby wait for each other."""
        from megatron.parallel.collectives import gather_objects

        return max(gather_objects(seconds, self.run.topology.world))


class Ours:
    """Checkpoints of this project."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def prepare(self) -> None:
        """Do nothing: the engine is there."""

    def save(self) -> None:
        from megatron.checkpoint.save import Saver

        run = self.job.run
        saver = Saver(self.job.folder, run.topology, run.config)
        saver.start(1, run.engine, {}, {})
        saver.finish()

    def start(self) -> None:
        """Begin a save in the background, as the loop does."""
        from megatron.training.run import loop

        loop.save(self.job.run)

    def is_complete(self) -> float | None:
        """Return by how many seconds the save in the background was complete earlier than now."""
        saves = self.job.run.saves
        assert saves is not None
        if saves.failure is not None:
            raise RuntimeError(saves.failure.reason)
        return None if saves.in_progress else 0.0

    def load(self) -> None:
        from megatron.checkpoint.load import load

        run = self.job.run
        load(self.job.folder, run.engine, run.topology, run.config)


class Dcp:
    """torch.distributed.checkpoint with some of its settings."""

    state: dict[str, torch.Tensor] | None = None
    group: Any = None

    def __init__(self, job: Job, process: bool = False, reused: bool = False, **more: Any) -> None:
        self.job = job
        self.cached = more.pop("cached", False)
        self.process = process
        self.more = more
        self.reused = reused
        self.stager: Any = None
        self.future: Future[Any] | None = None
        self.completed_s = 0.0

    def prepare(self) -> None:
        """Make the tensors, before the clock starts, and not before our first save of the job."""
        if Dcp.state is None:
            Dcp.state = sharded(self.job)
            Dcp.group = world_over_gloo(self.job)
        if self.reused and self.stager is None:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            cuda = self.job.run.topology.device.type == "cuda"
            self.stager = DefaultStager(StagingOptions(cuda, self.process, False, cuda))

    def arguments(self) -> Record:
        from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

        folder = self.job.folder / "dcp"
        return {
            "storage_writer": FileSystemWriter(folder, **self.more),
            "planner": DefaultSavePlanner(enable_plan_caching=True) if self.cached else None,
            "process_group": self.group,
        }

    def save(self) -> None:
        from torch.distributed import checkpoint as dcp

        dcp.save(self.state, **self.arguments())

    def start(self) -> None:
        from torch.distributed import checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        kinds = AsyncCheckpointerType
        self.completed_s = 0.0
        answer: Any = dcp.async_save(
            self.state or {},
            async_checkpointer_type=kinds.PROCESS if self.process else kinds.THREAD,
            async_stager=self.stager,
            **self.arguments(),
        )
        self.future = getattr(answer, "upload_completion", answer)
        assert self.future is not None
        self.future.add_done_callback(self.note)

    def note(self, future: Future[Any]) -> None:
        self.completed_s = time.perf_counter()

    def is_complete(self) -> float | None:
        assert self.future is not None
        if not self.completed_s:
            return None
        self.future.result()
        return time.perf_counter() - self.completed_s

    def load(self) -> None:
        from torch.distributed import checkpoint as dcp

        dcp.load(self.state, checkpoint_id=self.job.folder / "dcp", process_group=self.group)


def world_over_gloo(job: Job) -> Any:
    """Return a group of all ranks, for the thread that saves: training uses the others."""
    import torch.distributed as dist

    return dist.new_group(backend="gloo") if job.run.topology.world.size > 1 else None


def sharded(job: Job) -> dict[str, torch.Tensor]:
    """Return tensors of the names and shapes of our checkpoint, divided over the ranks."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from megatron.parallel.collectives import gather_objects

    world = job.run.topology.world
    device = job.run.topology.device
    own = {name: shards.shape for name, shards in job.shards().items()}
    shapes = {name: shape for each in gather_objects(own, world) for name, shape in each.items()}
    if world.size == 1:
        return {name: torch.rand(shape, device=device) for name, shape in shapes.items()}
    mesh = init_device_mesh(device.type, (world.size,))
    state: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        each = -(-shape[0] // world.size)
        rows = max(0, min(each, shape[0] - each * world.rank))
        state[name] = DTensor.from_local(
            torch.rand((rows, *shape[1:]), device=device),
            mesh,
            [Shard(0)],
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )
    return state


class Copy:
    """write() and fsync of our shards' bytes, one file for each rank; read() of them."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.path = job.folder / f"copy{job.run.topology.rank}"
        self.memory: list[torch.Tensor] = []

    def prepare(self) -> None:
        self.memory = [
            view.detach().contiguous().view(-1)
            for shards in self.job.shards().values()
            for view in shards.views.values()
        ]

    def save(self) -> None:
        with open(self.path, "wb", buffering=0) as file:
            for tensor in self.memory:
                written = file.write(tensor.cpu().numpy().data)
                assert written == tensor.nbytes
            os.fsync(file.fileno())
        self.job.slowest(0.0)

    def load(self) -> None:
        with open(self.path, "rb", buffering=0) as file:
            for tensor in self.memory:
                host = tensor.cpu()
                read = file.readinto(host.numpy().data)
                assert read == tensor.nbytes
                if host is not tensor:
                    tensor.copy_(host)


def sides_of(part: str, job: Job) -> dict[str, Any]:
    """Return the sides that take part, by name."""
    ahead: dict[str, Any] = dict(thread_count=THREADS, per_thread_copy_ahead=AHEAD, cached=True)
    if part == "background":
        return {
            "ours": Ours(job),
            "DCP, default": Dcp(job),
            "DCP, reused": Dcp(job, reused=True, **ahead),
            "DCP, process": Dcp(job, reused=True, process=True, **ahead),
        }
    if part == "load":
        return {"ours": Ours(job), "DCP, default": Dcp(job), "copy": Copy(job)}
    few = {"ours": Ours(job), "DCP, default": Dcp(job), "DCP, threads": Dcp(job, **ahead)}
    if part == "fixed":
        return few
    return {
        **few,
        "DCP, many files": Dcp(job, single_file_per_rank=False, **ahead),
        "DCP, no sync": Dcp(job, sync_files=False, **ahead),
        "copy": Copy(job),
    }


# ---- measurements on a rank ----------------------------------------------------------------------


def clear(job: Job, side: Any) -> None:
    """Prepare a side, remove the files of the turn before, and wait for the disk."""
    side.prepare()
    job.slowest(0.0)
    if job.run.topology.rank == 0:
        for folder in (job.folder, Path(str(job.run.config.checkpoint.save))):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
    job.slowest(0.0)
    os.sync()
    job.slowest(0.0)


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds_of(job: Job, action: Callable[[], object]) -> float:
    job.slowest(0.0)
    start = time.perf_counter()
    action()
    return job.slowest(time.perf_counter() - start)


def save(job: Job, side: Any) -> Record:
    clear(job, side)
    return {"s": seconds_of(job, side.save)}


def load(job: Job, side: Any) -> Record:
    clear(job, side)
    side.save()
    job.slowest(0.0)
    drop_from_page_cache(job.folder)
    return {"s": seconds_of(job, side.load)}


def background(job: Job, side: Any) -> Record:
    """Take quiet steps; then save, and take steps until the checkpoint is complete."""
    clear(job, side)
    quiet = [job.step() for _ in range(QUIET_STEPS)]
    step = job.slowest(statistics.median(s for s, _ in quiet))
    between = statistics.median(s for _, s in quiet)
    job.slowest(0.0)
    begun = time.perf_counter()
    side.start()
    stalls = [time.perf_counter() - begun]
    steps = []
    earlier = None
    while earlier is None:
        taken, after = job.step()
        steps.append(job.slowest(taken))
        stalls.append(max(0.0, after - between))
        earlier = side.is_complete()
        if job.run.topology.world.size > 1:  # all ranks take as many steps
            times = [-1.0 if earlier is None else earlier]
            earlier = None if -job.slowest(-times[0]) < 0 else times[0]
    complete = time.perf_counter() - begun - earlier
    return {
        "start_s": job.slowest(stalls[0]),
        "stall_s": job.slowest(sum(stalls)),
        "s": job.slowest(complete),
        "step_s": step,
        "steps": steps,
    }


WAITS = ("all_reduce", "gather_object", "all_gather_object", "broadcast_object_list", "barrier")


@dataclass
class Spans:
    """Seconds and number of calls of fsync and collectives, of all threads."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    inside: threading.local = field(default_factory=threading.local)

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        import torch.distributed as dist

        with contextlib.ExitStack() as stack:
            of = {"fsync": [(os, "fsync")], "collectives": [(dist, name) for name in WAITS]}
            for what, functions in of.items():
                for owner, name in functions:
                    timed = self.timed(what, getattr(owner, name))
                    stack.enter_context(mock.patch.object(owner, name, timed))
            yield

    def timed(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if getattr(self.inside, what, False):  # collectives of objects call others
                return call(*args, **kwargs)
            setattr(self.inside, what, True)
            start = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[what] += time.perf_counter() - start
                self.calls[what] += 1
                setattr(self.inside, what, False)

        return timed


def fixed(job: Job, side: Any) -> Record:
    clear(job, side)
    spans = Spans()
    with spans.measured():
        seconds = seconds_of(job, side.save)
    return {"s": seconds, "seconds": dict(spans.seconds), "calls": dict(spans.calls)}


def worker(size: str, parts: Sequence[str], rounds: int, folder: str) -> None:
    """Measure on this rank, and write the results of rank 0 to results.json."""
    from datetime import timedelta

    from megatron.config import parse_args
    from megatron.parallel.launch import detect_launch
    from megatron.parallel.rank_mapping import RankMapping
    from megatron.parallel.rendezvous import connect
    from megatron.training.run.host import set_up_host
    from megatron.training.run.process import Signals
    from megatron.training.run.setup import assemble, connect_groups

    launch = detect_launch()
    home = Path(folder)
    flags = [*arguments(size, launch.world_size, home / "loop"), "--async-save"]
    config = parse_args(flags, launch.world_size)
    timeout = timedelta(seconds=LIMIT_S)
    rendezvous = connect(launch, timeout)
    set_up_host(config, rendezvous.device, launch)
    topology = connect_groups(config, rendezvous, timeout, RankMapping())
    job = Job(assemble(config, topology, Signals(False)), home / "side")
    measures = {"save": save, "background": background, "load": load, "fixed": fixed}
    results: Results = {}
    for part in parts:
        of_part = results[part] = defaultdict(list)
        sides = list(sides_of(part, job).items())
        if part == "background":
            for _ in range(2):
                job.step()
        # The first turn of each side imports modules and allocates memory.
        for number in range(1 + rounds):
            for name, side in sides[:: -1 if number % 2 else 1]:
                figures = measures[part](job, side)
                of_part[name].append({**figures, "first": number == 0})
    shards = [view for each in job.shards().values() for view in each.views.values()]
    size_bytes = sum(topology_sum(job, sum(view.nbytes for view in shards)))
    if topology.rank == 0:
        (home / "results.json").write_text(json.dumps({"bytes": size_bytes, "parts": results}))
    job.run.close()
    rendezvous.close()


def topology_sum(job: Job, number: int) -> list[int]:
    from megatron.parallel.collectives import gather_objects

    return gather_objects(number, job.run.topology.world)


# ---- tables --------------------------------------------------------------------------------------


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Return the median with the smallest and the largest value."""
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def row_of(part: str, side: str, records: list[Record], base: list[Record], size: int) -> list[str]:
    first, *later = records
    seconds = [r["s"] for r in later]
    row = [side, spread(seconds)]
    if part == "fixed":
        for what in ("fsync", "collectives"):
            values = [r["seconds"].get(what, 0.0) for r in later]
            row.append(f"{later[0]['calls'].get(what, 0)} in {statistics.median(values):.4f}")
        return [*row, f"{first['s']:.3f}"]
    if part == "background":
        ratios = [statistics.mean(r["steps"]) / r["step_s"] for r in later]
        costs = [r["stall_s"] + sum(s - r["step_s"] for s in r["steps"]) for r in later]
        return [
            *row,
            spread([r["stall_s"] for r in later]),
            spread([r["start_s"] for r in later]),
            spread(ratios, ".2f"),
            f"{statistics.median(r['step_s'] for r in later):.3f}",
            spread(costs),
            f"{first['stall_s']:.3f}",
        ]
    ratios = [r["s"] / b["s"] for r, b in zip(later, base[1:], strict=True)]
    rate = size / statistics.median(seconds) / 1e9
    return [*row, f"{rate:.2f}", spread(ratios, ".2f"), f"{first['s']:.3f}"]


HEADS = {
    "save": ["save", "s", "GB/s", "/ copy", "first, s"],
    "load": ["load", "s", "GB/s", "/ copy", "first, s"],
    "background": (
        "background;complete after, s;stall, s;of it the start;steps meanwhile / without;step, s;"
        "cost, s;first stall, s"
    ).split(";"),
    "fixed": ["fixed", "s", "fsyncs in s", "collectives in s", "first, s"],
}


def tables_of(size: str, ranks: int, answer: Record) -> Iterator[str]:
    """Yield the lines of the tables of a job."""
    for part, sides in answer["parts"].items():
        table: Table = [HEADS[part]]
        table += [
            row_of(part, side, r, sides.get("copy", r), answer["bytes"])
            for side, r in sides.items()
        ]
        yield f"\n{size}, {answer['bytes'] / 1e9:.3f} GB, {ranks} rank(s)\n"
        yield from markdown(table)


def run_job(options: Any, size: str, ranks: int, parts: Sequence[str]) -> Record:
    """Run a job and return its results. Raises RuntimeError with the end of a failed rank's log."""
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="saves-") as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(ranks)]
        words = ["--worker", size, ",".join(parts), str(options.rounds), folder]
        command = [sys.executable, str(ROOT / "benchmarks/saves.py"), *words]
        env = environment(os.environ, 0, 1, 0)
        codes, _ = shared.launch(command, logs, env, LIMIT_S)
        if any(codes):
            bad = next(log for log, code in zip(logs, codes, strict=True) if code)
            raise RuntimeError(f"exit codes {codes}: {bad.read_text(errors='replace')[-3000:]}")
        return dict(json.loads((Path(folder) / "results.json").read_text()))


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--sizes", nargs="+", choices=SHAPES, default=["tiny", "30M", "125M"])
    made.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    made.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    made.add_argument("--rounds", type=int, default=3)
    folder = Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
    made.add_argument("--folder", type=Path, default=folder, help=f"default: {folder}")
    made.add_argument("--quick", action="store_true", help="2M parameters, 2 ranks, one round")
    made.add_argument("--worker", nargs=4, help="internal: a rank of a job")
    options = made.parse_args()
    if options.worker:
        size, parts, rounds, home = options.worker
        worker(size, parts.split(","), int(rounds), home)
        return
    if options.quick:
        options.sizes, options.ranks, options.rounds = ["2M"], [2], 1
    for size in options.sizes:
        # only a tiny model shows what does not depend on the size, and it shows nothing else
        parts = [p for p in options.parts if (p == "fixed") == (size == "tiny")]
        if options.quick:
            parts = list(options.parts)
        for ranks in options.ranks if parts else ():
            print(
                *tables_of(size, ranks, run_job(options, size, ranks, parts)), sep="\n", flush=True
            )


if __name__ == "__main__":
    main()
