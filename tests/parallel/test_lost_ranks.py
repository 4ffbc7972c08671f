"""Real processes that meet as launchers start them, and die or fail while others are in gloo."""

import fcntl
import os
import signal
import socket

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.parallel import rendezvous as rendezvous_module
from megatron.parallel.flight import FlightState
from megatron.parallel.launch import detect_launch
from megatron.parallel.rank_mapping import RankMapping
from megatron.parallel.rendezvous import connect
from megatron.parallel.topology import Topology
from tests.helpers.processes import free_port, run_processes_raw
from tests.parallel.ranks import LONG, patient_connection

pytestmark = pytest.mark.slow

ORDER = (1, 0)  # of the two devices of each node
HOST = os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def become(**variables):
    """Set the environment of another launcher."""
    for name in (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        os.environ.pop(name, None)
    os.environ.update({name: str(value) for name, value in variables.items()})


def as_task(number, port, per_node, size):
    """Become a task of srun."""
    node, local = divmod(number, per_node)
    become(
        SLURM_JOB_ID=port,
        SLURM_STEP_ID=0,
        SLURM_PROCID=number,
        SLURM_LOCALID=local,
        SLURM_NODEID=node,
        SLURM_NTASKS=size,
        SLURM_STEP_NUM_TASKS=size,
        SLURM_STEP_TASKS_PER_NODE=f"{per_node}(x{size // per_node})",
        SLURMD_NODENAME=f"n{node}",
        SLURM_STEP_NODELIST=f"n[0-{size // per_node - 1}]",
        MASTER_ADDR="localhost",
        MASTER_PORT=port,
        MEGATRON_JOB_TOKEN=f"{port}, which is random enough",
    )


def total(rendezvous):
    """Return the sum of all ranks, and their places."""
    x = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(x)
    return x.item(), rendezvous.locations


def explained(rendezvous, victim):
    """Return how a rank that waits for the victim explains its loss.

    The values are kind, text, and whether the rank is the one to act.
    """
    try:
        dist.send(torch.ones(1), victim)
        dist.recv(torch.ones(1), victim)
        return "nothing", "", False
    except RuntimeError as error:
        explanation = rendezvous.explain(error)
        rendezvous_module.ANSWER_S = 0.1  # gloo may wait for dead ranks for ever
        rendezvous.close()
        return type(explanation).__name__, str(explanation), rendezvous.acts_on_failure


def await_other_ranks():
    """Receive from all other ranks, which then wait for this one."""
    for rank in range(dist.get_world_size()):
        if rank != dist.get_rank():
            dist.recv(torch.ones(1), rank)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def check_survivors(outcomes, victim):
    """Check kinds and texts of all ranks but the victim, exactly one of which reports."""
    assert "exit code -9" in outcomes[victim][1]
    survivors = [outcome for number, outcome in enumerate(outcomes) if number != victim]
    assert all(ok for ok, _ in survivors), survivors
    assert sum(outcome[-1][2] for _, outcome in survivors) == 1
    return [outcome[-1][:2] for _, outcome in survivors]


# -- a rank that others wait for dies, after all took the ranks of their devices -------------------


def place_and_die(task, port):
    """Die as task 1, on device 1, which is rank 0; task 0 serves the store."""
    as_task(task, port, 2, 4)
    os.environ["ROCR_VISIBLE_DEVICES"] = str(task % 2)
    rendezvous = patient_connection(detect_launch(), (1, 2, 3), RankMapping(ORDER))
    launch = rendezvous.launch
    assert (dist.get_rank(), os.environ["RANK"]) == (launch.rank, str(launch.rank))
    assert rendezvous.serves_store == (launch.task == 0)
    record = FlightState.read(bytes(rendezvous.flight.buffer))
    assert record is not None and record.rank == launch.rank
    topology = Topology.create(2, 1)
    x = torch.tensor([float(launch.task)])
    dist.all_reduce(x, group=topology.data.handle)
    met = (
        launch.rank,
        launch.task,
        launch.local_rank,
        x.item(),
        *total(rendezvous),
        rendezvous.notices,
    )
    if task == 1:
        await_other_ranks()
        die()
    return [met, (topology.tensor.ranks, rendezvous.server), explained(rendezvous, 0)]


def test_ranks_follow_devices_and_a_dead_one_is_named_by_its_rank():
    outcomes = run_processes_raw(4, place_and_die, free_port())
    for kind, text in check_survivors(outcomes, 1):
        assert (
            kind == "LostRankError"
            and "rank 0" in text
            and "task 1" in text
            and "n0:cpu (device 1)" in text
        ), text
    places = [f"n{node}:cpu (device {device})" for node in range(2) for device in ORDER]
    for task in (0, 2, 3):
        met, groups, _ = outcomes[task][1]
        rank = task ^ 1
        assert met == (rank, task, task % 2, 4.0 if task % 2 else 2.0, 6.0, places, [])
        assert (tuple(groups[0]), groups[1]) == ((rank // 2 * 2, rank // 2 * 2 + 1), 1)


# -- the rank that serves the store dies -----------------------------------------------------------


def serve_and_die(rank):
    rendezvous = patient_connection(detect_launch())
    met = total(rendezvous)
    if rank == 0:
        await_other_ranks()
        die()
    return [met, explained(rendezvous, 0)]


def test_the_death_of_the_stores_host_is_seen():
    outcomes = run_processes_raw(3, serve_and_die)
    for kind, text in check_survivors(outcomes, 0):
        assert kind == "LostRankError" and "rank 0" in text and "127.0.0.1:" in text, text
    for rank in (1, 2):
        assert outcomes[rank][1][0] == (3.0, [f"{HOST}:cpu"] * 3)


# -- a rank fails with a message -------------------------------------------------------------------


def meet_and_fail(rank, ports):
    as_task(rank, ports[0], 1, 3)
    with connect(detect_launch(), LONG) as rendezvous:
        tasks = total(rendezvous)
        assert (os.environ["RANK"], dist.get_rank()) == (str(rank), rank)
    assert not dist.is_initialized()
    rendezvous.close()  # harmless
    become(
        OMPI_COMM_WORLD_RANK=rank,
        OMPI_COMM_WORLD_SIZE=3,
        OMPI_COMM_WORLD_LOCAL_RANK=rank,
        OMPI_COMM_WORLD_LOCAL_SIZE=3,
        PMIX_RANK=rank,
        PMIX_NAMESPACE="prterun-a-17@1",
        MASTER_PORT=ports[1],
    )
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        del os.environ[name]
    rendezvous = patient_connection(detect_launch())
    processes = total(rendezvous)
    if rank == 2:
        await_other_ranks()
        rendezvous.fail("DataError: corpus.bin")
        rendezvous.close()
        return [tasks, processes, ("", "", False)]
    return [tasks, processes, explained(rendezvous, 2)]


def test_tasks_of_srun_and_processes_of_mpirun_meet_and_a_failure_ends_the_others():
    outcomes = run_processes_raw(3, meet_and_fail, [free_port(), free_port()])
    assert all(ok for ok, _ in outcomes), outcomes
    for rank, (_, (tasks, processes, (kind, text, _))) in enumerate(outcomes):
        assert tasks == (3.0, [f"n{node}:cpu" for node in range(3)]) and processes == (
            3.0,
            [f"{HOST}:cpu"] * 3,
        )
        if rank != 2:
            assert kind == "LaunchError" and "rank 2 (" in text and "DataError: corpus.bin" in text


# -- a rank dies after the rendezvous, before gloo connects ----------------------------------------


class LastWords(dist.Store):
    """Store in which a rank publishes gloo's address, with a dead port, before it ends.

    The port is the highest, and of two ranks the one with the lower port waits to be called. So all
    others wait, for five times their time limit, and nothing interrupts gloo.
    """

    def __init__(self, store, end):
        super().__init__()
        self._store = store
        self._end = end

    def set(self, key, value):
        # After the host's name and the address family.
        port = 8 + int.from_bytes(value[:8], "little") + 8 + 2
        self._store.set(key, bytes(value[:port]) + b"\xff\xff" + bytes(value[port + 2 :]))
        self._end()


def end_in_gloo(end):
    """Let this process end where gloo starts."""
    start = distributed_c10d.ProcessGroupGloo
    distributed_c10d.ProcessGroupGloo = lambda store, *args, **named: start(
        LastWords(store, end), *args, **named
    )


def start_gloo_beside_the_dead(rank, path):
    """Start gloo beside dead rank 1.

    Rank 0's gloo ends as at its time limit; rank 2 is in gloo until it is interrupted.
    """
    with path.open("w") as lock:
        if rank == 1:
            fcntl.flock(lock, fcntl.LOCK_EX)

        def give_up():
            fcntl.flock(lock, fcntl.LOCK_EX)  # that of rank 1 ends with it
            raise RuntimeError("Timed out waiting 180000ms for recv operation to complete")

        if rank < 2:
            end_in_gloo((give_up, die)[rank])
        patient_connection(detect_launch(), (0, 2) if rank == 0 else ())
    return "met"


def test_a_rank_that_dies_before_gloo_connects_is_named(tmp_path):
    outcomes = run_processes_raw(3, start_gloo_beside_the_dead, tmp_path / "lock")
    for rank in (0, 2):
        ended, text = outcomes[rank]
        assert not ended and text.startswith("LostRankError: ") and "rank 1" in text, text


# -- torchrun --------------------------------------------------------------------------------------


def meet_under_torchrun():
    launch = detect_launch()
    with connect(launch, LONG) as rendezvous:
        served = rendezvous.serves_store
        return launch.launcher, launch.world_size, served, total(rendezvous)[0], os.getpid()


def test_torchruns_agent_and_its_store():
    """Run the agent of `torchrun --standalone` in this process; its workers are forked."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="test",
        start_method="forkserver",
        max_restarts=0,
        monitor_interval=0.1,
        log_line_prefix_template=None,
    )
    results = elastic_launch(config, meet_under_torchrun)()
    assert [results[rank][:4] for rank in range(2)] == [("torchrun", 2, False, 1.0)] * 2
    assert len({os.getpid(), results[0][4], results[1][4]}) == 3
