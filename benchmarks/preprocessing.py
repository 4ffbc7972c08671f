"""MB/s of tokenization: bare libraries, our tool, and an imitation of Megatron's tool; memory.

    python benchmarks/preprocessing.py [--megabytes 48] [--repeat 3] [--tokenizers gpt2 hf sentencepiece tiktoken]

All rows are measured in the same run, on the same text in the same batches; the sides take turns,
and the table has medians.

- bare: the library's own batch call on texts that are in memory already (tokenizers:
  encode_batch_fast; tiktoken: encode_to_numpy; SentencePiece: encode_as_numpy where it is, else
  encode), its results thrown away. With two cores both as two threads of one process and as two
  processes.
- ours: `preprocess`, from JSON lines on disk to .bin/.idx on disk. "all" is the whole call,
  including the start of its workers; "steady" is the rate between the first and the last block, as
  in a long run. "per second of a core" uses CPU time instead of elapsed time: the relevant figure
  if other programs use the machine.
- stand-in: a reimplementation of the method of Megatron's tool: a multiprocessing pool maps lines
  to lists of ids, one tokenizer call per document (of the same Rust library, whereas Megatron's
  GPT2BPETokenizer is Python), in chunks of 32; the parent converts each list to an array and writes
  it.

Expected: ours/bare >= 0.85 steady, with as many processes as cores. Reading and parsing cost about
2 ms per MB of text, passing blocks and writing another 2 to 3, converting ids to arrays 1 to 15,
the tokenizers themselves 50 to 270. The start, about 0.7 s, is noticeable in "all" at these sizes.
Peak memory is the same for 8 times the input. Needs gpt2-vocab.json and gpt2-merges.txt in
$MEGATRON_TEST_DATA (default ../shared/data).
"""

from __future__ import annotations

import argparse
import base64
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tools"))

from megatron.data.tokenizer import adapter_of, settings_of
from megatron.data.tokenizer_adapters import byte_letters, gpt2
from megatron_preparation.encode import PreprocessOptions, texts_of_block
from megatron_preparation.preprocess import Listeners, Totals, preprocess
from megatron_preparation.sources import read_blocks
from tools.build_corpus import build_corpus
from tools.train_tokenizer import train_vocabulary

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("MEGATRON_TEST_DATA") or ROOT.parent / "shared" / "data")
Batch = Callable[[list[str]], Any]


def tokenizers_of(names: list[str], folder: Path, corpus: Path) -> dict[str, dict[str, Any]]:
    """Return arguments of build_tokenizer for each name, creating the needed files in `folder`."""
    vocab, merges = DATA / "gpt2-vocab.json", DATA / "gpt2-merges.txt"
    of_gpt2: dict[str, Any] = {
        "tokenizer_type": "GPT2BPETokenizer",
        "vocab_file": str(vocab),
        "merge_file": str(merges),
    }
    found: dict[str, dict[str, Any]] = {}
    for name in names:
        path = folder / f"{name}.model"
        if name == "gpt2":
            found[name] = of_gpt2
        elif name == "hf":
            tokenizer: Any = gpt2(vocab, merges)
            path = folder / "tokenizer.json"
            tokenizer._tokenizer.save(str(path))
            found[name] = {"tokenizer_type": "HFTokenizer", "tokenizer_model": str(path)}
        elif name == "sentencepiece":
            train_vocabulary([corpus], path, vocab_size=4096)
            found[name] = {
                "tokenizer_type": "GPTSentencePieceTokenizer",
                "tokenizer_model": str(path),
            }
        else:
            letters = byte_letters()
            ranks = {
                piece: i
                for piece, i in json.loads(vocab.read_text()).items()
                if piece != "<|endoftext|>"
            }
            lines = (
                f"{base64.b64encode(bytes(letters[c] for c in p)).decode()} {i}\n"
                for p, i in ranks.items()
            )
            path.write_text("".join(lines))
            found[name] = {"tokenizer_type": "TikTokenizer", "tokenizer_model": str(path)}
    return found


def in_this_process(arguments: dict[str, Any], threads: int) -> Any:
    """Return the tokenizer without the process that build_tokenizer puts around it."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    names = ("vocab_file", "merge_file", "tokenizer_model")
    files = {name: arguments[name] for name in names if name in arguments}
    return adapter_of(settings_of(arguments["tokenizer_type"], **files))[0]()


def bare_batch(arguments: dict[str, Any], threads: int) -> Batch:
    """The library's own call, without anything of ours around it."""
    kind = arguments["tokenizer_type"]
    tokenizer = in_this_process(arguments, threads)
    if kind == "HFTokenizer":
        rust = tokenizer._tokenizer
        return lambda texts: rust.encode_batch_fast(texts)
    if kind == "GPTSentencePieceTokenizer":
        processor = tokenizer._processor
        encode = getattr(processor, "encode_as_numpy", processor.encode)
        return lambda texts: encode(texts, num_threads=threads)
    tokenizer.encode("the first call builds the tables")
    encoder = tokenizer._ranks if kind == "GPT2BPETokenizer" else tokenizer
    if threads > 1:
        return lambda texts: encoder._encoding.encode_ordinary_batch(texts, num_threads=threads)
    return lambda texts: encoder._encode(texts)


