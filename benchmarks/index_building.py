"""Time and memory of building the indices of a data set, in C++ and in numpy.

    python benchmarks/index_building.py [--documents 100000000] [--epochs 1] [--repeat 3]

Documents of 300 tokens on average (log-normal) are cut into samples of 2,048. Each build is a
separate process, C++ and numpy in turns, and both must give the same bytes; the table shows
medians. "beside" is the peak of resident memory above the sizes and the three arrays, which take 4
bytes per document and epoch and 12 per sample. (Measured with Linux's /proc and glibc.)

Expected: the document index, whose shuffle waits for memory, 5 to 8 times faster, the sample index
3 to 4 times, all of it 4 times or more, and under 10 MB beside the arrays in C++. A build of 100
million documents takes 1 GB and, in numpy, 20 seconds.

    python benchmarks/index_building.py --packing [--documents 100000000]

times the cutting and packing of documents into samples by best fit instead; the numpy side is a
loop in Python over one document in 50. --blend times the order of a blend by its number of data
sets; the numpy side computes one sample in 100.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.data import gpt_dataset, indexed_dataset, packed_dataset
from tests.data import numpy_loops

SEQ_LENGTH, SEED, BLOCK = 2048, 1234, 1 << 20
SIDES = ("C++", "numpy")


def peak_bytes() -> int:
    """The most memory that was resident since `reset_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def reset_peak() -> int:
    # what was freed and kept would be used again without being seen
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def make_sizes(count: int) -> np.ndarray:
    """Log-normal sizes, as unaligned as those of an .idx file."""
    random = np.random.default_rng(0)
    sizes: np.ndarray = np.empty(4 * count + 2, np.uint8)[2:].view(np.int32)
    for at in range(0, count, BLOCK):
        part = sizes[at : at + BLOCK]
        part[:] = np.clip(random.lognormal(np.log(300) - 0.32, 0.8, len(part)), 1, 1_000_000)
    return sizes


def digest(arrays: list[np.ndarray]) -> str:
    found = hashlib.blake2b(digest_size=8)
    for array in arrays:
        for at in range(0, len(array), BLOCK):
            found.update(np.ascontiguousarray(array[at : at + BLOCK]).data)
    return found.hexdigest()


def timed(seconds: dict[str, float], name: str, function: Any, *arguments: Any) -> Any:
    started = time.perf_counter()
    result = function(*arguments)
    seconds[name] = time.perf_counter() - started
    return result


def build(documents: int, epochs: int) -> dict[str, Any]:
    sizes = make_sizes(documents)
    tokens = int(sizes.sum(dtype=np.int64))
    num_samples = (epochs * tokens - 1) // SEQ_LENGTH
    request = gpt_dataset.IndexRequest(
        "p", "train", "1", 0, documents, tokens, num_samples, SEQ_LENGTH, SEED, sizes
    )
    random, seconds = np.random.RandomState(SEED), {}
    before = reset_peak()
    index = timed(seconds, "document index", gpt_dataset._document_index, request, False, random)
    rows = timed(
        seconds,
        "sample index",
        indexed_dataset.build_sample_index,
        sizes,
        index,
        SEQ_LENGTH,
        num_samples,
    )
    order = timed(
        seconds,
        "shuffle index",
        gpt_dataset._shuffle_index,
        num_samples,
        num_samples,
        random,
    )
    arrays = [index, rows, order]
    own = sum(array.nbytes for array in arrays)
    beside = peak_bytes() - before - own
    return {
        "seconds": seconds,
        "beside": beside,
        "arrays": own,
        "digest": digest(arrays),
        "samples": num_samples,
    }


def pack(documents: int) -> dict[str, Any]:
    sizes = make_sizes(documents)
    tokens = int(sizes.sum(dtype=np.int64))
    request = gpt_dataset.IndexRequest(
        "p", "train", "1", 0, documents, tokens, 1, SEQ_LENGTH, SEED, sizes
    )
    seconds: dict[str, float] = {}
    before = reset_peak()
    arrays = timed(seconds, "cut and pack", packed_dataset.build_packing, request)
    timed(
        seconds,
        "order of an epoch",
        packed_dataset.build_order,
        len(arrays["bin_starts"]) - 1,
        1,
        SEED,
    )
    parts = [arrays[part] for part in packed_dataset.BIN_PARTS]
    num_bins, num_pieces = len(arrays["bin_starts"]) - 1, len(arrays["pieces"])
    filled = int(arrays["counts"][1]) + num_pieces
    waste = 1 - filled / (num_bins * (SEQ_LENGTH + 1))
    return {
        "seconds": seconds,
        "peak": peak_bytes() - before,
        "digest": digest(parts),
        "pieces": num_pieces,
        "bins": num_bins,
        "waste": waste,
    }


def worker(options: argparse.Namespace) -> None:
    if options.side == "numpy":
        indexed_dataset.compiled = numpy_loops
    result = (
        pack(options.documents) if options.packing else build(options.documents, options.epochs)
    )
    print(json.dumps(result))


def run(options: argparse.Namespace, side: str, documents: int) -> dict[str, Any]:
    command = [
        sys.executable,
        __file__,
        "--side",
        side,
        "--documents",
        str(documents),
        "--epochs",
        str(options.epochs),
    ]
    done = subprocess.run(
        command + ["--packing"] * options.packing, stdout=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise SystemExit(f"the build in {side} failed with exit code {done.returncode}")
    return json.loads(done.stdout)


def median_seconds(runs: list[dict[str, Any]]) -> dict[str, float]:
    names = runs[0]["seconds"]
    seconds = {name: statistics.median(run["seconds"][name] for run in runs) for name in names}
    seconds["in all"] = statistics.median(sum(run["seconds"].values()) for run in runs)
    return seconds


def compare_builds(options: argparse.Namespace) -> None:
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(options.repeat):
        for side in SIDES:
            runs[side].append(run(options, side, options.documents))
    first = runs["C++"][0]
    if len({run["digest"] for side in SIDES for run in runs[side]}) > 1:
        raise SystemExit("the builds gave different bytes")
    print(
        f"{options.documents:,} documents, {options.epochs} epochs, {first['samples']:,} samples; "
        "same bytes"
    )
    print(f"arrays {first['arrays'] / 2**20:.0f} MiB; median of {options.repeat}")
    medians = {side: median_seconds(runs[side]) for side in SIDES}
    print(f"{'':16s}{'C++':>10s}{'numpy':>10s}{'ratio':>8s}")
    for name, seconds in medians["C++"].items():
        other = medians["numpy"][name]
        print(f"{name:16s}{seconds:8.2f} s{other:8.2f} s{other / seconds:7.1f}x")
    beside = [statistics.median(run["beside"] for run in runs[side]) / 2**20 for side in SIDES]
    print(f"{'beside':16s}{beside[0]:6.0f} MiB{beside[1]:6.0f} MiB")


def compare_packing(options: argparse.Namespace) -> None:
    few = max(1, options.documents // 50)
    sizes = {"C++": (few, options.documents), "numpy": (few,)}
    results = {(side, count): run(options, side, count) for side in SIDES for count in sizes[side]}
    if results["C++", few]["digest"] != results["numpy", few]["digest"]:
        raise SystemExit("the packings have different bytes")
    for (side, count), result in results.items():
        seconds = ", ".join(f"{name} {value:.2f} s" for name, value in result["seconds"].items())
        per_piece = (result["peak"] - 8 * result["bins"]) / result["pieces"]
        print(
            f"{side:5s} {count:>11,} documents, {result['pieces']:,} pieces in {result['bins']:,} "
            f"bins, padding {result['waste']:.4%}: {seconds}; {per_piece:.1f} bytes per piece "
            "beside 8 per bin",
            flush=True,
        )
    ours, theirs = (results[side, few]["seconds"]["cut and pack"] for side in SIDES)
    print(f"numpy / C++ for {few:,} documents: {theirs / ours:.0f}x")


def compare_blends(repeat: int) -> None:
    compiled = indexed_dataset.compiled
    print(f"{'data sets':>10s}{'C++':>14s}{'numpy':>14s}   per sample")
    for count in (1, 2, 8, 30, 100, 300, 1000):
        weights = np.random.RandomState(count).gamma(1.0, size=count) + 1e-3
        weights /= weights.sum()
        size, each = 20_000_000 // (count + 20), {}
        for side, module, samples in (("C++", compiled, size), ("numpy", numpy_loops, size // 100)):
            indexed_dataset.compiled = module
            times = []
            for _ in range(repeat):
                started = time.perf_counter()
                indexed_dataset.build_blend_index(weights, samples)
                times.append((time.perf_counter() - started) / samples)
            each[side] = statistics.median(times) * 1e9
        print(
            f"{count:>10d}{each['C++']:>11.1f} ns{each['numpy']:>11.1f} ns   "
            f"{each['numpy'] / each['C++']:.0f}x"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--documents", type=int, default=100_000_000, help="documents (default 100 million)"
    )
    parser.add_argument(
        "--epochs",
        type=int,
        default=1,
        help="epochs over the documents (default 1)",
    )
    parser.add_argument("--repeat", type=int, default=3, help="builds of each side (default 3)")
    parser.add_argument(
        "--packing", action="store_true", help="time the packing by best fit instead"
    )
    parser.add_argument("--blend", action="store_true", help="time the order of blends instead")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if indexed_dataset.compiled is None:
        raise SystemExit(
            "the C++ extension is not built, so there is nothing to compare: pip install -e ."
        )
    if options.side:
        worker(options)
    elif options.blend:
        compare_blends(options.repeat)
    elif options.packing:
        compare_packing(options)
    else:
        compare_builds(options)


if __name__ == "__main__":
    main()
