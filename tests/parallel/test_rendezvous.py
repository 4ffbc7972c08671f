"""Ranks that meet, leave, fail and never come, as threads of one process.

test_lost_ranks.py has gloo and real deaths.
"""

import contextlib
import json
import os
import re
import socket
import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron.errors import LaunchError
from megatron.parallel import rendezvous, store
from megatron.parallel.launch import Launch
from megatron.parallel.rendezvous import Rendezvous, connect
from tests.helpers.processes import free_port
from tests.parallel.ranks import LONG, Apart, InMemory, Patience, be_patient, ranks_in_threads

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    be_patient(monkeypatch)
    # torch's store resolves the names of addresses.
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")


def except_ranks(ranks, *left_out):
    return [result for rank, result in enumerate(ranks) if rank not in left_out]


def test_ranks_meet_at_the_store_of_a_launcher(monkeypatch):
    """Ranks meet at a launcher's store, such as torchrun's, and name the launcher once it is gone."""
    port = free_port()
    store = dist.TCPStore(
        "127.0.0.1", port, None, is_master=True, timeout=LONG, wait_for_workers=False
    )
    launcher = dict(kind=Apart, master_port=port, store_served=True)
    gone = threading.Event()
    left = threading.Barrier(2)

    def see_it_go(rank):
        nonlocal store
        assert rank.locations == ["n0:cpu", "n1:cpu"] and not rank.serves_store
        if left.wait() == 0:
            store = None
            gone.set()
        gone.wait()
        rank._listener.join()
        return str(rank.explain(RuntimeError("closed")))

    for text in ranks_in_threads([0, 1], 2, see_it_go, **launcher):
        assert "launcher" in text and f"127.0.0.1:{port}" in text


def test_a_rank_that_does_not_come_is_named_by_all_others():
    """A rank that does not come is named by all others, and those that came are listed.

    By its clock, rank 0 gives up when all others have arrived.
    """
    described = [threading.Event() for _ in range(4)]

    class Watched(Patience):
        def __init__(self, rank):
            super().__init__(
                lambda: rank == 0 and described[1].is_set() and described[3].is_set(),
                passing=LONG.seconds + 1,
            )
            self._rank = rank

        def sleep(self, seconds):
            # Ranks other than 0 wait only after they have described themselves.
            described[self._rank].set()
            super().sleep(seconds)

    for error in ranks_in_threads(
        [0, 1, 3], 4, clocks={thread: Watched(r) for thread, r in enumerate((0, 1, 3))}
    ):
        assert isinstance(error, LaunchError) and "rank 2 of 4" in str(error), error
        assert all(f"rank {rank} on n{rank}:cpu" in str(error) for rank in (0, 1, 3))


@pytest.mark.parametrize("silent", [False, True])
def test_a_store_that_never_answers_is_given_up_and_named(monkeypatch, silent):
    """A store that never answers is given up and named.

    Nothing listens, or the connection stays open without an answer, as when a host loses power.
    """
    monkeypatch.setattr(store, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) if silent else contextlib.nullcontext() as server:
        port = server.getsockname()[1] if server else free_port()
        with pytest.raises(LaunchError) as caught:
            Apart(
                Launch(rank=1, world_size=2, master_port=port), CPU, timedelta(seconds=0.2)
            ).join()
    assert "rank 0" in str(caught.value) and f"127.0.0.1:{port}" in str(caught.value)
    assert ("refused" in str(caught.value)) == (not silent)


def test_two_processes_with_one_rank_are_refused_everywhere(
    monkeypatch,
):
    """All ranks fail at once and name the other process. None waits for a rank that cannot come."""
    monkeypatch.setattr(os, "getpid", threading.get_native_id)  # each thread stands for a process
    for error in ranks_in_threads([0, 1, 1], 3, kind=Apart):
        assert isinstance(error, LaunchError) and "rank 1" in str(error), error
        assert len(re.findall(r"n1:cpu, process \d+", str(error))) == 2