def batches_of(corpus: Path) -> list[list[str]]:
    options = PreprocessOptions(tokenizer={})
    return [texts_of_block(block, options)[0] for block in read_blocks([corpus])]


def time_batches(encode: Batch, batches: list[list[str]]) -> tuple[float, float, float]:
    """Start and end on the clock that all processes share, and the seconds that a core worked."""
    encode(batches[0])
    started, worked = time.perf_counter(), time.process_time()
    for batch in batches:
        encode(batch)
    return started, time.perf_counter(), time.process_time() - worked


def bare_process(
    arguments: dict[str, Any], corpus: str, part: int, parts: int, barrier: Any, results: Any
) -> None:
    encode, batches = bare_batch(arguments, 1), batches_of(Path(corpus))[part::parts]
    barrier.wait()
    results.put(time_batches(encode, batches))


def bare_threads_process(
    arguments: dict[str, Any], corpus: str, threads: int, results: Any
) -> None:
    results.put(time_batches(bare_batch(arguments, threads), batches_of(Path(corpus))))


def bare_rate(
    arguments: dict[str, Any], corpus: Path, megabytes: float, processes: int, threads: int
) -> list[float]:
    """Measure MB/s of the bare library, and MB per second of CPU time.

    It runs in fresh processes, because a library keeps its initial threads.
    """
    context = multiprocessing.get_context("spawn")
    results: Any = context.Queue()
    if threads > 1:
        workers = [
            context.Process(
                target=bare_threads_process, args=(arguments, str(corpus), threads, results)
            )
        ]
    else:
        barrier = context.Barrier(processes)
        workers = [
            context.Process(
                target=bare_process, args=(arguments, str(corpus), i, processes, barrier, results)
            )
            for i in range(processes)
        ]
    for worker in workers:
        worker.start()
    times = [results.get() for _ in workers]
    for worker in workers:
        worker.join()
    seconds = max(end for _, end, _ in times) - min(start for start, _, _ in times)
    return [megabytes / seconds, megabytes / sum(worked for _, _, worked in times)]


def our_rates(
    arguments: dict[str, Any], corpus: Path, megabytes: float, workers: int
) -> list[float]:
    """Measure MB/s of the whole call, of its steady part, and the latter per second of CPU time."""
    seen: list[tuple[float, int, float]] = []

    def note(totals: Totals) -> None:
        seen.append((time.perf_counter(), totals.input_bytes, time.process_time()))

    with tempfile.TemporaryDirectory(dir=corpus.parent) as folder:
        options = PreprocessOptions(tokenizer=arguments, append_eod=True)
        started = time.perf_counter()
        preprocess(
            [corpus], f"{folder}/o", options, workers=workers, listeners=Listeners(on_progress=note)
        )
        seconds = time.perf_counter() - started
    text = megabytes * 1e6 / seen[-1][1]  # text per byte of JSON
    # With several workers the first blocks come almost together: the steady part begins after one
    # of each.
    first, last = seen[workers - 1], seen[-1]
    steady = (last[1] - first[1]) * text / 1e6
    return [megabytes / seconds, steady / (last[0] - first[0]), steady / (last[2] - first[2])]


_per_document: list[Callable[[str], list[int]]] = []


def _start_stand_in(arguments: dict[str, Any]) -> None:
    tokenizer = in_this_process(arguments, 1)
    kind = arguments["tokenizer_type"]
    if kind in ("HFTokenizer", "GPT2BPETokenizer"):
        rust = tokenizer._tokenizer
        _per_document[:] = [lambda text: rust.encode(text).ids]
    else:
        _per_document[:] = [tokenizer.encode]


def _stand_in_line(line: str) -> tuple[list[int], int]:
    document = json.loads(line)
    return _per_document[0](document["text"]), len(line)


def stand_in_rate(arguments: dict[str, Any], corpus: Path, megabytes: float, workers: int) -> float:
    """MB/s of one call per document, from the first document on: the pool's start is left out."""
    context = multiprocessing.get_context("spawn")
    sizes: list[int] = []
    with (
        context.Pool(workers, _start_stand_in, (arguments,)) as pool,
        corpus.open(encoding="utf-8") as lines,
        (corpus.parent / "stand_in.bin").open("wb") as output,
    ):
        pool.map(_stand_in_line, ['{"text": "warm"}'] * 64 * workers, 1)
        started = time.perf_counter()
        for ids, _ in pool.imap(_stand_in_line, lines, 32):
            output.write(np.array(ids, np.uint16).tobytes(order="C"))
            sizes.append(len(ids))
        seconds = time.perf_counter() - started
    return megabytes / seconds


