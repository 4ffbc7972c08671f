"""Compare the memory model with the dry run, and the dry run with runs on this machine's CPU.

    python benchmarks/memory_model.py [--part formulas|runs|processes|all|device]
                                      [--only NAME ...] [--markdown] [--seeds FIRST LAST]

formulas  the planner's memory (megatron.planner.memory) against the allocations of the run's code
          in a dry run (megatron.planner.dryrun), for every kind of rank of some fixed layouts and
          of others drawn at random: peaks within 2 %, and each category of more than a twentieth
          of the peak within 3 %.
runs      the dry run against the peak anonymous memory of real processes, as the difference to a
          smaller model in the same layout, so that interpreter, libraries, connections and buffers
          of the matrix library cancel out: within 3 % for runs of ZeRO, 10 % for others.
          malloc is set to return freed tensors (BARE).
processes the dry run's prediction of what a process holds against the peak resident memory that
          ordinary runs report after 40 steps: between the predicted minimum and maximum.
device    the dry run against the peak of torch's allocator on this machine's GPU: within 10 %.

Exit code 1 if a limit is exceeded.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.memory_layouts import (
    COMMON,
    DEVICE_RUNS,
    PROCESSES,
    RUNS,
    SHAPES,
    MemoryRun,
    Shape,
    drawn,
)
from benchmarks.shared import ROOT, Table, launch, markdown, parser, print_table, train
from megatron.config import Config
from megatron.metrics_file import read_records
from megatron.planner.dryrun.rank import run_rank
from megatron.planner.dryrun.rehearsal import enough_micro_batches, rehearse
from megatron.planner.memory import (
    CATEGORIES,
    PROCESS_SHARES,
    memory_of_ranks,
    process_bytes,
)
from megatron.planner.placement import layout_of

MIB = 2**20
TITLES = {
    "formulas": "planner and dry run",
    "runs": "dry run and peak anonymous memory, as differences",
    "processes": "dry run and what a process holds",
    "device": "dry run and the allocator's peak on a GPU",
}
TOTAL_LIMIT = 0.02
CATEGORY_LIMIT = 0.03
_SHARE = 0.05  # of the peak; smaller categories are not compared
_FLAGS = "--mock-data --lr 1e-4 --eval-iters 0 --hang-timeout 0 --log-interval 1".split()
BARE = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(64 << 10),
    "MALLOC_MMAP_MAX_": str(1 << 20),
    "THP_MEM_ALLOC_ENABLE": "0",
}
"""Settings of malloc that map every tensor of 64 KiB and more by itself and return it to the system
when it is freed: resident memory is that of the tensors. With the settings of ordinary runs, which
are made for speed, malloc keeps freed blocks, and holes between them. There is one thread, because
the memory of further threads is not to be compared."""


@dataclass(frozen=True)
class Compared:
    """Bytes of one rank, predicted and measured.

    limit        largest allowed error, as a fraction of the measured bytes
    worst        category with the largest error; "" if categories are not compared
    worst_error  that error
    anonymous    measured bytes without the pages of program files; 0 if unknown
    """

    name: str
    rank: int
    predicted: float
    measured: float
    limit: float
    worst: str = ""
    worst_error: float = 0.0
    anonymous: float = 0.0

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1.0


def compare_formula(shape: Shape) -> list[Compared]:
    """Compare the planner's memory with the dry run, for every kind of rank."""
    config = shape.config()
    rehearsal = rehearse(config, None, shape.device)
    model = memory_of_ranks(config, shape.device)
    if rehearsal.findings:
        raise RuntimeError(f"{shape.name} ({shape.device}): {rehearsal.findings[0].text[:300]}")
    rows = []
    for rank in rehearsal.ranks:
        mine = model[rank.pipeline_rank]
        total = rank.peak.total
        both = {c: (getattr(mine, c), getattr(rank.peak, c)) for c in CATEGORIES}
        errors = {
            c: planned / there - 1.0
            for c, (planned, there) in both.items()
            if there > _SHARE * total
        }
        worst = max(errors, key=lambda c: abs(errors[c]))
        rows.append(
            Compared(
                f"{shape.name} ({shape.device})",
                rank.pipeline_rank,
                mine.total,
                total,
                TOTAL_LIMIT,
                worst,
                errors[worst],
            )
        )
    return rows


