"""Simulated network of benchmarks/delayed_links.py: the order and earliest time of completions."""

from __future__ import annotations

import importlib.util
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.processes import run_processes

pytestmark = pytest.mark.campaign("benchmarks")
LATENCY_S, GIGABYTES_PER_S = 0.02, 0.05
BYTES = 1_000_000  # 20 ms on such a link


def delayed_links() -> Any:
    """Load the module, which is a script's neighbour and in no package."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / "delayed_links.py"
    spec = importlib.util.spec_from_file_location("delayed_links", path)
    assert spec and spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def start() -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    return delayed_links().install(LATENCY_S, GIGABYTES_PER_S)


def collectives(rank: int) -> list[tuple[str, float, float, bool]]:
    """Return (kind, bytes, seconds to the end of the call, right result) for each collective."""
    links = start()
    n, found = dist.get_world_size(), []
    ones, small = torch.ones(BYTES // 4), torch.ones(BYTES // 4 // n)
    whole = torch.empty_like(ones)
    calls = [
        (lambda: dist.all_reduce(whole.copy_(ones)), lambda: bool((whole == n).all())),
        (lambda: dist.reduce(whole.copy_(ones), 0), lambda: rank != 0 or bool((whole == n).all())),
        (lambda: dist.broadcast(whole.fill_(rank), 1), lambda: bool((whole == 1).all())),
        (
            lambda: dist.all_gather_single(whole, small.fill_(rank)),
            lambda: float(whole.sum()) == 1 * BYTES // 4 // n,
        ),
        (lambda: dist.reduce_scatter_single(small, ones), lambda: bool((small == n).all())),
        (lambda: dist.barrier(), lambda: True),
    ]
    for call, right in calls:
        call()
        message, ended = links.messages[-1], time.monotonic()
        found.append((message.kind, message.size_bytes, ended - message.begun, right()))
    links.uninstall()
    dist.all_reduce(ones)
    assert len(links.messages) == len(calls), "a message after uninstall was delayed"
    return found


def test_every_collective_takes_at_least_its_time_and_keeps_its_result() -> None:
    for found in run_processes(2, collectives):
        # In a ring of two ranks, an all-reduce sends the whole tensor, a reduce-scatter or an
        # all-gather half of it.
        wire = [BYTES, BYTES, BYTES, BYTES / 2, BYTES / 2, 0]
        assert [size for _, size, _, _ in found] == wire
        for kind, size, seconds, right in found:
            assert right, kind
            # Allow a microsecond for the rounding of times.
            assert seconds >= LATENCY_S + size / (GIGABYTES_PER_S * 1e9) - 1e-6, kind


def one_late(rank: int) -> tuple[float, float, float]:
    """Post a collective late on rank 1; return (own post, begin of the message, its arrival)."""
    links = start()
    time.sleep(0.1 * rank)
    dist.all_reduce(torch.ones(1))
    (message,) = links.messages
    return message.posted, message.begun, time.monotonic()


def test_a_message_begins_when_its_last_rank_has_posted_it() -> None:
    # On a busy machine rank 0 may be the one that posts late.
    early, late = sorted(run_processes(2, one_late))
    assert early[1] == late[1] == late[0]
    assert early[0] < late[0]
    assert min(early[2], late[2]) >= late[0] + LATENCY_S


def queue_of_three(rank: int) -> tuple[list[bool], list[tuple[float, float, float]]]:
    """Send three messages from rank 0 to rank 1 and one back, and wait for the last one first.

    Return whether each claimed to be complete before it arrived, and (begun, departs, arrives).
    """
    links = start()
    tensors = [torch.full((BYTES // 4,), float(i)) for i in range(3)]
    back = torch.ones(1)
    isend: Any = dist.isend
    irecv: Any = dist.irecv
    if rank == 0:
        works = [isend(tensor, 1) for tensor in tensors] + [irecv(back, 1)]
    else:
        works = [irecv(tensor.zero_(), 0) for tensor in tensors] + [isend(back, 0)]
    asked = [(work.is_completed(), time.monotonic()) for work in works]
    works[3].wait()
    works[2].wait()
    ended = time.monotonic()
    assert [work.is_completed() for work in works[:2]] == [True, True], (
        "an older message of the link was not there"
    )
    assert [float(tensor[0]) for tensor in tensors] == [0.0, 1.0, 2.0]
    assert ended >= links.messages[2].arrives
    # On a busy machine a message may have arrived long before it is asked for.
    arrivals = [message.arrives for message in links.messages]
    early = [
        complete and when < arrival
        for (complete, when), arrival in zip(asked, arrivals, strict=True)
    ]
    return early, [(message.begun, message.departs, message.arrives) for message in links.messages]


def test_messages_of_a_link_follow_each_other_and_directions_do_not() -> None:
    first, second = run_processes(2, queue_of_three)
    carrying = BYTES / (GIGABYTES_PER_S * 1e9)
    near = 1e-6  # seconds: rounding of times
    for early, messages in (first, second):
        assert early == [False] * 4, "a message that had just been posted was complete"
        begun, departs, arrives = zip(*messages, strict=True)
        # The clock is that of the whole machine and the times are exchanged, so both ends compute
        # the same.
        assert departs == pytest.approx([message[1] for message in first[1]], abs=near)
        for i in range(2):
            # The next message waits for the link, not for the arrival: latency blocks no message.
            assert departs[i + 1] == pytest.approx(
                max(begun[i + 1], departs[i] + carrying), abs=near
            )
        assert arrives == pytest.approx(
            [d + carrying + LATENCY_S for d in departs[:3]] + [arrives[3]], abs=near
        )
        # The other direction is free: its message waits for none of the three.
        assert departs[3] == pytest.approx(begun[3], abs=near)


def test_a_delay_that_is_none_is_refused() -> None:
    module = delayed_links()
    for latency, bandwidth in ((-1.0, 1.0), (0.0, 0.0), (0.0, -1.0), (0.0, math.nan)):
        with pytest.raises(ValueError):
            module.install(latency, bandwidth)
