"""How many threads a process takes, and how much memory it has held."""
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


def without_threads() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "GLIBC_TUNABLES")}


@pytest.mark.parametrize("environment", [{}, {"OMP_NUM_THREADS": "1"}])
def test_what_torchrun_chose_is_told_from_what_the_user_did(environment: dict[str, str]) -> None:
    child = "from megatron.training.devices import torchrun_chose_threads as chose; print(chose())"
    agent = f"""
import os, subprocess, sys
added = dict(OMP_NUM_THREADS="1", TORCHELASTIC_RUN_ID="none")
subprocess.run([sys.executable, "-c", {child!r}], env={{**os.environ, **added}}, check=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", agent], env={**without_threads(), "PYTHONPATH": str(ROOT), **environment},
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert done.stdout.strip() == str(not environment)


def test_memory_is_that_of_the_process_alone() -> None:
    """Not of the large one that started it, whose peak the system counts for it until its program begins."""
    child = """
import torch
from megatron.training.devices import peak_memory_bytes as peak
before, held = peak(torch.device("cpu")), bytearray(b"x" * (256 * 2**20))
del held
print(before, peak(torch.device("cpu")))
"""
    starter = f"import subprocess, sys; held = b'x' * 3 * 2**29; subprocess.run([sys.executable, '-c', {child!r}])"
    done = subprocess.run(
        [sys.executable, "-c", starter], cwd=ROOT, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, after = (int(word) for word in done.stdout.split())
    assert 2**24 < before < 3 * 2**29 and after > before + 200 * 2**20  # the most, not what is held now


@pytest.mark.slow
def test_a_run_under_torchrun_says_what_it_set() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "pretrain_gpt.py", *TINY,
         "--train-iters", "1"],
        cwd=ROOT, env=without_threads(), capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    cores = len(os.sched_getaffinity(0))
    part = max(1, cores // 2)
    assert f" threads: {part} per process ({cores} core(s) allowed, 2 process(es) on the node)\n" in done.stdout
    assert f"device: CPU, {part} thread(s) per process" in done.stdout
    assert done.stdout.count(" malloc: ") == 1
