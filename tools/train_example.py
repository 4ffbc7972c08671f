"""Train a small GPT on text from this machine, and print a sample. `make train` runs this.

Creates a corpus from the Python standard library and trains a vocabulary on it; both are kept in
--folder and reused. Then runs pretrain_gpt.py on 2 CPU processes or up to 2 accelerators (two
processes form an interleaved pipeline with ZeRO-1), generates the sample and writes a report. Exit
code 1 if the validation loss does not fall as expected. After Ctrl-C the same command continues
from the checkpoint that was saved, if any.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

if not __package__:  # run by its path, perhaps of a clone that is not installed
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.config.option import Parser, integer
from megatron.errors import LaunchError, print_error
from megatron.metrics_file import read_records
from megatron.parallel import parent_watch
from megatron.planner import subprocesses
from megatron.training.run.process import as_tool, handled_signals

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
PROMPTS = ("def main(", "import ", '"""Return the')
UNFINISHED = "unfinished.json"  # exists until all steps have ended: what is trained, and where
PEERS_LEAVE_S = 60.0  # time for the other processes to end after one failed
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ONE_PRESS_S = 1.0  # `timeout` sends a signal twice


@dataclass(frozen=True)
class Size:
    """Sizes of the example.

    corpus_megabytes           size of the corpus
    sequence                   tokens per sample
    micro_batch, global_batch  in samples
    eval_interval, eval_iters  iterations between evaluations, and iterations of each
    sample_tokens              number of tokens to generate after training
    least_drop_nats            how far the validation loss must fall
    """

    corpus_megabytes: float
    vocab_size: int
    layers: int
    hidden: int
    heads: int
    sequence: int
    micro_batch: int
    global_batch: int
    iterations: int
    eval_interval: int
    eval_iters: int
    lr: float
    sample_tokens: int
    least_drop_nats: float


FULL = Size(20.0, 4096, 8, 256, 4, 256, 4, 16, 300, 50, 8, 2e-3, 48, 1.5)
QUICK = Size(0.6, 512, 4, 32, 2, 32, 1, 4, 20, 10, 2, 1e-2, 8, 0.0)


@dataclass(frozen=True)
class LocalMachine:
    """Machine of the example.

    device     "cuda" (also for ROCm) or "cpu"
    processes  number of processes
    threads    threads of each process
    bf16       whether to train in bf16
    reason     description of the choice, to be printed
    """

    device: str
    processes: int
    threads: int
    bf16: bool
    reason: str


def build_parser() -> argparse.ArgumentParser:
    """Build the parser."""
    parser = Parser(description=__doc__)
    parser.add_argument(
        "--folder",
        default="runs/example",
        metavar="FOLDER",
        help="folder for everything that is written; FOLDER/run is removed first, unless an "
        "interrupted run is resumed",
    )
    parser.add_argument(
        "--iterations",
        type=integer(),
        metavar="N",
        help="number of training iterations (default: that of the example)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="train a tiny model for 20 iterations as a smoke test"
    )
    return parser


