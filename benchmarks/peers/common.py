"""Interface of peers: a JSON object as first argument, and a file with a JSON line per step.

A peer trains on random tokens, which cost nothing to generate, from the same range for all peers. A
step's time is from the end of the previous step to its own end, as in the metrics file of
pretrain_gpt.py; as there, the loss is read in each step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Task:
    """Training of a GPT-2: `steps` steps of `accumulation` micro-batches on each replica.

    micro_batch, sequence     samples of a micro-batch, and tokens of a sample
    dtype                     "bf16" or "fp32"
    output                    file for the figures
    tensor, pipeline, chunks  tensor- and pipeline-parallel sizes; chunks per pipeline rank
    device                    "cpu" or "cuda"
    compiled                  whether to use torch.compile
    defaults                  use the libraries' defaults, even if they are slower or do less
    save                      file for a checkpoint after the last step; "": none
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    micro_batch: int
    accumulation: int
    dtype: str
    steps: int
    output: str
    tensor: int = 1
    pipeline: int = 1
    chunks: int = 1
    device: str = "cpu"
    compiled: bool = False
    defaults: bool = False
    save: str = ""

    @property
    def bf16(self) -> bool:
        return self.dtype == "bf16"


LEARNING_RATE = 1e-4
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.999)
EPSILON = 1e-8
CLIP = 1.0


def read_task() -> Task:
    """Return the task on the command line."""
    return Task(**json.loads(sys.argv[1]))


def world() -> tuple[int, int]:
    """Return (rank, number of processes) from the launcher's variables."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def micro_batch(task: Task) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random inputs and targets, [micro_batch, sequence] each."""
    tokens = torch.randint(
        task.vocabulary, (task.micro_batch, task.sequence + 1), device=task.device
    )
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def decay_groups(parameters: Iterable[torch.Tensor]) -> list[dict[str, Any]]:
    """Return parameter groups: matrices and embeddings decay, biases and norms do not."""
    parameters = list(parameters)
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


def run_steps(
    task: Task,
    step: Callable[[], tuple[float | None, float]],
    state: Callable[[], Any] | None = None,
) -> None:
    """Call `step` task.steps times; rank 0 writes a line for each.

    `step` returns the mean loss of the step (None if this process does not know it) and the start
    time of its optimizer part, by time.perf_counter. With task.save, rank 0 then saves the result
    of `state` with torch.save, syncs it to disk, and writes a line with the seconds that this took.
    """
    rank, _ = world()
    cuda = torch.cuda if task.device == "cuda" else None
    with open(task.output if rank == 0 else os.devnull, "w", buffering=1) as file:
        before = time.perf_counter()
        for index in range(task.steps):
            loss, optimizer_began = step()
            if cuda:
                cuda.synchronize()
            now = time.perf_counter()
            record = {
                "step": index,
                "seconds": now - before,
                "optimizer_s": now - optimizer_began,
                "loss": loss,
            }
            record["time"] = time.time()
            if cuda:
                record["device_bytes"] = cuda.max_memory_allocated()
            file.write(json.dumps(record) + "\n")
            before = now
        if task.save and state and rank == 0:
            began = time.perf_counter()
            with open(task.save, "wb") as stored:
                torch.save(state(), stored)
                os.fsync(stored.fileno())
            file.write(json.dumps({"save_s": time.perf_counter() - began}) + "\n")
