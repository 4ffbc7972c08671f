"""Number of threads of a process."""

import os

import pytest
import torch
import torch.distributed as dist

from megatron.training.run import host
from tests.training.run.test_interrupts import torchrun


@pytest.mark.parametrize(
    ("mine", "masks", "threads"),
    [
        (range(64), [range(64)] * 3, 21),
        (range(7), [range(7 * i, 7 * i + 7) for i in range(8)], 7),  # srun -c 7
        (range(16), [range(16)] * 4 + [range(16, 32)] * 4, 4),  # mpirun --bind-to numa
    ],
)
def test_cores_are_shared_by_those_that_may_use_them(
    monkeypatch,
    mine,
    masks,
    threads,
):
    chosen = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(mine))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: len(masks))
    monkeypatch.setattr(host, "masks_on_this_node", lambda _: [set(mask) for mask in masks])
    host.share_cores(torch.device("cpu"), len(masks))
    assert chosen == [threads]


@pytest.mark.slow
@pytest.mark.campaign("real-time")
def test_a_run_under_torchrun_says_what_it_set(monkeypatch):
    for name in ("OMP_NUM_THREADS", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    with torchrun("--train-iters", "1") as started:
        output, _ = started.communicate()
    assert started.returncode == 0, output
    cores = len(os.sched_getaffinity(0))
    assert f" threads: {max(1, cores // 2)} " in output and output.count(" malloc: ") == 1
