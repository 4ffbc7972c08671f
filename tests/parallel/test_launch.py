"""Launchers' variables as real ones set them, and real processes that meet, are missing, fail or are killed."""
from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import LaunchError
from megatron.parallel.launch import Launch, connect, detect_launch, select_device, variables_with_flags
from megatron.parallel.nodelist import compress_ranks, expand_counts, expand_hosts
from tests.helpers.processes import free_port, run_processes, run_processes_raw

ROOT = Path(__file__).resolve().parents[2]

TORCHRUN = {
    "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "node01",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "r7", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
# srun -N2 -n16 --ntasks-per-node=8, as a task sees it.
SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_PROCID": "11", "SLURM_LOCALID": "3", "SLURM_NODEID": "1",
    "SLURM_NTASKS": "16", "SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_JOB_NODELIST": "frontier[00120-00123]",
    "SLURM_STEP_NODELIST": "frontier[00121-00122]", "SLURMD_NODENAME": "frontier00122",
}  # fmt: skip
# The batch script of a job with --ntasks=16: rank-like variables, but no step.
BATCH = {
    "SLURM_JOB_ID": "4711", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS": "16",
    "SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_JOB_NODELIST": "frontier[00121-00122]",
}  # fmt: skip
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_RANK": "3", "PMIX_NAMESPACE": "prterun-a-17@1", "MASTER_ADDR": "a",
}  # fmt: skip
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {"PMI_RANK": "9", "PMI_SIZE": "16", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "8", "PALS_APID": "x"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "2", "MV2_COMM_WORLD_LOCAL_RANK": "0",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}  # fmt: skip


def seen(environ: Mapping[str, str]) -> tuple[str, int, int, int, int]:
    found = detect_launch(environ)
    return found.launcher, found.rank, found.local_rank, found.world_size, found.local_world_size


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("none", 0, 0, 1, 1)),
        ({"RANK": "", "WORLD_SIZE": " "}, ("none", 0, 0, 1, 1)),
        (TORCHRUN, ("torchrun", 5, 1, 8, 4)),
        (TORCHRUN | SRUN, ("torchrun", 5, 1, 8, 4)),  # torchrun started by srun
        (SRUN, ("slurm", 11, 3, 16, 8)),
        (SRUN | {"WORLD_SIZE": "16"}, ("slurm", 11, 3, 16, 8)),
        ({k: v for k, v in SRUN.items() if "STEP_N" not in k and "STEP_T" not in k}, ("slurm", 11, 3, 16, 4)),
        (BATCH, ("none", 0, 0, 1, 1)),
        (BATCH | {"SLURM_STEP_ID": "4294967291"}, ("none", 0, 0, 1, 1)),
        # salloc's interactive shell is a step too, with the job's number of tasks kept.
        (BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}, ("none", 0, 0, 1, 1)),
        (BATCH | {"SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "1"}, ("slurm", 0, 0, 1, 1)),  # srun -n1 --pty bash
        (OPEN_MPI, ("mpi", 3, 1, 4, 2)),
        (BATCH | OPEN_MPI, ("mpi", 3, 1, 4, 2)),
        (SRUN | OPEN_MPI, ("mpi", 3, 1, 4, 2)),  # mpirun starts its daemons as srun tasks
        (HYDRA, ("mpi", 1, 1, 2, 2)),
        (PALS | {"MASTER_ADDR": "x"}, ("mpi", 9, 1, 16, 8)),
        (MVAPICH, ("mpi", 0, 0, 2, 2)),
        (SRUN | {"PMI_RANK": "11", "PMI_SIZE": "16", "PMIX_RANK": "11"}, ("slurm", 11, 3, 16, 8)),
        # Frontier scripts that export torch's names inside each task.
        (SRUN | {"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16"}, ("torchrun", 11, 3, 16, 4)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ("torchrun", 0, 0, 1, 1)),
    ],
)
def test_who_started_us(environ: dict[str, str], expected: tuple[str, int, int, int, int]) -> None:
    assert seen(environ) == expected


