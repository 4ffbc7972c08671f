"""How many threads a process takes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Sequence

import pytest
import torch

from megatron.training.run import host
from tests.helpers.launching import ROOT, TINY

NODE = range(64)


@pytest.mark.parametrize(
    ("mine", "masks", "local_world_size", "threads"),
    [
        (NODE, [NODE], 8, 8),  # nobody else was asked
        (NODE, [NODE] * 3, 3, 21),
        (range(7), [range(7 * i, 7 * i + 7) for i in range(8)], 8, 7),  # srun -c 7
        (range(16), [range(16)] * 4 + [range(16, 32)] * 4, 8, 4),  # mpirun --bind-to numa
        (range(4), [range(4), range(2)], 2, 3),
        (range(2), [range(4), range(2)], 2, 1),
    ],
)
def test_cores_are_shared_by_those_that_may_use_them(
    mine: Collection[int], masks: Sequence[Collection[int]], local_world_size: int, threads: int
) -> None:
    assert host.part_of_cores(mine, masks, local_world_size) == threads


def test_an_empty_setting_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP takes it for none, too."""
    chosen: list[int] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    host.share_cores(torch.device("cpu"), 1)
    assert chosen == [len(os.sched_getaffinity(0))]


@pytest.mark.slow
@pytest.mark.campaign("real-time")
def test_a_run_under_torchrun_says_what_it_set() -> None:
    environment = {
        k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "GLIBC_TUNABLES")
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "pretrain_gpt.py",
            *TINY,
            "--train-iters",
            "1",
        ],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cores = len(os.sched_getaffinity(0))
    assert f" threads: {max(1, cores // 2)} " in done.stdout
    assert done.stdout.count(" malloc: ") == 1