def compare_run(run: MemoryRun) -> list[Compared]:
    """Compare dry run and real runs, by rank, in the difference of a model and a smaller one."""
    large, smaller = ({**COMMON, **sizes, **run.fields} for sizes in (run.large, run.smaller))
    measured = [peak_bytes(_command(fields), run.processes) for fields in (large, smaller)]
    configs = [Config.create(**fields, world_size=run.processes) for fields in (large, smaller)]
    foreseen = [_foreseen(config) for config in configs]
    name = f"{run.name}, {run.processes} process(es)"
    rows = []
    for rank in range(run.processes):
        expected, actual = (values[0][rank] - values[1][rank] for values in (foreseen, measured))
        rows.append(Compared(name, rank, expected, actual, run.limit))
    return rows


def compare_process(run: MemoryRun, steps: int = 40) -> Compared:
    """Compare what a process should hold with the largest peak that a run's ranks report."""
    fields = {**COMMON, **run.large, **run.fields}
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "metrics.jsonl")
        flags = [*_command(fields, steps), "--metrics-file", str(metrics)]
        peaks = peak_bytes(flags, run.processes, {"OMP_NUM_THREADS": "1"})
        reported = max(record["memory_bytes"] for record in read_records(metrics, "iteration"))
    config = Config.create(**{**fields, "world_size": run.processes})
    tensors = max(_foreseen(config))
    least, median, most = (process_bytes(tensors, "cpu", share) for share in PROCESS_SHARES)
    limit = 1.0 if least <= reported <= most else 0.0
    return Compared(run.name, 0, median, reported, limit, anonymous=max(peaks))


def compare_device(runs: Sequence[MemoryRun]) -> list[Compared]:
    """Compare the dry run's tensors with the peak of torch's allocator on the first GPU."""
    every = [{**COMMON, **run.large, **run.fields} for run in runs]
    peaks = []
    with tempfile.TemporaryDirectory() as folder:
        for fields in every:  # all before the first rehearsal, which sets up DeepSpeed for the CPU
            records = train(Path(folder, "run.jsonl"), _command(fields))
            peaks.append(max(record["memory_bytes"] for record in records.values()))
    foreseen = [
        rehearse(Config.create(**fields), None, "gpu").ranks[0].needed_bytes for fields in every
    ]
    sizes = zip(runs, foreseen, peaks, strict=True)
    return [Compared(run.name, 0, expected, actual, run.limit) for run, expected, actual in sizes]


