"""Speed and memory of the data loader: both values of --data-order, beside megatron-core.

    python benchmarks/data_loader.py [--only CASE ...] [--rounds 3] [--folder /dev/shm]

Sides take turns in processes of their own (peers/loader.py), in the opposite order in each second
round. Each is started twice in a round: without an index, and with the one of the first start.
Times per sample are those of the fastest of five blocks: other programs only slow a block down.
Ratios are to --data-order megatron in the same round. Files are in memory (--folder), so no figure
includes a disk. megatron-core comes from requirements/bench.txt (`make bench` installs it).

`order` measures what the order of a stream costs at position 10^9, 10^12 and 10^15 by itself.
`scale` is about a run of 10^9 samples in 100 sources, nearly an epoch; token files are without
content. One of the sources is measured as a whole, and a hundred times its figures are printed, and
those of a blend's index in Megatron's order. 100 sources of 1/100 of the size give the time per
sample of a blend. A stream lists the documents of an epoch only if there are 2^20 or more.

Expected before the first measurement: a sample alone takes us 25 us, megatron-core 40 us; the order
of a stream adds 5 us to it: 1 us for each permutation, 2 us for the source, 2 us for the search of
the document. In batches 1.3 times as long as alone, megatron-core twice. At 10^9 samples the set-up
of Megatron's order takes several minutes and 33 GB, that of a stream less than a tenth of both.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.shared import ROOT, Record, Table, markdown, parser
from benchmarks.sides import PEERS
from megatron.data.indexed_dataset import (
    HEADER,
    MAGIC,
    VERSION,
    bin_path,
    build_blend_index,
    idx_path,
)
from megatron.data.interleave import Interleaving
from megatron.data.permutation import permute

MEGATRON = "megatron"
SIDES = (MEGATRON, "stream", "megatron-core")
SEQ_LENGTH = 2048
SHORT = 700  # mean tokens of a document
LONG = 20_000
TOKENS = 100_000_000
GOAL = 1_000_000_000  # samples
_UINT16 = 8  # code in an .idx file


Results = dict[str, dict[str, list[Record]]]  # for each case and side, a record of each round


class Case(NamedTuple):
    """A blend of sources with as many documents each.

    tokens    of all sources, about
    document  mean tokens of a document; lengths are exponentially distributed
    samples   of the run
    block     number of samples of a measured block
    content   whether the token files have any
    """

    sources: int
    tokens: int
    document: int
    samples: int
    block: int = 2000
    content: bool = True


CASES = {
    "1 source": Case(1, TOKENS, SHORT, 2 * TOKENS // SEQ_LENGTH),
    "100 sources": Case(100, TOKENS, SHORT, 2 * TOKENS // SEQ_LENGTH),
    "1 source, long documents": Case(1, TOKENS, LONG, 2 * TOKENS // SEQ_LENGTH),
}


PART = Case(1, GOAL // 98 * SEQ_LENGTH, SHORT, GOAL // 100, content=False)
SCALE = {"1 of 100 sources": PART, "100 sources of 1/100": PART._replace(sources=100)}


def write(prefix: Path, case: Case, random: np.random.Generator) -> None:
    """Write one source of a case."""
    number = max(2, case.tokens // case.sources // case.document)
    sizes = (1 + random.exponential(case.document - 1, number)).astype(np.int32)
    ends = np.cumsum(sizes, dtype=np.int64)
    with open(idx_path(prefix), "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, _UINT16, number, number + 1))
        for array in (sizes, 2 * (ends - sizes), np.arange(number + 1, dtype=np.int64)):
            array.tofile(file)
    with open(bin_path(prefix), "wb") as file:
        if case.content:
            random.integers(50_000, size=int(ends[-1]), dtype=np.uint16).tofile(file)
        file.truncate(2 * int(ends[-1]))


def written(case: Case, folder: Path) -> tuple[list[str], list[float]]:
    """Write a case; return prefixes and weights."""
    random = np.random.default_rng(1)
    prefixes = [folder / f"source{i}" for i in range(case.sources)]
    for prefix in prefixes:
        write(prefix, case, random)
    # not all equal, so that no order of the sources repeats; the mean is 1
    weights = 1 + 0.5 * np.sin(np.arange(case.sources))
    return [str(prefix) for prefix in prefixes], weights.tolist()


def start(side: str, case: Case, blend: Record, first: Record, cache: Path) -> Record:
    """Run one side in a process of its own; return its figures, or its error."""
    job = {
        "side": side,
        "seq_length": SEQ_LENGTH,
        "samples": case.samples,
        "cache": str(cache),
        "micro_batch": 8,
        "count": case.block,
        "first": first,
        **blend,
    }
    before = PEERS if side == "megatron-core" else ROOT
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/peers/loader.py"), json.dumps(job)],
        env={**os.environ, "PYTHONPATH": str(before), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["killed"])[-1]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def run_round(
    case: Case, blend: Record, first: Record, folder: Path, back: bool
) -> Iterator[tuple[str, Record]]:
    """Yield the figures of each side: those of a start with an index, and `new` without one."""
    for side in SIDES[::-1] if back else SIDES:
        cache = folder / "cache"
        cache.mkdir()
        new = start(side, case, blend, first, cache)
        figures = new if "error" in new else start(side, case, blend, first, cache)
        yield side, {**figures, "new": new, "index_bytes": size_of(cache)}
        shutil.rmtree(cache)


def measure(name: str, case: Case, rounds: int, parent: Path) -> dict[str, list[Record]]:
    """Return the figures of each side in all rounds."""
    outcomes = defaultdict[str, list[Record]](list)
    with tempfile.TemporaryDirectory(dir=parent) as temporary:
        folder = Path(temporary)
        small = Case(1, 100_000, SHORT, 10)
        for each in ("blend", "small"):
            (folder / each).mkdir()
        blend = dict(zip(("prefixes", "weights"), written(case, folder / "blend"), strict=True))
        few = dict(zip(("prefixes", "weights"), written(small, folder / "small"), strict=True))
        first = {**few, "samples": small.samples, "cache": str(folder / "small")}
        for number in range(rounds):
            for side, figures in run_round(case, blend, first, folder, number % 2 == 1):
                print(f"{name}, round {number + 1}: {side} {json.dumps(figures)}", file=sys.stderr)
                outcomes[side].append(figures)
    return outcomes


def middle(outcomes: list[Record], value: Callable[[Record], float]) -> float:
    return statistics.median(map(value, outcomes))


FIGURES: dict[str, tuple[Callable[[Record], float], float, str]] = {
    "set-up, s": (lambda r: r["new"]["setup_s"], 1, ".2f"),
    "again, s": (lambda r: r["setup_s"], 1, ".2f"),
    "first 1000, s": (lambda r: r["first_s"], 1, ".2f"),
    "peak of set-up, MB": (lambda r: r["new"]["peak_bytes"], 1e-6, ",.0f"),
    "again, MB": (lambda r: r["peak_bytes"], 1e-6, ",.0f"),
    "own memory, MB": (lambda r: r["own_bytes"], 1e-6, ",.0f"),
    "index, MB": (lambda r: r["index_bytes"], 1e-6, ",.0f"),
    "us/sample": (lambda r: min(r["sample_s"]), 1e6, ".1f"),
    "in batches": (lambda r: min(r["batch_sample_s"]), 1e6, ".1f"),
}
IN_PROPORTION = (
    "set-up, s",
    "again, s",
    "peak of set-up, MB",
    "again, MB",
    "own memory, MB",
    "index, MB",
)


def table_of(results: Results) -> Table:
    table = [["case", "side", *FIGURES, "/ megatron", "in batches"]]
    for name, sides in results.items():
        for side, outcomes in sides.items():
            errors = [r["error"] for r in outcomes if "error" in r]
            if errors:
                table.append([name, side, errors[0], *[""] * (len(table[0]) - 3)])
                continue
            row = [
                format(unit * middle(outcomes, value), form)
                for value, unit, form in FIGURES.values()
            ]
            for key in ("us/sample", "in batches"):
                value = FIGURES[key][0]
                pairs = zip(outcomes, sides[MEGATRON], strict=True)
                good = [value(r) / value(base) for r, base in pairs if "error" not in base]
                row.append(f"{statistics.median(good):.2f}" if good else "")
            table.append([name, side, *row])
    return table


def extrapolated(one_source: dict[str, list[Record]]) -> Table:
    """Return set-up and memory of GOAL samples in 100 sources like this one."""
    table = [["10^9 samples", "side", *IN_PROPORTION]]
    figures = [FIGURES[key] for key in IN_PROPORTION]
    for side, outcomes in one_source.items():
        if not any("error" in r for r in outcomes):
            row = [format(100 * unit * middle(outcomes, value), f) for value, unit, f in figures]
            table.append(["100 sources", side, *row])
    weights = [1 / 100] * 100
    began = time.perf_counter()
    arrays = build_blend_index(weights, PART.samples)
    blend = {"setup_s": time.perf_counter() - began, "index_bytes": sum(a.nbytes for a in arrays)}
    cells = [f"{100 * blend['setup_s']:.2f}", *[""] * (len(figures) - 2)]
    table.append(["its blend", MEGATRON, *cells, f"{100e-6 * blend['index_bytes']:,.0f}"])
    return table


def order_table() -> Table:
    """Measure what the order of the sources and a permutation cost, without any file."""

    def best_us(call: Callable[[], object], times: int) -> str:
        return f"{1e6 * min(timeit.repeat(call, number=times, repeat=5)) / times:.2f}"

    def row_of(name: str, position: int, find: Callable[[np.ndarray], object]) -> list[str]:
        one, eight, many = (position + np.arange(n) for n in (1, 8, 1_000_000))
        row = [best_us(lambda: find(one), 1000), best_us(lambda: find(eight), 1000)]
        return [name, f"{position:.0e}", *row, f"{float(best_us(lambda: find(many), 1)) / 1e6:.4f}"]

    table = [["", "position", "1 sample, us", "8 together, us", "each of 10^6, us"]]
    for sources in (1, 10, 100, 1000):
        interleaving = Interleaving((1 + 0.5 * np.sin(np.arange(sources))).tolist())
        for position in (10**9, 10**12, 10**15):
            table.append(row_of(f"source among {sources}", position, interleaving.find))
    table.append(row_of("permutation", 10**9, lambda positions: permute(positions, 2 * 10**9, 1)))
    return table


def main() -> None:
    made = parser(__doc__)
    names = ["order", *CASES, "scale"]
    made.add_argument("--only", nargs="+", choices=names, default=names, metavar="CASE")
    made.add_argument("--rounds", type=int, default=3)
    folder = Path("/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir())
    made.add_argument("--folder", type=Path, default=folder, help=f"default: {folder}")
    options = made.parse_args()
    if "order" in options.only:
        print(*markdown(order_table()), sep="\n")
    results = {
        name: measure(name, case, options.rounds, options.folder)
        for name, case in CASES.items()
        if name in options.only
    }
    if "scale" in options.only:
        results |= {name: measure(name, case, 1, options.folder) for name, case in SCALE.items()}
    if results:
        print("", *markdown(table_of(results)), sep="\n")
    if "scale" in options.only:
        print("", *markdown(extrapolated(results["1 of 100 sources"])), sep="\n")


if __name__ == "__main__":
    main()
