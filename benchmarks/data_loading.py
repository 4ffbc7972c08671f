"""Measure the share of a training step that waits for data, and the speed of the loader.

    python benchmarks/data_loading.py [--steps 4] [--repeat 3] [--cold] [--folder /tmp]

Short documents (20 tokens on average, in shuffled order: a sample of 1024 tokens is gathered from
about 50 places) are the worst case, documents of 100,000 tokens the best. Each is read through a
memory map and by position (--no-mmap-bin-files), on demand (0 workers) and ahead (2 workers).
First the stream is measured separately, with all ways in turn and the median of the repeats; then
pretrain_gpt.py with GPT-2 124M, whose timers give the wait of a step.

Expected: a sample is 50 pieces of under 1 us each plus 0.1-0.2 ms of numpy, and a step of 124M
takes a second or more on two cores: under 0.1 % of the step without workers, less with them. The
target is under 2 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.data.gpt_dataset import GPTDataset, IndexRequest  # noqa: E402
from megatron.data.indexed_dataset import IndexedDataset  # noqa: E402
from megatron.data.indexed_writer import IndexedDatasetWriter  # noqa: E402
from megatron.data.sampler import MicroBatchStream, Share  # noqa: E402

SEQ_LENGTH, MICRO_BATCH, VOCAB_SIZE = 1024, 2, 50257
# Without it a step on a CPU spends its time on fresh pages, and would hide what the loader takes.
KEEP_MEMORY = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184:"
    "glibc.malloc.top_pad=268435456"
)
SHAPES = {"short": 20, "long": 100_000}  # mean tokens of a document
WAYS = [(shape, mmap, workers) for shape in SHAPES for mmap in (True, False) for workers in (0, 2)]
Way = tuple[str, bool, int]


def write(folder: Path, shape: str, tokens: int) -> str:
    """A data set of about `tokens` tokens in documents of lengths from 1 to twice the mean."""
    random, prefix = np.random.RandomState(0), str(folder / shape)
    sizes = random.randint(1, 2 * SHAPES[shape], size=max(1, tokens // SHAPES[shape]))
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for part in np.array_split(sizes, max(1, len(sizes) // 100_000)):
            writer.add_batch(
                random.randint(0, VOCAB_SIZE, part.sum()), part, np.ones(len(part), np.int64)
            )
    return prefix


def open_stream(prefix: str, mmap: bool, workers: int, samples: int) -> MicroBatchStream:
    indexed = IndexedDataset(prefix, mmap=mmap)
    request = IndexRequest(
        prefix,
        "train",
        "1",
        0,
        len(indexed),
        indexed.num_tokens,
        samples,
        SEQ_LENGTH,
        1,
        indexed.sizes,
    )
    data = GPTDataset(indexed, request)
    return MicroBatchStream(data, Share(MICRO_BATCH), num_workers=workers, vocab_size=VOCAB_SIZE)


def loader_rate(prefix: str, mmap: bool, workers: int, samples: int, cold: bool) -> float:
    """Measure tokens per second of the stream; `cold` drops the file from the page cache first."""
    if cold:
        with open(f"{prefix}.bin", "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    stream = open_stream(prefix, mmap, workers, samples)
    start = time.perf_counter()
    for _ in range(samples // MICRO_BATCH):
        stream.take(1)
    seconds = time.perf_counter() - start
    stream.close()
    return samples * SEQ_LENGTH / seconds


def train(
    folder: Path, prefix: str, mmap: bool, workers: int, steps: int
) -> Iterator[tuple[float, float]]:
    """Return (share of waiting for data, tokens per second) of each step but the first."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    command = [
        sys.executable,
        str(ROOT / "pretrain_gpt.py"),
        "--preset",
        "gpt2-124m",
        "--micro-batch-size",
        str(MICRO_BATCH),
        "--global-batch-size",
        str(MICRO_BATCH),
        "--lr",
        "1e-4",
        "--train-iters",
        str(steps + 1),
        "--bf16",
        "--data-path",
        prefix,
        "--split",
        "1",
        "--tokenizer-type",
        "NullTokenizer",
        "--vocab-size",
        str(VOCAB_SIZE - 1),
        "--log-interval",
        "1",
        "--eval-iters",
        "0",
        "--timing-log-level",
        "1",
        "--num-workers",
        str(workers),
        "--attention-dropout",
        "0",
        "--hidden-dropout",
        "0",
        "--metrics-file",
        str(metrics),
        *([] if mmap else ["--no-mmap-bin-files"]),
    ]
    environment = {**os.environ, "GLIBC_TUNABLES": KEEP_MEMORY}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{(result.stdout + result.stderr)[-2000:]}")
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    for record in [r for r in records if r["event"] == "iteration"][1:]:
        step_s = record["step_time_s"]
        yield record["phases_ms"]["data"]["max"] / 1e3 / step_s, record["tokens_per_s"]


def name(way: Way) -> str:
    shape, mmap, workers = way
    return f"{shape:5s} documents, {'map     ' if mmap else 'position'}, {workers} workers"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens", type=int, default=20_000_000, help="tokens of each data set (default 20 M)"
    )
    parser.add_argument(
        "--samples", type=int, default=4000, help="samples per measurement of the loader"
    )
    parser.add_argument(
        "--repeat", type=int, default=3, help="measurements of each kind (default 3)"
    )
    parser.add_argument(
        "--steps", type=int, default=4, help="measured training steps (default 4; 0: none)"
    )
    parser.add_argument(
        "--cold",
        action="store_true",
        help="drop the data from the page cache before each measurement",
    )
    parser.add_argument(
        "--folder", default=None, help="folder for the data (default: the system's)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch)
        prefixes = {shape: write(folder, shape, options.tokens) for shape in SHAPES}
        rates: dict[Way, list[float]] = {way: [] for way in WAYS}
        for _ in range(options.repeat):
            for way in WAYS:
                rates[way].append(
                    loader_rate(prefixes[way[0]], *way[1:], options.samples, options.cold)
                )
        for way in WAYS:
            low, middle, high = min(rates[way]), statistics.median(rates[way]), max(rates[way])
            print(
                f"{name(way)}: loader alone {middle / 1e6:7.2f} M tokens/s   ({low / 1e6:.2f} ... "
                f"{high / 1e6:.2f})"
            )
        for way in WAYS if options.steps else ():
            shares, needs = zip(
                *train(folder, prefixes[way[0]], *way[1:], options.steps), strict=True
            )
            need, alone = statistics.median(needs), statistics.median(rates[way])
            print(
                f"{name(way)}: waits {100 * statistics.median(shares):.4f} % of a step (most "
                f"{100 * max(shares):.4f} %); training takes {need:.0f} tokens/s, the loader gives "
                f"{alone / need:.0f} times that",
                flush=True,
            )


if __name__ == "__main__":
    main()