def peak_bytes(flags: Sequence[str], processes: int, malloc: Mapping[str, str] = BARE) -> list[int]:
    """Return the peak of held_bytes of each rank of `pretrain_gpt.py FLAGS`, read every 5 ms.

    Raises RuntimeError if a rank fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"{rank}.log") for rank in range(processes)]
        command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags]
        env = {**os.environ, **malloc}
        codes, peaks = launch(command, logs, env, 1800.0, look=held_bytes, every_s=0.005)
        for log, code in zip(logs, codes, strict=True):
            if code:
                raise RuntimeError(f"exit codes {codes}: {log.read_text(errors='replace')[-2000:]}")
        return peaks


def held_bytes(pid: int) -> int:
    """Return what a process holds in anonymous and shared pages; 0 once it has ended.

    The peak that the system counts (ru_maxrss) also includes pages of program files, some 140 MiB,
    which the page cache may keep or drop.
    """
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return 1024 * sum(map(int, re.findall(r"^Rss(?:Anon|Shmem):\s*(\d+) kB$", text, re.M)))


def _foreseen(config: Config) -> list[float]:
    """Return the dry-run peak of every rank, before or in a step.

    Each pipeline rank is run, even those that a dry run of the job represents by another rank.
    """
    layout = layout_of(config)
    count = enough_micro_batches(config)
    needed = [0.0] * layout.world_size
    for stage in range(layout.pipeline):
        run = run_rank(config, layout.rank(tensor=0, data=0, pipeline=stage), "cpu", count)
        for data, tensor in itertools.product(range(layout.data), range(layout.tensor)):
            needed[layout.rank(tensor=tensor, data=data, pipeline=stage)] = run.needed_bytes
    return needed


def _command(fields: dict[str, Any], steps: int = 2) -> list[str]:
    flags = [*_FLAGS, "--train-iters", str(steps)]
    for name, value in fields.items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, str(value)]
    return flags


def table(rows: Sequence[Compared]) -> Table:
    """Tabulate the comparisons and errors."""
    head = "layout, rank, found MiB, predicted MiB, %, furthest category, %"
    lines = [head.split(", ")]
    for row in rows:
        sizes = [f"{size / MIB:.1f}" for size in (row.measured, row.predicted)]
        errors = [f"{100 * error:+.2f}" for error in (row.error, row.worst_error)]
        worst = [row.worst, errors[1]] if row.worst else ["", ""]
        lines.append([row.name, str(row.rank), *sizes, errors[0], *worst])
    return lines


def holds(rows: Sequence[Compared]) -> bool:
    return all(
        abs(row.error) <= row.limit and abs(row.worst_error) <= CATEGORY_LIMIT for row in rows
    )


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser(__doc__)
    add = made.add_argument
    add("--part", choices=(*TITLES, "all"), default="all")
    add("--only", nargs="+", metavar="NAME", help="layouts whose name contains one of these")
    seeds = "seeds of drawn layouts, without LAST (default: 0 70)"
    metavar = ("FIRST", "LAST")
    add("--seeds", nargs=2, type=int, default=(0, 70), metavar=metavar, help=seeds)
    add("--markdown", action="store_true", help="tables as Markdown")
    options = made.parse_args(arguments)

    def selected(name: str) -> bool:
        return not options.only or any(proof in name for proof in options.only)

    def chosen(runs: Sequence[MemoryRun]) -> Iterator[MemoryRun]:
        for run in (run for run in runs if selected(run.name)):
            print(run.name, file=sys.stderr, flush=True)
            yield run

    compared: list[Compared] = []
    for proof, title in TITLES.items():
        if proof != options.part and (options.part != "all" or proof == "device"):
            continue
        rows: list[Compared] = []
        if proof == "formulas":
            for shape in (*SHAPES, *map(drawn, range(*options.seeds))):
                if selected(f"{shape.name} ({shape.device})"):
                    print(f"{shape.name} ({shape.device})", file=sys.stderr, flush=True)
                    rows += compare_formula(shape)
        elif proof == "runs":
            for run in chosen(RUNS):
                rows += compare_run(run)
        elif proof == "processes":
            rows += map(compare_process, chosen(PROCESSES))
        else:
            rows += compare_device([*chosen(DEVICE_RUNS)])
        if not rows:
            continue
        if options.markdown:
            print(*markdown(table(rows)), sep="\n")
        else:
            print_table(title, table(rows))
        for limit in sorted({row.limit for row in rows}):
            errors = [abs(row.error) for row in rows if row.limit == limit]
            most = f"largest difference {100 * max(errors):.2f} % of {len(errors)} ranks"
            print(f"{most} with a limit of {100 * limit:.0f} %")
        print(f"the limits {'hold' if holds(rows) else 'do not hold'}\n")
        compared += rows
    if not compared:
        made.error(f"--only {' '.join(options.only or ())}: no layout has such a name")
    return 0 if holds(compared) else 1


if __name__ == "__main__":
    sys.exit(main())