def test_where_rank_0_is() -> None:
    found = detect_launch(TORCHRUN)
    assert (found.master_addr, found.master_port, found.store_served) == ("node01", 29500, True)
    found = detect_launch(SRUN)
    assert (found.master_addr, found.node, found.store_served) == ("frontier00121", "frontier00122", False)
    assert detect_launch(SRUN | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "3442"}).master_addr == "10.0.0.7"
    assert detect_launch(SRUN | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "3442"}).master_port == 3442
    one_node = SRUN | {"SLURM_STEP_NODELIST": "x1", "SLURM_STEP_TASKS_PER_NODE": "16", "SLURM_NODEID": "0"}
    assert detect_launch(one_node).master_addr == "127.0.0.1"
    assert detect_launch(HYDRA).master_addr == "127.0.0.1"
    # MPI over several nodes inside a Slurm job.
    several = {k: v for k, v in OPEN_MPI.items() if k != "MASTER_ADDR"} | BATCH
    assert detect_launch(several).master_addr == "frontier00121"


@pytest.mark.parametrize(
    ("changes", "address", "words"),
    [
        ({"MASTER_ADDR": "10.0.0.7 10.0.1.7"}, "10.0.0.7", "several addresses"),
        # MASTER_ADDR=$SLURM_SUBMIT_HOST in a batch job, where that is a login node, and in a job that one of its nodes
        # submitted; with torch's names exported inside each task, as scripts for Frontier do.
        ({"MASTER_ADDR": "login05", "SLURM_SUBMIT_HOST": "login05"}, "frontier00121", "frontier00121 is used"),
        ({"MASTER_ADDR": "login05.frontier.olcf.ornl.gov", "SLURM_SUBMIT_HOST": "login05.frontier.olcf.ornl.gov",
          "RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16"}, "frontier00121", "frontier00121 is used"),
        ({"MASTER_ADDR": "frontier00121", "SLURM_SUBMIT_HOST": "frontier00121"}, "frontier00121", ""),
        ({"MASTER_ADDR": "frontier00122.x", "SLURM_SUBMIT_HOST": "frontier00122.x"}, "frontier00122.x", ""),
        ({"MASTER_ADDR": "elsewhere", "SLURM_SUBMIT_HOST": "login05"}, "elsewhere", ""),
    ],
)  # fmt: skip
def test_addresses_of_existing_scripts(changes: dict[str, str], address: str, words: str) -> None:
    found = detect_launch(SRUN | changes)
    assert found.master_addr == address
    assert words in "".join(found.notices) and bool(found.notices) == bool(words)


