"""The launch of this process: its rank, from the variables of torchrun, srun or mpirun.

Without these variables, the process is the only one. No ssh, host file or mpi4py is used: the
launcher gives every process its rank, and the ranks meet at a store that the first of them, or
torchrun, serves (rendezvous.py).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import re
import socket
import subprocess
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron.errors import LaunchError
from megatron.parallel.environment import Variables, ask_slurm
from megatron.parallel.rank_mapping import VISIBLE, RankMapping, near_index, visible_devices

if TYPE_CHECKING:
    import torch

# Ports below the range that Linux uses for outgoing connections (32768 and up).
_FIRST_PORT = 20000
_PORTS = 12000
# Slurm numbers its own steps (batch script, interactive shell) from here; srun's steps are below.
_FIRST_SPECIAL_STEP = 4294967280
_ONE_VARIABLE = "on ROCm, HIP_VISIBLE_DEVICES counts within ROCR_VISIBLE_DEVICES: set only one"
_KNOWN_DEVICES = "unset it, or name devices that nvidia-smi -L lists"
_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
# Launcher, and its variables for rank, size, local rank and local size; "mpi" is Open MPI, then
# MPICH's Hydra and Cray's PALS.
_LAUNCHERS = (
    ("torchrun", "RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    (
        "mpi",
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    (
        "mpi",
        "PMI_RANK",
        ("PMI_SIZE",),
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
    ),
    ("slurm", "SLURM_PROCID", _TASKS, ("SLURM_LOCALID",), ()),
)
_JOB_VARIABLES = ("TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "PALS_APID", "PMI_JOBID", "SLURM_JOB_ID")
_STEP_VARIABLES = ("SLURM_STEP_ID", "SLURM_STEPID")
_NODE_VARIABLES = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
_MOST = 1 << 20  # maximum number of processes in a job: a larger number is a mistake


@dataclass(frozen=True)
class Launch:
    """A process's position among all processes of the job.

    rank              the process's number in the job
    local_world_size  number of processes on this host; if unknown, local rank + 1
    master_addr       host where the first process or the launcher serves the store
    master_port       the store's port (0: any free port, for one process)
    launcher          the launcher whose variables were read: "none", "torchrun", "slurm" or "mpi"
    node              this host's name in Slurm, or else its host name
    job               distinguishes this run from others on the same host; the same on all its ranks
    store_served      whether the launcher serves a store at master_addr:master_port; torchrun may
    task              the launcher's number for the process, which may differ from the rank once
                      ranks are placed on devices (rank_mapping.py); -1: the rank
    notices           for the log: why MASTER_ADDR was not used as it is set
    token             MEGATRON_JOB_TOKEN: a random string that only this job's processes have; the
                      store's keys contain its digest
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    launcher: str = "none"
    node: str = "localhost"
    job: str = ""
    store_served: bool = False
    task: int = -1
    notices: tuple[str, ...] = ()
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.task < 0:
            object.__setattr__(self, "task", self.rank)

    @property
    def on_one_node(self) -> bool:
        """True when all processes are on this host."""
        return self.world_size == self.local_world_size

    @property
    def store_host(self) -> str:
        """The host of the store.

        If all processes are on this host and the launcher serves no store, it is the loopback
        address, which no other host can reach.
        """
        return "127.0.0.1" if self.on_one_node and not self.store_served else self.master_addr

    def store_prefix(self) -> str:
        """Return the prefix of this job's keys in the store.

        If the job has a token, processes that do not have it cannot guess such a key.
        """
        secret = hashlib.sha256(os.fsencode(self.token)).hexdigest()[:32] if self.token else ""
        return f"megatron/{secret}/{self.job}/{self.world_size}"

    def environment(self) -> dict[str, str]:
        """Return the variables from which torch and DeepSpeed read ranks."""
        names = "rank local_rank world_size local_world_size master_addr master_port"
        return {name.upper(): str(getattr(self, name)) for name in names.split()}


_FLAGS = {  # flags of pretrain_gpt.py, by the launcher's variable with the same meaning
    "MASTER_ADDR": ("--master-addr",),
    "MASTER_PORT": ("--master-port",),
    "LOCAL_RANK": ("--local_rank", "--local-rank"),
}


