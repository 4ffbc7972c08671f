"""Run pretrain_gpt.py in N processes as a launcher would, each rank's output apart."""
from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.helpers.processes import free_port

ROOT = Path(__file__).resolve().parents[2]

TINY = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 100 --make-vocab-size-divisible-by 8 --log-interval 1 --eval-iters 0 --num-workers 0"
).split()


class Outcome(NamedTuple):
    """How one rank ended: exit code, standard output and error together, seconds."""

    code: int
    output: str
    seconds: float


def launch(
    n: int, arguments: Sequence[str], timeout_s: float = 240, env: Mapping[str, str] | None = None,
    absent: Sequence[int] = (), script: str = "pretrain_gpt.py",
) -> list[Outcome | None]:
    """Start the ranks of a world of n (without those in `absent`); None for an absent rank.

    A rank that outlives the time limit fails the test: nothing may hang.
    """
    port, started = str(free_port()), time.monotonic()
    base = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "OMPI_", "PMI", "RANK", "WORLD_SIZE"))}
    processes: list[subprocess.Popen[str] | None] = []
    for rank in range(n):
        if rank in absent:
            processes.append(None)
            continue
        launcher = (
            {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n), "LOCAL_WORLD_SIZE": str(n),
             "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            if n > 1
            else {}
        )
        variables = {**base, "OMP_NUM_THREADS": "1", "COLUMNS": "100", **launcher, **(env or {})}
        processes.append(
            subprocess.Popen(
                [sys.executable, script, *arguments], cwd=ROOT, env=variables, stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
        )
    outcomes: list[Outcome | None] = []
    for rank, process in enumerate(processes):
        if process is None:
            outcomes.append(None)
            continue
        try:
            output, _ = process.communicate(timeout=max(1.0, timeout_s - (time.monotonic() - started)))
        except subprocess.TimeoutExpired:
            for other in processes:
                if other is not None:
                    other.kill()
            output, _ = process.communicate()
            raise AssertionError(f"rank {rank} of {n} did not end within {timeout_s} s:\n{output[-3000:]}") from None
        outcomes.append(Outcome(process.returncode, output, time.monotonic() - started))
    return outcomes
