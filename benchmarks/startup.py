"""Seconds from launch to the end of the first step on 2 processes (pipeline of 2), and parts.

    python benchmarks/startup.py [--repeat 3]

Each start is a pair of fresh processes on this machine; the table gives the median. `import torch`,
in two processes at once, is the lower bound for any program that uses torch.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 512 "
    "--train-iters 1 --log-interval 1 --eval-iters 0 --num-workers 0 "
    "--pipeline-model-parallel-size 2"
).split()


def pair(command: list[str], until: str | None = None) -> float:
    """Measure the seconds until both processes end, or the first prints a line with `until`."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    started = time.perf_counter()
    processes = []
    for rank in range(2):
        env = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        out = subprocess.PIPE if until and rank == 0 else subprocess.DEVNULL
        processes.append(
            subprocess.Popen(
                command, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT, text=True
            )
        )
    seen = None
    if until:
        lines = []
        for line in processes[0].stdout or ():
            lines.append(line)
            if line.startswith(until) and seen is None:
                seen = time.perf_counter() - started
        if seen is None:
            raise SystemExit("the run printed no iteration line:\n" + "".join(lines[-20:]))
    if any(process.wait() for process in processes):
        raise SystemExit(f"{' '.join(command)} failed")
    return seen if seen is not None else time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=3, help="starts per row (default 3)")
    repeat = parser.parse_args().repeat
    python = sys.executable
    rows = [
        ("python -c pass", [python, "-c", "pass"], None),
        ("import megatron", [python, "-c", "import megatron"], None),
        ("import torch", [python, "-c", "import torch"], None),
        ("launch to first step", [python, "pretrain_gpt.py", *MODEL], " iteration "),
    ]
    medians = {}
    for name, command, until in rows:
        times = [pair(command, until) for _ in range(repeat)]
        medians[name] = statistics.median(times)
        print(
            f"{name:24s} {medians[name]:6.2f} s   (of {repeat}: {min(times):.2f} ... "
            f"{max(times):.2f})",
            flush=True,
        )
    print(
        "first step / import torch: "
        f"{medians['launch to first step'] / medians['import torch']:.2f}"
    )


if __name__ == "__main__":
    main()