def test_a_port_in_use_is_named():
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        launch = Launch(world_size=2, local_world_size=2, master_port=port, launcher="torchrun")
        with pytest.raises(LaunchError, match=f"port {port}.*MASTER_PORT"):
            connect(launch, LONG)


@pytest.mark.parametrize("failing", [0, 2])
def test_a_failure_reaches_the_others(failing):
    """A failure reaches the others: the rank that serves the store stays until they know of it."""
    failed = threading.Event()

    def fail_or_ask(rank):
        if rank.launch.rank == failing:
            rank.fail("DataError: corpus.bin")
            failed.set()
            return str, "", ""
        failed.wait()
        error = rank.explain(RuntimeError("closed"))
        return type(error), str(error), str(rank.explain(error))

    for kind, text, repeated in except_ranks(ranks_in_threads([0, 1, 2], 3, fail_or_ask), failing):
        assert kind is LaunchError and text == repeated, "not lost: it said why"
        assert f"rank {failing} (n{failing}:cpu" in text and "DataError: corpus.bin" in text


def test_what_was_heard_outlives_the_store():
    """A failure is remembered after the store is gone.

    Rank 0 fails and ends, with the store, before the others notice.
    """
    notified = threading.Barrier(3)
    gone = threading.Event()
    met = threading.Barrier(3)

    def fail_or_ask(rank):
        met.wait()
        if rank.launch.rank == 0:
            rank.fail("DataError: corpus.bin")
            notified.wait()
            rank._answers_ended.set()
            rank._listener.join()
            rank.store = None
            rank._store_lost = True
            gone.set()
            return str, ""
        while not rank._roll_findings:
            threading.Event().wait(0.002)
        notified.wait()
        gone.wait()
        rank._listener.join()
        error = rank.explain(RuntimeError("closed"))
        return type(error), str(error)

    for kind, text in ranks_in_threads([0, 1, 2], 3, fail_or_ask, kind=Apart)[1:]:
        assert kind is LaunchError and "DataError: corpus.bin" in text


def test_a_rank_hears_while_torch_waits_in_the_store():
    """A rank learns of a failure while torch waits in the store, as gloo does for a failed rank."""
    waits = threading.Event()
    explained = threading.Event()

    def fail_or_ask(rank):
        if rank.launch.rank == 0:
            waits.wait()
            rank.fail("DataError: corpus.bin")
            explained.wait()
            return ""

        def wait():
            waits.set()
            rank._torch_store.wait(["a key that never comes"], LONG)

        with pytest.raises(LaunchError):
            rank.unless_failed(wait, LONG.seconds, "torch did not end")
        text = str(rank.explain(RuntimeError("closed")))
        explained.set()
        assert not rank.acts_on_failure
        return text

    _, text = ranks_in_threads([0, 1], 2, fail_or_ask, kind=Apart)
    assert "rank 0" in text and "DataError: corpus.bin" in text


def reaches(rank, host):
    try:
        socket.create_connection((host, rank.launch.master_port)).close()
        return True
    except OSError:
        return False


@pytest.mark.parametrize("one_node", [True, False])
def test_the_store_of_one_nodes_ranks_is_on_the_loopback_device_only(one_node):
    """The store of one node's ranks is only on the loopback device.

    An address that a socket on all interfaces has, too, stands for that of another interface.
    """

    def look(rank):
        return reaches(rank, "127.0.0.1"), reaches(rank, "127.0.0.2")

    sizes = dict(local_world_size=2 if one_node else 1, master_addr="localhost")
    assert ranks_in_threads([0, 1], 2, look, kind=Apart, **sizes) == [(True, not one_node)] * 2


