"""Bandwidth of small groups of processes: a node's all-reduce and its pairs, and pairs across nodes.

Each group is made on the store directly, without a group of all ranks: with one member dead or stuck, only its own
group fails, within the limit.
"""
from __future__ import annotations

import contextlib
import ctypes
import os
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.errors import LaunchError
from megatron.parallel.report import bounded, host_name_is_local
from megatron.preflight.measure.device import answers, finish
from megatron.preflight.network import versions_in

_ROUNDS = 5
_ABORT_S = 3.0
# NCCL's own watchdog would end the process; our limits are shorter.
_WATCHDOG = timedelta(minutes=30)


@dataclass(frozen=True)
class Sizes:
    """Bytes of one message, and messages in a round."""

    node_bytes: int
    pair_bytes: int
    calls: int


SIZES = {"cuda": Sizes(256 * 2**20, 64 * 2**20, 4), "cpu": Sizes(2**20, 2**20, 2)}


class Groups:
    """Makes groups and keeps them: RCCL's are freed with the process, which asks nothing of the other members.

    connect  opens a new connection to the store; one that a stuck group waits in is not used again
    """

    def __init__(self, connect: Callable[[], Any], rank: int, device: torch.device) -> None:
        self._connect = connect
        self._store: Any = None
        self._rank = rank
        self._device = device
        self._kept: list[Any] = []

    def open(self, name: str, members: Sequence[int], limit_s: float) -> Any:
        """A process group of `members`, in which this rank has its place in their order."""
        if self._store is None:
            self._store = self._connect()
        store = dist.PrefixStore(name, self._store)
        place = members.index(self._rank)
        group: Any
        if self._device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _WATCHDOG
            group = dist.ProcessGroupNCCL(store, place, len(members), options)
        else:
            group = dist.ProcessGroupGloo(store, place, len(members), timedelta(seconds=limit_s))
        self._kept.append(group)
        return group

    def measure(self, name: str, members: Sequence[int], whole_node: bool, limit_s: float) -> dict[str, Any]:
        """Bandwidths of a group, or "error" and whether the device is "blocked" by what did not end."""
        found: dict[str, Any] = {}

        def work(group: Any, place: int) -> None:
            sizes = SIZES[self._device.type]
            if whole_node:
                found["allreduce_gb_per_s"] = allreduce_bandwidth(group, place, len(members), self._device, limit_s)
            partner = place ^ 1
            if partner < len(members):
                found["partner"] = members[partner]
                size = sizes.node_bytes if whole_node else sizes.pair_bytes
                found["p2p_gb_per_s"] = p2p_bandwidth(group, place, partner, self._device, size, limit_s)

        return found | self._attempt(name, members, limit_s, work)

    def reduce(self, name: str, members: Sequence[int], limit_s: float) -> dict[str, Any]:
        """Use a group once; "error" and "blocked" as above."""

        def work(group: Any, place: int) -> None:
            tensor = torch.ones(1024, device=self._device)
            group.allreduce([tensor]).wait()
            finish(self._device, limit_s)
            if tensor[-1].item() != len(members):
                raise RuntimeError(f"all-reduce of {len(members)} ones gave {tensor[-1].item():g}")

        return self._attempt(name, members, limit_s, work)

    def _attempt(
        self, name: str, members: Sequence[int], limit_s: float, work: Callable[[Any, int], None]
    ) -> dict[str, Any]:
        """Do `work` with a new group and this rank's place in it; {} or what went wrong."""

        def body() -> None:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            work(self.open(name, members, limit_s), members.index(self._rank))

        try:
            bounded(body, limit_s, "the messages did not end")
        except (RuntimeError, LaunchError, ValueError) as error:
            text = (str(error).splitlines() or [type(error).__name__])[0][:200]
            return {"error": text, "blocked": self._recover()}
        return {}

    def _recover(self) -> bool:
        """Give up what is under way; whether the device is of no use for further groups."""
        self._store = None
        if self._device.type == "cpu" or not self._kept:
            return False
        with contextlib.suppress(RuntimeError, LaunchError, AttributeError):
            bounded(self._kept[-1].abort, _ABORT_S)
        try:
            return bool(bounded(lambda: answers(self._device), _ABORT_S))
        except (RuntimeError, LaunchError):
            return True


def allreduce_bandwidth(group: Any, place: int, size: int, device: torch.device, limit_s: float) -> float:
    """Bus bandwidth in GB/s of an all-reduce: each rank sends and receives 2(n-1)/n of its bytes in a ring.

    Raises RuntimeError where the sum is wrong.
    """
    sizes = SIZES[device.type]
    tensor = torch.full((sizes.node_bytes // 4,), float(place + 1), device=device)
    group.allreduce([tensor]).wait()
    finish(device, limit_s)
    sums = (tensor[0].item(), tensor[-1].item())
    if sums != (size * (size + 1) / 2,) * 2:
        raise RuntimeError(f"all-reduce of 1 to {size} gave {sums[0]:g} and {sums[1]:g}")
    tensor.zero_()
    seconds = _median_seconds(lambda: group.allreduce([tensor]).wait(), device, sizes.calls, limit_s)
    return 2 * (size - 1) / size * sizes.node_bytes / seconds / 1e9


def p2p_bandwidth(group: Any, place: int, partner: int, device: torch.device, size: int, limit_s: float) -> float:
    """GB/s of messages that go to and fro between two members, one at a time."""
    outgoing = torch.full((size,), place % 100, device=device, dtype=torch.uint8)
    incoming = torch.empty_like(outgoing)

    def exchange() -> None:
        steps = [lambda: group.send([outgoing], partner, 0), lambda: group.recv([incoming], partner, 0)]
        for step in steps if place < partner else steps[::-1]:
            step().wait()

    exchange()
    finish(device, limit_s)
    if int(incoming[-1].item()) != partner % 100:
        raise RuntimeError(f"a message of member {partner} arrived as something else")
    return 2 * size / _median_seconds(exchange, device, SIZES[device.type].calls, limit_s) / 1e9


def _median_seconds(work: Callable[[], Any], device: torch.device, calls: int, limit_s: float) -> float:
    rounds = []
    for _ in range(_ROUNDS):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        finish(device, limit_s)
        rounds.append((time.perf_counter() - start) / calls)
    return sorted(rounds)[_ROUNDS // 2]


def prepare_environment(one_node: bool, device: torch.device) -> Path | None:
    """Set what gloo and RCCL read when they start; the file into which RCCL then writes what it uses."""
    if one_node and not host_name_is_local():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type != "cuda":
        return None
    log = Path(tempfile.gettempdir(), f"megatron-preflight-rccl-{os.getpid()}.log")
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=str(log))
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    return log


def network_of(log: Path | None) -> dict[str, Any]:
    """"network": which one RCCL or NCCL says that it uses ("Socket" is TCP, "" not told); "versions" of its plugin and
    of what is around it."""
    try:
        text = log.read_text(errors="replace") if log else ""
    except OSError:
        text = ""
    found = re.findall(r"Using network (\S[^\n]*)", text)
    own = {"ROCm": torch.version.hip, "libfabric": _libfabric_version()}
    versions = versions_in([text]) | {name: version for name, version in own.items() if version}
    return {"network": found[-1].strip() if found else "", "versions": versions}


def _libfabric_version() -> str:
    """Of the library that a plugin has loaded into this process."""
    try:
        version: int = ctypes.CDLL("libfabric.so.1", mode=os.RTLD_NOLOAD).fi_version()
    except (OSError, AttributeError):
        return ""
    return f"{version >> 16}.{version & 0xFFFF}"