def peaks(arguments: dict[str, Any], corpus: Path, workers: int) -> tuple[float, float]:
    """Peak resident MB of the tool's process and of the largest of its workers."""
    flags = [
        word for key, value in arguments.items() for word in (f"--{key.replace('_', '-')}", value)
    ]
    command = [
        sys.executable,
        str(ROOT / "tools/preprocess_data.py"),
        "--input",
        str(corpus),
        *flags,
    ]
    command += ["--workers", str(workers), "--output-prefix", str(corpus.parent / "memory")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    highest: dict[int, float] = {}
    while process.poll() is None:
        for pid in [process.pid, *children(process.pid)]:
            highest[pid] = max(highest.get(pid, 0.0), peak_mb(pid))
        time.sleep(0.02)
    parent = highest.pop(process.pid)
    return parent, max(highest.values(), default=0.0)


def children(pid: int) -> Iterator[int]:
    try:
        yield from map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    except OSError:
        return


def peak_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((float(line.split()[1]) / 1000 for line in lines if line.startswith("VmHWM")), 0.0)


def make_corpus(folder: Path, megabytes: float) -> tuple[Path, float]:
    """JSON lines of Python's sources, repeated to `megabytes` of text; the path and the MB."""
    once = folder / "once.jsonl"
    _, size = build_corpus(once, max_bytes=int(min(megabytes, 20) * 1e6))
    times = max(1, round(megabytes * 1e6 / size))
    corpus = folder / "corpus.jsonl"
    with corpus.open("wb") as file:
        for _ in range(times):
            file.write(once.read_bytes())
    return corpus, times * size / 1e6


def compare(
    name: str, arguments: dict[str, Any], corpus: Path, megabytes: float, repeat: int
) -> None:
    rows: dict[str, list[float]] = {}
    for _ in range(repeat):
        for processes, threads, labels in (
            (1, 1, ["bare, 1 process", "bare, 1 process, per second of a core"]),
            (2, 1, ["bare, 2 processes"]),
            (1, 2, ["bare, 2 threads"]),
        ):
            rates = bare_rate(arguments, corpus, megabytes, processes, threads)
            for label, rate in zip(labels, rates, strict=False):
                rows.setdefault(label, []).append(rate)
        rows.setdefault("stand-in, 2 processes", []).append(
            stand_in_rate(arguments, corpus, megabytes, 2)
        )
        for workers in (1, 2):
            labels = [
                f"ours, {workers} worker(s), {what}"
                for what in ("all", "steady", "per second of a core")
            ]
            rates = our_rates(arguments, corpus, megabytes, workers)
            # workers' cores are not ours
            for label, rate in zip(labels[: 4 - workers], rates, strict=False):
                rows.setdefault(label, []).append(rate)
    medians = {label: statistics.median(rates) for label, rates in rows.items()}
    print(f"{name}: {arguments['tokenizer_type']}")
    for label, rates in rows.items():
        print(f"  {label:42s} {medians[label]:7.2f} MB/s   ({min(rates):.2f} ... {max(rates):.2f})")
    for ours, other in (
        ("ours, 1 worker(s), steady", "bare, 1 process"),
        ("ours, 1 worker(s), per second of a core", "bare, 1 process, per second of a core"),
        ("ours, 2 worker(s), steady", "bare, 2 processes"),
        ("ours, 2 worker(s), steady", "bare, 2 threads"),
        ("ours, 2 worker(s), all", "bare, 2 processes"),
        ("ours, 2 worker(s), all", "stand-in, 2 processes"),
    ):
        print(f"  {ours} / {other}: {medians[ours] / medians[other]:.2f}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--megabytes", type=float, default=48, help="MB of text for the rates (default 48)"
    )
    parser.add_argument("--repeat", type=int, default=3, help="runs per row (default 3)")
    names = ("gpt2", "hf", "sentencepiece", "tiktoken")
    parser.add_argument("--tokenizers", nargs="*", default=list(names), choices=names)
    parser.add_argument(
        "--memory-megabytes",
        type=float,
        default=16,
        help="size of the smaller input for the memory test; 0: no memory test",
    )
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="preprocessing-"))
    try:
        corpus, megabytes = make_corpus(folder, args.megabytes)
        print(
            f"{megabytes:.1f} MB of text, {corpus.stat().st_size / 1e6:.1f} MB of JSON lines",
            flush=True,
        )
        arguments = tokenizers_of(args.tokenizers, folder, folder / "once.jsonl")
        for name in args.tokenizers:
            compare(name, arguments[name], corpus, megabytes, args.repeat)
        if args.memory_megabytes and args.tokenizers:
            name = args.tokenizers[0]
            print(f"peak resident MB, {name}: the tool's process, its largest worker")
            for times in (1, 8):
                corpus, megabytes = make_corpus(folder, times * args.memory_megabytes)
                for workers in (1, 2):
                    parent, worker = peaks(arguments[name], corpus, workers)
                    print(
                        f"  {megabytes:6.1f} MB of text, {workers} worker(s): {parent:.0f}, "
                        f"{worker:.0f}",
                        flush=True,
                    )
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