def test_a_verdict_forged_without_the_jobs_token_ends_nothing():
    port = free_port()
    server = dist.TCPStore(
        "127.0.0.1", port, None, is_master=True, timeout=LONG, wait_for_workers=False
    )
    intruder = dist.TCPStore(
        "127.0.0.1", port, None, is_master=False, timeout=LONG, wait_for_workers=False
    )
    launch = Launch(world_size=2, job=f"test.{os.getpid()}.{port}")
    for prefix in ("", f"{launch.store_prefix()}/", "megatron/"):
        intruder.set(f"{prefix}verdict", json.dumps({"error": "forged"}))
    options = dict(kind=Apart, master_port=port, store_served=True)
    assert [str(error) for error in ranks_in_threads([1], 2, **options)] == ["forged"], (
        "without a token it does"
    )
    assert ranks_in_threads(
        [0, 1], 2, lambda rank: rank.notices, **options, token="a random text"
    ) == [[], []]
    # Nor do they write where it can be guessed: with luck that would replace the forged verdict.
    assert json.loads(intruder.get(f"{launch.store_prefix()}/verdict")) == {"error": "forged"}
    assert server.port == port


def test_ranks_of_several_nodes_without_a_token_are_told_so():
    for one_node in (True, False):
        for notices in ranks_in_threads(
            [0, 1], 2, lambda rank: rank.notices, local_world_size=1 + one_node
        ):
            assert [("MEGATRON_JOB_TOKEN" in notice) for notice in notices] == [True] * (
                not one_node
            )


def test_an_interface_that_one_rank_has_not_ends_all(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,nope")
    for error in ranks_in_threads([0, 1], 2):
        assert (
            type(error) is LaunchError
            and "GLOO_SOCKET_IFNAME" in str(error)
            and "'nope'" in str(error)
        )
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert ranks_in_threads([0, 1], 2) == [None, None]


def test_while_ranks_of_several_nodes_join_their_store_asks_no_name_server(
    monkeypatch,
):
    """A store of several nodes asks no name server while ranks join.

    benchmarks/slow_names.py of commit 3d93ceee has a real one, which needs root.
    """
    configured = []
    libc = SimpleNamespace(
        __nss_configure_lookup=lambda database, services: configured.append(services)
    )
    monkeypatch.setattr(store.ctypes, "CDLL", lambda _: libc)

    class Looking(InMemory):
        def _meet(self, deadline):
            joining.extend(configured)
            super()._meet(deadline)

    joining = []
    ranks_in_threads([0, 1], 2, kind=Looking)
    assert joining == configured == [], "they are all on one node"
    ranks_in_threads([0, 1], 2, kind=Looking, local_world_size=1)
    assert set(joining) == {b"files"} and len(configured) == 2 and configured[0] == b"files"


def test_a_host_name_that_does_not_resolve(monkeypatch):
    """A host name may not resolve.

    gloo then gets the loopback interface, for processes of one host.
    """
    monkeypatch.setattr(rendezvous, "host_name_is_local", lambda: False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with connect(Launch(), LONG):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        dist.barrier()
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_the_time_limit_is_that_of_every_collective():
    with connect(Launch(), timedelta(seconds=123)):
        backend = dist.group.WORLD._get_backend(CPU)
        assert backend.options._timeout == timedelta(seconds=123)


def described(node, device, identity, **more):
    description = {
        "node": node,
        "pid": 1,
        "device": device,
        "identity": identity,
        "backend": "cpu:gloo,cuda:nccl",
    }
    return json.dumps({**description, "number": 0, "near": (), "address": (), **more})


def judged(participants):
    """Return the error that the first process finds in these descriptions."""
    first = Rendezvous(
        Launch(world_size=len(participants), local_world_size=len(participants)), CPU, LONG
    )
    first.store = dist.HashStore()
    for task, text in enumerate(participants):
        first.store.set(f"participant/{task}", text)
    return str(first._judge(LONG.total_seconds())["error"])


def test_ranks_that_cannot_work_together_are_refused():
    good = [described("n1", "cuda:0", "A"), described("n2", "cuda:0", "A")]
    error = judged([*good, described("n2", "cuda:0", "A")])
    assert "1 and 2" in error and "n2" in error
    error = judged([*good, described("n2", "cuda:0", "B", backend="gloo")])
    assert "rank 2 (n2:cuda:0)" in error and "gloo" in error
