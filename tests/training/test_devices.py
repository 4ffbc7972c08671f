"""How many threads a process takes."""
from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection, Sequence

import pytest
import torch

from megatron.training import devices
from tests.helpers.launching import ROOT, TINY

NODE = range(64)


@pytest.mark.parametrize(
    ("mine", "masks", "local_world_size", "threads"),
    [
        (NODE, [NODE], 1, 64),
        (NODE, [NODE], 8, 8),  # nobody else was asked
        (NODE, [NODE] * 8, 8, 8),
        (NODE, [NODE] * 3, 3, 21),
        (range(7), [range(7 * i, 7 * i + 7) for i in range(8)], 8, 7),  # srun -c 7
        (range(16), [range(16)] * 4 + [range(16, 32)] * 4, 8, 4),  # mpirun --bind-to numa
        (range(2), [range(2)] * 8, 8, 1),
        (range(4), [range(4), range(2)], 2, 3),
        (range(2), [range(4), range(2)], 2, 1),
    ],
)
def test_cores_are_shared_by_those_that_may_use_them(
    mine: Collection[int], masks: Sequence[Collection[int]], local_world_size: int, threads: int
) -> None:
    assert devices.part_of_cores(mine, masks, local_world_size) == threads


def test_an_empty_setting_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP takes it for none, too."""
    chosen: list[int] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    assert "as OMP_NUM_THREADS says" not in devices.share_cores(torch.device("cpu"), 1)
    assert chosen == [len(os.sched_getaffinity(0))]


@pytest.mark.slow
@pytest.mark.parametrize("before", [None, "1"])
def test_what_torchrun_chose_is_told_from_what_the_user_did(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    """By the environment that torchrun itself, the parent, was started with."""
    started = {"PATH": os.environ["PATH"]} | ({} if before is None else {"OMP_NUM_THREADS": before})
    with subprocess.Popen(["cat"], env=started, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as agent:
        assert agent.stdin is not None and agent.stdout is not None
        agent.stdin.write(b"!")
        agent.stdout.read(1)  # it runs: the kernel shows no environment of a process that is only being started
        monkeypatch.setattr(os, "getppid", lambda: agent.pid)
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
        assert devices.torchrun_chose_threads() == (before is None)


@pytest.mark.slow
@pytest.mark.campaign("real-time")
def test_a_run_under_torchrun_says_what_it_set() -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "GLIBC_TUNABLES")}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "pretrain_gpt.py", *TINY,
         "--train-iters", "1"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cores = len(os.sched_getaffinity(0))
    assert f" threads: {max(1, cores // 2)} per process ({cores} core(s) allowed" in done.stdout
    assert done.stdout.count(" malloc: ") == 1