class Interrupted(Exception):
    """Signal to this process, raised once its child processes have ended."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number


@as_tool
def main(argv: Sequence[str]) -> int:
    """Run and return the exit code.

    It is 0, 1 if the loss did not fall enough, 2 after an error, 128 + N after signal N.
    """
    args = build_parser().parse_args(argv)
    size = QUICK if args.quick else FULL
    folder = Path(args.folder)
    number = signal.SIGINT
    try:
        return run_example(size, args.iterations or size.iterations, folder)
    except Interrupted as stop:
        number = stop.number
    except KeyboardInterrupt:  # between two processes
        pass
    saved = checkpoint_of(folder)
    what = f"{saved} is saved: the same command resumes from it"
    if saved is None:
        what = "no checkpoint was saved: the same command starts training from the beginning"
    print(f" {number.name}: {what}", file=sys.stderr, flush=True)
    return 128 + number


def run_example(size: Size, iterations: int, folder: Path) -> int:
    """Run the steps of the example; return the exit code. Raises Interrupted."""
    steps = Steps()
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary, data = prepare(steps, size, folder)
    run = folder / "run"
    picture = folder / "loss.png"
    stamp = folder / UNFINISHED
    job = {"size": asdict(size), "iterations": iterations}
    machine = unfinished(stamp, job) if checkpoint_of(folder) else None
    load = ["--load", str(run)] if machine else []
    if machine is None:
        machine = steps.run("machine", choose_machine)
        if before := checkpoint_of(folder):
            print(
                f" {before} is removed: it has another size or different --iterations", flush=True
            )
        shutil.rmtree(run, ignore_errors=True)
        stamp.write_text(json.dumps(job | {"machine": asdict(machine)}))
    else:
        print(f"\n resuming from {checkpoint_of(folder)}, saved by an interrupted run")
    print(f" {machine.reason}", flush=True)
    arguments = training_arguments(size, machine, iterations, vocabulary, data, run)
    steps.run(
        f"training: {iterations} iterations on {machine.processes} process(es)",
        lambda: train([*arguments, *load], machine),
    )
    steps.run(
        "text from the trained model",
        lambda: execute(
            tool(
                "generate_text.py",
                "--load",
                run,
                "--tokens",
                size.sample_tokens,
                "--temperature",
                0.7,
                "--top-k",
                40,
                "--metrics-file",
                run / "metrics.jsonl",
                *[w for prompt in PROMPTS for w in ("--prompt", prompt)],
            ),
            environment(machine),
        ),
    )
    steps.run(
        "report",
        lambda: execute(tool("report.py", run, "--picture", picture, "--title", "make train")),
    )
    stamp.unlink()
    return summary(size, run, picture, steps)


def prepare(steps: Steps, size: Size, folder: Path) -> tuple[Path, Path]:
    """Make the vocabulary and the token files; return their paths."""
    corpus = folder / "corpus.jsonl"
    vocabulary = folder / "vocabulary.model"
    prefix = folder / "corpus"
    data = Path(f"{prefix}_text_document")
    steps.run(
        "corpus: the sources of Python's standard library",
        lambda: make(
            corpus,
            [corpus],
            tool("build_corpus.py", "--output", corpus, "--max-megabytes", size.corpus_megabytes),
        ),
    )
    steps.run(
        f"vocabulary: SentencePiece, {size.vocab_size} entries",
        lambda: make(
            vocabulary,
            [vocabulary],
            tool(
                "train_tokenizer.py",
                "--input",
                corpus,
                "--output",
                vocabulary,
                "--vocab-size",
                size.vocab_size,
            ),
        ),
    )
    steps.run(
        "tokens: .bin and .idx",
        lambda: make(
            data,
            [data.with_name(data.name + ".bin"), data.with_name(data.name + ".idx")],
            tool(
                "preprocess_data.py",
                "--input",
                corpus,
                "--output-prefix",
                prefix,
                "--tokenizer-type",
                "GPTSentencePieceTokenizer",
                "--tokenizer-model",
                vocabulary,
                "--append-eod",
                "--workers",
                2,
            ),
        ),
    )
    return vocabulary, data


def unfinished(stamp: Path, job: Mapping[str, object]) -> LocalMachine | None:
    """Return the machine of an interrupted run of the same job; None if there is no such run."""
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError):
        before = json.loads(stamp.read_text())
        machine = LocalMachine(**before.pop("machine"))
        return machine if before == job else None
    return None


def checkpoint_of(folder: Path) -> Path | None:
    """Return the newest valid checkpoint of an interrupted run; None if there is none."""
    from megatron.checkpoint.find import find

    return find(folder / "run").folder if (folder / UNFINISHED).exists() else None


class Steps:
    """Run the steps of the example under headings, and record their times."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.seconds: dict[str, float] = {}

    def run(self, title: str, body: Callable[[], T]) -> T:
        print(f"\n=== {title}", flush=True)
        start = time.monotonic()
        result = body()
        self.seconds[title] = time.monotonic() - start
        print(f"    {self.seconds[title]:.1f} s", flush=True)
        return result


def tool(name: str, *arguments: object) -> list[str]:
    """Return the command of another tool in this folder."""
    return [sys.executable, str(ROOT / "tools" / name), *map(str, arguments)]


