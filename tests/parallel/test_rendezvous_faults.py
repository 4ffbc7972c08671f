"""Ranks that die, hang or fail at an awkward moment while torch.distributed starts or makes a group.

gloo waits five times its time limit for a rank that published its address and died before it connected, and nothing
interrupts it; a store on a host that hangs never answers. Here a rank does just that, and all others have to end.
"""
from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.errors import LaunchError
from megatron.parallel import meeting as coming
from megatron.parallel import rendezvous, report, topology
from megatron.parallel.launch import connect, detect_launch
from megatron.parallel.rendezvous import Rendezvous
from megatron.parallel.topology import Topology
from tests.helpers.processes import run_processes_raw

ANSWER_S = 4.0  # instead of 5 s, for quicker tests
LIMIT_S = 10.0  # the time limit of connect(); on a busy machine ranks come seconds apart
LINGER_S = 50.0  # instead of 5 s: how long rank 0 serves the store for those that are still there
NOBODY = -1
END_S = 4 * LIMIT_S  # the latest end of the others; without the fix gloo alone takes 5 * LIMIT_S


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_later() -> None:
    """When the others wait for a connection, for which they have read every rank's address in rank 0's store."""
    time.sleep(1)
    die()


def hang() -> None:
    """Stop, as on a host without power: connections stay open and nobody answers. Ends after the other ranks."""
    wait = f"for i in $(seq 2000); do [ -e '{os.environ['LAST_ENDED']}' ] && break; sleep 0.1; done"
    subprocess.Popen(["sh", "-c", f"{wait}; kill -KILL {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def fail() -> None:
    raise RuntimeError("no address for eth7")


class LastWords(dist.Store):
    """A store to which a rank writes gloo's address, with a port where nobody listens, before its end.

    The port is the highest, and of two ranks the one with the lower port waits to be called: so all others wait.
    """

    def __init__(self, store: dist.Store, end: Callable[[], None]) -> None:
        super().__init__()
        self._store = store
        self._end = end

    def set(self, key: str, value: Any) -> None:
        port = 8 + int.from_bytes(value[:8], "little") + 8 + 2  # after the host's name and the address family
        self._store.set(key, bytes(value[:port]) + b"\xff\xff" + bytes(value[port + 2 :]))
        self._end()


def end_in_gloo(end: Callable[[], None], address_first: bool) -> None:
    """Let this process end where gloo starts the next group."""
    start = distributed_c10d.ProcessGroupGloo

    def ending(store: dist.Store, *args: Any, **kwargs: Any) -> Any:
        if not address_first:
            end()
        return start(LastWords(store, end), *args, **kwargs)

    distributed_c10d.ProcessGroupGloo = ending  # type: ignore[misc,assignment]


def outcome_of(step: Callable[[], None]) -> tuple[float, str]:
    """How long a step took and what came of it."""
    start, text = time.monotonic(), "nothing happened"
    try:
        step()
    except LaunchError as error:
        text = str(error)
    return time.monotonic() - start, text


def meet(rank: int, victim: int, end: Callable[[], None], address_first: bool, limit_s: float) -> tuple[float, str]:
    coming.ANSWER_S = rendezvous.ANSWER_S = ANSWER_S
    if rank == victim:
        end_in_gloo(end, address_first)
    return outcome_of(lambda: connect(detect_launch(), timedelta(seconds=limit_s)).close())


def check(outcomes: list[tuple[bool, Any]], victim: int, within_s: float, *words: str) -> None:
    for rank, (ended, outcome) in enumerate(outcomes):
        if rank != victim:
            assert ended, outcome
            seconds, text = outcome
            assert all(word in text for word in words), text
            assert seconds < within_s, text


def test_rank_0_dies_while_the_others_wait_for_it_in_gloo() -> None:
    """They hear of it at once, long before the time limit."""
    outcomes = run_processes_raw(3, meet, 0, die_later, True, 200)
    check(outcomes, 0, 100, "rank 0, which serves the store at 127.0.0.1:", "is gone")


@pytest.mark.slow
def test_a_rank_that_dies_while_gloo_connects_is_named() -> None:
    outcomes = run_processes_raw(3, meet, 1, die, True, LIMIT_S)
    check(outcomes, 1, END_S, "no sign of life from rank 1: died or was killed")


def test_a_rank_that_cannot_start_gloo_is_named_at_once() -> None:
    """A rank that calls the roll wakes those that wait for it in gloo."""
    outcomes = run_processes_raw(3, meet, 2, fail, True, 200)
    check(outcomes, NOBODY, 100, "no rank died", "rank 2 was the first to see RuntimeError: no address for eth7")


def meet_and_mark(rank: int, in_gloo: bool) -> tuple[float, str]:
    """Of two ranks the first hangs, in gloo or before it says hello; the second leaves a mark when it has ended."""
    if rank == 0 and not in_gloo:
        Rendezvous._say_hello = lambda self, deadline: hang()  # type: ignore[method-assign]
    outcome = meet(rank, 0, hang, False, LIMIT_S)
    Path(os.environ["LAST_ENDED"]).touch()
    return outcome


@pytest.mark.slow
@pytest.mark.parametrize("in_gloo", [False, True])
def test_rank_0_hangs(tmp_path: Path, in_gloo: bool) -> None:
    outcomes = run_processes_raw(2, meet_and_mark, in_gloo, env={"LAST_ENDED": str(tmp_path / "ended")})
    check(outcomes, 0, END_S, "rank 0", " at 127.0.0.1:")


def group(rank: int) -> tuple[float, str]:
    coming.ANSWER_S = rendezvous.ANSWER_S = topology._LATE_S = ANSWER_S
    limit = timedelta(seconds=LIMIT_S)
    with connect(detect_launch(), timedelta(seconds=180)) as meeting:
        dist.barrier()
        if rank == 1:
            end_in_gloo(die, address_first=True)

        def step() -> None:
            try:
                Topology.create(2, 1, timeout=limit)
            except (RuntimeError, LaunchError) as error:
                raise meeting.explain(error) from error

        return outcome_of(step)


@pytest.mark.slow
def test_a_rank_that_dies_while_groups_are_made_is_named() -> None:
    outcomes = run_processes_raw(4, group)
    check(outcomes, 1, END_S, "no sign of life from rank 1: died or was killed")


def explain_after_rank_0_left(rank: int) -> tuple[float, str]:
    rendezvous._LINGER_S = LINGER_S
    meeting = connect(detect_launch(), timedelta(seconds=180))
    dist.barrier()  # a failure would wake a rank that is still connecting
    if rank == 0:
        meeting.fail("DataError: corpus.bin is truncated")
        meeting.close()
        return 0.0, ""
    while meeting._store.add("left", 0) == 0:
        time.sleep(0.01)

    def step() -> None:
        raise meeting.explain(RuntimeError("Connection closed by peer"))

    outcome = outcome_of(step)
    meeting.close()
    return outcome


def test_a_roll_call_does_not_wait_for_a_rank_that_has_left() -> None:
    """Rank 0 serves the store for some more seconds, in which the others have to learn why it failed."""
    outcomes = run_processes_raw(2, explain_after_rank_0_left)
    check(outcomes, 0, 0.8 * LINGER_S, "rank 0 (", "failed: DataError: corpus.bin is truncated")


def explain_after_the_store(rank: int) -> str:
    """Rank 0 fails for a reason of its own; the others see that something is wrong when its store is gone."""
    rendezvous._LINGER_S = 0.5
    meeting = connect(detect_launch(), timedelta(seconds=180))
    dist.barrier()
    if rank == 0:
        meeting.fail("DataError: corpus.bin is truncated")
        meeting.close()
        return ""
    while not meeting._store_lost:
        time.sleep(0.01)
    error = meeting.explain(RuntimeError("Connection closed by peer"))
    meeting.close()
    return f"{type(error).__name__}: {error}"


def test_the_reason_why_the_rank_with_the_store_failed_outlives_the_store() -> None:
    outcomes = run_processes_raw(3, explain_after_the_store)
    for _, text in outcomes[1:]:
        assert text.startswith("LaunchError: ") and "failed: DataError: corpus.bin is truncated" in text, text


def die_or_wait(rank: int) -> str:
    """Rank 2 dies, rank 0 waits for it; rank 1 is busy until rank 0 and its store are gone, then waits for it."""
    coming.ANSWER_S = rendezvous.ANSWER_S = ANSWER_S
    rendezvous._LINGER_S = 0.5
    meeting = connect(detect_launch(), timedelta(seconds=180))
    try:
        dist.barrier()
        if rank == 2:
            die()
        while rank == 1 and not meeting._store_lost:
            time.sleep(0.01)
        dist.recv(torch.zeros(1), 2 if rank == 0 else 0)
    except RuntimeError as error:
        return str(meeting.explain(error))
    finally:
        meeting.close()
    return "received"


def test_who_sees_a_death_last_names_the_dead_and_not_the_one_it_waited_for() -> None:
    outcomes = run_processes_raw(3, die_or_wait)
    for _, text in outcomes[:2]:
        assert "no sign of life from rank 2: died or was killed" in text, text


def test_bounded_gives_up_in_time_and_when_woken() -> None:
    never = threading.Event()
    with pytest.raises(LaunchError, match=r"^gloo did not start within 0.05 s$"):
        report.bounded(never.wait, 0.05, "gloo did not start")
    woken = threading.Event()
    woken.set()
    with pytest.raises(LaunchError, match=r"^gloo did not start: another rank failed$"):
        report.bounded(never.wait, 60, "gloo did not start", woken)
    never.set()
    assert report.bounded(lambda: 3, 60, "", threading.Event()) == 3
    with pytest.raises(KeyError):
        report.bounded(lambda: {}[1], 60)
