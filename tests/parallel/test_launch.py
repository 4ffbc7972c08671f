"""Launchers' variables as real ones set them, node lists, and the device of a process."""

import os
import re
from types import SimpleNamespace

import pytest
import torch

from megatron.errors import LaunchError
from megatron.parallel.launch import (
    Launch,
    detect_launch,
    first_host,
    select_device,
    variables_with_flags,
)
from megatron.parallel.process_descriptions import device_identity
from megatron.parallel.rank_mapping import VISIBLE

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node01",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "r7",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
# A task's view of srun -N2 -n16 --ntasks-per-node=8.
SRUN = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "11",
    "SLURM_LOCALID": "3",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2)",
    "SLURM_JOB_NODELIST": "frontier[00120-00123]",
    "SLURM_STEP_NODELIST": "frontier[00121-00122]",
    "SLURMD_NODENAME": "frontier00122",
}
# The batch script of a job with --ntasks=16: rank-like variables, but no step.
BATCH = {
    "SLURM_JOB_ID": "4711",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "16",
    "SLURM_TASKS_PER_NODE": "8(x2)",
    "SLURM_JOB_NODELIST": "frontier[00121-00122]",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_RANK": "3",
    "PMIX_NAMESPACE": "prterun-a-17@1",
    "MASTER_ADDR": "a",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {
    "PMI_RANK": "9",
    "PMI_SIZE": "16",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "8",
    "PALS_APID": "x",
}


LOGIN = "login05.frontier.olcf.ornl.gov"


def without(environ, *fragments):
    return {
        name: value
        for name, value in environ.items()
        if not any(fragment in name for fragment in fragments)
    }


# (launcher, rank, local rank, world size, local world size, address of the first process), or the
# words of a refusal.
LAUNCHES = [
    ({}, ("none", 0, 0, 1, 1, "127.0.0.1")),
    (TORCHRUN, ("torchrun", 5, 1, 8, 4, "node01")),
    (TORCHRUN | SRUN, ("torchrun", 5, 1, 8, 4, "node01")),  # torchrun started by srun
    (SRUN, ("slurm", 11, 3, 16, 8, "frontier00121")),
    (without(SRUN, "STEP_N", "STEP_T"), ("slurm", 11, 3, 16, 4, "frontier00120")),
    (
        SRUN
        | {"SLURM_STEP_NODELIST": "x1", "SLURM_STEP_TASKS_PER_NODE": "16", "SLURM_NODEID": "0"},
        ("slurm", 11, 3, 16, 16, "127.0.0.1"),
    ),
    (BATCH | {"SLURM_STEP_ID": "4294967291"}, ("none", 0, 0, 1, 1, "127.0.0.1")),
    # salloc's interactive shell is a step too, which keeps the job's number of tasks; srun -n1
    # --pty bash is one task.
    (
        BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"},
        ("none", 0, 0, 1, 1, "127.0.0.1"),
    ),
    (
        BATCH | {"SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "1"},
        ("slurm", 0, 0, 1, 1, "127.0.0.1"),
    ),
    (OPEN_MPI, ("mpi", 3, 1, 4, 2, "a")),
    (without(OPEN_MPI, "MASTER") | BATCH, ("mpi", 3, 1, 4, 2, "frontier00121")),
    (SRUN | OPEN_MPI, ("mpi", 3, 1, 4, 2, "a")),  # mpirun starts its daemons as srun tasks
    (HYDRA, ("mpi", 1, 1, 2, 2, "127.0.0.1")),
    (PALS | {"MASTER_ADDR": "x"}, ("mpi", 9, 1, 16, 8, "x")),
    (
        SRUN | {"PMI_RANK": "11", "PMI_SIZE": "16", "PMIX_RANK": "11"},
        ("slurm", 11, 3, 16, 8, "frontier00121"),
    ),
    # Frontier scripts that export torch's names inside each task, or an address.
    # MASTER_ADDR=$SLURM_SUBMIT_HOST is a login node in a batch job, and one of the nodes in a job
    # submitted by a job.
    (
        SRUN | {"RANK": "11", "LOCAL_RANK": "3", "WORLD_SIZE": "16"},
        ("torchrun", 11, 3, 16, 4, "frontier00121"),
    ),
    (SRUN | {"MASTER_ADDR": "10.0.0.7"}, ("slurm", 11, 3, 16, 8, "10.0.0.7")),
    (
        SRUN | {"MASTER_ADDR": "frontier00121", "SLURM_SUBMIT_HOST": "frontier00121"},
        ("slurm", 11, 3, 16, 8, "frontier00121"),
    ),
    (
        SRUN | {"MASTER_ADDR": "elsewhere", "SLURM_SUBMIT_HOST": "login05"},
        ("slurm", 11, 3, 16, 8, "elsewhere"),
    ),
    # Counts that are not those of this step.
    (
        SRUN | {"SLURM_STEP_TASKS_PER_NODE": "10,2(x3)", "SLURM_NODEID": "2", "SLURM_LOCALID": "1"},
        ("slurm", 11, 1, 16, 2, "frontier00121"),
    ),
    # Impossible values.
    ({"RANK": "1"}, ["RANK=1", "WORLD_SIZE"]),
    (TORCHRUN | {"RANK": "x"}, ["RANK", "'x'"]),
    (TORCHRUN | {"RANK": "8"}, ["rank 8", "8"]),
    (TORCHRUN | {"LOCAL_RANK": "4"}, ["local rank 4", "4"]),
    (without(TORCHRUN, "LOCAL_WORLD") | {"LOCAL_RANK": "2147483648"}, ["local rank 2147483648"]),
    (TORCHRUN | {"MASTER_PORT": "99999"}, ["MASTER_PORT=99999"]),
    # RANK exported in the batch script: all 16 tasks would be rank 0.
    (SRUN | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "16"}, ["RANK=0", "SLURM_PROCID=11"]),
    (without(SRUN, "SLURM_LOCALID"), ["SLURM_LOCALID"]),
    (SRUN | {"SLURM_STEP_NODELIST": "frontier[1-"}, ["frontier[1-"]),
    (PALS, ["MASTER_ADDR", "16"]),
    ({"PMI_RANK": "0", "PMI_SIZE": "2"}, ["PMI_RANK=0", "MPI_LOCALRANKID"]),
    (TORCHRUN | {"MASTER_ADDR": ".."}, ["MASTER_ADDR=.."]),
]


@pytest.mark.parametrize(("environ", "expected"), LAUNCHES)
def test_what_an_environment_says(environ, expected):
    if isinstance(expected, list):
        with pytest.raises(LaunchError) as caught:
            detect_launch(environ)
        assert all(word in str(caught.value) for word in expected), caught.value
        return
    detected = detect_launch(environ)
    sizes = detected.rank, detected.local_rank, detected.world_size, detected.local_world_size
    assert (detected.launcher, *sizes, detected.master_addr) == expected
    served = expected[0] == "torchrun" and "TORCHELASTIC_RUN_ID" in environ
    assert (detected.store_served, detected.task, detected.notices) == (served, detected.rank, ())


@pytest.mark.parametrize(
    ("changes", "address", "named"),
    [
        ({"MASTER_ADDR": "10.0.0.7 10.0.1.7"}, "10.0.0.7", "10.0.1.7"),
        ({"MASTER_ADDR": "login05", "SLURM_SUBMIT_HOST": "login05"}, "frontier00121", "login05"),
        # the first node of the job, of which this step has others
        ({"MASTER_ADDR": "frontier00120"}, "frontier00121", "frontier00120"),
        (
            {
                "MASTER_ADDR": LOGIN,
                "SLURM_SUBMIT_HOST": LOGIN,
                "RANK": "11",
                "LOCAL_RANK": "3",
                "WORLD_SIZE": "16",
            },
            "frontier00121",
            LOGIN,
        ),
    ],
)
def test_what_is_read_otherwise_than_it_is_written_is_said(changes, address, named):
    detected = detect_launch(SRUN | changes)
    (notice,) = detected.notices
    assert detected.master_addr == address and named in notice and "MASTER_ADDR" in notice


LAYOUT = """Job step layout:
\t4 tasks, 2 nodes (frontier[00121-00122])

\tNode 0 (frontier00121), 2 task(s): 1 10
\tNode 1 (frontier00122), 2 task(s): 0 2
"""


def test_rank_0_is_not_on_the_first_node(tmp_path, monkeypatch):
    """With --distribution=arbitrary Slurm alone knows its node."""
    environ = SRUN | {"SLURM_DISTRIBUTION": "arbitrary"}
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sattach = tmp_path / "sattach"
    sattach.write_text("#!/bin/sh\necho no such step >&2\nexit 1\n")
    sattach.chmod(0o755)
    login = {"MASTER_ADDR": "login05", "SLURM_SUBMIT_HOST": "login05"}
    for useless in {}, login:
        with pytest.raises(LaunchError, match=r"arbitrary.*4711\.0.*no such step.*MASTER_ADDR"):
            detect_launch(environ | useless)
    assert detect_launch(environ | {"MASTER_ADDR": "x1"}).master_addr == "x1"
    sattach.write_text(f"#!/bin/sh\n[ \"$*\" = '--layout 4711.0' ] && echo '{LAYOUT}'\n")
    first = "frontier00122"
    for address, notices in ("", 0), (first, 0), ("frontier00121", 1):
        detected = detect_launch(environ | {"MASTER_ADDR": address})
        assert (detected.master_addr, len(detected.notices)) == (first, notices)


def test_ranks_of_a_step_agree_on_port_and_job_and_steps_differ():
    def port_and_job(**changes):
        detected = detect_launch(SRUN | changes)
        return detected.master_port, detected.job

    other = dict(
        SLURM_PROCID="2", SLURM_LOCALID="2", SLURM_NODEID="0", SLURMD_NODENAME="frontier00121"
    )
    assert port_and_job() == port_and_job(**other)
    assert port_and_job(MASTER_PORT="3442")[0] == 3442
    other_steps = [port_and_job(SLURM_STEP_ID=str(n)) for n in range(8)] + [
        port_and_job(SLURM_JOB_ID="4712")
    ]
    ports, jobs = map(set, zip(*other_steps, strict=True))
    assert len(jobs) == len(ports) == 9  # a hash: these nine differ
    assert all(1024 <= port < 32768 for port in ports)


FLAGS = [
    "--lr",
    "1",
    "--master-addr=10.0.0.1",
    "--master-port",
    "4000",
    "--local_rank",
    "1",
    "--fp16",
]


def test_flags_fill_in_what_the_environment_lacks():
    launch = detect_launch(variables_with_flags(FLAGS, without(TORCHRUN, "MASTER_", "LOCAL_RANK")))
    assert (launch.master_addr, launch.master_port, launch.local_rank) == ("10.0.0.1", 4000, 1)
    assert variables_with_flags(["--lr", "1", "--master-addr", "node01"], TORCHRUN) == TORCHRUN
    for line, words in (
        (["--master-addr", "node02"], ("node02", "MASTER_ADDR=node01")),
        (["--master-port=1"], ("--master-port 1", "MASTER_PORT=29500")),
        (["--local-rank", "3"], ("--local_rank 3", "LOCAL_RANK=1")),
    ):
        with pytest.raises(LaunchError) as error:
            variables_with_flags(line, TORCHRUN)
        assert all(word in str(error.value) for word in words)


# -- node lists ------------------------------------------------------------------------------------


def test_the_first_of_a_node_list():
    for text, first in (
        ("r[1-2]n[08-09]-ib,x", "r1n08-ib"),
        ("host-1.example.org,n[8-11]", "host-1.example.org"),
        ("n[010,3-5]", "n010"),
    ):
        assert first_host(text) == first


@pytest.mark.parametrize("text", [",a", "a[1-", "a[x]"])
def test_what_is_no_node_list(text):
    with pytest.raises(LaunchError, match=re.escape(repr(text)[1:-1])):
        first_host(text)


# -- devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "local_rank", "backend", "expected"),
    [
        (0, 3, None, "cpu"),
        (1, 3, None, "cuda:0"),
        (8, 3, None, "cuda:3"),
        (8, 3, "gloo", "cpu"),
        (4, 5, None, ["5", "4"]),
        (0, 5, "nccl", ["nccl", "gloo"]),
        (4, 5, "mpi", ["'mpi'", "nccl", "gloo"]),
    ],
)
def test_devices(
    monkeypatch,
    visible,
    local_rank,
    backend,
    expected,
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    launch = Launch(local_rank=local_rank, local_world_size=8, world_size=8, launcher="slurm")
    if isinstance(expected, str):
        assert select_device(launch, backend) == torch.device(expected)
        return
    with pytest.raises(LaunchError) as caught:
        select_device(launch, backend)
    assert all(word in str(caught.value) for word in expected)


def test_what_tells_devices_apart(monkeypatch):
    """Devices are told apart by bus address, number or uuid.

    Two dies of one card differ in bus address, two partitions of one die in number, both on ROCm;
    CUDA has uuids.
    """

    def identity(index, masks="", **properties):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(
            torch.cuda, "get_device_properties", lambda _: SimpleNamespace(**properties)
        )
        for name in VISIBLE:
            monkeypatch.delenv(name, raising=False)
        for word in masks.split():
            monkeypatch.setenv(*word.split("="))
        return device_identity(torch.device("cuda", index))

    monkeypatch.setattr(torch.version, "hip", "6.3")
    die = {"pci_domain_id": 0, "pci_bus_id": 193, "pci_device_id": 0}
    other_devices = [
        identity(0, **{**die, "pci_bus_id": 198}),
        identity(0, **{**die, "pci_domain_id": 1}),
        identity(1, **die),
    ]
    assert identity(0, **die) == identity(0, **die) and identity(0, **die) not in other_devices
    assert identity(0) == "", "a torch that does not tell"
    # partitions of one die, of which each process sees one or two
    second = identity(0, "ROCR_VISIBLE_DEVICES=1", **die)
    assert second == identity(1, **die) == identity(1, "HIP_VISIBLE_DEVICES=0,1", **die)
    assert second not in (identity(0, **die), identity(0, "ROCR_VISIBLE_DEVICES=0", **die))
    uuids = [identity(0, f"ROCR_VISIBLE_DEVICES=GPU-{letter}", **die) for letter in "aab"]
    assert uuids[0] == uuids[1] != uuids[2]
    monkeypatch.setattr(torch.version, "hip", None)
    assert identity(0, uuid="a") != identity(0, uuid="b")
