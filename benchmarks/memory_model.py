"""Compare the memory model with the dry run, and the dry run with runs on this machine's CPU.

    python benchmarks/memory_model.py [--part formulas|runs|processes|all|device]
                                      [--only NAME ...] [--markdown] [--seeds FIRST LAST]

formulas  the planner's memory (megatron.planner.memory) against the allocations of the run's code
          in a dry run (megatron.planner.dryrun), for every kind of rank of 62 layouts and of some
          that are drawn at random: peaks within 2 %, and each category of more than a twentieth of
          the peak within 3 %.
runs      the dry run against the peak anonymous memory of real processes, as the difference to a
          smaller model in the same layout, so that interpreter, libraries, connections and buffers
          of the matrix library cancel out: within 3 % for models that ZeRO divides, others 10 %.
          malloc is set to return freed tensors (resident_memory.py).
processes what the dry run says that a process holds against the peak resident memory that ordinary
          runs report after 40 steps: between what the dry run names as the least and the most.
device    the dry run against the peak of torch's allocator on this machine's GPU: within 10 %.

Exit code 1 if a limit is exceeded.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich import box  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.memory_layouts import (  # noqa: E402
    COMMON,
    DEVICE_RUNS,
    PROCESSES,
    RUNS,
    SHAPES,
    Run,
    Shape,
    drawn,
)
from benchmarks.parity import train  # noqa: E402
from benchmarks.resident_memory import peak_bytes  # noqa: E402
from megatron.config import Config  # noqa: E402
from megatron.metrics_file import read_records  # noqa: E402
from megatron.planner.dryrun.rank import run_rank  # noqa: E402
from megatron.planner.dryrun.rehearsal import enough_micro_batches, rehearse  # noqa: E402
from megatron.planner.memory import (  # noqa: E402
    CATEGORIES,
    PROCESS_SHARES,
    memory_of_ranks,
    process_bytes,
)
from megatron.planner.placement import layout_of  # noqa: E402

MIB = 2**20
TOTAL_LIMIT, CATEGORY_LIMIT = 0.02, 0.03
_SHARE = 0.05  # of the peak, from which on a category is looked at
_FLAGS = (
    "--mock-data",
    "--lr",
    "1e-4",
    "--eval-iters",
    "0",
    "--hang-timeout",
    "0",
    "--log-interval",
    "1",
)


@dataclass(frozen=True)
class Compared:
    """Bytes of one rank, predicted and found.

    limit  of the error
    worst  category with the largest error
    anonymous  of a process, without the program files in memory; 0 if not looked at
    """

    name: str
    rank: int
    model: float
    found: float
    limit: float
    worst: str = ""
    worst_error: float = 0.0
    anonymous: float = 0.0

    @property
    def error(self) -> float:
        return self.model / self.found - 1.0


def compare_formula(shape: Shape) -> list[Compared]:
    """Compare the planner's memory with the dry run, for every kind of rank."""
    config = shape.config()
    found, model = rehearse(config, None, shape.device), memory_of_ranks(config, shape.device)
    if found.findings:
        raise RuntimeError(f"{shape.name} ({shape.device}): {found.findings[0].text[:300]}")
    rows = []
    for rank in found.ranks:
        mine, total = model[rank.pipeline_rank], rank.peak.total
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


def compare_run(run: Run) -> list[Compared]:
    """Compare differences of a model and a smaller one, in dry run and real runs, by rank."""
    large, smaller = ({**COMMON, **sizes, **run.fields} for sizes in (run.large, run.smaller))
    measured = [peak_bytes(_command(fields), run.processes) for fields in (large, smaller)]
    foreseen = [
        _foreseen(Config.create(**{**fields, "world_size": run.processes}))
        for fields in (large, smaller)
    ]
    rows = []
    for rank in range(run.processes):
        expected, found = (values[0][rank] - values[1][rank] for values in (foreseen, measured))
        rows.append(
            Compared(
                f"{run.name}, {run.processes} process{'es' * (run.processes > 1)}",
                rank,
                expected,
                found,
                run.limit,
            )
        )
    return rows


def compare_process(run: Run, steps: int = 40) -> Compared:
    """Compare what a process is said to hold with the largest peak that a run's ranks report."""
    fields = {**COMMON, **run.large, **run.fields}
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder, "metrics.jsonl")
        flags = [*_command(fields, steps), "--metrics-file", str(metrics)]
        peaks = peak_bytes(flags, run.processes, timeout_s=1800.0, malloc={"OMP_NUM_THREADS": "1"})
        held = max(record["memory_bytes"] for record in read_records(metrics, "iteration"))
    config = Config.create(**{**fields, "world_size": run.processes})
    tensors = max(_foreseen(config))
    least, median, most = (process_bytes(tensors, "cpu", share) for share in PROCESS_SHARES)
    limit = 1.0 if least <= held <= most else 0.0
    return Compared(run.name, 0, median, held, limit, anonymous=max(peaks))