def execute(command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
    """Run a command to its end. Raises LaunchError if it fails, and Interrupted."""
    code = run_together([command], [os.environ if env is None else env])[0]
    if code:
        raise LaunchError(
            f"{Path(command[1]).name} ended with exit code {code}: see its message above"
        )


def make(target: Path, outputs: Sequence[Path], command: Sequence[str]) -> None:
    """Run `command`, unless its outputs exist from the same command and unchanged inputs."""
    stamp = target.with_name(target.name + ".made-by.json")
    inputs = {
        a: os.stat(a).st_mtime_ns
        for a in command[2:]
        if os.path.isfile(a) and Path(a) not in outputs
    }
    expected = json.dumps({"command": list(command[2:]), "inputs": inputs})
    if all(path.exists() for path in outputs) and stamp.exists() and stamp.read_text() == expected:
        print(f" reused: {', '.join(map(str, outputs))}", flush=True)
        return
    stamp.unlink(missing_ok=True)
    execute(command)
    stamp.write_text(expected)


def choose_machine() -> LocalMachine:
    """Choose up to 2 accelerators if present, otherwise 2 CPU processes in the faster dtype."""
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if devices:
        used = min(devices, 2)
        name = torch.cuda.get_device_name(0)
        return LocalMachine("cuda", used, 1, True, f"{used} of {devices} device(s) ({name}), bf16")
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    torch.set_num_threads(threads)
    rates = {dtype: matmul_gflops(dtype) for dtype in (torch.float32, torch.bfloat16)}
    bf16 = rates[torch.bfloat16] > rates[torch.float32]
    reason = (
        f"2 processes of {threads} thread(s) on the CPU, in {'bf16' if bf16 else 'fp32'} (matrix "
        f"products: {rates[torch.float32]:.0f} GFLOP/s in fp32, {rates[torch.bfloat16]:.0f} in "
        "bf16)"
    )
    return LocalMachine("cpu", 2, threads, bf16, reason)


def matmul_gflops(dtype: object, seconds: float = 1.0) -> float:
    """Measure the rate of matrix products [1024, 256] x [256, 1024], as in the example's MLP."""
    import torch

    a, b = torch.randn(1024, 256).to(dtype), torch.randn(256, 1024).to(dtype)  # type: ignore[call-overload]
    a @ b  # warm-up
    count = 0
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        a @ b
        count += 1
    return count * 2 * 1024 * 256 * 1024 / (time.perf_counter() - start) / 1e9


def training_arguments(
    size: Size, machine: LocalMachine, iterations: int, vocabulary: Path, data: Path, run: Path
) -> list[str]:
    """Return the arguments of pretrain_gpt.py."""
    settings: dict[str, object] = {
        "num-layers": size.layers,
        "hidden-size": size.hidden,
        "num-attention-heads": size.heads,
        "seq-length": size.sequence,
        "max-position-embeddings": size.sequence,
        "position-embedding-type": "rope",
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "make-vocab-size-divisible-by": 128,
        "micro-batch-size": size.micro_batch,
        "global-batch-size": size.global_batch,
        "train-iters": iterations,
        "lr": size.lr,
        "min-lr": size.lr / 10,
        "lr-decay-style": "cosine",
        "lr-warmup-iters": max(1, iterations // 20),
        "weight-decay": 0.1,
        "adam-beta2": 0.95,
        "clip-grad": 1.0,
        "seed": 1234,
        "zero-stage": 1,
        "tokenizer-type": "GPTSentencePieceTokenizer",
        "tokenizer-model": vocabulary,
        "data-path": data,
        "split": "95,5,0",
        "eval-interval": size.eval_interval,
        "eval-iters": size.eval_iters,
        "log-interval": 10,
        "save": run,
        "num-workers": 1,
    }
    if machine.processes == 2:
        settings["pipeline-model-parallel-size"] = 2
        settings["num-layers-per-virtual-pipeline-stage"] = size.layers // 4
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return [*words, "--eval-at-start", *(["--bf16"] if machine.bf16 else [])]


def environment(machine: LocalMachine) -> dict[str, str]:
    """Return the environment of every process; `train` adds a launcher's variables."""
    env = dict(os.environ)
    if machine.device == "cpu":
        env.setdefault("OMP_NUM_THREADS", str(machine.threads))
    return env


def train(arguments: Sequence[str], machine: LocalMachine) -> None:
    """Start the processes of the training as a launcher would, and wait for all.

    Raises LaunchError if one fails, and Interrupted.
    """
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *arguments]
    count = machine.processes
    with subprocesses.reserve_port() as reserved:
        port = reserved.getsockname()[1]
        environments = [
            subprocesses.environment(environment(machine), rank, count, port)
            for rank in range(count)
        ]
        codes = run_together([command] * count, environments)
    if any(codes):
        raise LaunchError(
            f"training failed, exit codes of the processes {codes}: see their messages above"
        )


def run_together(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]
) -> list[int | None]:
    """Run commands at the same time and return their exit codes.

    After a process fails, the others get time to report; those that have not ended by then are
    killed, and their codes are None. Raises Interrupted after a signal, once all have ended. Each
    process runs in a separate session, so that it receives a terminal's Ctrl-C once, from this
    process: a second signal would end it without saving. The kernel kills the processes if this
    process dies.
    """
    processes: list[subprocess.Popen[bytes]] = []
    watch = [sys.executable, "-I", "-S", parent_watch.__file__, str(os.getpid())]
    deadline = None
    first = None
    with noted_signals() as noted:
        try:
            for command, env in zip(commands, environments, strict=True):
                watched = [*watch, *command]
                processes.append(subprocess.Popen(watched, env=env, start_new_session=True))
            while any(process.poll() is None for process in processes):
                for number in [noted.pop(0) for _ in noted[:]]:
                    first = first or number
                    for process in processes:
                        process.send_signal(number)
                if deadline is None and any(process.poll() for process in processes):
                    deadline = time.monotonic() + (5.0 if first else PEERS_LEAVE_S)
                if deadline is not None and time.monotonic() > deadline:
                    break
                time.sleep(0.1)
            codes = [process.poll() for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    if first := first or next(iter(noted), None):
        raise Interrupted(first)
    return codes


@contextlib.contextmanager
def noted_signals() -> Iterator[list[signal.Signals]]:
    """Yield a list that collects SIGNALS, which do not end this process meanwhile.

    A repetition of a signal within ONE_PRESS_S does not count.
    """
    noted = list[signal.Signals]()
    last = dict[int, float]()

    def note(number: int) -> None:
        now = time.monotonic()
        if now - last.get(number, float("-inf")) > ONE_PRESS_S:
            noted.append(signal.Signals(number))
            last[number] = now

    with handled_signals(SIGNALS, note):
        yield noted


def summary(size: Size, run: Path, picture: Path, steps: Steps) -> int:
    """Print the results; return 0, or 1 if the validation loss fell less than expected."""
    records = read_records(run / "metrics.jsonl")
    valid = [r for r in records if r["event"] == "validation" and r["dataset"] == "valid"]
    iterations = [r for r in records if r["event"] == "iteration"]
    first = valid[0]
    last = valid[-1]
    drop = first["lm_loss"] - last["lm_loss"]
    tokens_per_s = sum(r["tokens_per_s"] for r in iterations) / len(iterations)
    print("\n=== summary")
    for title, seconds in steps.seconds.items():
        print(f" {seconds:7.1f} s  {title}")
    print(f" {time.monotonic() - steps.start:7.1f} s  in total")
    print(
        f" validation loss: {first['lm_loss']:.3f} at iteration {first['iteration']}, "
        f"{last['lm_loss']:.3f} at iteration {last['iteration']}: down by {drop:.3f} nats"
    )
    print(f" speed: {tokens_per_s:,.0f} tokens per second")
    print(f" checkpoint and metrics: {run}\n loss curve: {picture}")
    print(f" report, for a browser: {run / 'report.html'}")
    if drop >= size.least_drop_nats:
        return 0
    print_error(
        f"the validation loss fell by {drop:.3f} nats, expected at least {size.least_drop_nats}"
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