def test_pbs_node_file(tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("x1001\nx1002\n")
    assert detect_launch(PALS | {"PBS_NODEFILE": str(nodes)}).master_addr == "x1001"
    with pytest.raises(LaunchError, match="PBS_NODEFILE.*absent"):
        detect_launch(PALS | {"PBS_NODEFILE": str(tmp_path / "absent")})


def test_ranks_of_a_step_agree_on_port_and_job_and_steps_differ() -> None:
    def meeting(**changes: str) -> tuple[int, str]:
        found = detect_launch(SRUN | changes)
        return found.master_port, found.job

    assert meeting() == meeting(SLURM_PROCID="2", SLURM_LOCALID="2", SLURM_NODEID="0", SLURMD_NODENAME="frontier00121")
    ports = {meeting(SLURM_STEP_ID=str(step))[0] for step in range(8)} | {meeting(SLURM_JOB_ID="4712")[0]}
    assert len(ports) == 9  # a hash: these nine differ
    assert all(1024 <= port < 32768 for port in ports)


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "1"}, ["RANK=1", "WORLD_SIZE"]),
        ({"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "RANK"]),
        (SRUN | {"WORLD_SIZE": "8"}, ["WORLD_SIZE=8", "16"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["LOCAL_RANK"]),
        (TORCHRUN | {"RANK": "x"}, ["RANK='x'"]),
        (TORCHRUN | {"RANK": "-1"}, ["RANK='-1'"]),
        (TORCHRUN | {"RANK": "8"}, ["rank 8", "world size 8"]),
        (TORCHRUN | {"LOCAL_RANK": "4"}, ["local rank 4", "of 4"]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, ["9 processes", "world size is 8"]),
        (TORCHRUN | {"WORLD_SIZE": "0"}, ["world size 0"]),
        (TORCHRUN | {"MASTER_PORT": "99999"}, ["MASTER_PORT=99999"]),
        (TORCHRUN | {"MASTER_PORT": "http"}, ["MASTER_PORT='http'"]),
        ({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}, ["MASTER_ADDR"]),
        # RANK exported in the batch script: all 16 tasks would be rank 0.
        (SRUN | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "16"}, ["RANK=0", "SLURM_PROCID=11"]),
        ({k: v for k, v in SRUN.items() if k != "SLURM_LOCALID"}, ["SLURM_LOCALID"]),
        (SRUN | {"SLURM_STEP_NODELIST": "frontier[1-"}, ["frontier[1-"]),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "eight"}, ["eight"]),
        (PALS, ["MASTER_ADDR", "16"]),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ["PMI_RANK=0", "MPI_LOCALRANKID"]),
        ({"PMIX_RANK": "3"}, ["PMIX_RANK=3"]),
    ],
)
def test_contradictions_name_variable_and_value(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        detect_launch(environ)
    for word in words:
        assert word in str(caught.value)


# -- node lists ------------------------------------------------------------------------------------------------------

PREFIX = st.text("abcxyz-", min_size=1, max_size=5).map(lambda s: "n" + s + "z")
RANGE = st.tuples(st.integers(0, 300), st.integers(0, 12), st.integers(1, 5))


@given(st.lists(st.tuples(PREFIX, st.lists(RANGE, max_size=4)), min_size=1, max_size=4))
def test_node_lists_expand_to_what_they_were_made_from(parts: list[tuple[str, list[tuple[int, int, int]]]]) -> None:
    expected: list[str] = []
    written: list[str] = []
    for prefix, ranges in parts:
        if not ranges:
            expected.append(prefix)
            written.append(prefix)
            continue
        inner = []
        for low, more, width in ranges:
            expected += [prefix + str(number).zfill(width) for number in range(low, low + more + 1)]
            first, last = str(low).zfill(width), str(low + more).zfill(width)
            inner.append(first if more == 0 else f"{first}-{last}")
        written.append(f"{prefix}[{','.join(inner)}]")
    assert expand_hosts(",".join(written)) == expected


def test_node_lists() -> None:
    expected = ["frontier00001", "frontier00002", "frontier00003", "frontier00007", "x1"]
    assert expand_hosts("frontier[00001-00003,00007],x1") == expected
    assert expand_hosts("r[1-2]n[08-09]-ib") == ["r1n08-ib", "r1n09-ib", "r2n08-ib", "r2n09-ib"]
    assert expand_hosts("host-1.example.org") == ["host-1.example.org"]
    assert expand_hosts("n[8-11]") == ["n8", "n9", "n10", "n11"]


@pytest.mark.parametrize("text", ["", "a,", ",a", "a[1-", "a]", "a[]", "a[3-1]", "a[1-2-3]", "a[x]", "a b", "a[1,,2]"])
def test_what_is_no_node_list(text: str) -> None:
    with pytest.raises(LaunchError, match="node list"):
        expand_hosts(text)


def test_counts_per_node() -> None:
    assert expand_counts("8(x3),2,1(x2)") == [8, 8, 8, 2, 1, 1]
    with pytest.raises(LaunchError, match="8x3"):
        expand_counts("8x3")


@given(st.sets(st.integers(0, 60)))
def test_compressed_ranks_say_the_same(ranks: set[int]) -> None:
    text = compress_ranks(ranks)
    back: list[int] = []
    for part in text.split(", ") if text else []:
        low, _, high = part.partition("-")
        back += range(int(low), int(high or low) + 1)
    assert back == sorted(ranks)
    # Shortest: no two parts touch.
    assert len(text.split(", ") if text else []) == sum(rank - 1 not in ranks for rank in ranks)


# -- devices ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "local_rank", "backend", "expected"),
    [
        (0, 3, None, "cpu"), (1, 3, None, "cuda:0"), (8, 3, None, "cuda:3"), (8, 3, "nccl", "cuda:3"),
        (8, 3, "gloo", "cpu"),
    ],
)
def test_devices(
    monkeypatch: pytest.MonkeyPatch, visible: int, local_rank: int, backend: str | None, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    launch = Launch(local_rank=local_rank, local_world_size=8, world_size=8, launcher="slurm")
    assert select_device(launch, backend) == torch.device(expected)


@pytest.mark.parametrize(
    ("visible", "backend", "words"),
    [(4, None, ["local rank 5", "4 devices"]), (0, "nccl", ["nccl", "gloo"]), (4, "mpi", ["'mpi'", "nccl", "gloo"])],
)
def test_devices_that_are_not_there(
    monkeypatch: pytest.MonkeyPatch, visible: int, backend: str | None, words: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    with pytest.raises(LaunchError) as caught:
        select_device(Launch(local_rank=5, local_world_size=8, world_size=8, launcher="slurm"), backend)
    assert all(word in str(caught.value) for word in words)


# -- processes that meet ---------------------------------------------------------------------------------------------


def total_of_ranks(_: int) -> tuple[float, list[str], int]:
    with connect(detect_launch(), timedelta(seconds=180)) as rendezvous:
        assert (os.environ["RANK"], dist.get_rank()) == (str(rendezvous.launch.rank), rendezvous.launch.rank)
        x = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(x)
        places, size = rendezvous.places, dist.get_world_size()
    assert not dist.is_initialized()
    rendezvous.close()  # harmless
    return x.item(), places, size


def test_three_processes_meet() -> None:
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    assert run_processes(3, total_of_ranks) == [(3.0, [f"{host}:cpu"] * 3, 3)] * 3


def as_slurm(rank: int, port: int) -> tuple[float, list[str], int]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ.update(
        SLURM_JOB_ID=str(port), SLURM_STEP_ID="0", SLURM_PROCID=str(rank), SLURM_LOCALID="0", SLURM_NODEID=str(rank),
        SLURM_NTASKS="2", SLURM_STEP_NUM_TASKS="2", SLURM_STEP_TASKS_PER_NODE="1(x2)", SLURMD_NODENAME=f"n{rank}",
        SLURM_STEP_NODELIST="n[0-1]", MASTER_ADDR="localhost", MASTER_PORT=str(port),
    )  # fmt: skip
    return total_of_ranks(rank)


def test_two_tasks_of_srun_meet() -> None:
    assert run_processes(2, as_slurm, free_port()) == [(1.0, ["n0:cpu", "n1:cpu"], 2)] * 2


def as_open_mpi(rank: int, job: str) -> tuple[float, list[str], int]:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    os.environ.update(
        OMPI_COMM_WORLD_RANK=str(rank), OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_LOCAL_RANK=str(rank),
        OMPI_COMM_WORLD_LOCAL_SIZE="2", PMIX_RANK=str(rank), PMIX_NAMESPACE=job,
    )  # fmt: skip
    return total_of_ranks(rank)


def test_two_processes_of_mpirun_meet_without_an_address() -> None:
    results = run_processes(2, as_open_mpi, f"prterun-{os.getpid()}@1")
    assert [(total, size) for total, _, size in results] == [(1.0, 2)] * 2


SCRIPT = """
import sys; sys.path.insert(0, {root!r})
import megatron, torch, torch.distributed as dist
launch = megatron.detect_launch()
with megatron.connect(launch) as rendezvous:
    x = torch.ones(1) * (launch.rank + 1)
    dist.all_reduce(x)
    # One write call: the processes share the pipe.
    sys.stdout.write(f"{{launch.launcher}} {{launch.rank}} of {{launch.world_size}}: {{x.item():g}}\\n")
"""


def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "meet.py"
    script.write_text(SCRIPT.format(root=str(ROOT)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["torchrun 0 of 2: 3", "torchrun 1 of 2: 3"]


def test_one_process_needs_no_launcher(tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(SCRIPT.format(root=str(ROOT)))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "none 0 of 1: 1\n"), done.stderr


def test_a_second_connection_is_refused() -> None:
    with connect(Launch(), timedelta(seconds=20)):
        with pytest.raises(LaunchError, match="initialised already"):
            connect(Launch(), timedelta(seconds=20))
        assert os.environ["WORLD_SIZE"] == "1"
    assert "WORLD_SIZE" not in os.environ


# -- processes that do not come, or do not stay ----------------------------------------------------------------------

SHORT = timedelta(seconds=10)  # on a busy machine processes come seconds apart


def meet_unless(rank: int, absent: int) -> None:
    if rank != absent:
        connect(detect_launch(), SHORT)


def test_a_rank_that_does_not_come_is_named_by_all_others() -> None:
    outcomes = run_processes_raw(4, meet_unless, 2)
    for rank in (0, 1, 3):
        succeeded, text = outcomes[rank]
        assert not succeeded and text.startswith("LaunchError: rank 2 of 4 did not come within 10 s"), text
        present = text.splitlines()[0]
        assert all(f"rank {other} on " in present for other in (0, 1, 3)) and "rank 2 on " not in present


@pytest.mark.slow
def test_rank_0_that_does_not_come_is_named_with_its_address() -> None:
    for succeeded, text in run_processes_raw(3, meet_unless, 0)[1:]:
        assert not succeeded and "does not reach rank 0 at 127.0.0.1:" in text


def meet_as(rank: int, ranks: list[int]) -> None:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(ranks[rank])
    connect(detect_launch(), timedelta(seconds=180))


@pytest.mark.parametrize(("ranks", "twice"), [([0, 1, 1], 1), pytest.param([0, 0, 1], 0, marks=pytest.mark.slow)])
def test_two_processes_with_one_rank_are_refused_everywhere(ranks: list[int], twice: int) -> None:
    """At once, and with the name of the other one: nobody waits for a rank that cannot come."""
    for succeeded, text in run_processes_raw(3, meet_as, ranks):
        assert not succeeded and f"two processes say they are rank {twice}: " in text, text
        assert len(re.findall(r"cpu, process \d+", text.splitlines()[0])) == 2


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        launch = Launch(world_size=2, local_world_size=2, master_port=port, launcher="torchrun")
        with pytest.raises(LaunchError, match=f"port {port}.*MASTER_PORT"):
            connect(launch, SHORT)


def reduce_until_an_end(rank: int, killed: int, message: str) -> str:
    """Rank `killed` dies at once, or fails with a message; the others explain what they see."""
    rendezvous = connect(detect_launch(), timedelta(seconds=180))
    try:
        dist.barrier()  # a failure would wake a rank that is still connecting
        if rank == killed:
            if not message:
                os.kill(os.getpid(), signal.SIGKILL)
            rendezvous.fail(message)
            rendezvous.close()
            return "ended"
        for _ in range(1000):
            dist.all_reduce(torch.ones(1))
            time.sleep(0.01)
    except RuntimeError as error:
        explanation = str(rendezvous.explain(error))
        assert str(rendezvous.explain(error)) == explanation
        rendezvous.close()
        return explanation
    return "nothing happened"


@pytest.mark.slow
def test_a_killed_rank_is_named_by_the_others() -> None:
    outcomes = run_processes_raw(3, reduce_until_an_end, 1, "")
    assert "exit code -9" in outcomes[1][1]
    for rank in (0, 2):
        assert "no sign of life from rank 1: died or was killed" in outcomes[rank][1]


def test_rank_0_killed_takes_the_store_with_it() -> None:
    outcomes = run_processes_raw(3, reduce_until_an_end, 0, "")
    for rank in (1, 2):
        assert "rank 0" in outcomes[rank][1] and "is gone" in outcomes[rank][1]


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_reaches_the_others(failing: int) -> None:
    outcomes = run_processes(3, reduce_until_an_end, failing, "DataError: corpus.bin is truncated")
    for rank in {0, 1, 2} - {failing}:
        assert f"rank {failing} (" in outcomes[rank]
        assert "failed: DataError: corpus.bin is truncated" in outcomes[rank]


def sleep_in_a_function_of_its_own(until: Path) -> None:
    while not until.exists():
        time.sleep(0.1)


def wait_for_a_sleeper(rank: int, explained: str) -> str:
    rendezvous = connect(detect_launch(), SHORT)
    if rank == 1:
        sleep_in_a_function_of_its_own(Path(explained))
        rendezvous.close()
        return "awake"
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        return str(rendezvous.explain(error))
    finally:
        Path(explained).touch()
    return "nothing happened"


@pytest.mark.slow
def test_the_time_limit_holds_from_the_first_collective_and_says_where_ranks_are(tmp_path: Path) -> None:
    text, _ = run_processes(2, wait_for_a_sleeper, str(tmp_path / "explained"))
    assert "no rank died" in text and "Timed out waiting 10000ms" in text
    assert "rank 1 in sleep_in_a_function_of_its_own (test_launch.py:" in text


def test_a_host_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo then gets the loopback interface, for processes of one host."""
    from megatron.parallel import rendezvous

    monkeypatch.setattr(rendezvous, "host_name_is_local", lambda: False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with connect(Launch(), timedelta(seconds=20)):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        dist.barrier()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_two_ranks_on_one_device_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of rank 0, over hellos as two ranks of one node would write them."""
    import json

    from megatron.parallel.rendezvous import Rendezvous

    meeting = Rendezvous(Launch(world_size=3, local_world_size=3), torch.device("cpu"), SHORT)
    meeting._store = dist.HashStore()
    hellos = [("n1", "cuda:0", "A"), ("n2", "cuda:0", "A"), ("n2", "cuda:0", "A")]
    for rank, (node, device, identity) in enumerate(hellos):
        hello = {"node": node, "pid": 1, "device": device, "identity": identity, "backend": "cpu:gloo,cuda:nccl"}
        meeting._store.set(f"hello/{rank}", json.dumps(hello))
    error = meeting._gather_hellos(time.monotonic() + 60)
    assert "ranks 1 and 2 both have device cuda:0 of node n2" in error
    meeting._store.set("hello/2", json.dumps({**hello, "identity": "B", "backend": "gloo"}))
    assert "rank 2 (n2:cuda:0) uses gloo" in meeting._gather_hellos(time.monotonic() + 60)


@pytest.mark.parametrize(("world_size", "lazy"), [(1024, None), (2048, "1")])
def test_gloo_beside_nccl_in_a_large_world(monkeypatch: pytest.MonkeyPatch, world_size: int, lazy: str | None) -> None:
    """The steps before torch.distributed starts on a device: the device is current; gloo connects on demand."""
    from megatron.parallel.rendezvous import Rendezvous

    done: list[Any] = []

    def start(backend: str, **_: Any) -> None:
        done.append((backend, os.environ.get("TORCH_GLOO_LAZY_INIT")))

    monkeypatch.delenv("TORCH_GLOO_LAZY_INIT", raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", done.append)
    monkeypatch.setattr(dist, "init_process_group", start)
    meeting = Rendezvous(Launch(rank=1, world_size=world_size), torch.device("cuda", 3), SHORT)
    meeting._store = dist.HashStore()
    meeting._initialise()
    # Once for the thread that starts torch.distributed: each has a current device of its own.
    assert done == [torch.device("cuda", 3), torch.device("cuda", 3), ("cpu:gloo,cuda:nccl", lazy)]
    meeting.close()
    assert "TORCH_GLOO_LAZY_INIT" not in os.environ


def test_what_tells_devices_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two dies of one card (bus address), two parts of one die (number), on ROCm and on CUDA (uuid)."""
    from types import SimpleNamespace

    from megatron.parallel.report import device_identity

    def identity(index: int, **properties: Any) -> str:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**properties))
        return device_identity(torch.device("cuda", index))

    monkeypatch.setattr(torch.version, "hip", "6.3")
    die = {"pci_domain_id": 0, "pci_bus_id": 193, "pci_device_id": 0}
    assert identity(0, **die) == identity(0, **die)
    assert identity(0, **die) != identity(0, **{**die, "pci_bus_id": 198})
    assert identity(0, **die) != identity(0, **{**die, "pci_domain_id": 1})
    assert identity(0, **die) != identity(1, **die)
    assert identity(0) == "", "a torch that does not tell"
    monkeypatch.setattr(torch.version, "hip", None)
    assert identity(0, uuid="a") != identity(0, uuid="b")


def test_flags_fill_in_what_the_environment_lacks() -> None:
    bare = {name: value for name, value in TORCHRUN.items() if not name.startswith(("MASTER_", "LOCAL_RANK"))}
    line = ["--lr", "1", "--master-addr=10.0.0.1", "--master-port", "4000", "--local_rank", "1", "--fp16"]
    launch = detect_launch(variables_with_flags(line, bare))
    assert (launch.master_addr, launch.master_port, launch.local_rank) == ("10.0.0.1", 4000, 1)
    assert variables_with_flags(["--lr", "1"], TORCHRUN) == TORCHRUN
    assert variables_with_flags(["--master-addr", "node01"], TORCHRUN) == TORCHRUN


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--master-addr", "node02"], ("node02", "MASTER_ADDR=node01")),
        (["--master-port=1"], ("--master-port 1", "MASTER_PORT=29500")),
        (["--local-rank", "3"], ("--local_rank 3", "LOCAL_RANK=1")),
    ],
)
def test_flags_that_contradict_the_environment(line: list[str], words: tuple[str, ...]) -> None:
    with pytest.raises(LaunchError) as error:
        variables_with_flags(line, TORCHRUN)
    assert all(word in str(error.value) for word in words)