def variables_with_flags(
    arguments: Sequence[str], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment, completed by --master-addr, --master-port and --local_rank.

    Raises LaunchError if a flag contradicts its variable.
    """
    variables = dict(os.environ if environ is None else environ)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name, spellings in _FLAGS.items():
        # the parser of all other flags reports a missing value
        parser.add_argument(*spellings, dest=name, nargs="?")
    for name, value in vars(parser.parse_known_args(list(arguments))[0]).items():
        known = variables.get(name, "").strip()
        if value is not None and known not in ("", value):
            raise LaunchError(
                f"{_FLAGS[name][0]} {value} on the command line contradicts {name}={known} in the "
                "environment: give one of them, or the same value"
            )
        if value is not None:
            variables[name] = value
    return variables


def detect_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """Read the launcher's variables from `environ` (default: this process's).

    torchrun's variables take precedence, then MPI's (unless srun set them), then an srun task's. A
    plain `python` inside a batch script or an interactive allocation is one process, although
    Slurm's variables for the job are set. Raises LaunchError for variables that are missing, are
    not numbers, are out of range, or contradict each other.
    """
    env = Variables(os.environ if environ is None else environ)
    launch = _find(env)
    if env.has("WORLD_SIZE") and env.number("WORLD_SIZE") != launch.world_size:
        raise LaunchError(
            f"WORLD_SIZE={env.text('WORLD_SIZE')} is set without RANK, but the launcher "
            f"({launch.launcher}) gives {launch.world_size} process(es): unset WORLD_SIZE, or set "
            "RANK and LOCAL_RANK in every process"
        )
    source = f"({launch.launcher} variables)"
    if not 1 <= launch.world_size <= _MOST:
        raise LaunchError(
            f"world size {launch.world_size} {source}: use from 1 to {_MOST} processes"
        )
    if launch.rank >= launch.world_size:
        raise LaunchError(
            f"rank {launch.rank} of world size {launch.world_size} {source}: ranks go from 0 to "
            f"{launch.world_size - 1}"
        )
    # Without a launcher, LOCAL_RANK is the number of the process's device.
    ranks = min(_MOST, _MOST if launch.launcher == "none" else launch.local_world_size)
    if launch.local_rank >= ranks:
        raise LaunchError(
            f"local rank {launch.local_rank} of {launch.local_world_size} processes on node "
            f"{launch.node} {source}: local ranks go from 0 to {ranks - 1}"
        )
    if launch.master_port > 65535:
        raise LaunchError(
            f"MASTER_PORT={launch.master_port} is not a port: use one from 1024 to 65535"
        )
    try:
        launch.master_addr.encode("idna")  # as in every name lookup
    except UnicodeError as error:
        raise LaunchError(
            f"MASTER_ADDR={launch.master_addr} is not a host name ({error}): set it to the host of "
            "rank 0"
        ) from error
    return launch


def _find(env: Variables) -> Launch:
    """Return the launch described by the first launcher whose rank is set."""
    srun = _is_srun_task(env)
    elastic = env.has("TORCHELASTIC_RUN_ID")
    node = env.text("SLURMD_NODENAME") or socket.gethostname()
    for launcher, rank_name, sizes, local_ranks, local_sizes in _LAUNCHERS:
        if not env.has(rank_name) or (launcher == "slurm" and not srun):
            continue
        size_name = env.first(sizes)
        if size_name is None:
            raise LaunchError(
                f"{rank_name}={env.text(rank_name)} is set but {sizes[-1]} is not: set both, or "
                f"unset {rank_name}"
            )
        rank = env.number(rank_name)
        world = env.number(size_name)
        if launcher != "slurm" and srun and env.number(env.first(_TASKS) or "", 0) == world:
            same = env.number("SLURM_PROCID") == rank
            if launcher == "mpi" and same:
                continue  # srun also provides PMI: Slurm's own variables say more
            if launcher == "torchrun" and not elastic and not same:
                raise LaunchError(
                    f"RANK={rank} contradicts SLURM_PROCID={env.text('SLURM_PROCID')}: RANK was "
                    "exported before srun; unset RANK, or set it to SLURM_PROCID inside the task"
                )
        # Scripts may export only some of torch's variables in a task.
        local_name = env.first(
            (*local_ranks, "SLURM_LOCALID") if launcher == "torchrun" and srun else local_ranks
        )
        if local_name is None and world > 1:
            names = " or ".join(local_ranks)
            raise LaunchError(
                f"{rank_name}={rank} is set but {names} is not: set it in every process"
            )
        local_rank = env.number(local_name or "", 0)
        known = env.first(local_sizes)
        local_size = env.number(known) if known else None
        if launcher == "slurm":
            local_size = _slurm_local_size(env, world)
            # several steps of a job may run at once
            job = f"{env.text('SLURM_JOB_ID')}.{env.text(env.first(_STEP_VARIABLES) or '')}"
        else:
            job = f"{env.text(env.first(_JOB_VARIABLES) or '', 'job')}.{env.text('TORCHELASTIC_RESTART_COUNT', '0')}"
        master, notices = _master(env, world, local_size)
        return Launch(
            rank=rank,
            local_rank=local_rank,
            world_size=world,
            local_world_size=local_size or local_rank + 1,
            master_addr=master,
            # The default is a port that two runs on one host are unlikely to share.
            master_port=env.number(
                "MASTER_PORT", _FIRST_PORT + zlib.crc32(os.fsencode(job)) % _PORTS
            ),
            launcher=launcher,
            node=node,
            job=job,
            store_served=launcher == "torchrun"
            and env.text("TORCHELASTIC_USE_AGENT_STORE") == "True",
            notices=notices,
            token=env.text("MEGATRON_JOB_TOKEN"),
        )
    # One process; LOCAL_RANK, if it is set, still chooses the device.
    return Launch(local_rank=env.number("LOCAL_RANK", 0), node=node, job=f"alone.{os.getpid()}")


def _is_srun_task(env: Variables) -> bool:
    """Return whether srun started this process as a task.

    A batch script has SLURM_PROCID and SLURM_NTASKS too, but no step; an interactive shell is one
    of Slurm's own steps.
    """
    step = env.first(_STEP_VARIABLES)
    if not env.has("SLURM_PROCID") or (step and env.number(step) >= _FIRST_SPECIAL_STEP):
        return False
    return step is not None or env.has("SLURM_STEP_NUM_TASKS")


def _master(
    env: Variables, world_size: int, local_world_size: int | None
) -> tuple[str, tuple[str, ...]]:
    """Return the host of the store, and notices if that is not MASTER_ADDR as it is set.

    `local_world_size` is None if it is unknown.
    """
    # `hostname -i` prints an address for each of a host's interfaces
    addresses = env.text("MASTER_ADDR").split()
    nodes = env.first(_NODE_VARIABLES)
    by_slurm = nodes is not None and _is_srun_task(env) and not env.has("TORCHELASTIC_RUN_ID")
    several = world_size not in (1, local_world_size)
    first = ""
    wrong = ""
    if by_slurm and addresses and addresses[0] == env.text("SLURM_SUBMIT_HOST"):
        # Older scripts export MASTER_ADDR=$SLURM_SUBMIT_HOST: the login node.
        wrong = "the host that submitted the job"
    if by_slurm and several:
        assert nodes is not None, "the launch is Slurm's"
        arbitrary = "arbitrary" in env.text("SLURM_DISTRIBUTION")
        given = bool(addresses) and not wrong
        first = _first_of_layout(env, given) if arbitrary else first_host(env.text(nodes))
    if first and addresses and not wrong:
        # Scripts export the first node of the job, but rank 0 may be on another of its nodes.
        usual = {first_host(env.text(name)) for name in _NODE_VARIABLES if env.has(name)} - {first}
        if any(_same_host(addresses[0], host) for host in usual):
            wrong = "not the node of rank 0"
    if addresses and not wrong:
        many = f"MASTER_ADDR={' '.join(addresses)} has several addresses: the first is used"
        return addresses[0], (many,) if len(addresses) > 1 else ()
    if not several:
        first = "127.0.0.1"
    elif not first and nodes is not None:
        first = first_host(env.text(nodes))
    elif not first:
        raise LaunchError(
            f"MASTER_ADDR is not set for {world_size} processes: set it to the host of rank 0"
        )
    if addresses in ([], [first]):
        return first, ()
    return first, (f"MASTER_ADDR={addresses[0]} is {wrong}: {first} is used",)


def _first_of_layout(env: Variables, optional: bool) -> str:
    """Return the node of rank 0, which with --distribution=arbitrary may be any node in the step.

    No variable names that node: Slurm sorts its node lists. If sattach does not report it, return
    "" if `optional` is True, otherwise raise LaunchError.
    """
    step = f"{env.text('SLURM_JOB_ID')}.{env.text(env.first(_STEP_VARIABLES) or '')}"
    try:
        answer = ask_slurm("sattach", "--layout", step)
        output = answer.stdout + answer.stderr
    except (OSError, subprocess.SubprocessError) as error:
        output = str(error)
    if match := re.search(r"\((\S+)\), \d+ task\(s\): 0\b", output):
        return match[1]
    if optional:
        return ""
    raise LaunchError(
        "srun --distribution=arbitrary puts rank 0 on any node, and sattach --layout "
        f"{step} does not report which ({output.strip()[:200]}): export MASTER_ADDR with the host "
        "of the first task, or use another distribution"
    )


def _same_host(one: str, other: str) -> bool:
    """Return whether two names or addresses belong to the same host."""

    def addresses(host: str) -> set[str]:
        with contextlib.suppress(OSError, UnicodeError):
            return {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
        return set()

    return one == other or not addresses(one).isdisjoint(addresses(other))


def first_host(nodelist: str) -> str:
    """Return the first host name of a Slurm node list. Raises LaunchError if it is invalid.

    >>> first_host("frontier[00001-00003,00007],x1")
    'frontier00001'
    """
    first = re.split(r",(?![^\[]*\])", nodelist.strip())[0]
    host = re.sub(r"\[(\d+)[0-9,-]*\]", r"\1", first)
    if not re.fullmatch(r"[^\[\],\s]+", host):
        raise LaunchError(f"node list {nodelist!r}: {first!r} is not a host name")
    return host


def _slurm_local_size(env: Variables, world: int) -> int:
    """Return the number of this step's tasks on this node.

    If it is unknown, return the number of tasks up to and including this one. Slurm lists task
    counts by node: "8(x3),2" means 8 on each of three nodes and 2 on the fourth.
    """
    name = env.first(("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"))
    listed = re.findall(r"(\d{1,9})(?:\(x(\d{1,9})\))?", env.text(name or ""))
    counts = [(int(tasks), int(nodes or 1)) for tasks, nodes in listed]
    node = env.number("SLURM_NODEID", 0)
    if sum(tasks * nodes for tasks, nodes in counts) == world:
        for tasks, nodes in counts:
            if node < nodes:
                return tasks
            node -= nodes
    return env.number("SLURM_LOCALID", 0) + 1


def select_device(
    launch: Launch,
    backend: str | None = None,
    mapping: RankMapping | None = None,
    environ: Mapping[str, str] | None = None,
) -> torch.device:
    """Return the device on which this process computes.

    If one device is visible, it is that one. If several are, it is the device next to this local
    rank's cores according to `mapping`, or else the one with the local rank's number. It is the CPU
    if the backend is "gloo", or if no backend is given, there is no device, and no variable hides
    devices. Raises LaunchError for an unknown backend, or if there is no device for this process.
    """
    import torch

    if backend not in (None, "nccl", "gloo"):
        raise LaunchError(f"backend {backend!r} is unknown: use nccl (CUDA and ROCm) or gloo (CPU)")
    if backend == "gloo":
        return torch.device("cpu")
    environ = os.environ if environ is None else environ
    shown = visible_devices(environ)
    remedy = _ONE_VARIABLE if torch.version.hip else _KNOWN_DEVICES
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except RuntimeError as error:  # torch also reads the variables
        raise LaunchError(f"rank {launch.rank} on node {launch.node}: {error}: {remedy}") from error
    if count == 0:
        hidden = shown is not None and (torch.version.hip or torch.version.cuda)
        if backend is None and not hidden:
            return torch.device("cpu")
        named = ", ".join(f"{name}={environ[name]}" for name in VISIBLE if environ.get(name))
        why = f" with {named}: {remedy}" if hidden else ""
        raise LaunchError(
            f"rank {launch.rank} on node {launch.node} sees no device for nccl (torch "
            f"{torch.__version__}){why}; to train on the CPU use --distributed-backend gloo"
        )
    if count == 1:
        return torch.device("cuda", 0)
    if launch.local_rank >= count:
        raise LaunchError(
            f"rank {launch.rank} on node {launch.node} has local rank {launch.local_rank}, but "
            f"{count} devices are visible: start at most {count} processes on a node"
        )
    near = near_index(mapping, launch.local_rank, count, shown)
    return torch.device("cuda", launch.local_rank if near is None else near)