def compare_device(runs: Sequence[Run]) -> list[Compared]:
    """Compare the dry run's tensors with the peak of torch's allocator on the first GPU."""
    every, found = [{**COMMON, **run.large, **run.fields} for run in runs], []
    with tempfile.TemporaryDirectory() as folder:
        for fields in every:  # all before the first rehearsal, which sets up DeepSpeed for the CPU
            records = train(Path(folder, "run.jsonl"), _command(fields))
            found.append(max(record["memory_bytes"] for record in records.values()))
    foreseen = [
        rehearse(Config.create(**fields), None, "gpu").ranks[0].needed_bytes for fields in every
    ]
    return [
        Compared(run.name, 0, *sizes, run.limit)
        for run, *sizes in zip(runs, foreseen, found, strict=True)
    ]


def _foreseen(config: Config) -> list[float]:
    """Return the dry-run peak of every rank, before or in a step.

    Each pipeline rank is run, also those that a dry run of the job represents by another one.
    """
    layout, count = layout_of(config), enough_micro_batches(config)
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


def table(title: str, rows: Sequence[Compared], markdown: bool) -> Table:
    """Summarize the comparisons and errors."""
    categories = any(row.worst for row in rows)
    names = ("rehearsed", "planner") if categories else ("measured", "rehearsed")
    found = Table(title=None if markdown else title, box=box.MARKDOWN if markdown else box.SIMPLE)
    found.add_column("layout")
    for name in (
        "pipeline rank" if categories else "rank",
        *(f"{name}, MiB" for name in names),
        "%",
    ):
        found.add_column(name, justify="right")
    if categories:
        found.add_column("furthest category, %")
    for row in rows:
        cells = [
            row.name,
            str(row.rank),
            f"{row.found / MIB:.1f}",
            f"{row.model / MIB:.1f}",
            f"{100 * row.error:+.2f}",
        ]
        found.add_row(
            *cells, *([f"{row.worst} {100 * row.worst_error:+.2f}"] if categories else [])
        )
    return found


def holds(rows: Sequence[Compared]) -> bool:
    return all(
        abs(row.error) <= row.limit and abs(row.worst_error) <= CATEGORY_LIMIT for row in rows
    )


def main(arguments: Sequence[str] | None = None) -> int:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument(
        "--part", choices=("formulas", "runs", "processes", "all", "device"), default="all"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="layouts whose name contains one of these"
    )
    parser.add_argument(
        "--seeds",
        nargs=2,
        type=int,
        default=(0, 40),
        metavar=("FIRST", "LAST"),
        help="seeds of drawn layouts, without LAST (default: 0 40)",
    )
    parser.add_argument("--markdown", action="store_true", help="tables as Markdown")
    asked = parser.parse_args(arguments)

    def wanted(name: str) -> bool:
        return not asked.only or any(part in name for part in asked.only)

    good, console = True, Console(stderr=True)
    if asked.part in ("formulas", "all"):
        rows: list[Compared] = []
        every = *SHAPES, *map(drawn, range(*asked.seeds))
        shapes = [shape for shape in every if wanted(f"{shape.name} ({shape.device})")]
        for shape in shapes:
            console.print(f"{shape.name} ({shape.device})", style="dim")
            rows += compare_formula(shape)
        good = _report(f"{len(shapes)} layouts: planner and rehearsal", rows, asked.markdown)
    if asked.part == "device":
        rows = compare_device([run for run in DEVICE_RUNS if wanted(run.name)])
        good = _report("rehearsal and the allocator's peak on a GPU", rows, asked.markdown)
    if asked.part in ("runs", "all"):
        rows = []
        for run in (run for run in RUNS if wanted(run.name)):
            console.print(run.name, style="dim")
            rows += compare_run(run)
        good = (
            _report(
                "rehearsal and peak anonymous memory, as differences",
                rows,
                asked.markdown,
            )
            and good
        )
    if asked.part in ("processes", "all"):
        rows = []
        for run in (run for run in PROCESSES if wanted(run.name)):
            console.print(run.name, style="dim")
            rows.append(compare_process(run))
        good = _report("rehearsal and what a process holds", rows, asked.markdown) and good
    return 0 if good else 1


def _report(title: str, rows: Sequence[Compared], markdown: bool) -> bool:
    Console(width=None if sys.stdout.isatty() else 150).print(table(title, rows, markdown))
    good = holds(rows)
    for limit in sorted({row.limit for row in rows}):
        errors = [abs(row.error) for row in rows if row.limit == limit]
        print(
            f"largest difference {100 * max(errors):.2f} % of {len(errors)} ranks with a limit of "
            f"{100 * limit:.0f} %"
        )
    print(f"the limits {'hold' if good else 'do not hold'}\n")
    return good


if __name__ == "__main__":
    sys.exit(main())
